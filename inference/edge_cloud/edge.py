"""The edge's half of a session: it drafts, sends, reads verdicts, and decides what to do next.

    edge = EdgeSession(opening, drafter, plan, policy, beliefs)
    while not isinstance(action := edge.act(now_s), Finished):
        Send   transmit action.request
        Draft  edge.draft(), the only heavy call, then edge.drafted(now_s)
        Wait   until a reply has arrived (edge.receive) or action.until_s has come

Replies may be handed over at any time; they are read when ``act`` is called.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec

from pipedraft.inference.draft_length import DraftLengthPolicy
from pipedraft.inference.edge_cloud.drafter import ChainDrafter
from pipedraft.inference.edge_cloud.edge_text import EdgeText
from pipedraft.inference.edge_cloud.messages import (
    MAX_GUESSES,
    WINDOW,
    Close,
    Error,
    More,
    Open,
    Opened,
    Preverify,
    Reject,
    Reply,
    Request,
    Result,
    Samples,
    Stream,
    Verify,
    encode,
)
from pipedraft.inference.edge_cloud.plan import Action, Beliefs, Draft, Finished, Plan, Send, Wait
from pipedraft.inference.verify import Payload, RejectionVerifier, Token


@dataclass
class _Batch:
    start: int
    """Length of text and guesses where it begins."""
    size: int
    started_s: float
    num_guesses: int = 0
    num_sent: int = 0


@dataclass(frozen=True)
class _Flight:
    """A batch on its way."""

    seq: int
    end: int
    size: int
    num_bytes: int
    sent_s: float


@dataclass
class _Rejection:
    """A guess whose correction is the edge's to draw."""

    length: int
    payloads: list[Payload] = field(default_factory=list)


