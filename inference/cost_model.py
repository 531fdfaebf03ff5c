"""Virtual clock that counts pipeline steps (K) and adds up their modeled time (T)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..errors import check_ranges
from .shapes import LONGEST, RowCosts

if TYPE_CHECKING:
    from .tree import TokenTree
    from .verdict import Verdict

MAX_COST = "[0, 1e6]"
"""Range for costs, in target passes."""


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """Device of one stage, for unequal stages. Row and link costs default to ``CostModel``'s."""

    speed: float = 1.0
    """Speed relative to the device on which a full target pass takes time 1."""
    row: float | None = None
    """Extra stage time for each row after the first."""
    link: float | None = None
    """Link latency to the next stage, or from the last stage to the controller."""
    link_row: float | None = None
    """Link time per row after a segment's first."""
    memory_gb: float | None = None
    """Memory for the stage's layers, keys and values in GB; None: enough."""
    replicas: int = 1
    """Equal devices taking segments in turn. The modeled speed is an upper bound: a segment needs
    the previous segment's keys and values, and the model counts no time to send them."""

    def __post_init__(self) -> None:
        check_durations(self, "cost.stages.", speed="[1e-6, 1e6]", replicas="[1, 1e6]")


def check_durations(cost: CostModel | StageCost, where: str, **ranges: str) -> None:
    numbers = (n for n, value in vars(cost).items() if isinstance(value, int | float))
    check_ranges(cost, dict.fromkeys(numbers, MAX_COST) | ranges, where)


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Modeled durations. Their unit is the time of one full target pass over one token."""

    row: float = 0.0
    """Extra stage time per row after the first, relative to the one-row stage time."""
    link: float = 0.0
    """Latency per link: between two stages, from the last stage to the controller, or from a
    controller with a device of its own to the first stage."""
    link_row: float = 0.0
    """Link time per row after a segment's first."""
    verify: float = 0.0
    """Time for the final norm, the LM head and the acceptance rule."""
    head_row: float = 0.0
    """Extra time for the final norm and the LM head, per returning row after the first."""
    verify_row: float = 0.0
    """Extra time for the acceptance rule, per returning row after the first."""
    draft_forward: float | None = None
    """Time for one draft forward; None: the draft's number of layers divided by the target's."""
    is_asynchronous: bool = False
    """Stages do not wait for each other's steps. A token takes n stages, all links and one
    verification to return, and a step takes 1/n of this time, or the busiest process's time if that
    is longer: meanwhile the other segments cross links. There are n links, or n + 1 if the draft
    and the controller have a device of their own. Otherwise all stages step together, and every
    step takes the busiest process's time, one link and one verification."""
    draft_on_first_stage: bool = False
    """The draft and the controller share the first stage's processor."""
    sharing: float = 0.0
    """Slowdown by shared cores, caches or memory: each further process computing at the same time
    adds this fraction to each stage's time. 0: processes share nothing. ``draft_forward`` is a
    draft's time beside busy stages."""
    layer_times: tuple[float, ...] = ()
    """Relative time per layer; empty: all equal."""
    stages: tuple[StageCost, ...] = ()
    """One device per stage; empty: all equal."""
    layer_gb: float = 0.0
    """GB per layer, for weights, keys and values; limited by ``StageCost.memory_gb``."""
    first_gb: float = 0.0
    """GB for the embedding, on the first stage."""
    last_gb: float = 0.0
    """GB for final norm and LM head, on the last stage."""
    draft_gb: float = 0.0
    """GB for the draft, on the first stage if it shares this device."""

    def __post_init__(self) -> None:
        check_durations(self, "cost.")
        if self.layer_times and not (min(self.layer_times) >= 0 < sum(self.layer_times)):
            raise ValueError(f"cost.layer_times: {[*self.layer_times]}; give positive times")

    def share(self, stage: int, start: int, end: int, num_layers: int) -> float:
        """Return the time for one row in layers [``start``, ``end``), relative to a full pass."""
        if len(self.layer_times) not in (0, num_layers):
            raise ValueError(
                f"cost.layer_times: {len(self.layer_times)} of a target of {num_layers} layers; "
                "give one for each layer, or none"
            )
        share = (end - start) / num_layers
        if self.layer_times:
            share = sum(self.layer_times[start:end]) / sum(self.layer_times)
        device = self.stages[stage] if self.stages else None
        return share if device is None else share / (device.speed * device.replicas)

    def growth(self, stage: int, num_rows: float) -> float:
        """Return the time for ``num_rows`` rows, relative to one row. An idle stage takes 0."""
        row = self.stages[stage].row if self.stages else None
        row = self.row if row is None else row
        # The first row includes the time to read the weights; further rows reuse them.
        return 1.0 + row * (num_rows - 1) if num_rows else 0.0

    def hop(self, stage: int, further_rows: float) -> float:
        """Return the time on the link after a stage, which the last stage has to the controller."""
        if not self.stages:
            return self.link + self.link_row * further_rows
        device = self.stages[stage]
        link = self.link if device.link is None else device.link
        link_row = self.link_row if device.link_row is None else device.link_row
        return link + link_row * further_rows


