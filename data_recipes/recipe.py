"""Sources to tokenised, split, optionally packed data sets, with a count of every row.

Reading and tokenising are cached by ``datasets`` under a fingerprint of the files (path, size,
modification time), the tokenizer and the settings; a second call only reads the Arrow files.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from pipedraft.data_recipes.chat import ChatRenderer, normalise_conversation
from pipedraft.data_recipes.report import EMPTY_MASK, DataReport, build_report
from pipedraft.data_recipes.sources import Source, list_files, load_hub, read_source

if TYPE_CHECKING:
    from datasets import Dataset, Features

# Part of every cache fingerprint: raise it when the meaning of a cached column changes.
CACHE_FORMAT = 1
ROWS_PER_CALL = 512


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What to train on, and how rows become token sequences."""

    sources: list[Source]
    """Read in this order, all rows of each."""
    max_length: int = 2048
    """Tokens per row: longer conversations are cut, packed text is cut in blocks of this size."""
    valid_fraction: float = 0.02
    """Share of rows, chosen by a hash of content and seed, held out for validation. 0 holds out
    none; any other value at least one, given two different rows."""
    seed: int = 0
    """Decides the split and the order of packed documents."""
    num_proc: int = 1
    """Processes that tokenise."""
    cache_dir: str | None = None
    """Folder of the Arrow files; null is the cache folder of ``datasets``."""
    pack: bool = False
    """Language-model training: concatenate all documents instead of one row per conversation."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("data.sources: []; name at least one source")
        for name, value, least in (
            ("max_length", self.max_length, 2),
            ("num_proc", self.num_proc, 1),
        ):
            if value < least:
                raise ValueError(f"data.{name}: {value}; give {least} or more")
        if not 0 <= self.valid_fraction < 1:
            raise ValueError(f"data.valid_fraction: {self.valid_fraction}; give 0 <= value < 1")


@dataclass(frozen=True)
class TokenizedData:
    """Columns of both sets: ``input_ids`` list[int32], ``loss_mask`` list[int8], ``source``."""

    train: "Dataset"
    valid: "Dataset"
    report: DataReport


def load_data(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, side_file: Path | None = None
) -> TokenizedData:
    """Read, tokenise, mask, split and count the sources.

    loss_mask is 1 on tokens that the assistant writes (end-of-turn token included) and on every
    token of a text document. Unpacked: one row per conversation or document, cut at max_length;
    a conversation whose mask is empty is left out and counted. Packed: every document is followed
    by a separator (the pad token, or EOS for a tokenizer without one; mask 1 after text, 0 after a
    conversation), the documents of a split are shuffled, concatenated and cut in blocks of
    max_length, the last one short; ``source`` of a block is that of its first token.

    Args:
        side_file: JSON lines, one per row left out: {"reason", "source", "location", "row"}.

    Raises:
        ValueError: a source cannot be read, or no row is usable; the text says why.
    """
    rows = _tokenise_rows(config, tokenizer)
    errors = np.asarray(rows["error"][:], dtype=object)
    supervised = np.asarray(rows["num_supervised"][:], dtype=np.int64)
    if not config.pack:
        errors[(errors == "") & (supervised == 0)] = EMPTY_MASK
    kept = np.flatnonzero(errors == "")
    if side_file is not None:
        _write_side_file(side_file, rows, errors)
    report = build_report(
        rows,
        errors,
        max_length=config.max_length,
        chat_sources={source.name for source in config.sources if source.kind == "conversations"},
        pack=config.pack,
    )
    if not len(kept) or supervised[kept].sum() == 0:
        raise ValueError(_nothing_usable(report, config, tokenizer))
    is_valid = split_rows(np.asarray(rows["hash"][:], np.int64)[kept], config.valid_fraction)
    parts = []
    for side in (False, True):
        part = rows.select(kept[is_valid == side])
        part = part.select_columns(["input_ids", "loss_mask", "source"])
        parts.append(_pack(part, config, _separator(tokenizer)) if config.pack else part)
    report.train_rows, report.valid_rows = len(parts[0]), len(parts[1])
    return TokenizedData(train=parts[0], valid=parts[1], report=report)


def iterate_texts(config: DataConfig) -> Iterator[str]:
    """Every usable text: the contents of all turns, or the whole document."""
    for source in config.sources:
        for row in read_source(source):
            if row.error:
                continue
            if source.kind != "conversations":
                yield row.text
                continue
            try:
                messages = normalise_conversation(json.loads(row.text))
            except ValueError:
                continue
            yield from (message["content"] for message in messages)


def content_hash(content: str, seed: int) -> int:
    """63 bits of sha256(seed, content): the split depends on nothing else."""
    return int.from_bytes(sha256(f"{seed}\n{content}".encode()).digest()[:8], "big") >> 1


def split_rows(hashes: np.ndarray, valid_fraction: float) -> np.ndarray:
    """Which rows are held out: hash < valid_fraction * 2^63, equal content always together.

    If that holds out none (all), the row with the smallest (largest) hash changes sides.
    """
    if valid_fraction == 0 or len(hashes) < 2:
        return np.zeros(len(hashes), dtype=bool)
    threshold = int(valid_fraction * 2**63)
    is_valid = hashes < threshold
    if not is_valid.any():
        is_valid = hashes == hashes.min()
    if is_valid.all():
        is_valid = hashes != hashes.max()
    return is_valid


def _tokenise_rows(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> "Dataset":
    """All rows of all sources, bad ones included, one table row each."""
    from datasets import concatenate_datasets

    marks_chat = any(source.kind == "conversations" for source in config.sources)
    if marks_chat:
        ChatRenderer(tokenizer)
    identity = _tokenizer_identity(tokenizer)
    tables = []
    for source in config.sources:
        raw = _read_raw(source, config.cache_dir)
        settings = [identity, raw._fingerprint, config.max_length, config.seed, config.pack]
        tables.append(
            raw.map(
                tokenise_batch,
                batched=True,
                batch_size=ROWS_PER_CALL,
                num_proc=config.num_proc if config.num_proc > 1 else None,
                fn_kwargs={
                    "tokenizer": tokenizer,
                    "is_chat": source.kind == "conversations",
                    "max_length": None if config.pack else config.max_length,
                    "seed": config.seed,
                },
                features=_features(),
                new_fingerprint=_fingerprint(settings),
                desc=f"Tokenising {source.name}",
            )
        )
    return concatenate_datasets(tables)


def tokenise_batch(
    batch: dict[str, list[Any]],
    *,
    tokenizer: PreTrainedTokenizerBase,
    is_chat: bool,
    max_length: int | None,
    seed: int,
) -> dict[str, list[Any]]:
    """Table columns for a batch of raw rows; a bad row keeps its place, with the reason."""
    num_rows = len(batch["raw"])
    columns: dict[str, list[Any]] = {
        "error": list(batch["error"]),
        "hash": [0] * num_rows,
        "num_missing": [0] * num_rows,
        "num_tokens": [0] * num_rows,
        "num_supervised": [0] * num_rows,
        "input_ids": [[] for _ in range(num_rows)],
        "loss_mask": [[] for _ in range(num_rows)],
    }
    good, chats, texts = [], [], []
    renderer = ChatRenderer(tokenizer) if is_chat else None
    for index, raw in enumerate(batch["raw"]):
        if columns["error"][index]:
            continue
        content = raw
        if renderer:
            try:
                messages = normalise_conversation(parse_json(raw))
                chats.append(renderer.render(messages))
            except ValueError as error:
                columns["error"][index] = str(error)
                continue
            columns["num_missing"][index] = chats[-1].num_missing
            content = json.dumps(messages, ensure_ascii=False)
        else:
            texts.append(raw)
        columns["hash"][index] = content_hash(content, seed)
        good.append(index)
    if renderer:
        pairs = renderer.tokenize(chats) if chats else []
    else:
        ids = (
            tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
        )
        pairs = [(row, [1] * len(row)) for row in ids]
    for index, (ids, mask) in zip(good, pairs, strict=True):
        columns["num_tokens"][index] = len(ids)
        columns["input_ids"][index] = ids[:max_length]
        columns["loss_mask"][index] = mask[:max_length]
        columns["num_supervised"][index] = sum(mask[:max_length])
    return columns


def parse_json(text: str) -> Any:
    """json.loads with one countable reason for every syntax error."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError("not valid JSON") from error


