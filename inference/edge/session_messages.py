"""What edge and cloud say to each other, and its bytes.

A session is two numbered streams. The edge's messages have ``seq`` 0, 1, ..., the cloud's have
``number`` 0, 1, .... The cloud takes requests in the order of ``seq``, so a repeated or late one
changes nothing; the edge refuses a reply out of order. Each reply names the ``seq`` it answers.

An epoch ends whenever the cloud's or the edge's own token follows (a correction, a bonus): what was
drafted before that token was known belongs to another sequence. What still
arrives from an ended epoch is stale and dropped.

    Open(prompt) ->                     <- Opened(first token)
    Preverify(known prefix) ->
    Verify(draft tokens) ->                  <- Result(accepted) or Reject(payload)
    More(samples) ->                    <- Samples(payload)
    Stream() ->                         <- Result(token), Result(token), ...
    Close() ->                          <- Error(text), at any time

Frames of two ``Codec``s, one for each direction. A session lives as long as its gRPC stream. When
the stream breaks, the edge opens a new session with the output so far as its prompt.
"""

import hashlib
from array import array
from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from pipedraft.inference.config import ROUND_RULES, RuleName, check_temperature
from pipedraft.inference.ranks.codec import Codec, Count, Message
from pipedraft.inference.rules.filters import TokenFilters
from pipedraft.inference.rules.random import UNFILTERED
from pipedraft.inference.rules.sampled import (
    KeyedRandom,
    Logits,
    Payload,
    Top,
    Verifier,
    make_verifier,
)

PROTOCOL = 4
MAX_BYTES = 16 * 2**20
"""Of one message: the logits of a vocabulary of four million."""
MAX_DRAFT_TOKENS = 256
MAX_PROMPT = 2**20
WINDOW = 64
"""Messages that may arrive before one that precedes them."""

Ids = Annotated[list[Count], Meta(max_length=MAX_DRAFT_TOKENS)]
Probability = Annotated[float, Meta(ge=0, le=1)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
PrefixHash = Annotated[bytes, Meta(min_length=8, max_length=8)]


# -- from the edge --------------------------------------------------------------------------


class Settings(Message, kw_only=True):
    """How a session draws its tokens; equal on both sides."""

    rule: RuleName = "match"
    temperature: float = 0.0
    """0 is greedy, whatever the rule."""
    filters: TokenFilters = UNFILTERED
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] = 0
    prompt: Count = 0
    """Index of the prompt: with the seed the key of all random numbers."""
    payload_tokens: Annotated[int, Meta(ge=1, le=4096)] = 10
    """Tokens in a ``Top``."""
    tail_samples: Annotated[int, Meta(ge=1, le=4096)] = 4
    """Draws in the first ``Top``."""
    has_bonus: bool = True
    """A batch that is accepted to its end gets one more token."""
    pre_verifies: bool = False
    """Rows of a known prefix may be computed before the batch is complete."""
    max_new_tokens: Annotated[int, Meta(ge=1, lt=2**31)] = 128

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        if self.rule in ROUND_RULES:
            raise ValueError(f"rule: {self.rule!r} tests whole rounds; use 'rejection' on links")
        self.filters.check_at(self.temperature)

    @property
    def verifier(self) -> Verifier:
        """The rule, with this session's random numbers; at temperature 0 all are ``match``."""
        return make_verifier(
            self.rule,
            self.temperature,
            KeyedRandom(self.seed, self.prompt),
            filters=self.filters,
            payload_tokens=self.payload_tokens,
            tail_samples=self.tail_samples,
        )


class Open(Message, kw_only=True, tag="open"):
    """The first message of a session; its ``seq`` is 0."""

    prompt_ids: Annotated[list[Count], Meta(min_length=1, max_length=MAX_PROMPT)]
    settings: Settings
    anchor: Annotated[str, Meta(max_length=128)] = ""
    """Hash of the target's last block that the draft contains; "": none."""
    streams: bool = False
    """The cloud decodes alone, token by token."""

    @property
    def seq(self) -> int:
        return 0

    @property
    def epoch(self) -> int:
        return 0


