"""What decodes the sequences of all clients: the narrow seam between requests and the engine."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from logging import getLogger

from pipedraft.inference.batch import BatchEngine, Limits
from pipedraft.inference.engine import Engine
from pipedraft.inference.result import DecodeResult
from pipedraft.inference.serving import HttpLimits
from pipedraft.inference.serving.answers import Choice
from pipedraft.inference.transport.ranks import LostLink
from pipedraft.models.target import StagedTarget

log = getLogger(__name__)
USUAL_S = 1.0
"""Time of a sequence before one has been decoded."""


class Decoder(ABC):
    """A choice goes in by ``submit`` and is told of its tokens and its end, by other threads."""

    def __init__(self, engine: Engine, capacity: int) -> None:
        """``capacity``: sequences on their way at once."""
        self.engine, self.capacity = engine, capacity
        self.base = engine.config
        self.failure: Exception | None = None
        """Why nothing is decoded any more."""
        self.on_failure: Callable[[], object] = lambda: None
        self._usual_s = USUAL_S

    @property
    @abstractmethod
    def num_waiting(self) -> int: ...

    @property
    @abstractmethod
    def num_running(self) -> int: ...

    @property
    def wait_s(self) -> float:
        """Until a sequence that came now would begin, by what others took."""
        return self._usual_s * (self.num_waiting + 1) / self.capacity

    def submit(self, choice: Choice) -> None:
        """Begin to decode one sequence of a request.

        Raises:
            ValueError: what the engine does not decode.
            RuntimeError: nothing is decoded any more.
        """
        self._begin(choice).add_done_callback(partial(self._end, choice))

    def cancel(self, choice: Choice) -> None:
        """End it where it is, or before it begins."""
        choice.is_cancelled = True
        self._cancel(choice)

    @abstractmethod
    def close(self) -> None:
        """End everything."""

    @abstractmethod
    def _begin(self, choice: Choice) -> "Future[DecodeResult]": ...

    @abstractmethod
    def _cancel(self, choice: Choice) -> None: ...

    def _end(self, choice: Choice, future: "Future[DecodeResult]") -> None:
        choice.handle = None  # which leads back to the choice
        error = CancelledError() if future.cancelled() else future.exception()
        if error is None:
            result = future.result()
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


class SharedDecoder(Decoder):
    """Sequences share the pipeline's steps; one that fails ends alone."""

    def __init__(self, engine: Engine, limits: HttpLimits) -> None:
        super().__init__(engine, limits.max_sequences)
        shared = Limits(
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
    def num_waiting(self) -> int:
        return self.batch.num_waiting

    @property
    def num_running(self) -> int:
        return self.batch.num_live

    def close(self) -> None:
        self._running.__exit__(None, None, None)

    def _begin(self, choice: Choice) -> "Future[DecodeResult]":
        try:
            choice.handle = self.batch.submit(choice.prompt_ids, choice.config, observer=choice)
        except RuntimeError as error:
            self._fail(error)
            raise
        return choice.handle.future

    def _cancel(self, choice: Choice) -> None:
        if (handle := choice.handle) is not None:
            self.batch.cancel(handle)


class TurnDecoder(Decoder):
    """One sequence after the other, for a draft that only one of them can have."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, 1)
        self._pool = ThreadPoolExecutor(1)
        self._open: set[Future[DecodeResult]] = set()

    @property
    def num_waiting(self) -> int:
        return len(self._open) - self.num_running

    @property
    def num_running(self) -> int:
        return sum(future.running() for future in list(self._open))

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _begin(self, choice: Choice) -> "Future[DecodeResult]":
        choice.handle = future = self._pool.submit(self._decode, choice)
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        return future

    def _cancel(self, choice: Choice) -> None:
        if (handle := choice.handle) is not None:
            handle.cancel()  # where it has not begun; else it ends at its next token

    def _decode(self, choice: Choice) -> DecodeResult:
        if self.failure is not None:
            raise self.failure
        try:
            self.engine.config = choice.config
            return self.engine.decode(choice.prompt_ids, observer=choice)
        except Exception as error:
            self._fail(error)  # ranks may stand anywhere
            raise
