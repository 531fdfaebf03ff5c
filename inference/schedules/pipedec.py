"""PipeDec adds one wide layer of draft tokens below the deepest ones at every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pipedraft.inference.schedules.base import LayerSchedule
from pipedraft.inference.schedules.spd import draft_beside_step
from pipedraft.inference.shapes import Budget

if TYPE_CHECKING:
    from pipedraft.inference.engine import Session


@dataclass(frozen=True, kw_only=True)
class PipeDec(LayerSchedule):
    name: ClassVar[str] = "pipedec"

    tree_width: Budget = 16
    """Draft tokens per step; every branch that matches the output is kept. auto: choose 1 to 16."""

    def run(self, session: Session) -> None:
        draft_beside_step(session, lambda: session.grow_layer(self.tree_width))
