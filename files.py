"""Files and folders that are whole or absent at any moment, and JSON for any reader."""

import hashlib
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from safetensors import SafetensorError

from pipedraft.errors import Failure, UsageError, make_folder

MARKER = Path(".cache", "huggingface", "pipedraft.json")
"""In a folder that may be written anew: what was put into it. Uploads to the Hub leave it out."""


def partial(path: Path) -> Path:
    """Where a file or folder is filled before it gets its name, or emptied after it lost it."""
    return path.with_name(f".{path.name}.partial")


def publish(path: Path, write: Callable[[Path], object]) -> None:
    """Make or replace a file by one rename, after ``write(temporary)`` and a flush to disk.

    A reader, or a kill at any moment, sees the whole file or the one before it.
    """
    temporary = partial(path)
    try:
        write(temporary)
        flush(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, content: bytes) -> None:
    publish(path, lambda temporary: temporary.write_bytes(content))


def flush(path: Path) -> None:
    """To disk; a folder's flush makes its renames last."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_damage(path: Path, size: int, sha256: str | None) -> str | None:
    """How a file differs from what was written, None if it does not.

    Args:
        size: bytes it had.
        sha256: it had; None leaves its contents unread.
    """
    if not path.is_file():
        return "is missing"
    if (found := path.stat().st_size) != size:
        return f"has {found} bytes instead of {size}"
    if sha256 is not None and file_sha256(path) != sha256:
        return "has another SHA-256 than when it was written"
    return None


def to_json(content: object) -> bytes:
    """Indented JSON with a list of numbers on one line; NaN and infinity become null."""
    text = json.dumps(_without_nan(content), indent=2, allow_nan=False)
    # Texts hold no raw line break, so a bracket before one opens a list.
    return (re.sub(r"\[\n[-+\d.eE,\snul]*\]", _on_one_line, text) + "\n").encode()


def _without_nan(value: object) -> object:
    """JSON has no NaN: a value that does not exist is null."""
    if isinstance(value, msgspec.Struct):
        value = msgspec.to_builtins(value)
    if isinstance(value, dict):
        return {key: _without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _on_one_line(found: re.Match[str]) -> str:
    return "[" + " ".join(found[0].strip("[]").split()) + "]"


def write_folder(
    out: Path, fill: Callable[[Path], None], *, inputs: Sequence[Path] = (), replaces: bool = False
) -> list[Path]:
    """Make an output folder by one rename, after every file is written; returns the files.

    Args:
        out: must be new or empty.
        fill: writes the files into the folder that it is given.
        inputs: folders that are read; ``out`` is none of them, nor around or below one.
        replaces: also a folder that was written by this function, and changed by nobody since.

    Raises:
        UsageError: ``out`` holds or is something else, or cannot be made.
        Failure: the disk is full or fails.
    """
    place = out.resolve()
    for folder in (source.resolve() for source in inputs):
        if place == folder or place in folder.parents or folder in place.parents:
            raise UsageError(
                f"--out: {str(out)!r} is, holds or lies in {str(folder)!r}, which is read; give "
                "another folder"
            )
    is_ours = replaces and _is_unchanged(place)
    if place == Path.cwd() or (place.exists() and not is_ours and not _is_empty(place)):
        reason = "in use" if not replaces else "in use, by what this command did not write"
        raise UsageError(f"--out: {str(out)!r} is {reason}; give another folder")
    make_folder("--out", place.parent)
    try:
        with tempfile.TemporaryDirectory(
            dir=place.parent, prefix=f".{place.name}.", suffix=".partial"
        ) as temporary:
            new = Path(temporary, "new")
            new.mkdir()
            fill(new)
            if replaces:
                _mark(new)
            _swap(new, place, Path(f"{temporary}.old"))
    except (OSError, SafetensorError) as error:
        said = getattr(error, "strerror", None) or str(error)
        what = f"--out: {str(out)!r} cannot be written ({said}); give another folder"
        by_input = isinstance(error, PermissionError | FileExistsError | NotADirectoryError)
        raise (UsageError(what) if by_input else Failure(f"{what}, or make room")) from error
    return sorted(path for path in out.iterdir() if not path.name.startswith("."))


def _swap(new: Path, place: Path, aside: Path) -> None:
    """Put a folder in the place of another one, which is gone only when the new one is there."""
    try:
        if place.exists():
            place.rename(aside)
        new.rename(place)
    except BaseException:
        if aside.exists() and not place.exists():
            aside.rename(place)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def _mark(folder: Path) -> None:
    """Say what the folder holds, in a file that is newer than everything else in it."""
    marker = folder / MARKER
    marker.parent.mkdir(parents=True)
    marker.touch()
    marker.write_text(json.dumps(_names(folder)) + "\n")


def _is_unchanged(folder: Path) -> bool:
    marker = folder / MARKER
    try:
        names = json.loads(marker.read_text())
        written_ns = marker.stat().st_mtime_ns
    except (OSError, ValueError):
        return False
    return names == _names(folder) and all(
        path.lstat().st_mtime_ns <= written_ns for path in folder.rglob("*") if not path.is_dir()
    )


def _names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))
