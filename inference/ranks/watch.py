"""Watchdog threads of a rank. They exit the process with a one-line reason if any rank fails.

One thread checks signals, this rank's progress and the launcher. Another exchanges heartbeats with
the other ranks through the launch's store. A stage may wait in C++ for messages that never arrive,
and a store request may hang. So neither thread depends on the main thread or on the other one.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NoReturn, Self, TypeAlias

import msgspec
import torch.distributed as dist

from ..timeline import Timeline
from . import SIGNALS
from .links import LostLink, Receiver, Sender, is_out_of_memory

CONNECT_TIMEOUT = timedelta(seconds=60)
"""Longest wait for the other ranks, which start at the same time."""
BEAT_S = 0.25
REPEAT_S = 1.0
"""Signals repeated within this time count once, as terminal and launcher both send Ctrl-C."""
TELL_S = 1.0
"""Time to send this rank's reason to the others."""
FAILED_KEY, BAD_INPUT = "pipedraft/failed", "bad input"


@dataclass(frozen=True, kw_only=True)
class WatchLimits:
    """Failure timeouts in seconds. The defaults let every rank end within 10 s of a failure."""

    silence_s: float = 5.0
    """Longest time without a heartbeat from a rank, or an answer from the launch's store."""
    undelivered_s: float = 5.0
    """Longest time between a rank's report of a sent message and the message's arrival."""
    step_s: float = 8.0
    """Longest forward pass in a stage or the draft. Raise it for slower targets."""

    @classmethod
    def of_step(cls, step_s: float) -> Self:
        """Build limits from a step limit. A value above the default also sets the other limits."""
        if step_s <= cls.step_s:
            return cls(step_s=step_s)
        return cls(step_s=step_s, silence_s=step_s, undelivered_s=step_s)


Beat: TypeAlias = tuple[int, dict[str, int]]
"""Number of a rank's heartbeat, and the messages sent so far on each link "peer:channel"."""


