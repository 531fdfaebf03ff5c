"""How every command ends: 0 done, 2 bad input in one line, 1 failure."""

import os
import sys
from collections.abc import Callable
from pathlib import Path


class UsageError(ValueError):
    """Bad input. The message is one line that names the field, the value and the fix."""


class Failure(RuntimeError):
    """Nothing that the input could fix, as a network that is down; one line, status 1."""


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
