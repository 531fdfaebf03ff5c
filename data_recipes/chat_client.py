"""Get answers from an OpenAI chat completions server (vLLM, SGLang), many at a time."""

import asyncio
import json
import os
import random
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar

import httpx2

from ..chats import inline_thinking, with_arguments
from ..errors import UsageError
from ..files import Values
from ..options import Options, option
from ..responses import Response
from .answers import (
    AnswerSampling,
    Dialogue,
    RowFailed,
    TargetLost,
    kept_response,
    split_served,
)
from .conversations import Message, read_calls

T = TypeVar("T")

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 60.0
LONGEST_RETRY_AFTER_S = 600.0  # a wrong clock or header must not stop a run for a day
LARGEST_ANSWER_BYTES = 16 << 20
TRY_AGAIN = {408, 409, 425, 429}  # and 5xx
REASONING_FIELDS = ("reasoning_content", "reasoning")
CUT_OFF = {"abort", "error"}  # finish reasons of a server that gave up
NO_ROOM = re.compile(r"max_tokens|context|positions", re.IGNORECASE)
"""Matches the refusal when prompt and --max-tokens together exceed the context."""
FAILURES_IN_A_ROW = 100
"""Stop the run after this many consecutive failed rows: the server is at fault."""


class TryAgain(Exception):
    """Raised for a temporary fault, after which a request may be tried again."""

    def __init__(self, reason: str, *, wait_s: float = 0.0, is_unreachable: bool = False) -> None:
        super().__init__(reason)
        self.wait_s = wait_s
        self.is_unreachable = is_unreachable


def is_address(text: str) -> bool:
    """Return True for http(s)://HOST[:PORT]/..."""
    try:
        url = httpx2.URL(text)
    except httpx2.InvalidURL:
        return False
    return url.scheme in ("http", "https") and bool(url.host) and (url.port or 80) < 2**16


@dataclass(frozen=True, kw_only=True)
class ChatServerOptions(Options):
    """requests to a server"""

    model: str | None = None
    """model name on the server"""
    concurrency: int = option(64, least=1)
    """requests at a time"""
    attempts: int = option(8, least=1)
    """attempts per answer, with growing waits"""
    deadline: float = option(600.0, metavar="SECONDS")
    """timeout per request"""
    key_variable: str | None = None
    """name of the environment variable with the API key"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.key_variable and not os.environ.get(self.key_variable):
            raise UsageError(
                f"--key-variable: {self.key_variable!r} is not set in the environment; "
                "export the key under that name"
            )


async def run_workers(work: Callable[[], Coroutine[Any, Any, None]], count: int) -> None:
    """Run ``count`` workers at once. The first error ends all of them, and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(work())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors


