"""Speculative decoding with the draft on an edge device and the target on a server."""

from dataclasses import dataclass

from ...options import option
from ..server_options import ServerLimits


@dataclass(frozen=True, kw_only=True)
class SessionLimits(ServerLimits):
    """session limits"""

    max_sequences: int = option(64, metavar="N", least=1)
    max_new_tokens: int = option(2048, metavar="N", least=1)
    request_s: float = option(900.0, metavar="S", least=0.001)
    max_messages_s: float = option(1000.0, metavar="N", least=1)
    """messages read per second from one session; further ones wait"""
    idle_s: float = option(60.0, metavar="S", least=0.001)
    """seconds after which a silent session expires"""
