"""Naive pipeline parallelism, which verifies a tree after all its micro-batches return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .base import SegmentSchedule

if TYPE_CHECKING:
    from ..session import Session


@dataclass(frozen=True, kw_only=True)
class NaivePP(SegmentSchedule):
    """FlowSpec's baseline, with n + M - 1 steps per round for M micro-batches (default n + 1).

    ``eagle`` verifies the same tree in one forward pass and n steps.
    """

    name: ClassVar[str] = "naive_pp"
    verifies_whole: ClassVar[bool] = True

    def run(self, session: Session) -> None:
        while not session.done:
            num_segments = self.num_segments(session.num_stages)
            session.grow_tree(self.tree, session.clock.round_costs(num_segments, self.tree.depth))
            session.draft_alone()
            session.inject(num_segments, self.max_segment_rows)
            session.resolve(session.collect())
