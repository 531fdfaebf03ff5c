"""How commands end. Exit status: 0 success, 1 failure, 2 bad input, 130 Ctrl-C."""

import errno
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import NoReturn

from safetensors import SafetensorError

from .errors import Failure, describe_os_error, flag_name, one_line, requirement, storage_error

INPUT_ERRORS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)
INPUT_CODES = {errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL}
EXTRAS = {
    **{name: name for name in ("deepspeed", "gguf", "peft", "tensorboard", "wandb")},
    **dict.fromkeys(("fastapi", "prometheus_client", "uvicorn"), "serve"),
    "bitsandbytes": "quantization",
    "grpc": "edge",
}
"""Optional library's module -> its extra in pyproject.toml."""
LINK_LOOP = "Symlink loop from "
"""How pathlib's RuntimeError of ``Path.resolve`` begins, up to Python 3.12."""


def _open_standard_files() -> None:
    """Refuse a closed output, and keep other files off the places of closed standard files.

    A file or socket opened later would take the place, and child processes would read or write it.
    """
    for number, how in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, how)  # the lowest free number
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # for the whole process
    if sys.stdout is None:
        raise Failure("output: standard output is closed; send it to a file, or to /dev/null")


def run_command(main: Callable[[], None]) -> None:
    """Run an entry point and exit with its status.

    ``ValueError`` and unusable paths are bad input (status 2, one line on stderr). ``Failure`` and
    every other ``OSError``, such as a full disk, are environment failures (status 1, one line). All
    other exceptions are program faults (traceback, status 1). ``PIPEDRAFT_TRACEBACK=1`` shows the
    traceback for the first two as well.
    """
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        _open_standard_files()
        if isinstance(sys.stdout, TextIOWrapper):  # a terminal may lack some characters
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
        words = sys.argv[1:]
        line = f"error: {one_line(as_typed(text, words) + needed(text, words) + dead_links(text))}"
        print(line, file=sys.stderr)
        _tell_launcher(line)
        _forget_output()
        sys.exit(status)


ALIASES = {
    "num_stages": "--stages",
    "output_dir": "--out",
    "data.sources": "--data",
    "sources.path": "--data",
}
"""Field -> its option, or another one for it, where the names differ."""


def as_typed(message: str, words: Sequence[str]) -> str:
    """Begin a message with the option as the user typed it, instead of the field's name."""
    field, colon, rest = message.partition(": ")
    name = field.removeprefix("--")
    typed = {word.partition("=")[0] for word in words if word.startswith("--")}
    underscored = f"--{name.replace('-', '_')}"
    for flag in (ALIASES.get(name, ""), f"--{name}", flag_name(name), underscored):
        if colon and flag in typed:
            return f"{flag}: {rest}"
    return message


def needed(message: str, words: Sequence[str]) -> str:
    """Return the command to create the missing file named in a message, or "" if unknown.

    Comments in YAML files on the command line name these commands. For example, after ``# Needs
    out/smollm2: make out/smollm2/config.json`` a message about 'out/smollm2' gets ``make ...``.
    """
    for word in words:
        file = Path(word.rpartition("=")[2])
        with suppress(OSError, UnicodeDecodeError):
            lines = file.read_text().splitlines() if file.suffix == ".yaml" else []
            for thing, command in re.findall(r"(?m)^# Needs (\S+): (.+)$", "\n".join(lines)):
                is_named = re.search(rf"(?<![\w/.-]){re.escape(thing)}(?![\w/-])", message)
                if is_named and not Path(thing).is_file():
                    return f"; this makes it: {command}"
    return ""


def dead_links(message: str) -> str:
    """Return a hint for each path of a message whose links lead nowhere, or ""."""
    found: dict[str, str] = {}
    for quoted in re.findall(r"'([^']+)'", message) if "is a link" not in message else ():
        for place in (Path(quoted), *Path(quoted).parents):
            with suppress(OSError, ValueError):
                if place.is_symlink() and not place.exists():
                    found[str(place)] = os.readlink(place)
    return "".join(f"; {x!r} is a link to {to!r}, which leads nowhere" for x, to in found.items())


def _tell_launcher(line: str) -> None:
    """Store an error line. Torchrun prints it last in its long report on a failed rank."""
    place = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if place:
        said = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(place).write_text(json.dumps({"message": said}))


def leave_at_interrupts() -> None:
    """Let Ctrl-C end the process with one line during the slow imports.

    Libraries may turn KeyboardInterrupt into another error while they load.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


@contextmanager
def leaving_at_interrupts() -> Iterator[None]:
    """Let Ctrl-C act as in ``leave_at_interrupts`` inside the block, for imports after options."""
    leave_at_interrupts()
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is _leave:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, b"error: interrupted\n")
    os._exit(130)


def _status(error: Exception) -> tuple[int, str] | None:
    """Return an error's exit status and message, or None for a program fault."""
    disk = storage_error(error)
    if disk is not None:
        is_said = isinstance(error, ValueError | Failure)
        return 1, str(error) if is_said else describe_os_error(disk)
    if isinstance(error, BrokenPipeError):
        return 1, "output: its reader has closed it"
    if isinstance(error, UnicodeDecodeError):
        return 2, f"input: not UTF-8 text ({error.reason} at byte {error.start}); convert it"
    if isinstance(error, ModuleNotFoundError):
        module = str(error.name).partition(".")[0]
        if module not in EXTRAS:
            return None
        return 2, f"{module}: not installed; pip install {requirement(EXTRAS[module])}"
    # File readers explain their own errors; tokenizers raises bare exceptions, at a full disk, too.
    if isinstance(error, Failure | SafetensorError) or type(error) is Exception:
        is_full = "(os error 28)" in str(error)  # from Rust, without a path
        return 1, str(error) + "; make room, and run the same command again" * is_full
    if isinstance(error, RuntimeError) and str(error).startswith(LINK_LOOP):
        return 2, f"{str(error).removeprefix(LINK_LOOP)}: a link that leads back to itself"
    if isinstance(error, MemoryError):
        return 1, f"memory: not enough ({str(error) or 'of this machine'}); ask for less"
    if isinstance(error, OSError) and not isinstance(error, ValueError):
        is_input = isinstance(error, INPUT_ERRORS) or error.errno in INPUT_CODES
        return 2 if is_input else 1, describe_os_error(error)
    return (2, str(error)) if isinstance(error, ValueError) else None


def show_help(text: str) -> NoReturn:
    """Print a help text and exit. A reader that closes its pipe, such as head, is no error."""
    with suppress(BrokenPipeError):
        print(text, flush=True)
    _forget_output()
    sys.exit(0)


def _forget_output() -> None:
    """Drop output refused by a closed pipe, because the final flush would fail again."""
    try:
        print(end="", flush=True)
    except OSError:
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
