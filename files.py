"""Write files and folders atomically, read files of bounded size, and write portable JSON."""

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
from typing import IO, Any, TypeAlias, TypeVar

import msgspec
import yaml
from safetensors import SafetensorError

from .errors import FULL_CODES, STORAGE_CODES, Failure, UsageError, make_folder

Values: TypeAlias = dict[str, Any]
"""Values by name, as in a JSON object or in keyword arguments."""
T = TypeVar("T")


def packaged(name: str) -> str:
    """Return the path, or the package's copy if a path in ``assets`` or ``configs`` is missing."""
    own = Path(__file__).parent / name
    is_own = name.startswith(("assets/", "configs/")) and ".." not in name and own.exists()
    return str(own) if is_own and not Path(name).exists() else name


# -- reading files of bounded size --------------------------------------------------------------

MAX_BYTES = 2**26
MAX_YAML_BYTES = 2**20


def read_bounded(path: Path, field: str, most: int = MAX_BYTES) -> bytes:
    """Read a regular file of at most ``most`` bytes. Errors name the option ``field``.

    Raises:
        UsageError: not a regular file, too large, or unreadable.
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
    """Read a JSON file into ``kind``, a type supported by msgspec. NaN is refused.

    Raises:
        UsageError: as in ``read_bounded``, or the content does not fit ``kind``.
    """
    try:
        return msgspec.json.decode(read_bounded(path, field, most), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(
            f"{field}: {str(path)!r} does not hold what it should ({error}); fix it, or give "
            "another file"
        ) from error


def read_yaml(path: Path, field: str) -> Any:
    """Read a YAML file with a bounded size.

    Raises:
        UsageError: as in ``read_bounded``, or invalid YAML, or YAML with aliases.
    """
    text = read_text(path, field, MAX_YAML_BYTES)
    try:
        check_yaml(text)
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:  # tags, dates, keys
        said = " ".join(str(error).split())
        raise UsageError(f"{field}: {path} is not valid YAML: {said}; fix it") from error


def check_yaml(text: str) -> None:
    """Raise yaml.YAMLError if the text is invalid or too long, or has aliases or duplicate keys."""
    if len(text) > MAX_YAML_BYTES:
        raise yaml.YAMLError(f"more than {MAX_YAML_BYTES} characters")
    waiting, seen = [yaml.compose(text, yaml.SafeLoader)], set[int]()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:  # ten lines with nested aliases can expand to gigabytes
            raise yaml.YAMLError("an alias: write out what it stands for")
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        elif isinstance(node, yaml.MappingNode):
            keys = [str(key.value) for key, _ in node.value]
            if twice := sorted({key for key in keys if keys.count(key) > 1}):
                raise yaml.YAMLError(f"the key {twice[0]!r} twice")
            waiting += [value for _, value in node.value]


def bounded_lines(file: IO[bytes], most: int) -> Iterator[bytes | None]:
    """Yield a file's lines. For a line with more than ``most`` bytes, yield None."""
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
    """Lock an existing folder against other runs, until the ``with`` block ends.

    The system releases the lock when the process ends for any reason. No file remains.

    Args:
        shared: share the lock with other runs that set this, like the shards of an evaluation.

    Raises:
        UsageError: another run has the lock.
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


def resolved(path: Path, field: str) -> Path:
    """Return the absolute path without symbolic links.

    Raises:
        UsageError: the links form a cycle.
    """
    try:
        return path.resolve()
    except (RuntimeError, OSError) as error:  # Python 3.13 raises no error here, and fails later
        raise UsageError(
            f"{field}: {str(path)!r} is a link that leads back to itself; give another place"
        ) from error


def partial(path: Path) -> Path:
    """Return the temporary path of a file or folder while it is written or deleted."""
    return path.with_name(f".{path.name}.partial")


def make_place(field: str, path: Path, mark: bytes) -> None:
    """Create an output file's folder. The file must be new or of the same kind.

    Args:
        mark: bytes found in the first 1,024 of every file of this kind.

    Raises:
        UsageError: the folder cannot be created, or another kind of file exists there.
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


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add ``path`` to errors about a full or failing disk if they do not name the file.

    Raises:
        Failure: one line with the path, the reason and the fix.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        in_text = re.search(r"\(os error (\d+)\)", str(error))  # safetensors, from Rust
        is_named = isinstance(error, OSError) and error.filename is not None
        code = int(in_text[1]) if in_text else getattr(error, "errno", None) or 0
        if code not in STORAGE_CODES or is_named:
            raise
        fix = "make room" if code in FULL_CODES else "repair the disk"
        raise Failure(
            f"{str(path)!r}: {os.strerror(code)}; {fix}, and run the same command again"
        ) from error


def publish(path: Path, write: Callable[[Path], object]) -> None:
    """Create or replace a file: call ``write(temporary)``, flush it to disk, and rename it.

    Readers see the complete old file or the complete new one, also after a kill at any moment.
    """
    temporary = partial(path)
    try:
        with naming(path):
            write(temporary)
            make_readable(temporary)
            flush(temporary)
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def make_readable(path: Path) -> None:
    """Set default permissions, because safetensors makes files private to their owner."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def write_atomically(path: Path, content: bytes) -> None:
    publish(path, lambda temporary: temporary.write_bytes(content))


def flush(path: Path) -> None:
    """Flush a file to disk. Flushing a folder makes the renames in it permanent."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def to_json(content: object) -> bytes:
    """Return indented JSON with number lists on one line. NaN and infinity become null."""
    text = json.dumps(_without_nan(content), indent=2, allow_nan=False)
    # Strings contain no raw line breaks, so a bracket before a line break opens a list.
    return (re.sub(r"\[\n[-+\d.eE,\snul]*\]", _on_one_line, text) + "\n").encode()


def _without_nan(value: object) -> object:
    """Replace NaN and infinity by None, because JSON cannot express them."""
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
    out: Path,
    fill: Callable[[Path], None],
    *,
    inputs: Sequence[Path] = (),
    replaces: bool | str = False,
) -> list[Path]:
    """Write files into a temporary folder, rename it to ``out``, and return the files.

    Args:
        out: a new or empty folder.
        fill: called with a folder; writes the files into it.
        inputs: folders to read. ``out`` must not equal, contain or be inside one of them.
        replaces: if True, ``out`` may have files, if ``fill`` writes all of them again. If it is a
            file's name, ``out`` must also have this file, as proof that this command wrote it.

    Raises:
        UsageError: ``out`` has other files, is not a folder, or cannot be created.
        Failure: the disk is full or fails.
    """
    place = resolved(out, "--out")
    for folder in (source.resolve() for source in inputs):
        if place == folder or place in folder.parents or folder in place.parents:
            raise UsageError(
                f"--out: {str(out)!r} is, holds or lies in {str(folder)!r}, which is read; give "
                "another folder"
            )
    old = {path.name for path in place.iterdir()} if place.is_dir() else set()
    is_other = place.exists() and not place.is_dir()
    may_replace = replaces in old if isinstance(replaces, str) else replaces
    if place == Path.cwd() or is_other or (old and not may_replace):
        found = "is no folder" if is_other else "holds other files"
        raise UsageError(f"--out: {str(out)!r} {found}; give another folder")
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
