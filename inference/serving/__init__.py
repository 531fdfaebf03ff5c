"""A target and its draft behind an OpenAI-compatible HTTP server; its limits, free of torch."""

from dataclasses import dataclass

from pipedraft.cli import Options, option


@dataclass(frozen=True, kw_only=True)
class HttpLimits(Options):
    """limits"""

    max_sequences: int = option(16, metavar="N", least=1)
    """decoded at once; with --beside one is"""
    max_cache_mb: int = option(4096, metavar="N", least=1)
    """keys and values of all of these at their longest, in MiB"""
    max_waiting: int = option(64, metavar="N", least=1)
    """sequences in the queue; further requests get status 429"""
    max_client_sequences: int = option(32, metavar="N", least=1)
    """open at once of one client: of a key where --api-key-file has several, else of an address"""
    max_choices: int = option(8, metavar="N", least=1)
    """sequences of one request"""
    max_prompt_tokens: int = option(4096, metavar="N", least=1)
    """of one sequence"""
    max_new_tokens: int = option(1024, metavar="N", least=1)
    """of one sequence; also where a request says nothing"""
    max_body_kb: int = option(1024, metavar="N", least=1)
    """of one request, in KiB"""
    request_s: float = option(300.0, metavar="S", least=0.001)
    """for one answer, its wait in the queue and a slow reader included"""
    grace_s: float = option(30.0, metavar="S", least=0.001)
    """for open requests when told to end"""
