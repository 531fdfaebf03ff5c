"""Base classes for schedules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ...errors import check_ranges
from ..rules import RuleName
from ..shapes import MOST_ROWS, Budget, Growth, TreeShape

if TYPE_CHECKING:
    from ..session import Session

USUAL_RANGE = "[1, 1024]"
"""Range for a schedule's numbers. No draft uses more rows, and larger drafts would not finish."""


@dataclass(frozen=True, kw_only=True)
class Schedule(ABC):
    """Decides when to draft and inject. A subclass's fields are its settings and options."""

    name: ClassVar[str]
    grows: ClassVar[Growth | None] = None
    """Growth verb required from the draft source, or None if the schedule uses no draft."""
    engine: ClassVar[str] = "pipeline"
    """Kind of engine that runs the schedule: its ``kind``."""
    elsewhere: ClassVar[str] = ""
    """Where the schedule runs, for an error, if most engines do not run it."""
    can_pause: ClassVar[bool] = True
    """False if ``never_slower`` cannot pause the draft."""
    verifies_whole: ClassVar[bool] = False
    """True if a round drafts a complete tree and verifies it only after all segments return."""
    own_rule: ClassVar[RuleName | None] = None
    """Acceptance rule above temperature 0 unless you set one. None: rejection if draft tokens may
    be sampled, else gumbel."""
    ranges: ClassVar[dict[str, str]] = {}
    """Ranges for numeric settings other than ``USUAL_RANGE``, in the notation of
    ``check_ranges``."""

    def __post_init__(self) -> None:
        settings = vars(self).items()
        numbers = [
            name
            for name, value in settings
            if isinstance(value, int | float) and not isinstance(value, bool)
        ]
        check_ranges(self, {name: self.ranges.get(name, USUAL_RANGE) for name in numbers})

    @abstractmethod
    def run(self, session: Session) -> None:
        """Decode one sequence by calling the session's verbs."""

    # -- what it drafts ---------------------------------------------------------------------

    @property
    def width(self) -> int:
        """Number of draft tokens per layer, of children per tree root, or of branches."""
        return 1

    @property
    def label(self) -> str | None:
        """Draft shape as tables show it. None is a plain layer. Tables name it by ``width``."""
        return None

    @property
    def is_chain(self) -> bool:
        """True if every row in the token tree has at most one child."""
        return self.width == 1

    @property
    def can_sample(self) -> bool:
        """Return True if draft tokens may be sampled from the draft's distribution."""
        return self.is_chain

    @property
    def auto_rule(self) -> RuleName:
        return self.own_rule or ("rejection" if self.can_sample else "gumbel")

    @property
    def is_auto(self) -> bool:
        """Return True if the cost model chooses a draft-token budget."""
        return "auto" in vars(self).values()

    @property
    def fills_step(self) -> bool:
        """Return True if the cost model sets how many draft forwards overlap with a step."""
        return False


@dataclass(frozen=True, kw_only=True)
class LayerSchedule(Schedule):
    """Base for schedules adding one layer of draft tokens below the deepest ones."""

    grows: ClassVar[Growth | None] = "layers"

    tree_width: Budget = 1
    """Draft tokens per step. Above 1, every branch that matches the output is kept. auto: choose 1
    to 16 by the cost model."""

    @property
    def width(self) -> int:
        return MOST_ROWS if self.tree_width == "auto" else self.tree_width

    @property
    def label(self) -> str | None:
        return "width:auto" if self.tree_width == "auto" else None


@dataclass(frozen=True, kw_only=True)
class TreeSchedule(Schedule):
    """Base for schedules that draft a complete tree per round."""

    grows: ClassVar[Growth | None] = "trees"

    tree: TreeShape = TreeShape()
    """Draft shape per round: auto, paper, chain[:M], static, or dynamic[:LEVELS:BEAMS:TOKENS];
    default: auto for eagle and naive_pp with one stage, and with --backend process if no schedule
    is named, else paper. If TOKENS is auto, the cost model chooses the number. auto alone times
    rounds of several shapes, and keeps the one with the most tokens per second, or no draft. paper
    is EAGLE-2's dynamic:7:10:59."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tree.depth:
            raise ValueError("tree: a chain of 0 drafts nothing; give --schedule autoregressive")

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
        return self.tree.is_auto or self.tree.kind == "auto"


@dataclass(frozen=True, kw_only=True)
class SegmentSchedule(TreeSchedule):
    """Base for schedules that send each tree through the pipeline in segments."""

    micro_batches: int | None = None
    """Segments per tree; None: stages + 1."""
    max_segment_rows: int = 16
    """Draft tokens per segment (FlowSpec's L_max), not counting the root. A tree too large for
    ``micro_batches`` segments is cut into more."""

    def num_segments(self, num_stages: int) -> int:
        return self.micro_batches or num_stages + 1
