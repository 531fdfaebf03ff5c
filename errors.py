"""How every command ends: 0 done, 2 bad input in one line, 1 failure."""

import argparse
import difflib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn


class UsageError(ValueError):
    """Bad input. The message is one line that names the field, the value and the fix."""


class Failure(RuntimeError):
    """Nothing that the input could fix, as a network that is down; one line, status 1."""


class Parser(argparse.ArgumentParser):
    """Bad arguments raise ``UsageError``: one line, no usage text, the nearest option named.

    Descriptions and epilogs are printed as they are written, and options are not abbreviated.
    """

    def __init__(self, **settings: Any) -> None:
        plain: dict[str, Any] = {
            "formatter_class": argparse.RawDescriptionHelpFormatter,
            "allow_abbrev": False,
        }
        super().__init__(**(plain | settings))

    def error(self, message: str) -> NoReturn:
        options = [option for action in self._actions for option in action.option_strings]
        unknown, _, words = message.partition("unrecognized arguments: ")
        if not unknown and words:
            word = words.split()[0].partition("=")[0]
            near = difflib.get_close_matches(word, options, n=1)
            hint = f"did you mean {near[0]}? (" if near else "("
            raise UsageError(f"unknown argument {word!r}; {hint}see --help)")
        before, _, missing = message.partition("the following arguments are required: ")
        if not before and missing:
            raise UsageError(f"{missing}: missing; see --help for an example")
        choices = message.removeprefix("one of the arguments ").removesuffix(" is required")
        if message == f"one of the arguments {choices} is required":
            raise UsageError(f"{choices.replace(' ', ' or ')}: missing; see --help for an example")
        raise UsageError(f"{message.removeprefix('argument ')} (see --help)")


def make_folder(field: str, folder: Path) -> None:
    """Create a folder for results; ``field`` is the option that named it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{field}: {str(folder)!r} cannot be made ({error.strerror}); give another folder"
        ) from error


def run_command(main: Callable[[], None]) -> None:
    """Run an entry point and exit with its status.

    ``ValueError`` and a missing file are bad input (status 2, one line on stderr), ``Failure`` is
    one of the surroundings (status 1, one line); anything else is a failure of the program
    (traceback, status 1). ``PIPEDRAFT_TRACEBACK=1`` shows the traceback of the first two as well.
    """
    try:
        main()
    except (ValueError, FileNotFoundError, Failure) as error:
        if os.environ.get("PIPEDRAFT_TRACEBACK"):
            raise
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        sys.exit(1 if isinstance(error, Failure) else 2)
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)
