"""Draft side of a link, which sends batches of draft tokens to the target and receives results.

A session (``edge/session_messages.py``) covers one chain of verified tokens followed by draft
tokens. A subclass transports the messages and reads a real or modeled clock. It delivers each reply
once and in order.
"""

from __future__ import annotations

import math
import sys
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import msgspec
import torch
from torch import Tensor

from ...models.target import KeepRows, Segment
from ..pipelines import Ahead, Pipeline, Returned
from ..rules.random import Logits, Token, Top
from ..rules.sampled import DraftToken, Payload, RejectionVerifier, Verifier
from ..timeline import Timeline
from ..verdict import Verdict
from . import session_messages as messages
from .draft_length import Estimates
from .session_messages import Reject, Reply, Request, Result, Verify

if TYPE_CHECKING:
    from ..sources.base import DraftSource
    from ..tree import TokenTree

Numbered = TypeVar("Numbered")
Expected = TypeVar("Expected", bound=Reply)


@dataclass
class RemoteTarget:
    """Remote target, which the draft side treats as one stage that verifies single chains."""

    eos_token_ids: tuple[int, ...] = ()
    max_positions: int = sys.maxsize
    """Longest sequence; unlimited until a session is open."""
    vocab_size: int = sys.maxsize
    recompute_length: None = field(default=None, init=False)
    """The server computes a text again by itself."""
    num_stages: int = field(default=1, init=False)
    boundaries: tuple[int, ...] = field(default=(0, 1), init=False)


def check_draft(source: DraftSource) -> None:
    """Raise ValueError for a draft that reads the target's hidden states."""
    if source.taps:
        raise ValueError(
            "draft: it reads hidden states of the target, which do not cross the link; give a "
            "FlexSpec draft or a language model"
        )


@dataclass
class DraftBatch:
    """Draft tokens that share one verification result."""

    start: int
    """The first draft token's position."""
    size: int
    """Planned draft length; after sending, the actual one."""
    started_s: float
    num_drafted: int = 0
    seq: int = -1
    """Number of the batch's last message, once sent."""
    num_bytes: int = 0
    """Size of the batch's last message, with the link's header."""
    sent_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LinkVerdict(Returned):
    """Verification result from a reply. Link schedules use only the last four fields."""

    num_rows: int = 1
    verdicts: Tensor = torch.empty(0)
    num_accepted: int
    """Number of accepted draft tokens below the root."""
    token: int | None = None
    """The target's own token after the accepted ones."""
    payload: Payload | None = None
    """Payload from which to draw the token that replaces the rejected one."""
    outcomes: tuple[tuple[int, int], ...] = ()
    """For each decided batch, how many draft tokens it had and how many were accepted."""


