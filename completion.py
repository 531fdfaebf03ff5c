"""Print the script by which a shell completes `pipedraft`: commands, options, their values, files.

The script is static (made by shtab from the parsers themselves), so that TAB starts no Python and
loads no torch; print it again after an update.
"""

import argparse
import importlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from pipedraft.errors import leave_at_interrupts, run_command

if __name__ == "__main__":
    leave_at_interrupts()

from pipedraft.__main__ import COMMANDS
from pipedraft.options import Options, option

EXAMPLE = """example:
  mkdir -p ~/.local/share/bash-completion/completions
  pipedraft completion bash > ~/.local/share/bash-completion/completions/pipedraft

  pipedraft completion zsh > ~/.zfunc/_pipedraft
  and before compinit in ~/.zshrc: fpath+=~/.zfunc

bash reads that folder if its package bash-completion is installed; without it, or at once:
  source <(pipedraft completion bash)"""


@dataclass(frozen=True, kw_only=True)
class CompletionOptions(Options):
    PROG: ClassVar[str] = "pipedraft completion"
    DESCRIPTION: ClassVar[str] = __doc__ or ""
    EXAMPLE: ClassVar[str] = EXAMPLE

    shell: Literal["bash", "zsh"] = option(positional=True)
    """the shell that reads the script"""


build_parser = CompletionOptions.parser


def whole_parser() -> argparse.ArgumentParser:
    """One parser of every command, with its subcommands.

    The module of a command has ``build_parser``; one whose first word may be a subcommand has
    ``SUBCOMMANDS``, name to module, as well.
    """
    whole = argparse.ArgumentParser(prog="pipedraft")
    whole.add_argument("--version", action="version", version="")
    commands = whole.add_subparsers()
    for name, (folder, summary, _) in COMMANDS.items():
        module = importlib.import_module(module_name(folder))
        parser = commands.add_parser(name, help=summary)
        if hasattr(module, "build_parser"):
            copy_actions(module.build_parser(), parser)
        found = {
            part: getattr(kind, "parser", None) or importlib.import_module(kind).build_parser
            for part, kind in getattr(module, "SUBCOMMANDS", {}).items()
        }
        if found:
            parts = parser.add_subparsers()
            for part, source in found.items():
                copy_actions(source(), parts.add_parser(part, help=""))
    return whole


def module_name(folder: str) -> str:
    """What ``python -m`` runs for a folder, or for a file, of the package."""
    is_folder, module = (Path(__file__).parent / folder).is_dir(), folder.replace("/", ".")
    return f"pipedraft.{module}.__main__" if is_folder else f"pipedraft.{module}"


def copy_actions(source: Any, into: argparse.ArgumentParser) -> None:
    """Add what ``into`` does not have yet, with values or files to complete."""
    known = into._option_string_actions.keys()
    for action in source._actions:
        if not known & set(action.option_strings):
            complete_values(action)
            into._add_action(action)


def complete_values(action: Any) -> None:
    """Choices that a metavar lists, and files for every other text."""
    import shtab

    # jsonargparse keeps the values of a Literal and of a bool there alone.
    listed = re.fullmatch(r"\{(.+)\}", action.metavar) if isinstance(action.metavar, str) else None
    if listed and not action.choices:
        action.choices = listed[1].split(",")
    kind = getattr(action, "_typehint", action.type)
    takes_text = action.nargs != 0 and kind in (None, str, Path)
    if takes_text and not action.choices:
        action.complete = shtab.FILE


def main() -> None:
    options = CompletionOptions.read(sys.argv[1:])
    try:
        import shtab
    except ImportError as error:
        raise ValueError(
            "shtab: not installed, and it makes the script; pip install 'pipedraft[completion]'"
        ) from error
    print(shtab.complete(whole_parser(), options.shell))


if __name__ == "__main__":
    run_command(main)
