"""Virtual clock: counts steps (K) and sums modeled time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from pipedraft.inference.shapes import LONGEST, RowCosts

if TYPE_CHECKING:
    from pipedraft.inference.rules.sampled import Verdict
    from pipedraft.inference.tree import TokenTree

MAX_COST = 1e6
"""In target passes."""


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """Device of one stage, where stages differ. None: the value of the whole cost model."""

    speed: float = 1.0
    """Relative to the device on which a full target pass is the unit."""
    row: float | None = None
    """Extra stage time for each row after the first."""
    link: float | None = None
    """Hop to the next stage, from the last one back to the controller."""
    link_row: float | None = None
    """That hop for each row after a segment's first."""
    memory_gb: float | None = None
    """Room for weights; None: enough."""
    replicas: int = 1
    """Devices like this one that take segments in turn. An upper bound: a sequence's next segment
    needs the keys and values of the one before, and sending them is not priced."""

    def __post_init__(self) -> None:
        if not 1 / MAX_COST <= self.speed <= MAX_COST or not 1 <= self.replicas <= MAX_COST:
            raise ValueError(
                f"cost.stages: speed {self.speed}, replicas {self.replicas}; give a positive speed "
                "and at least 1"
            )
        check_durations(self, "cost.stages")


def check_durations(cost: CostModel | StageCost, where: str) -> None:
    """Refuse numbers that are no durations or sizes."""
    for part in fields(cost):
        value = getattr(cost, part.name)
        if isinstance(value, int | float) and not 0 <= value <= MAX_COST:
            raise ValueError(
                f"{where}.{part.name}: {value} is not a duration; give 0 to {MAX_COST:g}"
            )


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Durations in units of one full target pass over one token."""

    row: float = 0.0
    """Extra stage time per row after the first, relative to the one-row stage time."""
    link: float = 0.0
    """Link latency: between stages, from the last to the controller, or to the first."""
    link_row: float = 0.0
    """Link time per row after a segment's first."""
    verify: float = 0.0
    """Final norm, LM head and verification."""
    head_row: float = 0.0
    """Final norm and LM head per returning row after the first."""
    verify_row: float = 0.0
    """Acceptance rule per returning row after the first."""
    draft_forward: float | None = None
    """One draft forward; None: the draft's layers over the target's layers."""
    is_asynchronous: bool = False
    """Stages do not wait for each other's steps. A token still takes n stages, n + 1 links and one
    verification to return, but a step pays only 1/n of link and verification time. Otherwise all
    stages step together, and every step pays one link and one verification."""
    draft_on_first_stage: bool = False
    """The draft shares the first stage's processor instead of using its own."""
    sharing: float = 0.0
    """What each further process that computes at the same time adds to the time of all of them, as
    part of it: processes that share cores, caches or memory. 0: each has its own."""
    layer_times: tuple[float, ...] = ()
    """Time of each layer relative to the others', where they differ; empty: all the same."""
    stages: tuple[StageCost, ...] = ()
    """Device of each stage; empty: all the same."""
    layer_gb: float = 0.0
    """Weights of a layer and its keys and values, which ``StageCost.memory_gb`` must hold."""
    first_gb: float = 0.0
    """The embedding, on the first stage."""
    last_gb: float = 0.0
    """Final norm and LM head, on the last stage."""
    draft_gb: float = 0.0
    """The draft, on the first stage if it shares that device."""

    def __post_init__(self) -> None:
        check_durations(self, "cost")
        if self.layer_times and not (min(self.layer_times) >= 0 < sum(self.layer_times)):
            raise ValueError(f"cost.layer_times: {[*self.layer_times]}; give positive times")

    def share(self, stage: int, start: int, end: int, num_layers: int) -> float:
        """Time of a row in the layers from ``start`` to ``end``, as part of a full pass."""
        if not self.layer_times:
            share = (end - start) / num_layers
        elif len(self.layer_times) == num_layers:
            share = sum(self.layer_times[start:end]) / sum(self.layer_times)
        else:
            raise ValueError(
                f"cost.layer_times: {len(self.layer_times)} of a target of {num_layers} layers; "
                "give one for each layer, or none"
            )
        device = self.stages[stage] if self.stages else None
        return share if device is None else share / (device.speed * device.replicas)

    def growth(self, stage: int, num_rows: float) -> float:
        """Stage time relative to that of one row; 0 for an idle stage."""
        row = self.stages[stage].row if self.stages else None
        row = self.row if row is None else row
        # The first row pays for reading the weights; further rows reuse them.
        return 1.0 + row * (num_rows - 1) if num_rows else 0.0

    def hop(self, stage: int, further_rows: float) -> float:
        """Time of the hop that leaves a stage, where stages differ."""
        device = self.stages[stage]
        link = self.link if device.link is None else device.link
        link_row = self.link_row if device.link_row is None else device.link_row
        return link + link_row * further_rows


