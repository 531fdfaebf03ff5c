"""Messages between edge and cloud, and their encoding.

A session is two numbered streams. The edge's messages have ``seq`` 0, 1, ..., the cloud's have
``number`` 0, 1, .... gRPC keeps their order, and each side refuses a gap. Each reply names the
``seq`` of its message.

An epoch ends at every token sampled by the cloud or the edge itself (a correction, a bonus),
because tokens drafted before it do not continue the new sequence. Late messages from an ended epoch
are stale and dropped.

    Open(prompt) ->                     <- Opened(first token)
    Preverify(known prefix) ->
    Verify(draft tokens) ->                  <- Result(accepted) or Reject(payload)
    More(samples) ->                    <- Samples(payload)
    Stream() ->                         <- Result(token), Result(token), ...
    Close() ->

Two ``Codec``s encode the messages, one per direction. A session lives as long as its gRPC stream.
A refusal ends the stream with a status. If the stream breaks, the edge opens a new session from the
prompt and the output so far.
"""

import hashlib
from array import array
from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from ..messages import Count, Message
from ..ranks.codec import Codec
from ..rules import ROUND_RULES, RuleName
from ..rules.filters import TokenFilters
from ..rules.random import UNFILTERED
from ..rules.sampled import (
    KeyedRandom,
    Logits,
    Payload,
    Top,
    Verifier,
    make_verifier,
)
from ..rules.temperature import check_temperature

# Raise it with every change to a message: the edge refuses a server with another number.
PROTOCOL = 5
MAX_BYTES = 16 * 2**20
"""Maximum bytes per message: logits for four million vocabulary entries."""
MAX_DRAFT_TOKENS = 256
MAX_PROMPT = 2**20
WINDOW = 64
"""Maximum messages stored by a target during a forward pass."""

Ids = Annotated[list[Count], Meta(max_length=MAX_DRAFT_TOKENS)]
Probability = Annotated[float, Meta(ge=0, le=1)]
# Bounded: an infinite time would spoil a running mean for good.
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
PrefixHash = Annotated[bytes, Meta(min_length=8, max_length=8)]


# -- from the edge --------------------------------------------------------------------------


class Settings(Message, kw_only=True):
    """Sampling settings for a session, equal on both sides."""

    rule: RuleName = "match"
    temperature: float = 0.0
    """0 is greedy under every rule."""
    filters: TokenFilters = UNFILTERED
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] = 0
    prompt: Count = 0
    """Prompt index; together with the seed it is the key for all random numbers."""
    payload_tokens: Annotated[int, Meta(ge=1, le=4096)] = 10
    """Number of most likely tokens in a ``Top``."""
    tail_samples: Annotated[int, Meta(ge=1, le=4096)] = 4
    """Samples in the first ``Top``."""
    has_bonus: bool = True
    """True: a fully accepted batch gets one more token."""
    pre_verifies: bool = False
    """True: the cloud may compute a known prefix's rows before the batch is complete."""
    max_new_tokens: Annotated[int, Meta(ge=1, lt=2**31)] = 128

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        if self.rule in ROUND_RULES:
            raise ValueError(f"rule: {self.rule!r} tests whole rounds; use 'rejection' on links")
        self.filters.check_at(self.temperature)

    @property
    def verifier(self) -> Verifier:
        """Return the rule with this session's random numbers. At temperature 0, it is ``match``."""
        return make_verifier(
            self.rule,
            self.temperature,
            KeyedRandom(self.seed, self.prompt),
            filters=self.filters,
            payload_tokens=self.payload_tokens,
            tail_samples=self.tail_samples,
        )


class Open(Message, kw_only=True, tag="open"):
    """First message in a session, with ``seq`` 0."""

    prompt_ids: Annotated[list[Count], Meta(min_length=1, max_length=MAX_PROMPT)]
    settings: Settings
    anchor: Annotated[str, Meta(max_length=128)] = ""
    """Hash of the draft's copy of the target's last block; "": no copy."""
    streams: bool = False
    """True: the cloud decodes alone, token by token."""

    @property
    def seq(self) -> int:
        # Not sent: an Open is always the first message.
        return 0

    @property
    def epoch(self) -> int:
        return 0


