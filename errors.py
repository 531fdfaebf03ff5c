"""How every command ends: 0 done, 2 bad input in one line, 1 failure."""

import os
import sys
from collections.abc import Callable


class UsageError(ValueError):
    """Bad input. The message is one line that names the field, the value and the mend."""


def run_command(main: Callable[[], None]) -> None:
    """Run an entry point and exit with its status.

    ``ValueError`` and a missing file are bad input (status 2, one line on stderr); anything else
    is a failure of the program (traceback, status 1). ``PIPEDRAFT_TRACEBACK=1`` shows the
    traceback of bad input as well.
    """
    try:
        main()
    except (ValueError, FileNotFoundError) as error:
        if os.environ.get("PIPEDRAFT_TRACEBACK"):
            raise
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)
