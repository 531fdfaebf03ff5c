"""Parse client input into typed requests with bounded values."""

import re
from dataclasses import replace
from importlib.metadata import version
from typing import Annotated, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from ...files import Values
from ..config import DecodeConfig
from ..demands import Demands
from ..rules.filters import TokenFilters
from ..rules.temperature import MIN_TEMPERATURE
from ..schedules.autoregressive import Autoregressive
from .errors import Json, RequestError
from .fields import plain_message, split_fields

MAX_SEED = 2**63 - 1
MAX_DEPTH = 16
"""Maximum nesting depth in a request; a valid request needs four levels."""
Count = Annotated[int, Meta(ge=1, le=2**31)]
StopString = Annotated[str, Meta(min_length=1, max_length=256)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1)]

OF_STREAMS = ("stream_options", "pipedraft_events")


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    """Add usage so far to every chunk; only with ``include_usage``."""
    include_obfuscation: bool = False


class TextPart(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    text: str


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Meta(max_length=1024)] | None = None
    name: Annotated[str, Meta(max_length=256)] = ""
    reasoning_content: str = ""
    reasoning: str = ""
    """Newer name for ``reasoning_content``, accepted because clients send an answer's fields
    back."""

    def __post_init__(self) -> None:
        if self.content is None:
            # A reasoning model's turn may have been cut before its content.
            if self.role != "assistant" or not (self.reasoning_content or self.reasoning):
                raise ValueError("Object missing required field `content`")
            self.content = ""

    def turn(self) -> dict[str, str]:
        """Return the message as chat templates read it."""
        content = self.content or ""
        parts = [content] if isinstance(content, str) else [part.text for part in content]
        # Few chat templates know a developer role.
        role = "system" if self.role == "developer" else self.role
        turn = {"role": role, "content": "".join(parts)}
        thought = self.reasoning_content or self.reasoning
        if thought:  # the template decides in which turns the model sees it
            turn["reasoning_content"] = thought
        return turn


class ApiRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields shared by chat and completion requests."""

    PATH: ClassVar[str]
    model: str | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    typical_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    n: Annotated[int, Meta(ge=1, le=128)] = 1
    seed: Annotated[int, Meta(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] = []
    min_tokens: Annotated[int, Meta(ge=0, le=2**31)] = 0
    """Minimum tokens before an end token may be emitted."""
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] = []
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    """Add prompt and output token ids to the answer, as in vLLM; not in streams."""
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    pipedraft_events: bool = False
    """True: every chunk also tells its last token's origin, rejected tokens, and rows per stage."""
    pipedraft_draft: bool = True
    """False: decode without the draft, to compare."""

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def longest(self) -> int | None:
        """Return the requested maximum number of new tokens, or None if not given."""
        return self.max_tokens

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def num_logprobs(self) -> int | None:
        """Return how many likely tokens to report at each place, or None for no logprobs."""
        return None

    def demands(self) -> Demands:
        """Return the request's demands on logits and on the sequence's end."""
        return Demands(
            ignores_eos=self.ignore_eos,
            stop_token_ids=tuple(self.stop_token_ids),
            min_tokens=self.min_tokens,
            wants_logits=self.num_logprobs is not None,
        )

    def config(self, base: DecodeConfig, *, seed: int, new_tokens: int) -> DecodeConfig:
        """Return a sequence's decoding configuration. ``base`` has schedule, stages and rule."""
        # Clients that reject 0 send 1e-6 or 1e-8 instead.
        is_sampled = self.temperature >= MIN_TEMPERATURE
        filters = TokenFilters()
        if is_sampled:
            filters = TokenFilters(
                top_k=max(self.top_k, 0),  # -1: all, as in vLLM
                top_p=self.top_p,
                min_p=self.min_p,
                typical_p=self.typical_p,
            )
        if not self.pipedraft_draft:
            base = replace(base, schedule=Autoregressive(), verifier="auto")
        try:
            return replace(
                base,
                temperature=self.temperature if is_sampled else 0.0,
                # A rule for sampled chains is refused at temperature 0.
                verifier=base.verifier if is_sampled else "auto",
                seed=seed,
                max_new_tokens=new_tokens,
                **{name: getattr(filters, name) for name in TokenFilters.__dataclass_fields__},
            )
        except ValueError as error:
            raise RequestError(str(error)) from error


