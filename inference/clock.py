"""The virtual clock: counts steps (K) and adds up a modelled time."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Durations in units of one full target pass over one token."""

    row: float = 0.0
    """Extra stage time for each row after the first, relative to the stage time of one row."""
    link: float = 0.0
    """One hop between stages."""
    verify: float = 0.0
    """Final norm, LM head and the walk."""
    draft_forward: float | None = None
    """One forward pass of the draft; None: its layers over the target's layers."""


class VirtualClock:
    """K counts elapsed stage times with free draft, link and verification; T has their costs."""

    def __init__(self, cost: CostModel, num_stages: int, draft_forward: float) -> None:
        self.cost, self.num_stages, self.draft_forward = cost, num_stages, draft_forward
        self.num_steps = 0
        self.time = 0.0

    def stage(self, num_rows: int) -> float:
        return (1.0 + self.cost.row * max(num_rows - 1, 0)) / self.num_stages

    def step(self, rows: Sequence[int], *, draft_forwards: int, overlap: bool) -> None:
        """One lock-step pipeline step.

        Args:
            rows: rows that each stage processes (0: idle).
            overlap: whether the draft runs beside the stages or after them.
        """
        self.num_steps += 1
        stages = self.stage(max(rows, default=0))
        draft = draft_forwards * self.draft_forward
        self.time += max(stages, draft) if overlap else stages + draft
        self.time += self.cost.link + self.cost.verify

    def hidden_forwards(self, num_rows: int) -> int:
        """Draft forwards that take no longer than one step with ``num_rows`` rows; at least 1."""
        if not self.draft_forward:
            return 1_000
        return max(1, int(self.stage(num_rows) / self.draft_forward + 1e-9))

    def serial_draft(self, forwards: int) -> None:
        """Drafting while every stage waits."""
        self.time += forwards * self.draft_forward

    def autoregressive_time(self, num_tokens: int) -> float:
        """Modelled time of plain decoding of as many tokens on the same pipeline."""
        per_token = self.num_stages * (self.stage(1) + self.cost.link + self.cost.verify)
        return num_tokens * per_token
