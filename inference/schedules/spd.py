"""SPD: the speculation module drafts a layer beside every step of the stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pipedraft.inference.schedules.base import LayerSchedule, check_at_least
from pipedraft.inference.schedules.ppsd import draft_after_step

if TYPE_CHECKING:
    from pipedraft.inference.engine import Session


@dataclass(frozen=True, kw_only=True)
class SPDSchedule(LayerSchedule):
    name: ClassVar[str] = "spd"

    timing: Literal["input_states", "output_states"] = "input_states"
    """The module reads the states before the step, beside the stages, or those after it, one stage
    deeper, while they wait (the SPD paper's ablation). A module trained for output states
    (model.timing) reads these alone."""
    tokens_per_step: int = 1
    """Draft tokens of a branch at every step, one forward each; they enter together. A module has a
    number of its own (model.tokens_per_step)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "tokens_per_step")
        if self.tokens_per_step > 1 and self.timing == "output_states":
            raise ValueError(
                f"tokens_per_step: {self.tokens_per_step} with timing output_states, where the "
                "stages wait for each forward; give 1"
            )

    @property
    def label(self) -> str | None:
        width = super().label or f"width:{self.width}"
        return f"{width}:{self.tokens_per_step}" if self.tokens_per_step > 1 else super().label

    def run(self, session: Session) -> None:
        def grow() -> None:
            for _ in range(self.tokens_per_step):
                session.grow_layer(self.tree_width)

        if self.timing == "output_states":
            draft_after_step(session, self.tree_width)
        else:
            draft_beside_step(session, grow)


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
