"""Build answers in OpenAI's format from the choices that the decoding thread reports."""

import asyncio
import json
import math
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...files import Values
from ...responses import Part
from ..config import DecodeConfig
from ..demands import Demands
from ..result import DecodeResult, Observer
from ..text_stream import AnswerStream
from .errors import Json, RequestError
from .logprobs import TokenLogprob, as_chat, as_completion, measure
from .metrics import Metrics
from .requests import ApiRequest, ChatRequest

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from ..batch import Handle
    from ..tree import TokenTree
    from ..verdict import Verdict


@dataclass(frozen=True)
class Piece:
    """New text and tokens in a choice."""

    choice: "Choice"
    text: str
    thinking: str = ""
    calls: Sequence[Json] = ()
    """Tool calls completed since the previous piece, in OpenAI's form."""
    is_drafted: bool = False
    """True if the last token is an accepted draft token."""
    rejected: Sequence[int] = ()
    """Draft tokens that were rejected at the last token's place."""
    steps: Sequence[Sequence[int]] = ()
    """Rows per stage in each step since the previous piece."""
    logprobs: Sequence[TokenLogprob] = ()
    """Log-probabilities for tokens since the previous piece, on request."""
    num_tokens: int = 0
    """Tokens in the choice so far."""
    is_last: bool = False


