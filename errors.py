"""Errors for users: their classes, ranges of numbers, and one-line messages."""

import difflib
import errno
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

LINE_CHARACTERS = 1000
"""Maximum message length; longer messages keep their beginning and end."""
FULL_CODES = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
STORAGE_CODES = FULL_CODES | {errno.EROFS, errno.EIO}


class UsageError(ValueError):
    """Bad input. The one-line message names the field, the value and the fix."""


class Failure(RuntimeError):
    """Failure not caused by the input, like a network outage. Prints one line, exits with 1."""


def check_ranges(values: object, ranges: Mapping[str, str], prefix: str = "") -> None:
    """Raise UsageError for a number that is NaN or outside its range. None is always allowed.

    Args:
        values: object with a number or a sequence of numbers for each name in ``ranges``.
        ranges: name -> interval in mathematical notation, such as ``[0, inf)``, and an optional
            hint.
        prefix: text before each name in messages.
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
    """Create a writable folder for results. Messages call it ``field``.

    Raises:
        UsageError: the path is a file, cannot be created, or is not writable.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise UsageError(
            f"{field}: {str(folder)!r} cannot be made ({error.strerror}); give another folder"
        ) from error


MODEL_WORDS = ("target", "tokenizer", "checkpoint")


@contextmanager
def blaming(field: str) -> Iterator[None]:
    """Let errors about a model begin with the option that names it, not with the loader's word."""
    try:
        yield
    except ValueError as error:
        word, _, rest = str(error).partition(": ")
        if word not in MODEL_WORDS:
            raise
        raise UsageError(f"{field}: {rest}") from error


def one_line(text: str) -> str:
    """Return a message as one terminal line, without control characters or passwords."""
    line = re.sub(r"(\w://)[^/\s@]*@", r"\1***@", " ".join(text.split()))
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    if len(line) <= LINE_CHARACTERS:
        return line
    half = LINE_CHARACTERS // 2
    return f"{line[:half]} ... {line[-half:]}"


def describe_os_error(error: OSError) -> str:
    """Return the error as ``'out/x': Permission denied``, or its own message if it has no errno."""
    if error.errno is None or error.strerror is None:
        return str(error)
    place = "output" if error.filename is None else repr(os.fspath(error.filename))
    fix = "; make room" if error.errno in FULL_CODES else ""
    return f"{place}: {error.strerror}{fix}"


def storage_error(error: BaseException) -> OSError | None:
    """Return the OSError behind an error if a disk is full, read-only or failing, else None."""
    disks = (x for x in causes(error) if isinstance(x, OSError) and x.errno in STORAGE_CODES)
    return next(disks, None)


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes, each once, because a re-raised cause refers to itself."""
    seen = list[BaseException]()
    following: BaseException | None = error
    while following is not None and following not in seen:
        yield following
        seen.append(following)
        following = following.__cause__ or following.__context__


def requirement(extra: str) -> str:
    """Return pip's words for one of this package's extras: from the checkout if it runs there."""
    root = Path(__file__).parent
    if (root / "pyproject.toml").is_file():
        return f"-e {shlex.quote(f'{root}[{extra}]')}"
    return f"'pipedraft[{extra}]'"


def flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a hint for an unknown word, with the most similar known word or all of them."""
    near = difflib.get_close_matches(word, known, 1, cutoff)
    return f"did you mean {near[0]!r}?" if near else f"give one of {', '.join(known)}"


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if lines[0].endswith(":"):  # the reason follows
        return " ".join(" ".join(lines).split()).rstrip(".")
    return lines[0].rstrip(".")


def did_you_mean(text: str) -> str:
    """Suggest the nearest existing path, as the end of a message."""
    place = Path(text).parts[0] if text.startswith("/") else "."
    parts = Path(text).parts[1:] if text.startswith("/") else Path(text).parts
    for part in parts:
        here = Path(place)
        try:
            # Answers not yet written out are in an .sqlite file, which no option takes.
            names = sorted(x.name for x in here.iterdir() if x.suffix != ".sqlite")
        except OSError:
            return ""
        near = [part] if part in names else difflib.get_close_matches(part, names, 1, 0.75)
        if not near:
            return ""
        place = str(here / near[0])
    return "" if place == str(Path(text)) else f", did you mean {place}?"
