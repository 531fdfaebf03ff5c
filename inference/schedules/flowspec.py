"""FlowSpec sends a tree in segments, prunes it after each result, and merges fresh trees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from ..shapes import Budget
from .pruned_pp import PrunedPP

if TYPE_CHECKING:
    from ..session import Session


@dataclass(frozen=True, kw_only=True)
class FlowSpec(PrunedPP):
    """Pruned pipeline parallelism plus drafting overlapped with pipeline steps, as published.

    After a rejection the stages wait for a new tree. The root and its tree enter in segments, best
    draft tokens first (score-based segmentation). After every commit the draft grows a fresh tree
    from the root and merges it by token path (context-aware expansion). If pruning emptied the
    returning segment, the draft deepens the last fresh tree (score-aware expansion).

    Deviation: fresh trees have as many levels as fit within a step. The paper uses 6.
    """

    name: ClassVar[str] = "flowspec"
    ranges: ClassVar[dict[str, str]] = dict.fromkeys(("refill_depth", "refill_tokens"), "[0, 1024]")

    expansion_depth: int | None = None
    """Levels per fresh tree, one draft forward each. None: as many as fit, under the cost model,
    within a step with one row per stage; at least 1 and at most the whole tree's number."""
    expansion_tokens: Budget = 64
    """Draft tokens per fresh tree, including any already in flight. auto: choose by the cost model,
    at most 59."""
    refill_depth: int = 2
    """Levels added to the last tree if pruning emptied the returning segment; 0: none."""
    refill_tokens: int = 48
    """Number of new draft tokens sent from the levels that a refill adds, best first."""

    @property
    def label(self) -> str | None:
        return f"{super().label}{'+auto' * (self.expansion_tokens == 'auto')}"

    @property
    def is_chain(self) -> bool:
        """Return False, because a fresh tree may give the root a second draft token."""
        return False

    @property
    def is_auto(self) -> bool:
        return super().is_auto or self.expansion_tokens == "auto"

    @property
    def fills_step(self) -> bool:
        return not self.expansion_depth

    def run(self, session: Session) -> None:
        while not session.done:
            self.begin_round(session)
            num_steps, hit = 0, True
            while hit and not session.done:
                returned = session.step(overlap=True)
                num_steps += 1
                hit = returned is None or session.resolve(returned)
                if not hit or session.done:
                    break
                session.inject()
                if returned is not None:
                    # Fresh trees must finish within the next step, or the stages would wait for the
                    # draft.
                    depth = beside_step(session, self.expansion_depth, self.tree.depth)
                    fresh = replace(self.tree, depth=depth, num_tokens=self.expansion_tokens)
                    costs = session.step_sampling(self.expansion_tokens).costs
                    session.grow_tree(fresh, costs, by_score=not self.level_order)
                # Nothing can return in the first n - 1 steps; later, an empty return means pruning.
                elif num_steps >= session.num_stages and self.refill_depth:
                    session.deepen_tree(self.refill_depth, self.refill_tokens)


def beside_step(session: Session, asked: int | None, most: int) -> int:
    """Return ``asked``, or up to ``most`` draft forwards that fit a step with one row per stage."""
    return asked or min(most, session.clock.hidden_forwards())
