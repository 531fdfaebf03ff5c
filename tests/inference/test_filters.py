"""Sampling filters against transformers' filters, and their way through commands and messages."""

import math

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as warpers

from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.rules.filters import FIRST_TOKENS, TokenFilters, sampling_label
from pipedraft.inference.rules.random import SharedNoise, probabilities
from pipedraft.inference.rules.sampled import KeyedRandom, make_verifier

KINDS = {
    "top_k": lambda value: warpers.TopKLogitsWarper(top_k=value),
    "top_p": lambda value: warpers.TopPLogitsWarper(top_p=value),
    "min_p": lambda value: warpers.MinPLogitsWarper(min_p=value),
    "typical_p": lambda value: warpers.TypicalLogitsWarper(mass=value),
}
CHOICES = {
    "top_k": (1, 2, 3, 7, 50, 10_000),
    "top_p": (1e-9, 0.03, 0.5, 0.9, 0.999),
    "min_p": (0.01, 0.1, 0.5, 1.0),
    "typical_p": (1e-9, 0.03, 0.5, 0.9, 0.999),
}


def as_transformers(logits_RV, temperature, chosen):
    """Filter float64 logits with GenerationMixin, in its order."""
    processors = [warpers.TemperatureLogitsWarper(temperature)]
    processors += [KINDS[name](chosen[name]) for name in KINDS if name in chosen]
    scores_RV = logits_RV.double()
    for processor in processors:
        scores_RV = processor(None, scores_RV)
    return scores_RV.softmax(-1)


def random_case(rng):
    """Logits [R, V] and filters; every other case has few values, so that tokens tie."""
    size = int(rng.choice([1, 2, 5, 40, FIRST_TOKENS, 3 * FIRST_TOKENS, 700]))
    values = rng.normal(size=(3, size)) * rng.choice([0.3, 2.0, 6.0])
    if rng.random() < 0.5:
        values = rng.integers(-3, 2, size=(3, size)) * np.log(2.0)
    names = [name for name in KINDS if rng.random() < 0.5] or ["top_p"]
    chosen = {name: CHOICES[name][rng.integers(len(CHOICES[name]))] for name in names}
    return torch.from_numpy(values), {k: int(v) if k == "top_k" else v for k, v in chosen.items()}


def kept_logits(logits_RV, p_RV):
    """Sort before comparing: transformers' sort decides between equal tokens."""
    return logits_RV.where(p_RV > 0, -math.inf).sort(-1).values


def test_random_logits_keep_the_tokens_that_transformers_keeps():
    rng = np.random.default_rng(0)
    at_an_edge = 0
    for _ in range(1500):
        logits_RV, chosen = random_case(rng)
        temperature = float(rng.choice([0.5, 1.0, 2.0]))
        ours_RV = probabilities(logits_RV, temperature, TokenFilters(**chosen))
        theirs_RV = as_transformers(logits_RV, temperature, chosen)
        kept_RV, expected_RV = (kept_logits(logits_RV, p_RV) for p_RV in (ours_RV, theirs_RV))
        # A sum with another last bit may move one token over the edge of a nucleus.
        differ_R = (kept_RV > -math.inf).sum(-1) - (expected_RV > -math.inf).sum(-1)
        assert differ_R.abs().max() <= 1
        at_an_edge += int((differ_R != 0).sum())
        same_R = differ_R == 0
        assert torch.equal(kept_RV[same_R], expected_RV[same_R]), chosen
        ours_RV, theirs_RV = (p_RV[same_R].sort(-1).values for p_RV in (ours_RV, theirs_RV))
        torch.testing.assert_close(ours_RV, theirs_RV, rtol=1e-9, atol=1e-15)
    assert at_an_edge < 30


@pytest.mark.parametrize("name", KINDS)
def test_every_filter_is_seen_by_the_comparison(name):
    """Without the filter the distribution differs, so the comparison above is not empty."""
    logits_RV = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    value = CHOICES[name][2]
    theirs = as_transformers(logits_RV, 1.0, {name: value})
    assert not torch.allclose(probabilities(logits_RV, 1.0), theirs)
    assert torch.allclose(probabilities(logits_RV, 1.0, TokenFilters(**{name: value})), theirs)