def _read_raw(source: Source, cache_dir: str | None) -> "Dataset":
    from datasets import Dataset, Features
    from datasets.exceptions import DatasetGenerationError

    files = list_files(source)
    if files is None:
        stamp = load_hub(source)._fingerprint
    else:
        stats = [(str(file.resolve()), file.stat()) for file in files]
        stamp = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    columns = ("raw", "location", "error", "source")
    try:
        return Dataset.from_generator(
            _raw_columns,
            features=Features({name: _features()[name] for name in columns}),
            cache_dir=cache_dir,
            gen_kwargs={"source": source},
            fingerprint=_fingerprint([repr(source), stamp]),
        )
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, ValueError):
            raise error.__cause__ from None
        raise


def _raw_columns(source: Source) -> Iterator[dict[str, str]]:
    row = None
    for row in read_source(source):
        yield {
            "raw": row.text,
            "location": row.location,
            "error": row.error,
            "source": source.name,
        }
    if row is None:
        raise ValueError(
            f"sources.path: {source.name!r} (kind {source.kind!r}) holds no rows; remove the "
            "source or fill the file"
        )


def _features() -> "Features":
    from datasets import Features, List, Value

    return Features(
        {
            "raw": Value("large_string"),
            "location": Value("large_string"),
            "error": Value("string"),
            "source": Value("string"),
            "hash": Value("int64"),
            "num_missing": Value("int32"),
            "num_tokens": Value("int64"),
            "num_supervised": Value("int64"),
            "input_ids": List(Value("int32")),
            "loss_mask": List(Value("int8")),
        }
    )


