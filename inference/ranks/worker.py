"""Worker: a process runs one stage and handles messages in the order of their arrival."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from msgspec.structs import replace

from ...models.stages.together import can_run_together, forward_together, log_failed_pass
from ...models.target import Segment, StagedTarget
from ...models.transformer.stage_cache import Abandoned
from ..not_finite import find_layer
from ..rules.sampled import RULES, KeyedRandom, Verifier
from ..timeline import Timeline
from . import codec
from .links import Local, Outbox


@dataclass(eq=False, kw_only=True)
class StageWorker:
    """Worker with the layers, the cache and the output link of one stage.

    KeepRows and segments arrive in one stream, so the cache changes in the same order on every
    stage, and a segment's rows never change between first and last stage. If a KeepRows removes
    rows of a segment that has already left, the controller drops these rows' results.
    """

    target: StagedTarget
    index: int
    """Stage index."""
    following: Outbox | None
    """Next stage; None: this is the last one."""
    controller: Outbox
    timeline: Timeline

    def __post_init__(self) -> None:
        self.stage = self.target.stages[self.index]
        self.first_live = 0
        """Steps below this number are cancelled; another thread may raise the number."""
        self.is_still_wanted: Callable[[], bool] = lambda: True
        """Called before every layer if the stage runs in the controller's process."""
        self.taps: tuple[int, ...] = ()
        self._verifier: Verifier | None = None

    def handle(self, message: codec.AnyMessage) -> None:
        match message:
            case codec.Step():
                if self.begin(message):
                    self.run(message)
            case codec.Prefill():
                self._prefill(message)
            case codec.MeasureRequest():
                self._report(message)

    def cancel(self, message: codec.Cancel) -> None:
        """Record a cancellation. Another thread calls this while the stage computes."""
        self.first_live = max(self.first_live, message.sequence + 1)

    def _is_wanted(self, step: codec.Step) -> bool:
        return step.sequence >= self.first_live and self.is_still_wanted()

    def begin(self, step: codec.Step) -> bool:
        """Apply the KeepRows. If the segment is unwanted, skip it and return False."""
        # Even a cancelled step applies them: all stages' caches must change in the same order.
        for keep in step.keeps:
            self.stage.keep(keep)
        if step.is_cancelled or not self._is_wanted(step):
            self._skip(step)
            return False
        return True

    def run(self, step: codec.Step) -> None:
        """Compute a segment after ``begin``, and pass it on."""
        segment = step.segment
        try:
            with self.timeline.span("stage", segment.num_rows):
                output = self.stage.forward(segment, self.taps, lambda: self._is_wanted(step))
        except Abandoned:
            self._skip(step)
            return
        self.finish(step, output)

    def finish(self, step: codec.Step, output: Segment, *, alone: bool = True) -> None:
        """Pass on the segment's output, and answer the controller.

        If not ``alone``, sequences share the pass, and no CUDA graph is captured for this one.
        """
        segment, taps = step.segment, {i: output.taps[i] for i in self.taps}
        output.taps = {}
        self._pass_on(codec.Step.of(step.keeps, output), step)
        result = codec.StageResult(taps=taps)
        if self.following is None:
            assert output.hidden is not None and self._verifier is not None
            with self.timeline.span("verify", segment.num_rows):
                given = self.target, output.hidden, segment.positions
                result.verdicts = self._verifier.judge_states(*given, alone=alone)
        if taps or self.following is None:
            self._answer(result, step)

    def _skip(self, step: codec.Step) -> None:
        """Make room for the rows in this and all later stages' caches, without computing them."""
        # Later KeepRows count these rows, so caches need their places.
        with self.timeline.span("skip", step.segment.num_rows):
            self.stage.skip(step.segment)
        # The stages behind this one must make the same room, so the message goes on without rows.
        self._pass_on(replace(step, rows=None, is_cancelled=True), step)
        # The controller counts on one answer per step, so a skipped one is answered without data.
        if self.taps or self.following is None:
            self._answer(codec.StageResult(), step)

    def _prefill(self, prefill: codec.Prefill) -> None:
        # Only the first chunk carries a new sequence; later chunks continue with its settings.
        if prefill.first_position == 0:
            self.stage.reset()
            if prefill.reserved_rows:
                self.stage.cache.reserve(prefill.reserved_rows, self.stage.device)
            self.target.set_bitwise(prefill.is_bitwise)
            start, end = self.stage.start, self.stage.end
            self.taps = tuple(layer for layer in prefill.taps if start < layer <= end)
            # Keyed by prompt and position: a token does not depend on the process that samples it.
            random = KeyedRandom(prefill.seed, prefill.prompt)
            self._verifier = RULES[prefill.rule](
                prefill.temperature, random, filters=prefill.filters
            )
        num_rows = len(prefill.rows)
        positions = torch.arange(prefill.first_position, prefill.first_position + num_rows)
        with self.timeline.span("prefill", num_rows):
            rows, length = prefill.rows, prefill.length or None
            hidden, taps = self.stage.prefill(rows, positions, self.taps, length=length)
        self._pass_on(replace(prefill, rows=hidden), prefill)
        result = codec.StageResult(taps=taps)
        if self.following is None and prefill.is_last:
            assert self._verifier is not None
            logits_1V = self.target.logits(hidden[-1:])
            result.verdicts = self._verifier.target_tokens(logits_1V, positions[-1:])
        if taps or result.verdicts is not None:
            self._answer(result, prefill)

    def _report(self, question: codec.MeasureRequest) -> None:
        # Pass it on first, so the stages prepare their reports at the same time.
        self._pass_on(question, question)
        if question.action == "clear":
            self.timeline.clear()
            return
        is_search = question.action == "find"
        found = {"layer": find_layer(self.stage)} if is_search else self.timeline.report()
        self._answer(codec.StageReport(json=json.dumps(found)), question)

    def _pass_on(self, message: codec.AnyMessage, cause: codec.AnyMessage) -> None:
        if self.following is not None:
            message.sequence, message.slot = cause.sequence, cause.slot
            self.following.send(message)

    def _answer(self, message: codec.AnyMessage, cause: codec.AnyMessage) -> None:
        message.sequence, message.slot = cause.sequence, cause.slot
        self.controller.send(message)


