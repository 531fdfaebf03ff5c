"""Start a listening server for an engine, and end it on signals."""

import asyncio
import contextlib
import gc
import signal
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import uvicorn

from ...errors import Failure
from ..defaults import pipeline_note
from ..pipelines.local import LocalPipeline
from ..ranks.links import LostLink
from ..server_options import address_of
from .app import Service, make_app
from .decoder import SequenceDecoder

if TYPE_CHECKING:
    from ..engine import Engine
    from ..ranks.cluster import Cluster
    from .options import HttpOptions, ServeOptions

MAX_CONNECTIONS = 1024
LEAVE_S = 2
"""Seconds for answers to be sent after decoding has stopped."""


def open_socket(options: "HttpOptions") -> socket.socket:
    """Open the listening socket before loading anything, so bad values are refused at once.

    Raises:
        ValueError: the port is unavailable, or the certificate is unusable.
    """
    if options.tls_cert is not None and options.tls_key is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # An encrypted key must fail: OpenSSL would ask for a password on the terminal.
            context.load_cert_chain(options.tls_cert, options.tls_key, password=lambda: "")
        except OSError as error:
            raise ValueError(
                f"--tls-cert: {str(options.tls_cert)!r} cannot be used with --tls-key ({error}); "
                "give PEM files of a certificate and its key"
            ) from error
    address = (options.host.strip("[]"), options.port)
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        return socket.create_server(address, family=family, backlog=128)
    except OSError as error:
        raise ValueError(
            f"--port: {options.host}:{options.port} cannot be listened on ({error.strerror}); give "
            "another --host or --port, or 0 for any free port"
        ) from error


class HttpServer(uvicorn.Server):
    """HTTP server without its own signal handling, because ``serve`` handles signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_server(service: Service, **options: object) -> HttpServer:
    """Build the application's HTTP server. ``options`` are further uvicorn options."""
    config = uvicorn.Config(
        make_app(service),
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # client errors are not this program's
        access_log=False,
        server_header=False,
        # Anyone can send X-Forwarded-For, and so pass for another client.
        proxy_headers=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=LEAVE_S,
        **options,  # type: ignore[arg-type]
    )
    return HttpServer(config)


def run(
    engine: "Engine",
    options: "ServeOptions",
    keys: Sequence[str],
    listener: socket.socket,
    cluster: "Cluster | None" = None,
) -> None:
    """Serve until a signal or a pipeline failure. ``cluster``, if any, runs the pipeline."""
    decoder = SequenceDecoder(engine, options)
    service = Service(
        decoder,
        names=options.names,
        limits=options,
        keys=keys,
        vllm_metrics=options.vllm_metrics,
    )
    if cluster is not None:
        # A lambda, since ``serve`` replaces ``service.end`` later.
        cluster.watch.on_signal = lambda: service.end()
    files = {}
    if options.tls_cert is not None:
        files = {"ssl_certfile": options.tls_cert, "ssl_keyfile": options.tls_key}
    server = http_server(service, **files)
    address = address_of(options.host, listener.getsockname()[1])
    url, name = f"{'https' if files else 'http'}://{address}", options.names[0]
    print(f"serving {name} on {url} ({service.describe()})")
    print(
        f"ready: open {url} in a browser to chat; OpenAI clients take base_url {url}/v1 and model "
        f"{name}; Ctrl-C ends the server",
        flush=True,
    )
    if note := pipeline_note(options, engine.config):
        print(note, flush=True)
    # Requests leave reference cycles; a frozen heap makes collections cheap and frequent.
    gc.freeze()
    asyncio.run(serve(server, service, listener))
    print(f"ended: {service.admissions.num_answered} requests answered", flush=True)
    if isinstance(decoder.failure, LostLink):
        raise decoder.failure  # the cluster reports the failed process
    if decoder.failure is not None:
        raise Failure(f"the pipeline has failed: {decoder.failure}")


async def serve(server: HttpServer, service: Service, listener: socket.socket) -> None:
    """Serve until a signal or a pipeline failure. A second signal ends open answers at once."""
    loop, ended, hurry = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def end() -> None:
        (hurry if ended.is_set() else ended).set()

    def end_from_elsewhere() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(end)

    service.end = service.decoder.on_failure = end_from_elsewhere
    is_alone = isinstance(service.engine.pipeline, LocalPipeline)  # else Watch gets signals
    if is_alone and threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, end)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    waiting = asyncio.create_task(ended.wait())
    await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    # Before uvicorn ends, because uvicorn waits only LEAVE_S for open answers.
    await service.drain(hurry)
    server.should_exit = True
    await running
    # Last: answers need the decoder until they have ended.
    service.decoder.close()
