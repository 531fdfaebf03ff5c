"""What clients ask for: the one parser of requests into typed, bounded structures."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from pipedraft.cli import one_line
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.rules.filters import TokenFilters

MAX_SEED = int(9e18)
MAX_DEPTH = 16
"""Of arrays and objects in a request; its own structures have four levels."""
Json: TypeAlias = dict[str, object]
Count = Annotated[int, Meta(ge=1, le=2**31)]
StopString = Annotated[str, Meta(min_length=1, max_length=256)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1)]

HARMLESS = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prediction"),
    *("prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls"),
}
"""Fields of OpenAI's that do not change the answer."""
WITHOUT_EFFECT: Mapping[str, tuple[object, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "ignore_eos": (False,),
    "min_tokens": (0,),
}
"""Fields that would change the answer, each with the values by which it does not."""


class RequestError(Exception):
    """A request that is not answered; said in the shape of OpenAI's errors."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status
        self.headers = dict(headers or {})

    def to_dict(self) -> Json:
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error")
        return {
            "error": {
                "message": one_line(str(self)),
                "type": "server_error" if self.status >= 500 else kind,
                "param": self.param,
                "code": self.code,
            }
        }


OF_STREAMS = ("stream_options", "pipedraft_events")


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    include_usage: bool = False
    include_obfuscation: bool = False


class TextPart(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    text: str


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Meta(max_length=1024)]
    name: Annotated[str, Meta(max_length=256)] = ""

    def turn(self) -> dict[str, str]:
        """The message as chat templates read it."""
        parts = [self.content] if isinstance(self.content, str) else [p.text for p in self.content]
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": "".join(parts)}


class ApiRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that chat and plain completion requests share."""

    PATH: ClassVar[str]
    model: str | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    typical_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    n: Annotated[int, Meta(ge=1, le=128)] = 1
    seed: Annotated[int, Meta(ge=-MAX_SEED, le=MAX_SEED)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    pipedraft_events: bool = False
    """Every chunk says who made its tokens and how full the stages were."""

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def longest(self) -> int | None:
        """New tokens at most; None: nothing is said."""
        return self.max_tokens

    @property
    def num_prompts(self) -> int:
        return 1

    def config(self, base: DecodeConfig, *, seed: int, new_tokens: int) -> DecodeConfig:
        """How one sequence is decoded.

        Args:
            base: schedule, stages, acceptance rule.

        Raises:
            RequestError: a value that the engine does not take.
        """
        is_sampled = self.temperature > 0
        filters = TokenFilters() if not is_sampled else self._filters()
        try:
            return replace(
                base,
                temperature=self.temperature,
                verifier=base.verifier if is_sampled else "auto",
                seed=seed,
                max_new_tokens=new_tokens,
                **{name: getattr(filters, name) for name in TokenFilters.__dataclass_fields__},
            )
        except ValueError as error:
            raise RequestError(str(error), param=str(error).partition(":")[0]) from error

    def _filters(self) -> TokenFilters:
        return TokenFilters(
            top_k=max(self.top_k, 0),  # -1: all, as vLLM has it
            top_p=self.top_p,
            min_p=self.min_p,
            typical_p=self.typical_p,
        )


class ChatRequest(ApiRequest, kw_only=True):
    PATH = "/v1/chat/completions"
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=1024)]
    max_completion_tokens: Count | None = None
    chat_template_kwargs: Json = {}
    """Variables of the chat template, as vLLM has them."""

    def longest(self) -> int | None:
        asked = [x for x in (self.max_completion_tokens, self.max_tokens) if x is not None]
        return min(asked, default=None)


class CompletionRequest(ApiRequest, kw_only=True):
    PATH = "/v1/completions"
    prompt: str | Annotated[list[str | TokenId | TokenIds], Meta(min_length=1)]
    """A text, its token ids, or several of one of these."""

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, str) and len(set(map(type, self.prompt))) > 1:
            raise ValueError("texts and token ids in one list")

    @property
    def num_prompts(self) -> int:
        return len(self.prompts())

    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [one for one in self.prompt if isinstance(one, int)]
        return [ids] if ids else [one for one in self.prompt if not isinstance(one, int)]


Kind = TypeVar("Kind", bound=ApiRequest)


def parse(body: bytes, kind: type[Kind]) -> Kind:
    """A request's body.

    Raises:
        RequestError: not JSON, or not such a request; the field is named.
    """
    try:
        content = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(content, dict):
        raise RequestError("the body is not a JSON object", code="invalid_json")
    if is_deeper(content, MAX_DEPTH):
        raise RequestError(f"the body has more than {MAX_DEPTH} levels", code="invalid_json")
    fields = {name: value for name, value in content.items() if value is not None}
    known = kind.__struct_fields__
    for name in fields.keys() - set(known) - HARMLESS:
        if name not in WITHOUT_EFFECT:
            near = difflib.get_close_matches(name[:64], known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise RequestError(
                f"{name[:64]}: unknown field{hint}", param=name[:64], code="unknown_parameter"
            )
        given = fields[name], isinstance(fields[name], bool)  # 0 logprobs are the chosen token's
        if given not in [(value, isinstance(value, bool)) for value in WITHOUT_EFFECT[name]]:
            raise RequestError(
                f"{name}: not supported; leave it out", param=name, code="unsupported_parameter"
            )
    fields = {name: fields[name] for name in known if name in fields}
    for name in OF_STREAMS:
        if fields.get(name) and not fields.get("stream"):
            raise RequestError(f"{name}: of an answer with stream: true alone", param=name)
    messages = fields.get("messages")
    if isinstance(messages, list):
        fields["messages"] = [without_nulls(turn) for turn in messages]
    try:
        return msgspec.convert(fields, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise wrong(str(error)) from error


def without_nulls(turn: object) -> object:
    """A message without the fields that clients send back as null, or as no calls."""
    if not isinstance(turn, dict):
        return turn
    return {name: value for name, value in turn.items() if value not in (None, [])}


def is_deeper(value: object, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    entries = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(is_deeper(entry, levels - 1) for entry in entries)


def wrong(text: str) -> RequestError:
    """msgspec's message with the field first."""
    said, _, place = text.partition(" - at `$")
    param = place.strip("`").lstrip(".").replace("[...]", "")
    if found := re.search(r"(?:missing required|contains unknown) field `([^`]*)`", said):
        param = f"{param}.{found[1]}".lstrip(".")
    return RequestError(f"{param or 'body'}: {said}", param=param or None, code="invalid_value")
