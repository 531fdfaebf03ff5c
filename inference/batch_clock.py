"""Virtual time for steps shared by several sequences, and their speculation budget.

A stage takes as long for rows from all sequences as for one segment with the same number of rows.
All sequences draft on one device. Their draft forwards run as one (``drafts_together``) or one
after the other. A draft forward that overlaps with a step adds time only if it takes longer than
the stages. A sequence that drafts while its rows wait misses steps, which the others run.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from .cost_model import CostModel, VirtualClock
from .shapes import LONGEST, SHARPNESS, RowCosts

if TYPE_CHECKING:
    from .tree import TokenTree
    from .verdict import Verdict

MEMORY = 0.99
"""Factor applied to older measurements' weight at every step."""
PRIOR_STEPS = 64.0
"""Weight of the prior, in steps: a drafting sequence is assumed to emit ``PRIOR_LENGTH`` / n tokens
per step. As old measurements fade, the prior gains influence, so drafting is tried again."""
PRIOR_LENGTH = 2.0
LEARNING = 0.1
"""Largest change in log sharpness after one test, reached if a draft token with probability 1 is
rejected."""
SHARPEST = 4.0
SWITCH = 1.02
"""Minimum ratio (new rate / old rate) to change the number of drafting sequences."""


class Sharer(Protocol):
    """A sequence's pipeline that takes part in shared steps."""

    next_rows: list[int]
    """Rows each stage will process in the next step."""
    num_emitted: int
    num_waiting_forwards: int
    """Draft forwards since the last step, made while the sequence's rows wait."""


