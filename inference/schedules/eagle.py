"""EAGLE on a pipelined target: draft a tree, verify it in one batch, start again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pipedraft.inference.clock import VirtualClock
from pipedraft.inference.schedules.base import Round, TreeSchedule, travel_whole

if TYPE_CHECKING:
    from pipedraft.inference.engine import Session


@dataclass(frozen=True, kw_only=True)
class Eagle(TreeSchedule):
    """One segment per round: n steps, and the draft works while the stages wait."""

    name: ClassVar[str] = "eagle"

    def run(self, session: Session) -> None:
        while not session.done:
            session.grow_tree(self.tree)
            session.draft_alone()
            session.inject()
            session.resolve(session.collect())

    def replay(self, clock: VirtualClock, found: Round) -> None:
        travel_whole(clock, found, 1, found.drafted + 1)
