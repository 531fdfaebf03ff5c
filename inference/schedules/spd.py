"""SPD: the speculation module drafts a layer beside every step of the stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pipedraft.inference.clock import VirtualClock
from pipedraft.inference.schedules.base import LayerSchedule, Round, travel
from pipedraft.inference.schedules.ppsd import draft_after_step, replay_after_step

if TYPE_CHECKING:
    from pipedraft.inference.engine import Session


@dataclass(frozen=True, kw_only=True)
class SPD(LayerSchedule):
    name: ClassVar[str] = "spd"

    timing: Literal["input_states", "output_states"] = "input_states"
    """The module reads the states before the step, beside the stages, or those after it, one stage
    deeper, while they wait (the SPD paper's ablation). A module trained for output states
    (model.timing) reads these alone."""

    def run(self, session: Session) -> None:
        if self.timing == "output_states":
            draft_after_step(session, self.tree_width)
        else:
            draft_beside_step(session, lambda: session.grow_layer(self.tree_width))

    def replay(self, clock: VirtualClock, found: Round) -> None:
        if self.timing == "output_states":
            replay_after_step(clock, found)
        else:
            replay_beside_step(clock, found)


def draft_beside_step(session: Session, grow: Callable[[], None]) -> None:
    """The draft reads the hidden states BEFORE the step and runs beside it.

    A round starts with the pending root alone in the pipeline, so its first verdict takes n steps;
    from then on every step returns verified tokens while draft tokens are right. Every branch that
    agrees with the output is kept.
    """
    while not session.done:
        session.inject()
        hit = True
        while hit and not session.done:
            grow()
            returned = session.step(overlap=True, ahead=True)
            hit = returned is None or session.resolve(returned)
            if hit:
                session.inject()


def replay_beside_step(clock: VirtualClock, found: Round) -> None:
    """A chain that grows by a row a step: n steps to the first token, one to each further one."""
    num_steps = clock.num_stages + found.length - 1
    travel(clock, [1] * num_steps, num_steps, forwards=1, overlap=True)
