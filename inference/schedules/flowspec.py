"""FlowSpec: a tree travels in segments, is pruned at every verdict, and fresh trees join it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from pipedraft.inference.schedules.base import check_at_least
from pipedraft.inference.schedules.pruned_pp import PrunedPP
from pipedraft.inference.shapes import Budget

if TYPE_CHECKING:
    from pipedraft.inference.engine import Session


@dataclass(frozen=True, kw_only=True)
class FlowSpec(PrunedPP):
    """Pruned pipeline parallelism that keeps drafting beside the stages, as published.

    The stages wait after a miss until a tree is drafted, which then enters with the root in
    segments, the best draft tokens first (score-based segmentation). A fresh tree from the root
    follows every commit and is merged by its token paths (context-aware expansion); where the
    returning segment was pruned to nothing, the last fresh tree is deepened (score-aware
    expansion). Deviation: fresh trees have as many levels as fit beside a step; published: 6.
    """

    name: ClassVar[str] = "flowspec"

    expansion: bool = True
    """Off: no new draft tokens inside a round, which is pruned pipeline parallelism."""
    expansion_depth: int | None = None
    """Levels of a fresh tree, a draft forward each; None: as many as fit beside a step of one row
    under the cost model, at least one and at most those of a whole tree."""
    expansion_tokens: Budget = 64
    """Draft tokens of a fresh tree, those already on their way included; auto: those that pay under
    the cost model, at most 59."""
    max_expansion_rows: int | None = None
    """New draft tokens of a fresh or deepened tree that enter together; None: all, as published."""
    refill_depth: int = 2
    """Levels added to the last tree when the returning segment was pruned to nothing; 0: none."""
    refill_tokens: int = 48
    """The best new draft tokens of these levels that are sent."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "expansion_depth", "expansion_tokens", "max_expansion_rows")
        check_at_least(self, 0, "refill_depth", "refill_tokens")

    @property
    def label(self) -> str | None:
        return f"{super().label}{'+auto' * (self.expansion_tokens == 'auto')}"

    @property
    def is_chain(self) -> bool:
        return self.tree.is_chain and not self.expansion

    @property
    def is_auto(self) -> bool:
        return super().is_auto or (self.expansion and self.expansion_tokens == "auto")

    @property
    def fills_step(self) -> bool:
        return self.expansion and not self.expansion_depth

    def run(self, session: Session) -> None:
        if not self.expansion:
            super().run(session)
            return
        while not session.done:
            self.begin_round(session)
            num_steps, hit = 0, True
            while hit and not session.done:
                returned = session.step(overlap=True)
                num_steps += 1
                hit = returned is None or session.resolve(returned)
                if not hit or session.done:
                    break
                session.inject(1, self.max_expansion_rows)
                if returned is not None:
                    depth = beside_step(session, self.expansion_depth, self.tree.depth)
                    fresh = replace(self.tree, depth=depth, num_tokens=self.expansion_tokens)
                    costs = session.step_sampling(self.expansion_tokens).costs
                    session.grow_tree(fresh, costs, by_score=not self.level_order)
                elif num_steps >= session.num_stages and self.refill_depth:
                    session.deepen_tree(self.refill_depth, self.refill_tokens)


def beside_step(session: Session, asked: int | None, most: int) -> int:
    """Draft forwards of a step: those asked for, or what fits beside one row, at most ``most``."""
    return asked or min(most, session.clock.hidden_forwards())
