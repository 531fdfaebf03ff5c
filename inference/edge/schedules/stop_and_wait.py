"""Draft one batch of tokens, send the batch across a link, and wait for its result.

FlexSpec is stop-and-wait with a draft length that adapts to the link. In DSSD a rejection returns
the target's whole distribution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

from ...rules import RuleName
from ...schedules.base import Schedule
from ...shapes import Growth
from ..draft_length import DraftLengthPolicy, Estimates, parse_policy

if TYPE_CHECKING:
    from ...session import Session
    from ..pipeline import LinkedPipeline
    from ..session import LinkSession

MAX_BATCH = 256
"""Draft tokens per message."""


@dataclass(frozen=True, kw_only=True)
class LinkSchedule(Schedule):
    """Base for schedules across links, which send batches and get one result for each batch."""

    grows: ClassVar[Growth | None] = "layers"
    engine: ClassVar[str] = "link"
    elsewhere: ClassVar[str] = (
        "decodes across a link; give --server HOST:PORT, use eval edge, or choose another schedule"
    )
    can_pause: ClassVar[bool] = False
    own_rule: ClassVar[RuleName | None] = "match"

    policy: str = "geometric"
    """Draft length policy: fixed:K, eq11, alg2 or geometric."""
    max_length: int = 8
    """Maximum draft tokens per batch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_policy(self.policy, max_length=self.max_length)

    @property
    def label(self) -> str | None:
        return f"batch:{self.policy}"

    # -- what methods differ in -------------------------------------------------------------

    @property
    def drafts_on(self) -> bool:
        """True to draft while batches are in flight. Full acceptance then gives no bonus token."""
        return False

    @property
    def max_window(self) -> int | None:
        """Maximum batches in flight, or None for enough batches to keep drafting."""
        return 1

    @property
    def early(self) -> bool:
        """True if the target may compute rows of an incomplete batch when this costs no delay."""
        return False

    def make_policy(self, estimates: Estimates) -> DraftLengthPolicy:
        return parse_policy(self.policy, max_length=self.max_length)

    def batch_size(self, chosen: int, num_batches: int) -> int:
        """Return the next batch's draft length, given the number of batches since a rejection."""
        return chosen

    def holds(self, link: LinkedPipeline) -> bool:
        """Return True to draft more tokens into a batch of its planned length."""
        return False

    def is_late(self, link: LinkedPipeline) -> bool:
        """Return True to end the current batch before its planned length."""
        return False

    def reads(self, is_complete: bool) -> bool:
        """Return True to read results now. ``is_complete`` is True for a complete current batch."""
        return True

    # -- the loop ---------------------------------------------------------------------------

    def run(self, session: Session) -> None:
        self.decode(cast("LinkSession", session))

    def decode(self, session: LinkSession) -> None:
        link = session.link
        last = int(session.drafter.draft_ids.max())
        if last >= link.target.vocab_size:
            raise ValueError(f"draft: it knows token {last}, the target {link.target.vocab_size}")
        policy = self.make_policy(link.estimates)
        while not session.done and not link.fallback:
            # Order matters: results first (they may end the round), then fill the window, then
            # draft.
            batch, is_complete = link.batch, self._is_complete(session)
            if link.verdict_waits() and (batch is None or self.reads(is_complete)):
                self._take(session, policy)
            elif batch is None and self._may_draft(session):
                self._begin_batch(session, policy)
            elif batch is None:
                self._take(session, policy)
            elif is_complete and len(link.flights) < self._window(link):
                session.send_batch()
            elif is_complete:
                self._take(session, policy)
            elif self._is_worth_sending(session):
                session.send_batch(is_early=True)
            else:
                session.grow_layer(1)
        if not session.done:
            session.stream()

    def _take(self, session: LinkSession, policy: DraftLengthPolicy) -> None:
        """Wait for a verification result and apply it."""
        verdict = session.link.tick()
        # Before the next batch begins, so its length uses the newest results.
        for size, num_accepted in verdict.outcomes:
            policy.observe(size, num_accepted)
        session.resolve(verdict)

    def _may_draft(self, session: LinkSession) -> bool:
        # Tokens after a drafted end of text can never be emitted.
        return (self.drafts_on or not session.link.flights) and not session.end_is_drafted

    def _begin_batch(self, session: LinkSession, policy: DraftLengthPolicy) -> None:
        link, tree = session.link, session.tree
        cost = link.estimates.round_cost(
            link.round_bytes(),
            policy.max_length,
            drafts_on=self.drafts_on,
            window=self.max_window,
            early=self.early,
            needs_q=session.verifier.needs_q,
        )
        size = self.batch_size(min(policy.choose(cost), MAX_BATCH), link.num_batches)
        link.begin_batch(size, tree.position(len(tree) - 1) + 1)

    def _is_complete(self, session: LinkSession) -> bool:
        link, batch = session.link, session.link.batch
        if batch is None or not batch.num_drafted:
            return False
        is_full = batch.num_drafted >= MAX_BATCH
        is_full |= batch.num_drafted >= batch.size and not self.holds(link)
        return is_full or session.end_is_drafted or self.is_late(link)

    def _window(self, link: LinkedPipeline) -> int:
        assert link.batch is not None
        return self.max_window or link.estimates.window(link.batch.size)

    def _is_worth_sending(self, session: LinkSession) -> bool:
        """Return True if an early pass over the known rows would end before the batch is complete.

        Draft tokens are sent at the last useful moment, so one pass covers as many as possible.
        """
        link, batch, tree = session.link, session.link.batch, session.tree
        assert batch is not None
        if not self.early or len(link.flights) >= self._window(link):
            return False
        left_s = (batch.size - batch.num_drafted) * link.estimates.draft_s
        is_useful = left_s >= link.estimates.verify_s
        if not tree.num_injected:
            return is_useful
        # After one more draft token an early pass would no longer end in time.
        is_last = left_s - link.estimates.draft_s < link.estimates.verify_s
        return is_useful and is_last and tree.num_injected < len(tree)


@dataclass(frozen=True, kw_only=True)
class StopAndWait(LinkSchedule):
    """Stop-and-wait with a fixed draft length."""

    name: ClassVar[str] = "stop_and_wait"

    policy: str = "fixed:4"


@dataclass(frozen=True, kw_only=True)
class FlexSpecSchedule(LinkSchedule):
    """Stop-and-wait with a draft length chosen from measured acceptance and link."""

    name: ClassVar[str] = "flexspec"


@dataclass(frozen=True, kw_only=True)
class DSSD(StopAndWait):
    """Distributed split speculative decoding, where the draft side samples corrections itself."""

    name: ClassVar[str] = "dssd"
    own_rule = "rejection"
