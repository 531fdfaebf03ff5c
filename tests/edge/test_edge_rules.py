"""Acceptance rules across a link: distributions by enumeration and by counting."""

import itertools

import numpy as np
import pytest
import torch
from decode_runs import Script, simplex_points
from link_runs import TableSource, TableTarget, run_session
from scipy.stats import chi2, chisquare, kstest

from pipedraft.inference.rules.random import Token, probabilities
from pipedraft.inference.rules.sampled import (
    RULES,
    DraftToken,
    KeyedRandom,
    Logits,
    TailEscapeVerifier,
    Top,
    draw,
    make_verifier,
)

KEPT = {
    "test_sampled_text_has_the_targets_distribution": 0,
    "test_top_k_misses_the_distribution_by_what_is_predicted": 0,
    "test_the_distribution_test_catches_known_mistakes": 1,
}

# V vocabulary, a, b, c successive tokens
VOCAB, LENGTH, NUM_TEXTS = 5, 500, 4


def top_k_bias(p_V, q_V, top_k) -> float:
    """Total variation between ``topk`` and p at a tested position: (p - q)+ outside the top K.

    The true variation is larger if (p - q)+ is 0 on all K tokens.
    """
    residual_V = (p_V - q_V).clamp_min(0)
    inside = residual_V[p_V.topk(min(top_k, len(p_V))).indices].sum()
    return float(residual_V.sum() - inside)


