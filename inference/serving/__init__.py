"""A target and its draft behind an OpenAI-compatible HTTP server; its limits, free of torch."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class HttpLimits:
    """What the server allows its clients."""

    sequences: int = 16
    """Decoded at once."""
    cache_bytes: int = 4 * 2**30
    """Keys and values of all of these at their longest."""
    waiting: int = 64
    """Sequences in the queue; further requests are told when to come again."""
    client_sequences: int = 32
    """Of one client, waiting or decoded: of a key where there are several, else of an address."""
    choices: int = 8
    """Sequences of one request."""
    prompt_tokens: int = 4096
    new_tokens: int = 1024
    """Of one sequence."""
    body_bytes: int = 2**20
    body_s: float = 20.0
    """For a request's body to arrive."""
    request_s: float = 300.0
    """For an answer, the wait in the queue and a slow reader included."""
    grace_s: float = 30.0
    """For open requests once the server is told to end."""
    connections: int = 1024

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value <= 2.0**62:
                raise ValueError(f"{name}: {value}; give a number above 0 and up to {2.0**62:g}")
