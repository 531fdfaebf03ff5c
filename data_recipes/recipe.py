"""Tokenize, filter, mix and split the rows of all sources, and count every row.

Read and tokenized rows are cached in Arrow files, so a second call only reads these. The cache key
is a hash of tokenizer, settings and source files (path, size, modification time). Rows stay on
disk, and memory holds a few numbers per row.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import islice
from multiprocessing.pool import Pool
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow
from huggingface_hub import constants
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from ..files import Values
from .card import EMPTY_MASK, DataReport, build_report, count_groups
from .chat import ChatRenderer
from .config import DataConfig, Source
from .conversations import NO_TURNS, explode, read_json
from .groups import balance, context_of
from .overlap import (
    EXACT_DUPLICATE,
    Benchmarks,
    exact_duplicates,
    read_benchmarks,
)
from .rows import (
    RAW,
    TABLE,
    draw_copies,
    settings_key,
    split_rows,
    tokenize_batch,
)
from .sources import (
    RawRow,
    dump_row,
    hub_stamp,
    list_files,
    read_source,
)
from .table import Rows, cached_rows

# Part of every cache fingerprint: raise it when the meaning of a cached column changes.
CACHE_FORMAT = 7
ROWS_PER_CALL = 512


@dataclass(frozen=True)
class TokenizedData:
    """Two sets with columns ``input_ids`` (list[int32]), ``loss_mask`` (list[int8]), ``source``."""

    train: Rows
    valid: Rows
    report: DataReport


def load_data(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, side_file: Path | None = None
) -> TokenizedData:
    """Read, filter, tokenize, mask, mix, split and count the sources.

    loss_mask is 1 on tokens written by the assistant (end-of-turn token included) and on every
    token in a text document. Each conversation or document is a row, cut at max_length.

    A row is dropped for the first of these reasons: it cannot be read or rendered, a filter refuses
    it, it contains a benchmark prompt, it has too few or too many tokens, its mask is empty, it
    repeats an earlier row without these faults. Rows skipped by a weight below 1 are counted, but
    not written to ``side_file``.

    Args:
        side_file: gets a JSON line per dropped row, with "reason", "source", "location" and "row".
            Some have a "detail", for example the value refused by a filter, the benchmarks and
            first shared words, or the location of the row repeated by a duplicate.

    Raises:
        ValueError: a source cannot be read, or no row is usable. The message says why.
    """
    benchmarks = read_benchmarks(config.decontaminate) if config.decontaminate else None
    rows, source_N = _tokenize_rows(config, tokenizer, benchmarks)
    errors = np.asarray(rows["error"], dtype=object)
    supervised = np.asarray(rows["num_supervised"], dtype=np.int64)
    errors[(errors == "") & (supervised == 0)] = EMPTY_MASK
    repeated_N = _mark_duplicates(config, rows, errors)
    if side_file is not None:
        _write_side_file(side_file, rows, errors, repeated_N)
    hashes = np.asarray(rows["hash"], np.int64)
    weights = np.array([source.weight for source in config.sources])
    weights_N = np.where(errors == "", weights[source_N], 0.0)
    groups = row_groups(rows)
    if config.group_shares:
        weights_N = balance(weights_N, groups, config.group_shares)
    copies = draw_copies(hashes, weights_N)
    drawn = np.flatnonzero(copies)
    is_valid = split_rows(hashes[drawn], config.valid_fraction)
    copies[drawn[is_valid]] = 1
    report = build_report(rows, errors, copies, config, benchmarks)
    report.groups = count_groups(groups, copies)
    if supervised[drawn].sum() == 0:
        raise ValueError(_nothing_usable(report, config))
    parts = []
    for side in (False, True):
        chosen = drawn[is_valid == side]
        part = rows.select(np.repeat(chosen, copies[chosen]))
        parts.append(part.select_columns(["input_ids", "loss_mask", "source"]))
    report.train_rows, report.valid_rows = len(parts[0]), len(parts[1])
    on_hub = [source.path for source in config.sources if list_files(source) is None]
    report.hub_datasets = list(dict.fromkeys(on_hub))
    return TokenizedData(train=parts[0], valid=parts[1], report=report)


def usable_rows(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Iterator[Values]:
    """Yield rows with a supervised token, in the sources' order, and read no more than is asked.

    These rows are not mixed, split, or checked for duplicates and benchmark prompts.
    """
    for source in config.sources:
        raw_batches = _raw_batches(source, explodes=config.explode_turns)
        for raw in (batch.slice(at, 1) for batch in raw_batches for at in range(len(batch))):
            batch = tokenize_batch(
                raw, tokenizer=tokenizer, config=config, source=source, benchmarks=None
            )
            found = Rows([batch])
            yield from (row for row in found if not row["error"] and row["num_supervised"])


def _tokenize_rows(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, benchmarks: Benchmarks | None
) -> tuple[Rows, np.ndarray]:
    """Return one table row for every raw row, bad rows included, and each row's source number."""
    if config.chat_sources:
        ChatRenderer(tokenizer)
    identity = tokenizer_identity(tokenizer)
    folder = Path(config.cache_dir or Path(constants.HF_HOME, "pipedraft", "data"))
    tables = []
    for source in config.sources:
        raw_key = _reading_key(source, explodes=config.explode_turns)
        raw_rows = partial(_raw_batches, source, explodes=config.explode_turns)
        raw = cached_rows(folder / f"{raw_key}.arrow", RAW, raw_rows)
        work = partial(
            tokenize_batch,
            tokenizer=tokenizer,
            config=config,
            source=source,
            benchmarks=benchmarks,
        )
        progress = tqdm(raw.batches, f"Tokenizing {source.name}", unit="batch", disable=None)
        key = _fingerprint([identity, raw_key, tuple(settings_key(config, source, benchmarks))])
        apply = partial(_apply, work, progress, config.num_proc)
        tables.append(cached_rows(folder / f"{key}.arrow", TABLE, apply))
    batches = [batch for table in tables for batch in table.batches]
    return Rows(batches), np.repeat(np.arange(len(tables)), [len(t) for t in tables])