@dataclass(eq=False)
class Choice(Observer):
    """One output for a request, with its verified text, end and times.

    The decoding thread fills a choice. The answering thread reads it after the choice has ended.
    """

    index: int
    prompt_ids: list[int]
    config: DecodeConfig
    asked: ApiRequest
    end_ids: frozenset[int]
    """End tokens for the choice."""
    tokenizer: "PreTrainedTokenizerBase"
    metrics: Metrics
    tell: Callable[[Piece], None]
    """Receives new pieces, on the decoding thread."""
    demands: Demands = Demands()
    logprobs: list[TokenLogprob] = field(default_factory=list)
    result: DecodeResult | None = None
    error: BaseException | None = None
    is_cancelled: bool = False
    """True to end the choice at its next token; any thread may set it."""
    is_stopped: bool = False
    """True if a stop string ended the choice."""
    has_ended: bool = False
    handle: "Handle | None" = None
    """Sequence in the batch engine; None after its end."""
    calls: list[Json] = field(default_factory=list)
    """Tool calls in the answer so far, in OpenAI's form."""
    _told: list[str] = field(default_factory=list)
    _rest: str = ""
    """Text not reported yet."""
    _thought: str = ""
    """Thinking not reported yet."""
    _num_calls_told: int = 0
    _num_new: int = 0
    _num_logprobs_told: int = 0
    _steps: list[Sequence[int]] = field(default_factory=list)
    _rejected: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        skips = self.asked.skip_special_tokens
        # Of a chat alone: a completion's text is what the target writes.
        prompt = self.prompt_ids if skips and isinstance(self.asked, ChatRequest) else None
        self.stream = AnswerStream(self.tokenizer, prompt, skip_special_tokens=skips)
        self.submitted_s = time.monotonic()
        self.started_s = self.first_s = self.last_s = self.step_s = math.nan

    # -- in the decoding thread -------------------------------------------------------------

    def start(self) -> None:
        self.started_s = self.step_s = time.monotonic()
        self.metrics.started(len(self.prompt_ids), self.started_s - self.submitted_s)

    def step(self, rows: Sequence[int]) -> None:
        now_s = time.monotonic()
        self.metrics.stepped(now_s - self.step_s)
        self.step_s = now_s
        self._steps.append(tuple(rows))

    def verified(self, tree: "TokenTree", walk: "Verdict") -> None:
        if walk.tests and not walk.tests[-1]:
            self._rejected = [tree.tokens[row] for row in tree.children(walk.path[-1])]

    def token(self, token: int, is_drafted: bool) -> bool:
        now_s = time.monotonic()
        if math.isnan(self.first_s):
            # Time steps from the first token on: the prefill is none.
            self.first_s = self.step_s = now_s
            self.metrics.first_token(now_s - self.submitted_s)
        else:
            self.metrics.next_token(now_s - self.last_s)
        self.last_s = now_s
        self._num_new += 1
        is_stop = token in self.asked.stop_token_ids or not self.asked.skip_special_tokens
        # As in vLLM, an end token adds no text.
        if not (is_stop and token in self.end_ids):
            self._take(self.stream.add(token))
        self._cut()
        # A possible start of a stop string must wait: sent text cannot be taken back.
        size = len(self._rest) - (0 if self.is_stopped else self._held())
        # A rejection belongs to its replacement by the target, not to accepted tokens before.
        rejected = [] if is_drafted else self._rejected
        self._rejected = self._rejected if is_drafted else []
        self._tell(size, is_drafted=is_drafted, rejected=rejected)
        return self.is_stopped or self.is_cancelled

    def logits(self, token: int, logits_V: "Tensor") -> None:
        if self.asked.num_logprobs is not None:
            found = measure(self.tokenizer, token, logits_V, self.asked.num_logprobs)
            self.logprobs.append(found)

    def _take(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if part.field == "content":
                self._rest += part.text
            elif part.field == "thinking":
                self._thought += part.text
        response = self.stream.response
        for call in () if response is None else response.tool_calls[len(self.calls) :]:
            self.calls.append(api_call(call, len(self.calls)))

    @property
    def text(self) -> str:
        return "".join((*self._told, self._rest))

    @property
    def thinking(self) -> str:
        return "" if self.stream.response is None else self.stream.response.thinking

    def end(self, result: DecodeResult | None, error: BaseException | None = None) -> None:
        """End the choice. ``result`` is None if the choice was cancelled or has failed."""
        self.result, self.error = result, error
        # Nothing may follow a stop string.
        if result is not None and not self.is_stopped:
            self._take(self.stream.finish())
            self._cut()
        # Set before the last piece: after reading that, ``Admissions.running`` checks this flag.
        self.has_ended = True
        self.metrics.ended(
            self.finish_reason,
            result,
            total_s=self.last_s - self.submitted_s,
            after_first_s=self.last_s - self.first_s,
        )
        self._tell(len(self._rest), is_last=True)

    def _tell(self, size: int, **how: Any) -> None:
        piece, self._rest = self._rest[:size], self._rest[size:]
        if piece:
            self._told.append(piece)
        steps, self._steps = self._steps, []
        logprobs = self.logprobs[self._num_logprobs_told :]
        self._num_logprobs_told = len(self.logprobs)
        how |= {"steps": steps, "logprobs": logprobs, "num_tokens": self._num_new}
        how |= {"thinking": self._thought, "calls": self.calls[self._num_calls_told :]}
        self._thought, self._num_calls_told = "", len(self.calls)
        self.tell(Piece(self, piece, **how))

    def _cut(self) -> None:
        """End the text before its first stop string."""
        found = [self._rest.find(stop) for stop in self.asked.stop_strings if stop in self._rest]
        if found:
            self._rest, self.is_stopped = self._rest[: min(found)], True

    def _held(self) -> int:
        """Return how many of the last characters may be the start of a stop string."""
        starts = (stop[:size] for stop in self.asked.stop_strings for size in range(1, len(stop)))
        return max((len(start) for start in starts if self._rest.endswith(start)), default=0)

    # -- once it has ended ------------------------------------------------------------------

    @property
    def finish_reason(self) -> str:
        """Return OpenAI's name for the reason of ending, or "abort" if cancelled or failed."""
        if self.is_stopped:
            return "stop"
        if self.result is None or self.result.stop_reason == "stopped":
            return "abort"
        if self.calls and self.result.stop_reason == "eos":
            return "tool_calls"
        return "stop" if self.result.stop_reason == "eos" else "length"

    @property
    def num_tokens(self) -> int:
        return 0 if self.result is None else len(self.result.token_ids)

    def report(self) -> dict[str, object]:
        """Return times in vLLM's per-request format, and acceptance figures with L', K and n."""
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


def api_call(call: Values, index: int) -> Json:
    """Return a tool call in OpenAI's form, with its index for streams."""
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    own = {"name": function["name"], "arguments": arguments}
    return {
        "index": index,
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": own,
    }


def delta_of(piece: Piece) -> Json:
    """Return a piece's text as a stream's delta."""
    delta: Json = {"reasoning_content": piece.thinking} if piece.thinking else {}
    if piece.calls:
        delta["tool_calls"] = [*piece.calls]
    return delta if delta and not piece.text else delta | {"content": piece.text}


def acceptance(result: DecodeResult) -> dict[str, object]:
    """Return one output's acceptance counts. vLLM calls a round a speculative step.

    Like ``num_draft_tokens``, ``per_step_drafted`` counts tested draft tokens.
    """
    rounds = list(zip(result.round_lengths, result.round_ends, strict=True))
    # Every round has one token from the target itself, unless it ends with "a".
    accepted = [length - (end != "a") for length, end in rounds]
    counts = Counter(accepted)
    histogram = [counts[count] for count in range(max(accepted, default=0) + 1)]
    return {
        "mean_acceptance_length": known(result.mean_acceptance_length),
        "draft_acceptance_rate": known(result.draft_acceptance_rate),
        "acceptance_histogram": histogram,
        "num_spec_steps": len(accepted),
        "num_accepted_draft_tokens": result.num_accepted,
        "num_draft_tokens": result.num_tested,
        "num_spec_tokens": len(histogram) - 1,
        "per_step_accepted": accepted,
        "per_step_drafted": [
            count + (end == "r") for count, (_, end) in zip(accepted, rounds, strict=True)
        ],
        "equivalent_acceptance_length": known(result.equivalent_acceptance_length),
        "num_steps": result.num_steps,
        "num_stages": result.num_stages,
    }


def known(value: float) -> float | None:
    """Map NaN to None, since JSON has no NaN."""
    return value if math.isfinite(value) else None


class HttpAnswer:
    """Answer to one request, assembled from its choices' pieces."""

    def __init__(
        self,
        asked: ApiRequest,
        model: str,
        choices: Sequence[Choice],
        pieces: "asyncio.Queue[Piece]",
    ) -> None:
        self.asked, self.choices, self.pieces = asked, choices, pieces
        self.is_blocked = False
        """True while a chunk waits for a slow reader."""
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
        """Yield pieces until every choice has ended, or raise RequestError if one is aborted."""
        left = len(self.choices)
        while left:
            piece = await self.pieces.get()
            left -= piece.is_last
            if piece.is_last and piece.choice.finish_reason == "abort":
                if piece.choice.error is not None:
                    raise RequestError("the sequence failed; the server's log says why", status=500)
                raise RequestError("the server ended the sequence", status=503)
            yield piece

    async def wait(self) -> None:
        async for _ in self._read():
            pass

    def body(self) -> Json:
        """Return the complete answer."""
        found = self._head | {
            "choices": [self._choice(choice) for choice in self.choices],
            **self._end(),
        }
        if self._is_chat and self.asked.return_token_ids:
            found["prompt_token_ids"] = self.choices[0].prompt_ids
        return found

    def _choice(self, choice: Choice) -> Json:
        said: Json = {"index": choice.index, "logprobs": self._logprobs(choice.logprobs)}
        if self._is_chat:
            message: Json = {"role": "assistant", "content": choice.text, "refusal": None}
            if choice.thinking:
                message["reasoning_content"] = choice.thinking
            if choice.calls:
                calls = [{n: x for n, x in call.items() if n != "index"} for call in choice.calls]
                message["tool_calls"] = calls
            said["message"] = message
        else:
            said["text"] = choice.text
        if self.asked.return_token_ids:
            said["token_ids"] = [] if choice.result is None else choice.result.token_ids
            if not self._is_chat:
                said["prompt_token_ids"] = choice.prompt_ids
        return said | {"finish_reason": choice.finish_reason}

    def _logprobs(self, found: Sequence[TokenLogprob], first: int = 0) -> Json | None:
        if self.asked.num_logprobs is None:
            return None
        return as_chat(found) if self._is_chat else as_completion(found, first)

    def _usage(self, new: int | None = None) -> Json:
        # A prompt counts once, however many outputs it has, as in OpenAI's usage.
        first = {choice.index // self.asked.n: choice for choice in self.choices}
        prompt = sum(len(choice.prompt_ids) for choice in first.values())
        if new is None:
            new = sum(choice.num_tokens for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def _end(self) -> Json:
        """Return usage and seed, and the metrics if there is only one sequence."""
        report = self.choices[0].report() if len(self.choices) == 1 else None
        return {"usage": self._usage(), "seed": self._seed, "metrics": report}

    async def chunks(self) -> AsyncIterator[Json]:
        options, has_events = self.asked.stream_options, self.asked.pipedraft_events
        rest: Json = {"usage": None} if options.include_usage else {}
        is_told = options.include_usage and options.continuous_usage_stats
        if self._is_chat:
            if is_told:
                rest = {"usage": self._usage(0)}
            for choice in self.choices:
                # OpenAI's first chunk per choice has the role alone.
                yield self._chunk(choice.index, {"role": "assistant", "content": ""}) | rest
        left = len(self.choices)
        counts, sizes = Counter[int](), Counter[int]()
        waiting = defaultdict[int, list[TokenLogprob]](list)
        async for piece in self._read():
            index = piece.choice.index
            counts[index] = piece.num_tokens
            if is_told:
                rest = {"usage": self._usage(counts.total())}
            # Log-probabilities wait for their tokens' text: clients pair them within a chunk.
            waiting[index] += piece.logprobs
            logprobs: Json = {}
            has_parts = bool(piece.text or piece.thinking or piece.calls)
            if waiting[index] and (has_parts or has_events or piece.is_last):
                found = waiting.pop(index)
                logprobs = {"logprobs": self._logprobs(found, sizes[index])}
                sizes[index] += sum(len(one.text) for one in found)
            if has_parts or (has_events and not piece.is_last):
                events: Json = {"pipedraft": self._event(piece)} if has_events else {}
                yield self._chunk(index, delta_of(piece), **logprobs) | events | rest
                logprobs = {}
            if piece.is_last:
                left -= 1
                # With usage requested one more chunk follows, and has these figures.
                is_end = not left and not options.include_usage
                end = {"seed": self._seed, "metrics": self._end()["metrics"]} if is_end else {}
                reason = piece.choice.finish_reason
                yield self._chunk(index, {}, finish_reason=reason, **logprobs) | rest | end
        if options.include_usage:
            yield self._head | {"choices": []} | self._end()

    def _event(self, piece: Piece) -> Json:
        origin = "draft" if piece.is_drafted else "target"
        rejected = [piece.choice.tokenizer.decode([token]) for token in piece.rejected]
        return {"origin": origin, "rejected": rejected, "steps": piece.steps}

    def _chunk(self, index: int, delta: Json, **fields: object) -> Json:
        said: Json = {"index": index, "logprobs": None, "finish_reason": None} | fields
        said |= {"delta": delta} if self._is_chat else {"text": delta.get("content", "")}
        return self._head | {"choices": [said]}
