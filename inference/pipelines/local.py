"""Pipelined target in one process. In each step, every stage runs one segment or none."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...models.stages.together import can_run_together, forward_together, log_failed_pass
from ...models.target import KeepRows, Segment, StagedTarget, prune_segment
from ..demands import EndMask
from ..not_finite import find_module
from ..rules.sampled import Verifier
from ..timeline import Timeline
from . import Ahead, FeatureStore, Pipeline, Returned


class LocalPipeline(Pipeline):
    """Pipeline that runs all stages of a target in this process."""

    def __init__(self, target: StagedTarget, timeline: Timeline | None = None) -> None:
        self.target = target
        self.timeline = timeline or Timeline("one process", device=target.device)
        self.is_prefilling = False
        """True while the waiting segments are prompt rows. Every stage commits these rows after its
        pass."""
        self.error: Exception | None = None
        """Exception from a step in which this sequence's own rows failed."""
        self._num_expected = self._num_prompt = 0
        self._mask = EndMask(token_ids=(), end=0)
        self._keeps_logits = False
        self._restart((), None)

    def _restart(self, taps: tuple[int, ...], verifier: Verifier | None) -> None:
        self.taps, self._verifier = taps, verifier
        self._features = FeatureStore()
        self._entrance: deque[Segment] = deque()
        self._waiting: list[Segment | None] = [None] * self.num_stages
        self._returned: Returned | None = None
        self.last_rows: list[int] = [0] * self.num_stages

    @property
    def num_stages(self) -> int:
        return self.target.num_stages

    def open(self, max_new_tokens: int, *, bitwise: bool = False) -> None:
        self._num_expected = max_new_tokens
        self.target.set_bitwise(bitwise)

    def demand(self, mask: EndMask, *, keeps_logits: bool) -> None:
        self._mask, self._keeps_logits, self.first_logits = mask, keeps_logits, None

    def first_token(self, logits_V: Tensor, num_prompt: int, verifier: Verifier) -> int:
        """Sample the token after the prompt."""
        self.first_logits = logits_V if self._keeps_logits else None
        last = torch.tensor([num_prompt - 1])
        return int(verifier.target_tokens(self._mask.apply(logits_V[None], last), last))

    def prefill(
        self, input_ids: Tensor, taps: tuple[int, ...], verifier: Verifier
    ) -> tuple[int, dict[int, Tensor]]:
        self._restart(taps, verifier)
        self.target.reserve(len(input_ids) + self._num_expected)
        logits_V, features = self.target.prefill(input_ids, taps)
        return self.first_token(logits_V, len(input_ids), verifier), features

    def recompute(self, input_ids: Tensor, verifier: Verifier) -> None:
        self.target.prefill(input_ids, length=len(input_ids) + 1)

    def find_not_finite(self, ids: list[int], drafted: list[int]) -> str:
        return find_module(self.target.model, ids, drafted)

    def embed(self, ids: Tensor) -> Tensor:
        return self.target.embed(ids)

    def features(self) -> dict[int, Tensor]:
        return self._features.view()

    def inject(self, segment: Segment) -> None:
        self._entrance.append(segment)
        if 0 in self.taps:
            assert segment.ids is not None
            self._features.append({0: self.embed(segment.ids)})

    def tick(self, ahead: Ahead | None = None) -> Returned | None:
        """Run one pipeline step. ``ahead`` is ignored, as the result is always here first."""
        step_together([self])
        return self.take_returned()

    def take_returned(self) -> Returned | None:
        """Return the last stage's rows in the latest step, or raise this sequence's error."""
        if self.error is not None:
            raise self.error
        return self._returned

    def keep(self, keep: KeepRows) -> dict[int, Tensor]:
        for index, segment in enumerate(self._waiting):
            if segment is not None:
                self._waiting[index] = prune_segment(segment, keep, segment.lo)
        pruned = [prune_segment(segment, keep, segment.lo) for segment in self._entrance]
        self._entrance = deque(segment for segment in pruned if segment is not None)
        for stage in self.target.stages:
            stage.keep(keep)
        return self._features.keep(keep)

    # -- one step ---------------------------------------------------------------------------

    @property
    def next_rows(self) -> list[int]:
        """Return each stage's row count in the next step."""
        first = self._entrance[0] if self._entrance else None
        return [0 if s is None else s.num_rows for s in (first, *self._waiting[1:])]

    def begin_step(self) -> None:
        self.last_rows, self._returned = self.next_rows, None
        if self._entrance:
            self._waiting[0] = self._entrance.popleft()

    def run_alone(self, index: int, segment: Segment) -> Segment:
        """Run one segment through a stage, without segments from other sequences."""
        stage, taps = self.target.stages[index], self._deeper
        if not self.is_prefilling:
            return stage.forward(segment, taps)
        entering = segment.hidden if segment.ids is None else segment.ids
        assert entering is not None
        at, length = segment.positions, self._num_prompt
        hidden_lH, collected = stage.prefill(entering, at, taps, length=length)
        return replace(segment, ids=None, hidden=hidden_lH, taps={**segment.taps, **collected})

    def leave_stage(self, index: int, output: Segment, logits_RV: Tensor | None = None) -> None:
        """Pass a stage's output on, or judge the last one. ``logits_RV`` is for ``judged_rows``."""
        start, end = self.target.boundaries[index : index + 2]
        own = [layer for layer in self._deeper if start < layer <= end]
        # Only this stage's layers: earlier ones were appended when the rows left their stage.
        self._features.append({layer: output.taps[layer] for layer in own})
        if index == self.num_stages - 1:
            self._returned = self._judge(output, logits_RV)
        else:
            self._waiting[index + 1] = output

    @property
    def _deeper(self) -> list[int]:
        return [layer for layer in self.taps if layer > 0]

    def judged_rows(self, segment: Segment) -> Tensor:
        """Return the last stage's rows [R, H] that need logits. In a prompt, only the last does."""
        assert segment.hidden is not None
        return segment.hidden[-1:] if self.is_prefilling else segment.hidden

    def _judge(self, segment: Segment, logits_RV: Tensor | None) -> Returned:
        assert self._verifier is not None
        with self.timeline.span("verify", segment.num_rows):
            at, hidden_RH = segment.positions, self.judged_rows(segment)
            needs_logits = self.is_prefilling or self._keeps_logits or self._mask.changes(at)
            if logits_RV is None and not needs_logits:
                verdicts = self._verifier.judge_states(self.target, hidden_RH, at)
                return Returned(segment.num_rows, verdicts)
            if logits_RV is None:
                logits_RV = self.target.logits(hidden_RH)
            if self.is_prefilling:
                return Returned(segment.num_rows, logits_RV)
            verdicts = self._verifier.judge(self._mask.apply(logits_RV, at), at)
        return Returned(segment.num_rows, verdicts, logits_RV if self._keeps_logits else None)


