"""A tree travels in segments and is verified and pruned at every one that returns.

Pruned pipeline parallelism stops there; FlowSpec also extends the tree on its way.
"""

from dataclasses import replace
from typing import Any

from pipedraft.inference.shapes import Expansion


def pruned_pp(session: Any) -> None:
    """A round ends at the first token that is not in the tree, or at a leaf."""
    _flow(session, None)


def flowspec(session: Any) -> None:
    """Pruned pipeline parallelism that keeps drafting beside the stages.

    After a commit a fresh tree from the new root is merged into the one on its way (context-aware
    expansion). When the returning segment was pruned to nothing, the context is the old one and
    the last fresh tree is deepened instead (score-aware expansion). Deviation: the first tree of a
    round is not drafted while the stages wait, unless ``root_first`` is off.
    """
    expansion = session.config.expansion
    _flow(session, expansion if expansion.enabled else None)


def _flow(session: Any, expansion: Expansion | None) -> None:
    config = session.config
    by_score = config.expansion.by_score
    while not session.done:
        num_segments = config.micro_batches or config.num_stages + 1
        root_first = False
        if expansion is not None and expansion.root_first:
            root_first = True
            session.inject()
            _grow(session, expansion)
        else:
            session.grow_tree(config.tree, by_score=by_score)
            session.draft_alone()
            session.inject(num_segments)
        num_steps, hit = 0, True
        while hit and not session.done:
            returned = session.step(overlap=True)
            num_steps += 1
            hit = returned is None or session.resolve(returned)
            if not hit or session.done:
                break
            session.inject(num_segments if root_first and num_steps == 1 else 1)
            if expansion is None:
                continue
            if returned is not None:
                _grow(session, expansion)
            elif num_steps < config.num_stages and root_first:
                session.deepen_tree(_levels(session, expansion), expansion.num_tokens)
            elif num_steps >= config.num_stages and expansion.refill_depth:
                session.deepen_tree(expansion.refill_depth, expansion.refill_tokens)


def _levels(session: Any, expansion: Expansion) -> int:
    """What the draft can make beside a step."""
    return expansion.depth or min(session.config.tree.depth, session.hidden_forwards())


def _grow(session: Any, expansion: Expansion) -> None:
    """A fresh tree below the root, merged into the one on its way."""
    num_tokens = max(1, expansion.num_tokens)
    shape = replace(session.config.tree, depth=_levels(session, expansion), num_tokens=num_tokens)
    session.grow_tree(shape, by_score=expansion.by_score)
