"""PipeInfer: micro-batches of draft tokens enter at every step, on top of those under way."""

# Q leaves, W best tokens of each

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pipedraft.inference.schedules.base import (
    Growth,
    Schedule,
    check_at_least,
    check_probability,
)
from pipedraft.inference.shapes import MOST_ROWS, Budget

if TYPE_CHECKING:
    from torch import Tensor

    from pipedraft.inference.engine import Session
    from pipedraft.inference.sources.base import DraftSampling, DraftSource
    from pipedraft.inference.tree import TokenTree

STEP = 0.2
"""Weight of the latest verdict in the mean share of right draft tokens."""
LONGEST_PAUSE = 64
"""Verdicts."""


@dataclass(frozen=True, kw_only=True)
class PipeInfer(Schedule):
    """The draft continues the deepest draft token that may still be right, whatever was verified.

    PipeInfer's runs are segments here, its key-value partitions paths of the one token tree, and
    its cancellations Keeps. Its non-speculative run, one token of certain output, is the root's own
    segment, and is needed only where no row under way is the root.

    The defaults never stop drafting: on the lock-step clock a draft token in an entry that would
    stay empty costs nothing. PipeInfer's code has size 16, accept 0.5 and split 0.1 as defaults,
    and its published runs size 3 or 4, branches 3, accept 0.001 to 0.1, split 0.8 to 0.9, recovery
    up to 0.4 and decay up to 0.01.

    What differs from the publication: the stages keep step, with one entry per step; no verdict is
    drawn a second time for a position; a copy costs the stages and the links nothing else. Beyond
    the publication: a draft that is hardly ever right is asked rarely (``give_up``), whatever it
    believes, and micro-batches of ``auto`` are as large as pays.
    """

    name: ClassVar[str] = "pipeinfer"
    grows: ClassVar[Growth | None] = "micro_batches"

    draft_tokens: Budget = 3
    """Draft tokens of one micro-batch, over all branches; they enter the first stage together.
    auto: as many as pay under the cost model and are drafted beside a step of one row, 1 to 16."""
    branches: int = 1
    """Paths that one micro-batch may begin; 1: a chain."""
    accept: float = 0.0
    """A branch ends where the probability of the draft's best token is below this."""
    split: float = 0.1
    """A branch forks into the draft's next best tokens where their probability is above this."""
    recovery: float = 0.0
    """Added to both thresholds for each micro-batch since the last verdict."""
    decay: float = 0.0
    """Taken off both for each micro-batch since the last verdict that came out empty."""
    give_up: float = 0.1
    """While a smaller part of the latest draft tokens was right, the draft pauses, twice as long
    every time: one that is of no use then costs the stages little. 0: never."""
    restart: bool = False
    """As published: after every verdict the draft begins again at the root, whose own run takes the
    next entry to the first stage. Draft tokens that are under way stay, and the tree merges their
    copies, so a copy costs its entry, or the place of another one in its micro-batch, but no
    row."""
    max_in_flight: int | None = None
    """Nothing is drafted while the tree has this many rows; None: no limit."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "draft_tokens", "branches", "max_in_flight")
        check_probability(self, "accept", "split", "give_up")
        check_at_least(self, 0, "recovery", "decay")

    @property
    def width(self) -> int:
        return self.branches

    @property
    def label(self) -> str | None:
        return f"micro-batch:{self.draft_tokens}" + (":restart" if self.restart else "")

    @property
    def is_chain(self) -> bool:
        """A root that is continued again may get another draft token."""
        return self.branches == 1 and not self.restart

    @property
    def can_sample(self) -> bool:
        """PipeInfer's draft is greedy."""
        return False

    def run(self, session: Session) -> None:
        leaf = successive = empty = 0
        gate = DraftGate(self.give_up)
        is_entry_taken = False
        while not session.done:
            if not is_entry_taken:
                session.inject()
            tree = session.tree
            is_idle = tree.num_injected == len(tree)
            has_room = len(tree) < (self.max_in_flight or math.inf)
            pays = session.drafts_pay(self.draft_tokens)
            if is_idle and has_room and pays and not gate.left:
                if not self.restart:
                    leaf = _deepest(tree, range(len(tree)))
                shift = successive * self.recovery - empty * self.decay
                with session.drafting():
                    rows = self.grow(
                        session.drafter,
                        tree,
                        session.features,
                        start=leaf,
                        shift=shift,
                        sampling=session.step_sampling(self.draft_tokens),
                        size=self._size(session),
                        interrupted=session.pipeline.verdict_waits,
                    )
                leaf = _deepest(tree, rows or [leaf])
                successive += bool(rows)
                empty += not rows
            returned = session.step(overlap=True)
            is_entry_taken = False
            if returned is not None:
                result = session.result
                tested, right = result.num_tested, result.num_accepted
                session.resolve(returned)
                tested, right = result.num_tested - tested, result.num_accepted - right
                was_asked = tested or successive or empty
                gate.observe(right / max(1, tested) if was_asked else None)
                leaf = successive = empty = 0
                is_entry_taken = self.restart and session.tree.num_injected > 0

    def _size(self, session: Session) -> int:
        if self.draft_tokens != "auto":
            return self.draft_tokens
        return min(MOST_ROWS, session.clock.hidden_forwards())

    def grow(
        self,
        source: DraftSource,
        tree: TokenTree,
        features: Mapping[int, Tensor],
        *,
        start: int,
        shift: float,
        sampling: DraftSampling,
        size: int,
        interrupted: Callable[[], bool],
    ) -> list[int]:
        """Draft up to ``size`` tokens below a row, level by level, as far as the draft is sure.

        A branch ends where the draft's best token has a probability below ``accept + shift``. It
        forks into its next best tokens where theirs exceed ``split + shift``, while fewer than
        ``branches`` branches were begun.

        Args:
            start: the row to continue.
            shift: what recovery and decay add to both thresholds.
            interrupted: asked before every draft forward but the first; True ends the micro-batch.

        Returns:
            The row of every draft token, parents first; the tree may have had some before.
        """
        accept, split = self.accept + shift, self.split + shift
        rows: list[int] = []
        leaves, num_branches = [start], 1
        while leaves and len(rows) < size and not (rows and interrupted()):
            for best_2QW in source.best_levels(
                tree,
                leaves,
                features,
                width=self.branches,
                levels=size - len(rows),
                sampling=sampling,
                beams=self.branches,
                split=split,
            ):
                level: list[int] = []
                for leaf, *children in zip(leaves, *best_2QW.tolist(), strict=True):
                    best, *others = zip(*children, strict=True)
                    reached = tree.scores[leaf]
                    if math.exp(best[1] - reached) < accept:
                        continue
                    forks = [child for child in others if math.exp(child[1] - reached) > split]
                    forks = forks[: self.branches - num_branches]
                    num_branches += len(forks)
                    room = size - len(rows) - len(level)
                    scored = [best, *forks][:room]
                    worth = sampling.worth(tree, [score for _, score in scored])
                    for token, score in scored[:worth]:
                        level.append(tree.add(leaf, int(token), score))
                rows += level
                leaves = level
                if not leaves or len(rows) == size:
                    break
        return rows


class DraftGate:
    """Whether a draft is worth asking: one that is hardly ever right pauses.

    Args:
        floor: the smallest useful share of right draft tokens; 0 never pauses.
    """

    def __init__(self, floor: float) -> None:
        self.floor = floor
        self.share = 0.5
        self.pause = 0
        self.left = 0

    def observe(self, share: float | None) -> None:
        """Take in a verdict's share of right draft tokens; None where none was asked for.

        Below the floor every pause, in verdicts, is twice as long as the one before.
        """
        if share is None:
            self.left = max(0, self.left - 1)
            return
        self.share += STEP * (share - self.share)
        self.pause = 0 if self.share >= self.floor else min(2 * self.pause or 1, LONGEST_PAUSE)
        self.left = self.pause


def _deepest(tree: TokenTree, rows: Iterable[int]) -> int:
    """The deepest row; of equally deep ones the one with the best score."""
    return max(rows, key=lambda row: (tree.depths[row], tree.scores[row]))
