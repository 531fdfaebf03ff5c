"""Target behind a gRPC server. The draft computes in the caller's thread.

A broken session is reopened with the output so far, at the cost of one prefill. Random numbers are
keyed by position. Reopening therefore changes no greedy output, and no sampled output under the
rules ``match`` and ``gumbel``.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from torch import Tensor

from ..meter import HICCUP
from ..pipelines import Ahead
from ..rules.sampled import Payload, Verifier
from ..sources import make_source
from ..tree import TokenTree
from .channel import LinkEstimate, LinkState
from .pipeline import (
    Estimates,
    LinkedPipeline,
    LinkVerdict,
    RemoteTarget,
)
from .session_messages import Close, Description, Request, Settings
from .stream import Connection, SessionLost, SessionStream

if TYPE_CHECKING:
    from ...models.heads.draft import Draft
    from ...models.heads.language_model import LanguageModelDraft

TRIAL_TOKENS = 32
"""Tokens per comparison between drafting and the target decoding alone."""
TOLERANCE = 1.25
"""Tolerated slowdown. The time estimated for the target alone ignores other clients' sessions."""
LEAST_WAITS = 4
"""Minimum number of recent tokens before the time spent waiting for them is compared, too."""


@dataclass(frozen=True, kw_only=True)
class LocalDraft:
    """Draft on this machine for a remote target."""

    network: "Draft | LanguageModelDraft"
    target: str = ""
    """Hash of the embedding, final norm and LM head used to train the draft; "": any."""
    anchor: str = ""
    """Hash of the draft's copy of the target's last block; "": no copy."""

    def mismatch(self, about: Description) -> str:
        """Return why the draft does not match a server's target, or "" if it matches."""
        pairs = {
            "embedding, final norm or LM head": (self.target, about.fingerprint),
            "last block": (self.anchor, about.anchor),
        }
        for name, (own, theirs) in pairs.items():
            if own not in ("", theirs):
                return (
                    f"the draft was trained with another {name} ({own[:12]}) than the server's "
                    f"{about.target} has ({theirs[:12]})"
                )
        return ""

    @torch.inference_mode()
    def measure(self, tokens: list[int]) -> float:
        """Return seconds per draft token. The first token is left out because it loads kernels."""
        source, times_s = make_source(self.network), list[float]()
        # A short text is enough: this runs before every session.
        source.begin({}, tokens[-8:])
        tree = TokenTree(tokens[-1], min(len(tokens), 8) - 1)
        for row in range(4):
            started_s = time.perf_counter()
            (logits_U,) = source.leaf_logits(tree, [row], {})
            tree.add(row, int(source.draft_ids[logits_U.argmax()]), 0.0)
            times_s.append(time.perf_counter() - started_s)
        # Other work on this machine only adds time, so the minimum is the best estimate.
        return min(times_s[1:])


