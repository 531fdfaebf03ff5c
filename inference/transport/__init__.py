"""A pipelined target over processes: one rank for each stage, the controller on rank 0."""

import os


def is_launched() -> bool:
    """Whether a launcher made this process one of several."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
