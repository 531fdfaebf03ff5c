"""Micro-batches of guesses enter at every step, on top of those under way: PipeInfer."""

from typing import Any


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
    the links nothing else.
    """
    batch = session.config.micro_batch
    leaf = successive = empty = 0
    is_entry_taken = False
    while not session.done:
        if not is_entry_taken:
            session.inject()
        tree = session.tree
        is_idle = tree.num_injected == len(tree)
        if is_idle and len(tree) < (batch.max_in_flight or float("inf")):
            if not batch.restart:
                leaf = _deepest(tree, range(len(tree)))
            shift = successive * batch.recovery - empty * batch.decay
            rows = session.grow_micro_batch(leaf, shift)
            leaf = _deepest(tree, rows or [leaf])
            successive += bool(rows)
            empty += not rows
        returned = session.step(overlap=True)
        is_entry_taken = False
        if returned is not None:
            session.resolve(returned)
            leaf = successive = empty = 0
            is_entry_taken = batch.restart and session.tree.num_injected > 0


def _deepest(tree: Any, rows: Any) -> int:
    """Of equally deep rows the one with the best score."""
    return max(rows, key=lambda row: (tree.depths[row], tree.scores[row]))
