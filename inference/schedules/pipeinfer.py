"""PipeInfer sends micro-batches of draft tokens without waiting for verification results."""

# Q leaves, W best tokens per leaf

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..shapes import MOST_ROWS, Budget, Growth
from .base import Schedule

if TYPE_CHECKING:
    from ..session import Session
    from ..sources.base import DraftSampling, DraftSource, Features
    from ..tree import TokenTree

STEP = 0.2
"""Weight of the latest verification result in the running mean acceptance rate."""
LONGEST_PAUSE = 64
"""Longest pause of the draft, in verification results."""


@dataclass(frozen=True, kw_only=True)
class PipeInfer(Schedule):
    """Continue drafting at the deepest token not rejected yet, without waiting for verification.

    PipeInfer's runs are segments here, its key-value partitions are paths in the one token tree,
    and its cancellations are KeepRows. Its non-speculative run (one token of certain output) is the
    root's own segment, needed only if the root is not in flight.

    An entry is the first stage's input in one step. With the defaults, drafting never stops,
    because on the lock-step clock a draft token costs nothing in an entry that would stay empty. In
    PipeInfer's code the defaults are size 16, accept 0.5 and split 0.1. Its published runs use size
    3 or 4, branches 3, accept 0.001 to 0.1, split 0.8 to 0.9, recovery up to 0.4 and decay up to
    0.01.

    Deviations: all stages step together, with one entry per step. Each position is verified once. A
    copied draft token takes only its place in an entry, no time in stages or links. A draft that is
    hardly ever accepted runs rarely (``give_up``). The cost model sizes ``auto`` micro-batches.
    """

    name: ClassVar[str] = "pipeinfer"
    grows: ClassVar[Growth | None] = "micro_batches"
    ranges: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("accept", "split", "give_up"), "[0, 1]"),
        **dict.fromkeys(("recovery", "decay"), "[0, 1024]"),
    }

    draft_tokens: Budget = 3
    """Draft tokens per micro-batch, over all branches; they enter the first stage together. auto:
    choose 1 to 16 by the cost model, as many as can be drafted within a step with one row per
    stage."""
    branches: int = 1
    """Number of branches that one micro-batch may start; 1: a chain."""
    accept: float = 0.0
    """End a branch if the draft's best token has a lower probability than this."""
    split: float = 0.1
    """Fork a branch into the draft's next best tokens if their probability is higher than this."""
    recovery: float = 0.0
    """Amount added to accept and split per micro-batch since the last verification result."""
    decay: float = 0.0
    """Amount subtracted from accept and split per empty micro-batch since the last result."""
    give_up: float = 0.1
    """Pause the draft while its recent acceptance rate is below this. Each pause is twice as long
    as the one before, so a useless draft costs the stages little. 0: never pause."""
    restart: bool = False
    """Restart the draft at the root after every verification result, as published; the root's run
    uses the next entry to the first stage. In-flight draft tokens stay. If they are drafted
    again, the tree merges the copies: each costs an entry, or a micro-batch place, but no row."""
    max_in_flight: int | None = None
    """Stop drafting while the tree has this many rows; None: no limit."""

    @property
    def width(self) -> int:
        return self.branches

    @property
    def label(self) -> str | None:
        return f"micro-batch:{self.draft_tokens}" + (":restart" if self.restart else "")

    @property
    def is_chain(self) -> bool:
        """Return True for one branch, unless ``restart`` may give the root a second draft token."""
        return self.branches == 1 and not self.restart

    @property
    def can_sample(self) -> bool:
        """Return False, because PipeInfer drafts greedily."""
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
            # Draft only after every known row has entered: a draft token queued behind others would
            # wait.
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
                # Feed the gate results for draft tokens asked for, and None after a pause.
                gate.observe(right / max(1, tested) if was_asked else None)
                leaf = successive = empty = 0
                is_entry_taken = self.restart and session.tree.num_injected > 0

    def _size(self, session: Session) -> int:
        if self.draft_tokens != "auto":
            return self.draft_tokens
        # A chain needs one forward per token; more would make the stages wait.
        return min(MOST_ROWS, session.clock.hidden_forwards())

    def grow(
        self,
        source: DraftSource,
        tree: TokenTree,
        features: Features,
        *,
        start: int,
        shift: float,
        sampling: DraftSampling,
        size: int,
        interrupted: Callable[[], bool],
    ) -> list[int]:
        """Draft up to ``size`` tokens below a row, level by level, while the draft is confident.

        A branch ends if the draft's best token has a probability below ``accept + shift``. It forks
        into the next best tokens with a probability above ``split + shift``, up to ``branches``
        branches in total. Drafting ends early if ``interrupted`` returns True before a forward.

        Returns:
            The row for every draft token, parents first. Some may have been in the tree before.
        """
        accept, split = self.accept + shift, self.split + shift
        rows: list[int] = []
        leaves, num_branches = [start], 1
        while leaves and len(rows) < size and not (rows and interrupted()):
            # Only a new chain asks for several levels; a branch with a child goes on below it.
            is_new = self.branches == 1 and not any(tree.children(leaf) for leaf in leaves)
            for best_2QW in source.best_levels(
                tree,
                leaves,
                features,
                width=self.branches,
                levels=size - len(rows) if is_new else 1,
                sampling=sampling,
                beams=self.branches,
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
    """Pauses a draft if its acceptance rate stays below ``floor``. A floor of 0 never pauses."""

    def __init__(self, floor: float) -> None:
        self.floor, self.share = floor, 0.5
        self.pause = self.left = 0
        """Length and rest of the pause, in verification results; the length doubles each time."""

    def observe(self, share: float | None) -> None:
        """Record a result's acceptance rate, or None if the result had no draft tokens."""
        if share is None:
            self.left = max(0, self.left - 1)
            return
        # A running mean: one bad result alone does not pause a good draft.
        self.share += STEP * (share - self.share)
        self.pause = 0 if self.share >= self.floor else min(2 * self.pause or 1, LONGEST_PAUSE)
        self.left = self.pause


def _deepest(tree: TokenTree, rows: Iterable[int]) -> int:
    """Return the deepest row, and of equally deep rows the one with the best score."""
    return max(rows, key=lambda row: (tree.depths[row], tree.scores[row]))