def tables() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [V, V] for a target and for a draft in partial agreement."""
    generator = torch.Generator().manual_seed(5)
    target_VV = torch.randn(VOCAB, VOCAB, generator=generator) * 0.8
    draft_VV = target_VV + torch.randn(VOCAB, VOCAB, generator=generator) * 1.5
    return target_VV, draft_VV


def sample(rule, plan, seed, max_new_tokens, **options) -> list[int]:
    target_VV, draft_VV = tables()
    result, _ = run_session(
        TableTarget(target_VV),
        TableSource(draft_VV),
        [1],
        plan=plan,
        rule=rule,
        temperature=1.0,
        seed=seed,
        max_new_tokens=max_new_tokens,
        **options,
    )
    return result.token_ids


def counted_triples(rule, plan, **options) -> np.ndarray:
    """[V, V, V]: how often c followed a, b in some long outputs."""
    counts_abc = np.zeros((VOCAB, VOCAB, VOCAB))
    for seed in range(NUM_TEXTS):
        text = sample(rule, plan, seed, LENGTH, **options)
        np.add.at(counts_abc, (text[:-2], text[1:-1], text[2:]), 1)
    return counts_abc


def distribution_p_value(counts_abc: np.ndarray) -> float:
    """Return the chi-square p-value: given b, is c drawn from the target, whatever a was?"""
    p_bc = probabilities(tables()[0], 1.0).numpy()
    expected_abc = counts_abc.sum(-1, keepdims=True) * p_bc
    enough_ab = expected_abc.min(-1) >= 2  # rarer contexts have no chi-square distribution
    counts_nc, expected_nc = counts_abc[enough_ab], expected_abc[enough_ab]
    statistic = ((counts_nc - expected_nc) ** 2 / expected_nc).sum()
    assert len(counts_nc) >= VOCAB
    return float(chi2.sf(statistic, len(counts_nc) * (VOCAB - 1)))


# -- whole sessions -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule, plan",
    [
        ("match", "picospec"),
        ("gumbel", "picospec"),
        ("rejection", "stop_and_wait"),
        ("tail_escape", "stop_and_wait"),
        ("tail_escape", "picospec"),
        ("tail_escape", "pearl"),
    ],
)
def test_sampled_text_has_the_targets_distribution(rule, plan):
    """With top K 1 and one sample, corrections mostly need the tail."""
    assert (
        distribution_p_value(counted_triples(rule, plan, payload_tokens=1, tail_samples=1)) > 1e-3
    )


def test_top_k_misses_the_distribution_by_what_is_predicted():
    """Without bonus every token but the first is tested, so each context has its own bias."""
    counts_abc = counted_triples("topk", "picospec", payload_tokens=2)
    counts_bc = counts_abc.sum(0)
    p_bc, q_bc = (probabilities(table, 1.0) for table in tables())
    share_b = counts_bc.sum(1) / counts_bc.sum()
    predicted = sum(share_b[b] * top_k_bias(p_bc[b], q_bc[b], 2) for b in range(VOCAB))
    distribution_bc = counts_bc / counts_bc.sum(1, keepdims=True)
    measured = float((share_b * 0.5 * np.abs(distribution_bc - p_bc.numpy()).sum(1)).sum())
    assert distribution_p_value(counts_abc) < 1e-6
    assert measured == pytest.approx(predicted, abs=0.02) and predicted > 0.03


def test_the_published_argmax_rule_misses_the_distribution():
    assert distribution_p_value(counted_triples("argmax", "stop_and_wait")) < 1e-6


class NoThinning(TailEscapeVerifier):
    """Takes every tail sample unthinned."""

    def correct(self, draft_token, position, payloads):
        thinned = DraftToken(draft_token.token, draft_token.q_V.clone())
        top = payloads[0]
        inside = top.ids[: top.num_top].numpy()
        outside = np.setdiff1d(np.arange(len(draft_token.q_V)), inside)
        thinned.q_V[torch.from_numpy(outside)] = 0
        return super().correct(thinned, position, payloads)


@pytest.mark.parametrize("mutant, top_k", [("no_thinning", 1), ("same_uniform", 3), ("p_again", 3)])
def test_the_distribution_test_catches_known_mistakes(mutant, top_k, monkeypatch):
    if mutant == "no_thinning":
        monkeypatch.setitem(RULES, "tail_escape", NoThinning)
    elif mutant == "same_uniform":  # the test's uniform draws the correction, too (PEARL's code)
        plain = KeyedRandom.uniform

        def shared(self, position, purpose, attempt=0):
            same = {"residual": "accept", "branch": "accept"}
            return plain(self, position, same.get(purpose, purpose), attempt)

        monkeypatch.setattr(KeyedRandom, "uniform", shared)
    else:  # the correction is drawn from p instead of (p - q)+
        monkeypatch.setattr(
            TailEscapeVerifier,
            "_residual",
            lambda self, draft_token, top: (top.ids[: top.num_top], top.p[: top.num_top]),
        )
    assert (
        distribution_p_value(counted_triples("tail_escape", "stop_and_wait", payload_tokens=top_k))
        < 1e-4
    )


# -- one step -------------------------------------------------------------------------------


def rule_of(name, temperature=1.0, **options):
    options = {"payload_tokens": 10, "tail_samples": 4, **options}
    return make_verifier(name, temperature, KeyedRandom(0, 0), **options)


def test_a_turn_of_tail_escape_ends_at_each_token_in_proportion_to_the_residual():
    """Probability (p - q)+ / (r + t) wherever the token is; uniforms integrated over a grid.

    Thirds over at most four thirds: all edges are multiples of 1/12, integrated exactly by
    midpoints.
    """
    grid, thirds = (np.arange(12) + 0.5) / 12, simplex_points(3, parts=3)
    cloud, edge = (rule_of("tail_escape", payload_tokens=1, tail_samples=1) for _ in range(2))
    for p_V, q_V in itertools.product(thirds[4:6], thirds[::2]):
        residual_V, top = (p_V - q_V).clamp_min(0), p_V.topk(1).indices
        inside, outside = float(residual_V[top].sum()), 1 - float(p_V[top].sum())
        if not residual_V.any():
            continue
        distribution_V = np.zeros(len(p_V))
        for tail in grid:
            cloud.random = Script(tail=tail)
            payload = cloud.payload(p_V.log(), 7)
            for branch, thin in itertools.product(grid, grid):
                edge.random = Script(branch=branch, thin=thin, residual=0.5)
                token = edge.correct(DraftToken(0, q_V), 7, [payload])
                if token is not None:
                    distribution_V[token] += 1 / 12**3
        expected_V = residual_V.numpy() / (inside + outside)
        np.testing.assert_allclose(distribution_V, expected_V, atol=1e-9)


def test_samples_are_asked_for_until_everything_comes():
    p_V = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    q_V = torch.tensor([0.6, 0.29, 0.11, 0.0], dtype=torch.float64)  # S = {0} has no residual
    cloud, edge = (rule_of("tail_escape", payload_tokens=1, tail_samples=2) for _ in range(2))
    edge.random = Script(branch=0.5, thin=0.999, residual=0.95)  # thinning takes no sample
    payloads = [cloud.payload(p_V.log(), 3)]
    assert isinstance(payloads[0], Top) and edge.correct(DraftToken(0, q_V), 3, payloads) is None
    payloads.append(cloud.more(p_V.log(), 3, 2, 8))
    assert payloads[1].num_samples == 8 and edge.correct(DraftToken(0, q_V), 3, payloads) is None
    payloads.append(cloud.more(p_V.log(), 3, 10, 0))
    assert isinstance(payloads[2], Logits)
    assert edge.correct(DraftToken(0, q_V), 3, payloads) == 3


def test_all_samples_of_a_position_are_different_draws():
    p_V = torch.full((64,), 1 / 64, dtype=torch.float64)
    cloud = rule_of("tail_escape", payload_tokens=1, tail_samples=8)
    first = cloud.payload(p_V.log(), 3).ids[1:].tolist()
    more = cloud.more(p_V.log(), 3, 8, 32).ids[1:].tolist()
    assert len(first) == 8 and len(more) == 32
    assert first != more[:8] and len(set(more)) > 15


def draw_with_noise(p_V: np.ndarray, seed: int) -> int:
    with np.errstate(divide="ignore"):
        logits_V = torch.from_numpy(np.log(p_V))
    return RULES["gumbel"](1.0, KeyedRandom(seed, 0)).draw(logits_V, 9)


def test_shared_noise_draws_from_p_and_two_draws_mostly_agree():
    p_V = np.array([0.5, 0.3, 0.2, 0.0])
    q_V = np.array([0.45, 0.3, 0.15, 0.1])
    drawn = [draw_with_noise(p_V, seed) for seed in range(4000)]
    counts = np.bincount(drawn, minlength=4)
    assert counts[3] == 0 and chisquare(counts[:3], p_V[:3] * 4000).pvalue > 1e-3
    drafted = [draw_with_noise(q_V, seed) for seed in range(4000)]
    agreement = np.mean(np.equal(drawn, drafted))
    independent = float(p_V @ q_V)
    assert agreement > 0.8 > independent


def test_noise_is_uniform_and_shorter_vectors_are_its_beginning():
    random = KeyedRandom(1, 2)
    values = random.uniforms(5, "noise", 4000)
    assert kstest(values, "uniform").pvalue > 1e-3
    assert np.array_equal(values[:100], random.uniforms(5, "noise", 100))
    others = [KeyedRandom(1, 3), KeyedRandom(2, 2)]
    assert all(other.uniforms(5, "noise", 4)[0] != values[0] for other in others)
    assert random.uniforms(6, "noise", 1)[0] != values[0] != random.uniforms(5, "tail", 1)[0]


@pytest.mark.parametrize("name", RULES)
def test_every_rule_is_greedy_at_temperature_zero(name):
    rule = rule_of(name, 0.0)
    logits_V = torch.tensor([0.0, 2.0, 1.0])
    assert rule.test(logits_V, 4, 1, 1.0) is None
    payload = rule.test(logits_V, 4, 2, 1.0)
    assert payload == Token(id=1)
    assert rule.correct(DraftToken(2), 4, [payload]) == 1


def test_payloads_that_cannot_be_are_refused():
    edge = rule_of("tail_escape")
    draft_token = DraftToken(0, torch.tensor([1.0, 0.0], dtype=torch.float64))
    with pytest.raises(ValueError, match="Token after a rejection by rule 'tail_escape'"):
        edge.correct(draft_token, 3, [Token(id=1)])
    ids, p = torch.tensor([1, 0]).int(), torch.tensor([0.5, 0.1]).double()
    for field, value, message in (
        ("ids", ids.long(), "ids: torch.int64"),
        ("ids", -ids, "a negative one"),
        ("ids", ids[:0], "p: torch.float64 .2.; want float64 of shape .0."),
        ("p", p[:1], "p: torch.float64 .1."),
        ("p", p.float(), "p: torch.float32"),
        ("num_top", 3, "ids: 2 of 3"),
    ):
        with pytest.raises(ValueError, match=message):
            Top(**{"ids": ids, "p": p, "num_top": 1, "tail_mass": 0.5, field: value})
    huge = Top(ids=torch.tensor([2**31 - 1]).int(), p=p[:1], num_top=1, tail_mass=0.0)
    assert edge.correct(draft_token, 3, [huge]) == 2**31 - 1  # and no memory for so many tokens
    with pytest.raises(ValueError, match="sends no samples"):
        rule_of("match").more(torch.zeros(2), 3, 0, 4)
    assert draw(torch.tensor([0.0, 1.0]), 0.5) == 1
