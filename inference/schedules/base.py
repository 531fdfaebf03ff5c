"""Base classes of schedules: checked settings, ``run``, and a label."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pipedraft.inference.shapes import MOST_ROWS, Budget, TreeShape

if TYPE_CHECKING:
    from pipedraft.inference.config import RuleName
    from pipedraft.inference.engine import Session

Growth = Literal["layers", "trees", "micro_batches"]
"""Growing verbs of a draft source."""


@dataclass(frozen=True, kw_only=True)
class Schedule(ABC):
    """Who drafts and injects when. The fields of a subclass are its settings and its options."""

    name: ClassVar[str]
    grows: ClassVar[Growth | None] = None
    """Verb of the draft source that it needs; None: no draft."""
    needs_link: ClassVar[bool] = False
    """Made for a target behind a network: it decides by time and by what is away."""

    verifies_whole: ClassVar[bool] = False
    """A round is drafted as a whole, and verified once all of it is back."""

    @abstractmethod
    def run(self, session: Session) -> None:
        """Decode one sequence by the session's verbs."""

    # -- what it drafts ---------------------------------------------------------------------

    @property
    def width(self) -> int:
        """Draft tokens of a layer, children of the root of a tree, or branches."""
        return 1

    @property
    def label(self) -> str | None:
        """Name of what is drafted at once, for tables; None: a layer of ``width`` draft tokens."""
        return None

    @property
    def is_chain(self) -> bool:
        """Every row of the token tree has one child at most."""
        return self.width == 1

    @property
    def can_sample(self) -> bool:
        """Draft tokens may be drawn from the draft's distribution."""
        return self.is_chain

    @property
    def auto_rule(self) -> RuleName:
        """Acceptance rule above temperature 0 where none is asked for."""
        return "rejection" if self.can_sample else "gumbel"

    @property
    def is_auto(self) -> bool:
        """A budget of draft tokens is chosen by the cost model."""
        return "auto" in vars(self).values()

    @property
    def fills_step(self) -> bool:
        """The cost model says how many draft forwards fit beside a step."""
        return False


@dataclass(frozen=True, kw_only=True)
class LayerSchedule(Schedule):
    """A schedule that adds layers of draft tokens below the deepest ones."""

    grows: ClassVar[Growth | None] = "layers"

    tree_width: Budget = 1
    """Draft tokens per step; more than 1 keeps every branch that agrees with the output; auto: as
    many as pay under the cost model, 1 to 16."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "tree_width")

    @property
    def width(self) -> int:
        return MOST_ROWS if self.tree_width == "auto" else self.tree_width

    @property
    def label(self) -> str | None:
        return "width:auto" if self.tree_width == "auto" else None


@dataclass(frozen=True, kw_only=True)
class TreeSchedule(Schedule):
    """A schedule that drafts whole trees."""

    grows: ClassVar[Growth | None] = "trees"

    tree: TreeShape = TreeShape()
    """What a round proposes: chain:M, static, or dynamic[:LEVELS:BEAMS:TOKENS]; TOKENS of auto are
    as many as pay under the cost model."""

    @property
    def width(self) -> int:
        return self.tree.width

    @property
    def label(self) -> str | None:
        return self.tree.label

    @property
    def is_chain(self) -> bool:
        return self.tree.is_chain

    @property
    def is_auto(self) -> bool:
        return self.tree.is_auto


@dataclass(frozen=True, kw_only=True)
class SegmentSchedule(TreeSchedule):
    """A schedule whose trees travel in segments."""

    micro_batches: int | None = None
    """Segments that a tree is cut into; None: stages + 1."""
    max_segment_rows: int = 16
    """Draft tokens of a segment (FlowSpec's L_max); the root comes on top. A tree that does not fit
    ``micro_batches`` segments of this size is cut into more of them."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "micro_batches", "max_segment_rows")

    def num_segments(self, num_stages: int) -> int:
        return self.micro_batches or num_stages + 1


def check_at_least(settings: object, least: float, *names: str) -> None:
    """Refuse settings below a number, or not finite; None is left alone."""
    for name in names:
        value = getattr(settings, name)
        if value not in (None, "auto") and not least <= value < float("inf"):
            below = "negative" if least == 0 else f"below {least:g}"
            problem = below if value < least else "not finite"
            raise ValueError(f"{name}: {value} is {problem}; give at least {least:g}")


def check_probability(settings: object, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if not 0 <= value <= 1:
            raise ValueError(f"{name}: {value} is no probability; give 0 to 1")
