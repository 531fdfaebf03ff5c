"""A server and edges on 127.0.0.1, for tests: everything ends with the ``with``."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from conftest import tiny_llama

from pipedraft.inference.edge_cloud.client import EdgeClient, EdgeDraft, EdgeOutcome
from pipedraft.inference.edge_cloud.connection import Access, Connection
from pipedraft.inference.edge_cloud.drafter import ChainDrafter
from pipedraft.inference.edge_cloud.messages import Open, Settings, encode
from pipedraft.inference.edge_cloud.methods import METHODS, Wishes
from pipedraft.inference.edge_cloud.server import Security, Server
from pipedraft.inference.edge_cloud.session_table import Limits
from pipedraft.models.language_model import LanguageModelDraft

LIMIT_S = 90
"""For a whole scene: a machine under load is slow, a hang is endless."""
TOKENIZER = SimpleNamespace(get_vocab=lambda: {str(index): index for index in range(64)})


def make_target(**options: Any) -> Any:
    return tiny_llama(**{"layers": 3, "vocab": 16, **options})


def make_server(target: Any, *, token: str = "", **limits: Any) -> Server:
    return Server(
        target,
        name="tiny",
        tokenizer=TOKENIZER,
        limits=Limits(**{"grace_s": 0.2, **limits}),
        security=Security(token=token),
    )


@asynccontextmanager
async def serving(target: Any, port: int = 0, **options: Any) -> AsyncIterator[Server]:
    server = make_server(target, **options)
    await server.start("127.0.0.1", port)
    try:
        yield server
    finally:
        await server.stop(0.0, asyncio.Event())


def lm_draft(target: Any, /, *, right: bool = False, **hashes: str) -> EdgeDraft:
    """The target itself, or a random model that is right by chance."""
    vocab = target.config.vocab_size
    model = target if right else tiny_llama(layers=1, vocab=vocab, seed=1)
    return EdgeDraft(make=lambda: ChainDrafter.of(LanguageModelDraft(model, model)), **hashes)


def access_to(port: int, **options: Any) -> Access:
    return Access(server=f"127.0.0.1:{port}", **{"connect_s": 20.0, **options})


async def decode(
    port: int,
    prompt: list[int],
    *,
    method: str = "flexspec",
    draft: EdgeDraft | None = None,
    warnings: list[str] | None = None,
    access: dict[str, Any] | None = None,
    on_token: Any = None,
    keeps_drafting: bool = True,
    prompt_index: int = 0,
    **wishes: Any,
) -> EdgeOutcome:
    async with Connection(access_to(port, **(access or {}))) as connection:
        client = EdgeClient(
            connection=connection,
            method=METHODS[method],
            wishes=Wishes(**{"max_new_tokens": 24, **wishes}),
            draft=draft,
            keeps_drafting=keeps_drafting,
            warn=[].append if warnings is None else warnings.append,
        )
        return await client.decode(prompt, prompt_index=prompt_index, on_token=on_token)


def run(scene: Any) -> Any:
    """Run a coroutine, within ``LIMIT_S``."""

    async def bounded() -> Any:
        async with asyncio.timeout(LIMIT_S):
            return await scene

    return asyncio.run(bounded())


class Raw:
    """A client that says what it likes: bytes up, bytes down, and how the call ended."""

    def __init__(self, connection: Connection, **metadata: str) -> None:
        self.grpc = connection.grpc
        options = {"metadata": tuple(metadata.items())} if metadata else {}
        self.call = connection._session(**options)

    async def send(self, *messages: Any) -> None:
        for message in messages:
            await self.call.write(message if isinstance(message, bytes) else encode(message))

    async def read(self, count: int) -> list[bytes]:
        return [await self.call.read() for _ in range(count)]

    async def end(self) -> tuple[str, str, dict[str, str]]:
        """Code, text and trailing metadata of the call, which the server ends."""
        try:
            while await self.call.read() is not self.grpc.aio.EOF:
                pass
        except self.grpc.aio.AioRpcError:
            pass
        metadata = dict(await self.call.trailing_metadata() or ())
        return (await self.call.code()).name, await self.call.details(), metadata


def opening(prompt: list[int], *, streams: bool = True, **settings: Any) -> Open:
    return Open(
        session=1,
        prompt_ids=prompt,
        settings=Settings(**{"max_new_tokens": 24, **settings}),
        streams=streams,
    )
