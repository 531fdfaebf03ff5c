"""Where the stages of a target run: one interface for all, and the states of rows in flight."""

# R rows, H hidden

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from pipedraft.files import Values
from pipedraft.inference.clock import CostModel, VirtualClock
from pipedraft.inference.demands import EndMask
from pipedraft.inference.rules.sampled import Verdict, Verifier
from pipedraft.models.target import KeepRows, Segment

if TYPE_CHECKING:
    from pipedraft.inference.config import DecodeConfig
    from pipedraft.inference.timeline import Timeline
    from pipedraft.inference.tree import TokenTree


@dataclass(frozen=True)
class Returned:
    """The first rows of the token tree, back from the last stage."""

    num_rows: int
    verdicts: Tensor
    """[R, ...]: what the verifier's ``judge`` made of their logits."""
    logits: Tensor | None = None
    """[R, V], where the sequence wants them."""


@dataclass(frozen=True)
class Ahead:
    """A segment for the step after the coming one, if the coming verdict keeps it."""

    segment: Segment
    keep_after: Callable[[Returned], KeepRows]
    """The KeepRows that a verdict will lead to."""


class Pipeline(ABC):
    """All stages of a target; one ``tick`` is one pipeline step."""

    is_link: ClassVar[bool] = False
    """The target is behind a network: verdicts come when they come, and hidden states do not."""
    knows_root: bool = False
    """The target's side has drawn the root of a fresh tree, so it need not be sent."""
    timeline: Timeline
    last_rows: list[int]
    """Rows that each stage processed in the last tick."""

    def open(self, config: DecodeConfig, prompt_index: int) -> None:  # noqa: B027 (may stay empty)
        """Begin a sequence: its prompt follows."""

    def demand(self, mask: EndMask, *, keeps_logits: bool) -> None:
        """Mask the logits of the sequence that was opened, and keep them.

        Raises:
            ValueError: the logits are elsewhere.
        """
        if mask.token_ids or keeps_logits:
            raise ValueError("min_tokens and logprobs: they need the stages in one process")

    @property
    def first_logits(self) -> Tensor | None:
        """Logits [V] behind the prompt, if they are kept."""
        return None

    @abstractmethod
    def prefill(
        self, input_ids: Tensor, taps: tuple[int, ...], verifier: Verifier
    ) -> tuple[int, Mapping[int, Tensor]]:
        """Commit a prompt; returns the target's next token and the tapped hidden states [P, H]."""

    @abstractmethod
    def inject(self, segment: Segment) -> None:
        """Queue rows at the first stage; one segment enters per step."""

    def start(self) -> None:  # noqa: B027 (may stay empty)
        """The next segment may enter now: everything that precedes the step is known."""

    @abstractmethod
    def tick(self, ahead: Ahead | None = None) -> Returned | None:
        """Every stage processes what waits at its input; returns what leaves the last one.

        Args:
            ahead: what may be begun before this step's verdict is here.
        """

    def features(self) -> Mapping[int, Tensor]:
        """Hidden states [r, H] of the rows in flight as they are now, by tapped layer."""
        return {}

    def features_with(self, waiting: Sequence[int]) -> Mapping[int, Tensor]:
        """Join ``features`` and the embeddings of draft tokens that are injected after these."""
        features = self.features()
        if waiting and 0 in features:
            return {**features, 0: torch.cat([features[0], self.embed(torch.tensor(waiting))])}
        return features

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [r, H] of token ids [r]: the hidden states of layer 0.

        Raises:
            AssertionError: the pipeline has no hidden states.
        """
        raise AssertionError("this pipeline has no hidden states")

    def verdict_waits(self) -> bool:
        """Rows are back before they are due: drafting on would delay them."""
        return False

    def walk(self, verifier: Verifier, tree: TokenTree, returned: Returned) -> Verdict:
        """Walk the tree by the verdicts of the rows that returned."""
        return verifier.walk(tree, returned.verdicts)

    @abstractmethod
    def keep(self, keep: KeepRows) -> Mapping[int, Tensor]:
        """Commit, prune, roll back or flush everywhere; returns the committed rows' features."""

    def make_clock(
        self, cost: CostModel, boundaries: Sequence[int], draft_forward: float
    ) -> VirtualClock:
        """The clock of one sequence."""
        return VirtualClock(cost, boundaries, draft_forward)

    def now(self) -> float:
        """Time in seconds; differences count."""
        return time.perf_counter()

    def drafted(self, num_tokens: int, started_s: float) -> None:  # noqa: B027 (may stay empty)
        """The draft has made so many tokens since a moment of ``now``."""

    def close(self) -> int | None:
        """End the sequence.

        Returns:
            Passes over the target after the prompt's, where no step was counted.
        """
        return None

    def abandon(self) -> None:  # noqa: B027 (may stay empty)
        """The sequence ends where it is: something has failed."""

    def reports(self) -> list[Values]:
        """Times and counts of every process since the last ``clear``."""
        return [self.timeline.report()]

    def clear(self) -> None:
        """Start measuring anew."""
        self.timeline.clear()


# -- hidden states of the rows in flight --------------------------------------------------------

MIN_ROWS = 64
"""Of a buffer."""


def pick_rows(rows_RH: Tensor, places: Sequence[int]) -> Tensor:
    """Some rows, in ascending order; adjacent ones without an index, which a GPU has to be sent."""
    if not _are_neighbors(places):
        return rows_RH[list(places)]
    first = places[0] if places else 0
    return rows_RH[first : first + len(places)]


def _are_neighbors(places: Sequence[int]) -> bool:
    return not places or places[-1] - places[0] + 1 == len(places)


class FeatureStore:
    """Hidden states of the rows in flight, per layer index, in the order of the token tree.

    Rows enter and leave the stages first-in first-out, so the rows that have passed a layer are
    always a prefix of the tree's rows, and a KeepRows acts on them as on a stage's cache.
    """

    def __init__(self) -> None:
        self._rows: dict[int, _StoredRows] = {}

    @torch.inference_mode()
    def append(self, states: Mapping[int, Tensor]) -> None:
        """Layer index -> [R, H]: rows that have passed it; one launch for all layers."""
        rooms = [
            self._rows.setdefault(layer, _StoredRows()).room(hidden_RH, len(hidden_RH))
            for layer, hidden_RH in states.items()
        ]
        if rooms:
            torch._foreach_copy_(rooms, list(states.values()))

    def view(self) -> dict[int, Tensor]:
        """Layer index -> [r, H] for the first r rows of the tree, r falling with the layer."""
        return {layer: rows.view() for layer, rows in self._rows.items()}

    @torch.inference_mode()
    def keep(self, keep: KeepRows) -> dict[int, Tensor]:
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


class _StoredRows:
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
        """Keep rows at these places; ``index_R`` begins with them, unless they are neighbors."""
        if _are_neighbors(places):
            self.start += places[0] if places else 0
            self.end = self.start + len(places)
            return
        assert index_R is not None
        room_RH, count = self.room(self.view(), len(places)), len(places)
        rows_RH = self.view()[:-count]
        torch.index_select(rows_RH, 0, index_R[:count], out=room_RH)
        self.start = self.end - count