class VirtualClock:
    """Counter for steps K and modeled time T.

    K counts only steps. T also includes the time for drafting, links and verification.
    """

    def __init__(self, cost: CostModel, boundaries: Sequence[int], draft_forward: float) -> None:
        """Start at 0 steps.

        Args:
            boundaries: first layer per stage, then the layer count: (0, b1, .., L).
            draft_forward: time per draft forward, in target passes.
        """
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
        """Time per stage, in target passes."""
        self.num_steps = 0
        self.time = 0.0
        self.log: list[list[int]] = []
        """Time-consuming events in order: [repeats, draft forwards, overlap, rows per stage] for
        equal steps, [repeats, draft forwards] for drafting while the stages wait."""

    def busy(self, rows: Sequence[float]) -> list[float]:
        """Return computing time per stage, given rows per stage."""
        pairs = enumerate(zip(self.shares, rows, strict=True))
        return [share * self.cost.growth(stage, r) for stage, (share, r) in pairs]

    def between(self, rows: Sequence[float]) -> float:
        """Return the time that links and verification add to a step."""
        cost = self.cost
        # An idle stage has no first row; without the max it would earn time back.
        further = [max(r - 1, 0) for r in rows]
        verify = cost.verify + (cost.head_row + cost.verify_row) * further[-1]
        if not cost.is_asynchronous:
            hops = [cost.hop(stage, more) for stage, more in enumerate(further) if rows[stage]]
            # In lock step the slowest hop holds up every stage.
            return max(hops, default=cost.link) + verify
        links = sum(cost.hop(stage, more) for stage, more in enumerate(further))
        if not cost.draft_on_first_stage:
            links += cost.link + cost.link_row * further[0]
        return (links + verify) / self.num_stages

    @property
    def row_price(self) -> float:
        """Step time added if every segment has one more row."""
        one, two = (
            self.duration([rows] * self.num_stages, draft_forwards=0, overlap=True)
            for rows in (1, 2)
        )
        return two - one

    def step_costs(self, num_tokens: int) -> RowCosts:
        """Return costs for adding rows to a stream with one segment entering per step.

        One more row in every segment makes every step longer by the row price. A draft token is
        charged ``LONGEST`` times this price, because the longest segment in flight sets the step
        time. An accepted draft token saves the average time per token over the ``num_tokens`` so
        far, initially the autoregressive time.
        """
        return RowCosts(
            tokens=num_tokens + 1,
            time=self.time + self.autoregressive_time(1),
            row=LONGEST * self.row_price,
            # A token takes about a quarter pass (docs/lab/drafting_trials.md), but entering one
            # step earlier saves at most one step, 1/n pass.
            later=max(1.0, self.num_stages / 4),
        )

    def round_costs(self, num_segments: int, num_forwards: int) -> RowCosts:
        """Return costs for a tree drafted while the stages wait and verified in equal segments."""
        # Fill the pipeline once, then one step per further segment.
        num_steps = self.num_stages + num_segments - 1
        return RowCosts(
            tokens=1,
            time=self.autoregressive_time(1) * num_steps / self.num_stages
            + num_forwards * self.draft_forward,
            row=num_steps * self.row_price / num_segments,
        )

    def step(self, rows: Sequence[int], *, draft_forwards: int, overlap: bool) -> None:
        """Advance the clock by one pipeline step. The arguments are those of ``duration``."""
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
        """Return the modeled time for one step.

        Args:
            rows: rows processed per stage, 0 for an idle stage.
            overlap: True if the draft runs during the step, False if it runs after the step.
        """
        draft = draft_forwards * self.draft_forward
        num_busy = sum(map(bool, rows))
        on_first = self.cost.draft_on_first_stage
        # A draft on its own device, or on a first stage that idles, is one more busy process.
        is_further = overlap and bool(draft) and any(rows) and not (on_first and rows[0])
        slowdown = self.cost.sharing * (max(num_busy - 1, 0) + is_further)
        alone, between = self.busy(rows), self.between(rows)
        stages = [(1.0 + slowdown) * each for each in alone]
        passing = max(stages) + between
        if self.cost.is_asynchronous:
            passing = _beside_others(sum(alone) / max(num_busy, 1), slowdown, between) + between
        if not overlap:
            return passing + draft
        busy = max(stages[0] + draft, *stages) if on_first else max(draft, *stages)
        return max(busy, passing) if self.cost.is_asynchronous else busy + between

    def drafts_pay(self) -> bool:
        """Return True if drafting is worth its time, for automatic budgets."""
        return True

    def verified(self, tree: TokenTree, walk: Verdict) -> None:
        """Record which of the tree's draft tokens were accepted and which were rejected."""

    def hidden_forwards(self) -> int:
        """Return how many draft forwards fit into a step with one row per stage, at least 1.

        More rows make a step longer, so more forwards would fit. Their draft tokens would lengthen
        the next step again. Counting one row avoids this loop.
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
        """Return the modeled time for autoregressive decoding on the same pipeline."""
        n = self.num_stages
        if not self.cost.stages:
            return num_tokens * (1.0 + n * self.between([1] * n))
        # Stages differ: one token takes n steps, each with one busy stage.
        alone = ([int(other == stage) for other in range(n)] for stage in range(n))
        steps = (self.duration(rows, draft_forwards=0, overlap=True) for rows in alone)
        return num_tokens * sum(steps)


def _beside_others(alone: float, slowdown: float, idle: float) -> float:
    """Return the time of a process that computes, then idles, as the others do.

    b' = b (1 + c b' / (b' + a))    the others are busy for a share b' / (b' + a) of the time

    Args:
        alone: b, its time if no other process computes.
        slowdown: c, the fraction by which it is slower if all others compute all the time.
        idle: a.
    """
    if not alone:
        return 0.0
    # The positive solution of b'^2 + (a - b - b c) b' - a b = 0.
    half = (alone * (1.0 + slowdown) - idle) / 2
    return half + math.sqrt(half * half + idle * alone)


def continuous_acceptance_length(
    acceptance: Sequence[float], num_stages: int, tokens_per_step: int = 1
) -> float:
    """Return the equivalent acceptance length L' for m draft tokens per step (default 1).

    The formula holds for SPD, PPSD and PipeDec.

    L' = n E / (n + K). E = 1 + sum_j r_j is the number of tokens per round, with r_j = prod_{i<=j}
    a_i. K = r_1 + r_{m+1} + r_{2m+1} + .. is the number of steps after the first n. The first token
    in a round costs n steps, and every m further tokens cost one step. If m = 1 and every a_i is a,
    L' = 1 / ((1 - a) + a / n).

    Args:
        acceptance: acceptance rates a_1, a_2, .. by position in the round. The last rate also holds
            for every later position. The j-th draft token in a round is drafted while min(j, m n +
            m - 1) tokens are in flight.
    """
    m, last = tokens_per_step, acceptance[-1]
    # Both geometric series diverge here; m tokens per step is their limit: L' = n m.
    if last >= 1:
        return float(num_stages * m)
    # Pad to whole steps, so the tail is a geometric series in tokens and in steps.
    rates = np.pad(np.asarray(acceptance, np.float64), (0, -len(acceptance) % m), mode="edge")
    reached = np.cumprod(rates)
    tokens = 1 + reached.sum() + reached[-1] * last / (1 - last)
    steps = num_stages + reached[::m].sum() + reached[-1] * last / (1 - last**m)
    return float(num_stages * tokens / steps)
