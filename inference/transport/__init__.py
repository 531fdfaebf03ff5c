"""A pipelined target over processes: one rank for each stage, the controller on rank 0."""

import hmac
import os

KEY = "PIPEDRAFT_JOB_KEY"
"""Environment variable: a secret that the ranks of a launch share."""


def is_launched() -> bool:
    """Whether a launcher made this process one of several."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def sign(name: str, value: str) -> str:
    """What to store under ``name`` in the launch's store, which anybody who reaches it can write.

    Without a key in the environment, the value as it is.
    """
    return _signature(name, value) + value


def checked(name: str, stored: bytes) -> str:
    """The value that was given to ``sign``.

    Raises:
        ConnectionError: another key signed it, or none.
    """
    text = stored.decode(errors="replace")
    size = len(_signature(name, ""))
    if not hmac.compare_digest(sign(name, text[size:]).encode(), stored):
        raise ConnectionError(
            f"{name!r} in the store of the launch is not from a rank of it; give every machine the "
            f"same {KEY}, and let nobody else reach the store"
        )
    return text[size:]


def _signature(name: str, value: str) -> str:
    key = os.environ.get(KEY, "").encode()
    return hmac.new(key, f"{name}\0{value}".encode(), "sha256").hexdigest() if key else ""
