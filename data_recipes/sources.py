"""Read local files, folders, the standard library or Hub data sets row by row.

Readers keep one batch of rows in memory for any file size. Only a JSON array is read whole.
"""

import codecs
import gzip
import json
import re
import sys
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast

from ..errors import did_you_mean
from ..files import bounded_lines
from .config import Source
from .conversations import ROW_FIELDS, read_json
from .saved import ARROW, DESCRIPTIONS, SPLITS, hub_snapshot, read_arrow, saved_files

ROW_SUFFIXES = (".jsonl", ".json", ".parquet", ARROW)
TEXT_SUFFIXES = (".txt", ".md", ".py")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
SKIPPED_STDLIB = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
PARQUET_ROWS = 1024
TOO_MANY_BYTES = "longer than sources.max_row_bytes"


@dataclass(frozen=True)
class RawRow:
    """A row as found, either one JSON object (conversations) or one document (text)."""

    text: str
    location: str
    """File and line or row number (from 1), to find it again."""
    error: str = ""
    """Reason if the row cannot be read at all, else ""."""


def list_files(source: Source) -> list[Path] | None:
    """Return a source's files, sorted, or None for a Hub data set."""
    if source.kind == "python_stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        modules = (file for file in root.rglob("*.py") if file.is_file())
        return sorted(f for f in modules if not SKIPPED_STDLIB & set(f.relative_to(root).parts))
    is_text = source.kind == "text" and source.text_field is None
    allowed = TEXT_SUFFIXES if is_text else ROW_SUFFIXES
    path = Path(source.path).expanduser()
    for name, plain in (("split", "train"), ("subset", None), ("files", None), ("revision", None)):
        is_read = name == "split" and (path / SPLITS).is_file()
        if (value := getattr(source, name)) != plain and path.exists() and not is_read:
            raise ValueError(
                f"sources.{name}: {value!r} with {source.path!r}, which is on this machine; it is "
                "for data sets of the Hub, leave it out"
            )
    if path.is_dir():
        path = hub_snapshot(path)
        saved = None if allowed == TEXT_SUFFIXES else saved_files(path, source.split)
        if saved is not None:
            return saved
        found = (x for x in path.rglob("*") if _suffix(x) in allowed and x.is_file())
        files = sorted(file for file in found if file.name not in DESCRIPTIONS)
        if not files:
            raise ValueError(
                f"sources.path: no {', '.join(allowed)} file in the folder {source.path!r}; "
                f"put one there, or set sources.kind (now {source.kind!r})"
            )
        return files
    if path.is_file():
        if _suffix(path) not in allowed:
            raise ValueError(
                f"sources.path: {source.path!r} has an unknown extension; give a file that ends "
                f"in {', '.join(allowed)}"
            )
        return [path]
    is_file_name = _suffix(path) in ROW_SUFFIXES + TEXT_SUFFIXES
    if is_file_name or is_text or not HUB_ID.fullmatch(source.path):
        raise ValueError(
            f"sources.path: {source.path!r} does not exist (current folder: {Path.cwd()})"
            f"{did_you_mean(source.path)}; "
            "give an existing file or folder, or a Hub id such as 'user/name' (for text, set "
            "text_field)"
        )
    return None


def read_source(source: Source) -> Iterator[RawRow]:
    """Yield a source's first ``max_rows`` rows in a fixed order, unreadable rows included."""
    files = list_files(source)
    if files is None:
        rows = read_hub(source)
    elif source.kind == "conversations" or source.text_field is not None:
        rows = (row for file in files for row in _read_rows(file, source))
    else:
        rows = (_read_document(file, source.max_row_bytes) for file in files)
    if source.text_field is not None:
        rows = (_take_field(row, source.text_field) for row in rows)
    return islice(rows, source.max_rows)


def dump_row(row: object) -> str:
    """Dump a row as JSON that can be encoded as UTF-8, even with unpaired surrogates."""
    text = json.dumps(row, ensure_ascii=False, default=str)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(row, default=str)
    return text


def needed_columns(source: Source, names: list[str]) -> list[str] | None:
    """Return the columns to read, or None for all. Unused columns may be large, like embeddings."""
    content = {"messages", "conversations", source.prompt_field, source.text_field} & {*names}
    if not content:
        return None
    also = {"id", "license", source.answer_field} | ROW_FIELDS
    return [name for name in names if name in content or name in also]


