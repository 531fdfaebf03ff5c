"""How every command ends: 0 done, 2 bad input in one line, 1 failure, 130 after Ctrl-C."""

import errno
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from types import FrameType

from safetensors import SafetensorError

LINE_CHARACTERS = 1000
"""Longest message; of a longer one the beginning and the end."""
INPUT_ERRORS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)
INPUT_CODES = {errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL}
STORAGE_CODES = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}


class UsageError(ValueError):
    """Bad input. The message is one line that names the field, the value and the fix."""


class Failure(RuntimeError):
    """Nothing that the input could fix, as a network that is down; one line, status 1."""


def check_ranges(values: object, ranges: Mapping[str, str], prefix: str = "") -> None:
    """Raise UsageError for a number outside its range, NaN too; null is in every one.

    Args:
        values: has the attributes that ``ranges`` names, numbers or sequences of numbers.
        ranges: name -> interval as in mathematics, ``[0, inf)``, and perhaps a hint behind it.
        prefix: of the names, for messages.
    """
    for name, interval in ranges.items():
        interval, bracket, hint = interval.partition(re.search(r"[])]", interval)[0])  # type: ignore[index]
        least, most = map(float, interval[1:].split(","))
        value = getattr(values, name)
        for one in value if isinstance(value, tuple | list) else (value,):
            if one is None or (interval[0] == "[" and one == least):
                continue
            if not (least < one < most or (bracket == "]" and one == most)):
                low = f"{'at least' if interval[0] == '[' else 'above'} {least:g}"
                high = f"{'at most' if bracket == ']' else 'below'} {most:g}"
                raise UsageError(f"{prefix}{name}: {one}; give {low} and {high}{hint}")


def make_folder(field: str, folder: Path) -> None:
    """Create a folder for results, in which files can be made; ``field`` named it.

    Raises:
        UsageError: it is a file, cannot be made, or cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise UsageError(
            f"{field}: {str(folder)!r} cannot be made ({error.strerror}); give another folder"
        ) from error


def one_line(text: str) -> str:
    """A message from anywhere as one line for a terminal: no control characters, no passwords."""
    line = re.sub(r"(\w://)[^/\s@]*@", r"\1***@", " ".join(text.split()))
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    if len(line) <= LINE_CHARACTERS:
        return line
    half = LINE_CHARACTERS // 2
    return f"{line[:half]} ... {line[-half:]}"


def run_command(main: Callable[[], None]) -> None:
    """Run an entry point and exit with its status.

    ``ValueError`` and a path that cannot be used are bad input (status 2, one line on stderr);
    ``Failure`` and every other ``OSError``, as that of a full disk, are of the surroundings (status
    1, one line); anything else is a failure of the program (traceback, status 1).
    ``PIPEDRAFT_TRACEBACK=1`` shows the traceback of the first two as well.
    """
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if isinstance(sys.stdout, TextIOWrapper):  # a terminal may lack a text's characters
            sys.stdout.reconfigure(errors="replace")
        try:
            main()
        except SystemExit:
            print(end="", flush=True)
            raise
        print(end="", flush=True)
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        _forget_output()
        sys.exit(130)
    except Exception as error:
        found = _status(error)
        if found is None or os.environ.get("PIPEDRAFT_TRACEBACK"):
            raise
        status, text = found
        line = f"error: {one_line(text)}"
        print(line, file=sys.stderr)
        _tell_launcher(line)
        _forget_output()
        sys.exit(status)


def _tell_launcher(line: str) -> None:
    """torchrun, which says much when one of its ranks has ended, then ends with this line."""
    place = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if place:
        said = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(place).write_text(json.dumps({"message": said}))


def leave_at_interrupts() -> None:
    """End the process with one line at Ctrl-C until ``run_command``: a start takes seconds.

    Libraries that are being loaded would make another error of KeyboardInterrupt.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, b"error: interrupted\n")
    os._exit(130)


def _status(error: Exception) -> tuple[int, str] | None:
    """Exit status and message; None: a fault of the program."""
    disk = storage_error(error)
    if disk is not None:
        is_said = isinstance(error, ValueError | Failure)
        return 1, str(error) if is_said else describe_os_error(disk)
    if isinstance(error, BrokenPipeError):
        return 1, "output: its reader has closed it"
    if isinstance(error, UnicodeDecodeError):
        return 2, f"input: not UTF-8 text ({error.reason} at byte {error.start}); convert it"
    if isinstance(error, Failure | SafetensorError):  # what reads weights explains its own
        return 1, str(error)
    if isinstance(error, MemoryError):
        return 1, f"memory: not enough ({str(error) or 'of this machine'}); ask for less"
    if isinstance(error, OSError) and not isinstance(error, ValueError):
        is_input = isinstance(error, INPUT_ERRORS) or error.errno in INPUT_CODES
        return 2 if is_input else 1, describe_os_error(error)
    return (2, str(error)) if isinstance(error, ValueError) else None


def describe_os_error(error: OSError) -> str:
    """The error as ``'out/x': Permission denied; ...``, or in its own words if it has more."""
    if error.errno is None or error.strerror is None:
        return str(error)
    place = "output" if error.filename is None else repr(os.fspath(error.filename))
    fix = "; make room" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else ""
    return f"{place}: {error.strerror}{fix}"


def storage_error(error: BaseException) -> OSError | None:
    """Return the full, read-only or failing disk behind an error, as datasets wraps it."""
    disks = (x for x in causes(error) if isinstance(x, OSError) and x.errno in STORAGE_CODES)
    return next(disks, None)


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error and what led to it, each once: a cause that is raised again leads to itself."""
    seen = list[BaseException]()
    following: BaseException | None = error
    while following is not None and following not in seen:
        yield following
        seen.append(following)
        following = following.__cause__ or following.__context__


def _forget_output() -> None:
    """Drop what a closed pipe did not take: the interpreter's flush at the end would fail again."""
    try:
        print(end="", flush=True)
    except OSError:
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
