"""PipeDec adds one wide layer of draft tokens below the deepest ones at every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..shapes import Budget
from .base import LayerSchedule
from .spd import draft_beside_step

if TYPE_CHECKING:
    from ..session import Session


@dataclass(frozen=True, kw_only=True)
class PipeDec(LayerSchedule):
    name: ClassVar[str] = "pipedec"

    tree_width: Budget = 16
    """Draft tokens per step; every branch that matches the output is kept. auto: choose 1 to 16."""

    def run(self, session: Session) -> None:
        draft_beside_step(session, lambda: session.grow_layer(self.tree_width))
