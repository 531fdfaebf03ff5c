"""HTTP application with OpenAI's paths, health, metrics and the chat page."""

import asyncio
import base64
import contextlib
import hashlib
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from importlib.metadata import version
from logging import getLogger
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest
from fastapi.exceptions import StarletteHTTPException
from prometheus_client import CONTENT_TYPE_LATEST

from ...models.target import StagedTarget
from ..engine import Engine
from ..pipelines.local import LocalPipeline
from ..server_options import find_token
from .admission import NOT_AGAIN, Admissions
from .answers import HttpAnswer, Piece
from .decoder import SequenceDecoder
from .errors import Json, RequestError
from .metrics import Metrics
from .options import HttpLimits
from .requests import (
    ApiRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Kind,
    TokenizeRequest,
    openapi_document,
    parse,
)

log = getLogger(__name__)
Send: TypeAlias = Callable[[Any], Awaitable[None]]
PAGE = Path(__file__).with_name("page.html").read_text()
IGNORED = "x-pipedraft-ignored"
MAX_IGNORED = 16
"""Maximum number of names in the header for ignored fields."""
BODY_S = 20.0
"""Seconds for a request's body to arrive."""


def page_policy(page: str) -> str:
    """Return a Content-Security-Policy for this server only, with hashes of the page's code."""
    parts = {}
    for tag in ("script", "style"):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        parts[tag] = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{parts['script']}'; style-src "
        f"'sha256-{parts['style']}'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )


