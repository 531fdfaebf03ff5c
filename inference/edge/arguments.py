"""Options for a target on a server: of the edge, which decodes with it, and of the server."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

from ...errors import flag_name
from ...options import Options, option
from ..arguments import PlaceOptions, seconds
from ..servers import ListenOptions
from . import SessionLimits

ELSEWHERE = (
    *("target", "stages", "boundaries", "backend", "processes", "links", "step_timeout", "trace"),
    *("draft", "draft_dtype", "bitwise", "never_slower", "cost", "conformance"),
)
"""Options refused with --server: they need the target on this machine."""


@dataclass(frozen=True, kw_only=True)
class RemoteOptions(Options):
    """a target on a server (inference serve)"""

    IN_SHORT_HELP: ClassVar[bool] = False

    server: str | None = option(None, metavar="HOST:PORT")
    """decode with the target on this server and the draft here"""
    status: bool = False
    """print the server's status as JSON"""
    tokenizer: str | None = None
    """tokenizer's folder or Hub id; default: the draft's"""
    keep_drafting: bool = False
    """keep drafting even if the target alone would be faster"""
    tls: bool = False
    """use TLS with the certificate authorities of this system"""
    tls_ca: Path | None = option(None, metavar="FILE")
    """use TLS with this certificate authority (PEM)"""
    token_file: Path | None = option(None, metavar="FILE")
    """file with the access token for the server"""
    connect_s: float = option(10.0, metavar="S", parse=seconds)
    """seconds per connection attempt"""
    answer_s: float = option(30.0, metavar="S", parse=seconds)
    """seconds without an answer before a new session is opened"""
    give_up_s: float = option(60.0, metavar="S", parse=seconds)
    """seconds without a reply from the server before decoding ends with status 1"""

    def __post_init__(self) -> None:
        super().__post_init__()
        names = ELSEWHERE if self.server else [part.name for part in fields(RemoteOptions)]
        defaults = {part.name: part.default for part in fields(self)}
        for name in names:
            # A value equal to its default looks like an absent option.
            if name != "server" and getattr(self, name) != defaults[name]:
                if self.server is None:
                    raise ValueError(f"{flag_name(name)}: it needs --server HOST:PORT")
                where = self.server
                raise ValueError(f"{flag_name(name)}: the target is on {where}; leave it out")


# -- the server

SERVE_EXAMPLE = """example:
  pipedraft inference serve --target assets/target --port 50051
  PIPEDRAFT_TOKEN=... pipedraft inference serve --target assets/target --host 0.0.0.0 \\
      --tls-cert server.pem --tls-key server.key

The first line on stdout names the address. After SIGTERM or Ctrl-C, open sessions get --grace-s
seconds to finish; a second signal ends them at once. docs/edge.md explains the protocol and every
error message.
"""


@dataclass(frozen=True, kw_only=True)
class SecurityOptions(ListenOptions):
    """who may connect"""

    IN_SHORT_HELP: ClassVar[bool] = False

    token_file: Path | None = option(None, metavar="FILE")
    """file with access tokens, one per line; every client must send one of them; default:
    $PIPEDRAFT_TOKEN, or no token"""


@dataclass(frozen=True, kw_only=True)
class SessionServerOptions(SecurityOptions, SessionLimits, PlaceOptions):
    """Serve a target: verify draft tokens from edge devices, or decode without them."""

    PROG: ClassVar[str] = "pipedraft inference serve"
    EXAMPLE: ClassVar[str] = SERVE_EXAMPLE

    target: str
    """target's folder or Hub id"""
