"""Make a batch from padded rows, or from rows packed as separate documents."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..files import Values


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
