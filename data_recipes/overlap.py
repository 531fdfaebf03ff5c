"""Find rows that repeat a benchmark's prompt or an earlier row.

Benchmark overlap is found as for GPT-3 (arXiv:2005.14165, appendix C), by lower-case word 13-grams
without punctuation. There are three deviations. N-grams in many prompts of one file are ignored,
because they frame the file's questions. A whole row is dropped, not a window around the overlap. A
prompt with 8 to 12 words must occur as a whole, and shorter prompts are ignored.

N rows, W words in a row, G n-grams in a row.
"""

import json
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from zlib import crc32

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ..files import Values
from .config import CJK, Source
from .conversations import split_parts
from .sources import list_files, read_source

# Chinese and Japanese are written without spaces, so each of their characters is a word.
WORD = re.compile(rf"[{CJK}]|[^\W{CJK}]+")
# Odd, so that words multiplied by its powers modulo 2^64 lose nothing.
BASE = pow(0x9E3779B97F4A7C15, -1, 1 << 64)


def split_words(text: str) -> list[str]:
    """Return lower-case words of letters, digits and underscores, without any punctuation."""
    return WORD.findall(text.lower())


def hash_words(words: list[str]) -> np.ndarray:
    """Return uint64 [W] hashes that are equal in every process, unlike Python's salted ``hash``."""
    hashes = map(crc32, map(str.encode, words))
    return np.fromiter(hashes, dtype=np.uint64, count=len(words))


def hash_ngrams(hashes_W: np.ndarray, length: int) -> np.ndarray:
    """Return the hashes of all runs of ``length`` words, uint64 [G], G = max(0, W - length + 1).

    The run at word i has the hash sum_j hashes[i + j] BASE^j modulo 2^64.
    """
    if len(hashes_W) < length:
        return hashes_W[:0]
    powers = np.cumprod(np.array([1, *[BASE] * (length - 1)], dtype=np.uint64))
    return sliding_window_view(hashes_W, length) @ powers


