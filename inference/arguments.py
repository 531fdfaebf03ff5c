"""Command-line arguments about drafting that several commands share."""

import argparse
from typing import Any

from pipedraft.inference.shapes import Expansion


def add_drafting_arguments(parser: argparse.ArgumentParser) -> None:
    """Settings of the schedules that let a tree travel in segments; the defaults are FlowSpec's."""
    group = parser.add_argument_group(
        "trees that travel in segments (naive_pp, pruned_pp, flowspec)"
    )
    add = group.add_argument
    add("--micro-batches", type=int, metavar="M", help="segments (default: stages + 1)")
    add("--level-order", action="store_true", help="send level by level, not the best rows first")
    add("--no-expansion", action="store_true", help="flowspec: no new guesses inside a round")
    add(
        "--expansion-depth",
        type=int,
        metavar="D",
        help="flowspec: levels of the fresh tree after a commit (default: as many as the draft can "
        "make beside one step)",
    )
    add("--expansion-tokens", type=int, metavar="L", help="flowspec: its draft tokens (default 64)")
    add(
        "--refill-depth",
        type=int,
        metavar="D",
        help="flowspec: levels added when the returning segment was pruned to nothing (default 2)",
    )


def drafting_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Fields of ``EngineConfig`` from these arguments."""
    given = {
        "depth": options.expansion_depth,
        "num_tokens": options.expansion_tokens,
        "refill_depth": options.refill_depth,
    }
    expansion = Expansion(
        enabled=not options.no_expansion,
        by_score=not options.level_order,
        **{name: value for name, value in given.items() if value is not None},
    )
    return {"micro_batches": options.micro_batches, "expansion": expansion}
