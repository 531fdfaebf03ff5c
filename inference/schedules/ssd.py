"""SSD: while a batch is verified, the draft prepares the batches that may follow it."""

# Q rows asked about, W best tokens of each

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pipedraft.inference.schedules.base import Growth, Schedule, check_at_least

if TYPE_CHECKING:
    from pipedraft.inference.engine import Session


@dataclass(frozen=True, kw_only=True)
class SSD(Schedule):
    """Speculative speculative decoding, Saguaro (arXiv 2603.03251), on stages.

    What a verdict will say, how many draft tokens are right and which token follows them, is an
    outcome. While a batch travels, the draft guesses its likeliest outcomes and drafts a chain for
    each of them. A verdict that was among them (a hit) has its batch ready, and the pipeline waits
    for no draft; after any other one (a miss) it waits for a chain, as with ``eagle``. Every batch
    takes n steps, so hits are the batches, K / n, that are not the first of a round.

    What differs from the publication: outcomes are chosen over the whole batch by the draft's own
    probabilities, not so many for each length; above temperature 0 by the shared noise, so that the
    draft guesses the target's own draw; the preparation ends with the verdict.
    """

    name: ClassVar[str] = "ssd"
    grows: ClassVar[Growth | None] = "micro_batches"

    draft_tokens: int = 7
    """Of a batch."""
    outcomes: int = 8
    """Verdicts that are prepared for; one draft forward continues all of them."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "draft_tokens", "outcomes")

    @property
    def label(self) -> str | None:
        return f"chain:{self.draft_tokens}:outcomes:{self.outcomes}"

    @property
    def is_chain(self) -> bool:
        """A row of the batch has the outcomes below it besides the next one."""
        return False

    def run(self, session: Session) -> None:
        while not session.done:
            if len(session.tree) == 1:
                with session.drafting():
                    leaves = [0]
                    for _ in range(self.draft_tokens):
                        leaves = _continue(session, leaves)
                session.draft_alone()
            session.inject()
            preparation, returned = self._prepare(session), None
            while returned is None:
                for _ in range(session.hidden_forwards()):
                    if session.verdict_waits():
                        break
                    with session.drafting():
                        next(preparation, None)
                returned = session.step(overlap=True)
            session.resolve(returned)

    def _prepare(self, session: Session) -> Iterator[None]:
        """Draft the batches that may follow the one under way, level by level."""
        leaves = self._add_outcomes(session)
        yield
        for _ in range(self.draft_tokens):
            leaves = _continue(session, leaves)
            yield

    def _add_outcomes(self, session: Session) -> list[int]:
        """The likeliest tokens that are not in the batch, over all of its rows; returns their rows.

        The score of a row is the log-probability that the text goes there, so that of a child is
        the outcome's: all draft tokens above it are right, and the target's next token is this one.
        """
        tree = session.tree
        tokens_QW, scores_QW = _best(session, list(range(len(tree))), self.outcomes + 1)
        found = sorted(
            (-score, parent, int(token))
            for parent, (tokens, scores) in enumerate(zip(tokens_QW, scores_QW, strict=True))
            for token, score in zip(tokens, scores, strict=True)
            if tree.child(parent, int(token)) is None
        )
        return [tree.add(parent, token, -loss) for loss, parent, token in found[: self.outcomes]]


def _continue(session: Session, leaves: list[int]) -> list[int]:
    """Add the best child of every leaf; returns their rows."""
    tokens_Q1, scores_Q1 = _best(session, leaves, 1)
    return [
        session.tree.add(leaf, int(token), score)
        for leaf, (token,), (score,) in zip(leaves, tokens_Q1, scores_Q1, strict=True)
    ]


def _best(session: Session, rows: list[int], width: int) -> list[list[list[float]]]:
    """Tokens and cumulative scores [2, Q, W] of the best children of some rows."""
    (best_2QW,) = session.drafter.best_levels(
        session.tree,
        rows,
        session.features,
        width=width,
        levels=1,
        sampling=session.step_sampling(width),
    )
    return best_2QW.tolist()