@dataclass
class Watch:
    """Watchdog for one rank.

    Call ``start`` before torch creates threads, because these inherit the blocked signals.
    """

    rank: int
    world_size: int
    names: list[str]
    """Every rank's name for messages, such as "stage 0"."""
    limits: WatchLimits = field(default_factory=WatchLimits)

    def __post_init__(self) -> None:
        self.timeline: Timeline | None = None
        self.on_signal: Callable[[], object] | None = None
        """Called in a thread on SIGTERM and Ctrl-C, instead of ending all ranks."""
        self.sent: list[Sender] = []
        self.received: list[Receiver] = []
        self._parent = os.getppid()
        self._beats = 0
        self._seen: dict[int, tuple[int, float]] = {}
        self._late: dict[Receiver, tuple[int, float]] = {}
        self._failure = ""
        """Reason to send to the other ranks."""
        self._wake, self._notified = threading.Event(), threading.Event()
        self._stopping = threading.Event()
        self._failing = threading.Lock()
        self._inward, self._outward = (
            threading.Thread(target=self._see_through, args=(loop,), daemon=True)
            for loop in (self._look_here, self._look_around)
        )

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.names[self.rank]})"

    def start(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        # A separate client: its hanging request does not block the process group's requests.
        self.store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=CONNECT_TIMEOUT,
        )
        # Set only after connecting, which may take longer while other ranks import torch.
        self.store.set_timeout(timedelta(seconds=self.limits.silence_s))
        self._answered = time.monotonic()
        self._inward.start()
        self._outward.start()

    def stop(self) -> None:
        """Stop watching, so other ranks may exit in any order."""
        self._stopping.set()
        self._wake.set()
        self._inward.join()
        # With a limit: if the store is gone, this thread may hang in a request to it.
        self._outward.join(TELL_S)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def fail(self, reason: str) -> NoReturn:
        """Notify the other ranks, report the reason (or another rank's earlier one) and exit."""
        self._failing.acquire()  # held forever: later findings by other threads are dropped
        line = f"{self.name}: {reason}"
        self.announce(line)
        self._leave(line)

    def fail_with(self, error: BaseException) -> NoReturn:
        """Call ``fail`` for an error not caused by the user."""
        text = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, LostLink):
            self.fail(f"lost rank {error.peer} ({self.names[error.peer]}): {text}")
        if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
            first = str(error).strip().splitlines()[0]
            self.fail(f"lost the store of the launch ({first})")
        if is_out_of_memory(error):
            self.fail(
                f"out of memory ({text}); put fewer stages on this machine, give this one fewer "
                "layers (--boundaries), or lower --max-new-tokens"
            )
        self.fail(f"{type(error).__name__}: {text}")

    def announce(self, line: str) -> None:
        """Tell every other rank to end, and give ``line`` as the reason."""
        self._failure = line
        if threading.current_thread() is self._outward:
            # Any of these may have caused this rank's exit.
            with suppress(RuntimeError, MemoryError, ConnectionError):
                self._exchange_causes()
        else:
            self._wake.set()
            self._notified.wait(TELL_S)

    def _leave(self, line: str) -> NoReturn:
        try:
            print(f"error: {line}", file=sys.stderr, flush=True)
        finally:
            # Not sys.exit: the main thread may be in C++ and would never unwind.
            os._exit(1)

    def _see_through(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except (RuntimeError, MemoryError, ConnectionError, ValueError) as error:
            if not self._stopping.is_set():
                self.fail_with(error)

    def _look_here(self) -> None:
        notified_s = -REPEAT_S
        while not self._stopping.is_set():
            # No timeout: after a longer stop (Ctrl-Z, a debugger), Python makes up a signal from
            # uninitialized memory.
            received = signal.sigtimedwait(SIGNALS, 0)
            if received is None:
                self._stopping.wait(BEAT_S)
            is_end = received is not None and received.si_signo != signal.SIGHUP
            if is_end and self.on_signal is not None:
                if time.monotonic() - notified_s > REPEAT_S:
                    self.on_signal()
                notified_s = time.monotonic()
            elif received is not None:
                # A launcher ends all ranks if one is gone. Wait: this rank may find the cause.
                time.sleep(BEAT_S)
                self.fail(f"ended by {signal.Signals(received.si_signo).name}")
            if self._stopping.is_set():
                return
            # A killed launcher sends no signal; its children get another parent.
            if os.getppid() != self._parent:
                self.fail("its launcher is gone")
            self._check_step()
            silence = time.monotonic() - self._answered
            if silence > self.limits.silence_s:
                self.fail(f"lost the store of the launch: no answer in {silence:.0f} s")

    def _look_around(self) -> None:
        while not self._stopping.is_set():
            self._exchange_causes()
            self._check_others()
            self._answered = time.monotonic()
            self._wake.wait(BEAT_S)
            self._wake.clear()

    def _check_step(self) -> None:
        since = self.timeline.working_since if self.timeline is not None else 0.0
        elapsed = time.monotonic() - since
        if since and elapsed > self.limits.step_s:
            self.fail(
                f"one forward pass runs for {elapsed:.0f} s; the limit is {self.limits.step_s:g} s "
                "(--step-timeout)"
            )

    def _exchange_causes(self) -> None:
        """Publish this rank's failure, if any. Exit if another rank failed first."""
        # compare_set is atomic: of several failures at once, all ranks report the same first one.
        cause = self.store.compare_set(FAILED_KEY, "", self._failure).decode(errors="replace")
        if cause and not cause.startswith(f"rank {self.rank} ("):
            if cause.endswith(BAD_INPUT):
                os._exit(2)  # the other thread reports it
            self._leave(f"{self.name}: stopped, because {cause}")
        if cause:
            self._notified.set()

    def _check_others(self) -> None:
        self._beats += 1
        sent = {f"{link.peer}:{link.channel}": link.num_sent for link in self.sent}
        beat = msgspec.json.encode((self._beats, sent)).decode()
        self.store.set(f"pipedraft/beat/{self.rank}", beat)
        now = time.monotonic()
        for rank in range(self.world_size):
            key = f"pipedraft/beat/{rank}"
            if rank == self.rank or not self.store.check([key]):
                continue
            beats, sent = msgspec.json.decode(self.store.get(key), type=Beat)
            seen, since = self._seen.get(rank, (-1, now))
            # Counts, not times: the clocks of two machines may differ.
            if beats != seen:
                self._seen[rank] = (beats, now)
            elif now - since > self.limits.silence_s:
                self.fail(f"rank {rank} ({self.names[rank]}) is silent for {now - since:.0f} s")
            self._check_delivery(rank, sent, now)

    def _check_delivery(self, rank: int, sent: dict[str, int], now: float) -> None:
        for link in self.received:
            if link.peer != rank:
                continue
            num_sent = sent.get(f"{self.rank}:{link.channel}", 0)
            # The sender counts before it posts, so a broken link shows as a missing message.
            missing = link.num_received + 1 if link.num_received < num_sent else 0
            number, since = self._late.get(link, (0, now))
            # An arrived but unread message means a busy rank, not a broken link.
            if not missing or number != missing or link.has_arrived():
                self._late[link] = (missing, now)
            elif now - since > self.limits.undelivered_s:
                self.fail(
                    f"message {missing} of rank {rank} ({self.names[rank]}) did not come in "
                    f"{now - since:.0f} s"
                )