def test_nothing_is_sorted_beyond_the_mass_that_is_asked_for(monkeypatch):
    asked = []
    topk = torch.Tensor.topk
    monkeypatch.setattr(torch.Tensor, "topk", lambda x, k: asked.append(k) or topk(x, k))
    logits_RV = 8 * torch.randn(2, 30_000, generator=torch.Generator().manual_seed(2))
    TokenFilters(top_p=0.9, typical_p=0.9).apply(logits_RV.double())
    assert max(asked) <= 8 * FIRST_TOKENS
    TokenFilters(top_p=0.9).apply(torch.zeros(1, 30_000).double())
    assert asked[-1] > FIRST_TOKENS * 8


@pytest.mark.parametrize("rule", ["match", "gumbel", "rejection", "tail_escape", "argmax"])
def test_no_rule_draws_what_is_removed(rule):
    filters = TokenFilters(top_k=6, top_p=0.8, typical_p=0.95)
    logits_RV = torch.randn(40, 30, generator=torch.Generator().manual_seed(3)) * 2
    kept_RV = probabilities(logits_RV, 1.3, filters) > 0
    verifier = make_verifier(
        rule, 1.3, KeyedRandom(5, 0), filters=filters, payload_tokens=3, tail_samples=2
    )
    ids_U = torch.arange(30)
    for position, (logits_V, kept_V) in enumerate(zip(logits_RV, kept_RV, strict=True)):
        assert kept_V[verifier.draw(logits_V, position)]
        draft_token = verifier.propose(logits_V, ids_U, position, attempt=0)
        assert kept_V[draft_token.token]
        if verifier.needs_q:
            assert torch.equal(draft_token.q_V > 0, kept_V)
        else:
            noise_1U = verifier.noise_rows(ids_U, [position])
            score_U = verifier.child_scores(logits_V[None], noise_1U)[0]
            best = score_U.topk(int(kept_V.sum())).indices
            assert rule == "argmax" or kept_V[best].all()
            assert torch.isfinite(score_U).all()


def test_the_gumbel_draw_is_the_draft_draw_where_the_distributions_agree():
    filters, random = TokenFilters(top_p=0.7), KeyedRandom(2, 0)
    verifier = make_verifier(
        "gumbel", 1.0, random, filters=filters, payload_tokens=3, tail_samples=2
    )
    logits_RV = torch.randn(50, 30, generator=torch.Generator().manual_seed(4)) * 2
    ids_U = torch.arange(30)
    for position, logits_V in enumerate(logits_RV):
        own = verifier.draw(logits_V, position)
        assert verifier.propose(logits_V, ids_U, position, attempt=0).token == own
        noise = SharedNoise(random).exponential(position, 30)
        p_V = probabilities(logits_V, 1.0, filters).numpy()
        with np.errstate(divide="ignore"):
            assert own == int((noise / p_V).argmin())


# -- what is refused, said and sent ---------------------------------------------------------

BAD = [
    ("top_k", -1),
    ("top_p", 0.0),
    ("top_p", 1.5),
    ("min_p", -0.1),
    ("min_p", 1.01),
    ("typical_p", 0.0),
    *((name, math.nan) for name in ("top_p", "min_p", "typical_p")),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_filters_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"^{name}: .*; give "):
        DecodeConfig(temperature=1.0, **{name: value})


def test_a_filter_of_greedy_decoding_is_refused():
    message = "^top_k: 50 filters samples, but temperature 0 is greedy; give a"
    with pytest.raises(ValueError, match=message):
        DecodeConfig(top_k=50)


def test_a_configuration_keeps_its_filters_in_files_and_labels():
    config = DecodeConfig.of("spd", temperature=1.0, top_k=50, min_p=0.05)
    assert DecodeConfig.from_dict(config.to_dict()) == config
    assert config.filters == TokenFilters(top_k=50, min_p=0.05)
    assert config.sampling == "1, top-k 50, min-p 0.05"
    assert sampling_label(0.7, {}) == "0.7"
    with pytest.raises(ValueError, match="top_p"):
        DecodeConfig.from_dict({"top_p": "0.9", "temperature": 1.0})