class SharedWorker(StageWorker):
    """Worker for one or several sequences, each with its own caches.

    Rows from several sequences share a forward pass if ``can_run_together``. A failure in one
    sequence is passed on and answered as ``Failed``. The others are unaffected.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._of: dict[int, StageWorker] = {}
        """Workers by slot."""
        self._onward, self._answers = Local(), Local()

    def handle(self, message: codec.AnyMessage) -> None:
        if not isinstance(message, codec.Together):
            super().handle(message)
            return
        # Steps only begin in this loop: they run after it, in one forward pass.
        begun: list[tuple[StageWorker, codec.Step]] = []
        for part in message.parts:
            with self._contained(part):
                match part:
                    case codec.Step():
                        worker = self._of[part.slot]
                        if worker.begin(part):
                            begun.append((worker, part))
                    case codec.Prefill():
                        if part.first_position == 0:
                            self._of[part.slot] = self._make()
                        self._of[part.slot].handle(part)
                    case codec.Failed():
                        self._fail(part, part.reason)
                    case codec.Leave():
                        self._of.pop(part.slot, None)
                        self._onward.send(part)
        self._run(begun)
        # One message per step, not one per sequence: each message has its own cost.
        onward, answers = self._onward.take_parts(), self._answers.take_parts()
        if onward and self.following is not None:
            self.following.send(codec.Together(parts=onward))
        if answers:
            self.controller.send(codec.Together(parts=answers))

    def cancel(self, message: codec.Cancel) -> None:
        worker = self._of.get(message.slot)
        if worker is not None:
            worker.cancel(message)
        # Slot 0 is also the pipeline for a single sequence, which this worker itself runs.
        elif message.slot == 0:
            super().cancel(message)

    def _make(self) -> StageWorker:
        return StageWorker(
            target=StagedTarget(self.target.model, self.target.boundaries),
            index=self.index,
            following=None if self.following is None else self._onward,
            controller=self._answers,
            timeline=self.timeline,
        )

    def _run(self, begun: Sequence[tuple[StageWorker, codec.Step]]) -> None:
        # One sequence alone gains nothing, and its own pass can still be abandoned between layers.
        together = [pair for pair in begun if can_run_together(pair[0].stage)]
        if len(together) < 2 or not self._run_together(together):
            together = []
        for worker, step in begun:
            if (worker, step) not in together:
                with self._contained(step):
                    worker.run(step)

    def _run_together(self, pairs: Sequence[tuple[StageWorker, codec.Step]]) -> bool:
        """Run several steps in one pass. If it fails, return False and leave caches unchanged."""
        segments = [step.segment for _, step in pairs]
        taps = {layer for worker, _ in pairs for layer in worker.taps}
        try:
            with self.timeline.span("stage", sum(segment.num_rows for segment in segments)):
                outputs = forward_together([worker.stage for worker, _ in pairs], segments, taps)
        except Exception as error:  # the caller runs each alone to find the failing sequence
            log_failed_pass("rows", error)
            return False
        for (worker, step), output in zip(pairs, outputs, strict=True):
            with self._contained(step):
                worker.finish(step, output, alone=False)
        return True

    @contextmanager
    def _contained(self, part: codec.StageMessage) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._of.pop(part.slot, None)
            self._fail(part, f"{type(error).__name__}: {error}"[: codec.MAX_REASON])

    def _fail(self, cause: codec.StageMessage, reason: str) -> None:
        failed = codec.Failed(sequence=cause.sequence, slot=cause.slot, reason=reason)
        self._onward.send(failed)
        self._answers.send(failed)
