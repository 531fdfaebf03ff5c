"""Command-line arguments about drafting that several commands share."""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pipedraft.inference.shapes import Expansion, MicroBatch


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up; give e.g. 4")
    return int(text)


def temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a temperature; give 0 (greedy) or more")
    return value


def add_drafting_arguments(parser: argparse.ArgumentParser) -> None:
    """Settings of the schedules: when drafts are made, which trees or micro-batches travel."""
    parser.add_argument(
        "--timing",
        choices=["input_states", "output_states"],
        default="input_states",
        help="spd: the module reads the states before the step, beside the stages, or those after "
        "it, one stage deeper, while they wait (default: input_states)",
    )
    _add_segment_arguments(parser)
    _add_micro_batch_arguments(parser)


def _add_segment_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "trees that travel in segments (naive_pp, pruned_pp, flowspec)"
    )
    add = group.add_argument
    add("--micro-batches", type=int, metavar="M", help="segments (default: stages + 1)")
    add("--level-order", action="store_true", help="level by level, not the best guesses first")
    add("--no-expansion", action="store_true", help="flowspec: no new guesses inside a round")
    add(
        "--expansion-depth",
        type=int,
        metavar="D",
        help="flowspec: draft forwards per step (default: as many as fit beside it)",
    )
    add(
        "--step-tokens",
        type=int,
        metavar="L",
        help="flowspec: guesses that one of them continues and adds (default 32)",
    )
    add(
        "--tree-first",
        action="store_true",
        help="flowspec, as published: after a miss the stages wait until a whole tree is drafted, "
        "and a fresh tree of D levels is merged after each commit",
    )
    add(
        "--expansion-tokens",
        type=int,
        metavar="L",
        help="with --tree-first: draft tokens of a fresh tree (default 64)",
    )
    add(
        "--refill-depth",
        type=int,
        metavar="D",
        help="with --tree-first: levels added when the returning segment was pruned to nothing "
        "(default 2)",
    )


def _add_micro_batch_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("micro-batches of guesses (pipeinfer)")
    add = group.add_argument
    add("--draft-tokens", type=int, metavar="M", help="guesses of one micro-batch (default 3)")
    add("--branches", type=int, metavar="B", help="branches of one micro-batch (default 1)")
    add(
        "--accept",
        type=float,
        metavar="P",
        help="a branch ends where the draft's best token is less likely (default 0: never)",
    )
    add(
        "--split",
        type=float,
        metavar="P",
        help="a branch forks into next best tokens that are more likely (default 0.1)",
    )
    add(
        "--recovery",
        type=float,
        metavar="P",
        help="raises both thresholds with each micro-batch since the last verdict (default 0)",
    )
    add(
        "--decay",
        type=float,
        metavar="P",
        help="lowers both with each of them that came out empty (default 0)",
    )
    add(
        "--give-up",
        type=float,
        metavar="P",
        help="draft rarely while a smaller part of the latest guesses was right (default 0.1)",
    )
    add(
        "--restart",
        action="store_true",
        help="as published: draft from the root again after every verdict",
    )
    add(
        "--max-in-flight",
        type=int,
        metavar="R",
        help="draft nothing while as many tokens are under way (default: no limit)",
    )


def drafting_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Fields of ``EngineConfig`` from these arguments."""
    expansion = Expansion(
        enabled=not options.no_expansion,
        by_score=not options.level_order,
        tree_first=options.tree_first,
        **_given(
            depth=options.expansion_depth,
            step_tokens=options.step_tokens,
            num_tokens=options.expansion_tokens,
            refill_depth=options.refill_depth,
        ),
    )
    micro_batch = MicroBatch(
        restart=options.restart,
        **_given(
            size=options.draft_tokens,
            branches=options.branches,
            accept=options.accept,
            split=options.split,
            recovery=options.recovery,
            decay=options.decay,
            give_up=options.give_up,
            max_in_flight=options.max_in_flight,
        ),
    )
    return {
        "timing": options.timing,
        "micro_batches": options.micro_batches,
        "expansion": expansion,
        "micro_batch": micro_batch,
    }


def _given(**values: Any) -> dict[str, Any]:
    """The arguments that are on the command line; the others have the class's defaults."""
    return {name: value for name, value in values.items() if value is not None}


def _layer_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def add_backend_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the stages run."""
    group = parser.add_argument_group("stages as processes (--backend process, under torchrun)")
    add = group.add_argument
    add(
        "--backend",
        choices=["local", "process"],
        default="local",
        help="local: one process and the virtual clock; process: one rank per stage, the draft on "
        "rank 0 beside the first stage, or alone if there is one rank more",
    )
    add(
        "--boundaries",
        type=_layer_numbers,
        default=(),
        metavar="0,B,..,L",
        help="first layer of each stage, then the number of layers (default: near-even)",
    )
    add(
        "--links",
        choices=["auto", "device", "host"],
        default="auto",
        help="way of hidden states between ranks; device: NCCL between GPUs, host: through host "
        "memory (default: device where every rank has a GPU of its own)",
    )
    add(
        "--step-timeout",
        type=float,
        default=8.0,
        metavar="S",
        help="a forward pass of a stage that takes longer ends the run (default 8 s)",
    )


@contextmanager
def backend_of(options: argparse.Namespace) -> Iterator[Any]:
    """The cluster that the options ask for, entered; None for the local backend."""
    from pipedraft.inference.transport import is_launched

    if options.backend == "local":
        if is_launched() and int(os.environ["WORLD_SIZE"]) > 1:
            if os.environ["RANK"] != "0":
                sys.exit(2)  # rank 0 says it
            raise ValueError(
                "--backend: 'local' runs in one process; add --backend process under torchrun"
            )
        yield None
        return
    from pipedraft.inference.transport.cluster import Cluster
    from pipedraft.inference.transport.watch import Limits

    with Cluster(Limits(step_s=options.step_timeout), options.links) as cluster:
        yield cluster
