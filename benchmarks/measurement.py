"""Measure CPU time, memory and shares of a step's time, with each case in its own process."""

import json
import os
import subprocess
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile, record_function

# The last one silences the profiler's remarks on stderr.
CHILD_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"}


def make_parser(text: str | None) -> ArgumentParser:
    """Return a parser with a script's docstring as verbatim help."""
    return ArgumentParser(description=text, formatter_class=RawDescriptionHelpFormatter)


def measure_apart(*options: str) -> dict[str, Any]:
    """Run the script again with further options and one thread, and return its JSON line."""
    child = subprocess.run(
        [sys.executable, *sys.argv, *options],
        env={**os.environ, **CHILD_ENVIRONMENT},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return json.loads(child.stdout)


def seconds(work: Callable[[], Any]) -> float:
    """Return this process's CPU seconds for ``work``."""
    start = time.process_time()
    work()
    return time.process_time() - start


class ProductRate:
    """Measures this core's GFLOP/s on float32 matrix products, as the maximum over many tries."""

    def __init__(self) -> None:
        self.rows, self.weight = torch.randn(2048, 512), torch.randn(512, 512)
        self.by_blas = 0.0

    def sample(self) -> None:
        work = 2 * self.rows.numel() * len(self.weight) / 1e9
        for _ in range(3):
            blas = work / seconds(lambda: self.rows @ self.weight)
            self.by_blas = max(self.by_blas, blas)


def memory_kb(field: str) -> int:
    """Return VmRSS (resident memory) or VmHWM (its peak), in kB on Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def start_peak() -> int:
    """Set this process's peak memory to the present, and return what is resident, in kB."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory_kb("VmRSS")


def extra_memory_mb(work: Callable[[], Any]) -> float:
    """Return how much peak memory during ``work`` exceeds the memory resident before it."""
    resident_kb = start_peak()
    work()
    return (memory_kb("VmHWM") - resident_kb) / 1024


def breakdown(
    step: Callable[[], Any], parts: Sequence[tuple[str, str]], repeats: int = 5
) -> dict[str, float]:
    """Return each part's share of a step's time, backward included.

    A part's time is the minimum over ``repeats``. A backward operator belongs to the part that
    created it in the forward pass, because autograd gives both the same number.

    Args:
        parts: (label, function to wrap). An operator counts for the innermost part it runs in. If
            the function is "", the label names a ``record_function`` inside the step.
    """
    least: dict[str, float] = defaultdict(lambda: float("inf"))
    with ExitStack() as wrapped:
        for label, name in parts:
            if name:
                wrapped.enter_context(patch(name, _labeled(label, resolve_name(name))))
        for _ in range(repeats):
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                step()
            for label, microseconds in _by_part(profiler.events(), parts).items():
                least[label] = min(least[label], microseconds)
    total = sum(least.values())
    return {label: value / total for label, value in least.items()}


def _labeled(label: str, function: Callable) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        with record_function(label):
            return function(*args, **kwargs)

    return call


def _by_part(events: Any, parts: Sequence[tuple[str, str]]) -> dict[str, float]:
    labels = {label for label, _ in parts}
    part_of_sequence: dict[int, str] = {}
    times: dict[str, float] = defaultdict(float)

    def part(event: Any) -> str:
        while event is not None:
            if event.name in labels:
                return event.name
            if event.name.startswith("autograd::engine"):
                return part_of_sequence.get(event.sequence_nr, "other")
            event = event.cpu_parent
        return "other"

    for event in events:  # forward first: events are sorted by start
        name = part(event)
        if event.sequence_nr >= 0 and not event.name.startswith("autograd::engine"):
            part_of_sequence.setdefault(event.sequence_nr, name)
        times[name] += event.self_cpu_time_total
    return times
