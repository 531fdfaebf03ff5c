"""Target side of a session, which keeps the sequence and its cache and verifies draft tokens.

    session = TargetSession(SharedTarget(model), opening)
    replies = session.receive(request, now_s)
    while session.start(now_s):              # rows due for a forward pass
        session.run()                        # the only heavy call; may use another thread
        replies += session.finish(now_s)

Between ``start`` and ``finish``, requests are only stored, so rows do not change during a pass.
``run_together`` runs several sessions' passes.
"""

# V vocabulary, R rows in a pass, S speculative cache rows, H hidden

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from ...models.heads.flexspec import anchor_hash
from ...models.stages.together import can_run_together, forward_together
from ...models.target import KeepRows, Segment, StagedTarget, target_fingerprint
from ..result import stop_reason
from ..rules.random import Token
from ..rules.sampled import Top
from . import session_messages as messages
from .session_messages import Open, Reply, Request, Result, Verify

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Answer = TypeVar("Answer")
MAX_PENDING = 512
"""Maximum draft tokens awaiting verification. Each one may keep a row of logits in memory."""


MAX_MORE = 16
"""Maximum ``More`` requests for a correction. An edge needs two: for samples, then for logits."""


class SharedTarget:
    """Target model that several sessions share. Each session has its own cache."""

    def __init__(self, model: "PreTrainedModel") -> None:
        self.model = model

    def staged(self) -> StagedTarget:
        return StagedTarget(self.model, 1)

    @cached_property
    def fingerprint(self) -> str:
        return str(target_fingerprint(self.model)["hash"])

    @cached_property
    def anchor(self) -> str:
        return anchor_hash(self.model)


class SessionRefused(ValueError):
    """Raised to end a session. The message is one line, which the edge receives."""

    def __init__(self, text: str, code: str = "INVALID_ARGUMENT") -> None:
        """Set the ``grpc.StatusCode`` name. Edges retry after one in ``stream.RECOVERABLE``."""
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class _Batch:
    seq: int
    end: int
    """Sequence length if the batch is fully accepted."""
    arrived_s: float
    next_s: float


