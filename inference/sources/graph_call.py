"""Data for one CUDA-graph call to a draft, with rows, query, tensor sizes and row places."""

# R tree rows, Q leaves, S columns: rows behind the leading text, C all places
# X.. axes of a state

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from ...models.speed.cuda_graphs import Packing
from ...models.transformer.layers import KeyValues
from ..tree import TokenTree
from .base import DraftSampling
from .row_cache import TEXT, NewText


class GraphDraft(Protocol):
    """Draft that CUDA graphs can capture, because it uses only tensors with fixed shapes."""

    @property
    def num_caches(self) -> int: ...
    @property
    def state_shape(self) -> tuple[int, ...]: ...
    @property
    def shift(self) -> int:
        """A row's token position minus its rotary position."""

    @property
    def reads_rows(self) -> bool:
        """True if tree rows read the target's states instead of the draft's own previous state."""

    @property
    def draft_ids(self) -> Tensor: ...
    @property
    def taps(self) -> tuple[int, ...]: ...
    def feature(self, taps: Mapping[int, Tensor]) -> Tensor: ...
    def logits(self, state_X: Tensor) -> Tensor: ...

    def step(
        self,
        tokens_R: Tensor,
        states_RX: Tensor,
        positions_R: Tensor,
        caches: Sequence[KeyValues],
        visible_RC: Tensor,
        *,
        in_order: bool,
    ) -> Tensor:
        """Return states [R, X..] for rows, from their predecessors' states.

        Args:
            in_order: True if each row precedes the next one.
        """


@dataclass(frozen=True)
class ChildQuery:
    """Query for some leaves' children. Each query has its own graph."""

    width: int = 0
    """Best children per leaf; 0: return the leaves' logits."""
    levels: int = 0
    """Further levels; each continues the ``beams`` best new children in the level before."""
    beams: int = 0
    then: int = 0
    """Best children per row at further levels."""
    sampling: DraftSampling | None = None
    """Settings for scoring children."""

    @property
    def key(self) -> tuple[object, ...] | None:
        """Key of a CUDA graph with this query, or None if its launches depend on data."""
        rule = () if self.sampling is None else self.sampling.graph_key
        if rule is None:
            return None
        return self.width, self.levels, self.beams, self.then, *rule


@dataclass(frozen=True, kw_only=True)
class GraphCall:
    """Text and tree rows to forward, and leaves with children to rank."""

    tree: TokenTree
    text: NewText
    rows: list[int] = field(default_factory=list)
    """As in ``RowCache.compute``."""
    leaves: list[int] = field(default_factory=list)
    """Rows that are cached or in ``rows``; for a root without a row, the end of the text."""
    query: ChildQuery = ChildQuery()
    name: Callable[[int], int] = int
    given: Mapping[int, Tensor] | None = None
    """Hidden states for all tree rows, if the draft reads them."""


@dataclass(frozen=True)
class CallShape:
    """Tensor sizes in a call. Each combination of sizes has its own graph."""

    num_text: int
    num_rows: int
    num_leaves: int
    num_parents: int
    """Leaves with continued children."""
    num_taken: int
    """Maximum existing children per such leaf."""
    num_columns: int
    num_features: int
    num_noise: int
    """Noise rows: one per position."""

    def packing(self, vocab_size: int) -> Packing:
        new, S = self.num_text + self.num_rows, self.num_columns
        return Packing(
            counts=4,
            text_S=S,
            new=3 * new,  # tokens, positions, places
            features=self.num_features,
            parents_R=self.num_rows,
            visible_RS=self.num_rows * S,
            leaves_Q=self.num_leaves,
            leaf_positions_Q=self.num_leaves,
            leaf_scores_Q=self.num_leaves,
            leaf_visible_QS=self.num_parents * S,
            # Children in the tree already are returned, but not continued again.
            taken_QT=self.num_parents * self.num_taken,
            noise_places_Q=self.num_leaves,
            noise=self.num_noise * vocab_size,
        )


@dataclass(frozen=True, kw_only=True)
class Places:
    """Buffer places for a call's rows."""

    num_text: int
    """Text rows before this call."""
    leading: int
    """Leading text rows, visible to all rows."""
    first: int
    """Rows cached before this call, not counting the leading text rows."""
    slots: list[int]
    """Place for each row after the leading text rows."""
    before: int
    """Place of the last text row before this call, or a place that stays zero."""
    slot_of: Mapping[int, int]
    """Places by row name."""

    def of(self, name: int) -> int:
        """Return a tree row's place, or the text's end for a row without a place."""
        # The root is text, and has no place as a tree row.
        end_of_text = self.slot_of.get(TEXT, self.leading - 1)
        return self.slot_of.get(name, end_of_text)


@dataclass
class Level:
    """Best children for some rows, on the host."""

    best_2QW: Tensor
    """Tokens and cumulative scores, as from ``best_children``."""
    beams: list[int]
    """Children continued by the next level, as indices over all of them."""
