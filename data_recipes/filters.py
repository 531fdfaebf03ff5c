"""Which rows are left out: limits on their texts, and repetitions of earlier rows.

Filters are off unless they are set, and counted under their own names.

Near duplicates are found with MinHash (Broder 1997) and banding: the candidates of a band are the
rows whose minima are all equal there, and each candidate pair is then compared by the exact Jaccard
index of its word 5-grams. With 21 bands of 6 minima a pair of Jaccard index 0.8 is a candidate with
probability 0.998, one of 0.7 with 0.93, one of 0.3 with 0.015. The band keys are a column of the
table on disk and bands are sorted one at a time, so that memory is 16 bytes per row instead of the
dictionary per band that index libraries keep.

N rows, W words of a row, G its n-grams, M minima, Q bands.
"""

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from hashlib import sha256
from zlib import crc32

import numpy as np

# Hiragana and katakana, CJK extension A, CJK unified ideographs.
CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
# Chinese and Japanese are written without spaces, so each of their characters is a word.
WORD = re.compile(rf"[{CJK}]|[^\W{CJK}]+")
# Odd, so that it has an inverse modulo 2^64.
BASE = 0x9E3779B97F4A7C15
INVERSE = pow(BASE, -1, 1 << 64)
ZERO = np.zeros(1, dtype=np.uint64)


def split_words(text: str) -> list[str]:
    """Letters, digits and underscores in lower case; punctuation and layout do not count."""
    return WORD.findall(text.lower())


def hash_words(words: list[str]) -> np.ndarray:
    """[W] uint64, the same in every process (Python's own string hash is salted)."""
    hashes = map(crc32, map(str.encode, words))
    return np.fromiter(hashes, dtype=np.uint64, count=len(words))


def prefix_sums(hashes_W: np.ndarray) -> np.ndarray:
    """[W + 1] uint64, from which the n-grams of any length follow in two operations each."""
    inverses = _powers(INVERSE, len(hashes_W))
    return np.concatenate((ZERO, np.cumsum(hashes_W * inverses)))


def hash_ngrams(prefixes: np.ndarray, length: int) -> np.ndarray:
    """[G] uint64, one for each of the max(0, W - length + 1) runs of ``length`` words.

    sum_j hashes[i + j] BASE^-j modulo 2^64, as (prefix[i + length] - prefix[i]) BASE^i.
    """
    if len(prefixes) <= length:
        return ZERO[:0]
    return (prefixes[length:] - prefixes[:-length]) * _powers(BASE, len(prefixes) - length)


def _powers(base: int, count: int) -> np.ndarray:
    """1, base, base^2 ... modulo 2^64."""
    return _power_table(base, max(count, 1).bit_length())[:count]


@cache
def _power_table(base: int, bits: int) -> np.ndarray:
    factors = np.full(1 << bits, base, dtype=np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)


