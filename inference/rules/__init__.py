"""Acceptance rules, their random numbers, and sampling filters."""

from typing import Literal, get_args

RuleName = Literal[
    "match",
    "gumbel",
    "rejection",
    "tail_escape",
    "topk",
    "argmax",
    "block",
    "recursive",
    "traversal",
]

RULE_NAMES: list[RuleName] = list(get_args(RuleName))
SAMPLING_RULES = ("rejection", "tail_escape", "topk")
"""Rules for draft tokens sampled from the draft's distribution."""
ROUND_RULES = ("block", "recursive", "traversal")
"""Rules that test a round as a whole. Their schedules verify whole rounds and cross no link."""
