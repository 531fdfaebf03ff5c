"""Examples for one forward pass, padded or packed into one row."""

# B batch, T positions, H hidden, M picked positions

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from ..data_recipes.table import Rows
from ..files import Values


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Examples for one forward pass, padded or packed into one row.

    The mask and all lists stay on the host: the shapes of later tensors depend on them, and reading
    them from a device would wait for its work.
    """

    ids_BT: Tensor
    """Token ids, int64."""
    mask_BT: Tensor
    """bool, True at assistant tokens. Nothing predicts a packed document's first token, so it is
    False there, as on padding."""
    lengths: list[int]
    """Tokens in each example: in a row without its padding, or in a packed row's document."""
    rows: list[int] = field(default_factory=list)
    """The examples' numbers in the data set, by which stored hidden states are found."""
    features: dict[int, Tensor] = field(default_factory=dict)
    """Layer -> hidden states [B, T, H], once the target has computed them."""

    @classmethod
    def of(cls, batch: "Batch | Mapping[str, Tensor]") -> "Batch":
        """Return a batch as it is, or one made from a peer's collator: tensors by name.

        ``loss_mask`` [B, T] and ``lengths`` are needed; without ``input_ids``, ids are 0.
        """
        if isinstance(batch, Batch):
            return batch
        mask_BT = batch["loss_mask"].bool().cpu()
        ids_BT = batch.get("input_ids", torch.zeros_like(mask_BT, dtype=torch.int64))
        return cls(ids_BT=ids_BT, mask_BT=mask_BT, lengths=batch["lengths"].tolist())

    @classmethod
    def padded(cls, examples: Sequence[Values], pad_id: int) -> Self:
        """Pad examples, mappings with input_ids and loss_mask, on the right."""
        lengths = [len(example["input_ids"]) for example in examples]
        shape = (len(lengths), max(lengths))
        ids_BT = torch.full(shape, pad_id, dtype=torch.int64)
        mask_BT = torch.zeros(shape, dtype=torch.bool)
        for index, (example, length) in enumerate(zip(examples, lengths, strict=True)):
            ids_BT[index, :length] = torch.as_tensor(example["input_ids"], dtype=torch.int64)
            mask_BT[index, :length] = torch.as_tensor(example["loss_mask"], dtype=torch.bool)
        return cls(ids_BT=ids_BT, mask_BT=mask_BT, lengths=lengths)

    @classmethod
    def packed(cls, examples: Sequence[Values]) -> Self:
        """Pack examples into one row, as documents that do not see each other."""
        lengths = [len(example["input_ids"]) for example in examples]
        ids_T, mask_T = (
            torch.cat([torch.as_tensor(example[name], dtype=dtype) for example in examples])
            for name, dtype in (("input_ids", torch.int64), ("loss_mask", torch.bool))
        )
        sizes = torch.tensor(lengths)
        mask_T[sizes.cumsum(0) - sizes] = False
        return cls(ids_BT=ids_T[None], mask_BT=mask_T[None], lengths=lengths)

    @classmethod
    def of_rows(cls, data: Rows, rows: list[int], pad_id: int, *, packing: bool) -> Self:
        """Read a data set's rows, padded or packed."""
        columns = data[rows]
        examples = [
            {"input_ids": ids, "loss_mask": mask}
            for ids, mask in zip(columns["input_ids"], columns["loss_mask"], strict=True)
        ]
        batch = cls.packed(examples) if packing else cls.padded(examples, pad_id)
        return replace(batch, rows=rows)

    @property
    def documents(self) -> list[int] | None:
        """Return a packed row's document lengths, or None for padded rows or a single sequence."""
        return self.lengths if len(self.lengths) > len(self.ids_BT) else None

    def places(self) -> Tensor:
        """Return each position's example as int64 [B, T] on the host, with -1 on padding."""
        examples, lengths = torch.arange(len(self.lengths)), torch.tensor(self.lengths)
        if self.documents is not None:
            return examples.repeat_interleave(lengths)[None]
        is_token_BT = torch.arange(self.ids_BT.shape[1]) < lengths[:, None]
        return torch.where(is_token_BT, examples[:, None], -1)

    def inner_mask(self) -> Tensor:
        """Return the mask, bool [B, T], with each example's first and last position cleared.

        The last position's label would be padding or belong to the next document. SpecForge and the
        EAGLE authors' code clear that position, too; speculators does not. Nothing predicts the
        first token.
        """
        place_BT = self.places()
        edge_B1 = place_BT.new_full((len(place_BT), 1), -2)
        before_BT = torch.cat([edge_B1, place_BT[:, :-1]], 1)
        after_BT = torch.cat([place_BT[:, 1:], edge_B1], 1)
        return self.mask_BT & (place_BT == before_BT) & (place_BT == after_BT)

    def reorder(self, order: list[int]) -> Self:
        """Return the batch with its padded rows, or its packed documents, in another order."""
        places, axis = torch.tensor(order), 0
        if self.documents is not None:
            starts = torch.arange(sum(self.lengths)).split(self.lengths)
            places, axis = torch.cat([starts[index] for index in order]), 1
        return replace(
            self,
            ids_BT=self.ids_BT.index_select(axis, put(places, self.ids_BT)),
            mask_BT=self.mask_BT.index_select(axis, places),
            lengths=[self.lengths[index] for index in order],
            rows=[self.rows[index] for index in order if self.rows],
            features={
                layer: x_BTH.index_select(axis, put(places, x_BTH))
                for layer, x_BTH in self.features.items()
            },
        )

    def to(self, device: torch.device) -> Self:
        """Return the batch with its token ids on a device."""
        return replace(self, ids_BT=self.ids_BT.to(device))


def put(x: Tensor, like: Tensor) -> Tensor:
    """Copy a host tensor to the device of ``like``, without waiting for the device's work."""
    return x.to(like.device, non_blocking=True)


def pick(x_BTH: Tensor, mask_BT: Tensor) -> Tensor:
    """Return x, on any device, at the True positions of a mask on the host, as [M, H].

    With a mask on the device, the host would wait for the number of positions.
    """
    return x_BTH.flatten(0, 1).index_select(0, put(mask_BT.flatten().nonzero()[:, 0], x_BTH))
