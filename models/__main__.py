"""Import a published head, push a checkpoint to the Hub, export it for an engine, or convert a GGUF
file."""

import sys

from ..endings import leave_at_interrupts, run_command, show_help
from ..errors import UsageError
from ..options import HELP_FLAGS, subcommand

if __name__ == "__main__":
    leave_at_interrupts()

from .exchange.commands import SUBCOMMANDS


def usage() -> str:
    about, *others = (
        " ".join((k or "").split()) for k in (__doc__, *(c.__doc__ for c in SUBCOMMANDS.values()))
    )
    lines = [f"  {name:<10}{text}" for name, text in zip(SUBCOMMANDS, others, strict=True)]
    examples = [kind.EXAMPLE.partition("\n")[2].rstrip() for kind in SUBCOMMANDS.values()]
    lines = ["usage: pipedraft models <command> ...", "", about, "", *lines, "", "examples:"]
    return "\n".join([*lines, *examples])


def main() -> None:
    words = sys.argv[1:]
    if words and words[0] in HELP_FLAGS:
        show_help(usage())
    if not words:
        raise UsageError(f"command: missing; give {' or '.join(SUBCOMMANDS)} (see --help)")
    SUBCOMMANDS[subcommand(words[0], list(SUBCOMMANDS))].read(words[1:]).run()


if __name__ == "__main__":
    run_command(main)
