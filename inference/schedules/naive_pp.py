"""Naive pipeline parallelism: a tree in micro-batches, verified once all of them are back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pipedraft.inference.schedules.base import SegmentSchedule

if TYPE_CHECKING:
    from pipedraft.inference.engine import Session


@dataclass(frozen=True, kw_only=True)
class NaivePP(SegmentSchedule):
    """n + M - 1 steps a round: FlowSpec's baseline (M = n + 1).

    The same tree in one batch takes n steps: see ``eagle``.
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
