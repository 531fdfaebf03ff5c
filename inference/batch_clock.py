"""Virtual time of the steps that several sequences share, and how much to speculate in them.

Rows of all sequences in a stage take the time of one segment of as many rows. Drafts run on one
device: the forwards of all sequences as one (``drafts_together``), or one after the other. Drafting
beside a step makes it longer only where it takes longer than the stages; a sequence that drafts
while its rows wait sits steps out, and the others go on.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pipedraft.inference.clock import CostModel, VirtualClock
from pipedraft.inference.shapes import LONGEST, SHARPNESS, RowCosts

if TYPE_CHECKING:
    from pipedraft.inference.pipelines.shared import SharedPipeline
    from pipedraft.inference.rules.sampled import Verdict
    from pipedraft.inference.tree import TokenTree


MEMORY = 0.99
"""Weight of what was measured before, at every step."""
PRIOR_STEPS = 64.0
"""Steps for which a sequence that drafts is taken to emit ``PRIOR_LENGTH`` / n tokens each; they
count for more as what was measured is forgotten, so that drafting is tried again."""
PRIOR_LENGTH = 2.0
LEARNING = 0.1
"""What a test changes of the sharpness, in logarithms, if the draft was sure and wrong."""
SHARPEST = 4.0
SWITCH = 1.02
"""Gain in the rate for which the number of drafting sequences changes."""


class BatchClock:
    """T of shared steps; a step is priced when all sequences have said what they drafted in it."""

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
        """Emitted by all sequences, the first of each not counted."""
        self.live: list[SharedPipeline] = []
        """The sequences that decode: none whose prompt is on its way."""
        self._stages = VirtualClock(cost, boundaries, draft_forward)
        self._rows = [0] * self._stages.num_stages
        self._beside: list[int] = []
        """Forwards of each sequence that drafted beside the step."""
        self._after: list[int] = []
        self._is_open = False
        self._unpriced: list[list[float]] = []
        self._tokens = self._steps = 0.0
        """Tokens and steps of sequences that drafted, the latest ones weighing most."""
        self._before: deque[frozenset[SharedPipeline]] = deque(maxlen=self.num_stages)
        """Who drafted in the last n steps: a draft token needs n steps to come back."""
        self._per_step = 1.0
        """Rows of one of them in a stage."""
        self.drafting: frozenset[SharedPipeline] = frozenset()
        """Those that draft where their budgets are automatic."""
        self._sharpness = SHARPNESS

    @property
    def num_stages(self) -> int:
        return self._stages.num_stages

    @property
    def forwards_beside(self) -> int:
        """Draft forwards that fit beside a step, of a sequence that drafts while its rows wait."""
        return self._stages.hidden_forwards()

    @property
    def time(self) -> float:
        """T: in target passes of one token, up to the last priced step."""
        return self._stages.time

    # -- what happens -----------------------------------------------------------------------

    def begin_step(self, pipelines: Iterable[SharedPipeline]) -> None:
        """Price the step before, and open one in which these sequences take part."""
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
        """Count draft forwards of a sequence, made beside the open step or after it."""
        if num_forwards:
            (self._beside if beside else self._after).append(num_forwards)

    def emitted(self, pipeline: SharedPipeline, times: list[float], *, is_first: bool) -> None:
        """Count a token of a sequence, and time it when the open step ends.

        Args:
            times: the sequence's emission times, to which the end of the step is appended.
            is_first: the prompt's forward made it, so that it is no token of the pipeline.
        """
        self.num_tokens += not is_first
        self._tokens += not is_first and pipeline in self._before[0]
        self._unpriced.append(times)

    def tested(self, said: float, right: bool) -> None:
        """Take the draft's probabilities as they prove: in the mean, as many are right as it says.

        log s <- log s + LEARNING (right - said), s from 1 to SHARPEST: how much a draft understates
        its best tokens differs from draft to draft.
        """
        change = math.exp(LEARNING * (right - said))
        self._sharpness = min(max(self._sharpness * change, 1.0), SHARPEST)

    @property
    def sharpness(self) -> float:
        """Exponent of the draft's probabilities, in quarters: recorded graphs have it inside."""
        return round(4 * self._sharpness) / 4

    def leave(self, pipeline: SharedPipeline) -> None:
        """A sequence has ended; nothing here keeps its caches."""
        self.live = [other for other in self.live if other is not pipeline]
        self.drafting -= {pipeline}
        self._before = deque((drafted - {pipeline} for drafted in self._before), self.num_stages)

    def settle(self) -> None:
        """Price the open step."""
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
        """Time of so many draft forwards of each sequence, in forwards of one alone.

        Together the k-th ones are one pass, longer by a row for every sequence but the first.
        """
        total, longest = sum(forwards), max(forwards, default=0)
        if not self.drafts_together:
            return total
        return longest + self._stages.cost.row * (total - longest)

    # -- how much to speculate --------------------------------------------------------------

    def drafts_pay(self, pipeline: SharedPipeline) -> bool:
        """Whether a sequence is among those that draft; the others decode plainly in this step."""
        return pipeline in self.drafting or pipeline not in self.live

    def rate(self, num_drafting: int) -> float:
        """Tokens per time that are expected if so many of the live sequences draft."""
        stages, n = self._stages, self.num_stages
        num_plain = len(self.live) - num_drafting
        rows = max(1.0, (num_drafting * self._per_step + num_plain / n))
        busy = max(stages.busy([rows] * n))
        forwards = self._passes([1] * num_drafting)
        between = stages.between([rows] * n)
        time = max(busy, forwards * stages.draft_forward) + between
        known = self._tokens + PRIOR_STEPS * PRIOR_LENGTH / n
        tokens = known / (self._steps + PRIOR_STEPS)
        return (num_drafting * tokens + num_plain / n) / time

    def _choose(self) -> None:
        """Choose the sequences that draft: as many as make the most tokens per time.

        Those that begin are the ones with the fewest tokens so far, and those that stop have most.
        """
        drafting = [pipeline for pipeline in self.live if pipeline in self.drafting]
        best = max(range(len(self.live) + 1), key=self.rate)
        if self.rate(best) < SWITCH * self.rate(len(drafting)):
            best = len(drafting)
        drafting.sort(key=lambda pipeline: pipeline.num_emitted)
        others = [pipeline for pipeline in self.live if pipeline not in self.drafting]
        others.sort(key=lambda pipeline: pipeline.num_emitted)
        self.drafting = frozenset((drafting + others)[:best])

    def costs(self, row: float) -> RowCosts:
        """Costs against which a draft token of one sequence is weighed: the tokens of all of them.

        Args:
            row: time that it adds to a step if all segments are equally long. The longest stage
                sets the time; the more sequences, the less the sums of their rows differ.
        """
        factor = 1 + (LONGEST - 1) / math.sqrt(max(1, len(self.live)))
        rate = self.rate(len(self.drafting))
        return RowCosts(tokens=rate, time=1.0, row=factor * row, sharpness=self.sharpness)

    def hidden_forwards(self, alone: int) -> int:
        """Draft forwards of one sequence that fit beside a step, of those that fit for one alone.

        The sequences that draft share the draft's device. Together they make its forwards longer as
        their rows make the stages' steps.
        """
        return alone if self.drafts_together else max(1, alone // max(1, len(self.live)))


class SequenceClock(VirtualClock):
    """K and T of one sequence as if it were alone; what it drafts goes to the shared clock, too."""

    def __init__(
        self,
        batch: BatchClock,
        pipeline: SharedPipeline,
        cost: CostModel,
        boundaries: Sequence[int],
        draft_forward: float,
    ) -> None:
        super().__init__(cost, boundaries, draft_forward)
        self.batch, self.pipeline = batch, pipeline
        self._weighs = False
        """Draft tokens enter while their probabilities pay."""

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
        """Alone in the pipeline as on a clock of its own; else each row is paid by everybody."""
        if len(self.batch.live) <= 1:
            return super().round_costs(num_segments, num_forwards)
        return self.batch.costs(self.num_stages * self.row_price)
