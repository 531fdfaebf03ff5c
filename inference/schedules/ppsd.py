"""PPSD: the early-exit head drafts from the states after the step, and every stage waits for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pipedraft.inference.clock import CostModel, VirtualClock
from pipedraft.inference.schedules.base import LayerSchedule, Refusal, Round
from pipedraft.inference.shapes import Budget

if TYPE_CHECKING:
    from pipedraft.inference.engine import Session


@dataclass(frozen=True, kw_only=True)
class PPSDSchedule(LayerSchedule):
    name: ClassVar[str] = "ppsd"

    def run(self, session: Session) -> None:
        draft_after_step(session, self.tree_width)

    def replay(self, clock: VirtualClock, found: Round) -> None:
        replay_after_step(clock, found)

    def replay_basis(self, draft_type: str | None, num_stages: int, cost: CostModel) -> str:
        basis = super().replay_basis(draft_type, num_stages, cost)
        if num_stages == 1:
            raise Refusal(
                "on one stage ppsd tests no draft token; record a run on two stages or more"
            )
        return basis


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


def replay_after_step(clock: VirtualClock, found: Round) -> None:
    """A chain that grows by a row a step, each of which waits for the draft.

    On one stage the root is verified before its draft token is made, so every token is a round.
    """
    num_rounds = 1 if clock.num_stages > 1 else found.length
    for _ in range(num_rounds):
        num_steps = clock.num_stages + found.length // num_rounds - 1
        for step in range(num_steps):
            rows = [int(stage <= step) for stage in range(clock.num_stages)]
            clock.step(rows, draft_forwards=0, overlap=False)
            clock.serial_draft(1)
