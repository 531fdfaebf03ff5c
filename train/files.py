"""Files that are complete or absent, and whether one is still what was written."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path


def partial(path: Path) -> Path:
    """Where a file or folder is filled before it gets its name, or emptied after it lost it."""
    return path.with_name(f".{path.name}.partial")


def publish(path: Path, write: Callable[[Path], object]) -> None:
    """Make or replace a file by one rename, after ``write(temporary)`` and a flush to disk."""
    temporary = partial(path)
    write(temporary)
    flush(temporary)
    temporary.replace(path)


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
