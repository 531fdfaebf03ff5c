"""A target behind a server: the draft computes in the caller's thread, messages cross gRPC.

A session that its server has forgotten is opened again with the sequence so far. Random numbers
belong to positions, so a greedy output, and a sampled one by the rules ``match`` and ``gumbel``, is
the one that an unbroken session would have given.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import torch

from pipedraft.cli import Failure
from pipedraft.inference.channel import LinkEstimate, LinkState
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.pipelines import Ahead
from pipedraft.inference.pipelines.linked import (
    Estimates,
    LinkedPipeline,
    LinkVerdict,
    RemoteTarget,
)
from pipedraft.inference.sources import make_source
from pipedraft.inference.transport.session_messages import Close, Description, Request
from pipedraft.inference.transport.stream import Connection, SessionLost, SessionStream
from pipedraft.inference.tree import TokenTree
from pipedraft.inference.verify import Payload, Verifier

if TYPE_CHECKING:
    from pipedraft.models.draft import Draft
    from pipedraft.models.language_model import LanguageModelDraft

MAX_EMPTY_SESSIONS = 5
"""In a row that were lost before their first token."""
TRIAL_TOKENS = 32
"""Over so many, drafting is compared with what the target alone would take."""
TOLERANCE = 1.25
"""How much slower drafting may look: the estimate of the target leaves out its other sessions."""


@dataclass(frozen=True, kw_only=True)
class LocalDraft:
    """A draft on this machine, for a target that is not."""

    network: "Draft | LanguageModelDraft"
    target: str = ""
    """Hash of the embedding, final norm and LM head that it was trained with; "": any."""
    anchor: str = ""
    """Hash of the target's last block that it holds; "": none."""

    def mismatch(self, about: Description) -> str:
        """Why it does not belong to a server's target; "": it does."""
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
        """Seconds of a draft token; the first one, which loads kernels, is left out."""
        source, times_s = make_source(self.network), list[float]()
        source.begin({}, tokens[-8:])
        tree = TokenTree(tokens[-1], min(len(tokens), 8) - 1)
        for row in range(4):
            started_s = time.perf_counter()
            (logits_U,) = source.leaf_logits(tree, [row], {})
            tree.add(row, int(source.draft_ids[logits_U.argmax()]), 0.0)
            times_s.append(time.perf_counter() - started_s)
        return min(times_s[1:])


class RemotePipeline(LinkedPipeline):
    """Sequences over one connection, one after the other."""

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
            keeps_drafting: also where the target alone would be faster.
            tokenizer: hash of the vocabulary, as the server's must be; "": not compared.
        """
        super().__init__(RemoteTarget())
        self.connection, self.draft, self.warn = connection, draft, warn
        self.keeps_drafting, self.tokenizer = keeps_drafting, tokenizer
        self.num_reopened = 0
        """Sessions that the server had forgotten."""
        if draft is not None:
            self.draft_vocab_size = draft.network.target_vocab_size
        self._stream: SessionStream | None = None
        self._lost: SessionLost | None = None

    def open(self, config: DecodeConfig, prompt_index: int) -> None:
        super().open(config, prompt_index)
        self.num_reopened, self._num_prompt = 0, 0
        self._max_new_tokens = config.max_new_tokens
        self._first_about: Description | None = None
        self._times_s: list[float] = []
        """When each token after the first was certain."""
        self._drafting_s = 0.0

    def now(self) -> float:
        return time.monotonic()

    # -- sessions ---------------------------------------------------------------------------

    def _begin(self) -> Estimates:
        about, round_trip_s = self.connection.describe()
        first = self._first_about = self._first_about or about
        if self.tokenizer not in ("", about.tokenizer):
            raise ValueError(
                f"server: its target {about.target} has another tokenizer than this side; give "
                "the draft, or --tokenizer, of that target"
            )
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
        # The bandwidth is not known: what it costs shows in the round trips.
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
        self._num_prompt = self._num_prompt or len(tokens)
        num_empty = 0
        while True:
            if self.draft is not None and not self._streams:
                self.estimates.draft_s = self.draft.measure(tokens)
            try:
                return super()._open_session(list(tokens))
            except SessionLost as lost:
                num_empty += 1
                if num_empty == MAX_EMPTY_SESSIONS:
                    raise Failure(
                        f"server: {num_empty} sessions ended before their first token ({lost})"
                    ) from lost
                self._begin_again(tokens, lost)

    def _begin_again(self, tokens: list[int], lost: SessionLost) -> None:
        self.warn(f"{lost}: opening a new one")
        self._hang_up()
        self.num_reopened += 1
        self._times_s, self._drafting_s = [], 0.0  # the draft is not why the server was away
        self._restart()
        self.estimates = self._begin()
        left = self._max_new_tokens - (len(tokens) - self._num_prompt)
        self.settings = msgspec.structs.replace(self.settings, max_new_tokens=left)

    def _reopen(self, lost: SessionLost) -> int:
        """Go on in a new session; returns its first token."""
        tokens = self._tokens
        self._begin_again(tokens, lost)
        return self._open_session(tokens)

    def tick(self, ahead: Ahead | None = None) -> LinkVerdict:
        try:
            verdict = super().tick(ahead)
        except SessionLost as lost:
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
        """Fall back if drafting is slower than the target alone, which sends a token a pass.

        Args:
            num_pending: draft tokens without a verdict, which are taken to be right: drafting that
                is too slow even so is given up before the verdict.
        """
        if self.keeps_drafting or self._streams:
            return
        num_certain = max(TRIAL_TOKENS - num_pending, 0)
        # Of an output with fewer tokens only the drafting counts: prompts of others may delay it.
        trial_s = self._drafting_s
        if len(self._times_s) > num_certain:
            trial_s = self.now() - self._times_s[-1 - num_certain]
        token_s, alone_s = trial_s / TRIAL_TOKENS, self.estimates.verify_s
        if token_s > TOLERANCE * alone_s:
            self._fall_back(
                f"drafting takes {token_s * 1e3:.1f} ms a token, the target alone about "
                f"{alone_s * 1e3:.1f}",
                "the target decodes alone from here on",
            )

    def _fall_back(self, reason: str, consequence: str) -> None:
        if reason and not self.fallback:
            self.fallback = reason
            self.warn(f"{reason}; {consequence}")

    def close(self) -> int:
        """End the session; returns the passes that the server computed.

        Returns:
            0: a server has forgotten what it computed.
        """
        assert self._stream is not None
        num_passes = self._stream.close(self._next(Close))
        self._stream = None
        return 0 if self.num_reopened or num_passes is None else num_passes

    def abandon(self) -> None:
        self._hang_up()

    def _hang_up(self) -> None:
        if self._stream is not None:
            self._stream.hang_up()
            self._stream = None

    # -- messages ---------------------------------------------------------------------------

    def _send(self, request: Request) -> None:
        assert self._stream is not None
        self._stream.send(request)

    def _wait(self) -> None:
        if self._lost is not None:
            raise self._lost
        self._take(waits=True)

    def verdict_waits(self) -> bool:
        """Whether a verdict waits, or the next step begins with a new session."""
        while self._lost is None and self._take(waits=False):
            pass
        return self._lost is not None or super().verdict_waits()

    def _take(self, *, waits: bool) -> bool:
        """Whether something came."""
        assert self._stream is not None
        try:
            found = self._stream.take(waits=waits)
        except SessionLost as lost:
            if waits:
                raise
            self._lost = lost
            return False
        if found is not None:
            self._inbox.append(found)
        return found is not None
