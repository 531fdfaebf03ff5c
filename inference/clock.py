"""The virtual clock: counts steps (K) and adds up a modeled time."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Durations in units of one full target pass over one token."""

    row: float = 0.0
    """Extra stage time for each row after the first, relative to the stage time of one row."""
    link: float = 0.0
    """One hop: between stages, from the last one back to the controller, or to the first."""
    verify: float = 0.0
    """Final norm, LM head and the walk."""
    draft_forward: float | None = None
    """One forward pass of the draft; None: its layers over the target's layers."""
    is_asynchronous: bool = False
    """No stage waits for another one's step: a token still takes n stages, n + 1 hops and one
    verification to come back, but of the hops and the verification a step pays only its n-th part.
    Otherwise all stages step together and pay one hop and one verification at every step."""
    draft_on_first_stage: bool = False
    """The draft shares the first stage's processor instead of having its own."""
    sharing: float = 0.0
    """What each further process that computes at the same time adds to the time of all of them, as
    part of it: processes that share cores, caches or memory. 0: each has its own."""

    def __post_init__(self) -> None:
        for name in ("row", "link", "verify", "draft_forward", "sharing"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"cost.{name}: {value} is not a duration; give 0 or more")


class VirtualClock:
    """K counts elapsed stage times with free draft, link and verification; T has their costs."""

    def __init__(self, cost: CostModel, boundaries: Sequence[int], draft_forward: float) -> None:
        """``boundaries``: layers (0, b1, .., L) at which the target is cut."""
        self.cost, self.draft_forward = cost, draft_forward
        self.num_stages = len(boundaries) - 1
        self.shares = [
            (end - start) / boundaries[-1]
            for start, end in zip(boundaries, boundaries[1:], strict=False)
        ]
        """Of a target pass, for each stage."""
        self.num_steps = 0
        self.time = 0.0
        self.log: list[list[int]] = []
        """Everything that took time, in order: [times, draft forwards, overlap, rows of every
        stage] for equal steps, [times, draft forwards] for drafting while the stages wait."""

    def _growth(self, num_rows: int) -> float:
        """Stage time relative to that of one row; 0 for an idle stage."""
        return 1.0 + self.cost.row * (num_rows - 1) if num_rows else 0.0

    @property
    def _fixed(self) -> float:
        """Part of a step in which no stage computes."""
        cost, n = self.cost, self.num_stages
        if cost.is_asynchronous:
            return (cost.link * (n + 1) + cost.verify) / n
        return cost.link + cost.verify

    def step(self, rows: Sequence[int], *, draft_forwards: int, overlap: bool) -> None:
        """Take one pipeline step; the arguments are those of ``duration``."""
        self.num_steps += 1
        self.time += self.duration(rows, draft_forwards=draft_forwards, overlap=overlap)
        self._note([draft_forwards, int(overlap), *rows])

    def _note(self, event: list[int]) -> None:
        if self.log and self.log[-1][1:] == event:
            self.log[-1][0] += 1
        else:
            self.log.append([1, *event])

    def duration(self, rows: Sequence[int], *, draft_forwards: int, overlap: bool) -> float:
        """Of a pipeline step.

        Args:
            rows: rows that each stage processes (0: idle).
            overlap: whether the draft runs beside the stages or after them.
        """
        stages = [s * self._growth(r) for s, r in zip(self.shares, rows, strict=True)]
        draft = draft_forwards * self.draft_forward
        shared = 1.0 + self.cost.sharing * max(sum(map(bool, rows)) - 1, 0)
        if not overlap:
            busy = max(stages) * shared + draft
        elif self.cost.draft_on_first_stage:
            is_further = bool(draft) and not rows[0] and any(rows)
            shared += self.cost.sharing * is_further
            busy = max(stages[0] + draft, *stages) * shared
        else:
            shared += self.cost.sharing * (bool(draft) and any(rows))
            busy = max(draft, *stages) * shared
        return busy + self._fixed

    def hidden_forwards(self, num_rows: int) -> int:
        """Draft forwards that take no longer than one step with ``num_rows`` rows; at least 1."""
        if not self.draft_forward:
            return 1_000
        room = max(self.shares) * self._growth(max(num_rows, 1))
        if self.cost.draft_on_first_stage:
            room -= self.shares[0] * self._growth(max(num_rows, 1))
        return max(1, int(room / self.draft_forward + 1e-9))

    def serial_draft(self, forwards: int) -> None:
        """Drafting while every stage waits."""
        self.time += forwards * self.draft_forward
        self._note([forwards])

    def autoregressive_time(self, num_tokens: int) -> float:
        """Modeled time of plain decoding of as many tokens on the same pipeline."""
        return num_tokens * (1.0 + self.num_stages * self._fixed)


def chain_acceptance_length(acceptance: float, draft_length: int) -> float:
    """Tokens per round of a chain of m drafts with i.i.d. acceptance: (1 - a^(m+1)) / (1 - a)."""
    if acceptance == 1.0:
        return float(draft_length + 1)
    return (1 - acceptance ** (draft_length + 1)) / (1 - acceptance)


def micro_batch_acceptance_length(acceptance: float, size: int, num_stages: int) -> float:
    """Equivalent acceptance length of a chain of ``size`` draft tokens at every step (PipeInfer).

    L' = 1 / ((1 - a) + a / (m n)) with i.i.d. acceptance, if rounds filled their micro-batches.
    """
    return 1.0 / ((1.0 - acceptance) + acceptance / (size * num_stages))


def continuous_acceptance_length(acceptance: Sequence[float], num_stages: int) -> float:
    """Equivalent acceptance length of one draft token per step (SPD, PPSD, PipeDec).

    L' = n E / (n + E - 1), with E = 1 + sum_j prod_{i<=j} a_i the tokens of a round: the first
    token of a round costs n steps, every further one a single step. With equal a_i this is
    1 / ((1 - a) + a / n).

    Args:
        acceptance: a_1.. by position in the round, the last one holds for all later positions.
            The j-th draft token of a round is drawn while min(j, n) tokens are in flight.
    """
    rates = np.asarray(acceptance, dtype=np.float64)
    if rates[-1] >= 1:
        return float(num_stages)
    reached = np.cumprod(rates)
    before_last = reached[-2] if len(rates) > 1 else 1.0
    tokens = 1 + reached[:-1].sum() + before_last * rates[-1] / (1 - rates[-1])
    return float(num_stages * tokens / (num_stages + tokens - 1))
