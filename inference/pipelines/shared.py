"""One sequence's view of a pipeline shared with other sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...models.stages.stage_graphs import MAX_ROWS
from ...models.target import Segment, StagedTarget
from ...models.transformer.stage_cache import MIN_CAPACITY
from ..batch_clock import BatchClock, SequenceClock
from ..cost_model import CostModel, VirtualClock
from ..ranks.codec import Leave, Part, Together
from ..ranks.links import Local
from ..rules.sampled import Verifier
from ..timeline import Timeline
from . import Ahead, FeatureStore, Pipeline, Returned
from .local import LocalPipeline
from .process import ProcessPipeline

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """Settings and state shared by all sequences."""

    clock: BatchClock
    wait: Callable[[], None]
    """Function that blocks until a step with this sequence has run."""
    counts_alone: bool
    """True to draft and measure time as if this sequence were alone in the pipeline."""
    prompt_rows: int
    """Rows per prompt chunk: one chunk enters per step, with other sequences' decoding rows."""


class SharedPipeline(Pipeline):
    """Pipeline with its own caches but shared steps. ``tick`` waits for the next shared step."""

    target: StagedTarget
    is_prefilling: bool
    next_rows: list[int]
    """Rows each stage will process in the next step."""

    def share(self, sharing: Sharing) -> None:
        """Set the shared state. The constructor calls this once."""
        self.clock, self.prompt_rows = sharing.clock, sharing.prompt_rows
        self.num_emitted = 0
        self.num_waiting_forwards = 0
        """Draft forwards since the last step, made while this sequence's rows wait."""
        self._own_clock: VirtualClock | None = None
        self._wait, self._counts_alone = sharing.wait, sharing.counts_alone
        self._num_expected = 0

    def open(self, max_new_tokens: int, *, bitwise: bool = False) -> None:
        super().open(max_new_tokens, bitwise=bitwise)
        self._num_expected = max_new_tokens
        self.prompt_rows = self.target.prompt_rows or self.prompt_rows

    def make_clock(
        self, cost: CostModel, boundaries: Sequence[int], draft_forward: float
    ) -> VirtualClock:
        if self._counts_alone:
            self._own_clock = super().make_clock(cost, boundaries, draft_forward)
        else:
            self._own_clock = SequenceClock(self.clock, self, cost, boundaries, draft_forward)
        return self._own_clock

    def let_go(self) -> None:
        """Drop references after the sequence's end, so that its caches are freed at once.

        Otherwise garbage collection may free the caches only hundreds of sequences later.
        """
        self._own_clock, self._wait = None, _is_over

    @property
    def time_alone(self) -> float:
        """Return the virtual time T for this sequence's steps, as if it were alone."""
        return self._own_clock.time if self._own_clock else 0.0


def _is_over() -> None:
    raise AssertionError("the sequence has ended")


class SharedStages(SharedPipeline, LocalPipeline):
    """Shared pipeline with all stages in this process. ``step_together`` runs each step."""

    def __init__(self, target: StagedTarget, timeline: Timeline, sharing: Sharing) -> None:
        LocalPipeline.__init__(self, target, timeline)
        self.share(sharing)

    def prefill(
        self, input_ids: Tensor, taps: tuple[int, ...], verifier: Verifier
    ) -> tuple[int, dict[int, Tensor]]:
        self._restart(taps, verifier)
        self._num_prompt = len(input_ids)
        self.target.reset()
        num_rows = cache_rows(len(input_ids), self._num_expected, self.target.max_positions)
        for stage in self.target.stages:
            stage.cache.reserve(num_rows, stage.device)
        self.is_prefilling = True
        # Chunks enter one per step, so decoding sequences wait for one chunk only.
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
        features, self._features = self._features.view(), FeatureStore()
        return self.first_token(returned.verdicts[0], len(input_ids), verifier), features

    def tick(self, ahead: Ahead | None = None) -> Returned | None:
        self._wait()
        return self.take_returned()


class SharedRanks(SharedPipeline, ProcessPipeline):
    """Shared pipeline on another pipeline's ranks. ``step_ranks`` sends each step's inputs.

    A rank may compute while other ranks wait. A sequence that skips a step receives its results
    later, so it takes the same steps as with ``SharedStages``.
    """

    def __init__(self, root: ProcessPipeline, target: StagedTarget, sharing: Sharing) -> None:
        """Share the ranks of ``root``, a pipeline for a single sequence."""
        self.root, self.unsent = root, Local()
        ProcessPipeline.__init__(
            self, target, self.unsent, root.answers, root.timeline, cancels=root.cancels
        )
        self.share(sharing)
        self.is_prefilling = self.runs_ahead = False

    def prefill(
        self,
        input_ids: Tensor,
        taps: tuple[int, ...],
        verifier: Verifier,
        *,
        length: int | None = None,
    ) -> tuple[int, dict[int, Tensor]]:
        self.is_prefilling = True
        found = super().prefill(input_ids, taps, verifier, length=length)
        self.is_prefilling = False
        return found

    def tick(self, ahead: Ahead | None = None) -> Returned | None:
        self.start()
        self._wait()
        return super().tick()

    def verdict_waits(self) -> bool:
        """Return False, because drafting must not depend on other sequences' timing."""
        return False

    def close(self) -> None:
        self.abandon()

    def abandon(self) -> None:
        self._cancel_all()
        self.root.first_stage.send(Together(parts=[Leave(slot=self._mailbox.slot)]))

    def _chunk_rows(self, num_rows: int) -> int:
        return self.prompt_rows

    def _reserved_rows(self, num_prompt: int) -> int:
        return cache_rows(num_prompt, self._num_expected, self.target.max_positions)

    def _step_prompt(self) -> None:
        self._wait()
        super()._step_prompt()


def step_ranks(pipelines: Sequence[SharedRanks]) -> None:
    """Run one step for several sequences by sending all their inputs in one message."""
    parts: list[Part] = []
    for pipeline in pipelines:
        pipeline.last_rows = pipeline.next_rows
        parts += pipeline.unsent.take_parts()
    if parts:
        pipelines[0].root.first_stage.send(Together(parts=parts))


def cache_rows(num_prompt: int, num_new: int, max_positions: int) -> int:
    """Return the rows to reserve in a sequence's cache, with room for draft tokens in flight."""
    # Reserved at once: a cache that grows has its old and new memory at the same time.
    return max(min(num_prompt + num_new, max_positions) + MAX_ROWS, MIN_CAPACITY)


def row_bytes(target: PreTrainedModel) -> int:
    """Return the memory for one token's keys and values in all layers, in bytes."""
    config = target.get_decoder().config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * size * target.dtype.itemsize