def step_together(pipelines: Sequence[LocalPipeline]) -> None:
    """Run one step for several sequences, each with its own caches for the same model layers.

    Rows from several sequences share a forward pass if ``can_run_together``, else they run one
    after the other. If a sequence's rows fail, only this sequence's ``error`` is set.
    """
    for pipeline in pipelines:
        pipeline.begin_step()
    # Last stage first: an output then waits for the next step instead of passing on in this one.
    for index in reversed(range(pipelines[0].num_stages if pipelines else 0)):
        pairs = []
        for pipeline in pipelines:
            segment, pipeline._waiting[index] = pipeline._waiting[index], None
            # After an error the sequence's caches may be half changed, so it takes part no more.
            if segment is not None and pipeline.error is None:
                pairs.append((pipeline, segment))
        if len(pairs) > 1:
            together = [pair for pair in pairs if _can_join(pair[0], index)]
            # After a failure all run alone, so that only the faulty sequence gets the error.
            if len(together) > 1 and _run_together(index, together):
                pairs = [pair for pair in pairs if pair not in together]
        for pipeline, segment in pairs:
            try:
                with pipeline.timeline.span("stage", segment.num_rows):
                    output = pipeline.run_alone(index, segment)
                pipeline.leave_stage(index, output)
            except Exception as error:
                pipeline.error = error


def _can_join(pipeline: LocalPipeline, index: int) -> bool:
    """Return True if a sequence's rows may share the stage's next pass."""
    stage = pipeline.target.stages[index]
    # A rounded target's prompt attends by torch's kernel. A shared pass would take our own kernel,
    # which gives other last bits.
    # Rows of a prompt turn by its length, where rows of a shared pass turn by their own position.
    is_apart = (stage.is_rounded or stage.places.follows_length) and pipeline.is_prefilling
    return can_run_together(stage) and not is_apart


def _run_together(index: int, pairs: Sequence[tuple[LocalPipeline, Segment]]) -> bool:
    """Run one stage for several sequences. If it fails, return False and leave caches unchanged."""
    stages = [pipeline.target.stages[index] for pipeline, _ in pairs]
    segments = [segment for _, segment in pairs]
    taps = {layer for pipeline, _ in pairs for layer in pipeline._deeper}
    timeline = pairs[0][0].timeline
    try:
        with timeline.span("stage", sum(segment.num_rows for segment in segments)):
            outputs = forward_together(stages, segments, taps)
    except Exception as error:  # The caller runs each alone to find the failing sequence.
        log_failed_pass("rows", error)
        return False
    logits = _logits_together(index, pairs, outputs)
    rows = zip(pairs, stages, outputs, logits, strict=True)
    for (pipeline, segment), stage, output, logits_RV in rows:
        try:
            if pipeline.is_prefilling:
                stage.keep(KeepRows(tuple(range(segment.num_rows)), segment.num_rows))
            pipeline.leave_stage(index, output, logits_RV)
        except Exception as error:
            pipeline.error = error
    return True


def _logits_together(
    index: int, pairs: Sequence[tuple[LocalPipeline, Segment]], outputs: Sequence[Segment]
) -> Sequence[Tensor | None]:
    """Return logits after the last stage, from one pass over the LM head's weights."""
    first, unknown = pairs[0][0], [None] * len(pairs)
    if index < first.num_stages - 1:
        return unknown
    rows = [one.judged_rows(output) for (one, _), output in zip(pairs, outputs, strict=True)]
    sizes = [len(rows_RH) for rows_RH in rows]
    try:
        with first.timeline.span("verify", sum(sizes)):
            return first.target.logits(torch.cat(rows)).split(sizes)
    except Exception as error:  # Each sequence computes its own, and gets its own error.
        log_failed_pass("logits", error)
        return unknown
