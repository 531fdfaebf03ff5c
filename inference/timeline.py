"""What a process did when: spans for a Chrome trace, sums for the breakdown, its peak memory."""

import resource
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

MAX_EVENTS = 200_000
WAIT = "wait"
"""Kind of the spans in which a process can do nothing but wait for a message."""

UNFINISHED = "unfinished"
"""Kind of the spans that ended with an exception, whatever they were."""

Report: TypeAlias = dict[str, Any]
"""What a process measured, as JSON holds it."""


class Timeline:
    """Spans of one process on the machine's monotonic clock.

    A span's seconds do not contain those of the spans inside it. Sums are always kept; the spans
    themselves only when ``traces``.
    """

    def __init__(self, name: str, *, traces: bool = False) -> None:
        self.name, self.traces = name, traces
        self.working_since = 0.0
        """Start of the work under way; 0 while the process waits. ``Watch`` reads it."""
        self._inside = [0.0]
        """Seconds of finished spans inside each span that is open."""
        self.clear()

    def clear(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.counts: dict[str, int] = defaultdict(int)
        self.rows: dict[str, int] = defaultdict(int)
        self.longest: dict[str, float] = defaultdict(float)
        self.events: list[tuple[str, float, float, int]] = []

    @contextmanager
    def span(self, kind: str, num_rows: int = 0) -> Iterator[None]:
        start = time.monotonic()
        self.working_since = 0.0 if kind == WAIT else start
        self._inside.append(0.0)
        try:
            yield
        except BaseException:
            kind = UNFINISHED
            raise
        finally:
            end = time.monotonic()
            inside = self._inside.pop()
            self._inside[-1] += end - start
            self.working_since = end if len(self._inside) > 1 else 0.0
            self._add(kind, start, end, inside, num_rows)

    def _add(self, kind: str, start: float, end: float, inside: float, num_rows: int) -> None:
        seconds = end - start - inside
        self.seconds[kind] += seconds
        self.counts[kind] += 1
        self.rows[kind] += num_rows
        self.longest[kind] = max(self.longest[kind], seconds)
        if self.traces and len(self.events) < MAX_EVENTS:
            self.events.append((kind, start, end, num_rows))

    def report(self) -> Report:
        return {
            "name": self.name,
            "seconds": dict(self.seconds),
            "counts": dict(self.counts),
            "rows": dict(self.rows),
            "longest_s": dict(self.longest),
            "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "events": self.events,
        }


def chrome_trace(reports: list[Report]) -> Report:
    """Spans of all processes for chrome://tracing or Perfetto; one track each."""
    starts = [start for report in reports for _, start, _, _ in report["events"]]
    origin = min(starts, default=0.0)
    events: list[Report] = []
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