class VirtualClock:
    """Counts K in stage times (draft, link and verification are free) and T with their costs."""

    def __init__(self, cost: CostModel, boundaries: Sequence[int], draft_forward: float) -> None:
        """``boundaries``: layers (0, b1, .., L) where the target is cut."""
        self.cost, self.draft_forward = cost, draft_forward
        self.num_stages = len(boundaries) - 1
        if cost.stages and len(cost.stages) != self.num_stages:
            raise ValueError(
                f"cost.stages: {len(cost.stages)} for a pipeline of {self.num_stages} stages; give "
                "one for each"
            )
        self.shares = [
            cost.share(stage, start, end, boundaries[-1])
            for stage, (start, end) in enumerate(zip(boundaries, boundaries[1:], strict=False))
        ]
        """Fraction of a target pass per stage."""
        self.num_steps = 0
        self.time = 0.0
        self.log: list[list[int]] = []
        """Time-consuming events in order: [times, draft forwards, overlap, rows per stage] for
        equal steps, [times, draft forwards] for drafting while the stages wait."""

    def busy(self, rows: Sequence[float]) -> list[float]:
        """Computing time of each stage for so many rows."""
        pairs = enumerate(zip(self.shares, rows, strict=True))
        return [share * self.cost.growth(stage, r) for stage, (share, r) in pairs]

    def between(self, rows: Sequence[float]) -> float:
        """Step time without computing stages: links and verification."""
        cost, n = self.cost, self.num_stages
        # An idle stage has no first row either; it must not earn time back.
        further = [max(r - 1, 0) for r in rows]
        verify = cost.verify + (cost.head_row + cost.verify_row) * further[-1]
        if cost.stages:
            hops = [cost.hop(stage, more) for stage, more in enumerate(further) if rows[stage]]
            if not cost.is_asynchronous:
                # In lock step the slowest hop holds up every stage.
                return max(hops, default=cost.link) + verify
            hops = [cost.hop(stage, more) for stage, more in enumerate(further)]
            return (cost.link + cost.link_row * further[-1] + sum(hops) + verify) / n
        if cost.is_asynchronous:
            # n + 1 links per token; the last stage's rows also cross the one to the controller.
            links = cost.link * (n + 1) + cost.link_row * (sum(further) + further[-1])
            return (links + verify) / n
        return cost.link + cost.link_row * max(further) + verify

    @property
    def row_price(self) -> float:
        """Added step time if every segment has one row more."""
        one, two = (
            self.duration([rows] * self.num_stages, draft_forwards=0, overlap=True)
            for rows in (1, 2)
        )
        return two - one

    def step_costs(self, num_tokens: int) -> RowCosts:
        """Costs for rows entering at every step, next to those in flight.

        One segment enters per step. A further row in every segment makes every step longer by the
        row price; a row in the longest segment costs more. An accepted draft token saves the
        average time per token so far, initially the autoregressive time.

        Args:
            num_tokens: emitted so far.
        """
        return RowCosts(
            tokens=num_tokens + 1,
            time=self.time + self.autoregressive_time(1),
            row=LONGEST * self.row_price,
            # Entering one step earlier saves at most one step, 1/n of a pass; a token takes about a
            # quarter pass (docs/lab/log.md).
            later=max(1.0, self.num_stages / 4),
        )

    def round_costs(self, num_segments: int, num_forwards: int) -> RowCosts:
        """Costs for a tree verified as a whole, in equal segments.

        Args:
            num_forwards: draft forwards while the stages wait.
        """
        # Fill the pipeline once, then one step per further segment.
        num_steps = self.num_stages + num_segments - 1
        return RowCosts(
            tokens=1,
            time=self.autoregressive_time(1) * num_steps / self.num_stages
            + num_forwards * self.draft_forward,
            row=num_steps * self.row_price / num_segments,
        )

    def step(self, rows: Sequence[int], *, draft_forwards: int, overlap: bool) -> None:
        """Run one pipeline step; arguments as in ``duration``."""
        self.num_steps += 1
        self.time += self.duration(rows, draft_forwards=draft_forwards, overlap=overlap)
        self._note([draft_forwards, int(overlap), *rows])

    def _note(self, event: list[int]) -> None:
        # Run-length coding: most steps repeat the one before.
        if self.log and self.log[-1][1:] == event:
            self.log[-1][0] += 1
        else:
            self.log.append([1, *event])

    def duration(self, rows: Sequence[int], *, draft_forwards: float, overlap: bool) -> float:
        """Return the modeled time for one pipeline step.

        Args:
            rows: rows processed per stage (0: idle).
            overlap: True if the draft runs during the step, False if after it.
        """
        stages = self.busy(rows)
        draft = draft_forwards * self.draft_forward
        # Every process computing at the same time slows the others down by ``sharing``.
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
        return busy + self.between(rows)

    def drafts_pay(self) -> bool:
        """Return True if drafting is worth its time, for automatic budgets."""
        return True

    def verified(self, tree: TokenTree, walk: Verdict) -> None:
        """Record accepted and rejected draft tokens in a tree."""

    def hidden_forwards(self) -> int:
        """Number of draft forwards within the time of a one-row step; at least 1.

        One row, because more draft rows slow the next step, more forwards would then fit, and their
        rows would slow it further.
        """
        if not self.draft_forward:
            return 1_000
        room = max(self.shares)
        if self.cost.draft_on_first_stage:
            room -= self.shares[0]
        # 1e-9: an exact multiple must not lose a forward to rounding.
        return max(1, int(room / self.draft_forward + 1e-9))

    def serial_draft(self, forwards: int) -> None:
        """Add drafting time while every stage waits."""
        self.time += forwards * self.draft_forward
        self._note([forwards])

    def autoregressive_time(self, num_tokens: int) -> float:
        """Modeled time of plain decoding of as many tokens on the same pipeline."""
        if not self.cost.stages:
            return num_tokens * (1.0 + self.num_stages * self.between([1]))
        n = self.num_stages
        # Stages differ: one token takes n steps, each with one busy stage of its own speed.
        alone = ([int(other == stage) for other in range(n)] for stage in range(n))
        steps = (self.duration(rows, draft_forwards=0, overlap=True) for rows in alone)
        return num_tokens * sum(steps)


