"""EAGLE on a pipeline. Each round drafts a tree and verifies the tree in one forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .base import TreeSchedule

if TYPE_CHECKING:
    from ..session import Session


@dataclass(frozen=True, kw_only=True)
class EagleSchedule(TreeSchedule):
    """Sends one segment per round, which takes n steps. The stages wait while the head drafts."""

    name: ClassVar[str] = "eagle"
    verifies_whole: ClassVar[bool] = True

    max_segment_rows: int | None = None
    """Draft tokens per segment; larger trees are cut into several. None: one forward pass, as
    published."""

    def run(self, session: Session) -> None:
        while not session.done:
            session.grow_tree(self.tree, session.clock.round_costs(1, self.tree.depth))
            session.draft_alone()
            session.inject(1, self.max_segment_rows)
            session.resolve(session.collect())
