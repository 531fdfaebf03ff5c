"""Rows that repeat something: a benchmark's prompt, or an earlier row.

Overlap with benchmarks is found as for GPT-3 (arXiv:2005.14165, appendix C): 13-grams of words in
lower case without punctuation, and what occurs very often is no overlap. Deviations: n-grams common
to many prompts of one file are the frame around its questions and are not looked for; a whole row
is left out instead of a window around the overlap; a prompt of 8 to 12 words must occur as a whole,
one of fewer words is not looked for.

Near duplicates are found with MinHash (Broder 1997) and banding: the candidates of a band are the
rows whose minima are all equal there, and each candidate pair is then compared by the exact Jaccard
index of its word 5-grams. With 21 bands of 6 minima a pair of Jaccard index 0.8 is a candidate with
probability 0.998, one of 0.7 with 0.93, one of 0.3 with 0.015. The band keys are a column of the
table on disk and bands are sorted one at a time, so that memory is 16 bytes per row instead of the
dictionary per band that index libraries keep.

N rows, W words of a row, G its n-grams, M minima, Q bands.
"""

import json
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Any
from zlib import crc32

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from pipedraft.data_recipes.config import CJK, Source
from pipedraft.data_recipes.sources import list_files, read_source
from pipedraft.files import Values

# Chinese and Japanese are written without spaces, so each of their characters is a word.
WORD = re.compile(rf"[{CJK}]|[^\W{CJK}]+")
# Odd, so that words multiplied by its powers modulo 2^64 lose nothing.
BASE = pow(0x9E3779B97F4A7C15, -1, 1 << 64)


def split_words(text: str) -> list[str]:
    """Letters, digits and underscores in lower case; punctuation and layout do not count."""
    return WORD.findall(text.lower())


def hash_words(words: list[str]) -> np.ndarray:
    """Hashes of words, uint64 [W]: the same in every process (Python's own hash is salted)."""
    hashes = map(crc32, map(str.encode, words))
    return np.fromiter(hashes, dtype=np.uint64, count=len(words))


def hash_ngrams(hashes_W: np.ndarray, length: int) -> np.ndarray:
    """Hashes of runs of ``length`` words, uint64 [G], G = max(0, W - length + 1).

    sum_j hashes[i + j] BASE^j modulo 2^64.
    """
    if len(hashes_W) < length:
        return hashes_W[:0]
    powers = np.cumprod(np.array([1, *[BASE] * (length - 1)], dtype=np.uint64))
    return sliding_window_view(hashes_W, length) @ powers


def mix_bits(values: np.ndarray) -> np.ndarray:
    """A bijection of uint64 after which all bits look random (the finalizer of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


# -- benchmarks -----------------------------------------------------------------------------

CONTAMINATED = "contaminated"
NGRAM_WORDS = 13
MIN_WORDS = 8
# An n-gram of as many prompts of a file as this belongs to all its questions.
COMMON_PROMPTS = 10
# One bit of an int64 for each benchmark.
MAX_BENCHMARKS = 62
PROMPT_FIELDS = ("question", "prompt", "instruction", "problem", "text")


@dataclass(frozen=True)
class Benchmarks:
    """Prompts of benchmarks, which must not occur in the data."""

    names: list[str]
    num_prompts: list[int]
    """Prompts of each benchmark, every turn counted."""
    num_short: list[int]
    """Prompts of fewer than ``MIN_WORDS`` words, which are not looked for."""
    tables: dict[int, tuple[np.ndarray, np.ndarray]]
    """Length in words -> [G] sorted hashes, and [G] int64 masks: bit b is set for benchmark b."""

    @property
    def fingerprint(self) -> str:
        digest = sha256(repr(self.names).encode())
        for length, (hashes, masks) in sorted(self.tables.items()):
            digest.update(b"%d" % length + hashes.tobytes() + masks.tobytes())
        return digest.hexdigest()

    def find(self, text: str) -> tuple[int, str]:
        """Mask of the benchmarks whose prompts the text contains, and the first words shared."""
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
    """Index the prompts of files, folders (every file is a benchmark of its own) or Hub data sets.

    Raises:
        ValueError: a file cannot be read, or a row holds no prompt; it names file and row.
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
    """Every user turn of every row; the same prompt counts once."""
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
    """Texts of the users' turns, in the OpenAI or the ShareGPT form."""
    turns = row.get("messages") or row.get("conversations") or []
    return [
        turn.get("content") or turn.get("value") or ""
        for turn in turns
        if isinstance(turn, dict) and (turn.get("role") or turn.get("from")) in ("user", "human")
    ]


def prompts_of(row: Any) -> list[str]:
    """The user's turns in one row of a benchmark."""
    if not isinstance(row, dict):
        raise ValueError("row is not an object")
    if isinstance(row.get("messages") or row.get("conversations"), list):
        texts: Any = [text or None for text in user_turns(row)]
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

