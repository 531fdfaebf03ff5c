"""Rules of papers that verify a whole round of drawn tokens at once."""

# V target vocabulary, U draft vocabulary, R rows or nodes, W children of each

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from pipedraft.inference.config import RuleName
from pipedraft.inference.draws import draw
from pipedraft.inference.rules import SampledVerifier, Walk
from pipedraft.inference.tree import TokenTree


@dataclass
class _Node:
    """A node of the path that is looked at, as its rejected children leave it."""

    row: int
    children: Iterator[int]
    """Rows that were not looked at."""
    weight: float
    """Probability that the text goes through the node."""
    p_V: Tensor
    """Distribution of the token behind it, if so."""
    q_V: Tensor
    """Distribution that the next child was drawn from."""


class BlockVerifier(SampledVerifier):
    """Block verification of a chain (Sun et al., arXiv:2403.10444, Algorithm 2).

    With X_i ~ q(. | X_<i), w_0 = 1 and w_i = min(w_{i-1} p(X_i | X_<i) / q(X_i | X_<i), 1), the
    first i of M draft tokens pass, each by a uniform of its own, with probability h_M = w_M and

        h_i = S_i / (S_i + 1 - w_i),  S_i = sum_v (w_i p(v | X_<=i) - q(v | X_<=i))+  for i < M.

    The longest prefix that passes is accepted, and the token after it comes from (w p - q)+, from p
    after all M. On average at least as many are accepted as by ``rejection``.

    A token behind the accepted ones was tested and is drafted again, so that the uniforms of the
    tests are keyed by the round.
    """

    name: ClassVar[RuleName] = "block"

    def walk(self, tree: TokenTree, verdicts_R: Tensor) -> Walk:
        """Walk from the leaves of a tree that is back as a whole (``TraversalVerifier``)."""
        path = [self._open(tree, 0, 1.0, verdicts_R)]
        while True:
            node = path[-1]
            child = next(node.children, None)
            if child is not None and node.q_V[tree.tokens[child]]:  # else q is used up
                token = tree.tokens[child]
                weight = self.weigh(node.weight, float(node.p_V[token] / node.q_V[token]))
                path.append(self._open(tree, child, weight, verdicts_R))
                continue
            uniform = self.random.uniform(tree.root_position, "accept", node.row)
            if len(path) == 1 or uniform < node.weight:
                break
            path.pop()
            self.reject(path[-1], tree.tokens[node.row])
        uniform = self.random.uniform(tree.position(node.row) + 1, "residual")
        tests = [True] * (len(path) - 1) + [False] * bool(tree.children(node.row))
        # The token may be a child that was not drawn; that row is back already.
        return Walk([each.row for each in path], draw(node.p_V, uniform), tests, restarts=True)

    def _open(self, tree: TokenTree, row: int, weight: float, verdicts_R: Tensor) -> _Node:
        p_V, children = self.probabilities(verdicts_R[row]), tree.children(row)
        q_V = self.q_of(tree, children[0]) if children else p_V
        return _Node(row, iter(children), weight, p_V, q_V)

    def weigh(self, weight: float, ratio: float) -> float:
        """A child's weight, of its parent's and p / q there."""
        return min(weight * ratio, 1.0)

    def reject(self, parent: _Node, token: int) -> None:
        """What is left of a node without its next child."""
        rest_V = (parent.weight * parent.p_V - parent.q_V).clamp_min(0)
        gain = float(rest_V.sum())
        parent.weight = gain / max(gain + 1 - parent.weight, sys.float_info.min)
        parent.p_V = rest_V / max(gain, sys.float_info.min)
        parent.q_V = parent.q_V.clone()
        parent.q_V[token] = 0
        parent.q_V /= parent.q_V.sum().clamp_min(sys.float_info.min)


