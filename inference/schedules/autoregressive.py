"""Plain decoding on a pipelined target: one token travels through all stages, then the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pipedraft.inference.schedules.base import Schedule

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
