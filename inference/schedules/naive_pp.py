"""Naive pipeline parallelism: a tree in micro-batches, verified after all of them return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pipedraft.inference.schedules.base import SegmentSchedule

if TYPE_CHECKING:
    from pipedraft.inference.engine import Session


@dataclass(frozen=True, kw_only=True)
class NaivePP(SegmentSchedule):
    """FlowSpec's baseline: n + M - 1 steps per round (M = n + 1 micro-batches).

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
