"""Micro-batches of guesses enter at every step, on top of those under way: PipeInfer."""

from typing import Any

from pipedraft.inference.clock import VirtualClock
from pipedraft.inference.closed_forms import micro_batch_acceptance_length

STEP = 0.2
"""Weight of the latest verdict in the mean share of right guesses."""
LONGEST_PAUSE = 64
"""Verdicts."""


class Patience:
    """Whether a draft is worth asking: one that is hardly ever right pauses.

    Args:
        floor: the smallest useful share of right guesses; 0 is never impatient.
    """

    def __init__(self, floor: float) -> None:
        self.floor = floor
        self.share = 0.5
        self.pause = 0
        self.left = 0

    def observe(self, share: float | None) -> None:
        """Take in a verdict's share of right guesses; None where none was asked for.

        Below the floor every pause, in verdicts, is twice as long as the one before.
        """
        if share is None:
            self.left = max(0, self.left - 1)
            return
        self.share += STEP * (share - self.share)
        self.pause = 0 if self.share >= self.floor else min(2 * self.pause or 1, LONGEST_PAUSE)
        self.left = self.pause


def worthwhile_size(largest: int, share: float, clock: VirtualClock) -> int:
    """Guesses a step that give most tokens per modelled time, if ``share`` of them is right."""
    if not clock.cost.row:
        return largest

    def speed(size: int) -> float:
        rows = [size] * clock.num_stages
        length = micro_batch_acceptance_length(share, size, clock.num_stages)
        return length / clock.duration(rows, draft_forwards=size, overlap=True)

    return max(range(1, largest + 1), key=speed)


def pipeinfer(session: Any) -> None:
    """The draft continues the deepest guess that may still be right, whatever was verified since.

    PipeInfer's runs are segments here, its key-value partitions paths of the one token tree, and
    its cancellations Keeps. Its non-speculative run, one token of certain text, is the root's own
    segment, and is needed only where no row under way is the root.

    ``restart`` is the published order: after every verdict the draft begins again at the root,
    whose own run takes the next entry to the first stage. Guesses that are under way stay, and the
    tree merges their copies, so a copy costs its entry, or the place of another guess in its
    micro-batch, but no row. What differs from the publication: the stages keep step, with one
    entry per step; no verdict is drawn a second time for a position; a copy costs the stages and
    the links nothing else. Beyond the publication: a draft whose guesses are hardly ever right is
    asked rarely (``give_up``), whatever it believes of them, and where rows cost time under the
    cost model a micro-batch is as large as the latest share of right guesses makes worth it.
    """
    batch = session.config.micro_batch
    leaf = successive = empty = 0
    patience = Patience(batch.give_up)
    is_entry_taken = False
    while not session.done:
        if not is_entry_taken:
            session.inject()
        tree = session.tree
        is_idle = tree.num_injected == len(tree)
        has_room = len(tree) < (batch.max_in_flight or float("inf"))
        if is_idle and has_room and not patience.left:
            if not batch.restart:
                leaf = _deepest(tree, range(len(tree)))
            shift = successive * batch.recovery - empty * batch.decay
            size = worthwhile_size(batch.size, patience.share, session.clock)
            rows = session.grow_micro_batch(leaf, shift, size)
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
            patience.observe(right / max(1, tested) if was_asked else None)
            leaf = successive = empty = 0
            is_entry_taken = batch.restart and session.tree.num_injected > 0


def _deepest(tree: Any, rows: Any) -> int:
    """Of equally deep rows the one with the best score."""
    return max(rows, key=lambda row: (tree.depths[row], tree.scores[row]))
