"""OpenAI-compatible HTTP server for a target and its draft. This file does not import torch."""

from dataclasses import dataclass

from ...options import option
from ..servers import ServerLimits


@dataclass(frozen=True, kw_only=True)
class HttpLimits(ServerLimits):
    """request limits"""

    max_waiting: int = option(64, metavar="N", least=1)
    """maximum sequences in the queue; further requests get status 429"""
    max_client_sequences: int = option(32, metavar="N", least=1)
    """maximum open sequences per client; clients are told apart by API key if --api-key-file has
    several keys, else by address"""
    max_choices: int = option(8, metavar="N", least=1)
    """maximum sequences per request"""