class BatchClock:
    """Virtual clock T for shared steps. A step gets its time after all sequences have drafted."""

    def __init__(
        self,
        cost: CostModel,
        boundaries: Sequence[int],
        draft_forward: float,
        *,
        drafts_together: bool,
    ) -> None:
        self.drafts_together = drafts_together
        self.num_steps = 0
        self.num_tokens = 0
        """Tokens emitted by all sequences, without each sequence's first."""
        self.live: list[Sharer] = []
        """Decoding sequences, without sequences still in prefill."""
        self._stages = VirtualClock(cost, boundaries, draft_forward)
        self._rows = [0] * self._stages.num_stages
        self._beside: list[int] = []
        """Draft forwards overlapped with the step, per sequence."""
        self._after: list[int] = []
        self._is_open = False
        self._unpriced: list[list[float]] = []
        self._tokens = self._steps = 0.0
        """Tokens emitted and steps taken by drafting sequences, weighted toward the latest ones."""
        self._before: deque[frozenset[Sharer]] = deque(maxlen=self.num_stages)
        """Sequences that drafted in each of the last n steps. Draft tokens return after n steps."""
        self._per_step = 1.0
        """Rows per stage for one drafting sequence."""
        self.drafting: frozenset[Sharer] = frozenset()
        """Sequences allowed to draft with automatic budgets."""
        self._sharpness = SHARPNESS

    @property
    def num_stages(self) -> int:
        return self._stages.num_stages

    @property
    def forwards_beside(self) -> int:
        """Draft forwards that fit into a step, for a sequence drafting while its rows wait."""
        return self._stages.hidden_forwards()

    @property
    def time(self) -> float:
        """Return T, in target passes over one token, up to the last priced step."""
        return self._stages.time

    # -- what happens -----------------------------------------------------------------------

    def begin_step(self, pipelines: Iterable[Sharer]) -> None:
        """Add the last step's time to T, and open a new step for these sequences."""
        self.settle()
        taking_part = list(pipelines)
        columns = zip(*(pipeline.next_rows for pipeline in taking_part), strict=True)
        self._rows = [sum(rows) for rows in columns] or [0] * self.num_stages
        self._is_open = True
        self.num_steps += bool(taking_part)
        self._before.append(self.drafting)
        drafted = [pipeline for pipeline in taking_part if pipeline in self._before[0]]
        self._tokens *= MEMORY
        self._steps = self._steps * MEMORY + len(drafted)
        for pipeline in drafted:
            rows = sum(pipeline.next_rows) / self.num_stages
            self._per_step += (1 - MEMORY) * (rows - self._per_step)
        self._choose()

    def drafted(self, num_forwards: int, *, beside: bool) -> None:
        """Count a sequence's draft forwards, overlapped with the open step or after it."""
        if num_forwards:
            (self._beside if beside else self._after).append(num_forwards)

    def emitted(self, pipeline: Sharer, times: list[float], *, is_first: bool) -> None:
        """Count an emitted token. When the open step ends, its end time is added to ``times``."""
        # The prefill gives this token without a pipeline step, so no rate may contain it.
        self.num_tokens += not is_first
        self._tokens += not is_first and pipeline in self._before[0]
        self._unpriced.append(times)

    def tested(self, said: float, right: bool) -> None:
        """Adjust the sharpness s so that predicted and measured acceptance agree on average.

        The update is log s <- log s + LEARNING (right - said), limited to 1 <= s <= SHARPEST.
        ``said`` is the predicted probability. Drafts differ in how much they understate their best
        tokens.
        """
        # A step in log s keeps s positive and makes raising and lowering it symmetric.
        change = math.exp(LEARNING * (right - said))
        self._sharpness = min(max(self._sharpness * change, 1.0), SHARPEST)

    @property
    def sharpness(self) -> float:
        """Exponent for draft probabilities, rounded to quarters.

        A captured CUDA graph contains the exponent as a constant, so few values need few graphs.
        """
        return round(4 * self._sharpness) / 4

    def leave(self, pipeline: Sharer) -> None:
        """Remove an ended sequence, so nothing here retains its caches."""
        self.live = [other for other in self.live if other is not pipeline]
        self.drafting -= {pipeline}
        self._before = deque((drafted - {pipeline} for drafted in self._before), self.num_stages)

    def settle(self) -> None:
        """Add the open step's time to T, and close the step."""
        stages = self._stages
        if self._is_open:
            forwards = self._passes(self._beside)
            if any(self._rows):
                time = stages.duration(self._rows, draft_forwards=forwards, overlap=True)
            else:
                time = forwards * stages.draft_forward
            stages.time += time + self._passes(self._after) * stages.draft_forward
        for times in self._unpriced:
            times.append(stages.time)
        self._beside, self._after, self._unpriced, self._is_open = [], [], [], False

    def _passes(self, forwards: Sequence[int]) -> float:
        """Return the time for draft forwards [sequence], in units of one forward.

        With ``drafts_together`` the sequences' first forwards run as one pass, then their second
        ones, and so on. Each further sequence makes a pass longer by one row.
        """
        total, longest = sum(forwards), max(forwards, default=0)
        if not self.drafts_together:
            return total
        return longest + self._stages.cost.row * (total - longest)

    # -- how much to speculate --------------------------------------------------------------

    def drafts_pay(self, pipeline: Sharer) -> bool:
        """Return True if a sequence may draft now, False if it decodes autoregressively."""
        return pipeline in self.drafting or pipeline not in self.live

    def rate(self, num_drafting: int) -> float:
        """Return the expected tokens per unit of time if ``num_drafting`` sequences draft."""
        stages, n = self._stages, self.num_stages
        num_plain = len(self.live) - num_drafting
        rows = max(1.0, (num_drafting * self._per_step + num_plain / n))
        busy = max(stages.busy([rows] * n))
        forwards = self._passes([1] * num_drafting)
        between = stages.between([rows] * n)
        time = max(busy, forwards * stages.draft_forward) + between
        # The prior keeps the first few steps from switching drafting off by bad luck.
        known = self._tokens + PRIOR_STEPS * PRIOR_LENGTH / n
        tokens = known / (self._steps + PRIOR_STEPS)
        return (num_drafting * tokens + num_plain / n) / time

    def _choose(self) -> None:
        """Choose how many and which sequences draft, for the most tokens per unit of time."""
        drafting = [pipeline for pipeline in self.live if pipeline in self.drafting]
        best = max(range(len(self.live) + 1), key=self.rate)
        # Hysteresis: near a tie the choice would flip at every step.
        if self.rate(best) < SWITCH * self.rate(len(drafting)):
            best = len(drafting)
        # The slice below cuts at the end: the longest outputs leave first, the shortest join first.
        drafting.sort(key=lambda pipeline: pipeline.num_emitted)
        others = [pipeline for pipeline in self.live if pipeline not in self.drafting]
        others.sort(key=lambda pipeline: pipeline.num_emitted)
        self.drafting = frozenset((drafting + others)[:best])

    def costs(self, row: float) -> RowCosts:
        """Return costs for one sequence's draft token, given the token rate of all sequences.

        Args:
            row: added step time per row if all segments are equally long. The returned price is
                higher, because the stage with the most rows sets the time. With more sequences the
                price falls toward ``row``, because the stages' row sums then differ less.
        """
        factor = 1 + (LONGEST - 1) / math.sqrt(max(1, len(self.live)))
        rate = self.rate(len(self.drafting))
        return RowCosts(tokens=rate, time=1.0, row=factor * row, sharpness=self.sharpness)

    def hidden_forwards(self, alone: int) -> int:
        """Return how many draft forwards of one sequence fit into a step.

        ``alone`` is their number without other sequences. If forwards of several sequences run
        together, the number is the same, because further rows lengthen forwards and steps alike.
        """
        return alone if self.drafts_together else max(1, alone // max(1, len(self.live)))


class SequenceClock(VirtualClock):
    """Counts K and T for one sequence as if alone, and reports drafting to the shared clock."""

    def __init__(
        self,
        batch: BatchClock,
        pipeline: Sharer,
        cost: CostModel,
        boundaries: Sequence[int],
        draft_forward: float,
    ) -> None:
        super().__init__(cost, boundaries, draft_forward)
        self.batch, self.pipeline = batch, pipeline
        self._weighs = False
        """True if draft tokens enter only while their probabilities are worth the cost."""

    def step(self, rows: Sequence[int], *, draft_forwards: int, overlap: bool) -> None:
        super().step(rows, draft_forwards=draft_forwards, overlap=overlap)
        self.batch.drafted(draft_forwards, beside=overlap)

    def serial_draft(self, forwards: int) -> None:
        super().serial_draft(forwards)
        self.pipeline.num_waiting_forwards += forwards

    def drafts_pay(self) -> bool:
        return self.batch.drafts_pay(self.pipeline)

    def verified(self, tree: TokenTree, walk: Verdict) -> None:
        if not self._weighs:
            return
        for row, right in zip(walk.path, walk.tests, strict=False):
            # Scores are cumulative log-probabilities; the difference is the child's own.
            scores = [tree.scores[child] - tree.scores[row] for child in tree.children(row)]
            self.batch.tested(min(1.0, sum(map(math.exp, scores))), right)

    def hidden_forwards(self) -> int:
        return self.batch.hidden_forwards(super().hidden_forwards())

    def step_costs(self, num_tokens: int) -> RowCosts:
        self._weighs = True
        if len(self.batch.live) <= 1:
            return replace(super().step_costs(num_tokens), sharpness=self.batch.sharpness)
        return self.batch.costs(self.row_price)

    def round_costs(self, num_segments: int, num_forwards: int) -> RowCosts:
        """Return costs for a round. With other sequences, a row's cost includes their delay."""
        if len(self.batch.live) <= 1:
            return super().round_costs(num_segments, num_forwards)
        return self.batch.costs(self.num_stages * self.row_price)
