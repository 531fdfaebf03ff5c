"""SSD: while a batch is verified, the draft prepares the batches that may follow it."""

# Q rows asked about, W best tokens of each

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pipedraft.inference.schedules.base import Growth, Schedule, check_at_least

if TYPE_CHECKING:
    from pipedraft.inference.engine import Session


@dataclass(frozen=True, kw_only=True)
class SSD(Schedule):
    """Speculative speculative decoding, Saguaro (arXiv 2603.03251), on stages.

    What a verdict will say, how many draft tokens are right and which token follows them, is an
    outcome. While a batch travels, the draft predicts its likeliest outcomes and drafts a chain for
    each of them. A verdict that was among them (a hit) has its batch ready, and the pipeline waits
    for no draft; after any other one (a miss) it waits for a chain, as with ``eagle``. Every batch
    takes n steps, so hits are the batches, K / n, that are not the first of a round.

    What differs from the publication: outcomes are chosen over the whole batch by the draft's own
    probabilities (``_flatten``), not so many for each length; above temperature 0 by the shared
    noise, so that the draft foresees the target's own draw and no text depends on what it foresaw;
    the preparation ends with the verdict.
    """

    name: ClassVar[str] = "ssd"
    grows: ClassVar[Growth | None] = "micro_batches"

    draft_tokens: int = 7
    """Of a batch."""
    outcomes: int = 16
    """Verdicts that are prepared for; one draft forward continues all of them."""
    fallback_tokens: int | None = None
    """Of a batch after a miss, for which every stage waits; None: as many as of the others."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "draft_tokens", "outcomes", "fallback_tokens")

    @property
    def label(self) -> str | None:
        fallback = f":fallback:{self.fallback_tokens}" if self.fallback_tokens else ""
        return f"chain:{self.draft_tokens}:outcomes:{self.outcomes}{fallback}"

    @property
    def is_chain(self) -> bool:
        """A row of the batch has the outcomes below it besides the next one."""
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
            # Rows of the batch, whose further children are the outcomes, then the newest rows.
            left, leaves = self.draft_tokens + 1 if drafts else 0, list(range(len(session.tree)))
            returned = None
            while returned is None:
                most = session.clock.hidden_forwards()
                while left and not session.pipeline.verdict_waits():
                    # Text that the draft has not read yet takes a pass of its own.
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
        """Draft the batches that may follow by up to some levels, one at least.

        Args:
            outcomes: which so many are looked for; 0: they are known, and every leaf is continued.

        Returns:
            Levels, and the rows of the last one.
        """
        done, beams = 0, outcomes or len(leaves)
        for best_2QW in session.drafter.best_levels(
            session.tree,
            leaves,
            session.features,
            width=outcomes + 1,
            levels=levels,
            sampling=session.step_sampling(outcomes + 1),
            beams=beams,
        ):
            found = _children(session, leaves, *best_2QW.tolist())
            if outcomes and not done:
                found = sorted(found)[:outcomes]
            leaves = [session.tree.add(leaf, token, -loss) for loss, leaf, token in found]
            done += 1
        return done, leaves


def _children(
    session: Session, leaves: list[int], tokens_QW: list[list[float]], scores_QW: list[list[float]]
) -> list[tuple[float, int, int]]:
    """Loss, parent and token of children that are not in the tree.

    An outcome's score is log(p sqrt(P)): P is the draft's probability that all draft tokens above
    it are right, p that the target's next token is this one.
    """
    return [
        (-score, parent, int(token))
        for parent, tokens, scores in zip(leaves, tokens_QW, scores_QW, strict=True)
        for token, score in zip(tokens, scores, strict=True)
        if session.tree.child(parent, int(token)) is None
    ]


def _flatten(scores: list[float]) -> None:
    """Rows of a batch on its way are worth as many outcomes as the root of their probability says.

    The misses of a row fall with a power r of the number of tokens that are prepared for below it,
    so the fewest in all are left by numbers in proportion to P^(1 / (1 + r)), P being the
    probability that the verdict gets to the row; r is near one.
    """
    scores[:] = [score / 2 for score in scores]
