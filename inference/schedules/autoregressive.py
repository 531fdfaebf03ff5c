"""Plain decoding on a pipelined target: one token travels through all stages, then the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pipedraft.inference.clock import CostModel, VirtualClock
from pipedraft.inference.schedules.base import Round, Schedule, travel

if TYPE_CHECKING:
    from pipedraft.inference.config import RuleName
    from pipedraft.inference.engine import Session


@dataclass(frozen=True, kw_only=True)
class Autoregressive(Schedule):
    name: ClassVar[str] = "autoregressive"

    @property
    def auto_rule(self) -> RuleName:
        """The one whose output a tree's equals; a verdict is a token id, not its logits."""
        return "gumbel"

    def run(self, session: Session) -> None:
        while not session.done:
            session.inject()
            session.resolve(session.collect())

    def replay(self, clock: VirtualClock, found: Round) -> None:
        """Advance the clock by n steps a token."""
        travel(clock, [1], clock.num_stages, forwards=0, overlap=False)

    def replay_basis(self, draft_type: str | None, num_stages: int, cost: CostModel) -> str:
        return "exact"