class EdgeSession:
    """One text, from ``Open`` to ``Close``."""

    def __init__(
        self,
        opening: Open,
        drafter: ChainDrafter | None,
        plan: Plan,
        policy: DraftLengthPolicy | None,
        beliefs: Beliefs,
    ) -> None:
        """
        Args:
            drafter, policy: None: the cloud decodes alone.

        Raises:
            ValueError: settings that do not fit each other.
        """
        settings = opening.settings
        if opening.streams != (drafter is None) or opening.streams != (policy is None):
            raise ValueError("streams: give a drafter and a policy, or neither where it is true")
        if settings.has_bonus and plan.parallel:
            raise ValueError(
                "has_bonus: true, but guesses that are drafted in parallel stand where the bonus "
                "would; give false"
            )
        self.opening, self.plan, self.policy, self.beliefs = opening, plan, policy, beliefs
        self.text = EdgeText(opening)
        self.fallback = ""
        """Why the cloud decodes alone although there is a draft; "": it does not."""
        self._drafter, self._rule = drafter, settings.verifier
        self._batch: _Batch | None = None
        self._num_batches = 0
        """Sent in this epoch."""
        self._flights: deque[_Flight] = deque()
        self._rejection: _Rejection | None = None
        self._streams = opening.streams
        self._stream_request: Request | None = opening if opening.streams else None
        self._outbox: deque[Request] = deque([opening])
        self._unanswered: dict[int, Request] = {}
        self._inbox: dict[int, tuple[Reply, float]] = {}
        self._epoch = self._next_number = 0
        self._next_seq = 1
        self._asked_s = 0.0
        """When something was last sent or read."""
        self._draft_started_s = 0.0
        self._is_closed = False

    # -- the driver's calls -----------------------------------------------------------------

    def receive(self, reply: Reply, now_s: float) -> None:
        if self._next_number <= reply.number < self._next_number + 4 * WINDOW:
            self._inbox.setdefault(reply.number, (reply, now_s))

    def act(self, now_s: float) -> Action:
        """What is to be done now.

        Raises:
            ValueError: the cloud has refused, or does not follow the protocol.
        """
        self._read(now_s)
        if not self._outbox and not self._is_closed:
            self._repeat(now_s)
            action = self._choose(now_s)
            if action is not None:
                return action
        if self._outbox:
            request = self._outbox.popleft()
            self._unanswered[request.seq] = request
            self._asked_s = now_s
            return Send(request)
        return Finished() if self._is_closed else Wait(self._deadline_s)

    def draft(self) -> None:
        """Compute one guess."""
        drafter, batch = self._drafter, self._batch
        assert drafter is not None and batch is not None, "act asked for something else"
        logits_U = drafter.logits()
        position = self.text.length
        guess = self._rule.propose(logits_U, drafter.draft_ids, position, attempt=self._epoch)
        drafter.add(guess.token)
        self.text.guesses.append(guess)
        batch.num_guesses += 1

    def drafted(self, now_s: float) -> None:
        self.beliefs.observe_draft(now_s - self._draft_started_s)

    def fall_back(self, reason: str) -> None:
        """Let the cloud decode alone from here on, for example because the draft has become slow.

        Guesses that are away are still answered.
        """
        if not self._streams and not self._is_closed:
            self.fallback, self._streams, self._batch = reason, True, None
            if self.text.limits is not None and self._rejection is None:
                self._ask_to_stream()

    # -- choosing ---------------------------------------------------------------------------

    def _choose(self, now_s: float) -> Action | None:
        """None: wait, or send what is in the outbox."""
        if self.text.limits is None or self._streams or self._rejection is not None:
            return None
        if self._batch is None and self._may_draft:
            self._batch = self._next_batch(now_s)
        batch = self._batch
        if batch is None:
            return None
        if self._is_complete(batch, now_s):
            if len(self._flights) < self.beliefs.window(self.plan, batch.size):
                self._send_batch(batch, now_s)
            return None
        if self._is_worth_sending(batch):
            self._send_guesses(Preverify, batch)
            return None
        self._draft_started_s = now_s
        return Draft()

    @property
    def _may_draft(self) -> bool:
        return (self.plan.parallel or not self._flights) and not self.text.end_is_guessed

    def _next_batch(self, now_s: float) -> _Batch:
        assert self.policy is not None
        longest = self.policy.max_length
        # Without q the cloud knows the correction itself, and begins while its verdict travels.
        knows = not self._rule.needs_q
        spare_s = self.beliefs.link.state.round_trip_s if knows else 0.0
        cost = self.beliefs.round_cost(
            self.plan,
            self._round_bytes,
            longest,
            early_within_s=spare_s if self.opening.settings.is_fast else None,
        )
        size = min(self.policy.choose(cost), MAX_GUESSES)
        if self.plan.probes_first and size > 1:
            size = {0: 1, 1: size - 1}.get(self._num_batches, size)
        return _Batch(self.text.length, size, now_s)

    def _is_complete(self, batch: _Batch, now_s: float) -> bool:
        if not batch.num_guesses:
            return False
        elapsed_s = now_s - batch.started_s
        is_late = self.plan.truncates and elapsed_s >= self.beliefs.away_s - 1e-9
        return batch.num_guesses >= batch.size or self.text.end_is_guessed or is_late

    def _is_worth_sending(self, batch: _Batch) -> bool:
        """An early pass over what is known would end before the batch is complete.

        A correction drawn here goes at once; guesses at the last such moment, so that there is one
        pass over as many of them as possible.
        """
        if not self.opening.settings.is_fast or len(self._flights) >= self.beliefs.window(
            self.plan, batch.size
        ):
            return False
        left_s = (batch.size - batch.num_guesses) * self.beliefs.draft_s
        is_useful = left_s >= self.beliefs.verify_s
        if self.text.num_certain:
            return is_useful
        is_last = left_s - self.beliefs.draft_s < self.beliefs.verify_s
        return is_useful and is_last and batch.num_guesses > batch.num_sent

    @cached_property
    def _round_bytes(self) -> dict[str, int]:
        """Sizes of this session's own messages, as they are encoded."""
        assert self.text.limits is not None
        size = self.text.limits.vocab_size
        empty = _Batch(len(self.text.tokens), 0, 0.0)
        request = self._guess_message(Verify, empty)
        q = [0.5] * 8 * self._rule.needs_q
        longer = msgspec.structs.replace(request, ids=[size - 1] * 8, q=q)
        header = self.beliefs.header_bytes
        return {
            "up_bytes": len(encode(request)) + header,
            "up_bytes_per_token": math.ceil((len(encode(longer)) - len(encode(request))) / 8),
            "down_bytes": len(encode(request)) + header,  # a verdict has about as many fields
            "reject_bytes": self._rule.payload_bytes(size),
        }

    # -- sending ----------------------------------------------------------------------------

    def _numbered(self, kind: type, **fields: Any) -> Any:
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        return kind(session=self.opening.session, epoch=self._epoch, seq=seq, **fields)

    def _guess_message(self, kind: type, batch: _Batch) -> Any:
        """The guesses of a batch that were not sent yet."""
        first = batch.start + batch.num_sent - len(self.text.tokens)
        guesses = self.text.guesses[first:]
        next_s = (batch.size - batch.num_guesses) * self.beliefs.draft_s
        if kind is Verify:
            next_s = self.beliefs.link.state.round_trip_s + batch.size * self.beliefs.draft_s
        fields = self.text.prefix(first) | {
            "ids": [guess.token for guess in guesses],
            "q": [guess.q for guess in guesses] if self._rule.needs_q else [],
            "next_s": next_s,
        }
        return kind(session=self.opening.session, epoch=self._epoch, seq=self._next_seq, **fields)

    def _send_guesses(self, kind: type, batch: _Batch) -> Request:
        request = self._guess_message(kind, batch)
        self._next_seq += 1
        batch.num_sent = batch.num_guesses
        self.text.num_certain = 0
        self._outbox.append(request)
        return request

    def _send_batch(self, batch: _Batch, now_s: float) -> None:
        request = self._send_guesses(Verify, batch)
        self._flights.append(
            _Flight(
                request.seq,
                batch.start + batch.num_guesses,
                batch.num_guesses,
                len(encode(request)) + self.beliefs.header_bytes,
                now_s,
            )
        )
        self._batch = None
        self._num_batches += 1

    def _ask_to_stream(self) -> None:
        """From the text that is known here; the cloud's may be longer by then, by guesses."""
        self._stream_request = self._numbered(Stream, **self.text.prefix(0))
        self._outbox.append(self._stream_request)
        self.text.num_certain = 0

    @property
    def _deadline_s(self) -> float:
        is_owed = bool(self._unanswered) or self._stream_request is not None
        return self._asked_s + self.plan.timeout_s if is_owed else math.inf

    def _repeat(self, now_s: float) -> None:
        """Send again what has had no answer for too long; numbers make that harmless."""
        if now_s >= self._deadline_s:
            again = list(self._unanswered.values())
            if not again and self._stream_request is not None:
                again = [self._stream_request]
            self._outbox.extend(again)

    # -- reading ----------------------------------------------------------------------------

    def _read(self, now_s: float) -> None:
        while self._next_number in self._inbox and not self._is_closed:
            batch = self._batch
            if self.plan.barrier and batch is not None and not self._is_complete(batch, now_s):
                return
            reply, arrived_s = self._inbox.pop(self._next_number)
            self._next_number += 1
            self._asked_s = now_s
            self._take(reply, arrived_s, now_s)

    def _take(self, reply: Reply, arrived_s: float, now_s: float) -> None:
        if isinstance(reply, Error):
            raise ValueError(f"cloud: {reply.text}")
        if reply.epoch != self._epoch:
            raise ValueError(f"cloud: a reply of epoch {reply.epoch} in epoch {self._epoch}")
        self._unanswered = {s: r for s, r in self._unanswered.items() if s > reply.seq}
        match reply:
            case Opened():
                self._take_opened(reply, now_s)
            case Result():
                self._measure(reply, len(encode(reply)), arrived_s)
                self._take_result(reply, now_s)
            case Reject():
                self._measure(reply, len(encode(reply)), arrived_s)
                self._take_reject(reply, now_s)
            case Samples():
                if self._rejection is None:
                    raise ValueError("cloud: samples that nobody asked for")
                self._rejection.payloads.append(reply.payload)
                self._correct(now_s)

    def _measure(self, verdict: Result | Reject, num_bytes: int, arrived_s: float) -> None:
        """What the answer to a batch says about link and cloud."""
        flight = next((flight for flight in self._flights if flight.seq == verdict.seq), None)
        if flight is None:
            return
        self.beliefs.observe_forward(verdict.forward_s, flight.size)
        self.beliefs.link.observe(
            arrived_s - flight.sent_s - verdict.held_s,
            up_bytes=flight.num_bytes,
            down_bytes=num_bytes + self.beliefs.header_bytes,
        )

    def _take_opened(self, reply: Opened, now_s: float) -> None:
        if self.text.limits is not None:
            raise ValueError("cloud: opened twice")
        self.text.open(reply, now_s)
        self._close_at_end()
        if self._is_closed:
            return
        if self._drafter is not None:
            last = int(self._drafter.draft_ids.max())
            if last >= reply.vocab_size:
                raise ValueError(f"draft: it knows token {last}, the target {reply.vocab_size}")
            self._drafter.begin(list(self.text.tokens))
        if self.opening.anchor not in ("", reply.anchor):
            self.fall_back(
                f"the draft's anchor is {self.opening.anchor[:12]}, the target's last block "
                f"{reply.anchor[:12]}: it was retrained; the cloud decodes alone"
            )
        elif self._streams and not self.opening.streams:
            self._ask_to_stream()

    def _take_result(self, reply: Result, now_s: float) -> None:
        num_accepted = self.text.num_accepted(reply.length)
        if self._flights and self._flights[0].seq == reply.seq:
            flight = self._flights.popleft()
            if self.policy is not None:
                self.policy.observe(flight.size, flight.size)
        self._extend(num_accepted, reply.token, now_s)
        if reply.token is not None:
            self._start_epoch()
            asked = self._stream_request
            if asked is not None and asked.seq != reply.seq:
                self._ask_to_stream()  # this bonus made the first request stale

    def _take_reject(self, reply: Reject, now_s: float) -> None:
        if self.text.num_accepted(reply.length) == len(self.text.guesses):
            raise ValueError(f"cloud: rejects a guess at {reply.length} that was never made")
        self._observe_miss(reply.length)
        self._start_epoch()
        self._rejection = _Rejection(reply.length, [reply.payload])
        self._correct(now_s)

    def _observe_miss(self, length: int) -> None:
        """The batch in which the guess at ``length`` stood, on its way or still being drafted."""
        batches = [(flight.end - flight.size, flight.size) for flight in self._flights]
        if self._batch is not None:
            batches.append((self._batch.start, self._batch.size))
        for start, size in batches:
            if self.policy is not None and start <= length < start + size:
                self.policy.observe(size, length - start)

    def _correct(self, now_s: float) -> None:
        """Take the token after a rejection, or draw it, or ask for what is missing."""
        rejection = self._rejection
        assert rejection is not None
        num_accepted = rejection.length - len(self.text.tokens)
        payloads = rejection.payloads
        token = self._rule.correct(self.text.guesses[num_accepted], rejection.length, payloads)
        if token is None:
            assert isinstance(self._rule, RejectionVerifier), "others need no more"
            count = self._rule.next_samples(len(payloads))
            self._outbox.append(self._numbered(More, count=count))
            return
        self._rejection = None
        self._extend(num_accepted, token, now_s, is_miss=True)
        self.text.num_certain = 0 if isinstance(payloads[0], Token) else 1
        if self._stream_request is not None and not self._is_closed:
            self._ask_to_stream()

    def _start_epoch(self) -> None:
        """What is away or being drafted belongs to another text."""
        self._epoch += 1
        self._flights.clear()
        self._batch, self._num_batches = None, 0

    def _extend(
        self, num_accepted: int, token: int | None, now_s: float, *, is_miss: bool = False
    ) -> None:
        text = self.text
        text.extend(num_accepted, token, now_s, is_miss=is_miss)
        if self._drafter is None:
            self._close_at_end()
            return
        if not text.has_ended:
            self._drafter.settle(num_accepted, token)
        text.result.num_drafted = self._drafter.num_drafted
        text.result.num_draft_forwards = self._drafter.source.num_forwards
        self._close_at_end()

    def _close_at_end(self) -> None:
        if self.text.has_ended:
            self._is_closed = True
            self._outbox.append(self._numbered(Close))