PAGE_HEADERS = {
    "content-security-policy": page_policy(PAGE),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class Service:
    """State shared by all paths, for example decoder, limits and clients."""

    def __init__(
        self,
        decoder: SequenceDecoder,
        *,
        names: Sequence[str],
        limits: HttpLimits,
        keys: Sequence[str] = (),
        vllm_metrics: bool = False,
    ) -> None:
        """Answers give the first of the accepted ``names``. Without ``keys``, no key is needed."""
        self.decoder, self.names, self.limits, self.keys = decoder, names, limits, keys
        self.engine = decoder.engine
        self.metrics = Metrics(names[0], has_vllm_names=vllm_metrics)
        self.admissions = Admissions(decoder, names=names, limits=limits, metrics=self.metrics)
        self.created = int(time.time())
        self.ending = asyncio.Event()
        """Set to end all answers now."""
        self.end: Callable[[], object] = lambda: None
        """Function to end the server as a signal does. Any thread may call it."""

    def describe(self) -> str:
        config, keys = self.decoder.base, len(self.keys)
        said = {0: "no API key", 1: "with API key"}.get(keys, "with API keys")
        return f"{config.schedule.name}, n = {self.engine.target.num_stages}, {said}"

    # -- who may ask, and what --------------------------------------------------------------

    def client_of(self, request: HttpRequest) -> str:
        """Check the API key. Return its number if there are several keys, else the address."""
        address = request.client.host if request.client else ""
        if not self.keys:
            return address
        # Starlette decodes headers as latin-1: this gives the bytes back unchanged.
        given = request.headers.get("authorization", "").encode("latin-1")
        number = find_token(given, self.keys)
        if number is None:
            raise RequestError(
                "the API key is missing or wrong; send it as Authorization: Bearer KEY",
                status=401,
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return f"key {number + 1}" if len(self.keys) > 1 else address

    async def read_body(self, request: HttpRequest) -> bytes:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # A foreign page can send other types from a visitor's browser without a preflight.
            raise RequestError(f"content-type: {kind[:64]!r}; send application/json", status=415)
        body, most = bytearray(), self.limits.max_message_kb * 2**10
        try:
            # A client that sends slowly must not occupy a connection for long.
            async with asyncio.timeout(BODY_S):
                is_more = True
                while is_more:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise RequestError("the client left", status=499)
                    body += message.get("body", b"")
                    is_more = message.get("more_body", False)
                    # Checked while reading: content-length may be missing or wrong.
                    if len(body) > most:
                        said = f"the body has more than {most} bytes"
                        # The rest is still on its way: close instead of reading it.
                        raise RequestError(said, status=413, headers={"connection": "close"})
        except TimeoutError as error:
            said = f"the body took more than {BODY_S:g} s"
            raise RequestError(said, status=408, headers=NOT_AGAIN) from error
        return bytes(body)

    # -- answering --------------------------------------------------------------------------

    async def answer(self, request: HttpRequest, kind: type[ApiRequest]) -> Response:
        client = self.client_of(request)
        # The key first: a stranger's body is not even read.
        asked, ignored = parse(await self.read_body(request), kind)
        headers = ignored_header(ignored)
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[Piece] = asyncio.Queue()

        def tell(piece: Piece) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is gone, and all clients with it
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        choices = self.admissions.admit(client, asked, tell)
        answer = HttpAnswer(asked, self.names[0], choices, pieces)
        with contextlib.ExitStack() as stack:
            # Entered before a stream starts, too: a refusal can then still have its own status.
            stack.enter_context(self.admissions.running(client, choices))
            if asked.stream:
                return EventStream(self, answer, stack.pop_all(), headers)
            if await self.until_gone(request.receive, answer.wait()):
                return JsonResponse(answer.body(), headers=headers)
        return Response(status_code=499)  # the reader has left

    async def until_gone(
        self, receive: Callable[[], Awaitable[Any]], work: Coroutine[Any, Any, None]
    ) -> bool:
        """Await an answer's work for ``request_s``. Return False if the reader leaves earlier."""

        async def left() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        tasks = [asyncio.ensure_future(x) for x in (work, left(), self.ending.wait())]
        try:
            done, _ = await asyncio.wait(
                tasks, timeout=self.limits.request_s, return_when=asyncio.FIRST_COMPLETED
            )
            if tasks[0] in done:
                tasks[0].result()
                return True
            if tasks[1] in done:
                return False
        finally:
            for task in tasks:
                task.cancel()
        if done:
            raise RequestError("the server ended the sequence", status=503)
        said = f"no answer within {self.limits.request_s:g} s; ask for fewer tokens"
        raise RequestError(said, status=504, code="timeout", headers=NOT_AGAIN)

    async def read_tool(self, request: HttpRequest, kind: type[Kind]) -> Kind:
        """Parse a request that needs only the tokenizer."""
        self.client_of(request)
        asked, _ = parse(await self.read_body(request), kind)
        self.admissions.check_model(getattr(asked, "model", None))
        return asked

    # -- its end ----------------------------------------------------------------------------

    async def drain(self, hurry: asyncio.Event) -> None:
        """Refuse new requests, let open ones finish for ``grace_s`` seconds, then end them.

        If an answer is cut, its client learns this at once, even if the sequence still runs.
        """
        self.admissions.is_draining = True
        until_s = time.monotonic() + self.limits.grace_s
        while self.admissions.num_open and not hurry.is_set() and time.monotonic() < until_s:
            await asyncio.sleep(0.02)
        self.ending.set()


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Return a header naming ignored request fields, or {} if there are none."""
    # Clients choose these names: a line break would inject a header.
    plain = sorted({re.sub(r"[^\w.-]", "?", name[:64], flags=re.ASCII) for name in names})
    return {IGNORED: ", ".join(plain[:MAX_IGNORED])} if plain else {}


class JsonResponse(Response):
    media_type = "application/json"

    def __init__(self, content: object, status: int = 200, **options: Any) -> None:
        super().__init__(msgspec.json.encode(content), status, **options)
        self.headers["x-content-type-options"] = "nosniff"


class EventStream(Response):
    """Response with server-sent events. The response's end also ends unfinished choices."""

    media_type = "text/event-stream"

    def __init__(
        self,
        service: Service,
        answer: HttpAnswer,
        running: contextlib.ExitStack,
        headers: Mapping[str, str],
    ):
        # nginx would otherwise buffer the events.
        own = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers={**own, **headers})
        # Starlette sets it for an empty body.
        del self.headers["content-length"]
        self.service, self.answer, self.running = service, answer, running

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        with self.running:
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            try:
                await self.service.until_gone(receive, self._send_all(send))
            except RequestError as error:
                if self.answer.is_blocked:
                    return  # the reader does not read
                # The status is sent already, so the error can only be an event.
                await self._send(send, error.to_dict())
            await send({"type": "http.response.body", "body": b""})

    async def _send_all(self, send: Send) -> None:
        async for chunk in self.answer.chunks():
            await self._send(send, chunk)
        await self._send(send, "[DONE]")

    async def _send(self, send: Send, chunk: Json | str) -> None:
        text = chunk.encode() if isinstance(chunk, str) else msgspec.json.encode(chunk)
        event = b"data: " + text + b"\n\n"
        self.answer.is_blocked = True
        await send({"type": "http.response.body", "body": event, "more_body": True})
        self.answer.is_blocked = False


def engine_facts(engine: Engine) -> Json:
    """Return facts on target, draft and pipeline for the chat page, without folder paths."""
    target, is_whole = engine.target, isinstance(engine.pipeline, LocalPipeline)
    assert isinstance(target, StagedTarget)
    name = str(target.model.name_or_path)
    return {
        "max_model_len": target.max_positions,
        "target": Path(name).name if Path(name).exists() else name,
        "num_parameters": target.model.num_parameters() if is_whole else None,
        "draft": getattr(engine.draft, "draft_type", None),
        "schedule": engine.config.schedule.name,
        "num_stages": target.num_stages,
        "in_one_process": is_whole,
    }


def make_app(service: Service) -> FastAPI:
    # FastAPI's pages load scripts from elsewhere, and its schema knows no msgspec types.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(RequestError)
    async def refuse(request: HttpRequest, error: RequestError) -> Response:
        service.metrics.refused(error.status)
        return JsonResponse(error.to_dict(), error.status, headers=error.headers)

    @app.exception_handler(StarletteHTTPException)
    async def refuse_path(request: HttpRequest, error: StarletteHTTPException) -> Response:
        said = f"{request.method} {request.url.path[:128]}: {error.detail}"
        return await refuse(request, RequestError(said, status=error.status_code))

    @app.exception_handler(Exception)
    async def fail(request: HttpRequest, error: Exception) -> Response:
        return await refuse(
            request, RequestError("the server failed; its log says why", status=500)
        )

    @app.post(ChatRequest.PATH)
    async def chat(request: HttpRequest) -> Response:
        return await service.answer(request, ChatRequest)

    @app.post(CompletionRequest.PATH)
    async def complete(request: HttpRequest) -> Response:
        return await service.answer(request, CompletionRequest)

    def about(name: str = "") -> Json:
        return {
            "id": name or service.names[0],
            "object": "model",
            "created": service.created,
            "owned_by": "pipedraft",
            **engine_facts(service.engine),
        }

    @app.get("/v1/models")
    async def models(request: HttpRequest) -> Response:
        service.client_of(request)
        return JsonResponse({"object": "list", "data": [*map(about, service.names)]})

    @app.get("/v1/models/{name:path}")
    async def model(request: HttpRequest, name: str) -> Response:
        service.client_of(request)
        service.admissions.check_model(name)
        return JsonResponse(about(name))

    @app.get("/health")
    async def health() -> Response:
        # Needs no key: load balancers have none. "failed" hides "draining": it tells more.
        states = {
            "draining": service.admissions.is_draining,
            "failed": service.decoder.failure is not None,
        }
        bad = [name for name, holds in states.items() if holds]
        return JsonResponse({"status": bad[-1] if bad else "ok"}, 503 if bad else 200)

    @app.get("/metrics")
    async def metrics(request: HttpRequest) -> Response:
        service.client_of(request)
        return Response(service.metrics.page(service.decoder.batch), media_type=CONTENT_TYPE_LATEST)

    @app.get("/")
    async def page() -> Response:
        return Response(PAGE, media_type="text/html", headers=PAGE_HEADERS)

    add_tools(app, service)
    return app


def add_tools(app: FastAPI, service: Service) -> None:
    """Add the paths for the tokenizer, the version and the schema, which do not decode."""

    @app.post("/tokenize")
    async def tokenize(request: HttpRequest) -> Response:
        asked = await service.read_tool(request, TokenizeRequest)
        desk = service.admissions
        if asked.messages is not None:
            ids = desk.encode_messages(asked.messages)
        else:
            ids = desk.encode(asked.prompt or "", asked.add_special_tokens)
        texts = desk.tokenizer.convert_ids_to_tokens(ids) if asked.return_token_strs else None
        most = service.engine.target.max_positions
        return JsonResponse(
            {"count": len(ids), "max_model_len": most, "tokens": ids, "token_strs": texts}
        )

    @app.post("/detokenize")
    async def detokenize(request: HttpRequest) -> Response:
        asked = await service.read_tool(request, DetokenizeRequest)
        size = service.engine.target.vocab_size
        if max(asked.tokens, default=0) >= size:
            raise RequestError(f"tokens: {max(asked.tokens)} is no token; give 0 to {size - 1}")
        return JsonResponse({"prompt": service.admissions.tokenizer.decode(asked.tokens)})

    @app.get("/version")
    async def show_version() -> Response:
        return JsonResponse({"version": version("pipedraft")})

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return JsonResponse(openapi_document())
