"""Ends this process, with one line, when it or another rank can no longer do its part.

A thread of its own looks after signals, the other ranks' signs of life, this rank's own progress,
and the launcher. A stage waits in C++ for messages that may never come, so nothing here needs the
main thread: the process is left at once, with the line on stderr and status 1.
"""

import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from pipedraft.inference.process.link import Receiver, Sender
from pipedraft.inference.timeline import Timeline

SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
BEAT_S = 0.25
FAILED_KEY = "pipedraft/failed"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds until something counts as failed; all below the 10 s in which every rank ends."""

    silence_s: float = 5.0
    """Without a sign of life of a rank."""
    undelivered_s: float = 5.0
    """After a rank says it sent a message that did not come."""
    step_s: float = 8.0
    """One forward pass of a stage or of the draft. Raise it for targets that need longer."""


@dataclass
class Watch:
    """``start`` it before torch makes threads: they inherit the blocked signals."""

    rank: int
    world_size: int
    names: list[str]
    """Of every rank, as "stage 0"; in messages."""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        self.timeline: Timeline | None = None
        self.sent: list[Sender] = []
        self.received: list[Receiver] = []
        self._parent = os.getppid()
        self._beats = 0
        self._seen: dict[int, tuple[int, float]] = {}
        self._late: dict[Receiver, tuple[int, float]] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="watch")

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.names[self.rank]})"

    def start(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        self.store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=self.limits.silence_s),
        )
        self._thread.start()

    def stop(self) -> None:
        """The work is done: other ranks may leave in any order now."""
        self._stopping.set()
        self._thread.join()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def fail(self, reason: str) -> NoReturn:
        """Say why, tell the other ranks, and leave."""
        line = f"{self.name}: {reason}"
        print(f"error: {line}", file=sys.stderr, flush=True)
        self.announce(line)
        os._exit(1)

    def announce(self, line: str) -> None:
        """Let every other rank end."""
        with suppress(RuntimeError):  # the store may be what failed
            self.store.set(FAILED_KEY, line)

    def _run(self) -> None:
        while not self._stopping.is_set():
            received = signal.sigtimedwait(SIGNALS, BEAT_S)
            if received is not None:
                self.fail(f"ended by {signal.Signals(received.si_signo).name}")
            if self._stopping.is_set():
                return
            if os.getppid() != self._parent:
                self.fail("its launcher is gone")
            self._check_step()
            try:
                self._check_others()
            except RuntimeError as error:
                if not self._stopping.is_set():
                    first = str(error).strip().splitlines()[0]
                    self.fail(f"lost the store of the launch ({first})")

    def _check_step(self) -> None:
        since = self.timeline.working_since if self.timeline is not None else 0.0
        elapsed = time.monotonic() - since
        if since and elapsed > self.limits.step_s:
            self.fail(
                f"one forward pass runs for {elapsed:.0f} s; the limit is {self.limits.step_s:g} s "
                "(--step-timeout)"
            )

    def _check_others(self) -> None:
        self._beats += 1
        sent = {f"{link.peer}:{link.channel}": link.num_sent for link in self.sent}
        beat = {"beats": self._beats, "sent": sent}
        self.store.set(f"pipedraft/beat/{self.rank}", json.dumps(beat))
        if self.store.check([FAILED_KEY]):
            cause = self.store.get(FAILED_KEY).decode()
            if not cause.startswith(self.name):
                print(f"error: {self.name}: stopped, because {cause}", file=sys.stderr, flush=True)
                os._exit(1)
        now = time.monotonic()
        for rank in range(self.world_size):
            key = f"pipedraft/beat/{rank}"
            if rank == self.rank or not self.store.check([key]):
                continue
            beat = json.loads(self.store.get(key))
            beats, since = self._seen.get(rank, (-1, now))
            if beat["beats"] != beats:
                self._seen[rank] = (beat["beats"], now)
            elif now - since > self.limits.silence_s:
                self.fail(f"rank {rank} ({self.names[rank]}) is silent for {now - since:.0f} s")
            self._check_delivery(rank, beat["sent"], now)

    def _check_delivery(self, rank: int, sent: dict[str, int], now: float) -> None:
        for link in self.received:
            if link.peer != rank:
                continue
            num_sent = sent.get(f"{self.rank}:{link.channel}", 0)
            missing = link.num_received + 1 if link.num_received < num_sent else 0
            number, since = self._late.get(link, (0, now))
            if not missing or number != missing or link.has_arrived():
                self._late[link] = (missing, now)
            elif now - since > self.limits.undelivered_s:
                self.fail(
                    f"message {missing} of rank {rank} ({self.names[rank]}) did not come in "
                    f"{now - since:.0f} s"
                )
