"""OpenAI-compatible HTTP server for a target and its draft; its limits import no torch."""

from dataclasses import dataclass

from pipedraft.cli import option
from pipedraft.inference.servers import ServerLimits


@dataclass(frozen=True, kw_only=True)
class HttpLimits(ServerLimits):
    """request limits"""

    max_waiting: int = option(64, metavar="N", least=1)
    """sequences in the queue; further requests get status 429"""
    max_client_sequences: int = option(32, metavar="N", least=1)
    """open sequences per client; a client is an API key if --api-key-file has several, else an
    address"""
    max_choices: int = option(8, metavar="N", least=1)
    """sequences per request"""