class RecursiveVerifier(SampledVerifier):
    """Recursive rejection of children drawn without replacement (Jeon et al., arXiv:2402.14160).

    The children x_1, x_2, .. of a node are drawn by Gumbel top-k, each ~ q without those before it.
    With p_1 = p and q_1 = q, x_j is accepted with probability min(1, p_j(x_j) / q_j(x_j)), else

        p_{j+1} = (p_j - q_j)+ / sum_v (p_j - q_j)+,  q_{j+1}(v) ~ q_j(v) for v != x_j, 0 for x_j;

    after the last child the token comes from p_{k+1}. The distribution stays p as long as nobody
    has looked at x_j when it is decided whether the node gets a j-th child. EAGLE-2's order by the
    child's own probability has; here a tree's shape is a function of ranks alone (``score``).
    """

    name: ClassVar[RuleName] = "recursive"
    accepts: ClassVar[tuple[float, float]] = (0.8, 0.35)
    """Share assumed of first children that are accepted, and of others that are tested."""

    def draw_children(
        self, logits_RU: Tensor, ids_U: Tensor, position: int, width: int, *, attempt: int
    ) -> tuple[Tensor, Tensor]:
        """Tokens [R, W] below R nodes, in the order of drawing, and q [R, V'] of each node.

        Args:
            position: of all of them; one call in each round, so that no two nodes share a number.
        """
        q_RU = self.probabilities(logits_RU).cpu()
        ids = ids_U.cpu()
        uniforms = self.random.uniforms(position, "draft", q_RU.numel(), attempt)
        # The smallest E / q is q's draw, the next one q's without it, and so on.
        exponential_RU = torch.from_numpy(-np.log1p(-uniforms)).view_as(q_RU)
        drawn_RW = (exponential_RU / q_RU).topk(min(width, len(ids)), largest=False).indices
        q_RV = q_RU.new_zeros(len(q_RU), int(ids.max()) + 1)
        q_RV[:, ids] = q_RU
        return ids[drawn_RW], q_RV

    def score(self, rank: int) -> float:
        """Log-probability assumed of a node's child to be accepted, by its rank."""
        first, other = self.accepts
        return math.log(first if rank == 0 else (1 - first) * other * (1 - other) ** (rank - 1))

    def walk(self, tree: TokenTree, verdicts_R: Tensor) -> Walk:
        """Walk through a tree that is back as a whole."""
        path: list[int] = [0]
        tests: list[bool] = []
        while True:
            row = path[-1]
            position, p_V = tree.position(row) + 1, self.probabilities(verdicts_R[row])
            children, accepted = tree.children(row), None
            q_V = self.q_of(tree, children[0]).clone() if children else p_V
            for attempt, child in enumerate(children):
                token = tree.tokens[child]
                if not q_V[token]:  # not drawn: q is used up
                    break
                if self.random.uniform(position, "accept", attempt) * q_V[token] < p_V[token]:
                    accepted = child
                    break
                p_V = self.residual(p_V, q_V)
                q_V[token] = 0
                q_V /= q_V.sum().clamp_min(sys.float_info.min)
            if children:
                tests.append(accepted is not None)
            if accepted is None:
                token = draw(p_V, self.random.uniform(position, "residual"))
                # It may be a child that was not drawn; that row is back already.
                return Walk(path, token, tests, restarts=True)
            path.append(accepted)

    def residual(self, p_V: Tensor, q_V: Tensor) -> Tensor:
        rest_V = (p_V - q_V).clamp_min(0)
        return rest_V / rest_V.sum()


class TraversalVerifier(BlockVerifier, RecursiveVerifier):
    """Traversal verification of a tree, leaves first (Weng et al., arXiv:2505.12398).

    Children are drawn as those of ``recursive``. A node has a weight w, 1 for the root: the
    probability that the text goes through it, given its token and what was rejected before. Child
    x_1 ~ q, for which the weight is min(w p(x_1) / q(x_1), 1), is looked at with all that descends
    from it. If nothing of it is accepted, the node goes on with

        w' = S / (S + 1 - w),  p' = (w p - q)+ / S,  q'(v) ~ q(v) for v != x_1, 0 for x_1,

    S = sum_v (w p(v) - q(v))+, and its next child. Behind the last one a uniform accepts it, with
    the path to it and a token from p', with probability w'; else its parent has lost a child.

    Exact: by induction a node is in the text with probability w, and the token behind it is then
    distributed as p. A child x takes q(x) min(w p(x) / q(x), 1) = min(w p(x), q(x)) of w p(x) and
    leaves (w p(x) - q(x))+, in all S, which has to come from where the child was rejected: of
    probability 1 - w + S. On a chain this is block verification.
    """

    name: ClassVar[RuleName] = "traversal"
    accepts: ClassVar[tuple[float, float]] = (0.7, 0.3)
