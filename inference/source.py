"""Where guesses come from. A schedule and a head meet only in ``DraftSource``."""

# R rows of the tree, Q leaves, U draft vocabulary, V target vocabulary, H hidden

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from pipedraft.inference.tree import TokenTree
from pipedraft.inference.verify import KeyedRandom, draw


@dataclass(frozen=True)
class Sampling:
    """How guesses are chosen from the draft's distribution."""

    temperature: float
    samples_chain: bool
    """Draw one guess from q and store q (rejection rule); else take the most likely ones."""
    random: KeyedRandom


class DraftSource(Protocol):
    """A draft at decode time: it sees committed text and rows in flight, and adds guesses."""

    taps: tuple[int, ...]
    """Layer indices of the target whose hidden states it reads."""
    num_forwards: int
    """Forward passes of the draft so far."""

    def begin(self, features: Mapping[int, Tensor]) -> None:
        """A new text: hidden states [P, H] of the prompt, by layer index."""

    def observe(self, features: Mapping[int, Tensor]) -> None:
        """Newly committed positions, in order: hidden states [a, H] by layer index."""

    def grow_layer(
        self,
        tree: TokenTree,
        features: Mapping[int, Tensor],
        *,
        width: int,
        sampling: Sampling,
        attempt: int,
    ) -> int:
        """Add up to ``width`` guesses below the deepest rows; returns how many were added.

        Args:
            features: hidden states of the rows in flight as they are NOW; entry l covers the
                first r rows of the tree, those that have passed layer l.
            attempt: number of the round, part of the key of the random numbers.
        """


class SPDSource:
    """SPD's speculation module beside the pipeline.

    Rows in flight are presented by their distance to the deepest ones: distance i at depth i. With
    no row pruned that is the true depth; after a prune that left a gap a row may be deeper than it
    is presented, never shallower, and the module sees an occupancy it was trained for.
    """

    def __init__(self, draft: Any) -> None:
        self.draft = draft
        self.taps = draft.taps
        self.num_forwards = 0
        self._state: Any = None

    def begin(self, features: Mapping[int, Tensor]) -> None:
        from pipedraft.models.spd import SPDState

        self._state = SPDState()
        self.observe(features)

    def observe(self, features: Mapping[int, Tensor]) -> None:
        self.draft.extend(self._state, features, self._state.num_rows)

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
            return add_sampled(tree, leaves[0], q_V, sampling, attempt)
        return add_most_likely(tree, leaves, logits_QU, ids_U, width)


def sampled_distribution(
    logits_U: Tensor, ids_U: Tensor, num_tokens: int, temperature: float
) -> Tensor:
    """q over the target's vocabulary, float64 [V]; tokens the draft does not know have 0."""
    q_V = logits_U.new_zeros(num_tokens, dtype=torch.float64)
    q_V[ids_U] = torch.softmax(logits_U.double() / temperature, -1)
    return q_V


def add_sampled(tree: TokenTree, leaf: int, q_V: Tensor, sampling: Sampling, attempt: int) -> int:
    """One guess drawn from q, which is stored with it for the rejection rule."""
    token = draw(q_V, sampling.random.uniform(tree.position(leaf) + 1, "draft", attempt))
    tree.add(leaf, token, tree.scores[leaf] + float(q_V[token].log()), q_V)
    return 1


def add_most_likely(
    tree: TokenTree, leaves: list[int], logits_QU: Tensor, ids_U: Tensor, width: int
) -> int:
    """The ``width`` children with the best cumulative log-probability over all leaves."""
    logprob_QU = torch.log_softmax(logits_QU.float(), -1)
    width = min(width, logprob_QU.numel())
    best_QW, index_QW = logprob_QU.topk(min(width, logprob_QU.shape[1]), -1)
    leaf_scores = best_QW.new_tensor([tree.scores[leaf] for leaf in leaves])
    total_QW = best_QW + leaf_scores[:, None]
    for flat in total_QW.flatten().topk(width).indices.tolist():
        leaf, rank = divmod(flat, index_QW.shape[1])
        token = int(ids_U[index_QW[leaf, rank]])
        tree.add(leaves[leaf], token, float(total_QW[leaf, rank]))
    return width


def make_source(draft: Any) -> DraftSource:
    """The decode-time side of a loaded draft."""
    sources = {"spd": SPDSource}
    return sources[draft.draft_type](draft)
