"""Test acceptance rules and their random numbers: exact distributions, enumerated and counted."""

import itertools

import numpy as np
import pytest
import torch
from decode_runs import Script, simplex_points
from scipy.stats import chisquare, kstest

from pipedraft.inference.arguments import read_temperature
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.rules.random import probabilities
from pipedraft.inference.rules.sampled import (
    KeyedRandom,
    MatchVerifier,
    RejectionVerifier,
    Verifier,
    draw,
)
from pipedraft.inference.tree import TokenTree
from pipedraft.inference.verdict import Verdict

PURPOSES = ("target", "draft", "accept", "residual")


# -- random numbers -------------------------------------------------------------------------


@pytest.mark.parametrize("varied", ["seed", "prompt", "position", "purpose", "attempt"])
def test_uniforms_are_uniform_and_neighboring_keys_are_independent(varied):
    def number(i: int) -> float:
        key = {"seed": 1, "prompt": 2, "position": 3, "attempt": 4} | {varied: i}
        purpose = PURPOSES[i % 4] if varied == "purpose" else "target"
        attempt = i // 4 if varied == "purpose" else key["attempt"]
        return KeyedRandom(key["seed"], key["prompt"]).uniform(key["position"], purpose, attempt)

    values = np.array([number(i) for i in range(4000)])
    assert values.min() >= 0 and values.max() < 1 and len(set(values)) == len(values)
    assert kstest(values, "uniform").pvalue > 1e-3
    pairs = np.histogram2d(values[:-1], values[1:], bins=5, range=[[0, 1], [0, 1]])[0]
    assert chisquare(pairs.ravel()).pvalue > 1e-3


def test_a_key_has_one_number_and_no_two_keys_share_one():
    random = KeyedRandom(0, 0)
    assert random.uniform(5, "accept", 2) == KeyedRandom(0, 0).uniform(5, "accept", 2)
    keys = list(itertools.product(range(12), range(12), PURPOSES, range(12)))
    values = {KeyedRandom(1, prompt).uniform(at, why, n) for prompt, at, why, n in keys}
    assert len(values) == len(keys)


def test_the_digits_of_neighboring_keys_do_not_run_together():
    assert KeyedRandom(1, 12).uniform(3, "target") != KeyedRandom(11, 2).uniform(3, "target")
    assert KeyedRandom(1, 1).uniform(11, "target") != KeyedRandom(1, 11).uniform(1, "target")


# -- drawing --------------------------------------------------------------------------------


def test_draw_is_the_inverse_of_the_cumulative_distribution_at_every_edge():
    p = torch.tensor([0.25, 0.0, 0.5, 0.25], dtype=torch.float64)
    below = np.nextafter
    assert draw(p, 0.0) == 0
    assert draw(p, below(0.25, 0)) == 0
    assert draw(p, 0.25) == 2  # intervals are closed on the left
    assert draw(p, below(0.75, 0)) == 2
    assert draw(p, 0.75) == 3
    assert draw(p, 1 - 2.0**-53) == 3


def test_draw_never_returns_a_token_of_probability_zero():
    rng = np.random.default_rng(0)
    edges = [0.0, 1 - 2.0**-53]
    for _ in range(300):
        weights = rng.random(7) * (rng.random(7) < 0.4)
        if not weights.any():
            continue
        p = torch.from_numpy(weights / weights.sum())
        cumulative = np.cumsum(p.numpy())
        around = [np.nextafter(c, to) for c in cumulative for to in (0, 1)]
        for uniform in [*edges, *cumulative, *around, *rng.random(5)]:
            assert p[draw(p, min(uniform, edges[1]))] > 0


def test_draw_does_not_need_normalized_weights():
    weights = torch.tensor([3.0, 0.0, 1.0], dtype=torch.float64)
    assert [draw(weights, u) for u in (0.0, 0.74, 0.76)] == [0, 0, 2]


def test_probabilities_are_exact_over_a_large_vocabulary():
    logits = torch.randn(150_000, generator=torch.Generator().manual_seed(0)) * 4
    p = probabilities(logits, 0.7)
    assert p.dtype == torch.float64 and abs(float(p.sum()) - 1) < 1e-12
    exact = np.exp((logits.double().numpy() - float(logits.max())) / 0.7)
    np.testing.assert_allclose(p.numpy(), exact / exact.sum(), rtol=1e-9)


@pytest.mark.parametrize("weights", [[0.0, 0.0], [0.5, float("nan")], [1.0, float("inf")]])
def test_draw_refuses_weights_without_a_finite_sum(weights):
    with pytest.raises(ValueError, match="probabilities: their sum is .* NaN or infinite"):
        draw(torch.tensor(weights, dtype=torch.float64), 0.5)


