"""Micro-batches of guesses enter at every step, on top of those under way: PipeInfer."""

from typing import Any

PROBE_EVERY = 8
"""Verdicts between two attempts of a draft that was hardly ever right."""
USEFULNESS_STEP = 0.1
"""Weight of the latest verdict in the mean share of right guesses."""


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
    asked rarely (``give_up``), whatever it believes of them.
    """
    batch = session.config.micro_batch
    leaf = successive = empty = num_verdicts = 0
    usefulness = 1.0
    is_entry_taken = False
    while not session.done:
        if not is_entry_taken:
            session.inject()
        tree = session.tree
        is_idle = tree.num_injected == len(tree)
        is_useful = usefulness >= batch.give_up or num_verdicts % PROBE_EVERY == 0
        if is_useful and is_idle and len(tree) < (batch.max_in_flight or float("inf")):
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
            before = session.result.num_tested, session.result.num_accepted
            session.resolve(returned)
            tested = session.result.num_tested - before[0]
            if tested:
                share = (session.result.num_accepted - before[1]) / tested
                usefulness += USEFULNESS_STEP * (share - usefulness)
            num_verdicts += 1
            leaf = successive = empty = 0
            is_entry_taken = batch.restart and session.tree.num_injected > 0


def _deepest(tree: Any, rows: Any) -> int:
    """Of equally deep rows the one with the best score."""
    return max(rows, key=lambda row: (tree.depths[row], tree.scores[row]))
