"""Plain decoding on a pipelined target: one token travels through all stages, then the next."""

from typing import Any


def autoregressive(session: Any) -> None:
    while not session.done:
        session.inject()
        while (returned := session.step()) is None:
            pass
        session.resolve(returned)
