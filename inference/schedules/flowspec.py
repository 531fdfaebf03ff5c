"""FlowSpec: a tree travels in segments, is pruned at every verdict, and grows on its way."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from pipedraft.inference.clock import CostModel
from pipedraft.inference.schedules.base import check_at_least
from pipedraft.inference.schedules.pruned_pp import PrunedPP
from pipedraft.inference.schedules.spd import draft_beside_step

if TYPE_CHECKING:
    from pipedraft.inference.engine import Session


@dataclass(frozen=True, kw_only=True)
class FlowSpec(PrunedPP):
    """Pruned pipeline parallelism that keeps drafting beside the stages.

    The tree on its way is continued where it is most likely right: below the root after a commit
    (context-aware expansion), and below its best draft tokens that were not continued (score-aware
    expansion). Deviation: published FlowSpec, with ``tree_first``, drafts a fresh tree below the
    root after every commit instead, and the stages wait for the first one of a round.
    """

    name: ClassVar[str] = "flowspec"

    expansion: bool = True
    """Off: no new draft tokens inside a round, which is pruned pipeline parallelism."""
    expansion_depth: int | None = None
    """Draft forwards beside a step; None: as many as fit beside it under the cost model, at least
    one and at most those of a whole tree."""
    step_tokens: int = 32
    """Draft tokens that one draft forward continues, and that it adds."""
    tree_first: bool = False
    """As published: the stages wait after a miss until a whole tree is drafted, which then enters
    with the root, and a fresh tree of ``expansion_depth`` levels from the root follows each
    commit. Off: the root enters at once, and the tree on its way is continued beside every
    step."""
    expansion_tokens: int = 64
    """With ``tree_first``: draft tokens of a fresh tree, those already on their way included."""
    refill_depth: int = 2
    """With ``tree_first``: levels added to the last tree when the returning segment was pruned to
    nothing; 0: none."""
    refill_tokens: int = 48
    """With ``tree_first``: the best new draft tokens of these levels that are sent."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "expansion_depth", "step_tokens")
        check_at_least(self, 0, "expansion_tokens", "refill_depth", "refill_tokens")

    @property
    def is_chain(self) -> bool:
        return self.tree.is_chain and not self.expansion

    def run(self, session: Session) -> None:
        if not self.expansion:
            super().run(session)
        elif self.tree_first:
            self._run_tree_first(session)
        else:
            draft_beside_step(session, lambda: self._continue_tree(session))

    def _continue_tree(self, session: Session) -> None:
        session.expand_tree(self._forwards(session), self.step_tokens, not self.level_order)

    def _forwards(self, session: Session) -> int:
        """Draft forwards a step: by default what fits beside it, and at most a whole tree's."""
        return self.expansion_depth or min(self.tree.depth, session.hidden_forwards())

    def _run_tree_first(self, session: Session) -> None:
        """Fresh trees from the root of each commit are merged into the one on its way.

        When the returning segment was pruned to nothing, the context is the old one and the last
        fresh tree is deepened instead.
        """
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
                    depth, tokens = self._forwards(session), max(1, self.expansion_tokens)
                    fresh = replace(self.tree, depth=depth, num_tokens=tokens)
                    session.grow_tree(fresh, by_score=not self.level_order)
                elif num_steps >= session.num_stages and self.refill_depth:
                    session.deepen_tree(self.refill_depth, self.refill_tokens)

    def cost_conflict(self, recorded: CostModel, cost: CostModel) -> str:
        if not self.expansion or self.expansion_depth:
            return ""
        return (
            "flowspec drafted as much as fits beside a step under its own cost model; record a run "
            "under this one, or with --expansion-depth"
        )
