"""Where the stages of a target run: one interface for the engine and for every schedule."""

# R rows

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
from pipedraft.inference.verify import Verifier, Walk
from pipedraft.models.target import Keep, Segment

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


@dataclass(frozen=True)
class Ahead:
    """A segment for the step after the coming one, if the coming verdict keeps it."""

    segment: Segment
    keep_after: Callable[[Returned], Keep]
    """The Keep that a verdict will lead to."""


def pick_rows(rows_RH: Tensor, places: Sequence[int]) -> Tensor:
    """Some rows, in ascending order; adjacent ones without an index, which a GPU has to be sent."""
    first, last = (places[0], places[-1]) if places else (0, -1)
    if last - first + 1 == len(places):
        return rows_RH[first : last + 1]
    return rows_RH[list(places)]


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
        """``features``, and the embeddings of draft tokens that will be injected after these."""
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

    def walk(self, verifier: Verifier, tree: TokenTree, returned: Returned) -> Walk:
        """Walk the tree by the verdicts of the rows that returned."""
        return verifier.walk(tree, returned.verdicts)

    @abstractmethod
    def keep(self, keep: Keep) -> Mapping[int, Tensor]:
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
