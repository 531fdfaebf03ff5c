"""Interface of pipelines, and a store for hidden states of the rows in flight."""

# R rows, r rows in flight past a layer, P prompt tokens, a committed rows, H hidden, V vocabulary

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...files import Values
from ...models.target import KeepRows, Segment
from ..cost_model import CostModel, VirtualClock
from ..demands import EndMask
from ..rules.sampled import Verifier
from ..verdict import Verdict

if TYPE_CHECKING:
    from ..timeline import Timeline
    from ..tree import TokenTree


@dataclass(frozen=True)
class Returned:
    """First rows of the token tree, returned by the last stage."""

    num_rows: int
    verdicts: Tensor
    """[R, ...]: results of the verifier's ``judge`` on the rows' logits."""
    logits: Tensor | None = None
    """[R, V], if the sequence requests logits."""


@dataclass(frozen=True)
class Ahead:
    """Segment sent before the current step's result. It is valid only if the result keeps it."""

    segment: Segment
    keep_after: Callable[[Returned], KeepRows]
    """Function that computes a result's KeepRows."""


class Pipeline(ABC):
    """All stages of a target. Each ``tick`` runs one pipeline step."""

    knows_root: bool = False
    """True if the target side sampled a fresh tree's root, so it need not be sent."""
    timeline: Timeline
    last_rows: list[int]
    """Rows processed by each stage in the last tick."""
    first_logits: Tensor | None = None
    """Logits [V] after the prompt, if retained."""

    def open(self, max_new_tokens: int, *, bitwise: bool = False) -> None:  # noqa: B027 (may stay empty)
        """Begin a sequence. Its ``prefill`` must follow."""

    def demand(self, mask: EndMask, *, keeps_logits: bool) -> None:
        """Set the open sequence's logit mask. Retain its logits if ``keeps_logits`` is true."""
        if mask.token_ids or keeps_logits:
            raise ValueError("min_tokens and logprobs: they need the stages in one process")

    @abstractmethod
    def prefill(
        self, input_ids: Tensor, taps: tuple[int, ...], verifier: Verifier
    ) -> tuple[int, Mapping[int, Tensor]]:
        """Commit a prompt. Return the next token, and hidden states [P, H] by tapped layer."""

    def recompute(self, input_ids: Tensor, verifier: Verifier) -> None:  # noqa: B027 (may be empty)
        """Compute all committed rows again for a longer text, while no other row is in flight.

        A link's server does so by itself.
        """

    @abstractmethod
    def inject(self, segment: Segment) -> None:
        """Queue a segment at the first stage. One segment enters the stage in each step."""

    def start(self) -> None:  # noqa: B027 (may stay empty)
        """Let the next segment enter before ``tick``, once all earlier results are known."""

    @abstractmethod
    def tick(self, ahead: Ahead | None = None) -> Returned | None:
        """Run every stage on its input and return the last output. ``ahead`` may start early."""

    def features(self) -> Mapping[int, Tensor]:
        """Return hidden states [r, H] by tapped layer for the r rows in flight past that layer."""
        return {}

    def features_with(self, waiting: Sequence[int]) -> Mapping[int, Tensor]:
        """Return ``features``, with the embeddings of the ``waiting`` tokens added to layer 0."""
        features = self.features()
        # Layer 0 needs no stage: the draft can have embeddings before the target has run.
        if waiting and 0 in features:
            return {**features, 0: torch.cat([features[0], self.embed(torch.tensor(waiting))])}
        return features

    def embed(self, ids: Tensor) -> Tensor:
        """Return embeddings [r, H] for token ids [r], which are the hidden states of layer 0."""
        raise AssertionError("this pipeline has no hidden states")

    def verdict_waits(self) -> bool:
        """Return True if a result has arrived early, so that more drafting would delay it."""
        return False

    def walk(self, verifier: Verifier, tree: TokenTree, returned: Returned) -> Verdict:
        """Return the verification result for the tree, given the last stage's results by row."""
        return verifier.walk(tree, returned.verdicts)

    @abstractmethod
    def keep(self, keep: KeepRows) -> Mapping[int, Tensor]:
        """Commit, prune, roll back or flush at all stages. Return the committed rows' features."""

    def make_clock(
        self, cost: CostModel, boundaries: Sequence[int], draft_forward: float
    ) -> VirtualClock:
        """Return one sequence's clock."""
        return VirtualClock(cost, boundaries, draft_forward)

    def now(self) -> float:
        """Return the time in seconds. Only differences between two calls have a meaning."""
        return time.perf_counter()

    def drafted(self, num_tokens: int, started_s: float) -> None:  # noqa: B027 (may stay empty)
        """Record ``num_tokens`` drafted since the time ``started_s`` (by ``now``)."""

    def close(self) -> int | None:
        """End the sequence. Return its target passes after the prompt, or None to count steps."""
        return None

    def find_not_finite(self, ids: list[int], drafted: list[int]) -> str:
        """Say where the target's numbers became NaN or infinite in ``ids``, else in ``drafted``."""
        return "they were computed elsewhere"

    def abandon(self) -> None:  # noqa: B027 (may stay empty)
        """End the sequence after a failure."""

    def reports(self) -> list[Values]:
        """Return every process's times and counts since the last ``clear``."""
        return [self.timeline.report()]

    def clear(self) -> None:
        """Restart the measurement."""
        self.timeline.clear()


