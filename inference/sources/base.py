"""Base for draft sources. Schedules reach a draft only through ``DraftSource``."""

# P prompt positions, a committed positions, H hidden, Q leaves
# U draft vocabulary, V target vocabulary

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...models.target import KeepRows
from ..rules.sampled import Verifier
from ..shapes import Growth, RowCosts, TreeShape, rows_that_pay
from ..tree import TokenTree

Features: TypeAlias = Mapping[int, Tensor]
"""Hidden states [rows, H] by target layer index."""


@dataclass(frozen=True)
class DraftSampling:
    """Settings for choosing draft tokens from the draft's distribution."""

    rule: Verifier
    attempt: int = 0
    """Round number; part of the random-number key, so redrafting a position uses fresh numbers."""
    costs: RowCosts | None = None
    """Add draft tokens while they are worth their cost; None: as many as requested."""

    @property
    def samples_chain(self) -> bool:
        """True to sample one draft token from q and store q, False to take the best tokens."""
        return self.rule.needs_q

    def child_scores(self, logits_QU: Tensor, noise_QU: Tensor | None) -> Tensor:
        """Return the rule's scores for children, sharpened if they are weighed against costs."""
        scores_QU = self.rule.child_scores(logits_QU, noise_QU)
        if self.costs is None:
            return scores_QU
        return torch.log_softmax(scores_QU * self.costs.sharpness, -1)

    @property
    def graph_key(self) -> tuple[object, ...] | None:
        """Key of a CUDA graph with ``child_scores``, or None if its launches depend on data."""
        filters = self.rule.filters
        if filters.top_p < 1 or filters.typical_p < 1:
            return None
        sharpness = None if self.costs is None else self.costs.sharpness
        return type(self.rule), self.rule.temperature, filters, sharpness

    @property
    def later(self) -> "DraftSampling":
        """Same settings, with a higher price for draft tokens that could enter one step later.

        Entering now saves at most one step.
        """
        if self.costs is None:
            return self
        # A late token gains less, which is the same as a higher price for its row.
        return replace(self, costs=replace(self.costs, row=self.costs.later * self.costs.row))

    def worth(self, tree: TokenTree, scores: Sequence[float]) -> int:
        """Return how many of the best new draft tokens to add, by their descending scores."""
        if self.costs is None:
            return len(scores)
        # A segment's first row is free: another stage takes as long for one row anyway.
        free = int(len(tree) == tree.num_injected)
        return min(len(scores), free + rows_that_pay(scores[free:], self.costs))


@dataclass(frozen=True, kw_only=True)
class Expansion:
    """Limits for extending an in-flight tree."""

    num_forwards: int
    """Maximum draft forwards; a few more if the draft must first read committed tokens."""
    width: int
    """Rows continued per forward besides the root, and best children added per forward."""
    max_rows: int
    """Maximum draft tokens added by all forwards."""
    by_score: bool
    """True: the best rows and children. False: the oldest rows, with equally many children each."""


class DraftSource:
    """Draft at decode time, which reads committed tokens and rows in flight to add draft tokens.

    ``grows`` lists a source's growth verbs. A schedule that needs another verb is rejected.
    """

    taps: tuple[int, ...] = ()
    """Target layer indices whose hidden states the source reads."""
    grows: tuple[Growth, ...] = ()
    """Supported growth verbs; micro_batches needs ``leaf_logits``."""
    num_forwards: int = 0
    """Draft forwards so far."""

    def begin(self, features: Features, tokens: list[int]) -> None:
        """Start a sequence from hidden states [P, H] by layer, P prompt tokens, and the root."""
        raise NotImplementedError

    def observe(self, features: Features, next_tokens: list[int]) -> None:
        """Receive hidden states [a, H] for newly committed positions, and the token after each."""
        raise NotImplementedError

    def keep(self, keep: KeepRows) -> None:
        """Renumber rows as in ``TokenTree.reroot``. If no row is retained, a new tree begins."""

    @property
    def draft_ids(self) -> Tensor:
        """Target token for each entry in the draft's logits, int64 [U]."""
        raise NotImplementedError

    def leaf_logits(self, tree: TokenTree, rows: list[int], features: Features) -> Tensor:
        """Return logits [Q, U] for the token after each row, with features as in ``grow_layer``."""
        raise NotImplementedError

    def best_levels(
        self,
        tree: TokenTree,
        leaves: list[int],
        features: Features,
        *,
        width: int,
        levels: int,
        sampling: DraftSampling,
        beams: int = 0,
    ) -> Iterator[Tensor]:
        """Yield ``best_children`` of ``leaves``, then perhaps of rows the caller just added.

        Later levels give only each row's best child, in row order.

        Args:
            levels: maximum number of levels added below the rows.
            beams: how many of the best new children the caller adds next, or 0 if unknown.
        """
        logits_QU = self.leaf_logits(tree, leaves, features)
        yield best_children(tree, leaves, logits_QU, self.draft_ids, width, sampling)

    def grow_layer(
        self, tree: TokenTree, features: Features, *, width: int, sampling: DraftSampling
    ) -> int:
        """Add up to ``width`` draft tokens below the deepest rows, and return their number.

        Args:
            features: CURRENT hidden states [r, H] by layer, for the r first rows past this layer.
        """
        raise NotImplementedError

    def grow_tree(
        self, tree: TokenTree, shape: TreeShape, *, by_score: bool, sampling: DraftSampling
    ) -> int:
        """Draft a fresh tree, merge it below the root by token path, and return the rows added.

        ``by_score`` adds rows by descending score, not by level. Parents always come first.
        """
        raise NotImplementedError

    def expand_tree(self, tree: TokenTree, expansion: Expansion, sampling: DraftSampling) -> int:
        """Continue each row once, and the root after every commit. Return how many rows are new."""
        raise NotImplementedError

    def deepen_tree(self, tree: TokenTree, levels: int, num_tokens: int) -> int:
        """Grow the last fresh tree by ``levels`` and add its best missing rows."""
        raise NotImplementedError


