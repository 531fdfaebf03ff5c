"""SPD's head drafts one layer during every pipeline step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from .base import LayerSchedule
from .ppsd import draft_after_step

if TYPE_CHECKING:
    from ..session import Session


@dataclass(frozen=True, kw_only=True)
class SPDSchedule(LayerSchedule):
    name: ClassVar[str] = "spd"

    timing: Literal["input_states", "output_states"] = "input_states"
    """Hidden states that the head reads. input_states: from before the step; drafting overlaps
    with the stages. output_states: from after the step, one stage deeper; the stages wait (an
    ablation in the SPD paper). A head trained for output states (model.timing) accepts only
    these."""
    tokens_per_step: int = 1
    """Draft tokens per branch and step, one forward each; they enter together. This must equal
    the head's number in training (model.tokens_per_step)."""

    def __post_init__(self) -> None:
        super().__post_init__()
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
    """Overlap drafting with each step. The head reads hidden states from BEFORE the step.

    A round starts with the root alone in the pipeline, so its first verification result takes n
    steps. From then on every step returns verified tokens until a rejection.
    """
    while not session.done:
        session.inject()
        hit = True
        while hit and not session.done:
            grow()
            # The head read the states already, so its token may start before the result is known.
            returned = session.step(overlap=True, ahead=True)
            hit = returned is None or session.resolve(returned)
            if hit:
                session.inject()