class _OfSession(Message):
    epoch: Count
    seq: Count


class _Continues(_OfSession):
    """Tokens that follow ``base`` others, draft tokens that wait for their verdict included."""

    base: Count
    prefix_hash: PrefixHash
    """Of these ``base`` tokens."""
    certain: Ids
    """Tokens that the edge has drawn itself from a payload."""


class _DraftTokens(_Continues):
    ids: Ids
    q: Annotated[list[Probability], Meta(max_length=MAX_DRAFT_TOKENS)]
    """Probability that each draft token was drawn with, where the rule needs it; else empty."""
    next_s: Seconds
    """When the edge will complete its next batch: counted from this message, or from the verdict
    on it."""


class Preverify(_DraftTokens, tag="pre"):
    """First draft tokens of a batch, or only what precedes it; nothing needs an answer."""


class Verify(_DraftTokens, tag="verify"):
    """The last draft tokens of a batch, which wants a verdict."""


class More(_OfSession, tag="more"):
    """The samples of a payload are used up."""

    count: Annotated[int, Meta(ge=0, le=MAX_DRAFT_TOKENS)]
    """How many more; 0: all logits instead."""


class Stream(_Continues, tag="stream"):
    """Draft tokens are over: the cloud is to decode alone from its own tokens on."""


class Close(_OfSession, tag="close"):
    """The edge has what it wants."""


Request: TypeAlias = Open | Preverify | Verify | More | Stream | Close


# -- from the cloud -------------------------------------------------------------------------


class _Numbered(Message):
    number: Count
    seq: Count
    """Of the message that it answers."""
    epoch: Count
    """In which it was sent."""


class Opened(_Numbered, tag="opened"):
    token: Count
    """The first one after the prompt."""
    vocab_size: Count
    max_positions: Count
    eos_token_ids: Annotated[list[Count], Meta(max_length=64)]
    anchor: Annotated[str, Meta(max_length=128)]


class _Verdict(_Numbered):
    length: Count
    """Tokens that are certain, without the one that comes with the verdict."""
    held_s: Seconds
    """From the arrival of the message to this answer."""
    forward_s: Seconds
    """Of the last pass over the target."""


class Result(_Verdict, tag="result"):
    """All draft tokens before ``length`` are right."""

    token: Count | None
    """A bonus, or a streamed token; it ends the epoch."""


class Reject(_Verdict, tag="reject"):
    """The draft token at ``length`` is wrong; the epoch has ended."""

    payload: Payload


class Samples(_Numbered, tag="samples"):
    payload: Top | Logits


class Error(_Numbered, tag="error"):
    """The session is over."""

    text: Annotated[str, Meta(max_length=1000)]


Reply: TypeAlias = Opened | Result | Reject | Samples | Error

REQUESTS: Codec[Request] = Codec(Request, max_header_bytes=MAX_BYTES, max_tensor_bytes=0)
REPLIES: Codec[Reply] = Codec(Reply, max_header_bytes=2**16, max_tensor_bytes=MAX_BYTES)


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """A server's description and state; msgpack, a map, so that every version can read it."""

    protocol: int
    target: str
    """Its name, as the server was given it."""
    fingerprint: str
    """Hash of embedding, final norm and LM head."""
    anchor: str
    """Hash of the last block."""
    weights: str
    """Hash of one row of every weight: changes with any fine-tuning."""
    tokenizer: str
    """Hash of the vocabulary."""
    vocab_size: int
    max_prompt_tokens: int
    max_new_tokens: int
    forward_s: Seconds
    """A pass over one row, as measured before serving."""
    row_s: Seconds
    """What each further row adds."""
    sessions: int
    """Held now."""
    cache_bytes: int
    """Of their keys and values."""
    is_serving: bool
    """False: it is shutting down, and takes no new sessions."""


def prefix_hash(ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("i", ids).tobytes(), digest_size=8).digest()
