"""Watchdog thread of a rank. It exits the process with a one-line reason if any rank fails.

The thread checks signals, this rank's progress and the launcher. With rank 0 it exchanges beats and
failures, and rank 0 passes the first failure on. The main thread may wait in C++ for messages that
never arrive, so the watchdog does not depend on it.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

import torch.distributed as dist
import zmq

from ..timeline import Timeline
from . import LAUNCHER_VARIABLE, SIGNALS, TOKEN_VARIABLE
from .codec import CODEC, MAX_LINE, Beat, Cancel, Cause, CloseRanks
from .links import LostLink, is_out_of_memory
from .mail import Mail

ADVICE = (
    "; give that rank a --rank-host and a --rank-port that this machine reaches, and all ranks the "
    f"same ${TOKEN_VARIABLE}"
)
BEAT_S = 0.25
SILENCE_S = 7.0
"""Longest time without a message from a rank. TCP sends again 3.9 s after the start of an outage of
3 s, so a launch outlives this one."""
STEP_S = 8.0
"""Longest forward pass in a stage or the draft. Every rank ends within 10 s of a failure."""
REPEAT_S = 1.0
"""Signals repeated within this time count once, as terminal and launcher both send Ctrl-C."""
TELL_S = 1.0
"""Time in which another rank's failure may explain what this rank has found."""


