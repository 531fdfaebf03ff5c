"""Ranks, which are processes that each run a stage of a target or control the pipeline."""

import os
import signal

SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
"""Signals that end a rank, or a command with ranks."""
STORE_VARIABLE = "PIPEDRAFT_STORE"
"""Descriptor of the listening socket for a launch's store, in the rank that runs the store."""
LAUNCHER_VARIABLE = "PIPEDRAFT_LAUNCHER"
"""Process id of ``run_ranks``: its ranks must not outlive it."""
TOKEN_VARIABLE = "PIPEDRAFT_RANK_TOKEN"
"""Secret of a launch. Without it, rank 0 chooses one and the launch's store passes it on."""


def is_launched() -> bool:
    """Return True if a launcher started this process as one of several."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