class TargetSession:
    """Session for one sequence at the target.

    No method waits for a message. The caller passes the time of its own clock as ``now_s``. If a
    method raises ``SessionRefused``, the caller must end the session.
    """

    def __init__(self, target: SharedTarget, opening: Open) -> None:
        self.target = target
        self.is_closed = False
        self._staged = target.staged()
        (self._stage,) = self._staged.stages
        size, limit = self._staged.vocab_size, self._staged.max_positions
        if max(opening.prompt_ids) >= size:
            raise SessionRefused(f"prompt_ids: {max(opening.prompt_ids)} is outside {size} tokens")
        if len(opening.prompt_ids) >= limit:
            raise SessionRefused(
                f"prompt_ids: {len(opening.prompt_ids)} tokens leave no room in the target's "
                f"{limit} positions; shorten the prompt"
            )
        self._opening, self._settings = opening, opening.settings
        self._rule = opening.settings.verifier
        self._tokens: list[int] = []
        """Verified tokens; the last one is the root, whose row is the first speculative one."""
        self._draft_tokens: list[int] = []
        """Draft tokens after the verified ones, not tested yet."""
        self._q: list[float] = []
        self._logits: deque[Tensor] = deque()
        """Logits [V] for the root and the first draft tokens, as far as computed."""
        self._outgrown: list[int] = []
        """Text before the root, to compute again before the next rows (``recompute_length``)."""
        self._rejected: Tensor | None = None
        """Logits after the verified tokens, if the edge samples the next token."""
        self._num_samples = self._num_more = 0
        self._batches: deque[_Batch] = deque()
        self._epoch = self._next_number = 0
        self._next_seq = 1
        self._waiting: deque[tuple[Request, float]] = deque()
        """Requests received during a pass, with their times."""
        self._streams_for = 0 if opening.streams else None
        """``seq`` of the request to let the target decode alone; None: the edge drafts."""
        self._stop_reason = ""
        self._segment: Segment | None = None
        """Rows in the current pass; None for a prefill."""
        self.is_running = False
        """True between ``start`` and ``finish``."""
        self._started_s = self._expected_s = self._forward_s = 0.0
        self._computed_RV: Tensor | None = None

    # -- messages ---------------------------------------------------------------------------

    def receive(self, request: Request, now_s: float) -> list[Reply]:
        """Accept a request, and return the replies that need no forward pass."""
        # Bounds the stored requests: a dropped one leaves a gap in ``seq``, which ends the session.
        if len(self._waiting) < messages.WINDOW:
            self._waiting.append((request, now_s))
        return [] if self.is_running or self.wants_prefill else self._proceed(now_s)

    def _proceed(self, now_s: float) -> list[Reply]:
        replies: list[Reply] = []
        while self._waiting and not self.is_closed:
            replies += self._take(*self._waiting.popleft())
        return replies + self._test_draft_tokens(now_s)

    def _take(self, request: Request, now_s: float) -> list[Reply]:
        if isinstance(request, Open) or request.seq != self._next_seq:
            raise SessionRefused(f"seq: {request.seq} where {self._next_seq} is due")
        self._next_seq += 1
        if isinstance(request, messages.Close):
            self.is_closed = True
        elif request.epoch > self._epoch:
            raise SessionRefused(f"epoch: {request.epoch} has not begun; this is {self._epoch}")
        elif request.epoch < self._epoch:
            return []  # stale
        elif not self._stop_reason:
            return self._take_current(request, now_s)
        elif isinstance(request, Verify):
            # After the end of the sequence the edge still expects one result per batch.
            batch = _Batch(request.seq, len(self._tokens), now_s, 0.0)
            return [self._verdict(Result, batch, now_s, token=None)]
        return []

    def _take_current(
        self, request: messages.Preverify | Verify | messages.More | messages.Stream, now_s: float
    ) -> list[Reply]:
        if isinstance(request, messages.More):
            return [self._more(request)]
        if self._streams_for is not None:
            return []
        self._check_base(request)
        if request.certain:
            (token,) = request.certain
            self._rejected = None
            self._append(token)
        if isinstance(request, messages.Stream):
            self._draft_tokens, self._q = [], []
            self._batches.clear()
            # The root's row stays valid, the draft tokens' rows do not.
            if self._logits:
                self._retain(1)
            self._streams_for = request.seq
            return []
        if len(request.q) != len(request.ids) * self._rule.needs_q:
            given, wanted = len(request.q), len(request.ids)
            raise SessionRefused(f"q: {given} of {wanted} draft tokens by rule {self._rule.name!r}")
        self._draft_tokens += request.ids
        # Rules without q ignore it, but both lists must stay equally long.
        self._q += request.q or [1.0] * len(request.ids)
        self._expected_s = now_s + request.next_s
        if isinstance(request, Verify):
            end = len(self._tokens) + len(self._draft_tokens)
            self._batches.append(_Batch(request.seq, end, now_s, request.next_s))
        return []

    def _check_base(self, request: messages.Preverify | Verify | messages.Stream) -> None:
        known = self._tokens + self._draft_tokens
        if isinstance(request, messages.Stream):
            known = known[: request.base]
        if request.base != len(known) or request.prefix_hash != messages.prefix_hash(known):
            raise SessionRefused(
                f"base: {request.base} tokens, but this session has {len(known)} or others; open "
                "a new session"
            )
        if len(request.certain) != (self._rejected is not None):
            raise SessionRefused(
                f"certain: {len(request.certain)} tokens; the edge owes its correction"
            )
        ids = [] if isinstance(request, messages.Stream) else request.ids
        if len(self._draft_tokens) + len(ids) > MAX_PENDING:
            raise SessionRefused(
                f"ids: more than {MAX_PENDING} draft tokens would wait for a verdict"
            )
        size = self._staged.vocab_size
        wrong = [token for token in (*request.certain, *ids) if token >= size]
        if wrong:
            raise SessionRefused(f"ids: {wrong[0]} is outside the target's vocabulary of {size}")
        if request.base + len(request.certain) + len(ids) > self._staged.max_positions:
            raise SessionRefused(
                f"ids: more than the target's {self._staged.max_positions} positions"
            )

    def _more(self, request: messages.More) -> messages.Samples:
        if self._rejected is None:
            raise SessionRefused("more: no correction is owed; do not ask for samples")
        self._num_more += 1
        if self._num_more > MAX_MORE:
            raise SessionRefused(f"more: asked more than {MAX_MORE} times for one correction")
        try:
            payload = self._rule.more(
                self._rejected, len(self._tokens), self._num_samples, request.count
            )
        except ValueError as error:
            raise SessionRefused(str(error)) from error
        # The next samples go on from here: their random numbers are keyed by index.
        self._num_samples += request.count
        return self._numbered(messages.Samples, request.seq, payload=payload)

    def _numbered(self, kind: Callable[..., Answer], seq: int, **fields: object) -> Answer:
        number, self._next_number = self._next_number, self._next_number + 1
        return kind(number=number, seq=seq, epoch=self._epoch, **fields)

    # -- the sequence -----------------------------------------------------------------------

    def _append(self, token: int) -> None:
        self._tokens.append(token)
        self._stop_reason = stop_reason(
            token,
            num_new=len(self._tokens) - len(self._opening.prompt_ids),
            length=len(self._tokens),
            eos_token_ids=self._staged.eos_token_ids,
            max_new_tokens=self._settings.max_new_tokens,
            limit=self._staged.max_positions,
        )
        if len(self._tokens) == self._staged.recompute_length:
            self._outgrown = self._tokens[:-1]

    def _retain(self, num_rows: int, num_committed: int = 0) -> None:
        """Keep only the first ``num_rows`` computed rows, then commit ``num_committed`` rows."""
        self._stage.keep(KeepRows(tuple(range(num_rows)), num_committed))
        # Logits mirror the speculative rows of the cache: drop the same ones.
        for _ in range(len(self._logits) - num_rows):
            self._logits.pop()
        for _ in range(num_committed):
            self._logits.popleft()

    def _end_epoch(self) -> None:
        """End the epoch by committing the root's row and dropping all draft tokens."""
        self._retain(1, 1)
        self._draft_tokens, self._q = [], []
        self._batches.clear()
        self._epoch += 1

    def _test_draft_tokens(self, now_s: float) -> list[Reply]:
        replies: list[Reply] = []
        # One row of logits decides one token; without one, a pass must come first.
        while self._logits and not self._stop_reason:
            if self._outgrown:  # these rows read keys that will be computed again
                self._retain(0)
                break
            if self._streams_for is not None:
                replies.append(self._add_own(_Batch(self._streams_for, 0, now_s, 0.0), now_s))
            elif self._draft_tokens and not self._hits_end:
                reject = self._test_one(now_s)
                if reject is not None:
                    replies.append(reject)
            elif self._batches and self._hits_end:
                replies.append(self._answer_hit(now_s))
            else:
                break
        # Without a bonus token a fully accepted batch needs no further row.
        is_hit = self._hits_end and not self._settings.has_bonus
        if self._batches and (self._stop_reason or is_hit):
            replies.append(self._answer_hit(now_s))
        return replies

    @property
    def _hits_end(self) -> bool:
        """Return True if the oldest batch is fully accepted."""
        return bool(self._batches) and len(self._tokens) >= self._batches[0].end

    def _test_one(self, now_s: float) -> messages.Reject | None:
        position, draft_token = len(self._tokens), self._draft_tokens[0]
        payload = self._rule.test(self._logits[0], position, draft_token, self._q[0])
        if payload is None:
            del self._draft_tokens[0], self._q[0]
            self._append(draft_token)
            self._retain(len(self._logits), 1)
            return None
        batch = self._batches[0] if self._batches else None
        # Built before the epoch ends: the reply carries the number of the old one.
        reject = self._verdict(messages.Reject, batch, now_s, payload=payload)
        if isinstance(payload, Token):
            self._end_epoch()
            self._append(payload.id)
        else:
            # Retained for ``More``: ending the epoch drops this row.
            self._rejected, self._num_more = self._logits[0], 0
            self._num_samples = payload.num_samples if isinstance(payload, Top) else 0
            self._end_epoch()
        if batch is not None:
            self._expected_s = now_s + batch.next_s
        return reject

    def _answer_hit(self, now_s: float) -> Result:
        """Return the result for the oldest batch, after full acceptance or the sequence's end."""
        batch = self._batches[0]
        if self._settings.has_bonus and not self._stop_reason:
            return self._add_own(batch, now_s)
        self._batches.popleft()
        return self._verdict(Result, batch, now_s, token=None)

    def _add_own(self, batch: _Batch, now_s: float) -> Result:
        """Append a token sampled by the target, and return the result that reports the token."""
        token = self._rule.draw(self._logits[0], len(self._tokens))
        result = self._verdict(Result, batch, now_s, token=token)
        self._end_epoch()
        self._append(token)
        self._expected_s = now_s + batch.next_s
        return result

    def _verdict(
        self, kind: Callable[..., Answer], batch: _Batch | None, now_s: float, **fields: object
    ) -> Answer:
        """Build a ``Result`` or ``Reject``. For an incomplete batch, ``batch`` is None."""
        return self._numbered(
            kind,
            self._next_seq - 1 if batch is None else batch.seq,
            length=len(self._tokens),
            held_s=0.0 if batch is None else max(0.0, now_s - batch.arrived_s),
            forward_s=self._forward_s,
            **fields,
        )

    # -- forward passes ---------------------------------------------------------------------

    @property
    def cache_bytes(self) -> int:
        """Bytes allocated for keys, values and recurrent states."""
        return self._stage.cache.num_bytes

    @property
    def is_streaming(self) -> bool:
        """Return True if the target decodes alone."""
        return self._streams_for is not None

    @property
    def wants_prefill(self) -> bool:
        """Return True if the next pass is over the prompt."""
        return not self._tokens

    @property
    def owes(self) -> bool:
        """Return True while a pass runs, or a first token, result or streamed token is due."""
        is_asked = bool(self._batches) or self._streams_for is not None
        return self.is_running or self.wants_prefill or (is_asked and not self._stop_reason)

    @property
    def is_computed(self) -> bool:
        """Return True between a successful ``run`` and ``finish``."""
        return self._computed_RV is not None

    def start(self, now_s: float) -> int:
        """Start a forward pass if one is due. Return its number of rows, or 0 if none is due."""
        assert not self.is_running, "finish the pass under way first"
        num_rows = self._num_due(now_s)
        if not num_rows:
            return 0
        if not self.wants_prefill:
            # Rows with logits are in the cache already.
            rows = [self._tokens[-1], *self._draft_tokens][len(self._logits) :]
            first = self._stage.num_speculative
            positions = torch.arange(len(rows)) + len(self._tokens) - 1 + first
            visible = torch.ones(len(rows), first + len(rows), dtype=torch.bool).tril(first)
            self._segment = Segment(positions, visible, ids=torch.tensor(rows))
        self.is_running, self._started_s = True, now_s
        return num_rows

    def _num_due(self, now_s: float) -> int:
        if self.is_closed or self._stop_reason:
            return 0
        if self.wants_prefill:
            return len(self._opening.prompt_ids)
        if self._rejected is not None:
            return 0
        num_rows = 1 + len(self._draft_tokens) - len(self._logits)
        if self._batches or self._streams_for is not None:
            return num_rows
        # A pass ending after the batch's arrival would only delay it.
        is_early = now_s + self._forward_s <= self._expected_s + 1e-9
        return num_rows if self._settings.pre_verifies and is_early else 0

    @torch.inference_mode()
    def run(self) -> None:
        """Compute the started pass. A call after a failed one computes all rows again."""
        assert self.is_running, "nothing has been started"
        if self._segment is None:
            prompt = torch.tensor(self._opening.prompt_ids)
            self._computed_RV = self._staged.prefill(prompt)[0][None]
            return
        # A failed attempt may have appended rows to the cache already.
        if self._stage.num_speculative > self._segment.lo:
            self._stage.keep(KeepRows(tuple(range(self._segment.lo)), 0))
        if self._outgrown:
            self._staged.prefill(torch.tensor(self._outgrown), length=len(self._outgrown) + 1)
        hidden_RH = self._stage.forward(self._segment).hidden
        assert hidden_RH is not None
        self._computed_RV = self._staged.logits(hidden_RH)

    def finish(self, now_s: float) -> list[Reply]:
        """Process the computed rows, and return the resulting replies."""
        assert self._computed_RV is not None, "run it first"
        computed_RV, self._computed_RV, self.is_running = self._computed_RV, None, False
        replies: list[Reply] = []
        if self._segment is None:
            self._tokens = list(self._opening.prompt_ids)
            self._append(self._rule.draw(computed_RV[-1], len(self._tokens)))
            opened = self._numbered(
                messages.Opened,
                0,
                token=self._tokens[-1],
                vocab_size=self._staged.vocab_size,
                max_positions=self._staged.max_positions,
                eos_token_ids=list(self._staged.eos_token_ids),
                anchor=self.target.anchor if self._opening.anchor else "",
            )
            replies.append(opened)
        else:
            self._segment, self._outgrown = None, []
            # Never a prefill's time: the estimate is for passes over few rows.
            self._forward_s = now_s - self._started_s
            self._logits.extend(computed_RV)
        return replies + self._proceed(now_s)


def run_together(sessions: Sequence[TargetSession]) -> None:
    """Run several sessions' started passes. Prompts run alone, other rows together if possible."""
    rows = [one for one in sessions if one._segment is not None and not one._outgrown]
    if len(rows) < 2 or not can_run_together(rows[0]._stage):
        rows = []
    for session in sessions:
        if session not in rows:
            session.run()
    if rows:
        segments = [session._segment for session in rows if session._segment is not None]
        parts = forward_together([session._stage for session in rows], segments)
        with torch.inference_mode():
            hidden = [part.hidden for part in parts if part.hidden is not None]
            computed_RV = rows[0]._staged.logits(torch.cat(hidden))
        sizes = [part.num_rows for part in parts]
        for session, part_RV in zip(rows, computed_RV.split(sizes), strict=True):
            # A view would keep all sessions' logits alive while one needs its own.
            session._computed_RV = part_RV.clone()
