"""Turn raw rows into table columns, with a reason for each bad row, and draw rows by weight.

N is the number of rows. Hashes are int64 from 0 to 2^63, and equal for equal content.
"""

import json
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np
import pyarrow
from transformers import PreTrainedTokenizerBase

from ..files import Values
from .chat import ChatRenderer, RenderedChat
from .config import DataConfig, Source
from .conversations import (
    Conversation,
    Message,
    read_conversation,
    read_json,
)
from .groups import groups_of, language_of
from .overlap import (
    CONTAMINATED,
    Benchmarks,
    content_identity,
    mix_bits,
)
from .sources import check_unicode

FILTERED = "filter: "
TOO_LONG = "too long"
RAW = pyarrow.schema(
    {"raw": pyarrow.large_string(), "location": pyarrow.large_string()}
    | dict.fromkeys(("error", "source"), pyarrow.string())
)
SEQUENCES = {
    "input_ids": pyarrow.list_(pyarrow.int32()),
    "loss_mask": pyarrow.list_(pyarrow.int8()),
    "source": pyarrow.string(),
}
TABLE = pyarrow.schema(
    {
        **{field.name: field.type for field in RAW},
        **dict.fromkeys(("detail", "license", "left_out", "language", "segment"), pyarrow.string()),
        **dict.fromkeys(("hash", "identity", "contamination"), pyarrow.int64()),
        **dict.fromkeys(("thinking_back", "num_missing"), pyarrow.int32()),
        **dict.fromkeys(("num_tokens", "num_supervised"), pyarrow.int64()),
        **SEQUENCES,
    }
)


@dataclass(slots=True)
class TableRow:
    """Findings about a raw row. Each field is a column of the table."""

    error: str
    """Reason for dropping the row; "" for a good row."""
    detail: str = ""
    license: str = ""
    hash: int = 0
    identity: int = 0
    contamination: int = 0
    """Bit b is set if the row contains a prompt from benchmark b."""
    left_out: str = ""
    """Row fields without effect (unread, or not rendered by the template), as JSON."""
    language: str = ""
    segment: str = ""
    """Kind of text, one of the row's groups; see ``groups``."""
    thinking_back: int = 0
    """1: the last turn's thinking was put back after the template stripped it."""
    num_missing: int = 0
    num_tokens: int = 0
    """Tokens in the whole row, before the cut."""
    num_supervised: int = 0
    input_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)


class RowRefused(Exception):
    """Raised with a reason and details if the configuration drops a readable row."""


def settings_key(config: DataConfig, source: Source, benchmarks: Benchmarks | None) -> list[object]:
    """Return the settings that decide a row's columns, for the table's fingerprint."""
    fields = [source.prompt_field, source.answer_field, source.license, repr(source.filters)]
    found = benchmarks.fingerprint if benchmarks else ""
    drops_long = config.too_long == "drop"
    variables = json.dumps(config.chat_template_kwargs or {}, sort_keys=True)
    shape = (variables, config.explode_turns)
    limits = (config.max_length, drops_long, config.duplicates)
    return [*fields, *shape, config.seed, *limits, found]


def tokenize_batch(
    batch: pyarrow.RecordBatch,
    *,
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    source: Source,
    benchmarks: Benchmarks | None,
) -> pyarrow.RecordBatch:
    """Return a table row for each raw row. A bad row keeps its place, and states the reason."""
    columns = batch.to_pydict()
    renderer = None
    if source.kind == "conversations":
        variables = config.chat_template_kwargs
        renderer = ChatRenderer(tokenizer, variables, keeps_thinking=True)
    rows = [TableRow(error) for error in columns["error"]]
    good: list[TableRow] = []
    chats: list[RenderedChat] = []
    texts: list[str] = []
    for row, text in zip(rows, columns["raw"], strict=True):
        if row.error:
            continue
        try:
            if renderer is not None:
                value = read_json(text)
                conversation = read_messages(value, source)
                chat = renderer.render(conversation)
                row.num_missing, row.license = chat.num_missing, license_of(value, source)
                row.left_out = json.dumps([*conversation.left_out, *chat.not_rendered])
                row.thinking_back = int(chat.has_thinking_back)
                row.language, row.segment = groups_of(conversation.messages)
                row.hash = content_hash(identifying_text(conversation, config), config.seed)
                _judge(row, conversation, config, source, benchmarks)
                chats.append(chat)
            else:
                row.license = license_of({}, source)
                row.language, row.segment = language_of(text), "text"
                row.hash = content_hash(text, config.seed)
                _judge(row, text, config, source, benchmarks)
                texts.append(text)
            good.append(row)
        except RowRefused as refused:
            row.error, row.detail = refused.args
        except ValueError as error:
            row.error = str(error)
    pairs = renderer.tokenize(chats) if renderer is not None and chats else []
    if texts:
        found = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        pairs = [(ids, [1] * len(ids)) for ids in found]
    for row, (ids, mask) in zip(good, pairs, strict=True):
        _store_tokens(row, ids, mask, config, source)
    names = [name for name in TABLE.names if name in TableRow.__slots__]
    found = {name: [getattr(row, name) for row in rows] for name in names}
    return pyarrow.RecordBatch.from_pydict(columns | found, schema=TABLE)


