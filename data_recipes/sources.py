"""Read a source row by row: local files, folders, the standard library, or a Hub data set."""

import gzip
import json
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from datasets import Dataset

CONVERSATION_SUFFIXES = (".jsonl", ".json", ".parquet")
TEXT_SUFFIXES = (".txt", ".md", ".py")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
SKIPPED_STDLIB = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


@dataclass(frozen=True, kw_only=True)
class Source:
    """One place that rows come from."""

    path: str = ""
    """A file, a folder of files, or the id of a Hub data set. conversations: .jsonl, .json or
    .parquet; text: .txt, .md or .py (.gz is read too). python_stdlib ignores it."""
    kind: Literal["conversations", "text", "python_stdlib"] = "conversations"
    """conversations: rows in the OpenAI or the ShareGPT form. text: one document per file.
    python_stdlib: the modules of the running interpreter's standard library, one per row."""
    split: str = "train"
    """Split of a Hub data set; a file or folder has none."""
    max_rows: int | None = None
    """Read only this many rows, from the first."""

    def __post_init__(self) -> None:
        if not self.path and self.kind != "python_stdlib":
            raise ValueError(
                f"sources.path: {self.path!r} for kind {self.kind!r}; name a file, folder or Hub id"
            )
        if self.max_rows is not None and self.max_rows < 1:
            raise ValueError(f"sources.max_rows: {self.max_rows}; give a number above 0, or null")

    @property
    def name(self) -> str:
        """How reports and the ``source`` column call it."""
        return self.path or self.kind


@dataclass(frozen=True)
class RawRow:
    """A row as found: one JSON object (conversations) or one document (text)."""

    text: str
    location: str
    """File and line or row number (from 1), to find it again."""
    error: str = ""
    """Why the row cannot be read at all; "" if it can."""


def list_files(source: Source) -> list[Path] | None:
    """The files of a source, sorted; None if it is a Hub data set."""
    if source.kind == "python_stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        modules = (file for file in root.rglob("*.py") if file.is_file())
        return sorted(f for f in modules if not SKIPPED_STDLIB & set(f.relative_to(root).parts))
    allowed = TEXT_SUFFIXES if source.kind == "text" else CONVERSATION_SUFFIXES
    path = Path(source.path).expanduser()
    if path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.is_file() and _suffix(f) in allowed)
        if not files:
            raise ValueError(
                f"sources.path: no {', '.join(allowed)} file in the folder {source.path!r}; "
                f"put one there, or set sources.kind (now {source.kind!r})"
            )
        return files
    if path.is_file():
        if _suffix(path) not in allowed:
            raise ValueError(
                f"sources.path: {source.path!r} has an unknown extension for kind "
                f"{source.kind!r}; known are {', '.join(allowed)}"
            )
        return [path]
    is_file_name = _suffix(path) in CONVERSATION_SUFFIXES + TEXT_SUFFIXES
    if is_file_name or source.kind == "text" or not HUB_ID.fullmatch(source.path):
        raise ValueError(
            f"sources.path: {source.path!r} does not exist (current folder: {Path.cwd()}); "
            "give an existing file or folder, or a Hub id such as 'user/name'"
        )
    return None


def read_source(source: Source) -> Iterator[RawRow]:
    """The first ``max_rows`` rows of a source, in a fixed order, unreadable ones included."""
    files = list_files(source)
    if files is None:
        rows = _read_hub(source)
    elif source.kind == "conversations":
        rows = (row for file in files for row in _read_conversations(file))
    else:
        rows = (_read_document(file) for file in files)
    return islice(rows, source.max_rows)


def _suffix(path: Path) -> str:
    """The extension in lower case, that inside a .gz file for a compressed one."""
    path = Path(path.name.lower())
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def _read_bytes(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix.lower() == ".gz" else data


def _read_document(path: Path) -> RawRow:
    try:
        text = _read_bytes(path).decode("utf-8")
    except UnicodeDecodeError:
        return RawRow("", str(path), "not UTF-8 text")
    return RawRow(text, str(path), "" if text.strip() else "empty document")


def _read_conversations(path: Path) -> Iterator[RawRow]:
    suffix = _suffix(path)
    if suffix == ".parquet":
        yield from _read_parquet(path)
    elif suffix == ".json" and _read_bytes(path).lstrip()[:1] == b"[":
        try:
            rows = json.loads(_read_bytes(path))
        except ValueError as error:
            raise ValueError(
                f"sources.path: {str(path)!r} is not valid JSON ({error}); mend the file, or name "
                "it .jsonl if it holds one object per line"
            ) from error
        for number, row in enumerate(rows, 1):
            yield RawRow(json.dumps(row, ensure_ascii=False), f"{path}:{number}")
    else:
        is_gzip = path.suffix.lower() == ".gz"
        with gzip.open(path, "rb") if is_gzip else path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                location = f"{path}:{number}"
                try:
                    text = line.decode("utf-8-sig").strip()
                except UnicodeDecodeError:
                    damaged = line.decode("utf-8", "backslashreplace").strip()
                    yield RawRow(damaged, location, "not UTF-8 text")
                    continue
                if text:
                    yield RawRow(text, location)


def _read_parquet(path: Path) -> Iterator[RawRow]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                number += 1
                text = json.dumps(row, ensure_ascii=False, default=str)
                yield RawRow(text, f"{path}:{number}")
    except pyarrow.ArrowException as error:
        raise ValueError(
            f"sources.path: {str(path)!r} is not a readable parquet file ({error})"
        ) from error


def load_hub(source: Source) -> "Dataset":
    """The split of a Hub data set, downloaded once by ``datasets``."""
    from datasets import load_dataset

    try:
        return load_dataset(source.path, split=source.split)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"sources.path: {source.path!r} is neither a file nor a Hub data set that can be "
            f"loaded with split {source.split!r} ({reason}); check the path, the split and the "
            "network"
        ) from error


def _read_hub(source: Source) -> Iterator[RawRow]:
    for number, row in enumerate(load_hub(source), 1):
        text = json.dumps(row, ensure_ascii=False, default=str)
        yield RawRow(text, f"{source.path}[{source.split}]:{number}")
