"""Serve a target to edge devices. It verifies their draft tokens, or decodes without a draft."""

import asyncio
import signal
from collections.abc import Sequence

from ...devices import resolve_device, resolve_dtype
from ...files import read_optional
from ...models.target import load_target, load_tokenizer
from ...pretrained import quieten
from ..server_options import address_of, read_tokens
from . import wire
from .arguments import SessionServerOptions
from .grpc_server import Server


def run(options: SessionServerOptions, words: Sequence[str]) -> None:
    # Refuse a missing library or a bad file before loading the target, the slowest part.
    wire.import_grpc()
    key = read_optional(options.tls_key, "--tls-key")
    certificate = read_optional(options.tls_cert, "--tls-cert")
    tls = None if key is None or certificate is None else (key, certificate)
    tokens = read_tokens(options.token_file)
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


async def serve(server: Server, host: str, wanted_port: int) -> None:
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


def describe(server: Server, host: str, listening: int) -> str:
    tls = "plain text" if server.tls is None else "TLS"
    token = {0: "no token", 1: "with token"}.get(len(server.tokens), "with tokens")
    return (
        f"serving {server.name} on {address_of(host, listening)} ({tls}, {token}); fingerprint "
        f"{server.target.fingerprint[:12]}, last block {server.target.anchor[:12]}"
    )
