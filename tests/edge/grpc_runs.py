"""A server and clients on 127.0.0.1, for tests: everything ends with the ``with``."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from types import SimpleNamespace
from typing import Any

from decode_runs import PlainTokenizer
from tiny_models import tiny_llama

from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.edge import SessionLimits, wire
from pipedraft.inference.edge.engine import LinkEngine
from pipedraft.inference.edge.grpc_server import Server
from pipedraft.inference.edge.remote import LocalDraft, RemotePipeline
from pipedraft.inference.edge.session_messages import (
    MAX_BYTES,
    REQUESTS,
    Open,
    Preverify,
    Settings,
    Verify,
    prefix_hash,
)
from pipedraft.inference.edge.stream import Access, Connection
from pipedraft.models.heads.language_model import LanguageModelDraft

LIMIT_S = 300
"""Time limit for a whole scene: a machine under load is slow, a hang is endless."""
TOKENIZER = SimpleNamespace(get_vocab=lambda: {str(index): index for index in range(64)})


def make_target(**options: Any) -> Any:
    return tiny_llama(**{"layers": 3, "vocab": 16, **options})


def make_server(target: Any, *, tokens: tuple[str, ...] = (), **limits: Any) -> Server:
    return Server(
        target,
        name="tiny",
        tokenizer=TOKENIZER,
        limits=SessionLimits(**{"grace_s": 0.2, **limits}),
        tokens=tokens,
    )


@asynccontextmanager
async def serving(target: Any, port: int = 0, **options: Any) -> AsyncIterator[Server]:
    server = make_server(target, **options)
    await server.start("127.0.0.1", port)
    try:
        yield server
    finally:
        await server.stop(0.0, asyncio.Event())


def hold_passes(server: Server, is_held: Callable[[], bool]) -> None:
    """Start no pass while ``is_held`` is true, so that no output can finish by then.

    The server calls ``is_held`` again with every message and every stream.
    """
    choose = server._next_batch
    server._next_batch = lambda: [] if is_held() else choose()  # type: ignore[method-assign]


def lm_draft(target: Any, /, *, right: bool = False, **hashes: str) -> LocalDraft:
    """Draft with the target itself, or with a random model accepted by chance."""
    vocab = target.config.vocab_size
    model = target if right else tiny_llama(layers=1, vocab=vocab, seed=1)
    return LocalDraft(network=LanguageModelDraft(model, model), **hashes)


def access_to(port: int, **options: Any) -> Access:
    return Access(server=f"127.0.0.1:{port}", **{"connect_s": 20.0, **options})


async def in_thread(work: Callable[[], Any]) -> Any:
    """Run work in its own thread, however many there are."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future = loop.create_future()

    def finish(result: Any, error: BaseException | None) -> None:
        if not done.done():
            done.set_result(result) if error is None else done.set_exception(error)

    def target() -> None:
        result, error = None, None
        try:
            result = work()
        except Exception as raised:
            error = raised
        loop.call_soon_threadsafe(finish, result, error)

    threading.Thread(target=target, daemon=True).start()
    return await done


async def decode(
    port: int,
    prompt: list[int],
    *,
    schedule: str = "flexspec",
    draft: LocalDraft | None = None,
    warnings: list[str] | None = None,
    access: dict[str, Any] | None = None,
    on_token: Any = None,
    keeps_drafting: bool = True,
    prompt_index: int = 0,
    tokenizer: str = "",
    **settings: Any,
) -> SimpleNamespace:
    loop = asyncio.get_running_loop()
    config = DecodeConfig.of(schedule, num_stages=1, **{"max_new_tokens": 24, **settings})

    def tell(token: int) -> None:
        if on_token is not None:
            loop.call_soon_threadsafe(on_token, token)

    def work() -> SimpleNamespace:
        with Connection(access_to(port, **(access or {}))) as connection:
            pipeline = RemotePipeline(
                connection,
                draft,
                keeps_drafting=keeps_drafting,
                tokenizer=tokenizer,
                warn=[].append if warnings is None else warnings.append,
            )
            network = None if draft is None else draft.network
            engine = LinkEngine(pipeline, PlainTokenizer(), config, network)
            result = engine.decode(prompt, prompt_index=prompt_index, on_token=tell)
            return SimpleNamespace(
                result=result,
                fallback=pipeline.fallback,
                num_reopened=pipeline.num_reopened,
                round_trip_s=pipeline.estimates.link.state.round_trip_s,
            )

    return await in_thread(work)


def logged(caplog: Any) -> list[str]:
    """Messages from this project; gRPC's own, about sockets read by others, are left out."""
    records = [record for record in caplog.records if record.name.startswith("pipedraft")]
    return [record.getMessage() for record in records]


def run(scene: Any) -> Any:
    """Run a coroutine, within ``LIMIT_S``."""

    async def bounded() -> Any:
        async with asyncio.timeout(LIMIT_S):
            return await scene

    return asyncio.run(bounded())


def in_loop(scene: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test coroutine in its own loop."""

    @wraps(scene)
    def test(*arguments: Any, **fixtures: Any) -> None:
        run(scene(*arguments, **fixtures))

    return test


class RawConnection:
    """Channel of a careless client; use with ``async with``."""

    def __init__(self, access: Access) -> None:
        self.grpc, self.access = wire.import_grpc(), access

    async def __aenter__(self) -> "RawConnection":
        options = wire.channel_options(MAX_BYTES)
        self.channel = self.grpc.aio.insecure_channel(self.access.server, options)
        return self

    async def __aexit__(self, *exception: Any) -> None:
        await self.channel.close()


@asynccontextmanager
async def raw_serving(target: Any, **options: Any) -> AsyncIterator[tuple[Server, RawConnection]]:
    """Start a server and connect a careless client to it."""
    async with (
        serving(target, **options) as server,
        RawConnection(access_to(server.port)) as connection,
    ):
        yield server, connection


class Raw:
    """Client that sends arbitrary bytes, and records the replies and how the call ended."""

    def __init__(self, connection: RawConnection, **metadata: str) -> None:
        self.grpc = connection.grpc
        options = {"metadata": tuple(metadata.items())} if metadata else {}
        self.call = connection.channel.stream_stream(f"/{wire.SERVICE}/Session")(**options)

    async def send(self, *messages: Any) -> None:
        for message in messages:
            await self.call.write(
                message if isinstance(message, bytes) else REQUESTS.to_bytes(message)
            )

    async def read(self, count: int) -> list[bytes]:
        return [await self.call.read() for _ in range(count)]

    async def end(self) -> tuple[str, str, dict[str, str]]:
        """Code, text and trailing metadata of the call, once the server ends it."""
        try:
            while await self.call.read() is not self.grpc.aio.EOF:
                pass
        except self.grpc.aio.AioRpcError:
            pass
        metadata = dict(await self.call.trailing_metadata() or ())
        return (await self.call.code()).name, await self.call.details(), metadata


def drafted(
    known: list[int], ids: list[int], kind: type[Preverify | Verify] = Verify, **fields: Any
) -> Preverify | Verify:
    """Draft tokens behind known ones, as the edge's first message after ``Open``."""
    behind = {"base": len(known), "prefix_hash": prefix_hash(known), "certain": []}
    return kind(**{"epoch": 0, "seq": 1, "ids": ids, "q": [], "next_s": 0.0, **behind, **fields})


def opening(prompt: list[int], *, streams: bool = True, **settings: Any) -> Open:
    return Open(
        prompt_ids=prompt,
        settings=Settings(**{"max_new_tokens": 24, **settings}),
        streams=streams,
    )
