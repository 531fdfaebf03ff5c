"""PicoSpec keeps drafting during verification, with enough batches in flight to never wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .stop_and_wait import LinkSchedule

if TYPE_CHECKING:
    from ..pipeline import LinkedPipeline


BATCHES_PER_PASS = 4
"""Batches sent in the time of one target pass; at most 6, because batches end with a whole token.
The next pass verifies all that arrive during a pass, so more batches would only cost messages."""


@dataclass(frozen=True, kw_only=True)
class PicoSpec(LinkSchedule):
    """Drafts during verification and cuts batches by time. The target computes rows early.

    After a rejection, the target sends only a part of its distribution. Only elapsed time cuts a
    batch. Dropping draft tokens for their low probability would bias the distribution of the rest.
    """

    name: ClassVar[str] = "picospec"
    own_rule = "tail_escape"

    slow: bool = False
    """Skip early passes: the target computes a batch only once it is complete."""
    serial: bool = False
    """Wait for each verification result. Batches then get a bonus token and are never cut."""
    truncate: bool = True
    """End a batch once drafting has taken as long as a verification result takes to return."""
    window: int | None = None
    """Batches in flight; None: enough to keep drafting, ceil((RTT + T_v) / T_d)."""

    @property
    def early(self) -> bool:
        return not self.slow

    @property
    def drafts_on(self) -> bool:
        return not self.serial

    @property
    def max_window(self) -> int | None:
        return 1 if self.serial else self.window

    def holds(self, link: LinkedPipeline) -> bool:
        # Without batches in flight the target is free, or will be when this batch arrives.
        if not link.flights:
            return False
        interval_s = link.estimates.verify_s / BATCHES_PER_PASS
        # Half a draft token: the batch ends with the token nearest to the interval.
        passed_s = link.now() - link.flights[-1].sent_s + link.estimates.draft_s / 2
        return passed_s < interval_s - 1e-9

    def is_late(self, link: LinkedPipeline) -> bool:
        if self.serial or not self.truncate or link.batch is None:
            return False
        return link.now() - link.batch.started_s >= link.estimates.away_s - 1e-9
