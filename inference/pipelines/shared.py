"""One sequence's view of a pipeline whose steps it shares with others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pipedraft.inference.batch_clock import BatchClock, SequenceClock
from pipedraft.inference.clock import CostModel
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.pipelines import Ahead, Returned
from pipedraft.inference.pipelines.local import FeatureStore, LocalPipeline
from pipedraft.inference.timeline import Timeline
from pipedraft.inference.verify import Verifier
from pipedraft.models.bitwise import PROMPT_ROWS
from pipedraft.models.stage_cache import MIN_CAPACITY
from pipedraft.models.stage_calls import MAX_ROWS
from pipedraft.models.target import Segment, StagedTarget


class SharedPipeline(LocalPipeline):
    """A ``LocalPipeline`` with caches of its own, whose ``tick`` waits for the shared step.

    The prompt travels through the stages in chunks, one entering at each step, beside the rows of
    sequences that decode already.
    """

    def __init__(
        self,
        target: StagedTarget,
        *,
        timeline: Timeline,
        clock: BatchClock,
        wait: Callable[[], None],
        prompt_rows: int,
    ) -> None:
        """
        Args:
            wait: returns when a step has been made in which this sequence took part.
            prompt_rows: of a chunk.
        """
        super().__init__(target, timeline)
        self.clock, self.prompt_rows = clock, prompt_rows
        self.num_emitted = 0
        self.num_waiting_forwards = 0
        """Of the draft since the last step, while this sequence's rows wait."""
        self._own_clock: SequenceClock | None = None
        self._wait = wait

    def open(self, config: DecodeConfig, prompt_index: int) -> None:
        super().open(config, prompt_index)
        if config.bitwise:
            self.prompt_rows = PROMPT_ROWS

    def prefill(
        self, input_ids: Tensor, taps: tuple[int, ...], verifier: Verifier
    ) -> tuple[int, dict[int, Tensor]]:
        self._restart(taps, verifier)
        self.target.reset()
        num_rows = cache_rows(len(input_ids), self._num_expected, self.target.max_positions)
        for stage in self.target.stages:
            stage.cache.reserve(num_rows, stage.device)
        self.is_prefilling = True
        positions = torch.arange(len(input_ids)).split(self.prompt_rows)
        chunks = list(zip(input_ids.split(self.prompt_rows), positions, strict=True))
        for ids, at in chunks:
            visible = torch.ones(len(ids), len(ids), dtype=torch.bool).tril_()
            self.inject(Segment(positions=at, visible=visible, ids=ids))
        returned = None
        for _ in range(self.num_stages + len(chunks) - 1):
            returned = self.tick()
        assert returned is not None
        self.is_prefilling = False
        features, self._features = self._features.view(), FeatureStore(taps)
        last = torch.tensor([len(input_ids) - 1])
        return int(verifier.target_tokens(returned.verdicts, last)), features

    def tick(self, ahead: Ahead | None = None) -> Returned | None:
        self._wait()
        return self.take_returned()

    def make_clock(
        self, cost: CostModel, boundaries: Sequence[int], draft_forward: float
    ) -> SequenceClock:
        self._own_clock = SequenceClock(self.clock, self, cost, boundaries, draft_forward)
        return self._own_clock

    @property
    def time_alone(self) -> float:
        """T of the steps of this sequence, as if it were alone."""
        return self._own_clock.time if self._own_clock else 0.0


def cache_rows(num_prompt: int, num_new: int, max_positions: int) -> int:
    """Rows of a sequence's keys and values, with those of draft tokens in flight."""
    return max(min(num_prompt + num_new, max_positions) + MAX_ROWS, MIN_CAPACITY)
