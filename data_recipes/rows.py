"""Raw rows to table columns, each with its reason if bad, and which of them are drawn, how often.

N rows; hashes are int64 from 0 to 2^63, equal for equal content.
"""

import json
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from pipedraft.data_recipes.chat import ChatRenderer, normalize_conversation
from pipedraft.data_recipes.decontamination import CONTAMINATED, Benchmarks
from pipedraft.data_recipes.filters import (
    FILTERED,
    NUM_BANDS,
    band_keys,
    content_identity,
    mix_bits,
)
from pipedraft.data_recipes.sources import Source, check_unicode, parse_json

if TYPE_CHECKING:
    from datasets import Dataset, Features

Duplicates = Literal["keep", "exact", "near"]
TOO_LONG = "too long"
RAW_COLUMNS = ("raw", "location", "error", "source")


@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """What decides the columns of a row, besides the tokenizer."""

    source: Source
    seed: int
    max_length: int | None
    """Tokens after which a row is cut; null: never."""
    drops_long: bool
    """A row of more than max_length tokens is left out instead."""
    duplicates: Duplicates
    benchmarks: Benchmarks | None

    @property
    def key(self) -> tuple[Any, ...]:
        """For the fingerprint of a cached table."""
        source = self.source
        fields = (source.prompt_field, source.answer_field, source.license, repr(source.filters))
        found = self.benchmarks.fingerprint if self.benchmarks else ""
        return (*fields, self.seed, self.max_length, self.drops_long, self.duplicates, found)


def table_features(duplicates: Duplicates) -> "Features":
    from datasets import Features, List, Value

    columns = {
        "raw": Value("large_string"),
        "location": Value("large_string"),
        "error": Value("string"),
        "source": Value("string"),
        "detail": Value("string"),
        "license": Value("string"),
        "hash": Value("int64"),
        "identity": Value("int64"),
        "contamination": Value("int64"),
        "num_missing": Value("int32"),
        "num_tokens": Value("int64"),
        "num_supervised": Value("int64"),
        "input_ids": List(Value("int32")),
        "loss_mask": List(Value("int8")),
    }
    if duplicates == "near":
        columns["bands"] = List(Value("int64"), length=NUM_BANDS)
    return Features(columns)


def tokenize_batch(
    batch: dict[str, list[Any]], *, tokenizer: PreTrainedTokenizerBase, settings: RowSettings
) -> dict[str, list[Any]]:
    """Table columns for a batch of raw rows; a bad row keeps its place, with the reason."""
    num_rows = len(batch["raw"])
    columns = _empty_columns(batch, settings.duplicates == "near")
    renderer = ChatRenderer(tokenizer) if settings.source.kind == "conversations" else None
    good, chats, texts = [], [], []
    for index in range(num_rows):
        if columns["error"][index]:
            continue
        try:
            if renderer:
                row = parse_json(batch["raw"][index])
                messages = read_messages(row, settings.source)
                chat = renderer.render(messages)
                columns["num_missing"][index] = chat.num_missing
                columns["license"][index] = license_of(row, settings.source)
                content = json.dumps(messages, ensure_ascii=False)
            else:
                messages, content = None, batch["raw"][index]
                columns["license"][index] = (settings.source.license or "").lower()
        except ValueError as error:
            columns["error"][index] = str(error)
            continue
        columns["hash"][index] = content_hash(content, settings.seed)
        _judge(columns, index, messages, content, settings)
        if columns["error"][index]:
            continue
        if renderer:
            chats.append(chat)
        else:
            texts.append(content)
        good.append(index)
    if renderer:
        pairs = renderer.tokenize(chats) if chats else []
    else:
        ids = (
            tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
        )
        pairs = [(row, [1] * len(row)) for row in ids]
    for index, (ids, mask) in zip(good, pairs, strict=True):
        _store_tokens(columns, index, ids, mask, settings)
    return columns


def _empty_columns(batch: dict[str, list[Any]], has_bands: bool) -> dict[str, list[Any]]:
    num_rows = len(batch["raw"])
    columns: dict[str, list[Any]] = {
        "error": list(batch["error"]),
        "input_ids": [[] for _ in range(num_rows)],
        "loss_mask": [[] for _ in range(num_rows)],
    }
    for name in ("detail", "license"):
        columns[name] = [""] * num_rows
    for name in ("hash", "identity", "contamination", "num_missing"):
        columns[name] = [0] * num_rows
    for name in ("num_tokens", "num_supervised"):
        columns[name] = [0] * num_rows
    if has_bands:
        columns["bands"] = [[0] * NUM_BANDS for _ in range(num_rows)]
    return columns


def _judge(
    columns: dict[str, list[Any]],
    index: int,
    messages: list[dict[str, str]] | None,
    content: str,
    settings: RowSettings,
) -> None:
    """What the text alone decides: filters, benchmarks, and the keys of duplicates."""
    texts = [content] if messages is None else [message["content"] for message in messages]
    filters = settings.source.filters
    if filters is not None:
        num_turns = None
        if messages is not None:
            num_turns = sum(message["role"] != "system" for message in messages)
        name, value = filters.refuse(texts, num_turns)
        if name:
            columns["error"][index] = FILTERED + name
            columns["detail"][index] = f"{value:.4g}" if isinstance(value, float) else str(value)
            return
    whole = "\n".join(texts)
    if settings.benchmarks is not None:
        mask, shared = settings.benchmarks.find(whole)
        if mask:
            columns["error"][index] = CONTAMINATED
            columns["contamination"][index] = mask
            names = ", ".join(settings.benchmarks.names_of(mask))
            columns["detail"][index] = f"{names}: {shared}"
            return
    if settings.duplicates != "keep":
        parts = texts
        if messages is not None:
            parts = [part for message in messages for part in message.values()]
        columns["identity"][index] = content_identity(parts)
    if settings.duplicates == "near":
        columns["bands"][index] = band_keys(whole)