class ChatRequest(ApiRequest, kw_only=True):
    PATH = "/v1/chat/completions"
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=1024)]
    max_completion_tokens: Count | None = None
    chat_template_kwargs: Values = {}
    """Chat template variables, as in vLLM."""
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] = 0

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    def __post_init__(self) -> None:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs without logprobs: true")

    def longest(self) -> int | None:
        # If both are given, the stricter one holds.
        asked = [x for x in (self.max_completion_tokens, self.max_tokens) if x is not None]
        return min(asked, default=None)


class CompletionRequest(ApiRequest, kw_only=True):
    PATH = "/v1/completions"
    prompt: str | Annotated[list[str | TokenId | TokenIds], Meta(min_length=1)]
    """A text, a text's token ids, a list with texts, or a list with token id lists."""
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    add_special_tokens: bool = True

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

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


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Request to tokenize a text or a conversation, as for vLLM's /tokenize."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=1024)] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give prompt or messages")


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Request to decode tokens, as for vLLM's /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


Kind = TypeVar("Kind", bound=msgspec.Struct)


def parse(body: bytes, kind: type[Kind]) -> tuple[Kind, list[str]]:
    """Return a request parsed from its body, and the names of ignored unknown fields.

    Raises:
        RequestError: the body is not JSON, or a field is invalid. The message names the field.
    """
    try:
        # Without a type, to sort out unknown fields first: with one, msgspec would refuse them all.
        content = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(content, dict):
        raise RequestError("the body is not a JSON object", code="invalid_json")
    # Templates and conversions recurse, so a deep value could exhaust the stack.
    if is_deeper(content, MAX_DEPTH):
        raise RequestError(f"the body has more than {MAX_DEPTH} levels", code="invalid_json")
    fields, ignored = split_fields(content, kind.__struct_fields__)
    for name in OF_STREAMS:
        if fields.get(name) and not fields.get("stream"):
            raise RequestError(f"{name}: of an answer with stream: true alone")
    if fields.get("return_token_ids") and fields.get("stream"):
        raise RequestError("return_token_ids: not supported in a stream; leave out stream")
    options = fields.get("stream_options")
    if isinstance(options, dict):
        fields["stream_options"] = {name: x for name, x in options.items() if x is not None}
        unknown = options.keys() - set(StreamOptions.__struct_fields__)
        ignored += [f"stream_options.{name}" for name in unknown]
    messages = fields.get("messages")
    if isinstance(messages, list):
        fields["messages"] = [plain_message(turn, ignored) for turn in messages]
    try:
        return msgspec.convert(fields, kind), ignored
    except (msgspec.ValidationError, RecursionError) as error:
        raise wrong(str(error)) from error


def is_deeper(value: object, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    entries = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(is_deeper(entry, levels - 1) for entry in entries)


def wrong(text: str) -> RequestError:
    """Convert msgspec's error text to an error that begins with the field's name."""
    said, _, place = text.partition(" - at `$")
    param = place.strip("`").lstrip(".").replace("[...]", "")
    if found := re.search(r"(?:missing required|contains unknown) field `([^`]*)`", said):
        param = f"{param}.{found[1]}".lstrip(".")
    return RequestError(f"{param or 'the body'}: {said}", code="invalid_value")


def openapi_document() -> Json:
    """Return the OpenAPI description of paths and requests. Answers have OpenAI's formats."""
    posts = {
        ChatRequest.PATH: ChatRequest,
        CompletionRequest.PATH: CompletionRequest,
        "/tokenize": TokenizeRequest,
        "/detokenize": DetokenizeRequest,
    }
    gets = ("/v1/models", "/v1/models/{name}", "/health", "/metrics", "/version", "/openapi.json")
    schemas, components = msgspec.json.schema_components(
        posts.values(), ref_template="#/components/schemas/{name}"
    )
    answer = {"responses": {"200": {"description": "the answer"}}}
    paths: dict[str, dict[str, Json]] = {path: {"get": {**answer}} for path in gets}
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    paths["/v1/models/{name}"]["get"]["parameters"] = [name]
    for path, schema in zip(posts, schemas, strict=True):
        content = {"application/json": {"schema": schema}}
        paths[path] = {"post": {**answer, "requestBody": {"content": content}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "pipedraft", "version": version("pipedraft")},
        "paths": paths,
        "components": {"schemas": components},
    }