class ChatServer:
    """Client of one server. ``async with`` closes its connections."""

    def __init__(
        self,
        address: str,
        options: ChatServerOptions,
        sampling: AnswerSampling,
        *,
        field: str = "--server",
    ) -> None:
        """
        Args:
            field: the option that names the server in messages.
        """
        self.address, self.options, self.sampling = address, options, sampling
        self.field = field
        self.num_requests = 0
        self.num_repeats = 0
        self.thinking_field = REASONING_FIELDS[0]
        """Field in which the server returns an answer's thinking; "" for the content itself."""
        limits = httpx2.Limits(
            max_connections=options.concurrency, max_keepalive_connections=options.concurrency
        )
        # Without compression a small body cannot become a large one.
        headers = {"Accept-Encoding": "identity"}
        if options.key_variable:
            headers["Authorization"] = f"Bearer {os.environ[options.key_variable]}"
        self.client = httpx2.AsyncClient(limits=limits, headers=headers, timeout=None)

    @property
    def base(self) -> str:
        """Return the API's address, with the /v1 that --server may omit."""
        url = httpx2.URL(self.address.strip().rstrip("/").removesuffix("/chat/completions"))
        return str(url.copy_with(path="/v1") if url.path in ("", "/") else url)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()

    async def models(self) -> list[Values] | None:
        """Return the model list, or None after a fault that may be temporary.

        Raises:
            TargetLost: nobody listens there.
            ValueError: no such server, or a wrong key.
        """
        try:
            listing = await self._send("GET", "/models")
            return [{**entry, "id": str(entry["id"])} for entry in listing["data"]]
        except TryAgain as fault:
            if fault.is_unreachable:
                raise TargetLost(f"{self.field}: {self.base}: {fault}; start it") from fault
            return None
        except TargetLost as error:
            raise ValueError(str(error)) from error
        except (RowFailed, KeyError, TypeError) as error:
            raise ValueError(
                f"{self.field}: {self.base}/models is no list of models ({error}); give the "
                "address of an OpenAI-compatible server up to /v1"
            ) from error

    async def check(self) -> None:
        """Check address, key and model with the model list. Ignore faults that may be temporary."""
        listing = await self.models()
        known = [entry["id"] for entry in listing or ()]
        if listing is not None and self.options.model not in known:
            raise ValueError(
                f"--model: {self.options.model!r} is not served at {self.base}; it has "
                + ", ".join(known)
            )

    async def answer_dialogues(
        self, dialogues: Iterator[Dialogue], settle: Callable[[Dialogue, str], None]
    ) -> None:
        """Answer every dialogue, with at most ``concurrency`` requests at a time.

        A dialogue's turns run in sequence. ``dialogues`` is read only as fast as answers arrive.

        Args:
            settle: called with each completed dialogue and "", or each failed dialogue and the
                reason.
        """
        failures = 0

        async def work() -> None:
            nonlocal failures
            for dialogue in dialogues:
                reason = ""
                try:
                    while not dialogue.is_complete:
                        answer, is_cut = await self.retried(partial(self._ask, dialogue))
                        dialogue.add(answer, is_cut=is_cut)
                except RowFailed as error:
                    reason = str(error)
                settle(dialogue, reason)
                failures = failures + 1 if reason else 0
                if failures >= FAILURES_IN_A_ROW:
                    said = f"{failures} rows in a row have failed: {reason}"
                    raise TargetLost(f"{self.field}: {said}")

        await run_workers(work, self.options.concurrency)

    async def post(self, path: str, body: Values) -> Any:
        """Request another path in one attempt. "/../NAME" is beside the API's address."""
        return await self._send("POST", path, body)

    async def get(self, path: str) -> bytes:
        """Return another path's content, in one attempt."""
        return await self._fetch("GET", path)

    async def retried(self, ask: Callable[[int], Awaitable[T]]) -> T:
        """Make attempts until one succeeds, at most ``options.attempts``.

        Args:
            ask: makes one attempt, given its number from 0.

        Raises:
            RowFailed: the server refuses this question, or no attempt succeeded.
            TargetLost: the server refuses every question, or is unreachable.
        """
        last = self.options.attempts - 1
        for attempt in range(self.options.attempts):
            try:
                return await ask(attempt)
            except TryAgain as error:
                fault = error
            if attempt < last:
                self.num_repeats += 1
                grown_s = min(FIRST_WAIT_S * 2**attempt, LONGEST_WAIT_S)
                # Random, so requests that failed together do not all repeat at once.
                await asyncio.sleep(max(fault.wait_s, grown_s * random.uniform(0.5, 1)))
        if fault.is_unreachable:
            raise TargetLost(f"{self.field}: {self.base}: {fault}") from fault
        raise RowFailed(f"{fault} ({self.options.attempts} attempts)") from fault

    async def _ask(self, dialogue: Dialogue, attempt: int) -> tuple[Response, bool]:
        sampling, row, turn = self.sampling, dialogue.row, dialogue.num_answers
        turns = [self._as_given(turn) for turn in dialogue.question()]
        question = [{n: x for n, x in turn.items() if n != "train"} for turn in turns]
        body: Values = {
            "model": self.options.model,
            "messages": question,
            "max_tokens": sampling.max_tokens,
            "temperature": 0.0,
        }
        if not sampling.is_greedy(row):
            body["temperature"], body["top_p"] = sampling.temperature, sampling.top_p
            body["seed"] = sampling.seed_of(row, turn, attempt)
        if dialogue.tools:
            body["tools"] = dialogue.tools
        if dialogue.variables:
            body["chat_template_kwargs"] = dialogue.variables
        try:
            payload = await self._send("POST", "/chat/completions", body)
        except RowFailed as error:
            if not NO_ROOM.search(str(error)):
                raise
            del body["max_tokens"]  # the server then gives what its context leaves
            payload = await self._send("POST", "/chat/completions", body)
        try:
            message = payload["choices"][0]["message"]
            calls = read_calls(message)
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            raise TryAgain("answer is not a chat completion") from error
        content, reasoning, finish_reason = read_choice(payload, is_call=bool(calls))
        response = split_served(content, reasoning)
        if response.thinking.strip():
            names = [name for name in REASONING_FIELDS if message.get(name)]
            self.thinking_field = names[0] if names else ""
        response.tool_calls = calls
        return kept_response(response, thinking=sampling.thinking), finish_reason == "length"

    def _as_given(self, turn: Message) -> Message:
        """Return a turn as the server gave it: its thinking in the same field, or the content."""
        turn = with_arguments(turn, as_text=True)
        name = self.thinking_field
        if "reasoning_content" not in turn or name == "reasoning_content":
            return turn
        if not name:
            return inline_thinking(turn)
        return {name if x == "reasoning_content" else x: value for x, value in turn.items()}

    async def _send(self, method: str, path: str, body: dict | None = None) -> Any:
        """Return one response's JSON value."""
        data = await self._fetch(method, path, body)
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise TryAgain("answer is not JSON") from error

    async def _fetch(self, method: str, path: str, body: dict | None = None) -> bytes:
        """Return one response's content. The deadline covers connecting, waiting and reading."""
        self.num_requests += method == "POST"
        # httpx2 would send "/v1/../tokenize" as it is.
        above = path.startswith("/../")
        url = self.base.rpartition("/")[0] + path[3:] if above else self.base + path
        try:
            async with (
                asyncio.timeout(self.options.deadline),
                self.client.stream(method, url, json=body) as response,
            ):
                data = await read_body(response)
        except TimeoutError as error:
            raise TryAgain(f"no answer within {self.options.deadline:g} s") from error
        except httpx2.ConnectError as error:
            raise TryAgain(f"no connection ({error})", is_unreachable=True) from error
        except httpx2.RequestError as error:
            raise TryAgain(f"{type(error).__name__}: {error}") from error
        self._judge(response, url, data)
        return data

    def _judge(self, response: httpx2.Response, url: str, data: bytes) -> None:
        status = response.status_code
        said = f"HTTP {status}: {' '.join(data[:1000].decode('utf-8', 'replace').split())[:200]}"
        if status == 200:
            return
        if status in TRY_AGAIN or status >= 500:
            raise TryAgain(said, wait_s=retry_after_s(response.headers.get("Retry-After")))
        if status in (401, 403):
            raise TargetLost(
                f"--key-variable: {url} answered {said}; name the environment variable that holds "
                "the key"
            )
        if status in (404, 405) or status < 400:
            raise TargetLost(f"{self.field}: {url} answered {said}; check address and --model")
        raise RowFailed(said)


