"""Time spans and peak memory of a process, for time breakdowns and Chrome traces."""

import resource
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch
from greenlet import getcurrent, greenlet

from ..files import Values

MAX_PENDING = 4096
"""Maximum GPU spans waiting to be read."""
MAX_EVENTS = 200_000
WAIT = "wait"
"""Span kind for times when the process can only wait for a message."""

UNFINISHED = "unfinished"
"""Span kind for spans ended by an exception."""

TimelineReport: TypeAlias = Values
"""One process's measurements, as JSON stores them."""


@dataclass
class _Launched:
    """Span with asynchronous GPU work."""

    kind: str
    started: torch.cuda.Event
    ended: torch.cuda.Event
    start: float
    num_rows: int
    inside: "list[_Launched]" = field(default_factory=list)

    def elapsed_s(self) -> float:
        return self.started.elapsed_time(self.ended) / 1e3


class _Open:
    """Finished spans inside each open span of one greenlet, outermost first."""

    def __init__(self) -> None:
        self.launched: list[list[_Launched]] = [[]]
        self.inside_s = [0.0]


class Timeline:
    """Spans in one process, on the machine's monotonic clock.

    A span's seconds exclude spans inside it. Sums are always recorded, single spans only with
    ``traces``. On a GPU the seconds are device time between events, because a host clock would
    count all of the work in the next wait for a result.
    """

    def __init__(
        self, name: str, *, traces: bool = False, device: torch.device | None = None
    ) -> None:
        """``device`` runs the work. None means the CPU."""
        self.name, self.traces = name, traces
        self._is_on_gpu = device is not None and device.type == "cuda"
        self._opens: WeakKeyDictionary[greenlet, _Open] = WeakKeyDictionary()
        self.working_since = 0.0
        """Start time for the current work; 0 while the process waits. ``Watch`` reads it."""
        self.clear()

    @property
    def _open(self) -> _Open:
        # A thread is a greenlet, too.
        return self._opens.setdefault(getcurrent(), _Open())

    def clear(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.counts: dict[str, int] = defaultdict(int)
        self.rows: dict[str, int] = defaultdict(int)
        self.events: list[tuple[str, float, float, int]] = []
        self._pending: list[_Launched] = []

    @contextmanager
    def span(self, kind: str, num_rows: int = 0) -> Iterator[None]:
        start = time.monotonic()
        # Waiting for a peer must not look like a hang of this process.
        self.working_since = 0.0 if kind == WAIT else start
        inside_s = self._open.inside_s
        inside_s.append(0.0)
        launched = self._launch(kind, start, num_rows)
        try:
            yield
        except BaseException:
            # An interrupted span would distort the mean of its kind.
            kind = UNFINISHED
            raise
        finally:
            end = time.monotonic()
            inside = inside_s.pop()
            inside_s[-1] += end - start
            self.working_since = end if len(inside_s) > 1 else 0.0
            if launched is None:
                self._add(kind, start, end, inside, num_rows)
            else:
                self._end(launched, kind)

    def _launch(self, kind: str, start: float, num_rows: int) -> _Launched | None:
        """Record a GPU event at a span's start. Return None if the host measures the time."""
        if not self._is_on_gpu or kind == WAIT:
            return None
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        launched = _Launched(kind, events[0], events[1], start, num_rows)
        self._open.launched.append(launched.inside)
        return launched

    def _end(self, launched: _Launched, kind: str) -> None:
        launched.ended.record()
        launched.kind = kind
        self._open.launched.pop()
        self._open.launched[-1].append(launched)
        self._pending.append(launched)
        if len(self._open.launched) == 1:
            self._open.launched[0].clear()
            # Read in bulk: waiting for the GPU at every span would stall the host.
            if len(self._pending) > MAX_PENDING:
                self._settle()

    def _settle(self) -> None:
        """Wait for the GPU and read its times."""
        if self._pending:
            # Events complete in order on a stream, so the last one covers all.
            self._pending[-1].ended.synchronize()
        for launched in self._pending:
            inside = sum(other.elapsed_s() for other in launched.inside)
            # GPU events give differences alone, so the start is the host's.
            end = launched.start + launched.elapsed_s()
            self._add(launched.kind, launched.start, end, inside, launched.num_rows)
        self._pending = []

    def _add(self, kind: str, start: float, end: float, inside: float, num_rows: int) -> None:
        self.seconds[kind] += end - start - inside
        self.counts[kind] += 1
        self.rows[kind] += num_rows
        if self.traces and len(self.events) < MAX_EVENTS:
            self.events.append((kind, start, end, num_rows))

    def report(self) -> TimelineReport:
        self._settle()
        return {
            "name": self.name,
            "seconds": dict(self.seconds),
            "counts": dict(self.counts),
            "rows": dict(self.rows),
            # Linux reports KiB.
            "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "events": self.events,
        }


def chrome_trace(reports: list[TimelineReport]) -> TimelineReport:
    """Return all processes' spans for chrome://tracing or Perfetto, one track each."""
    starts = [start for report in reports for _, start, _, _ in report["events"]]
    origin = min(starts, default=0.0)
    events: list[TimelineReport] = []
    for track, report in enumerate(reports):
        name = {"name": report["name"]}
        events.append({"ph": "M", "name": "process_name", "pid": track, "args": name})
        events += [
            {
                "ph": "X",
                "name": kind,
                "pid": track,
                "tid": 0,
                # Chrome traces are in microseconds.
                "ts": (start - origin) * 1e6,
                "dur": (end - start) * 1e6,
                "args": {"rows": num_rows},
            }
            for kind, start, end, num_rows in report["events"]
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}
