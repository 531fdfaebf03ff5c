"""Draft, send, wait: batches of draft tokens across a link, one at a time.

FlexSpec is stop and wait with a draft length that follows the link, DSSD with the target's whole
distribution on a rejection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pipedraft.inference.edge.draft_length import DraftLengthPolicy, Estimates, parse_policy
from pipedraft.inference.schedules.base import Growth, Schedule, check_at_least

if TYPE_CHECKING:
    from pipedraft.inference.config import RuleName
    from pipedraft.inference.edge.linked import LinkedPipeline
    from pipedraft.inference.engine import Session

MAX_BATCH = 256
"""Draft tokens of a message."""


@dataclass(frozen=True, kw_only=True)
class LinkSchedule(Schedule):
    """A schedule of batches, each of which has one verdict."""

    grows: ClassVar[Growth | None] = "layers"
    needs_link: ClassVar[bool] = True

    policy: str = "geometric"
    """Draft length of a batch: fixed:K, eq11, alg2 or geometric."""
    max_length: int = 8
    """Draft tokens of a batch at most."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "max_length")
        parse_policy(self.policy, max_length=self.max_length)

    @property
    def label(self) -> str | None:
        return f"batch:{self.policy}"

    @property
    def auto_rule(self) -> RuleName:
        return "match"

    # -- what methods differ in -------------------------------------------------------------

    @property
    def drafts_on(self) -> bool:
        """Draft while batches are away; a batch that is accepted to its end has no bonus then."""
        return False

    @property
    def max_window(self) -> int | None:
        """Batches that may be away; None: as many as keep the target busy."""
        return 1

    @property
    def early(self) -> bool:
        """The target computes rows that it knows before their batch is complete, where that would
        not delay the batch."""
        return False

    def make_policy(self, estimates: Estimates) -> DraftLengthPolicy:
        return parse_policy(self.policy, max_length=self.max_length)

    def batch_size(self, chosen: int, num_batches: int) -> int:
        """Draft tokens of a batch.

        Args:
            chosen: by the policy.
            num_batches: sent since the last miss.
        """
        return chosen

    def is_late(self, link: LinkedPipeline) -> bool:
        """The batch under way ends although more was planned."""
        return False

    def reads(self, is_complete: bool) -> bool:
        """Whether verdicts that wait are read now.

        Args:
            is_complete: the batch under way.
        """
        return True

    # -- the loop ---------------------------------------------------------------------------

    def run(self, session: Session) -> None:
        link = session.link
        last = int(session.drafter.draft_ids.max())
        if last >= link.target.vocab_size:
            raise ValueError(f"draft: it knows token {last}, the target {link.target.vocab_size}")
        policy = self.make_policy(link.estimates)
        while not session.done and not link.fallback:
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

    def _take(self, session: Session, policy: DraftLengthPolicy) -> None:
        """Wait for a verdict."""
        verdict = session.link.tick()
        for size, num_accepted in verdict.outcomes:
            policy.observe(size, num_accepted)
        session.resolve(verdict)

    def _may_draft(self, session: Session) -> bool:
        return (self.drafts_on or not session.link.flights) and not session.end_is_drafted

    def _begin_batch(self, session: Session, policy: DraftLengthPolicy) -> None:
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

    def _is_complete(self, session: Session) -> bool:
        link, batch = session.link, session.link.batch
        if batch is None or not batch.num_drafted:
            return False
        is_full = batch.num_drafted >= batch.size
        return is_full or session.end_is_drafted or self.is_late(link)

    def _window(self, link: LinkedPipeline) -> int:
        assert link.batch is not None
        return self.max_window or link.estimates.window(link.batch.size)

    def _is_worth_sending(self, session: Session) -> bool:
        """An early pass over what is known would end before the batch is complete.

        A correction drawn here goes at once; draft tokens at the last such moment, so that there is
        one pass over as many of them as possible.
        """
        link, batch, tree = session.link, session.link.batch, session.tree
        assert batch is not None
        if not self.early or len(link.flights) >= self._window(link):
            return False
        left_s = (batch.size - batch.num_drafted) * link.estimates.draft_s
        is_useful = left_s >= link.estimates.verify_s
        if not tree.num_injected:
            return is_useful
        is_last = left_s - link.estimates.draft_s < link.estimates.verify_s
        return is_useful and is_last and tree.num_injected < len(tree)


@dataclass(frozen=True, kw_only=True)
class StopAndWait(LinkSchedule):
    """A fixed draft length."""

    name: ClassVar[str] = "stop_and_wait"

    policy: str = "fixed:4"


@dataclass(frozen=True, kw_only=True)
class FlexSpecSchedule(LinkSchedule):
    """A draft length by measured acceptance and link."""

    name: ClassVar[str] = "flexspec"


@dataclass(frozen=True, kw_only=True)
class DSSD(StopAndWait):
    """Distributed split speculative decoding: the draft's side draws corrections itself."""

    name: ClassVar[str] = "dssd"

    @property
    def auto_rule(self) -> RuleName:
        return "rejection"