def _judge(
    row: TableRow,
    content: str | Conversation,
    config: DataConfig,
    source: Source,
    benchmarks: Benchmarks | None,
) -> None:
    """Apply filters and benchmarks, which need no tokens, and store the key for duplicates."""
    if isinstance(content, str):
        texts, parts, num_turns, num_cut = [content], [content], None, 0
    else:
        names = ("reasoning_content", "content")
        texts = [turn[name] for turn in content.messages for name in names if turn.get(name)]
        parts = [
            part if isinstance(part, str) else json.dumps(part, ensure_ascii=False)
            for turn in content.messages
            for part in turn.values()
        ]
        num_turns = sum(turn["role"] in ("user", "assistant") for turn in content.messages)
        num_cut = content.num_cut
    if source.filters is not None:
        name, value = source.filters.refuse(texts, num_turns, num_cut)
        if name:
            shown = f"{value:.4g}" if isinstance(value, float) else str(value)
            raise RowRefused(FILTERED + name, shown)
    if benchmarks is not None:
        row.contamination, shared = benchmarks.find("\n".join(texts))
        if row.contamination:
            found = ", ".join(benchmarks.names_of(row.contamination))
            raise RowRefused(CONTAMINATED, f"{found}: {shared}")
    if config.duplicates != "keep":
        row.identity = content_identity(parts)


def _store_tokens(
    row: TableRow, ids: list[int], mask: list[int], config: DataConfig, source: Source
) -> None:
    """Store a row's tokens, cut at the maximum length, or refuse a too short or too long row."""
    row.num_tokens = len(ids)
    least = source.filters.min_tokens if source.filters is not None else None
    if least is not None and len(ids) < least:
        row.error, row.detail = f"{FILTERED}min_tokens", str(len(ids))
    elif config.too_long == "drop" and len(ids) > config.max_length:
        row.error, row.detail = TOO_LONG, str(len(ids))
    else:
        row.input_ids, row.loss_mask = ids[: config.max_length], mask[: config.max_length]
        row.num_supervised = sum(row.loss_mask)


def read_messages(row: Any, source: Source) -> Conversation:
    """Return the conversation in a row. ValueErrors have few different messages, for counting."""
    if source.prompt_field is None or source.answer_field is None:
        conversation = read_conversation(row)
    else:
        if not isinstance(row, dict):
            raise ValueError("row is not an object")
        fields = {"user": source.prompt_field, "assistant": source.answer_field}
        messages: list[Message] = []
        for role, field in fields.items():
            if not isinstance(row.get(field), str):
                raise ValueError(f"{field} is not a string")
            if not row[field].strip():
                raise ValueError(f"empty {field}")
            messages.append({"role": role, "content": row[field]})
        others = {name: x for name, x in row.items() if name not in fields.values()}
        conversation = read_conversation(others | {"messages": messages})
    check_unicode(json.dumps([conversation.messages, conversation.tools], ensure_ascii=False))
    return conversation


def identifying_text(conversation: Conversation, config: DataConfig) -> str:
    """Return the text to hash for split and draws. Turns exploded from one row share this text."""
    messages = conversation.messages
    if config.explode_turns:
        roles = [message["role"] for message in messages]
        messages = [
            {name: x for name, x in message.items() if name != "train"}
            for message in messages[: roles.index("assistant") + 1]
        ]
    text = json.dumps(messages, ensure_ascii=False)
    return text + json.dumps(conversation.tools) if conversation.tools else text


def license_of(row: Values, source: Source) -> str:
    """Return the row's license, else the source's, in lower case as on the Hub, or ""."""
    named = row.get("license")
    return (named if isinstance(named, str) and named else source.license or "").lower()


def content_hash(content: str, seed: int) -> int:
    """Return 63 bits of sha256(seed, content). Split and mixing use no other random numbers."""
    return int.from_bytes(sha256(f"{seed}\n{content}".encode()).digest()[:8], "big") >> 1


def draw_copies(hashes_N: np.ndarray, weights_N: np.ndarray) -> np.ndarray:
    """Return copies per row, int64 [N], as floor(weight) plus 1 with the remaining probability.

    Each row's copies depend only on its own hash and weight. A larger weight never removes a row.
    """
    # The split reads the same hash: mix its bits, so the draw does not depend on the split.
    uniform_N = (mix_bits(hashes_N.astype(np.uint64)) >> np.uint64(11)) / 2.0**53
    whole_N = np.floor(weights_N)
    return (whole_N + (uniform_N < weights_N - whole_N)).astype(np.int64)


def split_rows(hashes_N: np.ndarray, valid_fraction: float) -> np.ndarray:
    """Return the mask of held-out rows, which have hash < valid_fraction * 2^63.

    Rows with equal content are in the same set. If this holds out no row, the row with the smallest
    hash is held out. If this holds out all, the row with the largest hash stays in training.
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
