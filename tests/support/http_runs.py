"""The HTTP server on 127.0.0.1 with clients, for tests: everything ends with the ``with``."""

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from openai import OpenAI
from tiny_models import byte_tokenizer, tiny_llama

from pipedraft.inference import batch
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.engine import Engine
from pipedraft.inference.pipelines.local import step_together
from pipedraft.inference.result import DecodeResult
from pipedraft.inference.serving.app import Service
from pipedraft.inference.serving.decoder import SequenceDecoder
from pipedraft.inference.serving.listen import http_server, serve
from pipedraft.inference.serving.options import HttpLimits
from pipedraft.models.heads.language_model import LanguageModelDraft

WAIT_S = 120
"""Time limit for any event; the machine may be busy."""
VOCABULARY = 94
"""Printable ASCII, one token per character."""
TEMPLATE = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}"
PROMPT = "Hello"
LENGTH = 24


def make_engine(num_stages: int = 2) -> Engine:
    """Make an engine with an often accepted draft; two engines share nothing."""
    target, noisy = (tiny_llama(layers=4, vocab=VOCABULARY) for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    for weight in noisy.parameters():
        weight.add_(torch.randn(weight.shape, generator=generator) * 0.01)
    config = DecodeConfig.of("pipedec", num_stages=num_stages, tree_width=2, temperature=1.0)
    draft = LanguageModelDraft(noisy, noisy)
    return Engine(target, byte_tokenizer(TEMPLATE), config, draft)


def alone(engine: Engine, prompt: str, **settings: Any) -> DecodeResult:
    """Decode a prompt with ``Engine.decode`` alone."""
    base = engine.config
    engine.config = replace(base, **{"max_new_tokens": LENGTH, **settings})
    try:
        return engine.decode(engine.tokenizer(prompt).input_ids)
    finally:
        engine.config = base


@dataclass
class Held:
    """A pipeline held before each step until ``release``."""

    go: threading.Event
    arrived: threading.Event

    def release(self) -> None:
        self.go.set()


@dataclass
class Place:
    """A listening server."""

    service: Service
    port: int
    thread: threading.Thread

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=WAIT_S)

    @contextmanager
    def held(self) -> Iterator[Held]:
        """Hold every step until ``release``, or the end."""
        held = Held(threading.Event(), threading.Event())

        def waiting_step(pipelines: Any) -> None:
            held.arrived.set()
            assert held.go.wait(WAIT_S)
            step_together(pipelines)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(batch, "step_together", waiting_step)
            try:
                yield held
            finally:
                held.release()

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> "Told":
        """Send one request as a careless client."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        try:
            raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            kind = {} if raw is None else {"content-type": "application/json"}
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, raw, kind | sent)
            answer = connection.getresponse()
            return Told(answer.status, dict(answer.getheaders()), answer.read())
        finally:
            connection.close()

    def chat(self, **fields: Any) -> "Told":
        body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": LENGTH, **fields}
        return self.ask("POST", "/v1/chat/completions", body)


@dataclass
class Told:
    status: int
    headers: dict[str, str]
    content: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.content)


def wait_until(is_so: Callable[[], object]) -> None:
    until_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < until_s, "it never came"
        time.sleep(0.005)


@contextmanager
def serving(engine: Engine, *, keys: tuple[str, ...] = (), **options: Any) -> Iterator[Place]:
    limits = HttpLimits(**{"grace_s": 5.0, "request_s": WAIT_S, **options})
    service = Service(SequenceDecoder(engine, limits), names=["tiny"], limits=limits, keys=keys)
    server = http_server(service)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(
        target=lambda: asyncio.run(serve(server, service, listener)), daemon=True
    )
    thread.start()
    place = Place(service, listener.getsockname()[1], thread)
    wait_until(lambda: server.started)
    try:
        yield place
    finally:
        service.end()
        service.end()  # does not wait
        thread.join(WAIT_S)
        assert not thread.is_alive(), "the server did not end"


MESSAGES = [{"role": "user", "content": PROMPT}]


def body(**fields) -> bytes:
    return json.dumps({"messages": MESSAGES, "max_tokens": 2, **fields}).encode()
