"""What every draft source is: a schedule and a head meet only in ``DraftSource``."""

# P positions of the prompt, a committed positions, H hidden, Q leaves
# U draft vocabulary, V target vocabulary

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipedraft.inference.schedules.base import Growth
from pipedraft.inference.shapes import TreeShape
from pipedraft.inference.tree import TokenTree
from pipedraft.inference.verify import Verifier
from pipedraft.models.target import Keep


@dataclass(frozen=True)
class Sampling:
    """How draft tokens are chosen from the draft's distribution."""

    rule: Verifier
    attempt: int = 0
    """Number of the round, part of the key of the random numbers."""

    @property
    def samples_chain(self) -> bool:
        """Draw one draft token from q and store q; else take the best ones."""
        return self.rule.needs_q


class DraftSource:
    """A draft at decode time: it sees committed text and rows in flight, and adds draft tokens.

    A source offers the growing verbs in ``grows``; a schedule that needs another is refused.
    """

    taps: tuple[int, ...] = ()
    """Layer indices of the target whose hidden states it reads."""
    grows: tuple[Growth, ...] = ()
    """Which of the growing verbs it has; micro-batches: ``leaf_logits``."""
    is_chain_only: bool = False
    """It has one state per sequence: draft tokens are a chain."""
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

    def keep(self, keep: Keep) -> None:
        """The tree's rows are renumbered as in ``TokenTree.reroot``; nothing retained: a miss."""

    @property
    def draft_ids(self) -> Tensor:
        """int64 [U]: target token of each entry of the draft's logits."""
        raise NotImplementedError

    def leaf_logits(
        self, tree: TokenTree, rows: list[int], features: Mapping[int, Tensor]
    ) -> Tensor:
        """Logits [Q, U] of the token after each of some rows of the tree.

        Args:
            features: as in ``grow_layer``.
        """
        raise NotImplementedError

    def grow_layer(
        self,
        tree: TokenTree,
        features: Mapping[int, Tensor],
        *,
        width: int,
        sampling: Sampling,
    ) -> int:
        """Add up to ``width`` draft tokens below the deepest rows; returns how many were added.

        Args:
            features: hidden states of the rows in flight as they are NOW; entry l covers the
                first r rows of the tree, those that have passed layer l.
        """
        raise NotImplementedError

    def grow_tree(
        self, tree: TokenTree, shape: TreeShape, *, by_score: bool, sampling: Sampling
    ) -> int:
        """Draft a fresh tree below the root and merge it by token path; returns rows added.

        Args:
            by_score: new rows in descending order of their scores, else level by level. Parents
                come before their children either way.
        """
        raise NotImplementedError

    def expand_tree(
        self,
        tree: TokenTree,
        num_forwards: int,
        width: int,
        *,
        by_score: bool,
        sampling: Sampling,
    ) -> int:
        """Continue rows of the tree, each once, and the root once per context; returns rows added.

        Args:
            num_forwards: passes of the draft, at most; a few more where the draft must first read
                committed text.
            width: rows that one pass continues besides the root, and best children of them all
                that join the tree.
            by_score: the best rows and children, else the oldest rows, with as many children each.
        """
        raise NotImplementedError

    def deepen_tree(self, tree: TokenTree, levels: int, num_tokens: int) -> int:
        """Grow the last fresh tree by ``levels`` and add its best rows that are not there yet."""
        raise NotImplementedError


def add_sampled(
    tree: TokenTree, leaf: int, logits_U: Tensor, draft: Any, sampling: Sampling
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
    tree: TokenTree, logits_QU: Tensor, draft: Any, *, width: int, sampling: Sampling
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
    sampling: Sampling,
) -> int:
    """Add the ``width`` children with the best cumulative scores over all leaves."""
    positions = [tree.position(leaf) + 1 for leaf in leaves]
    logprob_QU = sampling.rule.child_scores(logits_QU, ids_U, positions)
    width = min(width, logprob_QU.numel())
    best_QW, index_QW = logprob_QU.topk(min(width, logprob_QU.shape[1]), -1)
    leaf_scores = best_QW.new_tensor([tree.scores[leaf] for leaf in leaves])
    total_QW = best_QW + leaf_scores[:, None]
    for flat in total_QW.flatten().topk(width).indices.tolist():
        leaf, rank = divmod(flat, index_QW.shape[1])
        token = int(ids_U[index_QW[leaf, rank]])
        tree.add(leaves[leaf], token, float(total_QW[leaf, rank]))
    return width
