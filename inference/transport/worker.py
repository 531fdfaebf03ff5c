"""One stage in its process: it answers messages in the order of their arrival."""

import json
from collections.abc import Callable

import torch
from msgspec.structs import replace

from pipedraft.inference.timeline import Timeline
from pipedraft.inference.transport.codec import (
    AnyMessage,
    Measure,
    Prefill,
    Report,
    Result,
    Step,
)
from pipedraft.inference.transport.ranks import Outbox
from pipedraft.inference.verify import (
    RULES,
    KeyedRandom,
    Verifier,
)
from pipedraft.models.stage_cache import Abandoned
from pipedraft.models.target import StagedTarget


class StageWorker:
    """Layers and cache of one stage, and where its output goes.

    Keeps and segments come in one stream, so the cache changes in the same order on every stage
    and a segment's rows never change between the first stage and the last. What a Keep removed
    from a segment that is further on is dropped by the controller when its verdicts come back.
    """

    def __init__(
        self,
        target: StagedTarget,
        index: int,
        *,
        following: Outbox | None,
        controller: Outbox,
        timeline: Timeline,
    ) -> None:
        """``following``: the next stage; None: this is the last one."""
        self.target, self.stage = target, target.stages[index]
        self.following, self.controller = following, controller
        self.timeline = timeline
        self.first_live = 0
        """Steps below this number are cancelled; another thread may raise it."""
        self.is_still_wanted: Callable[[], bool] = lambda: True
        """Asked before every layer; for the stage in the process of the controller."""
        self._taps: tuple[int, ...] = ()
        self._verifier: Verifier | None = None

    def handle(self, message: AnyMessage) -> None:
        match message:
            case Step():
                self._step(message)
            case Prefill():
                self._prefill(message)
            case Measure():
                self._report(message)

    def _step(self, step: Step) -> None:
        for keep in step.keeps:
            self.stage.keep(keep)
        segment = step.segment

        def is_wanted() -> bool:
            return step.sequence >= self.first_live and self.is_still_wanted()

        if step.is_cancelled or not is_wanted():
            self._skip(step)
            return
        try:
            with self.timeline.span("stage", segment.num_rows):
                output = self.stage.forward(segment, self._taps, is_wanted)
        except Abandoned:
            self._skip(step)
            return
        taps, output.taps = output.taps, {}
        self._pass_on(Step.of(step.keeps, output), step)
        result = Result(taps=taps)
        if self.following is None:
            assert output.hidden is not None and self._verifier is not None
            with self.timeline.span("verify", segment.num_rows):
                logits_RV = self.target.logits(output.hidden)
                result.verdicts = self._verifier.judge(logits_RV, segment.positions)
        if taps or self.following is None:
            self._answer(result, step)

    def _skip(self, step: Step) -> None:
        """Caches make room here and further on; nothing is computed."""
        with self.timeline.span("skip", step.segment.num_rows):
            self.stage.skip(step.segment)
        self._pass_on(replace(step, rows=None, is_cancelled=True), step)
        if self._taps or self.following is None:
            self._answer(Result(), step)

    def _prefill(self, prefill: Prefill) -> None:
        if prefill.first_position == 0:
            self.stage.reset()
            self.target.set_bitwise(prefill.is_bitwise)
            start, end = self.stage.start, self.stage.end
            self._taps = tuple(layer for layer in prefill.taps if start < layer <= end)
            random = KeyedRandom(prefill.seed, prefill.prompt)
            self._verifier = RULES[prefill.rule](
                prefill.temperature, random, filters=prefill.filters
            )
        num_rows = len(prefill.rows)
        positions = torch.arange(prefill.first_position, prefill.first_position + num_rows)
        with self.timeline.span("prefill", num_rows):
            hidden, taps = self.stage.prefill(prefill.rows, positions, self._taps)
        self._pass_on(replace(prefill, rows=hidden), prefill)
        result = Result(taps=taps)
        if self.following is None and prefill.is_last:
            assert self._verifier is not None
            logits_1V = self.target.logits(hidden[-1:])
            result.verdicts = self._verifier.target_tokens(logits_1V, positions[-1:])
        if taps or result.verdicts is not None:
            self._answer(result, prefill)

    def _report(self, question: Measure) -> None:
        self._pass_on(question, question)
        if question.action == "clear":
            self.timeline.clear()
        else:
            self._answer(Report(json=json.dumps(self.timeline.report())), question)

    def _pass_on(self, message: AnyMessage, cause: AnyMessage) -> None:
        if self.following is not None:
            message.sequence = cause.sequence
            self.following.send(message)

    def _answer(self, message: AnyMessage, cause: AnyMessage) -> None:
        message.sequence = cause.sequence
        self.controller.send(message)
