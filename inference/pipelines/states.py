"""Hidden states of the rows in flight, one buffer for each layer."""

# R rows, H hidden

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pipedraft.models.target import Keep

MIN_ROWS = 64


class FeatureStore:
    """Hidden states of the rows in flight, per layer index, in the order of the token tree.

    Rows enter and leave the stages first-in first-out, so the rows that have passed a layer are
    always a prefix of the tree's rows, and a Keep acts on them as on a stage's cache.
    """

    def __init__(self) -> None:
        self._rows: dict[int, _Rows] = {}

    @torch.inference_mode()
    def append(self, states: Mapping[int, Tensor]) -> None:
        """Layer index -> [R, H]: rows that have passed it; one launch for all layers."""
        rooms = [
            self._rows.setdefault(layer, _Rows()).room(hidden_RH, len(hidden_RH))
            for layer, hidden_RH in states.items()
        ]
        if rooms:
            torch._foreach_copy_(rooms, list(states.values()))

    def view(self) -> dict[int, Tensor]:
        """Layer index -> [r, H] for the first r rows of the tree, r falling with the layer."""
        return {layer: rows.view() for layer, rows in self._rows.items()}

    @torch.inference_mode()
    def keep(self, keep: Keep) -> dict[int, Tensor]:
        """Prune; returns the committed rows [a, H] of every layer."""
        most = max((rows.end - rows.start for rows in self._rows.values()), default=0)
        places, committed = keep.cached(most), {}
        index_R = None  # one, as a GPU has to be sent it
        if not _are_neighbors(places):
            device = next(iter(self._rows.values())).view().device
            index_R = torch.tensor(places, device=device)
        for layer, rows in self._rows.items():
            rows.keep(keep.cached(rows.end - rows.start), index_R)
            committed[layer] = rows.view()[: keep.num_committed]
            rows.start += len(committed[layer])
        return committed


class _Rows:
    """Rows [start, end) of a buffer that is written once, from its front to its back.

    So what was read before stays what it was, and reading is free.
    """

    def __init__(self) -> None:
        self.start = self.end = 0
        self._buffer_CH: Tensor | None = None

    def view(self) -> Tensor:
        assert self._buffer_CH is not None, "has no row yet"
        return self._buffer_CH[self.start : self.end]

    def room(self, like_RH: Tensor, num_rows: int) -> Tensor:
        """The next rows, to be written."""
        if self._buffer_CH is None or self.end + num_rows > len(self._buffer_CH):
            count = self.end - self.start
            size = max(2 * (count + num_rows), MIN_ROWS)
            buffer_CH = like_RH.new_empty(size, like_RH.shape[1])
            if count:
                buffer_CH[:count] = self.view()
            self._buffer_CH, self.start, self.end = buffer_CH, 0, count
        self.end += num_rows
        return self._buffer_CH[self.end - num_rows : self.end]

    def keep(self, places: Sequence[int], index_R: Tensor | None) -> None:
        """``index_R``: begins with these places, unless they are neighbors."""
        if _are_neighbors(places):
            self.start += places[0] if places else 0
            self.end = self.start + len(places)
            return
        assert index_R is not None
        room_RH, count = self.room(self.view(), len(places)), len(places)
        rows_RH = self.view()[:-count]
        torch.index_select(rows_RH, 0, index_R[:count], out=room_RH)
        self.start = self.end - count


def _are_neighbors(places: Sequence[int]) -> bool:
    return not places or places[-1] - places[0] + 1 == len(places)
