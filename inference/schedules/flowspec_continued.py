"""FlowSpec with the in-flight tree extended during every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..shapes import MOST_ROWS, Budget, Growth
from .base import Schedule
from .flowspec import beside_step
from .spd import draft_beside_step

if TYPE_CHECKING:
    from ..session import Session

MAX_FORWARDS = 7
"""Maximum draft forwards per step, as many as EAGLE-2's tree takes."""


@dataclass(frozen=True, kw_only=True)
class FlowSpecContinued(Schedule):
    """FlowSpec's pruning and both expansions at every step, without a first tree.

    Each round sends its root at once. During every step the draft extends the in-flight tree at its
    most probable leaves. These are the root after a commit, and the best draft tokens not continued
    yet. Computed states are reused, and each draft token enters once.
    """

    name: ClassVar[str] = "flowspec_continued"
    grows: ClassVar[Growth | None] = "trees"

    step_tokens: Budget = 4
    """Draft tokens continued, and added, by one draft forward. auto: choose by the cost model, at
    most ``max_segment_rows`` divided by the number of forwards."""
    expansion_depth: int | None = None
    """Draft forwards per step; None: 1 to 7, as many as fit within a step with one row per
    stage."""
    max_segment_rows: int = 16
    """Draft tokens that enter together, from all forwards in a step, not counting the root."""
    level_order: bool = False
    """Draft level by level, with equally many children per token, instead of best first."""

    @property
    def width(self) -> int:
        return MOST_ROWS if self.step_tokens == "auto" else self.step_tokens

    @property
    def label(self) -> str | None:
        return f"continued:{self.step_tokens}"

    @property
    def is_chain(self) -> bool:
        """Return False, because a root that is continued again may get a second draft token."""
        return False

    @property
    def fills_step(self) -> bool:
        return not self.expansion_depth

    def run(self, session: Session) -> None:
        draft_beside_step(session, lambda: self._continue_tree(session))

    def _continue_tree(self, session: Session) -> None:
        session.expand_tree(
            beside_step(session, self.expansion_depth, MAX_FORWARDS),
            self.step_tokens,
            self.max_segment_rows,
            not self.level_order,
        )
