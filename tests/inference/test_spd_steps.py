"""SPD with several tokens per step: the head's rows, the steps, the target's output."""

import numpy as np
import pytest
import torch
from decode_runs import PROMPTS, engine_for, simulate
from scipy.stats import chisquare
from spd_runs import decode_like_training
from tiny_drafts import make_module
from tiny_models import tiny_llama

from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.cost_model import CostModel, continuous_acceptance_length
from pipedraft.models.heads.configs import SPDConfig
from pipedraft.models.heads.spd import feature_layers
from pipedraft.train.spd import sample_occupancy


@pytest.mark.parametrize("acceptance", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("width", [1, 2])
def test_text_is_the_targets_at_every_acceptance(acceptance, width):
    target = tiny_llama(layers=4, vocab=16)
    for prompt in PROMPTS[1:3]:
        simulate(target, prompt, acceptance, schedule="spd", tree_width=width, tokens_per_step=2)


# -- what the head reads --------------------------------------------------------------------


def test_tokens_that_enter_together_have_the_same_depth():
    config = SPDConfig(num_stages=2, num_target_layers=8, tokens_per_step=2)
    # Before the second forward of a step the newest three have not entered.
    assert config.max_in_flight == 5
    embedding, half, whole = (0,), (0, 2, 4), (0, 4, 8)
    assert feature_layers(config) == [embedding, embedding, embedding, half, half, whole]


@pytest.mark.parametrize("query", ["newest", "all"])
@pytest.mark.parametrize("features", [{}, {"features": "anchors", "anchors": (4, 8)}])
def test_a_module_decodes_the_rows_it_was_trained_on(features, query):
    fills = decode_like_training(query=query, tokens_per_step=2, **features)
    assert fills >= {1, 2, 3, 4} and max(fills) <= 9


@pytest.mark.parametrize("mutant", [{"shallower": 1}, {"more": 1}], ids=["less deep", "fuller"])
def test_the_comparison_notices_other_training_rows(mutant):
    with pytest.raises(AssertionError, match="not close"):
        decode_like_training(mutant, tokens_per_step=2)


def test_half_of_the_training_examples_have_a_full_pipeline():
    draws = sample_occupancy(40_000, 9, 0.5, torch.Generator().manual_seed(0), 2)
    counts = [draws.count(occupancy) for occupancy in range(1, 10)]
    assert chisquare(counts, [20_000 / 7] * 7 + [10_000] * 2).pvalue > 1e-3
    assert set(sample_occupancy(99, 3, 0.5, torch.Generator().manual_seed(0), 2)) == {1, 2, 3}


# -- steps and time -------------------------------------------------------------------------


def test_every_further_step_of_a_round_brings_as_many_tokens():
    target = tiny_llama(layers=4, vocab=16)
    settings = {"schedule": "spd", "tokens_per_step": 3, "max_new_tokens": 60}
    result = simulate(target, [1, 2, 3], 0.8, **settings)
    assert max(result.round_lengths) > 4
    assert result.num_steps == sum(4 - (1 - tokens) // 3 for tokens in result.round_lengths)
    assert result.num_draft_forwards == 3 * result.num_steps


def test_forwards_that_do_not_fit_beside_a_stage_cost_time():
    target = tiny_llama(layers=4, vocab=16)
    speedups = []
    for forward in (0.125, 0.25):  # of a target pass; a stage takes a quarter
        settings = {"schedule": "spd", "tokens_per_step": 2, "max_new_tokens": 41}
        cost = CostModel(draft_forward=forward)
        result = simulate(target, [1, 2, 3], 1.0, cost=cost, **settings)
        speedups.append(result.virtual_time_autoregressive / result.virtual_time)
    length = 4 * 40 / (4 + 20)
    assert speedups == pytest.approx([length, length / 2])


@pytest.mark.parametrize("rates", [[0.7], [0.5, 0.8], [0.9, 0.6, 0.3, 0.7]])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_expected_length_is_that_of_random_rounds(rates, count):
    rng, lengths = np.random.default_rng(0), []
    for _ in range(20_000):
        length = 1
        while rng.random() < rates[min(length, len(rates)) - 1]:
            length += 1
        lengths.append(length)
    rounds = np.array(lengths)
    steps = 4 - (1 - rounds) // count
    expected = continuous_acceptance_length(rates, 4, count)
    assert expected == pytest.approx(4 * rounds.sum() / steps.sum(), rel=0.02)
    assert continuous_acceptance_length([1.0], 4, count) == 4 * count


# -- refusals -------------------------------------------------------------------------------


def test_module_and_schedule_have_the_same_number():
    target = tiny_llama(layers=4, vocab=16)
    module = make_module(target, num_stages=2, num_layers=1, tokens_per_step=2).float()
    for way in ({"schedule": "spd"}, {"schedule": "pipedec"}):
        with pytest.raises(ValueError, match=r"^tokens_per_step: 1, .* --tokens-per-step 2"):
            engine_for(target, draft=module, num_stages=2, **way)
    with pytest.raises(ValueError, match="^model.tokens_per_step: 9; .* at most 8"):
        SPDConfig(num_stages=2, num_target_layers=8, tokens_per_step=9)
    late = {"timing": "output_states", "tokens_per_step": 2}
    with pytest.raises(ValueError, match="^model.tokens_per_step: 2; .* at most 1"):
        SPDConfig(num_stages=2, num_target_layers=4, **late)
    with pytest.raises(ValueError, match=r"tokens_per_step: 2 with timing"):
        DecodeConfig.of("spd", **late)
    with pytest.raises(ValueError, match=r"tokens_per_step: 0; give at least 1"):
        DecodeConfig.of("spd", tokens_per_step=0)
