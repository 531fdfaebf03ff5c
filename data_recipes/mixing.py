"""Which rows are drawn, how often, and on which side: functions of each row's own hash.

N rows; hashes are int64 from 0 to 2^63, equal for equal content.
"""

import numpy as np

from pipedraft.data_recipes.words import mix_bits


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
