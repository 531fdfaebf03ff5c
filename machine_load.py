"""The machine's other work, which makes measured times doubtful. Imports no torch."""

import os
import sys


def load_average() -> float | None:
    """Return the machine's load average over one minute; None on Windows, which has none."""
    return None if sys.platform == "win32" else os.getloadavg()[0]


def is_busy(load: float | None, num_cores: int | None) -> bool:
    """Return True if more processes wanted to run than the machine has cores."""
    return load is not None and num_cores is not None and load > 1.1 * num_cores