@pytest.mark.parametrize("temperature", [1e-4, 1e-3, 0.3, 0.7, 1.0, 1.7, 1e6])
def test_probabilities_are_softmax_to_the_bit_where_commands_allow_the_temperature(temperature):
    logits = torch.randn(8, 1000, generator=torch.Generator().manual_seed(1)) * 30
    logits[0, :3] = torch.finfo(torch.float32).max
    logits[1] = torch.finfo(torch.float32).min
    p = probabilities(logits, temperature)
    assert torch.equal(p, torch.softmax(logits.double() / temperature, -1))
    assert torch.isfinite(p).all()


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-200, 1e-5])
def test_smaller_temperatures_do_not_overflow_either(temperature):
    logits = torch.tensor([[3.0, -2.0, 3e38, 1.0], [-3e38, 0.5, 0.25, -1.0]])
    p = probabilities(logits, temperature)
    assert p.argmax(-1).tolist() == [2, 1] and torch.equal(p.sum(-1), torch.ones(2).double())


@pytest.mark.parametrize("value", [-1.0, 5e-324, 9.9e-5, 1.1e6, float("inf"), float("nan")])
def test_temperatures_out_of_range_are_refused_wherever_they_are_named(value):
    message = "temperature: .* out of range; give 0 .greedy. or 0.0001 to 1e"
    with pytest.raises(ValueError, match=message):
        DecodeConfig(temperature=value)
    with pytest.raises(ValueError, match="is not a temperature; give 0"):
        read_temperature(str(value))


@pytest.mark.parametrize("value", [0.0, 1e-4, 0.7, 1.0, 1e6])
def test_temperatures_in_range_are_taken(value):
    assert DecodeConfig(temperature=value).temperature == value == read_temperature(str(value))


# -- rules ----------------------------------------------------------------------------------


def walk_on(rule: Verifier, tree: TokenTree, logits_RV: torch.Tensor) -> Verdict:
    return rule.walk(tree, rule.judge(logits_RV, tree.positions(0, len(logits_RV))))


GRID = (np.arange(12) + 0.5) / 12  # midpoints: exact for accept ratios and residuals in twelfths


def one_step_distribution(p: torch.Tensor, q: torch.Tensor, residual_of=None) -> np.ndarray:
    """Integrate the emitted token's distribution over all draft tokens and a grid for uniforms."""
    distribution = np.zeros(len(p))
    logits = p.log()[None]
    for draft_token in np.flatnonzero(q.numpy()):
        tree = TokenTree(0, 0)
        tree.add(0, int(draft_token), 0.0, q)
        for accept, residual in itertools.product(GRID, GRID):
            rule = RejectionVerifier(1.0, Script(accept=accept, residual=residual))
            walk = walk_on(rule, tree, logits)
            token = walk.next_token
            if residual_of is not None and not walk.tests[0]:
                token = draw(residual_of(p, q), residual)
            distribution[token] += float(q[draft_token]) / len(GRID) ** 2
    return distribution


SORTED = [p for p in simplex_points(3) if p.tolist() == sorted(p.tolist(), reverse=True)]
"""Distributions for p, one for all distributions equal under renamed tokens."""


@pytest.mark.parametrize(
    "targets", [SORTED, pytest.param(simplex_points(3), marks=pytest.mark.all)]
)
def test_the_rejection_rule_emits_the_targets_distribution_exactly(targets):
    """Try all pairs among three-token distributions in quarters, disjoint supports included.

    Acceptance ratios and normalized residuals are fractions with whole numbers up to 4. Every
    edge is therefore a multiple of 1/12, and midpoints between twelfths integrate exactly.
    """
    for p, q in itertools.product(targets, simplex_points(3)):
        np.testing.assert_allclose(one_step_distribution(p, q), p.numpy(), atol=1e-12)


def test_sampling_the_target_again_after_a_rejection_has_another_distribution():
    p = torch.tensor([0.75, 0.25, 0.0], dtype=torch.float64)
    q = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)
    wrong = one_step_distribution(p, q, residual_of=lambda p, q: p)
    assert np.abs(wrong - p.numpy()).max() > 0.05


def test_the_rejection_rule_accepts_with_the_overlap_of_both_distributions():
    for p, q in itertools.product(simplex_points(3), repeat=2):
        accepted = 0.0
        for draft_token, accept in itertools.product(np.flatnonzero(q.numpy()), GRID):
            tree = TokenTree(0, 0)
            tree.add(0, int(draft_token), 0.0, q)
            rule = RejectionVerifier(1.0, Script(accept=accept, residual=0.5))
            accepted += (
                float(q[draft_token]) / len(GRID) * walk_on(rule, tree, p.log()[None]).tests[0]
            )
        assert accepted == pytest.approx(float(torch.minimum(p, q).sum()))


