"""Ranks, which are processes that each run a stage of a target or control the pipeline."""

import os
import signal

SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
"""Signals that end a rank, or a command with ranks."""


def is_launched() -> bool:
    """Return True if a launcher started this process as one of several."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
