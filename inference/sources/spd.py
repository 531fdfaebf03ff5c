"""The speculation module beside the pipeline."""

# H hidden, Q leaves, U draft vocabulary

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from pipedraft.inference.sources.base import (
    DraftSource,
    Growth,
    Sampling,
    add_children,
    add_layer,
    deepest_rows,
)
from pipedraft.inference.sources.recorded_rows import Ask
from pipedraft.inference.sources.recorded_spd import RecordedModule
from pipedraft.inference.tree import TokenTree
from pipedraft.models.recorded import lend
from pipedraft.models.spd import SPD
from pipedraft.models.target import Keep


class SPDSource(DraftSource):
    """Reads the states of the rows in flight, one layer of draft tokens at a time.

    Rows in flight are presented by their distance to the deepest ones: distance i at depth i. With
    no row pruned that is the true depth; after a prune that left a gap a row may be deeper than it
    is presented, never shallower, and the module sees an occupancy it was trained for.
    """

    grows: tuple[Growth, ...] = ("layers",)

    def __init__(self, draft: SPD, *, lead: int = 0) -> None:
        """
        Args:
            lead: stages that the deepest rows have passed when they are continued, more than in
                training. Rows before them are presented so much deeper; these stay the module's
                queries, at depth 0.
        """
        self.draft, self.lead = draft, lead
        self.taps = draft.taps
        self.num_forwards = 0
        self._caches = draft.new_caches()
        self._recorded: RecordedModule | None = None
        if draft.lm_head.weight.device.type == "cuda":
            self._recorded = lend(draft, self, "module", partial(RecordedModule, draft))

    def begin(self, features: Mapping[int, Tensor], tokens: list[int]) -> None:
        self._caches = self.draft.new_caches()
        if self._recorded is not None:
            self._recorded.restart()
        self.observe(features, tokens[1:])

    def observe(self, features: Mapping[int, Tensor], next_tokens: list[int]) -> None:
        if self._recorded is not None:
            self._recorded.observe(features)
        else:
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
        if self._recorded is None or sampling.samples_chain:
            logits_QU = self.deepest_logits(tree, features)
            return add_layer(tree, logits_QU, self.draft, width=width, sampling=sampling)
        leaves, ask = deepest_rows(tree), Ask(width, sampling=sampling)
        width = min(width, len(self._recorded.ids_U))
        best_2WK = self._ask(self._recorded, tree, features, ask).cpu().view(2, -1, width)
        scores_Q1 = torch.tensor([tree.scores[leaf] for leaf in leaves])[:, None]
        best_2WK[1, : len(leaves)] += scores_Q1
        return add_children(tree, leaves, best_2WK[:, : len(leaves)], width, sampling)

    def _ask(
        self, recorded: RecordedModule, tree: TokenTree, features: Mapping[int, Tensor], ask: Ask
    ) -> Tensor:
        self.num_forwards += 1
        deepest, count = tree.depths[-1], len(tree)
        noise = None
        if ask.sampling is not None:
            position = tree.root_position + deepest + 1
            noise = ask.sampling.rule.noise_rows(recorded.ids_U, [position])
        depths = [self._presented(deepest - depth) for depth in tree.depths]
        positions, visible = tree.positions(0, count), tree.visible(0, count)
        return recorded.grow(features, depths, positions, visible, ask, noise)

    def deepest_logits(self, tree: TokenTree, features: Mapping[int, Tensor]) -> Tensor:
        """Logits [Q, U] of the token after each of the deepest rows."""
        if self._recorded is not None:
            return self._ask(self._recorded, tree, features, Ask())
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
