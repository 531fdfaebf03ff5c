"""Texts as hashed words and word n-grams, for duplicates and benchmark overlap.

W words of one text, G its n-grams.
"""

import re
from functools import cache
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
    """A bijection of uint64 after which all bits look random (the finaliser of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