def continuous_acceptance_length(
    acceptance: Sequence[float], num_stages: int, tokens_per_step: int = 1
) -> float:
    """Equivalent acceptance length for m draft tokens per step (SPD, PPSD, PipeDec); default 1.

    L' = n E / (n + K). E = 1 + sum_j r_j are the tokens per round, with r_j = prod_{i<=j} a_i. K =
    r_1 + r_{m+1} + r_{2m+1} + ..: the first token in a round costs n steps, every m further ones a
    single step. With equal a_i and m = 1 this is 1 / ((1 - a) + a / n).

    Args:
        acceptance: a_1.. by position in the round; the last one holds for all later positions. The
            j-th draft token in a round is drafted while min(j, m n + m - 1) tokens are in flight.
    """
    m, last = tokens_per_step, acceptance[-1]
    # Both geometric series diverge here; m tokens per step is their limit: L' = n m.
    if last >= 1:
        return float(num_stages * m)
    # Pad to whole steps, so a geometric series of tokens and one of steps follow.
    rates = np.pad(np.asarray(acceptance, np.float64), (0, -len(acceptance) % m), mode="edge")
    reached = np.cumprod(rates)
    tokens = 1 + reached.sum() + reached[-1] * last / (1 - last)
    steps = num_stages + reached[::m].sum() + reached[-1] * last / (1 - last**m)
    return float(num_stages * tokens / steps)
