"""What a process did when: spans for a Chrome trace, sums for the breakdown, its peak memory."""

import resource
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from pipedraft.files import Values

MAX_PENDING = 4096
"""Spans of a GPU that are not read yet."""
MAX_EVENTS = 200_000
WAIT = "wait"
"""Kind of the spans in which a process can do nothing but wait for a message."""

UNFINISHED = "unfinished"
"""Kind of the spans that ended with an exception, whatever they were."""

TimelineReport: TypeAlias = Values
"""What a process measured, as JSON holds it."""


@dataclass
class _Launched:
    """A span whose work a GPU does when it comes to it."""

    kind: str
    started: torch.cuda.Event
    ended: torch.cuda.Event
    start: float
    num_rows: int
    inside: "list[_Launched]" = field(default_factory=list)

    def elapsed_s(self) -> float:
        return self.started.elapsed_time(self.ended) / 1e3


class _Open(threading.local):
    """The spans that are open in a thread, outermost first."""

    def __init__(self) -> None:
        self.launched: list[list[_Launched]] = [[]]
        self.inside_s = [0.0]
        """Seconds of finished spans inside each of them."""


class Timeline:
    """Spans of one process on the machine's monotonic clock.

    A span's seconds do not contain those of the spans inside it. Sums are always kept; the spans
    themselves only when ``traces``. On a GPU the seconds are the device's, between events: the host
    only launches work, and would find the time of all of it where it waits for a result.
    """

    def __init__(
        self, name: str, *, traces: bool = False, device: torch.device | None = None
    ) -> None:
        """``device``: of the work; None: the CPU."""
        self.name, self.traces = name, traces
        self._is_on_gpu = device is not None and device.type == "cuda"
        self._open = _Open()
        self.working_since = 0.0
        """Start of the work under way; 0 while the process waits. ``Watch`` reads it."""
        self.clear()

    def clear(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.counts: dict[str, int] = defaultdict(int)
        self.rows: dict[str, int] = defaultdict(int)
        self.longest: dict[str, float] = defaultdict(float)
        self.events: list[tuple[str, float, float, int]] = []
        self._pending: list[_Launched] = []

    @contextmanager
    def span(self, kind: str, num_rows: int = 0) -> Iterator[None]:
        start = time.monotonic()
        self.working_since = 0.0 if kind == WAIT else start
        self._open.inside_s.append(0.0)
        launched = self._launch(kind, start, num_rows)
        try:
            yield
        except BaseException:
            kind = UNFINISHED
            raise
        finally:
            end = time.monotonic()
            inside = self._open.inside_s.pop()
            self._open.inside_s[-1] += end - start
            self.working_since = end if len(self._open.inside_s) > 1 else 0.0
            if launched is None:
                self._add(kind, start, end, inside, num_rows)
            else:
                self._end(launched, kind)

    def _launch(self, kind: str, start: float, num_rows: int) -> _Launched | None:
        """An event of the GPU at the beginning of a span; None: its time is the host's."""
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
            if len(self._pending) > MAX_PENDING:
                self._settle()

    def _settle(self) -> None:
        """Wait for the GPU and take its times."""
        if self._pending:
            self._pending[-1].ended.synchronize()
        for launched in self._pending:
            inside = sum(other.elapsed_s() for other in launched.inside)
            end = launched.start + launched.elapsed_s()
            self._add(launched.kind, launched.start, end, inside, launched.num_rows)
        self._pending = []

    def _add(self, kind: str, start: float, end: float, inside: float, num_rows: int) -> None:
        seconds = end - start - inside
        self.seconds[kind] += seconds
        self.counts[kind] += 1
        self.rows[kind] += num_rows
        self.longest[kind] = max(self.longest[kind], seconds)
        if self.traces and len(self.events) < MAX_EVENTS:
            self.events.append((kind, start, end, num_rows))

    def report(self) -> TimelineReport:
        self._settle()
        return {
            "name": self.name,
            "seconds": dict(self.seconds),
            "counts": dict(self.counts),
            "rows": dict(self.rows),
            "longest_s": dict(self.longest),
            "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "events": self.events,
        }


def chrome_trace(reports: list[TimelineReport]) -> TimelineReport:
    """Spans of all processes for chrome://tracing or Perfetto; one track each."""
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
                "ts": (start - origin) * 1e6,
                "dur": (end - start) * 1e6,
                "args": {"rows": num_rows},
            }
            for kind, start, end, num_rows in report["events"]
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}
