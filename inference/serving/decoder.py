"""Decodes the sequences of all clients, one after the other, in a thread of its own."""

import threading
from collections import deque
from collections.abc import Callable
from logging import getLogger

import torch

from pipedraft.inference.engine import Engine
from pipedraft.inference.pipelines.local import LocalPipeline
from pipedraft.inference.serving.choice import Choice

log = getLogger(__name__)
USUAL_S = 1.0
"""Time of a sequence before one has been decoded."""


class Decoder:
    """The seam to the engine: a choice goes in by ``submit`` and is told of tokens and its end."""

    capacity = 1
    """Sequences on their way at once."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.base = engine, engine.config
        self.failure: BaseException | None = None
        """Why nothing is decoded any more; in one process only the sequence of a fault ends."""
        self.on_failure: Callable[[], object] = lambda: None
        """Called when nothing is decoded any more."""
        self._usual_s = USUAL_S
        self._waiting: deque[Choice] = deque()
        self._running: Choice | None = None
        self._changed = threading.Condition()
        self._is_closed = False
        # A new thread has its own number of threads to compute with.
        self._num_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._work, name="decoder", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return int(self._running is not None)

    @property
    def wait_s(self) -> float:
        """Until a sequence that came now would begin, by what others took."""
        return self._usual_s * (self.num_waiting + self.num_running) / self.capacity

    def submit(self, choice: Choice) -> None:
        with self._changed:
            self._waiting.append(choice)
            self._changed.notify()

    def cancel(self, choice: Choice) -> None:
        """End it at its next token, or before it begins."""
        choice.is_cancelled = True
        with self._changed:
            was_waiting = choice in self._waiting
            if was_waiting:
                self._waiting.remove(choice)
        if was_waiting:
            choice.end(None)

    def close(self, timeout_s: float = 10.0) -> None:
        """End everything; what is on its way at its next token."""
        with self._changed:
            self._is_closed = True
            left = [*self._waiting, *filter(None, [self._running])]
            self._changed.notify()
        for choice in left:
            self.cancel(choice)
        self._thread.join(timeout_s)

    def _work(self) -> None:
        torch.set_num_threads(self._num_threads)
        while True:
            with self._changed:
                while not (self._waiting or self._is_closed):
                    self._changed.wait()
                if not self._waiting:
                    return
                choice = self._running = self._waiting.popleft()
            self._decode(choice)

    def _decode(self, choice: Choice) -> None:
        choice.start()
        result, failure = None, self.failure
        try:
            if failure is None:
                self.engine.config = choice.config
                result = self.engine.decode(choice.prompt_ids, observer=choice)
        except Exception as error:
            log.exception("a sequence ended")
            failure = error
            if not isinstance(self.engine.pipeline, LocalPipeline):
                self.failure = error
                self.on_failure()
        self._running = None
        choice.end(result, failure if isinstance(failure, Exception) else None)
        self._usual_s += 0.2 * (choice.last_s - choice.started_s - self._usual_s) if result else 0.0
