"""Evaluate drafts against autoregressive decoding: `python -m pipedraft.eval --help`."""

import importlib
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from pipedraft.cli import (
    Options,
    leave_at_interrupts,
    run_command,
    subcommand,
)

if __name__ == "__main__":
    leave_at_interrupts()

from pipedraft.eval.arguments import (
    EdgeOptions,
    EnginesOptions,
    EvalOptions,
    ParityOptions,
    TableOptions,
)
from pipedraft.inference.arguments import backend_of

SUBCOMMANDS: dict[str, str | type[Options]] = {
    "compare": "pipedraft.eval.compare",
    "edge": EdgeOptions,
    "engines": EnginesOptions,
    "parity": ParityOptions,
    "replay": "pipedraft.eval.replay",
    "report": "pipedraft.eval.report",
    "table": TableOptions,
}
"""First word on the command line -> its options, or the module whose ``run`` gets the other words.

Modules that need torch are imported after the options are read.
"""


build_parser = EvalOptions.parser


def run(argv: Sequence[str]) -> None:
    """Run the whole command.

    Bad input raises ValueError. Cheap checks run before the models load.

    Args:
        argv: a subcommand and its arguments, or evaluation options.
    """
    if argv and not argv[0].startswith("-"):
        run_subcommand(subcommand(argv[0], list(SUBCOMMANDS)), argv[1:])
        return
    options = EvalOptions.read(argv)
    with backend_of(options) as cluster, ExitStack() as held:
        if cluster is None or cluster.is_controller:
            from pipedraft.eval.command import evaluate_drafts

            evaluate_drafts(options, argv, cluster, held)
        else:
            cluster.serve()


def run_subcommand(name: str, argv: Sequence[str]) -> None:
    if name == "edge":
        edge_options = EdgeOptions.read(argv)
        from pipedraft.eval.edge import decode_links

        print(decode_links(edge_options, argv))
    elif name == "engines":
        engines_options = EnginesOptions.read(argv)
        from pipedraft.eval.engines import run_engines

        run_engines(engines_options)
    elif name == "parity":
        parity_options = ParityOptions.read(argv)
        from pipedraft.eval.parity import compare_all

        compare_all(parity_options)
    elif name == "table":
        table_options = TableOptions.read(argv)
        from pipedraft.eval.published import make_table

        make_table(table_options, argv)
    else:
        importlib.import_module(str(SUBCOMMANDS[name])).run(argv)


def main() -> None:
    run_command(lambda: run(sys.argv[1:]))


if __name__ == "__main__":
    main()
