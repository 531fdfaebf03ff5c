"""PPSD's early-exit head drafts after each step while every stage waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..shapes import Budget
from .base import LayerSchedule

if TYPE_CHECKING:
    from ..session import Session


@dataclass(frozen=True, kw_only=True)
class PPSDSchedule(LayerSchedule):
    name: ClassVar[str] = "ppsd"

    def run(self, session: Session) -> None:
        draft_after_step(session, self.tree_width)


def draft_after_step(session: Session, width: Budget) -> None:
    """Run steps and drafts in turn. The head reads hidden states from AFTER the step.

    SPD with timing ``output_states`` uses this loop too. The head sits behind the first stage and
    starts before the verification result is known. The head's time counts at every step, as in the
    paper. The speed-up is L' L / (Ls n + L), with L layers in the target and Ls in the head. A step
    with nothing to continue still pays for one draft token.
    """
    while not session.done:
        session.inject()
        hit = True
        while hit and not session.done:
            returned = session.step()
            hit = returned is None or session.resolve(returned)
            if hit and not session.done:
                session.grow_layer(width)
            # Before the result is known the head has started, so even a rejection pays for it.
            session.draft_alone(at_least=1)
            if hit:
                session.inject()