class Watch:
    """Watchdog for one rank.

    Call ``start`` before torch creates threads, because these inherit the blocked signals.
    """

    def __init__(self, rank: int, world_size: int, step_s: float, timeline: Timeline) -> None:
        """``step_s``: limit for a forward pass. Above the default, it also limits silence."""
        self.rank, self.world_size, self.timeline = rank, world_size, timeline
        self.step_s, self.silence_s = step_s, step_s if step_s > STEP_S else SILENCE_S
        self.names = ["starting"] * world_size
        """Every rank's name for messages, such as "stage 0"."""
        self.mail: Mail | None = None
        """Set once this rank dials the others. From then on, only this thread uses ``control``."""
        self.on_signal: Callable[[], object] | None = None
        """Called in this thread on SIGTERM and Ctrl-C, instead of ending all ranks."""
        self.on_cancel: Callable[[Cancel], object] = lambda cancel: None
        """Called in this thread."""
        self.met = threading.Event()
        """Set once all ranks are connected."""
        self._parent = int(os.environ.get(LAUNCHER_VARIABLE) or os.getppid())
        self._notified_s = -REPEAT_S
        self._heard: dict[int, float] = {}
        """Time of the last message from each rank."""
        self._cause, self._due_s = "", 0.0
        """Why this rank ends all others, and when it acts on that."""
        self._is_closing = self._is_over = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def name(self) -> str:
        return self.name_of(self.rank)

    def name_of(self, rank: int) -> str:
        return f"rank {rank} ({self.names[rank]})"

    def start(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        self._thread.start()

    def stop(self, cause: Cause | None = None) -> None:
        """End this thread: rank 0 lets the others go, and they wait for it. A cause ends all."""
        is_last = not self.rank and cause is None
        self._is_closing, self._is_over = True, self._is_over or is_last or cause is not None
        self._thread.join()
        if self.mail is not None:
            if is_last or cause is not None:
                self.mail.send_control(cause or CloseRanks())
            if is_last:
                self._await_goodbyes(self.mail.sockets["control"])
            self.mail.close()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def _await_goodbyes(self, control: zmq.Socket[bytes]) -> None:
        # If a beat reaches a closed connection, the system drops what is still on its way back.
        left = set(self._heard)
        while left and control.poll(int(1000 * self.silence_s)):
            sender, frame = control.recv_multipart()
            if isinstance(CODEC.decode(frame), CloseRanks):
                left.discard(int(sender))

    def fail(self, reason: str) -> NoReturn:
        """Notify the other ranks, report the reason (or another rank's earlier one) and exit."""
        self._note(reason)
        while True:  # until this object's thread ends the process
            time.sleep(TELL_S)

    def fail_with(self, error: BaseException) -> NoReturn:
        """Call ``fail`` for an error not caused by the user."""
        self.fail(self._describe(error))

    def _describe(self, error: BaseException) -> str:
        text = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, LostLink):
            return f"lost {self.name_of(error.peer)}: {text}"
        if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
            return f"lost the store of the launch ({str(error).strip().splitlines()[0]})"
        if is_out_of_memory(error):
            return (
                f"out of memory ({text}); put fewer stages on this machine, give this one fewer "
                "layers (--boundaries), or lower --max-new-tokens"
            )
        return f"{type(error).__name__}: {text}"

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_over:
            try:
                self._look_here()
                self._look_around()
            except Exception as error:  # without this thread, the rank might never end
                self._note(self._describe(error))
            self._act()

    def _note(self, reason: str, wait_s: float = 0.0) -> None:
        """Record a failure, and end all ranks in ``wait_s`` unless another one explains it."""
        now = time.monotonic()
        if not self._cause or (not wait_s and now < self._due_s):
            self._cause = f"{self.name}: {reason}"[:MAX_LINE]
            self._due_s = now + wait_s

    def _act(self) -> None:
        """Tell this rank's failure to the others, if it is due, and exit."""
        if self._cause and time.monotonic() >= self._due_s:
            with suppress(Exception):  # any of these may have caused this rank's exit
                if self.mail is not None:
                    self.mail.send_control(Cause(line=self._cause))
            self._leave(self._cause)

    def _leave(self, line: str) -> NoReturn:
        try:
            print(f"error: {line}", file=sys.stderr, flush=True)
            if self.mail is not None:
                self.mail.flush_control()
        finally:
            # Not sys.exit: the main thread may be in C++ and would never unwind.
            os._exit(1)

    def _look_here(self) -> None:
        # No timeout: after a longer stop (Ctrl-Z, a debugger), Python makes up a signal from
        # uninitialized memory.
        received = signal.sigtimedwait(SIGNALS, 0)
        is_end = received is not None and received.si_signo != signal.SIGHUP
        if is_end and self.on_signal is not None:
            if time.monotonic() - self._notified_s > REPEAT_S:
                self.on_signal()
            self._notified_s = time.monotonic()
        elif received is not None:
            # A launcher ends all ranks if one is gone. Wait: this rank may find the cause.
            self._note(f"ended by {signal.Signals(received.si_signo).name}", TELL_S)
        # A killed launcher sends no signal; its children get another parent.
        if os.getppid() != self._parent:
            self._note("its launcher is gone")
        since = self.timeline.working_since
        elapsed = time.monotonic() - since
        if since and elapsed > self.step_s:
            self._note(
                f"one forward pass runs for {elapsed:.0f} s; the limit is {self.step_s:g} s "
                "(--step-timeout)"
            )

    def _look_around(self) -> None:
        """Exchange messages for ``BEAT_S``."""
        until_s = time.monotonic() + BEAT_S
        if self.mail is None:
            time.sleep(BEAT_S)
            return
        is_connected = not self.mail.pending
        if is_connected and (self.rank or len(self._heard) == self.world_size - 1):
            self.mail.send_control(Beat())
            if not self.rank:
                self.met.set()
        poller = zmq.Poller()
        for socket in self.mail.watched():
            poller.register(socket, zmq.POLLIN)
        left_s, ready = BEAT_S, True
        # All of them, or a rank would look silent whose beats are only unread.
        while (left_s > 0 or ready) and not self._is_over:
            left_s = until_s - time.monotonic()
            found = poller.poll(max(0, int(1000 * left_s)))
            for socket, _ in found:
                self._take(self.mail, socket)
            ready = bool(found)
        for rank, heard_s in self._heard.items():
            # Time in which this process itself was stopped does not count.
            self._heard[rank] = heard_s = heard_s + max(0, -left_s)
            silence_s = time.monotonic() - heard_s
            if silence_s > self.silence_s:
                self._note(f"{self.name_of(rank)} is silent for {silence_s:.0f} s")

    def _take(self, mail: Mail, socket: zmq.Socket[bytes]) -> None:
        if socket in mail.dials:
            advice = ADVICE if socket in mail.pending else ""
            kind, peer, endpoint = mail.dials[socket]
            # At the end, rank 0 alone says when the others may leave.
            if mail.is_lost(socket) and (kind == "control" or not self._is_closing):
                reason = f"lost {self.name_of(peer)}: no connection to {endpoint}{advice}"
                self._note(reason, TELL_S)
            return
        *sender, frame = socket.recv_multipart()
        rank = int(sender[0]) if sender else 0
        match CODEC.decode(frame):
            case Beat():
                self._heard[rank] = time.monotonic()
                if self.rank:
                    self.met.set()
            case Cancel() as cancel:
                self.on_cancel(cancel)
            case CloseRanks():
                mail.send_control(CloseRanks())
                self._is_over = True
            case Cause() as cause:
                self._follow(mail, cause)

    def _follow(self, mail: Mail, cause: Cause) -> NoReturn:
        """Exit because of the first failure in the launch."""
        if not self.rank:
            mail.send_control(cause)
        if not cause.line:
            mail.flush_control()
            os._exit(2)  # the other rank says it
        self._leave(f"{self.name}: stopped, because {cause.line}")
