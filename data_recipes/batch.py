"""Cut an epoch's rows into batches, padded with similar lengths or packed as documents."""

from collections.abc import Sequence

import numpy as np

# Size of a sorting pool, in mean batches: larger means less padding and less mixing between epochs.
BATCHES_PER_POOL = 50


def length_bucketed_batches(
    lengths: Sequence[int],
    batch_tokens: int,
    seed: int,
    epoch: int,
    group: int = 1,
) -> list[list[int]]:
    """Return one epoch's batches of row indices, in training order.

    Every batch obeys max(length) * rows <= batch_tokens. Rows are shuffled, sorted by length inside
    pools and cut into batches. Then groups of ``group`` consecutive batches are shuffled. Lengths
    in a group are similar, so processes that share a group do not wait long for each other. Every
    row is in exactly one batch. The batches with the most rows are halved until the batch count
    is a multiple of ``group``. If every batch is a single row, the first batches are repeated
    instead.

    Args:
        lengths: tokens per row, after any cut.
        batch_tokens: padded tokens per batch at most.
        group: this many batches stay together.

    Raises:
        ValueError: a row longer than batch_tokens, or no rows.
    """
    sizes = _checked_sizes(lengths, batch_tokens)
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(sizes))
    rows_per_batch = max(1, int(batch_tokens // max(1.0, sizes.mean())))
    pool_size = BATCHES_PER_POOL * rows_per_batch
    batches: list[list[int]] = []
    for begin in range(0, len(order), pool_size):
        pool = order[begin : begin + pool_size]
        pool = pool[np.argsort(sizes[pool], kind="stable")]
        batches += _cut(pool.tolist(), sizes, batch_tokens)
    _make_divisible(batches, group)
    groups = rng.permutation(len(batches) // group)
    return [batches[index * group + place] for index in groups for place in range(group)]


def packed_batches(
    lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int, group: int = 1
) -> list[list[int]]:
    """Return one epoch's batches of row indices to pack, in training order.

    Every batch obeys sum(length) <= batch_tokens. Batches take the shuffled rows in order, because
    without padding mixed lengths cost nothing. Arguments and other guarantees are the same as for
    `length_bucketed_batches`.
    """
    sizes = _checked_sizes(lengths, batch_tokens)
    batches: list[list[int]] = [[]]
    room = batch_tokens
    for index in np.random.default_rng([seed, epoch]).permutation(len(sizes)).tolist():
        if sizes[index] > room:
            batches.append([])
            room = batch_tokens
        batches[-1].append(index)
        room -= int(sizes[index])
    _make_divisible(batches, group)
    return batches


def _checked_sizes(lengths: Sequence[int], batch_tokens: int) -> np.ndarray:
    sizes = np.asarray(lengths, dtype=np.int64)
    if not len(sizes):
        raise ValueError("lengths: no rows to batch; check data.sources and data.valid_fraction")
    if sizes.max() > batch_tokens:
        raise ValueError(
            f"batch_tokens: {batch_tokens} is below the longest row ({sizes.max()} tokens); "
            "raise it or lower data.max_length"
        )
    return sizes


def _cut(pool: list[int], sizes: np.ndarray, batch_tokens: int) -> list[list[int]]:
    """Cut rows sorted by rising length into consecutive batches, each as full as allowed."""
    batches: list[list[int]] = [[]]
    for index in pool:
        if (len(batches[-1]) + 1) * sizes[index] > batch_tokens and batches[-1]:
            batches.append([])
        batches[-1].append(index)
    return batches


def _make_divisible(batches: list[list[int]], group: int) -> None:
    """Halve the batches with the most rows, in place, until len(batches) % group == 0."""
    while len(batches) % group:
        largest = max(range(len(batches)), key=lambda index: len(batches[index]))
        batch = batches[largest]
        if len(batch) == 1:
            missing = -len(batches) % group
            batches += [batches[i % len(batches)] for i in range(missing)]
            return
        half = len(batch) // 2
        batches[largest : largest + 1] = [batch[:half], batch[half:]]
