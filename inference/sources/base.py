"""What every draft source is: a schedule and a head meet only in ``DraftSource``."""

# P positions of the prompt, a committed positions, H hidden, Q leaves
# U draft vocabulary, V target vocabulary

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pipedraft.inference.rules.sampled import Verifier
from pipedraft.inference.schedules.base import Growth
from pipedraft.inference.shapes import RowCosts, TreeShape, rows_that_pay
from pipedraft.inference.tree import TokenTree
from pipedraft.models.target import KeepRows


@dataclass(frozen=True)
class DraftSampling:
    """How draft tokens are chosen from the draft's distribution."""

    rule: Verifier
    attempt: int = 0
    """Number of the round, part of the key of the random numbers."""
    costs: RowCosts | None = None
    """Draft tokens are added while they pay; None: as many as are asked for."""

    @property
    def samples_chain(self) -> bool:
        """Draw one draft token from q and store q; else take the best ones."""
        return self.rule.needs_q

    def child_scores(self, logits_QU: Tensor, noise_QU: Tensor | None) -> Tensor:
        """Scores of a row's children by the rule; sharper where they are weighed against costs."""
        scores_QU = self.rule.child_scores(logits_QU, noise_QU)
        if self.costs is None:
            return scores_QU
        return torch.log_softmax(scores_QU * self.costs.sharpness, -1)

    @property
    def graph_key(self) -> tuple[object, ...] | None:
        """Key of what ``child_scores`` launches; None: it depends on what the device finds."""
        filters = self.rule.filters
        if filters.top_p < 1 or filters.typical_p < 1:
            return None
        sharpness = None if self.costs is None else self.costs.sharpness
        return type(self.rule), self.rule.temperature, filters, sharpness

    @property
    def later(self) -> "DraftSampling":
        """Sampling of draft tokens that could enter a step later, too: they save a step at most."""
        if self.costs is None:
            return self
        return replace(self, costs=replace(self.costs, row=self.costs.later * self.costs.row))

    def worth(self, tree: TokenTree, scores: Sequence[float]) -> int:
        """Number of the best new draft tokens that are added.

        The first row of a segment costs nothing: another stage takes as long for a row.

        Args:
            scores: cumulative, descending.
        """
        if self.costs is None:
            return len(scores)
        free = int(len(tree) == tree.num_injected)
        return min(len(scores), free + rows_that_pay(scores[free:], self.costs))


@dataclass(frozen=True, kw_only=True)
class Expansion:
    """How far a tree on its way is continued."""

    num_forwards: int
    """Passes of the draft, at most; a few more where the draft must first read committed text."""
    width: int
    """Rows that one pass continues besides the root, and best children of them all that join."""
    max_rows: int
    """Draft tokens that all passes add, at most."""
    by_score: bool
    """The best rows and children, else the oldest rows, with as many children each."""


class DraftSource:
    """A draft at decode time: it sees committed text and rows in flight, and adds draft tokens.

    A source offers the growing verbs in ``grows``; a schedule that needs another is refused.
    """

    taps: tuple[int, ...] = ()
    """Layer indices of the target whose hidden states it reads."""
    grows: tuple[Growth, ...] = ()
    """Which of the growing verbs it has; micro-batches: ``leaf_logits``."""
    num_forwards: int = 0
    """Forward passes of the draft so far."""

    def begin(self, features: Mapping[int, Tensor], tokens: list[int]) -> None:
        """A new text.

        Args:
            features: hidden states [P, H] of the prompt, by layer index.
            tokens: the P of the prompt, and the first root.
        """
        raise NotImplementedError

    def observe(self, features: Mapping[int, Tensor], next_tokens: list[int]) -> None:
        """Newly committed positions, in order: hidden states [a, H], and the token after each."""
        raise NotImplementedError

    def keep(self, keep: KeepRows) -> None:
        """The tree's rows are renumbered as in ``TokenTree.reroot``; nothing retained: a miss."""

    @property
    def draft_ids(self) -> Tensor:
        """Target token of each entry of the draft's logits, int64 [U]."""
        raise NotImplementedError

    def leaf_logits(
        self, tree: TokenTree, rows: list[int], features: Mapping[int, Tensor]
    ) -> Tensor:
        """Logits [Q, U] of the token after each of some rows of the tree.

        Args:
            features: as in ``grow_layer``.
        """
        raise NotImplementedError

    def best_levels(
        self,
        tree: TokenTree,
        leaves: list[int],
        features: Mapping[int, Tensor],
        *,
        width: int,
        levels: int,
        sampling: DraftSampling,
        beams: int = 0,
        split: float | None = None,
    ) -> Iterator[Tensor]:
        """Children of some rows, as of ``best_children``; perhaps then of those that were added.

        Of these, in the order of their rows, the best child alone, or with ``split`` as many.

        Args:
            features: as in ``grow_layer``.
            levels: at most so many times rows are added below the ones before.
            beams: of the children, those of the best scores that the tree did not have, are added
                next; 0: nobody knows.
            split: they are the best child of each row and others of a probability above this, while
                there are ``beams`` for them.
        """
        logits_QU = self.leaf_logits(tree, leaves, features)
        yield best_children(tree, leaves, logits_QU, self.draft_ids, width, sampling)

    def grow_layer(
        self,
        tree: TokenTree,
        features: Mapping[int, Tensor],
        *,
        width: int,
        sampling: DraftSampling,
    ) -> int:
        """Add up to ``width`` draft tokens below the deepest rows; returns how many were added.

        Args:
            features: hidden states of the rows in flight as they are NOW; entry l covers the
                first r rows of the tree, those that have passed layer l.
        """
        raise NotImplementedError

    def grow_tree(
        self, tree: TokenTree, shape: TreeShape, *, by_score: bool, sampling: DraftSampling
    ) -> int:
        """Draft a fresh tree below the root and merge it by token path; returns rows added.

        Args:
            by_score: new rows in descending order of their scores, else level by level. Parents
                come before their children either way.
        """
        raise NotImplementedError

    def expand_tree(self, tree: TokenTree, expansion: Expansion, sampling: DraftSampling) -> int:
        """Continue each row once, and the root once per context; returns how many were added."""
        raise NotImplementedError

    def deepen_tree(self, tree: TokenTree, levels: int, num_tokens: int) -> int:
        """Grow the last fresh tree by ``levels`` and add its best rows that are not there yet."""
        raise NotImplementedError


