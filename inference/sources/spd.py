"""The speculation module beside the pipeline."""

# H hidden, Q leaves, U draft vocabulary

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pipedraft.inference.sources.base import DraftSource, Growth, Sampling, add_layer
from pipedraft.inference.tree import TokenTree
from pipedraft.models.target import Keep


class SPDSource(DraftSource):
    """Reads the states of the rows in flight, one layer of draft tokens at a time.

    Rows in flight are presented by their distance to the deepest ones: distance i at depth i. With
    no row pruned that is the true depth; after a prune that left a gap a row may be deeper than it
    is presented, never shallower, and the module sees an occupancy it was trained for.
    """

    grows: tuple[Growth, ...] = ("layers",)

    def __init__(self, draft: Any, *, lead: int = 0) -> None:
        """
        Args:
            lead: stages that the deepest rows have passed when they are continued. Rows before them
                are presented so much deeper; these stay the module's queries, at depth 0.
        """
        self.draft, self.lead = draft, lead
        self.taps = draft.taps
        self.num_forwards = 0
        self._caches = draft.new_caches()

    def begin(self, features: Mapping[int, Tensor], tokens: list[int]) -> None:
        self._caches = self.draft.new_caches()
        self.observe(features, tokens[1:])

    def observe(self, features: Mapping[int, Tensor], next_tokens: list[int]) -> None:
        self.draft.extend(self._caches, features, self._caches[0].num_rows)

    def keep(self, keep: Keep) -> None:
        """Nothing is kept per row: rows in flight are read anew at every step."""

    def grow_layer(
        self,
        tree: TokenTree,
        features: Mapping[int, Tensor],
        *,
        width: int,
        sampling: Sampling,
    ) -> int:
        logits_QU = self.deepest_logits(tree, features)
        return add_layer(tree, logits_QU, self.draft, width=width, sampling=sampling)

    def deepest_logits(self, tree: TokenTree, features: Mapping[int, Tensor]) -> Tensor:
        """Logits [Q, U] of the token after each of the deepest rows."""
        deepest = tree.depths[-1]
        device = self.draft.lm_head.weight.device
        self.num_forwards += 1
        return self.draft.propose(
            self._caches,
            features,
            depths=[self._presented(deepest - depth) for depth in tree.depths],
            positions=tree.positions(0, len(tree)).to(device),
            visible_RR=tree.visible(0, len(tree)).to(device),
        )

    def _presented(self, distance: int) -> int:
        """Depth under which the module reads a row so far before the deepest ones."""
        return distance + self.lead if distance else 0
