"""How the edge goes about a session: when it drafts and sends, what it believes, what it asks for.

The draft lengths themselves are a policy's (``draft_length.py``).
"""

# K draft lengths 1..max_length

import math
from dataclasses import dataclass, replace

import numpy as np

from pipedraft.inference.channel import LinkEstimate
from pipedraft.inference.draft_length import RoundCost, RoundShape
from pipedraft.inference.edge_cloud.messages import WINDOW, Request


@dataclass(frozen=True, kw_only=True)
class Plan:
    """When the edge drafts and sends; its draft lengths are the policy's."""

    parallel: bool = False
    """Draft while batches are away; they bring no bonus then."""
    in_flight: int | None = 1
    """Batches that may be away; None: as many as keep the cloud busy, ceil((RTT + T_v) / T_d)."""
    barrier: bool = False
    """Verdicts are read between batches only (PEARL)."""
    probes_first: bool = False
    """After a miss the first guess is a batch of its own, the rest of it the next one (PEARL)."""
    truncates: bool = False
    """A batch ends once its drafting has taken as long as a verdict does. By time alone: to drop a
    guess for its probability would change the law of what is kept."""
    timeout_s: float = math.inf
    """Without an answer for so long, everything that waits for one is sent again."""


@dataclass(kw_only=True)
class Beliefs:
    """What the edge expects of computing and link; measurements replace it (weight 1/8)."""

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
        plan: Plan,
        round_bytes: dict[str, int],
        max_length: int,
        *,
        early_within_s: float | None,
    ) -> RoundCost:
        """
        Args:
            round_bytes: fields of ``RoundShape``.
            early_within_s: besides the drafting, the time for a pass over the row that tests a
                round's first guess; None: there is no such pass.
        """
        shape = RoundShape(
            draft_s=self.draft_s,
            verify_s=self.verify_s,
            verify_row_s=self.verify_row_s,
            **round_bytes,
        )
        kind = RoundCost.pipelined
        if not plan.parallel:
            kind = RoundCost.stop_and_wait
        elif plan.in_flight == 1:
            kind = RoundCost.asynchronous
        cost = kind(shape, self.link.state, max_length)
        if early_within_s is None:
            return cost
        time_s_K = early_within_s + self.draft_s * np.arange(1, max_length + 1)
        return replace(cost, early_s_K=np.where(time_s_K >= self.verify_s, self.verify_s, 0.0))

    def window(self, plan: Plan, batch_size: int) -> int:
        """Batches that may be away."""
        if plan.in_flight is not None:
            return plan.in_flight
        drafting_s = batch_size * self.draft_s
        # An exact multiple must not round up to one more.
        needed = math.ceil(self.away_s / drafting_s - 1e-9) if drafting_s else WINDOW
        return min(max(needed, 1), WINDOW // 2)


@dataclass(frozen=True)
class Send:
    request: Request


@dataclass(frozen=True)
class Draft:
    pass


@dataclass(frozen=True)
class Wait:
    until_s: float = math.inf


@dataclass(frozen=True)
class Finished:
    pass


Action = Send | Draft | Wait | Finished