EXACT_DUPLICATE, NEAR_DUPLICATE = "duplicate: exact", "duplicate: near"
SHINGLE_WORDS = 5
NUM_BANDS, MINIMA_PER_BAND = 21, 6
# Shingles hashed at a time: bounds the memory of one huge document.
SHINGLES_PER_BLOCK = 8192
CACHED_SHINGLE_SETS = 4096
_CONSTANTS = np.random.default_rng(0).integers(0, 2**63, (2, NUM_BANDS * MINIMA_PER_BAND))
MULTIPLIERS_M = _CONSTANTS[0].astype(np.uint64) * np.uint64(2) + np.uint64(1)
OFFSETS_M = _CONSTANTS[1].astype(np.uint64)


def content_identity(parts: Sequence[str]) -> int:
    """63 bits, equal for texts that differ in case, white space or Unicode form only.

    Args:
        parts: roles and contents in turn, or the one document.
    """
    normal = [" ".join(unicodedata.normalize("NFKC", p).casefold().split()) for p in parts]
    digest = sha256("\0".join(normal).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def hash_shingles(text: str) -> np.ndarray:
    """Hashes of a text's word 5-grams, uint64 [G]; of all words together in a shorter one."""
    hashes_W = hash_words(split_words(text))
    if not len(hashes_W):
        return np.empty(0, dtype=np.uint64)
    return mix_bits(hash_ngrams(hashes_W, min(SHINGLE_WORDS, len(hashes_W))))


def band_keys(text: str) -> np.ndarray:
    """Keys of a text, int64 [Q]: two texts share one if a band's minima are equal; 0: no words."""
    shingles_G = hash_shingles(text)
    if not len(shingles_G):
        return np.zeros(NUM_BANDS, dtype=np.int64)
    minima_M = np.full(len(MULTIPLIERS_M), np.iinfo(np.uint64).max, dtype=np.uint64)
    for first in range(0, len(shingles_G), SHINGLES_PER_BLOCK):
        block_G1 = shingles_G[first : first + SHINGLES_PER_BLOCK, None]
        # Multiply-shift: the upper half of an odd multiple is close to a random permutation.
        hashed_GM = (block_G1 * MULTIPLIERS_M + OFFSETS_M) >> np.uint64(32)
        minima_M = np.minimum(minima_M, hashed_GM.min(axis=0))
    keys_Q = np.zeros(NUM_BANDS, dtype=np.uint64)
    for minima_Q in minima_M.reshape(NUM_BANDS, MINIMA_PER_BAND).T:
        keys_Q = mix_bits(keys_Q + minima_Q)
    return keys_Q.view(np.int64)


def exact_duplicates(identity_N: np.ndarray, usable_N: np.ndarray) -> np.ndarray:
    """Index of each row's first usable equal, [N]; -1 for that one and for unusable rows."""
    first_N = np.full(len(identity_N), -1, dtype=np.int64)
    rows = np.flatnonzero(usable_N)
    _, first, inverse = np.unique(identity_N[rows], return_index=True, return_inverse=True)
    earlier = rows[first[inverse]]
    first_N[rows] = np.where(earlier < rows, earlier, -1)
    return first_N


def near_duplicates(
    bands: Callable[[int], np.ndarray],
    usable_N: np.ndarray,
    *,
    shingles: Callable[[int], np.ndarray],
    threshold: float,
) -> np.ndarray:
    """Index of an earlier row that is nearly the same, [N]; -1 where there is none.

    A row is compared with the first and with the preceding row of each of its buckets, never with a
    later one: rows appended to the data do not change what is kept of those before them.

    Args:
        bands: band number -> [N] keys.
        shingles: row number -> its hashed shingles.
        threshold: least Jaccard index of two rows that are nearly the same.
    """
    found_N = np.full(len(usable_N), -1, dtype=np.int64)

    @lru_cache(CACHED_SHINGLE_SETS)
    def shingle_set(row: int) -> np.ndarray:
        return np.unique(shingles(row))

    rows = np.flatnonzero(usable_N)
    compared: set[tuple[int, int]] = set()
    for band in range(NUM_BANDS):
        for earlier, later in _candidates(bands(band)[rows], rows):
            if found_N[later] >= 0 or (earlier, later) in compared:
                continue
            compared.add((earlier, later))
            if jaccard(shingle_set(earlier), shingle_set(later)) >= threshold:
                found_N[later] = earlier
    return found_N


def _candidates(keys: np.ndarray, rows: np.ndarray) -> list[tuple[int, int]]:
    """(earlier row, later row) of one band: with the bucket's first row and with the one before."""
    order = np.argsort(keys, kind="stable")
    sorted_keys, sorted_rows = keys[order], rows[order]
    is_first = np.ones(len(keys), dtype=bool)
    is_first[1:] = sorted_keys[1:] != sorted_keys[:-1]
    starts = np.maximum.accumulate(np.where(is_first, np.arange(len(keys)), 0))
    later = np.flatnonzero(~is_first)
    pairs = [(starts[later], later), (later - 1, later)]
    return sorted(
        {
            (int(i), int(j))
            for first, second in pairs
            for i, j in zip(sorted_rows[first], sorted_rows[second], strict=True)
        }
    )


def jaccard(left: np.ndarray, right: np.ndarray) -> float:
    """Index of two arrays without repetitions; 0 if both are empty."""
    shared = len(np.intersect1d(left, right, assume_unique=True))
    union = len(left) + len(right) - shared
    return shared / union if union else 0.0
