"""What the draft's side expects of computing and link."""

# K draft lengths 1..max_length

import math
from dataclasses import dataclass, replace

import numpy as np

from pipedraft.inference.channel import LinkEstimate
from pipedraft.inference.draft_length import RoundCost, RoundShape
from pipedraft.inference.transport.session_messages import WINDOW


@dataclass(kw_only=True)
class Estimates:
    """Beliefs that measurements replace (weight 1/8)."""

    draft_s: float
    verify_s: float
    verify_row_s: float
    link: LinkEstimate
    header_bytes: int = 62
    """That the link adds to every message."""

    def observe_draft(self, seconds: float) -> None:
        self.draft_s += (seconds - self.draft_s) / 8

    def observe_forward(self, seconds: float, num_rows: int) -> None:
        fixed_s = max(0.0, seconds - self.verify_row_s * max(num_rows - 1, 0))
        self.verify_s += (fixed_s - self.verify_s) / 8

    @property
    def away_s(self) -> float:
        """RTT + T_v."""
        return self.link.state.round_trip_s + self.verify_s

    def round_cost(
        self,
        round_bytes: dict[str, int],
        max_length: int,
        *,
        drafts_on: bool,
        window: int | None,
        early_within_s: float | None,
    ) -> RoundCost:
        """
        Args:
            round_bytes: fields of ``RoundShape``.
            drafts_on, window: of the schedule.
            early_within_s: besides the drafting, the time for a pass over the row that tests a
                round's first draft token; None: there is no such pass.
        """
        shape = RoundShape(
            draft_s=self.draft_s,
            verify_s=self.verify_s,
            verify_row_s=self.verify_row_s,
            **round_bytes,
        )
        kind = RoundCost.pipelined
        if not drafts_on:
            kind = RoundCost.stop_and_wait
        elif window == 1:
            kind = RoundCost.asynchronous
        cost = kind(shape, self.link.state, max_length)
        if early_within_s is None:
            return cost
        time_s_K = early_within_s + self.draft_s * np.arange(1, max_length + 1)
        return replace(cost, early_s_K=np.where(time_s_K >= self.verify_s, self.verify_s, 0.0))

    def window(self, batch_size: int) -> int:
        """Batches away that keep the target busy: ceil((RTT + T_v) / T_d)."""
        drafting_s = batch_size * self.draft_s
        # An exact multiple must not round up to one more.
        needed = math.ceil(self.away_s / drafting_s - 1e-9) if drafting_s else WINDOW
        return min(max(needed, 1), WINDOW // 2)