class _OfSession(Message):
    epoch: Count
    seq: Count


class _Continues(_OfSession):
    """Continuation of the first ``base`` tokens, which need not all be verified yet."""

    base: Count
    prefix_hash: PrefixHash
    """Hash of the first ``base`` tokens."""
    certain: Ids
    """Tokens sampled by the edge itself from a payload."""


class _DraftTokens(_Continues):
    ids: Ids
    q: Annotated[list[Probability], Meta(max_length=MAX_DRAFT_TOKENS)]
    """Probability used to sample each draft token, if the rule needs it; else empty."""
    next_s: Seconds
    """Time until the edge completes a batch. ``Preverify``: this batch, counted from the message.
    ``Verify``: the next batch, counted from the result."""


class Preverify(_DraftTokens, tag="pre"):
    """First draft tokens in a batch, or only the known prefix. Only a rejection is answered."""


class Verify(_DraftTokens, tag="verify"):
    """Last draft tokens in a batch, and a request to verify the batch."""


class More(_OfSession, tag="more"):
    """Request further samples for a payload."""

    count: Annotated[int, Meta(ge=0, le=MAX_DRAFT_TOKENS)]
    """Samples requested; 0: all logits instead."""


class Stream(_Continues, tag="stream"):
    """Request that the cloud decodes alone from its next token on."""


class Close(_OfSession, tag="close"):
    """Close a session after its output is complete."""


Request: TypeAlias = Open | Preverify | Verify | More | Stream | Close


# -- from the cloud -------------------------------------------------------------------------


class _Numbered(Message):
    number: Count
    seq: Count
    """The answered message's ``seq``."""
    epoch: Count
    """The answered message's epoch."""


class Opened(_Numbered, tag="opened"):
    token: Count
    """First token after the prompt."""
    vocab_size: Count
    max_positions: Count
    eos_token_ids: Annotated[list[Count], Meta(max_length=64)]
    anchor: Annotated[str, Meta(max_length=128)]


class _Verdict(_Numbered):
    length: Count
    """Number of verified tokens, without the token in this result."""
    held_s: Seconds
    """Seconds from the message's arrival to this answer."""
    forward_s: Seconds
    """Seconds for the last target pass."""


class Result(_Verdict, tag="result"):
    """All draft tokens before ``length`` are accepted."""

    token: Count | None
    """Bonus or streamed token; it ends the epoch."""


class Reject(_Verdict, tag="reject"):
    """The draft token at ``length`` is rejected, which ends the epoch."""

    payload: Payload


class Samples(_Numbered, tag="samples"):
    payload: Top | Logits


Reply: TypeAlias = Opened | Result | Reject | Samples

# An edge sends no tensors, and a server accepts none.
REQUESTS: Codec[Request] = Codec(Request, max_header_bytes=MAX_BYTES, max_tensor_bytes=0)
REPLIES: Codec[Reply] = Codec(Reply, max_header_bytes=2**16, max_tensor_bytes=MAX_BYTES)


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """A server's description and state, encoded as a msgpack map readable in every version."""

    protocol: int
    target: str
    """Name given to the server."""
    fingerprint: str
    """Hash of embedding, final norm and LM head."""
    anchor: str
    """Hash of the last block."""
    weights: str
    """Hash over the first 4,096 values of every weight tensor; any fine-tuning changes it."""
    tokenizer: str
    """Hash of the vocabulary."""
    vocab_size: int
    max_prompt_tokens: int
    max_new_tokens: int
    forward_s: Seconds
    """Time for a one-row pass, measured before serving."""
    row_s: Seconds
    """Time added to the pass by each further row."""
    sessions: int
    """Open sessions."""
    cache_bytes: int
    """Memory for the open sessions' keys and values."""
    is_serving: bool
    """False while the server is shutting down; it then accepts no new session."""


def prefix_hash(ids: Sequence[int]) -> bytes:
    # In native byte order: both sides must agree on it.
    return hashlib.blake2b(array("i", ids).tobytes(), digest_size=8).digest()
