"""Detect other work on the machine, because it distorts measured times. Imports no torch."""

import os
import sys
from contextlib import suppress
from pathlib import Path


def load_average() -> float | None:
    """Return the machine's load average over one minute, or None on Windows.

    The average still counts work that has just ended, such as a training run before an evaluation.
    So on Linux the result is at most the number of threads that run now.
    """
    if sys.platform == "win32":
        return None
    average = os.getloadavg()[0]
    with suppress(OSError, ValueError, IndexError):
        running = Path("/proc/loadavg").read_text().split()[3].partition("/")[0]
        return min(average, float(running))
    return average


def is_busy(load: float | None, num_cores: int | None) -> bool:
    """Return True if the load exceeds the core count by more than 10 %."""
    return load is not None and num_cores is not None and load > 1.1 * num_cores