class RemotePipeline(LinkedPipeline):
    """Pipeline over one connection to a server, for one sequence at a time."""

    def __init__(
        self,
        connection: Connection,
        draft: LocalDraft | None = None,
        *,
        keeps_drafting: bool = False,
        tokenizer: str = "",
        warn: Callable[[str], None] = lambda line: None,
    ) -> None:
        """
        Args:
            keeps_drafting: True to draft even if the target alone would be faster.
            tokenizer: vocabulary hash to compare with the server's, or "" for no comparison.
        """
        super().__init__(RemoteTarget())
        self.connection, self.draft, self.warn = connection, draft, warn
        self.keeps_drafting, self.tokenizer = keeps_drafting, tokenizer
        self.num_reopened = 0
        """Number of sessions that broke after their first token. Each one cost a prefill."""
        if draft is not None:
            self.draft_vocab_size = draft.network.target_vocab_size
        self._stream: SessionStream | None = None
        self._lost: SessionLost | None = None

    def open_link(self, settings: Settings, *, streams: bool) -> None:
        super().open_link(settings, streams=streams)
        self.num_reopened, self._num_prompt = 0, 0
        self._max_new_tokens = settings.max_new_tokens
        self._first_about: Description | None = None
        self._times_s: list[float] = []
        """Time when each token after the first was verified."""
        self._drafting_s = 0.0

    def now(self) -> float:
        return time.monotonic()

    # -- sessions ---------------------------------------------------------------------------

    def prefill(
        self, input_ids: Tensor, taps: tuple[int, ...], verifier: Verifier
    ) -> tuple[int, dict[int, Tensor]]:
        # Trouble in the last output must not shorten this one's patience.
        self.connection.patience.progressed()
        return super().prefill(input_ids, taps, verifier)

    def _begin(self) -> Estimates:
        about, round_trip_s = self.connection.describe()
        first = self._first_about = self._first_about or about
        if self.tokenizer not in ("", about.tokenizer):
            raise ValueError(
                f"server: its target {about.target} has another tokenizer than this side; give "
                "the draft, or --tokenizer, of that target"
            )
        # The first target computed the output so far; another target must not continue it.
        if about.weights != first.weights:
            raise ValueError(
                f"server: it came back with another target than {first.target} as it was; begin "
                "the output again"
            )
        if self.draft is not None and not self._streams:
            self._fall_back(self.draft.mismatch(about), "the target decodes alone")
            self.anchor = self.draft.anchor
            self._streams = bool(self.fallback)
        self._stream, self._lost = SessionStream(self.connection), None
        # The bandwidth is unknown: its cost shows in the round trips.
        state = LinkState(
            up_bytes_per_s=math.inf, down_bytes_per_s=math.inf, round_trip_s=round_trip_s
        )
        return Estimates(
            draft_s=0.0,
            verify_s=about.forward_s,
            verify_row_s=about.row_s,
            link=LinkEstimate(state),
        )

    def _open_session(self, tokens: list[int]) -> int:
        # Reopened sessions have longer prompts: only the first length is the user's.
        self._num_prompt = self._num_prompt or len(tokens)
        while True:
            if self.draft is not None and not self._streams:
                self.estimates.draft_s = self.draft.measure(tokens)
            try:
                return super()._open_session(list(tokens))
            except SessionLost as lost:
                self._begin_again(tokens, lost)

    def _begin_again(self, tokens: list[int], lost: SessionLost) -> None:
        """Wait for the server, then prepare a session that continues the output so far."""
        self.abandon()
        self.connection.patience.wait(lost)
        self._times_s, self._drafting_s = [], 0.0  # the draft did not cause the outage
        self._restart()
        self.estimates = self._begin()
        # The server counts new tokens, and its next prompt includes the output so far.
        left = self._max_new_tokens - (len(tokens) - self._num_prompt)
        self.settings = msgspec.structs.replace(self.settings, max_new_tokens=left)

    def _reopen(self, lost: SessionLost) -> int:
        """Continue the output in a new session, and return that session's first token."""
        tokens = self._tokens
        self.num_reopened += 1
        self.warn(
            f"server: {self.connection.access.server}: the session broke ({lost}); opening a new "
            f"one with a prefill of {len(tokens)} tokens"
        )
        self._begin_again(tokens, lost)
        return self._open_session(tokens)

    def tick(self, ahead: Ahead | None = None) -> LinkVerdict:
        try:
            verdict = super().tick(ahead)
        except SessionLost as lost:
            # Draft tokens in flight are lost; the new session's first token is like a bonus.
            verdict = LinkVerdict(num_accepted=0, token=self._reopen(lost))
        num_new = verdict.num_accepted + (verdict.token is not None or verdict.payload is not None)
        self._times_s += [self.now()] * num_new
        self._compare(num_pending=0)
        return verdict

    def drafted(self, num_tokens: int, started_s: float) -> None:
        super().drafted(num_tokens, started_s)
        self._drafting_s += self.now() - started_s
        self._compare(len(self._sent) + (0 if self.batch is None else self.batch.num_drafted))

    def _corrected(self, verifier: Verifier, tree: TokenTree, row: int, payload: Payload) -> int:
        try:
            return super()._corrected(verifier, tree, row, payload)
        except SessionLost as lost:
            return self._reopen(lost)

    def _compare(self, num_pending: int) -> None:
        """Let the target decode alone if drafting is slower than one target pass per token.

        Args:
            num_pending: draft tokens without a result. They count as accepted. If drafting is too
                slow even then, the fallback does not wait for the result.
        """
        if self.keeps_drafting or self._streams:
            return
        num_certain = max(TRIAL_TOKENS - num_pending, 0)
        # With too few tokens only drafting time counts: other clients' prompts may cause waits.
        trial_s = self._drafting_s
        if len(self._times_s) > num_certain:
            trial_s = self.now() - self._times_s[-1 - num_certain]
        alone_s = self.estimates.verify_s
        limit_s = (TOLERANCE - 1) * TRIAL_TOKENS * alone_s
        for num_tokens, time_s in ((TRIAL_TOKENS, trial_s), self._waited()):
            if time_s - num_tokens * alone_s > limit_s:
                self._fall_back(
                    f"drafting takes {time_s / num_tokens * 1e3:.1f} ms a token, the target alone "
                    f"about {alone_s * 1e3:.1f}",
                    "the target decodes alone from here on",
                )

    def _waited(self) -> tuple[int, float]:
        """Return the number of recent tokens, and the time spent waiting for them.

        A wait far above the median is clipped, because another client's prompt may have caused it.
        """
        waits_s = np.diff(self._times_s[-1 - TRIAL_TOKENS :])
        if len(waits_s) < LEAST_WAITS:
            return 1, 0.0
        return len(waits_s), float(waits_s.clip(max=HICCUP * np.median(waits_s)).sum())

    def _fall_back(self, reason: str, consequence: str) -> None:
        if reason and not self.fallback:
            self.fallback = reason
            self.warn(f"{reason}; {consequence}")

    def close(self) -> int:
        """End the session. Return its target passes after the prompt, or 0 if unknown."""
        assert self._stream is not None
        num_passes = self._stream.close(self._next(Close))
        self._stream = None
        return 0 if self.num_reopened or num_passes is None else num_passes

    def abandon(self) -> None:
        if self._stream is not None:
            self._stream.hang_up()
            self._stream = None

    # -- messages ---------------------------------------------------------------------------

    def _send(self, request: Request) -> None:
        assert self._stream is not None
        self._stream.send(request)

    def _wait(self) -> None:
        # The loss was found while drafting; raise it here, where ``tick`` can reopen the session.
        if self._lost is not None:
            raise self._lost
        self._take(waits=True)

    def verdict_waits(self) -> bool:
        """Return True if a result has arrived, or if the session broke and must be reopened."""
        while self._lost is None and self._take(waits=False):
            pass
        return self._lost is not None or super().verdict_waits()

    def _take(self, *, waits: bool) -> bool:
        """Move the next reply from the stream to ``_inbox``. Return False if none has arrived."""
        assert self._stream is not None
        try:
            found = self._stream.take(waits=waits)
        except SessionLost as lost:
            if waits:
                raise
            # Not raised: the caller may be in the middle of a batch.
            self._lost = lost
            return False
        if found is not None:
            self._inbox.append(found)
        return found is not None