Work: TypeAlias = Callable[[pyarrow.RecordBatch], pyarrow.RecordBatch]
_inherited: list[Work] = []


def _apply(
    work: Work, batches: Iterable[pyarrow.RecordBatch], num_proc: int
) -> Iterator[pyarrow.RecordBatch]:
    """Apply ``work`` to all batches in ``num_proc`` processes, and yield results in order."""
    if num_proc == 1:
        yield from map(work, batches)
        return
    # Sent once per process: a tokenizer may be larger than its batch.
    with Pool(num_proc, _inherited.append, (work,)) as pool:
        yield from pool.imap(_work_inherited, batches)


def _work_inherited(batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
    return _inherited[-1](batch)


def row_groups(rows: Rows) -> dict[str, np.ndarray]:
    """Return dimension -> each row's group, for context, language and segment."""
    found = {name: np.asarray(rows[name], dtype=object) for name in ("language", "segment")}
    lengths = [context_of(length) for length in rows["num_tokens"]]
    return {"context": np.array(lengths, dtype=object), **found}


def _mark_duplicates(config: DataConfig, rows: Rows, errors: np.ndarray) -> np.ndarray:
    """Mark duplicates in ``errors``. Return int64 [N], the row that each row repeats, or -1."""
    repeated_N = np.full(len(errors), -1, dtype=np.int64)
    if config.duplicates == "keep":
        return repeated_N
    identity_N = np.asarray(rows["identity"], dtype=np.int64)
    repeated_N = exact_duplicates(identity_N, errors == "")
    errors[repeated_N >= 0] = EXACT_DUPLICATE
    return repeated_N


def _reading_key(source: Source, *, explodes: bool) -> str:
    """Return a key that changes with a source's files."""
    files = list_files(source)
    stamp: object = None
    if files is None:
        stamp = hub_stamp(source)
    else:
        stats = [(str(file.resolve()), file.stat()) for file in files]
        stamp = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return _fingerprint([source.reading_key, stamp, explodes])


def _raw_batches(source: Source, *, explodes: bool) -> Iterator[pyarrow.RecordBatch]:
    found = read_source(source)
    if explodes and source.kind == "conversations":
        found = (turn for row in found for turn in _one_per_turn(row))
    columns = ((row.text, row.location, row.error, source.name) for row in found)
    is_empty = True
    while rows := list(islice(columns, ROWS_PER_CALL)):
        is_empty = False
        yield pyarrow.RecordBatch.from_pydict(
            dict(zip(RAW.names, zip(*rows, strict=True), strict=True)), schema=RAW
        )
    if is_empty:
        raise ValueError(
            f"sources.path: {source.name!r} (kind {source.kind!r}) holds no rows; remove the "
            "source or fill the file"
        )


def _one_per_turn(row: RawRow) -> Iterator[RawRow]:
    """Yield the conversation up to each assistant turn as a separate row."""
    try:
        turns = [] if row.error else explode(read_json(row.text))
    except ValueError:
        turns = []
    if len(turns) < 2:
        yield row
        return
    for number, turn in enumerate(turns, 1):
        yield RawRow(dump_row(turn), f"{row.location} turn {number}")


def _fingerprint(parts: list[object]) -> str:
    return sha256(repr([CACHE_FORMAT, *parts]).encode()).hexdigest()[:32]


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash a tokenizer's settings, because pickling it twice gives different bytes."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["truncation"] = state["padding"] = None
    return _fingerprint([json.dumps(state), tokenizer.chat_template, tokenizer.special_tokens_map])


def _write_side_file(path: Path, rows: Rows, errors: np.ndarray, repeated_N: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    bad = np.flatnonzero(errors != "")
    found = rows.select_columns(["source", "location", "raw", "detail"])
    with path.open("w", encoding="utf-8") as lines:
        for index, row in zip(bad, found.select(bad), strict=True):
            detail = row["detail"]
            if repeated_N[index] >= 0:
                detail = found[int(repeated_N[index])]["location"]
            record = {"reason": errors[index], "source": row["source"], "location": row["location"]}
            if detail:
                record["detail"] = detail
            lines.write(json.dumps(record | {"row": row["raw"]}, ensure_ascii=False) + "\n")


def _nothing_usable(report: DataReport, config: DataConfig) -> str:
    """Return the error message for data without a supervised token."""
    counts = {**report.bad_rows, **report.refused_rows()}
    if report.empty_mask_rows:
        # In the other rows, every assistant turn starts after max_length.
        lost = f"{report.missing_turns} assistant turns left no trace in the rendered text"
        counts[f"{EMPTY_MASK} ({lost})"] = report.empty_mask_rows
    reasons = ", ".join(f"{count} {reason}" for reason, count in counts.items())
    if NO_TURNS in counts:  # the likely cause, and its cure
        reasons += ', for which a source takes "prompt_field" and "answer_field"'
    return (
        f"data.sources: {', '.join(s.name for s in config.sources)}: none of {report.rows_read} "
        f"rows is usable; left out: {reasons}; fix the rows, the chat template or "
        f"data.max_length ({config.max_length}), loosen the filters, or name another source"
    )
