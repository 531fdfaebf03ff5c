"""A tree travels in segments and is verified and pruned at every one that returns.

Pruned pipeline parallelism stops there; FlowSpec also extends the tree on its way.
"""

from dataclasses import replace
from typing import Any

from pipedraft.inference.schedules.layered import drafting_beside
from pipedraft.inference.shapes import Expansion


def pruned_pp(session: Any) -> None:
    """A round ends at the first token that is not in the tree, or at a leaf."""
    _flow(session, None)


def flowspec(session: Any) -> None:
    """Pruned pipeline parallelism that keeps drafting beside the stages.

    The tree on its way is continued where it is most likely right: below the root after a commit
    (context-aware expansion), and below its best guesses that were not continued (score-aware
    expansion). Deviation: published FlowSpec, with ``tree_first``, drafts a fresh tree below the
    root after every commit instead, and the stages wait for the first one of a round.
    """
    expansion = session.config.expansion
    if expansion.enabled and not expansion.tree_first:
        drafting_beside(session, session.expand_tree)
    else:
        _flow(session, expansion if expansion.enabled else None)


def _flow(session: Any, expansion: Expansion | None) -> None:
    """Whole trees. Fresh ones from the root of each commit are merged into the one on its way.

    When the returning segment was pruned to nothing, the context is the old one and the last fresh
    tree is deepened instead.
    """
    config = session.config
    by_score = config.expansion.by_score
    while not session.done:
        session.grow_tree(config.tree, by_score=by_score)
        session.draft_alone()
        session.inject(config.micro_batches or config.num_stages + 1)
        num_steps, hit = 0, True
        while hit and not session.done:
            returned = session.step(overlap=True)
            num_steps += 1
            hit = returned is None or session.resolve(returned)
            if not hit or session.done:
                break
            session.inject()
            if expansion is None:
                continue
            if returned is not None:
                shape = replace(
                    config.tree,
                    depth=session.expansion_forwards(),
                    num_tokens=max(1, expansion.num_tokens),
                )
                session.grow_tree(shape, by_score=by_score)
            elif num_steps >= config.num_stages and expansion.refill_depth:
                session.deepen_tree(expansion.refill_depth, expansion.refill_tokens)
