"""FlowSpec continued: the tree on its way is continued beside every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pipedraft.inference.schedules.base import Growth, Schedule, check_at_least
from pipedraft.inference.schedules.flowspec import beside_step
from pipedraft.inference.schedules.spd import draft_beside_step
from pipedraft.inference.shapes import MOST_ROWS, Budget

if TYPE_CHECKING:
    from pipedraft.inference.engine import Session

MAX_FORWARDS = 7
"""Draft forwards of EAGLE-2's tree."""


@dataclass(frozen=True, kw_only=True)
class FlowSpecContinued(Schedule):
    """FlowSpec's pruning and its two expansions, at every step and without a first tree.

    The root of a round enters at once. Beside every step the draft continues the tree on its way
    where it is most likely right: below the root after a commit, and below its best draft tokens
    that were not continued yet, from what was computed for them; each draft token enters once.
    """

    name: ClassVar[str] = "flowspec_continued"
    grows: ClassVar[Growth | None] = "trees"

    step_tokens: Budget = 4
    """Draft tokens that one draft forward continues, and that it adds; auto: those of them that pay
    under the cost model, at most an equal part of ``max_segment_rows``."""
    expansion_depth: int | None = None
    """Draft forwards beside a step; None: as many as fit beside a step of one row under the cost
    model, 1 to 7."""
    max_segment_rows: int = 16
    """Draft tokens that enter together, those of all draft forwards of a step; the root comes on
    top."""
    level_order: bool = False
    """The oldest draft tokens are continued first, with as many children each; not the best."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "step_tokens", "expansion_depth", "max_segment_rows")

    @property
    def width(self) -> int:
        return MOST_ROWS if self.step_tokens == "auto" else self.step_tokens

    @property
    def label(self) -> str | None:
        return f"continued:{self.step_tokens}"

    @property
    def is_chain(self) -> bool:
        """A root that is continued again may get another draft token."""
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
