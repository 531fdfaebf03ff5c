"""Serve a target to edge devices. It verifies their draft tokens, or decodes without a draft."""

import asyncio
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ...files import read_optional
from ...options import option
from ..arguments import PlaceOptions
from ..servers import ListenOptions, address_of, read_tokens
from . import SessionLimits

if TYPE_CHECKING:
    from .grpc_server import Server

EXAMPLE = """example:
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
    EXAMPLE: ClassVar[str] = EXAMPLE

    target: str
    """target's folder or Hub id"""


build_parser = SessionServerOptions.parser


def run(argv: Sequence[str]) -> None:
    options = SessionServerOptions.read(argv)
    from . import wire
    from .grpc_server import Server

    # Refuse a missing library or a bad file before loading the target, the slowest part.
    wire.import_grpc()
    key = read_optional(options.tls_key, "--tls-key")
    certificate = read_optional(options.tls_cert, "--tls-cert")
    tls = None if key is None or certificate is None else (key, certificate)
    tokens = read_tokens(options.token_file)
    from ...devices import resolve_device, resolve_dtype
    from ...models.target import load_target, load_tokenizer
    from ...pretrained import quieten

    quieten()
    tokenizer = load_tokenizer(options.target)
    device = resolve_device(options.device)
    dtype = resolve_dtype(options.dtype, device, options.target)
    model = load_target(options.target, dtype=dtype, device=device)
    server = Server(
        model, name=options.target, tokenizer=tokenizer, limits=options, tls=tls, tokens=tokens
    )
    options.warn_if_open(tokens, "--token-file")
    asyncio.run(serve(server, options.host, options.port))


async def serve(server: "Server", host: str, wanted_port: int) -> None:
    """Serve until SIGTERM or SIGINT. A second signal ends open sessions at once."""
    loop, ended, hurry = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def end() -> None:
        (hurry if ended.is_set() else ended).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    listening = await server.start(host, wanted_port)
    # Flushed, because scripts wait for this line to learn the port.
    print(describe(server, host, listening), flush=True)
    try:
        await server.wait(ended)
    finally:
        # After a failed pass, too: open sessions must be told to start again.
        num_cut = await server.stop(server.limits.grace_s, hurry)
    table = server.table
    share = server.num_session_passes / max(server.num_passes, 1)
    print(
        f"ended: {table.num_opened} sessions, {table.num_expired} expired, {num_cut} cut off; "
        f"{server.num_passes} passes, {share:.2f} sessions in each",
        flush=True,
    )


def describe(server: "Server", host: str, listening: int) -> str:
    tls = "plain text" if server.tls is None else "TLS"
    token = {0: "no token", 1: "with token"}.get(len(server.tokens), "with tokens")
    return (
        f"serving {server.name} on {address_of(host, listening)} ({tls}, {token}); fingerprint "
        f"{server.target.fingerprint[:12]}, last block {server.target.anchor[:12]}"
    )
