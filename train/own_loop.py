"""A new head with its loss and its batches, for a training loop of the user's own."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ..data_recipes.recipe import TokenizedData
from ..data_recipes.table import row_lengths
from ..models.target import check_packable
from .batch import Batch
from .objective import DraftObjective
from .position import Cut, batches_left


@dataclass(frozen=True, eq=False)
class NewHead:
    """An untrained head with its loss and its batches, made by ``pipedraft.new_head``."""

    objective: DraftObjective
    """torch module with the head as ``draft``. Only trained parameters are in it."""
    data: TokenizedData
    """Tokenized rows: ``train``, ``valid`` and their ``report``."""
    pad_id: int
    seed: int = 0
    """Of the batches' order."""
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))
    """Random numbers for losses that draw some, such as SPD's fills and DFlash's anchors."""

    def batches(
        self, tokens: int, *, epoch: int = 0, packing: bool = False, valid: bool = False
    ) -> Iterator[Batch]:
        """Yield an epoch's batches, with token ids int64 [B, T] on the target's device.

        Args:
            tokens: maximum tokens in a batch, padding included.
            epoch: decides the order, with the seed.
            packing: join a batch's rows into one row of documents that do not see each other.
            valid: yield the held-out rows instead.
        """
        rows = self.data.valid if valid else self.data.train
        if packing:
            check_packable(self.objective.target.get_decoder().config)
        device = self.objective.target.device
        for chosen in batches_left(row_lengths(rows), self.seed, epoch, Cut(tokens, packing), []):
            yield Batch.of_rows(rows, chosen, self.pad_id, packing=packing).to(device)

    def loss(
        self, batch: Batch, generator: torch.Generator | None = None, *, done: float = 1.0
    ) -> Tensor:
        """Return the mean loss per supervised token, a differentiable scalar.

        Args:
            generator: None: the head's own, which gives other numbers in each call.
            done: share of the run that is done, 0 to 1, for ``curriculum_steps``.
        """
        self.objective.done = done
        output = self.objective(batch, generator or self.generator)
        return output.loss / output.counted.clamp_min(1)

    def save(self, folder: str | Path) -> Path:
        """Write a checkpoint, which every command and ``pipedraft.load`` accept."""
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        self.objective.save(place, {}, self.objective.state_dict())
        return place
