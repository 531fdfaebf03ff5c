"""Serve a target: it verifies what edges draft, and decodes alone for those that do not."""

import argparse
import asyncio
import ipaddress
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipedraft.errors import Parser
from pipedraft.inference.arguments import positive
from pipedraft.inference.remote_command import TOKEN_VARIABLE, read_token
from pipedraft.inference.transport.session_table import Limits

EXAMPLE = """example:
  python -m pipedraft.inference serve --target assets/target --port 50051
  PIPEDRAFT_TOKEN=... python -m pipedraft.inference serve --target assets/target --host 0.0.0.0 \\
      --tls-cert server.pem --tls-key server.key

The first line on stdout says where it listens. SIGTERM and Ctrl-C let open sessions end (--grace);
a second one does not wait. docs/serving.md explains the protocol and every error message.
"""


def build_parser() -> Parser:
    limits = Limits()
    parser = Parser(
        prog="pipedraft inference serve",
        description=__doc__,
        epilog=EXAMPLE,
    )
    add = parser.add_argument
    add("--target", required=True, help="folder or Hub id")
    add("--host", default="127.0.0.1", help="address (default 127.0.0.1: this machine alone)")
    add("--port", type=port, default=50051, help="0: any free one (default 50051)")
    add("--device", default="cpu", help="cpu or cuda:N (default cpu)")
    add("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    security = parser.add_argument_group("who may connect")
    add = security.add_argument
    add("--tls-cert", type=Path, metavar="FILE", help="PEM chain; default: plain text")
    add("--tls-key", type=Path, metavar="FILE", help="its private key, PEM")
    add(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"clients must send what is in it (default: ${TOKEN_VARIABLE}, or none)",
    )
    bounds = parser.add_argument_group("limits")
    for name, kind, text in (
        ("sessions", positive, "open at once"),
        ("prompt-tokens", positive, "of a session"),
        ("new-tokens", positive, "of a session"),
        ("cache-mb", positive, "keys and values of all sessions at their longest, in MiB"),
        ("message-kb", positive, "of one message, in KiB"),
        ("idle-s", float, "after which a silent session expires"),
        ("session-s", float, "after which any session ends"),
        ("grace-s", float, "for open sessions when told to end"),
    ):
        default = {
            "cache-mb": limits.cache_bytes // 2**20,
            "message-kb": limits.message_bytes // 2**10,
        }.get(name)
        default = vars(limits)[name.replace("-", "_")] if default is None else default
        prefix = "" if name.endswith("-s") else "max-"
        bounds.add_argument(
            f"--{prefix}{name}", type=kind, default=default, metavar="N", help=f"{text} ({default})"
        )
    return parser


def port(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**16:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; give 0 to 65535")
    return int(text)


def _limits(options: argparse.Namespace) -> Limits:
    return Limits(
        sessions=options.max_sessions,
        prompt_tokens=options.max_prompt_tokens,
        new_tokens=options.max_new_tokens,
        cache_bytes=options.max_cache_mb * 2**20,
        message_bytes=options.max_message_kb * 2**10,
        idle_s=options.idle_s,
        session_s=options.session_s,
        grace_s=options.grace_s,
    )


def run(argv: Sequence[str]) -> None:
    options = build_parser().parse_args(argv)
    limits = _limits(options)
    if (options.tls_cert is None) != (options.tls_key is None):
        raise ValueError("--tls-cert: it goes with --tls-key; give both or neither")
    from pipedraft.inference.transport import wire
    from pipedraft.inference.transport.server import Security, Server

    wire.import_grpc()
    security = Security(
        certificate=None if options.tls_cert is None else options.tls_cert.read_bytes(),
        key=None if options.tls_key is None else options.tls_key.read_bytes(),
        token=read_token(options.token_file),
    )
    import torch
    from transformers.utils import logging

    from pipedraft.models.target import load_target, load_tokenizer

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = load_tokenizer(options.target)
    dtype = getattr(torch, options.dtype)
    model = load_target(options.target, dtype=dtype, device=options.device)
    server = Server(
        model, name=options.target, tokenizer=tokenizer, limits=limits, security=security
    )
    asyncio.run(serve(server, options.host, options.port))


async def serve(server: Any, host: str, wanted_port: int) -> None:
    """Until a signal."""
    loop, ended, hurry = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def end() -> None:
        (hurry if ended.is_set() else ended).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    listening = await server.start(host, wanted_port)
    print(describe(server, host, listening), flush=True)
    is_open = server.security.certificate is None or not server.security.token
    if is_open and not is_loopback(host):
        print(
            f"warning: --host {host} is reached from other machines; give --tls-cert, --tls-key "
            "and --token-file",
            file=sys.stderr,
        )
    try:
        await server.wait(ended)
    finally:
        num_cut = await server.stop(server.limits.grace_s, hurry)
    table = server.table
    share = server.num_session_passes / max(server.num_passes, 1)
    print(
        f"ended: {table.num_opened} sessions, {table.num_expired} expired, {num_cut} cut off; "
        f"{server.num_passes} passes, {share:.2f} sessions in each",
        flush=True,
    )


def describe(server: Any, host: str, listening: int) -> str:
    security, target = server.security, server.target
    tls = "plain text" if security.certificate is None else "TLS"
    token = "with token" if security.token else "no token"
    return (
        f"serving {server.name} on {host}:{listening} ({tls}, {token}); fingerprint "
        f"{target.fingerprint[:12]}, last block {target.anchor[:12]}"
    )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name
        return host == "localhost"
