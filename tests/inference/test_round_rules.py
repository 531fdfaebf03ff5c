"""Test whole-round rules: outputs follow the target's law, up to rounding, for each possible tree.

Trees use three tokens and two levels. A shape lists the root's children, each by the number of its
own children.
"""

# a, b, c the three tokens after the root

import math
from collections.abc import Iterator
from itertools import permutations, product

import pytest
import torch
from torch import Tensor

from pipedraft.inference.rules import sampled as verify
from pipedraft.inference.rules.random import KeyedRandom
from pipedraft.inference.rules.sampled import RULES, BlockVerifier
from pipedraft.inference.tree import TokenTree

TOKENS = range(3)
SHAPES = [("block", (1,)), ("block", (0,)), *(("traversal", s) for s in [(2, 1), (1, 2), (3, 3)])]


def laws(seed: int) -> list[Tensor]:
    """Draw probabilities P(a), P(b | a) and P(c | a, b)."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [(3,), (3, 3), (3, 3, 3)]
    return [(1.5 * torch.randn(size, generator=generator).double()).softmax(-1) for size in sizes]


P_A, P_AB, P_ABC = laws(1)
Q_A, Q_AB, _ = laws(2)


def odds_of(tokens: tuple[int, ...], q_V: Tensor) -> float:
    """Return the probability to draw these tokens in this order, without replacement."""
    left = [1.0, *(1 - q_V[list(tokens)].cumsum(0)).tolist()]
    return math.prod(float(q_V[token]) / rest for token, rest in zip(tokens, left, strict=False))


def drawn_trees(shape: tuple[int, ...]) -> Iterator[tuple[float, TokenTree]]:
    for tokens in permutations(TOKENS, len(shape)):
        for below in product(*(permutations(TOKENS, count) for count in shape)):
            tree, odds = TokenTree(0, 5), odds_of(tokens, Q_A)
            rows = [tree.add(0, token, 0.0, Q_A) for token in tokens]
            for token, row, children in zip(tokens, rows, below, strict=True):
                odds *= odds_of(children, Q_AB[token])
                for child in children:
                    tree.add(row, child, 0.0, Q_AB[token])
            yield odds, tree


class Told(float):
    """Uniform number that fails this many tests, then passes one; ``odds``: chance of this."""

    def __new__(cls, num_rejected: int):
        told = super().__new__(cls, 0.5)
        told.num_rejected, told.odds = num_rejected, 1.0
        return told

    def __lt__(self, weight):
        accepts = self.num_rejected == 0
        self.num_rejected -= 1
        self.odds *= weight if accepts else 1 - weight
        return accepts


def law_error(rule: str, shape: tuple[int, ...], monkeypatch) -> float:
    """Return the largest error in P(a, b, c)."""
    rests: list[Tensor] = []
    monkeypatch.setattr(verify, "draw", lambda p_V, uniform: rests.append(p_V) or 0)
    found_abc = torch.zeros_like(P_ABC)
    for tree_odds, tree in drawn_trees(shape):
        p_RV = torch.stack([P_A] + [P_AB[0]] * (len(tree) - 1))
        for row in range(1, len(tree)):
            above, token = tree.parents[row], tree.tokens[row]
            p_RV[row] = P_ABC[tree.tokens[above], token] if above else P_AB[token]
        for num_rejected in range(len(tree)):
            told = Told(num_rejected)
            monkeypatch.setattr(KeyedRandom, "uniform", lambda *key, told=told: told)
            walk = RULES[rule](1.0, KeyedRandom(0, 0)).walk(tree, p_RV.log())
            rest_V, tokens = rests.pop(), [tree.tokens[row] for row in walk.path[1:]]
            if told.odds:
                rest_V = tree_odds * told.odds * rest_V / rest_V.sum()
                behind = [rest_V[:, None, None] * P_AB[:, :, None] * P_ABC]
                behind += [rest_V[:, None] * P_ABC[a] for a in tokens[:1]]
                found_abc[tuple(tokens)] += [*behind, rest_V][len(tokens)]
    expected_abc = P_A[:, None, None] * P_AB[:, :, None] * P_ABC
    return float((found_abc - expected_abc).abs().max())


@pytest.mark.parametrize(("rule", "shape"), SHAPES)
def test_rules_of_whole_rounds_have_the_targets_law_to_the_last_digits(rule, shape, monkeypatch):
    assert law_error(rule, shape, monkeypatch) < 1e-14


# -- known mistakes -------------------------------------------------------------------------


def each_node_has_its_own_threshold(monkeypatch):
    monkeypatch.setattr(BlockVerifier, "weigh", lambda self, weight, ratio: min(ratio, 1.0))


def rejecting(monkeypatch, change):
    """Call ``change`` after each rejection, with the node and its earlier weight, p and q."""
    plain = BlockVerifier.reject

    def reject(self, parent, token):
        before = parent.weight, parent.p_V, parent.q_V
        plain(self, parent, token)
        change(parent, *before)

    monkeypatch.setattr(BlockVerifier, "reject", reject)


def the_next_weight_is_the_residuals_sum(monkeypatch):
    def change(parent, weight, p_V, q_V):
        parent.weight = float((weight * p_V - q_V).clamp_min(0).sum())

    rejecting(monkeypatch, change)


def the_residual_is_of_all_of_p(monkeypatch):
    def change(parent, weight, p_V, q_V):
        parent.p_V = (p_V - q_V).clamp_min(0) / (p_V - q_V).clamp_min(0).sum()

    rejecting(monkeypatch, change)


def the_residual_is_the_target(monkeypatch):
    def change(parent, weight, p_V, q_V):
        parent.p_V = p_V

    rejecting(monkeypatch, change)


def a_rejected_token_can_be_drawn_again(monkeypatch):
    def change(parent, weight, p_V, q_V):
        parent.q_V = q_V

    rejecting(monkeypatch, change)


@pytest.mark.parametrize(
    "mistake",
    [
        each_node_has_its_own_threshold,
        the_next_weight_is_the_residuals_sum,
        the_residual_is_of_all_of_p,
        the_residual_is_the_target,
        a_rejected_token_can_be_drawn_again,
    ],
)
def test_the_last_digits_show_a_mistake(mistake, monkeypatch):
    mistake(monkeypatch)
    error = law_error("traversal", (2, 1), monkeypatch)
    assert not error < 1e-3  # NaN: there is nothing left to draw from
