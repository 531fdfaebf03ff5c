"""Evaluate drafts against autoregressive decoding: `python -m pipedraft.eval --help`."""

import importlib
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from ..endings import leave_at_interrupts, run_command
from ..options import subcommand

if __name__ == "__main__":
    leave_at_interrupts()

from ..inference.arguments import backend_of, check_paths
from .arguments import COMMANDS, EvalOptions, ParityOptions

SUBCOMMANDS = sorted(["compare", "parity", "replay", "report", *COMMANDS])

build_parser = EvalOptions.parser


def run(argv: Sequence[str]) -> None:
    """Run the whole command.

    Bad input raises ValueError. Cheap checks run before the models load.

    Args:
        argv: a subcommand and its arguments, or evaluation options.
    """
    if argv and not argv[0].startswith("-"):
        name, words = subcommand(argv[0], SUBCOMMANDS), argv[1:]
        if name in COMMANDS:
            COMMANDS[name].start(words)
            return
        # Read here, because the subcommand's module imports torch.
        read = [ParityOptions.read(words)] if name == "parity" else []
        for parity in read:
            check_paths([parity.checkpoint], parity.target, None)
        importlib.import_module(f".{name}", __package__).run(*read, words)
        return
    flags = {word.partition("=")[0] for word in argv}
    for name in flags & COMMANDS.keys():  # commands that an option chooses
        COMMANDS[name].start(argv)
        return
    options = EvalOptions.read(argv)
    check_paths(options.checkpoint, options.target, options.draft_model)
    with backend_of(options) as cluster, ExitStack() as held:
        if cluster is None or cluster.is_controller:
            from .command import evaluate_drafts

            command = ["python", "-m", "pipedraft.eval", *argv]
            print(evaluate_drafts(options, command, cluster, held).text)
        else:
            cluster.serve()


def main() -> None:
    run_command(lambda: run(sys.argv[1:]))


if __name__ == "__main__":
    main()
