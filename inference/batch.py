"""Decode several sequences in one pipeline. They can join and leave at any step.

    batch = BatchEngine(target, tokenizer, config, draft)
    with batch.running():                      # steps run on a separate thread
        handle = batch.submit(prompt_ids, on_token=print)
        result = handle.future.result()

Without ``running``, call ``batch.step()`` until it returns False, always on the same thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from greenlet import greenlet

from ..errors import check_ranges
from ..models.heads.draft_calls import DraftCall, asking, make_first
from ..models.target import StagedTarget
from .auto_tree import ShapeMeter
from .batch_clock import BatchClock
from .config import DecodeConfig, check_prompt
from .engine import DraftNetwork, Engine
from .meter import BatchMeter
from .pipelines import Pipeline
from .pipelines.local import LocalPipeline, step_together
from .pipelines.process import ProcessPipeline
from .pipelines.shared import (
    SharedPipeline,
    SharedRanks,
    SharedStages,
    Sharing,
    cache_rows,
    row_bytes,
    step_ranks,
)
from .result import DecodeResult, Observer
from .sources.base import DraftSource
from .timeline import WAIT

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class QueueFull(RuntimeError):
    """The request queue is full."""


@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """Limits for the sequences in the pipeline. Further requests wait in order of arrival."""

    sequences: int = 32
    rows: int = 512
    """Maximum rows per stage and step; sequences beyond it wait for the next step. A single
    sequence may exceed it."""
    prompt_rows: int = 64
    """Maximum number of prompt rows that enter the pipeline per step."""
    kv_bytes: int | None = None
    """Maximum bytes for all sequences' keys and values at full length; None: no limit."""
    waiting: int = 1024
    """Maximum waiting requests."""

    def __post_init__(self) -> None:
        check_ranges(self, dict.fromkeys(vars(self), "[1, inf)"))


@dataclass(eq=False)
class Handle:
    """Request and its outcome."""

    prompt_ids: list[int]
    config: DecodeConfig
    prompt_index: int
    on_token: Callable[[int], None] | None
    observer: Observer | None
    source: DraftSource | None
    kv_bytes: int
    submitted: float
    """Submission time on the virtual clock."""
    future: Future[DecodeResult] = field(default_factory=Future)
    """The result or the sequence's error; CancelledError after ``cancel``."""
    token_ids: list[int] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    """Virtual time of each token, at the end of its step."""
    times_alone: list[float] = field(default_factory=list)
    """Virtual time of each token if the sequence had the pipeline to itself."""
    is_cancelled: bool = False


class _Sequence:
    """Request being decoded in a greenlet of its own, which runs only during ``resume``."""

    def __init__(self, batch: BatchEngine, handle: Handle) -> None:
        self.handle = handle
        self.last_step = self.rests_until = -1
        self.phase: int | None = None
        """Step modulo n at which the sequence's tokens enter while it decodes autoregressively."""
        self.asked: DraftCall | None = None
        """Draft call that the sequence waits for; None: it waits for the next step."""
        self._clock = batch.clock
        self._outcome: DecodeResult | BaseException | None = None
        engine = batch.engine_for(handle, self._wait)
        assert isinstance(engine.pipeline, SharedPipeline)
        self.pipeline = engine.pipeline
        # Rules comparing q with p depend on q's last bits, which depend on other rows in the batch.
        joins_rows = batch.clock.drafts_together and not handle.config.bitwise
        self._greenlet = greenlet(partial(self._decode, engine, joins_rows))

    @property
    def has_ended(self) -> bool:
        return self._greenlet.dead

    def resume(self) -> None:
        """Run the sequence until it asks for a draft forward, waits for the next step, or ends."""
        self._greenlet.switch()

    def end(self, error: BaseException) -> None:
        """End the sequence with an error, unless it has ended already."""
        if not self.has_ended:
            # Raised where the sequence waits, so its cleanup runs.
            self._greenlet.throw(error)

    def tell(self) -> None:
        """Set the future's result or exception."""
        if isinstance(self._outcome, DecodeResult):
            self.handle.future.set_result(self._outcome)
        else:
            self.handle.future.set_exception(self._outcome)

    def _wait(self) -> None:
        self._greenlet.parent.switch()

    def _ask(self, call: DraftCall) -> object:
        """Wait until a draft call has run, alone or with others, and return its outcome."""
        self.asked = call
        try:
            with self.pipeline.timeline.span(WAIT):
                self._wait()
        finally:
            self.asked = None
        return call.outcome()

    def _decode(self, engine: Engine, joins_rows: bool) -> None:
        handle = self.handle
        try:
            with asking(self._ask if joins_rows else None):
                self._outcome = engine.decode(
                    handle.prompt_ids,
                    prompt_index=handle.prompt_index,
                    on_token=self._emit,
                    observer=handle.observer,
                )
        except BaseException as error:
            self._outcome = error.with_traceback(None)  # its frames hold the caches

    def _emit(self, token: int) -> None:
        handle = self.handle
        is_first = not handle.token_ids
        handle.token_ids.append(token)
        # The clock orders sequences by this count to choose those that draft.
        self.pipeline.num_emitted += 1
        handle.times_alone.append(self.pipeline.time_alone)
        self._clock.emitted(self.pipeline, handle.token_times, is_first=is_first)
        if handle.on_token is not None:
            handle.on_token(token)