def _fingerprint(parts: list[Any]) -> str:
    return sha256(repr([CACHE_FORMAT, *parts]).encode()).hexdigest()[:32]


def _tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of what decides the ids: pickling a tokenizer does not give the same bytes twice."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["truncation"] = state["padding"] = None
    return _fingerprint([json.dumps(state), tokenizer.chat_template, tokenizer.special_tokens_map])


def _separator(tokenizer: PreTrainedTokenizerBase) -> int:
    token_id = tokenizer.pad_token_id
    token_id = tokenizer.eos_token_id if token_id is None else token_id
    if token_id is None:
        raise ValueError(
            f"tokenizer: {tokenizer.name_or_path!r} has neither a pad nor an EOS token to separate "
            "packed documents with; set tokenizer.pad_token"
        )
    return token_id


def _pack(part: "Dataset", config: DataConfig, separator: int) -> "Dataset":
    """Shuffle the documents, end each with the separator, concatenate, cut in blocks."""
    import pyarrow
    from datasets import Dataset, Features, List, Value

    features = Features(
        {
            "input_ids": List(Value("int32")),
            "loss_mask": List(Value("int8")),
            "source": Value("string"),
        }
    )
    if not len(part):
        return Dataset.from_dict({name: [] for name in features}, features=features)
    is_chat = {source.name: source.kind == "conversations" for source in config.sources}
    table = part.with_format("arrow")[:].combine_chunks()
    lengths = table["input_ids"].combine_chunks().value_lengths().to_numpy()
    ends = lengths.cumsum()
    flat_ids = table["input_ids"].combine_chunks().flatten().to_numpy()
    flat_mask = table["loss_mask"].combine_chunks().flatten().to_numpy()
    names = table["source"].to_pylist()
    order = np.random.default_rng(config.seed).permutation(len(lengths))
    id_pieces: list[Any] = []
    mask_pieces: list[Any] = []
    for index in order:
        document = slice(ends[index] - lengths[index], ends[index])
        id_pieces += [flat_ids[document], [separator]]
        mask_pieces += [flat_mask[document], [not is_chat[names[index]]]]
    ids = np.concatenate(id_pieces).astype(np.int32)
    mask = np.concatenate(mask_pieces).astype(np.int8)
    starts = np.arange(0, len(ids), config.max_length)
    first_documents = np.searchsorted((lengths[order] + 1).cumsum(), starts, side="right")
    offsets = pyarrow.array(np.append(starts, len(ids)), type=pyarrow.int32())
    blocks = {
        "input_ids": pyarrow.ListArray.from_arrays(offsets, pyarrow.array(ids)),
        "loss_mask": pyarrow.ListArray.from_arrays(offsets, pyarrow.array(mask)),
        "source": pyarrow.array([names[order[first]] for first in first_documents]),
    }
    return Dataset(pyarrow.table(blocks).cast(features.arrow_schema))


def _write_side_file(path: Path, rows: "Dataset", errors: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    bad = np.flatnonzero(errors != "")
    found = rows.select(bad).select_columns(["source", "location", "raw"])
    with path.open("w", encoding="utf-8") as lines:
        for reason, row in zip(errors[bad], found, strict=True):
            record = {"reason": reason, "source": row["source"], "location": row["location"]}
            lines.write(json.dumps(record | {"row": row["raw"]}, ensure_ascii=False) + "\n")


def _nothing_usable(
    report: DataReport, config: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> str:
    """The message for data without one supervised token."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in report.bad_rows.items())
    names = [source.name for source in config.sources]
    message = f"data.sources: {names}: none of {report.rows_read} rows is usable"
    if reasons:
        message += f"; bad rows: {reasons}"
    if report.empty_mask_rows:
        message += (
            f"; the {ChatRenderer(tokenizer).describe()} leaves {report.empty_mask_rows} masks "
            f"empty: {report.missing_turns} assistant turns left no trace in the rendered text, "
            f"the others start after data.max_length = {config.max_length} tokens; use a "
            "template that writes the assistant's turns, or raise data.max_length"
        )
    else:
        message += "; mend the rows or name another source"
    return message
