"""Batches of similar length, the same number on every rank, and their padding."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Rows sorted by length together, in multiples of the mean batch: more means less padding and less
# mixing of rows between epochs.
BATCHES_PER_POOL = 50


def length_bucketed_batches(
    lengths: Sequence[int],
    batch_tokens: int,
    seed: int,
    epoch: int,
    rank: int = 0,
    world_size: int = 1,
) -> list[list[int]]:
    """Batches of row indices for one rank and one epoch.

    Every batch obeys max(length) * rows <= batch_tokens. Rows are shuffled, sorted by length
    inside pools, cut into batches, and the batches shuffled; at each step the ranks get
    neighbours in length, so none waits long for another. Every row is in exactly one batch of one
    rank. The number of batches is made a multiple of world_size by halving the largest ones; only
    when every batch is a single row are the first batches repeated.

    Args:
        lengths: tokens of each row, after any cut.
        batch_tokens: padded tokens that a batch may hold.

    Raises:
        ValueError: a row longer than batch_tokens, or no rows.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if not len(sizes):
        raise ValueError("lengths: no rows to batch; check data.sources and data.valid_fraction")
    if sizes.max() > batch_tokens:
        raise ValueError(
            f"batch_tokens: {batch_tokens} is below the longest row ({sizes.max()} tokens); "
            "raise it or lower data.max_length"
        )
    if not 0 <= rank < world_size:
        raise ValueError(f"rank: {rank} is not below world_size = {world_size}")
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(sizes))
    rows_per_batch = max(1, int(batch_tokens // max(1.0, sizes.mean())))
    pool_size = BATCHES_PER_POOL * rows_per_batch
    batches: list[list[int]] = []
    for begin in range(0, len(order), pool_size):
        pool = order[begin : begin + pool_size]
        pool = pool[np.argsort(sizes[pool], kind="stable")]
        batches += _cut(pool.tolist(), sizes, batch_tokens)
    _make_divisible(batches, world_size)
    steps = rng.permutation(len(batches) // world_size)
    return [batches[step * world_size + rank] for step in steps]


def _cut(pool: list[int], sizes: np.ndarray, batch_tokens: int) -> list[list[int]]:
    """Consecutive batches of rows sorted by rising length, each as full as allowed."""
    batches: list[list[int]] = [[]]
    for index in pool:
        if (len(batches[-1]) + 1) * sizes[index] > batch_tokens and batches[-1]:
            batches.append([])
        batches[-1].append(index)
    return batches


def _make_divisible(batches: list[list[int]], world_size: int) -> None:
    """Halve the batches with most rows, in place, until len(batches) % world_size == 0."""
    while len(batches) % world_size:
        largest = max(range(len(batches)), key=lambda index: len(batches[index]))
        batch = batches[largest]
        if len(batch) == 1:
            missing = -len(batches) % world_size
            batches += [batches[i % len(batches)] for i in range(missing)]
            return
        half = len(batch) // 2
        batches[largest : largest + 1] = [batch[:half], batch[half:]]


def collate(rows: Sequence[dict[str, Any]], pad_id: int) -> dict[str, Tensor]:
    """Pad rows on the right: input_ids [B,T] int64, loss_mask [B,T] bool (False on padding) and
    lengths [B] int64."""
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    shape = (len(rows), int(lengths.max()))
    input_ids = torch.full(shape, pad_id, dtype=torch.int64)
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    for index, row in enumerate(rows):
        length = len(row["input_ids"])
        input_ids[index, :length] = torch.as_tensor(row["input_ids"], dtype=torch.int64)
        loss_mask[index, :length] = torch.as_tensor(row["loss_mask"], dtype=torch.bool)
    return {"input_ids": input_ids, "loss_mask": loss_mask, "lengths": lengths}