def _store_tokens(
    columns: dict[str, list[Any]],
    index: int,
    ids: list[int],
    mask: list[int],
    settings: RowSettings,
) -> None:
    columns["num_tokens"][index] = len(ids)
    filters, limit = settings.source.filters, settings.max_length
    if filters is not None and filters.refuse_tokens(len(ids)):
        columns["error"][index], columns["detail"][index] = f"{FILTERED}min_tokens", str(len(ids))
    elif settings.drops_long and limit is not None and len(ids) > limit:
        columns["error"][index], columns["detail"][index] = TOO_LONG, str(len(ids))
    else:
        columns["input_ids"][index] = ids[:limit]
        columns["loss_mask"][index] = mask[:limit]
        columns["num_supervised"][index] = sum(mask[:limit])


def read_messages(row: Any, source: Source) -> list[dict[str, str]]:
    """The conversation in a row of this source.

    Raises:
        ValueError: a short reason without data from the row, so that reasons can be counted.
    """
    if source.prompt_field is None or source.answer_field is None:
        messages = normalize_conversation(row)
    else:
        if not isinstance(row, dict):
            raise ValueError("row is not an object")
        fields = {"user": source.prompt_field, "assistant": source.answer_field}
        messages = []
        for role, field in fields.items():
            if not isinstance(row.get(field), str):
                raise ValueError(f"{field} is not a string")
            if not row[field].strip():
                raise ValueError(f"empty {field}")
            messages.append({"role": role, "content": row[field]})
    for message in messages:
        check_unicode(message["content"])
    return messages


def license_of(row: dict[str, Any], source: Source) -> str:
    """Lower case, as the Hub writes licenses; "" if neither the row nor the source names one."""
    named = row.get("license")
    return (named if isinstance(named, str) and named else source.license or "").lower()


def content_hash(content: str, seed: int) -> int:
    """63 bits of sha256(seed, content): split and mixing depend on nothing else."""
    return int.from_bytes(sha256(f"{seed}\n{content}".encode()).digest()[:8], "big") >> 1


def draw_copies(hashes_N: np.ndarray, weights_N: np.ndarray) -> np.ndarray:
    """[N] int64: floor(weight), and one more with probability weight - floor(weight).

    A row is decided by its own hash and weight: other rows and sources do not matter, and a larger
    weight never takes a row away.
    """
    # Mixed, so that the draw is independent of the split, which reads the same hash.
    uniform_N = (mix_bits(hashes_N.astype(np.uint64)) >> np.uint64(11)) / 2.0**53
    whole_N = np.floor(weights_N)
    return (whole_N + (uniform_N < weights_N - whole_N)).astype(np.int64)


def split_rows(hashes_N: np.ndarray, valid_fraction: float) -> np.ndarray:
    """Which rows are held out: hash < valid_fraction * 2^63, equal content always together.

    If that holds out none (all), the row with the smallest (largest) hash changes sides.
    """
    if valid_fraction == 0 or len(hashes_N) < 2:
        return np.zeros(len(hashes_N), dtype=bool)
    threshold = int(valid_fraction * 2**63)
    is_valid = hashes_N < threshold
    if not is_valid.any():
        is_valid = hashes_N == hashes_N.min()
    if is_valid.all():
        is_valid = hashes_N != hashes_N.max()
    return is_valid


def separator_token(tokenizer: "PreTrainedTokenizerBase") -> int:
    """The pad token, or EOS for a tokenizer without one."""
    token_id = tokenizer.pad_token_id
    token_id = tokenizer.eos_token_id if token_id is None else token_id
    if token_id is None:
        raise ValueError(
            f"tokenizer: {tokenizer.name_or_path!r} has neither a pad nor an EOS token to separate "
            "packed documents with; set tokenizer.pad_token"
        )
    return token_id


def pack_documents(
    part: "Dataset", *, max_length: int, seed: int, separator: int, chat_sources: set[str]
) -> "Dataset":
    """Shuffle the documents, end each with the separator, concatenate, cut in blocks.

    Args:
        chat_sources: names of the sources of conversations, after which the separator is not
            supervised.
    """
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
    table = part.with_format("arrow")[:].combine_chunks()
    lengths = table["input_ids"].combine_chunks().value_lengths().to_numpy()
    ends = lengths.cumsum()
    flat_ids = table["input_ids"].combine_chunks().flatten().to_numpy()
    flat_mask = table["loss_mask"].combine_chunks().flatten().to_numpy()
    names = table["source"].to_pylist()
    order = np.random.default_rng(seed).permutation(len(lengths))
    id_pieces: list[Any] = []
    mask_pieces: list[Any] = []
    for index in order:
        document = slice(ends[index] - lengths[index], ends[index])
        id_pieces += [flat_ids[document], [separator]]
        mask_pieces += [flat_mask[document], [names[index] not in chat_sources]]
    ids = np.concatenate(id_pieces).astype(np.int32)
    mask = np.concatenate(mask_pieces).astype(np.int8)
    starts = np.arange(0, len(ids), max_length)
    first_documents = np.searchsorted((lengths[order] + 1).cumsum(), starts, side="right")
    offsets = pyarrow.array(np.append(starts, len(ids)), type=pyarrow.int32())
    blocks = {
        "input_ids": pyarrow.ListArray.from_arrays(offsets, pyarrow.array(ids)),
        "loss_mask": pyarrow.ListArray.from_arrays(offsets, pyarrow.array(mask)),
        "source": pyarrow.array([names[order[first]] for first in first_documents]),
    }
    return Dataset(pyarrow.table(blocks).cast(features.arrow_schema))
