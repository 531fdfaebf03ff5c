"""Autoregressive decoding on a pipeline. A token crosses all stages before the next one enters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .base import Schedule

if TYPE_CHECKING:
    from ..session import Session


@dataclass(frozen=True, kw_only=True)
class Autoregressive(Schedule):
    name: ClassVar[str] = "autoregressive"
    # With gumbel, trees give the same output, and stages return only token ids.
    own_rule = "gumbel"

    def run(self, session: Session) -> None:
        while not session.done:
            session.inject()
            session.resolve(session.collect())