def chain(tokens: list[int], q_V: torch.Tensor) -> TokenTree:
    tree = TokenTree(0, 10)
    for row, token in enumerate(tokens):
        tree.add(row, token, 0.0, q_V)
    return tree


def test_two_rejection_steps_have_the_product_distribution_with_hashed_uniforms():
    """Draft tokens, tests and residuals from KeyedRandom over many seeds; chi-square on 9 pairs."""
    p_2V = torch.tensor([[0.6, 0.3, 0.1], [0.1, 0.1, 0.8]], dtype=torch.float64)
    q = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    counts, seeds = np.zeros((3, 3)), 6000
    for seed in range(seeds):
        random = KeyedRandom(seed, 0)
        draft_tokens = [draw(q, random.uniform(position, "draft")) for position in (11, 12)]
        walk = walk_on(RejectionVerifier(1.0, random), chain(draft_tokens, q), p_2V.log())
        text = [draft_tokens[row - 1] for row in walk.path[1:]] + [walk.next_token]
        if len(text) == 1:  # rejected: the second token is drawn in its own round
            text.append(draw(p_2V[1], KeyedRandom(seed, 1).uniform(12, "target")))
        counts[text[0], text[1]] += 1
    expected = torch.outer(p_2V[0], p_2V[1]).numpy() * seeds
    assert chisquare(counts.ravel(), expected.ravel()).pvalue > 1e-3


def test_a_walk_stops_at_the_first_row_whose_logits_are_in_flight():
    q = torch.full((3,), 1 / 3, dtype=torch.float64)
    sure = torch.tensor([[-50.0, 50.0, -50.0]])
    tree = chain([1, 1, 1], q)
    for rule in (
        RejectionVerifier(1.0, Script(accept=0.5, residual=0.5)),
        MatchVerifier(1.0, Script(target=0.5)),
        MatchVerifier(0.0, Script()),
    ):
        walk = walk_on(rule, tree, sure.expand(2, 3))
        assert (walk.path, walk.next_token, walk.tests) == ([0, 1], 1, [True, True])
        walk = walk_on(rule, tree, sure.expand(1, 3))
        assert (walk.path, walk.next_token, walk.tests) == ([0], 1, [True])


def test_a_leaf_gets_one_more_token_and_no_test():
    sure = torch.tensor([[50.0, -50.0, -50.0]])
    for rule in (RejectionVerifier(1.0, Script(target=0.5)), MatchVerifier(0.0, Script())):
        walk = walk_on(rule, TokenTree(2, 4), sure)
        assert (walk.path, walk.next_token, walk.tests) == ([0], 0, [])


def test_the_match_rule_draws_without_looking_at_the_draft_tokens():
    """Every node's token is the inverse CDF at (position, "target"), whatever the tree holds."""
    p_RV = probabilities(torch.randn(9, 6, generator=torch.Generator().manual_seed(1)), 0.8)
    rng = np.random.default_rng(0)
    for seed in range(200):
        random = KeyedRandom(seed, 3)
        tree = TokenTree(0, 20)
        for _ in range(8):
            tree.add(int(rng.integers(len(tree))), int(rng.integers(6)), 0.0)
        logits = p_RV[: len(tree)].log() * 0.8
        walk = walk_on(MatchVerifier(0.8, random), tree, logits)
        for row, following in zip(walk.path, [*walk.path[1:], None], strict=True):
            uniform = random.uniform(tree.position(row) + 1, "target")
            expected = draw(p_RV[row], uniform)
            token = walk.next_token if following is None else tree.tokens[following]
            assert token == expected
        assert tree.child(walk.path[-1], walk.next_token) is None


def test_greedy_matching_follows_the_argmax_to_its_end():
    tree = TokenTree(0, 0)
    wrong, right = tree.add(0, 1, 0.0), tree.add(0, 2, 0.0)
    tree.add(wrong, 0, 0.0)
    leaf = tree.add(right, 1, 0.0)
    logits = torch.full((len(tree), 3), -1.0)
    logits[0, 2] = logits[right, 1] = logits[leaf, 0] = 1.0
    walk = walk_on(MatchVerifier(0.0, Script()), tree, logits)
    assert (walk.path, walk.next_token, walk.tests) == ([0, right, leaf], 0, [True, True])
