"""Detect other work on the machine, because it distorts measured times. Imports no torch."""

import os
import sys


def load_average() -> float | None:
    """Return the machine's load average over one minute, or None on Windows."""
    return None if sys.platform == "win32" else os.getloadavg()[0]


def is_busy(load: float | None, num_cores: int | None) -> bool:
    """Return True if the load exceeds the core count by more than 10 %."""
    return load is not None and num_cores is not None and load > 1.1 * num_cores