class BatchEngine:
    """Decodes many prompts at once. Each output is the same as ``Engine`` gives for its prompt.

    Every sequence has its own schedule, settings, seed, token tree and caches. A sequence pauses at
    each step until all sequences wait. Every stage then runs one step for all of them. A sequence
    also pauses at each draft call, so draft forwards from several sequences run as one if their
    rows can be joined. Two runs that submit the same requests at the same steps thus have equal
    outputs, steps and virtual times.

    You may call ``submit`` and ``cancel`` from any thread. ``on_token``, the observer and a
    future's callbacks run on the thread that calls ``step``. They must not block, because every
    sequence waits for them. An error in one of them, or in a sequence's rows, draft or schedule,
    ends only that sequence.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: DecodeConfig,
        draft: DraftNetwork | None = None,
        *,
        limits: BatchLimits | None = None,
        counts_alone: bool = False,
        connect: Callable[[StagedTarget], Pipeline] = LocalPipeline,
    ) -> None:
        """
        Args:
            target: causal LM from ``load_target``.
            config: default for requests. Its stages and cost model apply to all requests.
            counts_alone: draft and measure time as if each sequence were alone in the pipeline
                (for evaluations). Totals over all sequences are then meaningless.
            connect: as in ``Engine``. Sequences can share a ``Cluster``'s ranks, too.
        """
        self.target, self.tokenizer, self.draft = target, tokenizer, draft
        self.limits, self._counts_alone = limits or BatchLimits(), counts_alone
        # A draft may set the stage boundaries; sequences without a draft use them, too.
        boundaries = tuple(getattr(draft, "boundaries", None) or config.boundaries)
        self.config = replace(config, boundaries=boundaries)
        engine = Engine(target, tokenizer, self.config, draft, connect=connect)
        self.config = replace(self.config, boundaries=tuple(engine.target.boundaries))
        self.clock = BatchClock(
            config.cost,
            self.config.boundaries,
            engine.draft_cost,
            drafts_together=draft is not None and _joins_rows(draft),
        )
        self._root, self.timeline = engine.pipeline, engine.pipeline.timeline
        self._meter, self._shapes = BatchMeter(engine.target.num_stages), ShapeMeter()
        self.last_rows: list[list[int]] = []
        """Rows per stage for each sequence in the last step."""
        self._row_bytes = row_bytes(target)
        self._max_positions = engine.target.max_positions
        self._live: list[_Sequence] = []
        self._queue: deque[Handle] = deque()
        self._changed = threading.Condition()
        self._is_closing = False

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    # -- requests ---------------------------------------------------------------------------

    def submit(
        self,
        prompt_ids: list[int],
        config: DecodeConfig | None = None,
        *,
        prompt_index: int = 0,
        on_token: Callable[[int], None] | None = None,
        observer: Observer | None = None,
        source: DraftSource | None = None,
    ) -> Handle:
        """Queue a prompt. Its sequence enters the pipeline at the first step with room for it.

        Args:
            config: as in ``Engine``, with this pipeline's number of stages.
            prompt_index, on_token, observer: as in ``Engine.decode``.
            source: as in ``Engine``, for this sequence alone.

        Raises:
            ValueError: the prompt is too long, or the settings do not match the draft or the
                stages.
            QueueFull: too many requests wait.
            RuntimeError: the batch is closed.
        """
        config = config or self.config
        if config.num_stages != self.config.num_stages:
            raise ValueError(
                f"num_stages: {config.num_stages}, but this pipeline has "
                f"{self.config.num_stages} stages; leave it out"
            )
        # All sequences run on the same stages, so these two cannot differ per request.
        config = replace(config, boundaries=self.config.boundaries, cost=self.config.cost)
        check_prompt(prompt_ids, self._max_positions)
        num_rows = cache_rows(len(prompt_ids), config.max_new_tokens, self._max_positions)
        kv_bytes = num_rows * self._row_bytes
        if self.limits.kv_bytes is not None and kv_bytes > self.limits.kv_bytes:
            raise ValueError(
                f"prompt: {len(prompt_ids)} tokens and {config.max_new_tokens} new ones need "
                f"{kv_bytes} bytes of keys and values, of {self.limits.kv_bytes} for all; shorten "
                "it or lower max_new_tokens"
            )
        handle = Handle(
            list(prompt_ids),
            config,
            prompt_index,
            on_token,
            observer,
            source,
            kv_bytes,
            self.clock.time,
        )
        self.engine_for(handle, lambda: None)  # reject now what cannot be decoded
        with self._changed:
            if self._is_closing:
                raise RuntimeError("the batch is closed; make another one")
            if len(self._queue) >= self.limits.waiting:
                raise QueueFull(f"{len(self._queue)} requests wait, as many as may; try later")
            self._queue.append(handle)
            self._changed.notify_all()
        return handle

    def cancel(self, handle: Handle) -> None:
        """End a sequence before its next step. Do nothing if it has ended already."""
        with self._changed:
            handle.is_cancelled = True
            if handle in self._queue:
                self._queue.remove(handle)
                handle.future.cancel()
            self._changed.notify_all()

    def engine_for(self, handle: Handle, wait: Callable[[], None]) -> Engine:
        def connect(staged: StagedTarget) -> SharedPipeline:
            rows = min(self.limits.prompt_rows, self.limits.rows)
            sharing = Sharing(
                clock=self.clock, wait=wait, counts_alone=self._counts_alone, prompt_rows=rows
            )
            if isinstance(self._root, ProcessPipeline):
                return SharedRanks(self._root, staged, sharing)
            return SharedStages(staged, self.timeline, sharing)

        given, source = (self.target, self.tokenizer, handle.config, self.draft), handle.source
        engine = Engine(*given, source=source, connect=connect)
        if engine.meter is not None:  # one meter for all sequences: they share the time
            engine.meter = self._meter
        engine.shapes = self._shapes
        return engine

    # -- steps ------------------------------------------------------------------------------

    @contextmanager
    def running(self) -> Iterator[BatchEngine]:
        """Run steps on a separate thread until the end of the block, then close the batch."""
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._close_queue()
            thread.join()

    def _run(self) -> None:
        ended_by: BaseException | None = None
        try:
            while not self._is_closing:
                if not self.step():
                    with self._changed:
                        self._changed.wait_for(lambda: self._queue or self._is_closing)
        except BaseException as error:  # delivered through the futures
            ended_by = error
        self.close(ended_by)

    @torch.inference_mode()
    def close(self, error: BaseException | None = None) -> None:
        """End every sequence with this error and reject new ones. ``running`` does it at its end.

        Call it on the thread that calls ``step``.
        """
        self._close_queue()
        for sequence in self._live:
            sequence.end(error or CancelledError())
        self._end_those_done()
        self.clock.settle()

    def _close_queue(self) -> None:
        with self._changed:
            self._is_closing = True
            while self._queue:
                self._queue.popleft().future.cancel()
            self._changed.notify_all()

    @torch.inference_mode()
    def step(self) -> bool:
        """Admit requests and run one step. Return False if no sequence is left to decode."""
        self._admit()
        self._end_those_done()
        for sequence in self._live:
            if sequence.handle.is_cancelled:
                sequence.end(CancelledError())
        self._end_those_done()
        if not self._live:
            self.clock.settle()
            return False
        sequences = self._taking_part()
        pipelines: list[Any] = [sequence.pipeline for sequence in sequences]
        self.clock.begin_step(pipelines)
        started, num_live = time.perf_counter(), len(self._live)
        has_prompt_rows = any(sequence.pipeline.is_prefilling for sequence in self._live)
        # Drafting by waiting sequences overlaps with this step, as much as fits into it.
        for sequence in self._live:
            # Forwards that do not fit make the sequence sit out further steps.
            fit = min(sequence.pipeline.num_waiting_forwards, self.clock.forwards_beside)
            self.clock.drafted(fit, beside=True)
            sequence.pipeline.num_waiting_forwards -= fit
        if isinstance(self._root, ProcessPipeline):
            step_ranks(pipelines)
        else:
            step_together(pipelines)
        self.last_rows = [pipeline.last_rows for pipeline in pipelines]
        for sequence in sequences:
            sequence.last_step = self.clock.num_steps
        self._go_on(sequences)
        self._meter.end_step(
            time.perf_counter() - started, num_live, has_prompt_rows=has_prompt_rows
        )
        self._end_those_done()
        return True

    def _go_on(self, sequences: Sequence[_Sequence]) -> None:
        """Resume sequences until all wait for the next step. Join their draft calls if possible."""
        asking: list[_Sequence] = []
        while sequences:
            for sequence in sequences:
                sequence.resume()
            asking += [sequence for sequence in sequences if sequence.asked is not None]
            calls = [sequence.asked for sequence in asking if sequence.asked is not None]
            if not calls:
                return
            with self.timeline.span("draft"):
                # Calls that cannot be joined with the first wait for their turn.
                made = make_first(calls)
            sequences = [sequence for sequence in asking if sequence.asked in made]
            asking = [sequence for sequence in asking if sequence not in sequences]

    def _admit(self) -> None:
        """Admit requests in order of arrival. A request without room holds back all later ones."""
        while True:
            with self._changed:
                if not self._queue or len(self._live) >= self.limits.sequences:
                    return
                # Full lengths: a sequence let in must never run out of memory later.
                used = sum(sequence.handle.kv_bytes for sequence in self._live)
                if self.limits.kv_bytes and used + self._queue[0].kv_bytes > self.limits.kv_bytes:
                    return
                handle = self._queue.popleft()
                if not handle.future.set_running_or_notify_cancel():
                    continue
            try:
                self._live.append(_Sequence(self, handle))
            except Exception as error:
                handle.future.set_exception(error)
                continue
            self._go_on(self._live[-1:])

    def _taking_part(self) -> list[_Sequence]:
        """Choose the sequences that take part in the next step.

        The least recently served ones come first, and among these, decoding comes before prefill. A
        sequence left out pauses with all of its rows, so its own steps stay the same as alone.
        """
        step = self.clock.num_steps
        totals = [0] * self.clock.num_stages
        chosen: list[_Sequence] = []
        # Prefill last among equals: its rows would delay every token of the others.
        by_turn = sorted(self._live, key=lambda one: (one.last_step, one.pipeline.is_prefilling))
        for sequence in by_turn:
            if sequence.pipeline.num_waiting_forwards or not self._is_due(sequence, step):
                continue
            rows = zip(totals, sequence.pipeline.next_rows, strict=True)
            sums = [total + more for total, more in rows]
            # The first one always runs: a single sequence above the limit would wait forever.
            if chosen and max(sums) > self.limits.rows:
                continue
            # Only now: a sequence that did not fit must not use up room.
            totals = sums
            chosen.append(sequence)
        return chosen

    def _is_due(self, sequence: _Sequence, step: int) -> bool:
        """Return True if a sequence may join this step.

        A new sequence gets the phase (step number modulo n) with the fewest other sequences. With
        ``counts_alone`` all have the same phase, so one pass over a stage's weights serves all.
        """
        n = self.clock.num_stages
        if sequence.phase is None and not sequence.pipeline.is_prefilling:
            taken = [other.phase for other in self._live]
            sequence.phase = min(
                range(1 if self._counts_alone else n),
                key=lambda phase: (taken.count(phase), (phase - step) % n),
            )
            # Python's % is never negative, so this is the next step in the phase.
            sequence.rests_until = step + (sequence.phase - step) % n
            self.clock.live.append(sequence.pipeline)
        # A single sequence need not leave the other phases free.
        return step >= sequence.rests_until or len(self._live) == 1

    def _end_those_done(self) -> None:
        ended = [sequence for sequence in self._live if sequence.has_ended]
        self._live = [sequence for sequence in self._live if not sequence.has_ended]
        for sequence in ended:
            # Before the future is set: its callback may submit the next request.
            self.clock.leave(sequence.pipeline)
            sequence.pipeline.let_go()
            sequence.tell()


def _joins_rows(draft: DraftNetwork) -> bool:
    """Return True if one draft forward can serve several sequences. No CUDA graph can."""
    return getattr(draft, "joins_rows", False) and next(draft.parameters()).device.type == "cpu"
