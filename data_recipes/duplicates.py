"""Rows that say again what an earlier row says, in the same words or nearly.

Near duplicates are found with MinHash (Broder 1997) and banding: the candidates of a band are the
rows whose minima are all equal there, and each candidate pair is then compared by the exact Jaccard
index of its word 5-grams. With 21 bands of 6 minima a pair of Jaccard index 0.8 is a candidate with
probability 0.998, one of 0.7 with 0.93, one of 0.3 with 0.015. The band keys are a column of the
table on disk and bands are sorted one at a time, so that memory is 16 bytes per row instead of the
dictionary per band that index libraries keep.

N rows, W words of a row, G its n-grams, M minima, Q bands.
"""

import unicodedata
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import sha256

import numpy as np

from pipedraft.data_recipes.words import hash_ngrams, hash_words, mix_bits, prefix_sums, split_words

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
