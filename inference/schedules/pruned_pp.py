"""Pruned pipeline parallelism, which prunes a tree after each of its segments returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .base import SegmentSchedule

if TYPE_CHECKING:
    from ..session import Session


@dataclass(frozen=True, kw_only=True)
class PrunedPP(SegmentSchedule):
    """Schedule that ends a round at the first token outside the tree, or at a leaf."""

    name: ClassVar[str] = "pruned_pp"

    level_order: bool = False
    """Send draft tokens level by level instead of best first."""

    def run(self, session: Session) -> None:
        while not session.done:
            self.begin_round(session)
            hit = True
            while hit and not session.done:
                returned = session.step(overlap=True)
                hit = returned is None or session.resolve(returned)
                if hit and not session.done:
                    session.inject()

    def begin_round(self, session: Session) -> None:
        """Draft a tree while the stages wait, then send it in segments."""
        num_segments = self.num_segments(session.num_stages)
        # depth draft forwards run while the stages wait, whatever the tree's size.
        costs = session.clock.round_costs(num_segments, self.tree.depth)
        session.grow_tree(self.tree, costs, by_score=not self.level_order)
        session.draft_alone()
        session.inject(num_segments, self.max_segment_rows)
