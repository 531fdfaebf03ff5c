"""Make batches from padded rows with similar lengths, or from rows packed as separate documents."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..files import Values

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
    """Return one epoch's batches of row indices for `pack`, in training order.

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


def collate(rows: Sequence[Values], pad_id: int) -> dict[str, Tensor]:
    """Pad rows on the right.

    Return input_ids [B, T] int64, loss_mask [B, T] bool (False on padding) and lengths [B] int64.
    """
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    shape = (len(rows), int(lengths.max()))
    input_ids = torch.full(shape, pad_id, dtype=torch.int64)
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    for index, row in enumerate(rows):
        length = len(row["input_ids"])
        input_ids[index, :length] = torch.as_tensor(row["input_ids"], dtype=torch.int64)
        loss_mask[index, :length] = torch.as_tensor(row["loss_mask"], dtype=torch.bool)
    return {"input_ids": input_ids, "loss_mask": loss_mask, "lengths": lengths}


def pack(rows: Sequence[Values]) -> dict[str, Tensor]:
    """Pack rows as documents into one row.

    Return input_ids [1, sum] int64, loss_mask [1, sum] bool, lengths [documents] int64.
    Documents do not see each other. Nothing predicts a document's first token. Its mask is False.
    """
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    ids, masks = (
        torch.cat([torch.as_tensor(row[name], dtype=dtype) for row in rows])
        for name, dtype in (("input_ids", torch.int64), ("loss_mask", torch.bool))
    )
    masks[lengths.cumsum(0) - lengths] = False
    return {"input_ids": ids[None], "loss_mask": masks[None], "lengths": lengths}


def document_lengths(batch: dict[str, Tensor]) -> list[int] | None:
    """Return a packed batch's document lengths, or None for a padded batch or a single sequence."""
    lengths = batch["lengths"]
    return lengths.tolist() if len(lengths) > len(batch["input_ids"]) else None


def document_places(batch: dict[str, Tensor]) -> Tensor:
    """Return each position's document number as int64 [B, T], with -1 on padding."""
    mask_BT, lengths = batch["loss_mask"], batch["lengths"].to(batch["loss_mask"].device)
    B, T = mask_BT.shape
    documents = torch.arange(len(lengths), device=mask_BT.device)
    if len(lengths) > B:
        return documents.repeat_interleave(lengths)[None]
    positions_T = torch.arange(T, device=mask_BT.device)
    return torch.where(positions_T < lengths[:, None], documents[:, None], -1)


def inner_mask(batch: dict[str, Tensor]) -> Tensor:
    """Return the loss mask, bool [B, T], with each document's first and last position cleared.

    The last position's label would be padding or belong to the next document. SpecForge and the
    EAGLE authors' code clear that position, too; speculators does not. Nothing predicts the first
    token, so `pack` clears it, too.
    """
    place_BT = document_places(batch)
    edge_B1 = place_BT.new_full((len(place_BT), 1), -2)
    before_BT = torch.cat([edge_B1, place_BT[:, :-1]], 1)
    after_BT = torch.cat([place_BT[:, 1:], edge_B1], 1)
    return batch["loss_mask"].bool() & (place_BT == before_BT) & (place_BT == after_BT)


def reorder(batch: dict[str, Tensor], order: Tensor) -> dict[str, Tensor]:
    """Reorder a padded batch's rows, or a packed batch's documents."""
    lengths = document_lengths(batch)
    if lengths is None:
        return {name: x[order.to(x.device)] for name, x in batch.items()}
    documents = torch.arange(sum(lengths)).split(lengths)
    tokens = torch.cat([documents[index] for index in order.tolist()])
    return {
        name: x[order.to(x.device)] if x.ndim == 1 else x[:, tokens.to(x.device)]
        for name, x in batch.items()
    }
