"""What a method brings to the training loop."""

from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class LossOutput(NamedTuple):
    """A tuple, so that ZeRO-3 finds the tensors in it."""

    loss: Tensor
    """SUM over the counted tokens of this forward pass, differentiable."""
    counted: Tensor
    """Counted tokens of this forward pass, int64 scalar."""
    sums: dict[str, Tensor]
    """Detached sums for the metrics; ratios are computed after summing over processes."""


class Objective(Protocol):
    """What a method brings: a module whose forward is its loss, and how to read its sums.

    It is an ``nn.Module``; only trainable networks are its submodules, so a frozen target inside
    gets no optimizer state, is never saved and never broadcast.
    """

    def __call__(self, batch: dict[str, Tensor], generator: torch.Generator) -> LossOutput: ...

    def num_counted(self, batch: dict[str, Tensor]) -> int:
        """Tokens that ``forward`` will count, known without running it."""

    def use_checkpointing(self) -> None:
        """Keep of every layer its input alone, and compute the rest again in backward."""

    def evaluation_passes(self) -> list[dict[str, Any]]:
        """Keyword arguments of one validation pass each; their sums are prefixed by ``name``."""

    def summarize(self, sums: dict[str, float]) -> dict[str, float]:
        """Metrics from summed sums; the key ``score`` (higher is better) selects the best."""

    def save(self, folder: Path, metrics: dict[str, float], weights: dict[str, Tensor]) -> None:
        """Write the network in the checkpoint format of its method.

        Args:
            weights: the module's whole state; the processes may hold a part of it each.
        """
