"""Acceptance rules, their random numbers, and sampling filters."""

from typing import Literal

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
