"""SSD prepares possible next batches while the current batch is verified."""

# Q rows to continue, W best tokens per row

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..shapes import Growth
from .base import Schedule

if TYPE_CHECKING:
    from ..session import Session


@dataclass(frozen=True, kw_only=True)
class SSD(Schedule):
    """Speculative speculative decoding, Saguaro (arXiv 2603.03251), on pipeline stages.

    An outcome is a possible verification result: the number of accepted draft tokens and the token
    after them. While a batch travels, the draft predicts likely outcomes and drafts a chain for
    each. If the result is among them (a hit), the next batch is ready and the pipeline does not
    wait. Otherwise (a miss) the pipeline waits for a new chain, as with ``eagle``. Every batch
    takes n steps, so there are K / n batches. They are all hits, except each round's first batch.

    Deviations: outcomes are chosen over the whole batch by the draft's probabilities
    (``_flatten``), not a fixed number for each number of accepted tokens. Above temperature 0 the
    draft uses the shared noise, so it predicts the target's own sample, and the output never
    depends on the predictions. Preparation ends when the verification result returns.
    """

    name: ClassVar[str] = "ssd"
    grows: ClassVar[Growth | None] = "micro_batches"

    draft_tokens: int = 7
    """Draft tokens per batch."""
    outcomes: int = 16
    """Outcomes to prepare for; one draft forward continues all of them."""
    fallback_tokens: int | None = None
    """Draft tokens in a batch after a miss, while every stage waits; None: the usual number."""

    @property
    def label(self) -> str | None:
        fallback = f":fallback:{self.fallback_tokens}" if self.fallback_tokens else ""
        return f"chain:{self.draft_tokens}:outcomes:{self.outcomes}{fallback}"

    @property
    def is_chain(self) -> bool:
        """Return False, because outcomes are further children of rows in the batch."""
        return False

    def run(self, session: Session) -> None:
        while not session.done:
            drafts = session.drafts_pay(self.draft_tokens)
            if len(session.tree) == 1 and drafts:
                with session.drafting():
                    left, leaves = self.fallback_tokens or self.draft_tokens, [0]
                    while left:
                        done, leaves = self._grow(session, leaves, left)
                        left -= done
                session.draft_alone()
            session.inject()
            _flatten(session.tree.scores)
            # First the batch's rows, whose further children are the outcomes; then the newest rows.
            left, leaves = self.draft_tokens + 1 if drafts else 0, list(range(len(session.tree)))
            returned = None
            while returned is None:
                most = session.clock.hidden_forwards()
                # More levels would delay a result that is already here.
                while left and not session.pipeline.verdict_waits():
                    # Tokens the draft has not read yet need their own forward.
                    room = most - session.pending_forwards
                    if room <= 0:
                        break
                    with session.drafting():
                        outcomes = self.outcomes if left > self.draft_tokens else 0
                        done, leaves = self._grow(session, leaves, min(left, room), outcomes)
                    left -= done
                returned = session.step(overlap=True)
            session.resolve(returned)

    def _grow(
        self, session: Session, leaves: list[int], levels: int, outcomes: int = 0
    ) -> tuple[int, list[int]]:
        """Add 1 to ``levels`` levels to possible next batches. Return levels added and last rows.

        Args:
            outcomes: number to search for, or 0 to continue every leaf of outcomes chosen before.
        """
        done, beams = 0, outcomes or len(leaves)
        for best_2QW in session.drafter.best_levels(
            session.tree,
            leaves,
            session.features,
            # One more: a row's best child may be in the batch already, and _children drops it.
            width=outcomes + 1,
            levels=levels,
            sampling=session.step_sampling(outcomes + 1),
            beams=beams,
        ):
            found = _children(session, leaves, *best_2QW.tolist())
            # Sort by loss (negative score): the best outcomes over the whole batch, not per row.
            if outcomes and not done:
                found = sorted(found)[:outcomes]
            leaves = [session.tree.add(leaf, token, -loss) for loss, leaf, token in found]
            done += 1
        return done, leaves


def _children(
    session: Session, leaves: list[int], tokens_QW: list[list[float]], scores_QW: list[list[float]]
) -> list[tuple[float, int, int]]:
    """Return (negative score, parent, token) for children not yet in the tree.

    An outcome's score is log(p sqrt(P)). P is the draft's probability that all draft tokens above
    the outcome are accepted. p is the probability that the outcome's token follows.
    """
    return [
        (-score, parent, int(token))
        for parent, tokens, scores in zip(leaves, tokens_QW, scores_QW, strict=True)
        for token, score in zip(tokens, scores, strict=True)
        if session.tree.child(parent, int(token)) is None
    ]


def _flatten(scores: list[float]) -> None:
    """Halve the log scores, so a row gets outcomes in proportion to its probability's square root.

    Misses at a row fall with a power r of the number of tokens prepared below it. Misses are
    fewest if these numbers are proportional to P^(1 / (1 + r)), with P the probability that
    verification reaches the row. The power r is near 1, so the exponent is near 1/2.
    """
    scores[:] = [score / 2 for score in scores]
