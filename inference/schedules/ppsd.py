"""PPSD: the early-exit head drafts from the states after the step, and every stage waits for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pipedraft.inference.schedules.base import LayerSchedule
from pipedraft.inference.shapes import Budget

if TYPE_CHECKING:
    from pipedraft.inference.engine import Session


@dataclass(frozen=True, kw_only=True)
class PPSDSchedule(LayerSchedule):
    name: ClassVar[str] = "ppsd"

    def run(self, session: Session) -> None:
        draft_after_step(session, self.tree_width)


def draft_after_step(session: Session, width: Budget) -> None:
    """The draft reads the hidden states AFTER the step; also SPD's with timing ``output_states``.

    A head behind the first stage starts before the verdict is known, so its time counts at every
    step, as in the paper: S = L' L / (Ls n + L). A step whose verdict leaves nothing to continue
    pays for a draft token that is not made.
    """
    while not session.done:
        session.inject()
        hit = True
        while hit and not session.done:
            returned = session.step()
            hit = returned is None or session.resolve(returned)
            if hit and not session.done:
                session.grow_layer(width)
            session.draft_alone(at_least=1)
            if hit:
                session.inject()
