"""Ranks: a process for each stage of a target."""

import os
import signal

SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
"""That end a rank, and a command that has ranks."""


def is_launched() -> bool:
    """Whether a launcher made this process one of several."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