def check_unicode(text: str) -> None:
    """Refuse unpaired surrogates. JSON can contain them, but they cannot be hashed or tokenized."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("not valid Unicode") from error


def _take_field(row: RawRow, field: str) -> RawRow:
    """Return the document inside a row. A row without a document keeps its JSON, with a reason."""
    if row.error:
        return row
    try:
        content = read_json(row.text)
        if not isinstance(content, dict) or not isinstance(text := content.get(field), str):
            raise ValueError("text_field is not a string")
        check_unicode(text)
        if not text.strip():
            raise ValueError("empty document")
    except ValueError as error:
        return RawRow(row.text, row.location, str(error))
    return RawRow(text, row.location)


def _suffix(path: Path) -> str:
    """Return the extension in lower case. For a compressed file, ignore .gz."""
    path = Path(path.name.lower())
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def _open(path: Path) -> IO[bytes]:
    if path.suffix.lower() == ".gz":
        return cast(IO[bytes], gzip.open(path, "rb"))
    return path.open("rb")


def _read_document(path: Path, most: int) -> RawRow:
    try:
        with _open(path) as file:
            content = file.read(most + 1)
        if len(content) > most:
            return RawRow("", str(path), TOO_MANY_BYTES)
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        return RawRow("", str(path), "not UTF-8 text")
    except (gzip.BadGzipFile, EOFError, zlib.error):
        return RawRow("", str(path), "damaged gzip file")
    return RawRow(text, str(path), "" if text.strip() else "empty document")


def _read_rows(path: Path, source: Source) -> Iterator[RawRow]:
    suffix = _suffix(path)
    try:
        if suffix == ".parquet":
            yield from _read_parquet(path, source)
        elif suffix == ARROW:
            rows = read_arrow(path, PARQUET_ROWS, partial(needed_columns, source))
            for number, row in enumerate(rows, 1):
                yield _dumped(row, f"{path}:{number}", source.max_row_bytes)
        elif suffix == ".json" and _is_array(path):
            yield from _read_array(path, source.max_row_bytes)
        else:
            yield from _read_lines(path, source.max_row_bytes)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(
            f"sources.path: {str(path)!r} is not a whole gzip file ({error}); compress or fetch it "
            "again"
        ) from error


def _is_array(path: Path) -> bool:
    with _open(path) as file:
        return file.read(1 << 16).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _read_array(path: Path, most: int) -> Iterator[RawRow]:
    """Read a JSON array as a whole. JSON lines need memory for one row only."""
    try:
        with _open(path) as file:
            rows = json.loads(file.read().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"sources.path: {str(path)!r} is not valid JSON ({error}); fix the file, or name "
            "it .jsonl if it holds one object per line"
        ) from error
    for number, row in enumerate(rows, 1):
        yield _dumped(row, f"{path}:{number}", most)


def _dumped(row: object, location: str, most: int) -> RawRow:
    text = dump_row(row)
    if len(text) > most:
        return RawRow("", location, TOO_MANY_BYTES)
    return RawRow(text, location)


def _read_lines(path: Path, most: int) -> Iterator[RawRow]:
    with _open(path) as file:
        for number, line in enumerate(bounded_lines(file, most), 1):
            location = f"{path}:{number}"
            if line is None:
                yield RawRow("", location, TOO_MANY_BYTES)
                continue
            try:
                text = line.decode("utf-8-sig").strip()
            except UnicodeDecodeError:
                damaged = line.decode("utf-8", "backslashreplace").strip()
                yield RawRow(damaged, location, "not UTF-8 text")
                continue
            if text:
                yield RawRow(text, location)


def _read_parquet(path: Path, source: Source) -> Iterator[RawRow]:
    import pyarrow.parquet  # as datasets below, not for --help: they take a second to import

    number = 0
    try:
        file = pyarrow.parquet.ParquetFile(path)
        columns = needed_columns(source, file.schema_arrow.names)
        for batch in file.iter_batches(PARQUET_ROWS, columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield _dumped(row, f"{path}:{number}", source.max_row_bytes)
    except (pyarrow.ArrowException, OSError) as error:  # OSError: of a damaged page
        raise ValueError(
            f"sources.path: {str(path)!r} is not a readable parquet file ({error})"
        ) from error


# -- data sets of the Hub, downloaded once or streamed ----------------------------------------


def read_hub(source: Source) -> Iterator[RawRow]:
    data = load_hub(source)
    # A stream may not know its columns before its first row.
    columns = needed_columns(source, data.column_names or list(next(iter(data), {})))
    for number, row in enumerate(data.select_columns(columns) if columns else data, 1):
        yield _dumped(row, f"{source.path}[{source.split}]:{number}", source.max_row_bytes)


def load_hub(source: Source) -> Any:
    """Return the split as a ``Dataset``, or as an ``IterableDataset`` if the source is streamed."""
    return _load("load_dataset", source, split=source.split, streaming=source.streaming)


def hub_stamp(source: Source) -> str:
    """Return the data set's fingerprint, or its commit if streamed. Both change with the data."""
    if source.streaming:
        return str(_load("load_dataset_builder", source).hash)
    return load_hub(source)._fingerprint


def _load(loader: str, source: Source, **options: object) -> Any:
    import datasets
    from datasets.exceptions import DatasetsError

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    place = {"name": source.subset, "data_files": source.files, "revision": source.revision}
    try:
        return getattr(datasets, loader)(source.path, **place, **options)
    # RuntimeError: the data set is a loading script, which no release since 4.0 runs.
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        reason = str(error).strip().partition("\n")[0]
        given = "".join(f", {name} {value!r}" for name, value in place.items() if value is not None)
        raise ValueError(
            f"sources.path: {source.path!r} is neither a file nor a Hub data set that can be "
            f"loaded with split {source.split!r}{given} ({reason}); check the path, the split, the "
            "subset and the network"
        ) from error