async def read_body(response: httpx2.Response) -> bytes:
    """Read a response's body. Raise RowFailed if it exceeds the maximum answer size."""
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > LARGEST_ANSWER_BYTES:
            raise RowFailed(f"answer above {LARGEST_ANSWER_BYTES >> 20} MiB")
    return bytes(body)


def read_choice(payload: Any, *, is_call: bool = False) -> tuple[str, str, str]:
    """Return a chat completion's content, reasoning and finish reason, or raise TryAgain.

    A server may return thinking in ``reasoning_content``, or in ``reasoning`` (later vLLM).
    """
    try:
        choice = payload["choices"][0]
        message, finish_reason = choice["message"], choice.get("finish_reason") or ""
        content = message.get("content") or ""
        reasoning = next((message[x] for x in REASONING_FIELDS if message.get(x)), "")
        is_text = all(isinstance(text, str) for text in (content, reasoning, finish_reason))
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise TryAgain("answer is not a chat completion") from error
    if not is_text:
        raise TryAgain("answer is not text")
    if finish_reason in CUT_OFF:
        raise TryAgain(f"answer ended with {finish_reason!r}")
    if not content.strip() and not reasoning.strip() and not is_call:
        raise TryAgain("empty answer")
    return content, reasoning, finish_reason


def retry_after_s(header: str | None) -> float:
    """Return the seconds in a Retry-After header, or 0 for a date or without a header."""
    try:
        # NaN is not above 0.
        return min(max(0.0, float(header or 0)), LONGEST_RETRY_AFTER_S)
    except ValueError:
        return 0.0
