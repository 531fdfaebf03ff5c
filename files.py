"""Files and folders that are whole or absent at any moment, and JSON for any reader."""

import fcntl
import hashlib
import json
import math
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec
import yaml
from safetensors import SafetensorError

from pipedraft.cli import MAX_YAML_BYTES, Failure, UsageError, check_yaml, make_folder
from pipedraft.cli import Values as Values

T = TypeVar("T")


def packaged(name: str) -> str:
    """Return a name, and for ``assets/...`` outside a checkout the installed package's copy."""
    own = Path(__file__).parent / name
    is_own = name.startswith("assets/") and ".." not in name and own.exists()
    return str(own) if is_own and not Path(name).exists() else name


# -- reading: what a file may decide is bounded -------------------------------------------------

MAX_BYTES = 2**26


def read_bounded(path: Path, field: str, most: int = MAX_BYTES) -> bytes:
    """A regular file of at most so many bytes; ``field`` is the option that named it.

    Raises:
        UsageError: it is none, is larger, or cannot be read.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UsageError(f"{field}: {str(path)!r} is no regular file; name one")
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise UsageError(
            f"{field}: {str(path)!r} cannot be read ({error.strerror}); give another file"
        ) from error
    if len(content) > most:
        raise UsageError(f"{field}: {str(path)!r} has more than {most} bytes; give another file")
    return content


def read_optional(path: Path | None, field: str) -> bytes | None:
    return None if path is None else read_bounded(path, field)


def read_text(path: Path, field: str, most: int = MAX_BYTES) -> str:
    try:
        return read_bounded(path, field, most).decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{field}: {str(path)!r} is not UTF-8 text ({error}); fix it") from error


def read_json(path: Path, field: str, kind: type[T], most: int = MAX_BYTES) -> T:
    """A JSON file as ``kind``, which msgspec knows; NaN is no JSON.

    Raises:
        UsageError: as ``read_bounded``, or it holds something else.
    """
    try:
        return msgspec.json.decode(read_bounded(path, field, most), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(
            f"{field}: {str(path)!r} does not hold what it should ({error}); fix it, or give "
            "another file"
        ) from error


def read_yaml(path: Path, field: str) -> Any:
    """Read a YAML file of a bounded size.

    Raises:
        UsageError: as ``read_bounded``, or it is not YAML, or has aliases.
    """
    text = read_text(path, field, MAX_YAML_BYTES)
    try:
        check_yaml(text)
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:  # tags, dates, keys
        said = " ".join(str(error).split())
        raise UsageError(f"{field}: {path} is not valid YAML: {said}; fix it") from error


def bounded_lines(file: IO[bytes], most: int) -> Iterator[bytes | None]:
    """Lines of a file; None for one of more than ``most`` bytes, which is not kept."""
    while line := file.readline(most + 1):
        if len(line) <= most or line.endswith(b"\n"):
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(2**20)
        yield None


# -- writing ------------------------------------------------------------------------------------


@contextmanager
def locked(folder: Path, field: str, *, shared: bool = False) -> Iterator[None]:
    """No other run writes into a folder, which is there, until the end of the body.

    The system drops the lock with the process, however that ends; no file is left.

    Args:
        shared: those that also say so may write, as the shares of one evaluation.

    Raises:
        UsageError: another one does.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise UsageError(
            f"{field}: {str(folder)!r} is written to by another run; wait for it, or give another "
            "folder"
        ) from error
    except OSError:  # a file system without locks
        pass
    try:
        yield
    finally:
        os.close(handle)


def partial(path: Path) -> Path:
    """Where a file or folder is filled before it gets its name, or emptied after it lost it."""
    return path.with_name(f".{path.name}.partial")


def make_place(field: str, path: Path, mark: bytes) -> None:
    """Make the folder of an output file, which is new or of the same kind.

    Args:
        mark: what every file of this kind has in its first 1024 bytes.

    Raises:
        UsageError: the folder cannot be made, or something else stands there.
    """
    make_folder(field, path.parent)
    if not path.exists():
        return
    is_ours = path.is_file()
    if is_ours:
        with path.open("rb") as file:
            is_ours = mark in file.read(1024)
    if not is_ours:
        raise UsageError(
            f"{field}: {str(path)!r} was not written by this command and would be replaced; give "
            "another place"
        )


def publish(path: Path, write: Callable[[Path], object]) -> None:
    """Make or replace a file by one rename, after ``write(temporary)`` and a flush to disk.

    A reader, or a kill at any moment, sees the whole file or the one before it.
    """
    temporary = partial(path)
    try:
        write(temporary)
        make_readable(temporary)
        flush(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def make_readable(path: Path) -> None:
    """Give a file the rights of every new one; safetensors lets its owner alone read its files."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def write_atomically(path: Path, content: bytes) -> None:
    publish(path, lambda temporary: temporary.write_bytes(content))


def flush(path: Path) -> None:
    """Write a file through to disk; a folder's flush makes its renames last."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
        replaces: also a folder in which every file has the name of a new one.

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
    old = {path.name for path in place.iterdir()} if place.is_dir() else set()
    is_other = place.exists() and not place.is_dir()
    if place == Path.cwd() or is_other or (old and not replaces):
        raise UsageError(f"--out: {str(out)!r} is in use; give another folder")
    make_folder("--out", place.parent)
    try:
        with tempfile.TemporaryDirectory(
            dir=place.parent, prefix=f".{place.name}.", suffix=".partial"
        ) as temporary:
            new = Path(temporary, "new")
            new.mkdir()
            fill(new)
            if old - {path.name for path in new.iterdir()}:
                raise UsageError(
                    f"--out: {str(out)!r} has files that this command did not write; give another "
                    "folder"
                )
            if old:  # removed with the temporary folder
                place.replace(Path(temporary, "old"))
            new.replace(place)
    except (OSError, SafetensorError) as error:
        said = getattr(error, "strerror", None) or str(error)
        what = f"--out: {str(out)!r} cannot be written ({said}); give another folder"
        by_input = isinstance(error, PermissionError | FileExistsError | NotADirectoryError)
        raise (UsageError(what) if by_input else Failure(f"{what}, or make room")) from error
    return sorted(path for path in out.iterdir() if not path.name.startswith("."))
