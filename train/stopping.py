"""How a run ends before its last step: a signal, the time limit, no better score any more.

Every process of a run has to leave at the same step. Each adds its own wishes, as zeros and ones,
to the sums that all processes exchange at the end of a step, so that all see the same ones.
"""

import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

REPEAT_S = 2.0
"""Launchers pass on a Ctrl-C that the terminal has already sent to every process: one within this
time is the same one."""


GO_ON = "everything is saved, the same command goes on from here"


@dataclass(frozen=True)
class Stop:
    reason: str
    status: int = 0
    """Exit status: 128 + the number of the signal, 0 for an end that was configured."""


class Stopping:
    """What asks this run to end. SIGTERM and SIGINT are noted, and end the run after its step."""

    def __init__(self, *, max_minutes: float | None, started: float) -> None:
        """
        Args:
            started: ``time.monotonic()`` that ``max_minutes`` count from.
        """
        self.max_minutes, self.started = max_minutes, started
        self.received: int | None = None
        self.received_at = 0.0
        self.agreed: Stop | None = None

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Note signals inside the ``with``. A second one acts as it would without this, and one
        that the process was started to ignore (a background job's SIGINT) stays ignored."""
        found = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        self.previous = {n: handler for n, handler in found.items() if handler != signal.SIG_IGN}
        for number in self.previous:
            signal.signal(number, self._note)
        try:
            yield
        finally:
            self._restore()

    def _restore(self) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self.received_at = number, now
        elif now - self.received_at > REPEAT_S:
            self._restore()
            signal.raise_signal(number)

    def wishes(self) -> dict[str, float]:
        """Of this process; the keys are always the same."""
        minutes = (time.monotonic() - self.started) / 60
        return {
            "stop_sigterm": float(self.received == signal.SIGTERM),
            "stop_sigint": float(self.received == signal.SIGINT),
            "stop_time": float(self.max_minutes is not None and minutes >= self.max_minutes),
        }

    def agree(self, totals: Mapping[str, float]) -> None:
        """Set ``agreed`` from the wishes summed over all processes."""
        if totals["stop_sigterm"]:
            self.agreed = Stop(f"SIGTERM; {GO_ON}", 128 + signal.SIGTERM)
        elif totals["stop_sigint"]:
            self.agreed = Stop(f"SIGINT; {GO_ON}", 128 + signal.SIGINT)
        elif totals["stop_time"]:
            self.agreed = Stop(f"max_minutes {self.max_minutes:g} are over; {GO_ON}")
