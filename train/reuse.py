"""Train on the target's states several times, while they are in memory.

The target's pass is often the largest part of a step. With ``reuse`` R an epoch visits each window
of batches R times, in a new order each time, and the target computes a batch's states only on the
first visit.
"""

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

from torch import Tensor

from .batch import Batch

WINDOW = 64
"""Batches of a process between two visits, and the most batches whose states it keeps."""


def repeat_windows(
    batches: Sequence[list[int]], times: int, group: int, seed: int, epoch: int
) -> list[list[int]]:
    """Return the batches with each window of them repeated, in a new order each time.

    Args:
        group: consecutive batches that stay together, so that each process gets its own again.
    """
    if times == 1:
        return list(batches)
    draw, size = random.Random(f"{seed} {epoch}"), group * WINDOW
    order: list[list[int]] = []
    for start in range(0, len(batches), size):
        window = batches[start : start + size]
        groups = [window[at : at + group] for at in range(0, len(window), group)]
        # A short group may only come last: it would move the others to other processes.
        rest = [groups.pop()] if len(groups[-1]) < group else []
        for _ in range(times):
            order += chain(*groups, *rest)
            draw.shuffle(groups)
    return order


class KeptStates:
    """The target's states of the last ``WINDOW`` batches, until each was used ``times`` times."""

    def __init__(self, times: int) -> None:
        self.times = times
        self._kept: OrderedDict[tuple[int, ...], tuple[dict[int, Tensor], int]] = OrderedDict()

    def attach(self, batch: Batch, compute: Callable[[Batch], dict[int, Tensor]]) -> Batch:
        """Return the batch with its states, computed by ``compute`` unless they are kept."""
        rows = tuple(batch.rows)
        states, uses = self._kept.pop(rows, (None, 0))
        if states is None:
            states = compute(batch)
        if uses + 1 < self.times:
            self._kept[rows] = states, uses + 1
        # A run that resumed within a window has batches that are not visited so often.
        if len(self._kept) > WINDOW:
            self._kept.popitem(last=False)
        return replace(batch, features=states)

    def __len__(self) -> int:
        return len(self._kept)
