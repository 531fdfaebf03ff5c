"""How every command ends: 0 done, 2 bad input in one line, 1 failure, 130 after Ctrl-C."""

import errno
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from types import FrameType

LINE_CHARACTERS = 1000
"""Longest message; of a longer one the beginning and the end."""
INTERRUPT_S = 1.5
"""After Ctrl-C, for leaving in order; then the process is left as it is."""
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
    try:
        with _ended_by_interrupt():
            _replace_closed_streams()
            if isinstance(sys.stdout, TextIOWrapper):  # a terminal may lack a text's characters
                sys.stdout.reconfigure(errors="replace")
            try:
                main()
            except SystemExit:
                sys.stdout.flush()
                raise
            sys.stdout.flush()
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
    """Let Ctrl-C end the process with one line until ``run_command``: a start takes seconds.

    Libraries that are being loaded would make another error of KeyboardInterrupt.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def _leave(number: int = 0, frame: FrameType | None = None) -> None:
    with suppress(OSError):
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
    if isinstance(error, Failure):
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
    """The full, read-only or failing disk behind an error; None: another cause.

    Libraries wrap it: datasets in an error of its own, safetensors and tokenizers (Rust) in words.
    """
    for cause in causes(error):
        if isinstance(cause, OSError) and cause.errno in STORAGE_CODES:
            return cause
        is_rust = type(cause) is Exception or type(cause).__name__ == "SafetensorError"
        if is_rust and (found := re.search(r"\b(?:code: |os error )(\d+)", str(cause))):
            return OSError(int(found[1]), os.strerror(int(found[1])))
    return None


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error and what led to it, each once: a cause that is raised again leads to itself."""
    seen = list[BaseException]()
    following: BaseException | None = error
    while following is not None and following not in seen:
        yield following
        seen.append(following)
        following = following.__cause__ or following.__context__


@contextmanager
def _ended_by_interrupt() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, and ends the process if that has not soon ended it.

    What waits for a thread or a process, as the end of a pool, would wait on.
    """
    before = signal.getsignal(signal.SIGINT)
    is_ours = before in (signal.default_int_handler, _leave)
    if not is_ours or threading.current_thread() is not threading.main_thread():
        yield
        return
    received = is_over = False

    def leave() -> None:
        os._exit(130) if is_over else _leave()

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received = True
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        timer = threading.Timer(INTERRUPT_S, leave)
        timer.daemon = True
        timer.start()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except BaseException as error:
        is_over = True  # the line is said by whoever catches this
        if received and not isinstance(error, SystemExit):  # also what a library made of it
            raise KeyboardInterrupt from error
        raise
    finally:
        if not received:  # else the timer also bounds the end of the interpreter
            signal.signal(signal.SIGINT, before)


def _replace_closed_streams() -> None:
    """A closed stream reads as empty; else the next file that is opened would get its number.

    Raises:
        Failure: standard output is closed.
    """
    was_closed = [stream is None for stream in (sys.stdin, sys.stdout, sys.stderr)]
    if not any(was_closed):
        return
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    sys.stdin = sys.stdin or os.fdopen(0)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")
    if was_closed[1]:
        raise Failure("output: standard output is closed; send it to a file or to /dev/null")


def _forget_output() -> None:
    """Nothing more is written: the interpreter's own flush at the end would fail once more."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
