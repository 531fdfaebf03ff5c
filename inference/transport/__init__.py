"""A target elsewhere: over ranks, one for each stage, or on a server."""

import hmac
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, fields

from pipedraft.cli import Options, option

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


LARGEST = {"max_sessions": 2**20, "max_cache_mb": 2**42, "max_message_kb": 2**20}
"""Of ``ServerLimits``: what gRPC takes, and counts of bytes below 2 to the 62nd."""


@dataclass(frozen=True, kw_only=True)
class ServerLimits(Options):
    """limits"""

    max_sessions: int = option(64, metavar="N", least=1)
    """open at once"""
    max_client_sessions: int = option(32, metavar="N", least=1)
    """open at once of one client: of a token where --token-file has several, else of an address"""
    max_messages_s: float = option(1000.0, metavar="N", least=1)
    """of one session that are read in a second; further ones wait"""
    max_prompt_tokens: int = option(4096, metavar="N", least=1)
    """of a session"""
    max_new_tokens: int = option(2048, metavar="N", least=1)
    """of a session"""
    max_cache_mb: int = option(4096, metavar="N", least=1)
    """keys and values of all sessions at their longest, in MiB"""
    max_message_kb: int = option(1024, metavar="N", least=1)
    """of one message, in KiB"""
    idle_s: float = option(60.0, metavar="S")
    """after which a silent session expires"""
    session_s: float = option(900.0, metavar="S")
    """after which any session ends"""
    grace_s: float = option(10.0, metavar="S")
    """for open sessions when told to end"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for limit in fields(ServerLimits):
            value, most = getattr(self, limit.name), LARGEST.get(limit.name, 2.0**62)
            if not 0 < value <= most:
                raise ValueError(f"{limit.name}: {value}; give a number above 0 and up to {most:g}")