def add_sampled(
    tree: TokenTree, leaf: int, logits_U: Tensor, draft: Any, sampling: DraftSampling
) -> int:
    """Sample one token from q, store q for the test, and return the token's row.

    q is float64 over the target's vocabulary. Tokens unknown to the draft have q = 0.
    """
    position = tree.position(leaf) + 1
    drawn = sampling.rule.propose(logits_U, draft.draft_ids, position, attempt=sampling.attempt)
    q_V = drawn.q_V
    assert q_V is not None, "only rules that compare q with p sample chains"
    q_V = torch.nn.functional.pad(q_V, (0, draft.target_vocab_size - len(q_V)))
    return tree.add(leaf, drawn.token, tree.scores[leaf] + math.log(drawn.q), q_V)


def add_layer(
    tree: TokenTree, logits_QU: Tensor, draft: Any, *, width: int, sampling: DraftSampling
) -> int:
    """Add draft tokens below the Q deepest rows in the tree, and return their number."""
    leaves = deepest_rows(tree)
    if sampling.samples_chain:
        add_sampled(tree, leaves[0], logits_QU[0], draft, sampling)
        return 1
    best_2QW = best_children(tree, leaves, logits_QU, draft.draft_ids, width, sampling)
    return add_children(tree, leaves, best_2QW, width, sampling)


def deepest_rows(tree: TokenTree) -> list[int]:
    deepest = max(tree.depths)
    return [row for row in range(len(tree)) if tree.depths[row] == deepest]


def best_children(
    tree: TokenTree,
    leaves: list[int],
    logits_QU: Tensor,
    ids_U: Tensor,
    width: int,
    sampling: DraftSampling,
) -> Tensor:
    """Return tokens and cumulative scores of leaves' best children, float64 [2, Q, W], CPU."""
    positions = [tree.position(leaf) + 1 for leaf in leaves]
    # The position of the child, not of its leaf: noise is keyed by the token it decides.
    noise_QU = sampling.rule.noise_rows(ids_U, positions)
    logprob_QU = sampling.child_scores(logits_QU, noise_QU)
    best_QW, index_QW = logprob_QU.topk(min(width, logprob_QU.shape[1]), -1)
    total_QW = best_QW + best_QW.new_tensor([tree.scores[leaf] for leaf in leaves])[:, None]
    # One tensor: each read from a GPU waits for all its pending work.
    return torch.stack([ids_U[index_QW].double(), total_QW.double()]).cpu()


def add_children(
    tree: TokenTree, leaves: list[int], best_2QW: Tensor, width: int, sampling: DraftSampling
) -> int:
    """Add the best children worth their cost, at most ``width``, and return their number."""
    tokens_QW, total_QW = best_2QW
    scores_W, places_W = total_QW.flatten().topk(min(width, total_QW.numel()))
    parents = [leaves[place // total_QW.shape[1]] for place in places_W.tolist()]
    tokens = map(int, tokens_QW.flatten()[places_W].tolist())
    best = list(zip(parents, tokens, scores_W.tolist(), strict=True))
    if sampling.costs is not None:
        # A draft token already in flight costs nothing, so it uses no budget.
        best = [child for child in best if tree.child(*child[:2]) is None]
    count = sampling.worth(tree, [score for *_, score in best])
    for child in best[:count]:
        tree.add(*child)
    return count
