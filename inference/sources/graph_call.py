"""One call of a draft's graph: the question, the sizes of its tensors, and where rows are."""

# R rows of a tree, Q leaves, S columns: rows behind the leading text, C all places
# X.. axes of a state

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pipedraft.inference.sources.base import DraftSampling
from pipedraft.inference.sources.row_cache import TEXT
from pipedraft.models.cuda_graphs import Packing
from pipedraft.models.layers import KeyValues


class GraphDraft(Protocol):
    """Forwards the rows of a draft, by tensors of fixed shapes alone."""

    @property
    def num_caches(self) -> int: ...
    @property
    def state_shape(self) -> tuple[int, ...]: ...
    @property
    def shift(self) -> int:
        """Distance of a row's rotary position before that of its token."""

    @property
    def reads_rows(self) -> bool:
        """Rows of a tree read the target's states, not the draft's own of the row before."""

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
        """States [R, X..] of rows, from those of the rows before them.

        Args:
            in_order: each row stands before the next one.
        """


@dataclass(frozen=True)
class ChildQuery:
    """A question about the children of some leaves; a graph is made for it."""

    width: int = 0
    """Best children of each; 0: the leaves' logits."""
    levels: int = 0
    """Further levels, of the best ``beams`` children of the one before that are no rows yet."""
    beams: int = 0
    then: int = 0
    """Best children of each at further levels."""
    split: float | None = None
    """Each row goes on by its best child, and by others of a probability above this, the first
    ones, while there are beams for them; None: by the best of all."""
    sampling: DraftSampling | None = None
    """How children are scored."""

    @property
    def key(self) -> tuple[object, ...] | None:
        """Key of what a question launches; None: it depends on what the device finds."""
        rule = () if self.sampling is None else self.sampling.graph_key
        if rule is None:
            return None
        return self.width, self.levels, self.beams, self.then, self.split is None, *rule


@dataclass(frozen=True)
class CallShape:
    """Sizes of a call's tensors; a graph is made for each."""

    num_text: int
    num_rows: int
    num_leaves: int
    num_parents: int
    """Leaves whose children are continued."""
    num_taken: int
    """Children that one of these has already, at most."""
    num_columns: int
    num_features: int
    num_noise: int
    """Rows of noise: one for each position."""

    def packing(self, vocab_size: int) -> Packing:
        new, S = self.num_text + self.num_rows, self.num_columns
        return Packing(
            counts=4,
            split=1,
            text_S=S,
            new=3 * new,  # tokens, positions, places
            features=self.num_features,
            parents_R=self.num_rows,
            visible_RS=self.num_rows * S,
            leaves_Q=self.num_leaves,
            leaf_positions_Q=self.num_leaves,
            leaf_scores_Q=self.num_leaves,
            leaf_visible_QS=self.num_parents * S,
            taken_QT=self.num_parents * self.num_taken,
            noise_places_Q=self.num_leaves,
            noise=self.num_noise * vocab_size,
        )


@dataclass(frozen=True, kw_only=True)
class Places:
    """Places of a call's rows in the buffers."""

    num_text: int
    """Rows of the text before this call."""
    leading: int
    """Rows of the text in front, which all rows see."""
    first: int
    """Rows behind them that were cached before this call."""
    slots: list[int]
    """Place of each row behind the leading ones."""
    before: int
    """Place of the text's last row before this call, or one that stays zero."""
    slot_of: Mapping[int, int]
    name: Callable[[int], int]

    def of(self, row: int) -> int:
        """Place of a row of the tree; one that is no row of its own is the end of the text."""
        end_of_text = self.slot_of.get(TEXT, self.leading - 1)
        return self.slot_of.get(self.name(row), end_of_text)


@dataclass
class Level:
    """Best children of some rows, in the host's memory."""

    best_2QW: Tensor
    """As of ``best_children``."""
    beams: list[int]
    """Those that the next level continues, counted over all."""