class LinkedPipeline(Pipeline):
    """Pipeline to a remote target, with one session per prompt.

    ``batch`` is the batch being drafted, ``flights`` are the batches in flight. Each ``tick`` waits
    for one reply.
    """

    estimates: Estimates
    """Estimates for the current sequence."""

    def __init__(self, target: RemoteTarget) -> None:
        self.target = target
        self.timeline = Timeline("draft")
        self.last_rows = []
        self.anchor = ""
        """Hash of the draft's copy of the target's last block, or "" if the draft has none."""
        self.fallback = ""
        """Reason why the target decodes alone although there is a draft, or "" if the draft is
        in use."""

    # -- what a subclass adds ---------------------------------------------------------------

    @abstractmethod
    def _begin(self) -> Estimates:
        """Prepare for opening a session, and return the session's first estimates."""

    draft_vocab_size = sys.maxsize
    """The draft's vocabulary size."""

    @abstractmethod
    def _send(self, request: Request) -> None: ...

    @abstractmethod
    def _wait(self) -> None:
        """Wait for an event, and append replies with their arrival times to ``_inbox``."""

    # -- a sequence -------------------------------------------------------------------------

    def open_link(self, settings: messages.Settings, *, streams: bool) -> None:
        """Begin a sequence. Its ``prefill`` must follow.

        Args:
            streams: True if the target decodes alone.
        """
        self.settings = settings
        self.fallback = ""
        self._streams = streams
        self._message_bytes: dict[str, int] | None = None
        self._restart()

    def _restart(self) -> None:
        """Reset the state for a new session of the current sequence."""
        self.batch: DraftBatch | None = None
        self.flights: deque[DraftBatch] = deque()
        self.num_batches = 0
        """Batches sent in this epoch."""
        self.knows_root = True
        self._tokens: list[int] = []
        """Verified tokens known to the target."""
        self._sent: list[int] = []
        """Draft tokens known to the target, after the verified ones."""
        self._stream_request: messages.Open | messages.Stream | None = None
        """Pending request to decode alone, from the current epoch on."""
        self._inbox: deque[tuple[Reply, float]] = deque()
        self._epoch = self._next_seq = 0

    def prefill(
        self, input_ids: Tensor, taps: tuple[int, ...], verifier: Verifier
    ) -> tuple[int, dict[int, Tensor]]:
        self.estimates = self._begin()
        return self._open_session(input_ids.tolist()), {}

    def _open_session(self, tokens: list[int]) -> int:
        """Open a session. The target computes the prompt. Return the token after the prompt."""
        opening = messages.Open(
            prompt_ids=tokens,
            settings=self.settings,
            anchor="" if self._streams else self.anchor,
            streams=self._streams,
        )
        self._tokens = tokens
        if opening.streams:
            self._stream_request = opening
        self._post(opening)
        reply = self._next_reply(messages.Opened)
        self.target.eos_token_ids = tuple(reply.eos_token_ids)
        self.target.max_positions, self.target.vocab_size = reply.max_positions, reply.vocab_size
        self._tokens.append(reply.token)
        # The draft contains a copy of this block: with another target's it would guess badly.
        if opening.anchor not in ("", reply.anchor):
            self.fallback = (
                f"the draft's anchor is {opening.anchor[:12]}, the target's last block "
                f"{reply.anchor[:12]}: it was retrained; the target decodes alone"
            )
        return reply.token

    def close(self) -> int | None:
        self._post(self._next(messages.Close))
        return None

    # -- sending ----------------------------------------------------------------------------

    def begin_batch(self, size: int, start: int) -> None:
        self.batch = DraftBatch(start, size, self.now())

    def drafted(self, num_tokens: int, started_s: float) -> None:
        self.estimates.observe_draft(self.now() - started_s)
        if self.batch is not None:
            self.batch.num_drafted += num_tokens

    def send(self, certain: list[int], ids: list[int], q: list[float], *, is_early: bool) -> None:
        """Send the batch's new draft tokens.

        Args:
            certain: the root if the target does not know it, else empty.
            q: sampling probability of each draft token if the rule needs it, else empty.
            is_early: True if a later message continues this batch. The target may compute ``ids``
                now.
        """
        batch = self.batch
        assert batch is not None
        # Built first: the prefix hash covers the tokens before these ones.
        kind = messages.Preverify if is_early else Verify
        message = self._batch_message(kind, batch, certain, ids, q)
        self._tokens += certain
        self.knows_root = True
        self._sent += ids
        self._post(message)
        if is_early:
            return
        batch.size, batch.seq, batch.sent_s = batch.num_drafted, message.seq, self.now()
        batch.num_bytes = self._size(message) + self.estimates.header_bytes
        self.flights.append(batch)
        self.batch = None
        self.num_batches += 1

    def _batch_message(
        self,
        kind: Callable[..., messages.Preverify | Verify],
        batch: DraftBatch,
        certain: list[int],
        ids: list[int],
        q: list[float],
    ) -> messages.Preverify | Verify:
        next_s = (batch.size - batch.num_drafted) * self.estimates.draft_s
        if kind is Verify:
            # From the result until the next batch arrives: way down, drafting, way up.
            next_s = self.estimates.link.state.round_trip_s + batch.size * self.estimates.draft_s
        prefix = self._prefix(self._tokens + self._sent, certain)
        return self._next(kind, **prefix, ids=ids, q=q, next_s=next_s)

    def _prefix(self, known: list[int], certain: list[int]) -> dict[str, object]:
        assert bool(certain) != self.knows_root, "the root is sent once, if it is not known"
        return {"base": len(known), "prefix_hash": messages.prefix_hash(known), "certain": certain}

    def inject(self, segment: Segment) -> None:
        raise AssertionError("draft tokens cross a link in batches")

    @property
    def is_streaming(self) -> bool:
        """Return True if the target was asked to decode alone from the current epoch on."""
        return self._stream_request is not None

    def stream(self, certain: list[int]) -> None:
        """Let the target decode alone from the current epoch on. See ``send`` for ``certain``."""
        self._streams, self.batch = True, None
        # Without the draft tokens in flight: the stream replaces them.
        self._stream_request = self._next(messages.Stream, **self._prefix(self._tokens, certain))
        self._tokens += certain
        self.knows_root = True
        self._post(self._stream_request)

    def _next(self, kind: Callable[..., Numbered], **fields: object) -> Numbered:
        """Build the session's next request."""
        return kind(epoch=self._epoch, seq=self._next_seq, **fields)

    def _size(self, request: Request) -> int:
        """Return a message's size in bytes, without the link's header."""
        return len(messages.REQUESTS.to_bytes(request))

    def _post(self, request: Request) -> None:
        self._next_seq = request.seq + 1
        self._send(request)

    def round_bytes(self) -> dict[str, int]:
        """Return message sizes by ``RoundShape`` field, measured once for each sequence."""
        if self._message_bytes is None:
            verifier, last = self.settings.verifier, self.target.vocab_size - 1
            certain = [] if self.knows_root else [0]
            empty = self._batch_message(Verify, DraftBatch(0, 0, 0.0), certain, [], [])
            # Larger integers take more bytes: the largest id gives the upper bound.
            longer = msgspec.structs.replace(empty, ids=[last] * 8, q=[0.5] * 8 * verifier.needs_q)
            num_bytes, num_longer = map(self._size, (empty, longer))
            self._message_bytes = {
                "up_bytes": num_bytes + self.estimates.header_bytes,
                "up_bytes_per_token": math.ceil((num_longer - num_bytes) / 8),
                # A result has about as many fields as a request without draft tokens.
                "down_bytes": num_bytes + self.estimates.header_bytes,
                "reject_bytes": verifier.payload_bytes(last + 1),
            }
        return self._message_bytes

    # -- receiving --------------------------------------------------------------------------

    def verdict_waits(self) -> bool:
        return bool(self._inbox)

    def tick(self, ahead: Ahead | None = None) -> LinkVerdict:
        """Receive the next verification result.

        Raises:
            ValueError: the target refuses, or violates the protocol.
        """
        reply = self._next_reply(Result, Reject)
        if isinstance(reply, Result):
            return self._take_result(reply)
        assert isinstance(reply, Reject)
        return self._take_reject(reply)

    def _next_reply(self, *expected: type[Expected]) -> Expected:
        while not self._inbox:
            self._wait()
        reply, arrived_s = self._inbox.popleft()
        if not isinstance(reply, expected):
            wanted = " or ".join(kind.__name__ for kind in expected)
            raise ValueError(f"server: {type(reply).__name__} where {wanted} is due")
        # Replies end epochs and arrive in order, so another epoch is the server's fault.
        if reply.epoch != self._epoch:
            raise ValueError(f"server: a reply of epoch {reply.epoch} in epoch {self._epoch}")
        if isinstance(reply, Result | Reject):
            self._measure(reply, arrived_s)
        self._check_tokens(reply)
        return reply

    def _check_tokens(self, reply: Reply) -> None:
        """Raise ValueError for a token outside the target's vocabulary."""
        # A bad id would fail in an embedding, far from its cause.
        size, found = self.target.vocab_size, -1
        payload = reply.payload if isinstance(reply, Reject | messages.Samples) else None
        if isinstance(reply, messages.Opened):
            size, found = reply.vocab_size, reply.token
        elif isinstance(reply, Result) and reply.token is not None:
            found = reply.token
        elif isinstance(payload, Token):
            found = payload.id
        elif isinstance(payload, Top):
            found = int(payload.ids.max())
        elif isinstance(payload, Logits) and len(payload.values) != size:
            raise ValueError(f"server: logits of {len(payload.values)} tokens, it has {size}")
        # The draft's embedding may be smaller than the target's.
        if found >= min(size, self.draft_vocab_size):
            size = min(size, self.draft_vocab_size)
            raise ValueError(f"server: token {found} is outside the vocabulary of {size}")

    def _measure(self, verdict: Result | Reject, arrived_s: float) -> None:
        """Update link and target estimates from a batch's answer."""
        batch = next((batch for batch in self.flights if batch.seq == verdict.seq), None)
        if batch is None:
            return
        self.estimates.observe_forward(verdict.forward_s, batch.size)
        self.estimates.link.observe(
            # The server measures its own share, so both clocks need not agree.
            arrived_s - batch.sent_s - verdict.held_s,
            up_bytes=batch.num_bytes,
            down_bytes=len(messages.REPLIES.to_bytes(verdict)) + self.estimates.header_bytes,
        )

    def _take_result(self, reply: Result) -> LinkVerdict:
        num_accepted = self._accept(reply.length)
        # Without progress, such replies could go on forever.
        if not num_accepted and reply.token is None:
            raise ValueError(f"server: a verdict on {reply.length} tokens that says nothing new")
        outcomes: tuple[tuple[int, int], ...] = ()
        if self.flights and self.flights[0].seq == reply.seq:
            size = self.flights.popleft().size
            outcomes = ((size, size),)
        if reply.token is not None:
            asked = self._stream_request
            if asked is not None and asked.seq != reply.seq:  # this bonus made it stale
                self._stream_request = None
            self._start_epoch(reply.token)
        return LinkVerdict(num_accepted=num_accepted, token=reply.token, outcomes=outcomes)

    def _take_reject(self, reply: Reject) -> LinkVerdict:
        length, payload = reply.length, reply.payload
        if length - len(self._tokens) == len(self._sent):
            raise ValueError(f"server: rejects a token at {length} that was never drafted")
        num_accepted = self._accept(length)
        # An early row may be rejected before its batch is complete.
        batches = [*self.flights, *([] if self.batch is None else [self.batch])]
        # Later batches were never tested: the policy learns nothing from them.
        outcomes = tuple(
            (batch.size, length - batch.start)
            for batch in batches
            if batch.start <= length < batch.start + batch.size
        )
        self._stream_request = None
        self._start_epoch(payload.id if isinstance(payload, Token) else None)
        return LinkVerdict(num_accepted=num_accepted, payload=payload, outcomes=outcomes)

    def _accept(self, length: int) -> int:
        """Mark the draft tokens before position ``length`` as verified. Return their number."""
        count = length - len(self._tokens)
        if not 0 <= count <= len(self._sent):
            raise ValueError(
                f"server: a verdict on {length} tokens, but there are {len(self._tokens)} and "
                f"{len(self._sent)} draft tokens"
            )
        self._tokens += self._sent[:count]
        del self._sent[:count]
        return count

    def _start_epoch(self, token: int | None) -> None:
        """Start an epoch, and drop all batches because they do not continue the new sequence.

        ``token`` is the new root if the target sampled it, else None.
        """
        self._epoch += 1
        self._sent.clear()
        self.flights.clear()
        self.batch, self.num_batches = None, 0
        # The target does not know a correction sampled here; the next message has it (``certain``).
        self.knows_root = token is not None
        if token is not None:
            self._tokens.append(token)

    def walk(self, verifier: Verifier, tree: TokenTree, returned: Returned) -> Verdict:
        assert isinstance(returned, LinkVerdict)
        last = returned.num_accepted
        path, tests = list(range(last + 1)), [True] * last
        if returned.payload is not None:
            token = self._corrected(verifier, tree, last + 1, returned.payload)
            return Verdict(path, token, [*tests, False], restarts=True)
        if returned.token is not None:
            return Verdict(path, returned.token, tests, restarts=True)
        # No token of the target's own: the last accepted one becomes the root.
        return Verdict(path[:-1], tree.tokens[last], tests)

    def _corrected(self, verifier: Verifier, tree: TokenTree, row: int, payload: Payload) -> int:
        """Return the correction for a rejected token. Request further payloads if needed."""
        rejected = DraftToken(tree.tokens[row], tree.draft_probabilities[row])
        payloads = [payload]
        while True:
            token = verifier.correct(rejected, tree.position(row), payloads)
            if token is not None:
                return token
            assert isinstance(verifier, RejectionVerifier), "others need no more"
            # Only if the samples so far settle nothing: each request costs a round trip.
            self._post(self._next(messages.More, count=verifier.next_samples(len(payloads))))
            payloads.append(self._next_reply(messages.Samples).payload)

    def keep(self, keep: KeepRows) -> dict[int, Tensor]:
        """Do nothing, because the target has already applied its result."""
        return {}