# -- hidden states of the rows in flight --------------------------------------------------------

MIN_ROWS = 64
"""Minimum buffer size in rows."""


def pick_rows(rows_RH: Tensor, places: Sequence[int]) -> Tensor:
    """Return the rows at ascending places. Adjacent rows need no index tensor on the GPU."""
    if not _are_neighbors(places):
        return rows_RH[list(places)]
    first = places[0] if places else 0
    return rows_RH[first : first + len(places)]


def _are_neighbors(places: Sequence[int]) -> bool:
    return not places or places[-1] - places[0] + 1 == len(places)


class FeatureStore:
    """Hidden states for rows in flight, per layer index, in token-tree order.

    Rows pass the stages first-in first-out, so those past a layer are the tree's first rows.
    """

    def __init__(self) -> None:
        self._rows: dict[int, _StoredRows] = {}

    @torch.inference_mode()
    def append(self, states: Mapping[int, Tensor]) -> None:
        """Append rows [R, H] per layer index, with one kernel launch for all layers."""
        rooms = [
            self._rows.setdefault(layer, _StoredRows()).room(hidden_RH, len(hidden_RH))
            for layer, hidden_RH in states.items()
        ]
        if rooms:
            torch._foreach_copy_(rooms, list(states.values()))

    def view(self) -> dict[int, Tensor]:
        """Return hidden states [r, H] by layer for the r tree rows that have passed the layer."""
        return {layer: rows.view() for layer, rows in self._rows.items()}

    @torch.inference_mode()
    def keep(self, keep: KeepRows) -> dict[int, Tensor]:
        """Prune the rows, and return the committed ones [a, H] for every layer."""
        most = max((rows.end - rows.start for rows in self._rows.values()), default=0)
        places, committed = keep.cached(most), {}
        index_R = None  # One index for all layers: each index costs a copy to the GPU.
        if not _are_neighbors(places):
            device = next(iter(self._rows.values())).view().device
            index_R = torch.tensor(places, device=device)
        for layer, rows in self._rows.items():
            rows.keep(keep.cached(rows.end - rows.start), index_R)
            committed[layer] = rows.view()[: keep.num_committed]
            rows.start += len(committed[layer])
        return committed


class _StoredRows:
    """Rows [start, end) of a buffer. Each place is written only once, so views stay valid."""

    def __init__(self) -> None:
        self.start = self.end = 0
        self._buffer_CH: Tensor | None = None

    def view(self) -> Tensor:
        assert self._buffer_CH is not None, "has no row yet"
        return self._buffer_CH[self.start : self.end]

    def room(self, like_RH: Tensor, num_rows: int) -> Tensor:
        """Return a view of the next ``num_rows`` buffer rows, to write into."""
        # Full: move the live rows to a new buffer; old views still reference the old one.
        if self._buffer_CH is None or self.end + num_rows > len(self._buffer_CH):
            count = self.end - self.start
            # Doubling keeps the copies per row constant on average.
            size = max(2 * (count + num_rows), MIN_ROWS)
            buffer_CH = like_RH.new_empty(size, like_RH.shape[1])
            if count:
                buffer_CH[:count] = self.view()
            self._buffer_CH, self.start, self.end = buffer_CH, 0, count
        self.end += num_rows
        return self._buffer_CH[self.end - num_rows : self.end]

    def keep(self, places: Sequence[int], index_R: Tensor | None) -> None:
        """Keep the rows at ``places``. Unless these are adjacent, ``index_R`` begins with them."""
        if _are_neighbors(places):
            # Adjacent rows move no data: only the bounds change.
            self.start += places[0] if places else 0
            self.end = self.start + len(places)
            return
        assert index_R is not None
        # Copy behind the old rows, not over them: views given out before must not change.
        room_RH, count = self.room(self.view(), len(places)), len(places)
        rows_RH = self.view()[:-count]
        torch.index_select(rows_RH, 0, index_R[:count], out=room_RH)
        self.start = self.end - count
