"""A target elsewhere: over ranks, one for each stage, or on a server."""

import hmac
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass

SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
"""That end a rank, and a command that has ranks."""
KEY = "PIPEDRAFT_JOB_KEY"
"""Environment variable: a secret that the ranks of a launch share."""


def is_launched() -> bool:
    """Whether a launcher made this process one of several."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def sign(name: str, value: str) -> str:
    """Signed value for ``name`` in the launch's store, which anybody who reaches it can write.

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


def address_of(host: str, port: int) -> str:
    """HOST:PORT; an IPv6 address in brackets, with or without which it may be given."""
    return f"[{host.strip('[]')}]:{port}" if ":" in host else f"{host}:{port}"


def find_token(authorization: bytes, tokens: Sequence[str]) -> int | None:
    """Place of the token that an Authorization header bears; None: it bears none of them."""
    # All are compared, so that the time says nothing of which.
    same = [hmac.compare_digest(authorization, f"Bearer {token}".encode()) for token in tokens]
    return same.index(True) if any(same) else None


LARGEST = {"sessions": 2**20, "message_bytes": 2**30}
"""Of ``ServerLimits``: what gRPC takes."""


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """What a server allows its clients."""

    sessions: int = 64
    """At once, those without a stream included."""
    client_sessions: int = 32
    """At once of one client: of a token where there are several, else of an address."""
    messages_s: float = 1000.0
    """Messages of a stream that are read in a second; further ones wait."""
    prompt_tokens: int = 4096
    new_tokens: int = 2048
    """Of a session's output."""
    cache_bytes: int = 4 * 2**30
    """Keys and values of all sessions at their longest."""
    message_bytes: int = 2**20
    """Of one message from an edge."""
    idle_s: float = 60.0
    """A session expires when its edge has been silent, or away, for so long."""
    session_s: float = 900.0
    """A session ends after this time, whatever it does."""
    grace_s: float = 10.0
    """For open sessions once the server is told to end."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            most = LARGEST.get(name, 2.0**62)
            if not 0 < value <= most:
                raise ValueError(f"{name}: {value}; give a number above 0 and up to {most:g}")