def mix_bits(values: np.ndarray) -> np.ndarray:
    """A bijection of uint64 after which all bits look random (the finalizer of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


CJK_CHARACTER = re.compile(f"[{CJK}]")
FILTERED = "filter: "
SHARES = ("max_non_alphabetic", "max_repeated_lines", "min_cjk", "max_cjk")
CONVERSATIONS_ONLY = ("min_turns", "max_turns")


@dataclass(frozen=True, kw_only=True)
class Filters:
    """Limits that a row must keep, all inclusive; null: no limit.

    Characters, letters and lines are those of all turns, system prompts included.
    """

    min_turns: int | None = None
    """Turns of the user and the assistant together; for conversations only."""
    max_turns: int | None = None
    min_characters: int | None = None
    max_characters: int | None = None
    min_tokens: int | None = None
    """Tokens of the whole row, as the target reads it; for more than max_length see too_long."""
    max_non_alphabetic: float | None = None
    """Share of the characters other than white space that are no letters of any script."""
    max_repeated_lines: float | None = None
    """Share of the lines with text that are equal to an earlier one."""
    min_cjk: float | None = None
    """Share of the letters that are Chinese or Japanese."""
    max_cjk: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            limit = getattr(self, field.name)
            if limit is None:
                continue
            most = 1 if field.name in SHARES else float("inf")
            if not 0 <= limit <= most:
                fix = "a share from 0 to 1" if field.name in SHARES else "0 or more"
                raise ValueError(f"sources.filters.{field.name}: {limit}; give {fix}, or null")
        for name in ("turns", "characters", "cjk"):
            least, most = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if least is not None and most is not None and least > most:
                raise ValueError(
                    f"sources.filters.min_{name}: {least} is above max_{name} = {most}, which "
                    "leaves no row; swap them or leave one out"
                )

    @property
    def conversation_limits(self) -> list[str]:
        """The limits set that a text document cannot meet or miss."""
        return [name for name in CONVERSATIONS_ONLY if getattr(self, name) is not None]

    def refuse(self, texts: Sequence[str], num_turns: int | None) -> tuple[str, float]:
        """The first limit that a row misses and its value there; ("", 0) for a good row.

        Args:
            texts: contents of all turns, or the one document.
            num_turns: turns of user and assistant; None for a document.
        """
        num_characters = sum(map(len, texts))
        if num_turns is not None:
            if self.min_turns is not None and num_turns < self.min_turns:
                return "min_turns", num_turns
            if self.max_turns is not None and num_turns > self.max_turns:
                return "max_turns", num_turns
        if self.min_characters is not None and num_characters < self.min_characters:
            return "min_characters", num_characters
        if self.max_characters is not None and num_characters > self.max_characters:
            return "max_characters", num_characters
        if self.max_non_alphabetic is not None:
            share = non_alphabetic_share(texts)
            if share > self.max_non_alphabetic:
                return "max_non_alphabetic", share
        if self.max_repeated_lines is not None:
            share = repeated_line_share(texts)
            if share > self.max_repeated_lines:
                return "max_repeated_lines", share
        if self.min_cjk is not None or self.max_cjk is not None:
            share = cjk_share(texts)
            if self.min_cjk is not None and share < self.min_cjk:
                return "min_cjk", share
            if self.max_cjk is not None and share > self.max_cjk:
                return "max_cjk", share
        return "", 0

    def refuse_tokens(self, num_tokens: int) -> bool:
        return self.min_tokens is not None and num_tokens < self.min_tokens


def count_letters(texts: Sequence[str]) -> int:
    return sum(sum(map(str.isalpha, text)) for text in texts)


def non_alphabetic_share(texts: Sequence[str]) -> float:
    """1 for a row without any character but white space."""
    visible = sum(len(part) for text in texts for part in text.split())
    return 1 - count_letters(texts) / visible if visible else 1.0


def repeated_line_share(texts: Sequence[str]) -> float:
    lines = [line.strip() for text in texts for line in text.splitlines() if line.strip()]
    return 1 - len(set(lines)) / len(lines) if lines else 0.0


def cjk_share(texts: Sequence[str]) -> float:
    """0 for a row without letters."""
    letters = count_letters(texts)
    found = sum(len(CJK_CHARACTER.findall(text)) for text in texts)
    return min(1.0, found / letters) if letters else 0.0


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
    """[G] uint64 hashes of the word 5-grams; of all words together in a shorter text."""
    hashes_W = hash_words(split_words(text))
    if not len(hashes_W):
        return np.empty(0, dtype=np.uint64)
    return mix_bits(hash_ngrams(prefix_sums(hashes_W), min(SHINGLE_WORDS, len(hashes_W))))


def band_keys(text: str) -> np.ndarray:
    """[Q] int64: two texts share a key if all minima of that band are equal; 0 without words."""
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
    """[N] index of the first usable row of the same content; -1 for that one and unusable rows."""
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
    """[N] index of an earlier row that is nearly the same; -1 for the others.

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
