"""The speculation module beside the pipeline."""

# H hidden, Q leaves, U draft vocabulary

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pipedraft.inference.shapes import TreeShape
from pipedraft.inference.sources import (
    Growth,
    Sampling,
    add_most_likely,
    add_sampled,
    sampled_distribution,
)
from pipedraft.inference.tree import TokenTree
from pipedraft.models.spd import SPDState
from pipedraft.models.target import Keep


class SPDSource:
    """Reads the states of the rows in flight, one layer of guesses at a time.

    Rows in flight are presented by their distance to the deepest ones: distance i at depth i. With
    no row pruned that is the true depth; after a prune that left a gap a row may be deeper than it
    is presented, never shallower, and the module sees an occupancy it was trained for.
    """

    grows: tuple[Growth, ...] = ("layers",)

    def __init__(self, draft: Any) -> None:
        self.draft = draft
        self.taps = draft.taps
        self.num_forwards = 0
        self._state = SPDState()

    def begin(self, features: Mapping[int, Tensor], next_tokens: list[int]) -> None:
        self._state = SPDState()
        self.observe(features, next_tokens)

    def observe(self, features: Mapping[int, Tensor], next_tokens: list[int]) -> None:
        self.draft.extend(self._state, features, self._state.num_rows)

    def keep(self, keep: Keep) -> None:
        """Nothing is kept per row: rows in flight are read anew at every step."""

    def grow_layer(
        self,
        tree: TokenTree,
        features: Mapping[int, Tensor],
        *,
        width: int,
        sampling: Sampling,
        attempt: int,
    ) -> int:
        deepest = tree.depths[-1]
        leaves = [row for row in range(len(tree)) if tree.depths[row] == deepest]
        device = self.draft.lm_head.weight.device
        logits_QU = self.draft.propose(
            self._state,
            features,
            depths=[deepest - depth for depth in tree.depths],
            positions=tree.positions(0, len(tree)).to(device),
            visible_RR=tree.visible(0, len(tree)).to(device),
        )
        self.num_forwards += 1
        ids_U = self.draft.draft_ids
        if sampling.samples_chain:
            num_tokens = self.draft.reference.fingerprint["vocab_size"]
            q_V = sampled_distribution(logits_QU[0], ids_U, num_tokens, sampling.temperature)
            add_sampled(tree, leaves[0], q_V, sampling, attempt)
            return 1
        return add_most_likely(tree, leaves, logits_QU, ids_U, width)

    def grow_tree(
        self,
        tree: TokenTree,
        shape: TreeShape,
        *,
        by_score: bool,
        sampling: Sampling,
        attempt: int,
    ) -> int:
        raise NotImplementedError("the module guesses one token ahead of the states in flight")

    def deepen_tree(self, tree: TokenTree, levels: int, num_tokens: int) -> int:
        raise NotImplementedError("the module guesses one token ahead of the states in flight")