def mix_bits(values: np.ndarray) -> np.ndarray:
    """Map uint64 one-to-one to random-looking bits (the splitmix64 finalizer)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


# -- benchmarks -----------------------------------------------------------------------------

CONTAMINATED = "contaminated"
NGRAM_WORDS = 13
MIN_WORDS = 8
# An n-gram in this many prompts from one file belongs to all its questions.
COMMON_PROMPTS = 10
# One bit of an int64 for each benchmark.
MAX_BENCHMARKS = 62
PROMPT_FIELDS = ("question", "prompt", "instruction", "problem", "text")


@dataclass(frozen=True)
class Benchmarks:
    """Index of benchmark prompts that the data must not contain."""

    names: list[str]
    num_prompts: list[int]
    """Prompts per benchmark, every turn counted."""
    num_short: list[int]
    """Ignored prompts: fewer than ``MIN_WORDS`` words."""
    tables: dict[int, tuple[np.ndarray, np.ndarray]]
    """Length in words -> [G] sorted hashes, and [G] int64 masks: bit b is set for benchmark b."""

    @property
    def fingerprint(self) -> str:
        digest = sha256(repr(self.names).encode())
        for length, (hashes, masks) in sorted(self.tables.items()):
            digest.update(b"%d" % length + hashes.tobytes() + masks.tobytes())
        return digest.hexdigest()

    def find(self, text: str) -> tuple[int, str]:
        """Return a bit mask of benchmarks with prompts in the text, and the first shared words."""
        words = split_words(text)
        hashes_W = hash_words(words)
        mask, shared = 0, ""
        for length, (table, masks) in self.tables.items():
            grams_G = hash_ngrams(hashes_W, length)
            places = np.minimum(np.searchsorted(table, grams_G), len(table) - 1)
            hits = np.flatnonzero(table[places] == grams_G)
            if len(hits):
                mask |= int(np.bitwise_or.reduce(masks[places[hits]]))
                shared = shared or " ".join(words[hits[0] : hits[0] + length])
        return mask, shared

    def names_of(self, mask: int) -> list[str]:
        return [name for bit, name in enumerate(self.names) if mask >> bit & 1]


def read_benchmarks(entries: Sequence[str | Source]) -> Benchmarks:
    """Index prompts from files, folders (one benchmark per file) or Hub data sets.

    Raises:
        ValueError: a file is unreadable, or a row has no prompt. The message names file and row.
    """
    sources: list[tuple[str, Source]] = []
    for entry in entries:
        source = Source(path=entry) if isinstance(entry, str) else entry
        try:
            files = list_files(source)
        except ValueError as error:
            said = str(error).removeprefix("sources.path: ")
            raise ValueError(f"data.decontaminate: {said}") from error
        if files is None:
            parts = (source.path, source.subset or "", source.split)
            sources.append((":".join(part for part in parts if part), source))
        else:
            most, size = source.max_rows, source.max_row_bytes
            sources += [
                ("/".join(f.parts[-2:]), Source(path=str(f), max_rows=most, max_row_bytes=size))
                for f in files
            ]
    if len(sources) > MAX_BENCHMARKS:
        raise ValueError(
            f"data.decontaminate: {len(sources)} files; give {MAX_BENCHMARKS} at most, or "
            "concatenate some"
        )
    num_prompts, num_short = [], []
    masks: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for bit, (_, source) in enumerate(sources):
        hashed = [hash_words(split_words(prompt)) for prompt in _read_prompts(source)]
        long_enough = [hashes_W for hashes_W in hashed if len(hashes_W) >= MIN_WORDS]
        num_prompts.append(len(hashed))
        num_short.append(len(hashed) - len(long_enough))
        counts: defaultdict[int, Counter[int]] = defaultdict(Counter)
        for hashes_W in long_enough:
            length = min(NGRAM_WORDS, len(hashes_W))
            counts[length].update(set(hash_ngrams(hashes_W, length).tolist()))
        for length, counter in counts.items():
            for gram, count in counter.items():
                if count < COMMON_PROMPTS:
                    masks[length][gram] |= 1 << bit
    tables = {}
    for length, table in sorted(masks.items(), reverse=True):
        hashes = np.array(sorted(table), dtype=np.uint64)
        tables[length] = (hashes, np.array([table[int(gram)] for gram in hashes], dtype=np.int64))
    return Benchmarks([name for name, _ in sources], num_prompts, num_short, tables)


def _read_prompts(source: Source) -> list[str]:
    """Return the user turns in all rows, without repetitions."""
    found: dict[str, None] = {}
    for row in read_source(source):
        try:
            if row.error:
                raise ValueError(row.error)
            found.update(dict.fromkeys(prompts_of(json.loads(row.text))))
        except ValueError as error:
            raise ValueError(
                f"data.decontaminate: {row.location} holds no prompt ({error}); give JSONL rows "
                f"with turns, messages or one of {', '.join(PROMPT_FIELDS)}"
            ) from error
    if not found:
        raise ValueError(f"data.decontaminate: {source.path!r} holds no rows; leave it out")
    return list(found)


def user_turns(row: Values) -> list[str]:
    """Return the user turns as texts, from the OpenAI or the ShareGPT form."""
    turns = row.get("messages") or row.get("conversations") or []
    return [
        split_parts(turn.get("content") or turn.get("value") or "")[0]
        for turn in turns
        if isinstance(turn, dict) and (turn.get("role") or turn.get("from")) in ("user", "human")
    ]


def prompts_of(row: object) -> list[str]:
    """Return the user turns in one benchmark row."""
    if not isinstance(row, dict):
        raise ValueError("row is not an object")
    if isinstance(row.get("messages") or row.get("conversations"), list):
        texts: object = [text or None for text in user_turns(row)]
    elif row.get("turns"):
        texts = row["turns"]
    else:
        name = next((name for name in PROMPT_FIELDS if row.get(name)), None)
        if name is None:
            raise ValueError("none of the known fields")
        texts = row[name] if isinstance(row[name], list) else [row[name]]
        if name == "instruction" and row.get("input"):
            texts = [f"{row[name]}\n\n{row['input']}"]
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
        raise ValueError("a prompt is not a text")
    return texts


# -- duplicates -----------------------------------------------------------------------------

EXACT_DUPLICATE = "duplicate: exact"


def content_identity(parts: Sequence[str]) -> int:
    """Return a 63-bit hash that ignores differences in case, white space and Unicode form."""
    normal = [" ".join(unicodedata.normalize("NFKC", p).casefold().split()) for p in parts]
    digest = sha256("\0".join(normal).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def exact_duplicates(identity_N: np.ndarray, usable_N: np.ndarray) -> np.ndarray:
    """Return int64 [N], for each row the first earlier usable row with equal content, or -1."""
    first_N = np.full(len(identity_N), -1, dtype=np.int64)
    rows = np.flatnonzero(usable_N)
    _, first, inverse = np.unique(identity_N[rows], return_index=True, return_inverse=True)
    earlier = rows[first[inverse]]
    first_N[rows] = np.where(earlier < rows, earlier, -1)
    return first_N
