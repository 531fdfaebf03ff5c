"""Read hidden states from a dump or from servers, to train without the target's layers."""

# B batch, T positions in a padded or packed row, M positions in sequences, H hidden

from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..batch import Batch
from .online import FeaturesLost, ServedStates
from .shards import (
    decode,
    difference,
    open_shard,
    read_index,
    shard_name,
)

Fetched = tuple[list[int], dict[str, Tensor]]
"""Rows in any order, and their tensors as in a shard, row after row."""


class Features:
    """Source of hidden states from a dump or servers, for an objective without a whole target.

    The next batch is fetched while the current step is computed.
    """

    def __init__(self, source: "ShardFolder | ServedStates", *, pins: bool) -> None:
        """
        Args:
            pins: fetch into page-locked memory, so that GPU copies overlap with computation.
        """
        self.source, self.pins = source, pins
        self._executor = ThreadPoolExecutor(1)
        self._expected: deque[tuple[list[int], list[list[int]]]] = deque()
        self._under_way: tuple[list[int], Future[dict[str, Tensor]]] | None = None
        self._ready: Fetched | None = None

    @property
    def may_be_lost(self) -> bool:
        return isinstance(self.source, ServedStates)

    def expect(self, batches: Sequence[tuple[list[int], list[list[int]]]]) -> None:
        """Announce the rows of the next batches and the rows' token ids, in reading order."""
        self._expected.extend(batches)

    def read(self, batch: Batch, layers: Collection[int], dtype: torch.dtype) -> dict[int, Tensor]:
        """Return hidden states {layer: [B, T, H]}, with zeros at padding.

        Args:
            batch: its ``rows`` are the sequences' indices in the data set.
        """
        ids_BT = batch.ids_BT
        B, T = ids_BT.shape
        order, stored = self._fetched(batch)
        # A prefetched batch may have its rows in another order.
        spans = dict(zip(batch.rows, _spans(batch), strict=True))
        places_M = torch.cat([torch.arange(*spans[row]) for row in order]).to(ids_BT.device)
        read: dict[int, Tensor] = {}
        for layer in layers:
            scale_M = stored.get(f"layer.{layer}.scale")
            if scale_M is not None:
                scale_M = scale_M.to(ids_BT.device, non_blocking=self.pins)
            stored_MH = stored[f"layer.{layer}"].to(ids_BT.device, non_blocking=self.pins)
            kept_MH = decode(stored_MH, scale_M, dtype)
            hidden_PH = kept_MH.new_zeros(B * T, kept_MH.shape[1])
            read[layer] = hidden_PH.index_copy_(0, places_M, kept_MH).view(B, T, -1)
        return read

    def wait_for(self, batch: Batch) -> FeaturesLost | None:
        """Fetch this batch's states for ``read``. Return the error if the servers are lost."""
        try:
            self._ready = self._fetched(batch)
        except FeaturesLost as lost:
            return lost
        return None

    def _fetched(self, batch: Batch) -> Fetched:
        """Return a batch's rows in any order, and their hidden states in the same order."""
        wanted, under_way = batch.rows, self._under_way
        ready, self._ready = self._ready, None
        # Compared without order: an objective may reorder a batch, as SPD does by fill.
        if ready is not None and sorted(ready[0]) == sorted(wanted):
            return ready
        if under_way is not None and sorted(under_way[0]) == sorted(wanted):
            found, self._under_way = (under_way[0], under_way[1].result()), None
        else:
            # Not announced: evaluations, and the first step of an epoch.
            ids_P = batch.ids_BT.flatten().tolist()
            ids = [ids_P[start:end] for start, end in _spans(batch)]
            found = wanted, self._fetch(wanted, ids)
        if self._under_way is None and self._expected:
            rows, ids = self._expected.popleft()
            self._under_way = rows, self._executor.submit(self._fetch, rows, ids)
        return found

    def _fetch(self, rows: Sequence[int], ids: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        tensors = self.source.fetch(rows, ids)
        return {name: x.pin_memory() for name, x in tensors.items()} if self.pins else tensors


def _spans(batch: Batch) -> list[tuple[int, int]]:
    """Return each sequence's start and end in the flattened batch, padded or packed."""
    lengths, (B, T) = batch.lengths, batch.ids_BT.shape
    is_padded = batch.documents is None
    starts = range(0, B * T, T) if is_padded else [0, *np.cumsum(lengths)[:-1].tolist()]
    return [(start, start + length) for start, length in zip(starts, lengths, strict=True)]


class ShardFolder:
    """Memory-mapped dump. A process reads only the rows that it needs from a shard."""

    def __init__(
        self,
        folder: Path,
        identity: dict[str, int | str],
        layers: Collection[int],
        lengths: list[int],
    ) -> None:
        """
        Args:
            identity: the run's identity (see ``identity_of``).
            layers: layers to read.
            lengths: tokens per row, training rows first.

        Raises:
            ValueError: the dump is incomplete, lacks a layer, or has another target or other data.
        """
        self.index = read_index(folder)
        other = difference(self.index.identity, identity)
        if other is not None:
            raise ValueError(
                f"features: {folder} is of {other}; give the dump's target and data, or dump your "
                "own with pipedraft train features"
            )
        stored = self.index.settings["layers"]
        missing = sorted(set(layers) - set(stored))
        if missing:
            raise ValueError(
                f"features: {folder} has the layers {stored}, this head also needs {missing}; dump "
                "again with its configuration as --also"
            )
        self.layers, self.lengths = sorted(layers), lengths
        self.shard_of_row = np.zeros(len(lengths), dtype=np.int32)
        self.start_of_row = np.zeros(len(lengths), dtype=np.int64)
        # Opened at the start, so that a missing shard does not end the run hours later.
        numbers = range(len(self.index.shard_tokens))
        self._shards = [open_shard(folder / shard_name(number)) for number in numbers]
        for number, shard in enumerate(self._shards):
            rows = shard.get_tensor("rows").numpy()
            sizes = np.asarray(lengths)[rows]
            self.shard_of_row[rows] = number
            self.start_of_row[rows] = np.cumsum(sizes) - sizes

    def fetch(self, rows: Sequence[int], ids: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Return ``layer.I`` [M, H], and ``layer.I.scale`` [M] for int8, concatenated over rows.

        Args:
            rows: indices in the data set, training rows first.
            ids: token ids for these rows (not used).
        """
        suffixes = ("", ".scale") if self.index.settings["dtype"] == "int8" else ("",)
        parts: dict[str, list[Tensor]] = {
            f"layer.{layer}{suffix}": [] for layer in self.layers for suffix in suffixes
        }
        for row in rows:
            number, start = int(self.shard_of_row[row]), int(self.start_of_row[row])
            shard, end = self._shards[number], start + self.lengths[row]
            for name, pieces in parts.items():
                pieces.append(shard.get_slice(name)[start:end])
        return {name: torch.cat(pieces) for name, pieces in parts.items()}
