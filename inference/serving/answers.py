"""Answers on their way: choices, as the thread that decodes tells of them, in OpenAI's shapes."""

import asyncio
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipedraft.inference.arguments import TextStream
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.result import DecodeResult, Observer
from pipedraft.inference.serving.requests import ApiRequest, ChatRequest, Json, RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from pipedraft.inference.batch import Handle
    from pipedraft.inference.serving.metrics import Metrics


@dataclass(frozen=True)
class Piece:
    """New text and tokens of a choice."""

    choice: "Choice"
    text: str
    is_drafted: bool = False
    """The last token was a draft token that the target accepted."""
    steps: Sequence[Sequence[int]] = ()
    """Rows of every stage in each step since the piece before."""
    is_last: bool = False


@dataclass(eq=False)
class Choice(Observer):
    """One output of a request: its text as far as it is certain, its end, its times.

    Filled by the thread that decodes, read by the one that answers once it has ended.
    """

    index: int
    prompt_ids: list[int]
    config: DecodeConfig
    stop_strings: Sequence[str]
    tokenizer: "PreTrainedTokenizerBase"
    metrics: "Metrics"
    tell: Callable[[Piece], None]
    """Called by the thread that decodes."""
    text: str = ""
    result: DecodeResult | None = None
    error: BaseException | None = None
    is_cancelled: bool = False
    """Ends at the next token; set from any thread."""
    is_stopped: bool = False
    """By a stop string."""
    has_ended: bool = False
    handle: "Handle | None" = None
    """The sequence in the batch engine; None: it has ended."""
    _shown: int = 0
    """Characters of ``text`` that were told."""
    _steps: list[Sequence[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stream = TextStream(self.tokenizer)
        self.submitted_s = time.monotonic()
        self.started_s = self.first_s = self.last_s = self.step_s = math.nan

    # -- by the thread that decodes ---------------------------------------------------------

    def start(self) -> None:
        self.started_s = self.step_s = time.monotonic()
        self.metrics.started(len(self.prompt_ids), self.started_s - self.submitted_s)

    def step(self, rows: Sequence[int]) -> None:
        now_s = time.monotonic()
        self.metrics.stepped(now_s - self.step_s)
        self.step_s = now_s
        self._steps.append(tuple(rows))

    def token(self, token: int, is_drafted: bool) -> bool:
        now_s = time.monotonic()
        if math.isnan(self.first_s):
            self.first_s = self.step_s = now_s
            self.metrics.first_token(now_s - self.submitted_s)
        else:
            self.metrics.next_token(now_s - self.last_s)
        self.last_s = now_s
        self.text += self.stream.add(token)
        self._cut()
        shown = len(self.text) if self.is_stopped else len(self.text) - self._held()
        self._tell(shown, is_drafted=is_drafted)
        return self.is_stopped or self.is_cancelled

    def end(self, result: DecodeResult | None, error: BaseException | None = None) -> None:
        """Nothing follows; without a result it was cancelled before its time, or has failed."""
        self.result, self.error = result, error
        if result is not None and not self.is_stopped:
            self.text += self.stream.finish(result.text)
            self._cut()
        self.has_ended = True
        self.metrics.ended(self)
        self._tell(len(self.text), is_last=True)

    def _tell(self, shown: int, **how: Any) -> None:
        piece = self.text[self._shown : shown]
        self._shown = max(shown, self._shown)
        steps, self._steps = self._steps, []
        self.tell(Piece(self, piece, steps=steps, **how))

    def _cut(self) -> None:
        """End the text before the first stop string in it."""
        places = [self.text.find(stop, self._shown) for stop in self.stop_strings]
        found = [place for place in places if place >= 0]
        if found:
            self.text, self.is_stopped = self.text[: min(found)], True

    def _held(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        longest = max(map(len, self.stop_strings), default=1) - 1
        for size in range(min(longest, len(self.text) - self._shown), 0, -1):
            if any(stop.startswith(self.text[-size:]) for stop in self.stop_strings):
                return size
        return 0

    # -- once it has ended ------------------------------------------------------------------

    @property
    def finish_reason(self) -> str:
        """Why a choice ended, as OpenAI names it; "abort": cancelled or failed."""
        if self.is_stopped:
            return "stop"
        if self.result is None or self.result.stop_reason == "stopped":
            return "abort"
        return "stop" if self.result.stop_reason == "eos" else "length"

    @property
    def num_tokens(self) -> int:
        return 0 if self.result is None else len(self.result.token_ids)

    def report(self) -> dict[str, object]:
        """Times in vLLM's per-request shape, and its acceptance figures with L', K and n."""
        between = self.last_s - self.first_s
        gaps, whole = self.num_tokens - 1, self.last_s - self.started_s
        return {
            "time_to_first_token_ms": known((self.first_s - self.started_s) * 1e3),
            "generation_time_ms": known(between * 1e3),
            "queue_time_ms": known((self.started_s - self.submitted_s) * 1e3),
            "mean_itl_ms": known(between / gaps * 1e3) if gaps > 0 else None,
            "tokens_per_second": known(self.num_tokens / whole) if whole > 0 else None,
            "speculative_decoding": None if self.result is None else acceptance(self.result),
        }


def acceptance(result: DecodeResult) -> dict[str, object]:
    """Acceptance counts of one output; a round is vLLM's speculative step."""
    accepted = [
        length - (end != "a")
        for length, end in zip(result.round_lengths, result.round_ends, strict=True)
    ]
    histogram = [0] * (max(accepted, default=0) + 1)
    for count in accepted:
        histogram[count] += 1
    return {
        "mean_acceptance_length": known(result.mean_acceptance_length),
        "draft_acceptance_rate": known(result.draft_acceptance_rate),
        "acceptance_histogram": histogram,
        "num_spec_steps": len(accepted),
        "num_accepted_draft_tokens": result.num_accepted,
        "num_draft_tokens": result.num_tested,
        "num_spec_tokens": len(histogram) - 1,
        "equivalent_acceptance_length": known(result.equivalent_acceptance_length),
        "num_steps": result.num_steps,
        "num_stages": result.num_stages,
    }


def known(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


class HttpAnswer:
    """The answer to one request, made of the pieces that its choices tell of."""

    def __init__(
        self,
        asked: ApiRequest,
        model: str,
        choices: Sequence[Choice],
        pieces: "asyncio.Queue[Piece]",
    ) -> None:
        self.asked, self.choices, self.pieces = asked, choices, pieces
        self.is_blocked = False
        """A chunk is on its way to a reader that does not take it."""
        self._is_chat = isinstance(asked, ChatRequest)
        kind = "chat.completion" if self._is_chat else "text_completion"
        prefix = "chatcmpl" if self._is_chat else "cmpl"
        self._head: Json = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": f"{kind}.chunk" if asked.stream and self._is_chat else kind,
            "created": int(time.time()),
            "model": model,
        }
        self._seed = choices[0].config.seed

    async def _read(self) -> AsyncIterator[Piece]:
        """Pieces until every choice has ended.

        Raises:
            RequestError: one has failed, or was ended by the server.
        """
        left = len(self.choices)
        while left:
            piece = await self.pieces.get()
            left -= piece.is_last
            if piece.is_last and piece.choice.finish_reason == "abort":
                if piece.choice.error is not None:
                    raise RequestError("the sequence failed; the server's log says why", status=500)
                raise RequestError("the server ended the sequence", status=503)
            yield piece

    async def whole(self) -> None:
        """Until all of it is there."""
        async for _ in self._read():
            pass

    def body(self) -> Json:
        """All of it, once it is there."""
        return self._head | {
            "choices": [self._choice(choice, choice.text) for choice in self.choices],
            **self._end(),
        }

    def _choice(self, choice: Choice, text: str) -> Json:
        said: Json = {"index": choice.index, "logprobs": None}
        if self._is_chat:
            said["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            said["text"] = text
        return said | {"finish_reason": choice.finish_reason}

    def _usage(self) -> Json:
        first = {choice.index // self.asked.n: choice for choice in self.choices}
        prompt = sum(len(choice.prompt_ids) for choice in first.values())
        new = sum(choice.num_tokens for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def _end(self) -> Json:
        """Figures of one sequence are no figures of several."""
        report = self.choices[0].report() if len(self.choices) == 1 else None
        return {"usage": self._usage(), "seed": self._seed, "metrics": report}

    async def chunks(self) -> AsyncIterator[Json]:
        options = self.asked.stream_options
        rest: Json = {"usage": None} if options.include_usage else {}
        if self._is_chat:
            for choice in self.choices:
                yield self._chunk(choice.index, {"role": "assistant", "content": ""}) | rest
        left = len(self.choices)
        async for piece in self._read():
            index = piece.choice.index
            events: Json = {}
            if self.asked.pipedraft_events:
                origin = "draft" if piece.is_drafted else "target"
                events = {"pipedraft": {"origin": origin, "steps": piece.steps}}
            if piece.text or (events and not piece.is_last):
                yield self._chunk(index, {"content": piece.text}) | events | rest
            if piece.is_last:
                left -= 1
                is_end = not left and not options.include_usage
                end = {"seed": self._seed, "metrics": self._end()["metrics"]} if is_end else {}
                yield self._chunk(index, {}, piece.choice.finish_reason) | rest | end
        if options.include_usage:
            yield self._head | {"choices": []} | self._end()

    def _chunk(self, index: int, delta: Json, finish_reason: str | None = None) -> Json:
        said: Json = {"index": index, "logprobs": None, "finish_reason": finish_reason}
        said |= {"delta": delta} if self._is_chat else {"text": delta.get("content", "")}
        return self._head | {"choices": [said]}