def add_sampled(
    tree: TokenTree, leaf: int, logits_U: Tensor, draft: Any, sampling: DraftSampling
) -> int:
    """One token drawn from q, which is stored with it for the test; returns its row.

    q is float64 over the target's vocabulary; tokens that the draft does not know have 0.
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
    """Draft tokens below the deepest rows of the tree; returns how many.

    Args:
        logits_QU: of these Q rows, in the order of the tree.
    """
    leaves = deepest_rows(tree)
    if sampling.samples_chain:
        add_sampled(tree, leaves[0], logits_QU[0], draft, sampling)
        return 1
    return add_best(tree, leaves, logits_QU, draft.draft_ids, width, sampling)


def deepest_rows(tree: TokenTree) -> list[int]:
    deepest = max(tree.depths)
    return [row for row in range(len(tree)) if tree.depths[row] == deepest]


def add_best(
    tree: TokenTree,
    leaves: list[int],
    logits_QU: Tensor,
    ids_U: Tensor,
    width: int,
    sampling: DraftSampling,
) -> int:
    """Add the ``width`` children with the best cumulative scores over all leaves, if they pay."""
    best_2QW = best_children(tree, leaves, logits_QU, ids_U, width, sampling)
    return add_children(tree, leaves, best_2QW, width, sampling)


def best_children(
    tree: TokenTree,
    leaves: list[int],
    logits_QU: Tensor,
    ids_U: Tensor,
    width: int,
    sampling: DraftSampling,
) -> Tensor:
    """Tokens and cumulative scores of the best children of each leaf: float64 [2, Q, W], on the
    CPU."""
    positions = [tree.position(leaf) + 1 for leaf in leaves]
    noise_QU = sampling.rule.noise_rows(ids_U, positions)
    logprob_QU = sampling.child_scores(logits_QU, noise_QU)
    best_QW, index_QW = logprob_QU.topk(min(width, logprob_QU.shape[1]), -1)
    total_QW = best_QW + best_QW.new_tensor([tree.scores[leaf] for leaf in leaves])[:, None]
    # As one tensor: on a GPU each reading waits for all work under way.
    return torch.stack([ids_U[index_QW].double(), total_QW.double()]).cpu()


def add_children(
    tree: TokenTree, leaves: list[int], best_2QW: Tensor, width: int, sampling: DraftSampling
) -> int:
    """Add the best of what ``best_children`` gives, if they pay."""
    tokens_QW, total_QW = best_2QW
    scores_W, places_W = total_QW.flatten().topk(min(width, total_QW.numel()))
    parents = [leaves[place // total_QW.shape[1]] for place in places_W.tolist()]
    tokens = map(int, tokens_QW.flatten()[places_W].tolist())
    best = list(zip(parents, tokens, scores_W.tolist(), strict=True))
    if sampling.costs is not None:
        # A draft token on its way costs nothing more, so it takes no part of the budget.
        best = [child for child in best if tree.child(*child[:2]) is None]
    count = sampling.worth(tree, [score for *_, score in best])
    for child in best[:count]:
        tree.add(*child)
    return count
