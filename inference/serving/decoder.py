"""Decoder for all clients' sequences. It connects requests to the engine."""

from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from functools import partial
from logging import getLogger

from ...models.target import StagedTarget
from ..batch import BatchEngine, BatchLimits
from ..engine import Engine
from ..ranks.links import LostLink
from ..result import DecodeResult
from .answers import Choice
from .options import HttpLimits

log = getLogger(__name__)
USUAL_S = 1.0
"""Assumed seconds per sequence before the first measurement."""


class SequenceDecoder:
    """Decoder for choices that share the pipeline's steps. A failing choice ends alone.

    A submitted choice's tokens and its end are reported on other threads.
    """

    def __init__(self, engine: Engine, limits: HttpLimits) -> None:
        self.engine, self.capacity = engine, limits.max_sequences
        self.base = engine.config
        self.failure: Exception | None = None
        """Reason why decoding has stopped, or None while it runs."""
        self.on_failure: Callable[[], object] = lambda: None
        self._usual_s = USUAL_S
        shared = BatchLimits(
            sequences=limits.max_sequences,
            kv_bytes=limits.max_cache_mb * 2**20,
            waiting=limits.max_waiting + limits.max_sequences,
        )
        assert isinstance(engine.target, StagedTarget)
        self.batch = BatchEngine(
            engine.target.model,
            engine.tokenizer,
            engine.config,
            engine.draft,
            limits=shared,
            connect=lambda _: engine.pipeline,
        )
        self._running = self.batch.running()
        self._running.__enter__()

    @property
    def wait_s(self) -> float:
        """Return a new sequence's estimated waiting time, based on earlier sequences."""
        return self._usual_s * (self.batch.num_waiting + 1) / self.capacity

    def submit(self, choice: Choice) -> None:
        """Start decoding a choice, or raise RuntimeError if decoding has stopped."""
        try:
            handle = self.batch.submit(choice.prompt_ids, choice.config, observer=choice)
        except RuntimeError as error:
            self._fail(error)
            raise
        choice.handle = handle
        # After the handle is set: the callback may run at once, and clears it.
        handle.future.add_done_callback(partial(self._end, choice))

    def cancel(self, choice: Choice) -> None:
        """End a running or waiting choice."""
        choice.is_cancelled = True
        # Read once: the decoding thread may clear it at any moment.
        if (handle := choice.handle) is not None:
            self.batch.cancel(handle)

    def close(self) -> None:
        """End all sequences, and stop decoding."""
        self._running.__exit__(None, None, None)

    def _end(self, choice: Choice, future: "Future[DecodeResult]") -> None:
        choice.handle = None  # avoids a reference cycle
        error = CancelledError() if future.cancelled() else future.exception()
        if error is None:
            result = future.result()
            # A running mean: loads and lengths of outputs change.
            self._usual_s += 0.2 * (choice.last_s - choice.started_s - self._usual_s)
            choice.end(result)
        elif isinstance(error, CancelledError):
            choice.end(None)
        else:
            if isinstance(error, LostLink):
                self._fail(error)  # the server ends with it
            else:
                log.error("a sequence ended", exc_info=error)
            choice.end(None, error)

    def _fail(self, error: Exception) -> None:
        self.failure = error
        self.on_failure()
