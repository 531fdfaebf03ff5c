"""Losslessness of every schedule: the target's greedy output and sampled distribution."""

import pytest
from decode_runs import (
    NEW_TOKENS,
    PROMPTS,
    AcceptMostLikelyMutant,
    assert_sampled_like_the_target,
    decode_exactly,
    distribution_p_value,
    engine_for,
    friendly_module,
    greedy_reference,
    sampling_target,
    simulate,
    unlike_plain_text,
)
from tiny_models import tiny_llama, tiny_mistral, tiny_qwen3

from pipedraft.inference.cost_model import continuous_acceptance_length
from pipedraft.inference.rules.sampled import RULES

WAYS = [
    {"schedule": "autoregressive"},
    {"schedule": "spd"},
    {"schedule": "spd", "tree_width": 3},
]
OUTPUT = {"timing": "output_states"}
TWO, THREE = {"tokens_per_step": 2}, {"tokens_per_step": 3}


@pytest.mark.parametrize(
    ("make_target", "num_stages", "module", "settings"),
    [
        (tiny_llama, 1, {"query": "newest"}, {}),
        (tiny_llama, 4, {"query": "all"}, {}),
        (tiny_qwen3, 3, {"query": "newest"}, {}),
        (tiny_mistral, 2, {"query": "all"}, {}),
        (tiny_llama, 1, {}, OUTPUT),
        (tiny_llama, 4, {"query": "all"}, OUTPUT),
        (tiny_qwen3, 3, {}, OUTPUT),
        (tiny_llama, 2, OUTPUT, OUTPUT),
        (tiny_llama, 4, OUTPUT | {"query": "all"}, OUTPUT),
        (tiny_llama, 1, TWO, TWO),
        (tiny_llama, 2, THREE, THREE),
        (tiny_qwen3, 4, TWO, TWO),
    ],
)
def test_greedy_text_equals_transformers_greedy(make_target, num_stages, module, settings):
    target = make_target(layers=4, vocab=16)
    draft = friendly_module(target, num_stages=num_stages, num_layers=1, **module)
    ways = [way | settings for way in WAYS if way["schedule"] == "spd"] if settings else WAYS
    for prompt in PROMPTS:
        expected = greedy_reference(target, prompt)
        for way in ways:
            engine = engine_for(
                target, draft=draft, num_stages=num_stages, max_new_tokens=NEW_TOKENS, **way
            )
            result = decode_exactly(engine, prompt, expected)
            if way["schedule"] == "autoregressive":
                assert result.equivalent_acceptance_length == 1.0


@pytest.mark.parametrize("acceptance", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("width", [1, 2])
def test_greedy_text_is_the_targets_whatever_the_draft_draft_tokens(acceptance, width):
    """Hits, misses, leaves, and segments pruned to one row or to none, at every acceptance."""
    target = tiny_llama(layers=4, vocab=16)
    for prompt in PROMPTS:
        simulate(target, prompt, acceptance, tree_width=width)


@pytest.mark.parametrize("schedule", ["spd", "pipedec"])
def test_steps_equal_the_closed_form_on_a_bernoulli_draft(schedule):
    target = tiny_llama(layers=4, vocab=16)
    acceptance, way = 0.8, {"schedule": schedule, "tree_width": 1}
    result = simulate(target, [1, 2, 3], acceptance, max_new_tokens=400, **way)
    *finished, last = result.round_lengths
    steps = sum(4 + tokens - 1 for tokens in finished)
    assert result.num_steps == steps + 4 + last - 1
    expected = continuous_acceptance_length([result.draft_acceptance_rate], 4)
    assert abs(result.equivalent_acceptance_length - expected) < 0.08
    assert abs(result.draft_acceptance_rate - acceptance) < 0.07


def eos_target(eos):
    target = tiny_llama(layers=8, vocab=16)
    target.generation_config.eos_token_id = eos
    return target


@pytest.mark.parametrize("way", WAYS)
def test_text_stops_at_any_eos_token_and_counts_it(way):
    plain = greedy_reference(tiny_llama(layers=8, vocab=16), [1, 2, 3])
    for stop in (plain[0], plain[4]):
        target = eos_target([15 if stop != 15 else 14, stop])
        draft = friendly_module(target, num_stages=4, num_layers=1)
        engine = engine_for(target, draft=draft, num_stages=4, max_new_tokens=NEW_TOKENS, **way)
        result = engine.decode([1, 2, 3])
        assert result.token_ids == greedy_reference(target, [1, 2, 3])
        assert result.stop_reason == "eos" or len(result.token_ids) == NEW_TOKENS
        assert all(
            token not in target.generation_config.eos_token_id for token in result.token_ids[:-1]
        )


def test_text_stops_at_the_last_position_of_the_target():
    target = tiny_llama(layers=4, vocab=16)
    limit = target.config.max_position_embeddings
    prompt = [index % 16 for index in range(limit - 3)]
    draft = friendly_module(target, num_stages=2, num_layers=1)
    result = engine_for(target, draft=draft, num_stages=2).decode(prompt)
    assert (len(result.token_ids), result.stop_reason) == (3, "max_length")


# -- sampling; test_sampling.py has every rule and schedule ------------------------------------


def sampling_pair() -> tuple:
    """A target with few tokens and an often accepted draft."""
    target = sampling_target()
    return target, friendly_module(target, num_stages=2, num_layers=1)


SAMPLED_WAYS = [
    {"schedule": "spd", "verifier": "match"},
    {"schedule": "spd", "tree_width": 3},
]
OTHER_WAYS = [
    {"schedule": "spd", "verifier": "gumbel"},
    {"schedule": "spd", "tree_width": 5, "verifier": "match"},
]
CHAIN = {"schedule": "spd", "verifier": "rejection"}


@pytest.mark.parametrize(
    "way", [*SAMPLED_WAYS, *OTHER_WAYS, pytest.param(CHAIN, marks=pytest.mark.all)]
)
def test_sampled_text_has_the_targets_distribution(way):
    assert_sampled_like_the_target(*sampling_pair(), **way)


@pytest.mark.all
@pytest.mark.parametrize("way", [*SAMPLED_WAYS, CHAIN])
def test_many_sampled_texts_have_the_targets_distribution(way):
    assert distribution_p_value(*sampling_pair(), samples=1500, **way) > 1e-3


def test_both_tests_of_sampled_text_catch_the_published_tree_rule(monkeypatch):
    monkeypatch.setitem(RULES, "match", AcceptMostLikelyMutant)
    assert distribution_p_value(*sampling_pair(), verifier="match", samples=120) < 1e-6
    assert unlike_plain_text(*sampling_pair(), verifier="match", samples=50) > 2
