"""Options and checks for the HTTP and session servers, without importing torch or grpc."""

import hmac
import ipaddress
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

from ..errors import flag_name
from ..files import read_text
from ..options import Options, option

TOKEN_VARIABLE = "PIPEDRAFT_TOKEN"
TOKEN = re.compile(r"[!-~]{1,4096}")
MAX_TOKEN_BYTES = 2**20
LARGEST = {"max_sequences": 2**20, "max_cache_mb": 2**42, "max_message_kb": 2**20}
"""Largest allowed values: gRPC's limits, and byte counts below 2 to the 62nd."""


@dataclass(frozen=True, kw_only=True)
class ServerLimits(Options):
    """limits"""

    IN_SHORT_HELP: ClassVar[bool] = False

    max_sequences: int = option(16, metavar="N", least=1)
    """maximum number of sequences at the same time"""
    max_cache_mb: int = option(4096, metavar="N", least=1)
    """memory for all sequences' keys and values at their maximum lengths, in MiB"""
    max_prompt_tokens: int = option(4096, metavar="N", least=1)
    """maximum prompt tokens per sequence"""
    max_new_tokens: int = option(1024, metavar="N", least=1)
    """maximum new tokens per sequence"""
    max_message_kb: int = option(1024, metavar="N", least=1)
    """maximum size per message or request, in KiB"""
    request_s: float = option(300.0, metavar="S", least=0.001)
    """maximum seconds per request or session"""
    grace_s: float = option(30.0, metavar="S", least=0.001)
    """seconds that open requests and sessions get to finish when the server shuts down"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for limit in fields(ServerLimits):
            value, most = getattr(self, limit.name), LARGEST.get(limit.name, 2.0**62)
            if value > most:
                raise ValueError(f"{flag_name(limit.name)}: {value}; give at most {most}")


@dataclass(frozen=True, kw_only=True)
class ListenOptions(Options):
    """address and encryption"""

    host: str = "127.0.0.1"
    """address to listen on; 127.0.0.1: this machine only"""
    port: int = 50051
    """port; 0: any free port"""
    tls_cert: Path | None = option(None, metavar="FILE")
    """certificate chain (PEM); default: no TLS"""
    tls_key: Path | None = option(None, metavar="FILE")
    """private key of the certificate (PEM)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.port < 2**16:
            raise ValueError(f"--port: {self.port} is no port; give 0 to 65535")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert: it goes with --tls-key; give both or neither")

    def warn_if_open(self, tokens: Sequence[str], option: str) -> None:
        """Warn if other machines can connect although TLS or a token is missing."""
        if not is_loopback(self.host) and (self.tls_cert is None or not tokens):
            print(
                f"warning: --host {self.host} is reached from other machines; give --tls-cert, "
                f"--tls-key and {option}",
                file=sys.stderr,
            )


def address_of(host: str, port: int) -> str:
    """Return HOST:PORT. The brackets around an IPv6 host are optional."""
    return f"[{host.strip('[]')}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def read_tokens(
    file: Path | None, *, option: str = "--token-file", variable: str = TOKEN_VARIABLE
) -> tuple[str, ...]:
    """Read tokens from a file, one per line, or from the environment.

    Tokens must not be on the command line, because other users can see command lines.

    Raises:
        ValueError: a value is no token, for example because a secret was left unset.
    """
    place, text = f"${variable}", os.environ.get(variable)
    if file is not None:
        place = f"{option}: {str(file)!r}"
        text = read_text(file, option, MAX_TOKEN_BYTES).strip()
    if text is None:
        return ()
    tokens = tuple(text.split("\n"))
    if not all(TOKEN.fullmatch(token) for token in tokens):
        raise ValueError(
            f"{place} holds no printable ASCII text without spaces; write one, or unset it"
        )
    return tokens


def find_token(authorization: bytes, tokens: Sequence[str]) -> int | None:
    """Return the index of the token in an Authorization header, or None if no token matches."""
    # Compare all tokens, so response time reveals no match.
    same = [hmac.compare_digest(authorization, f"Bearer {token}".encode()) for token in tokens]
    return same.index(True) if any(same) else None
