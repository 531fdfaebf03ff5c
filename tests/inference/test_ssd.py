"""SSD prepares the next batch while one is verified; the output equals the target's."""

import math

import pytest
from decode_runs import PROMPTS, SimulatedSource, engine_for, greedy_reference
from tiny_drafts import make_head, noisy_copy
from tiny_models import tiny_llama

from pipedraft.inference.cost_model import CostModel
from pipedraft.inference.shapes import TreeShape

PROMPT = PROMPTS[2]
NUM_STAGES, LENGTH, TOKENS = 4, 3, 24


def decode(acceptance, *, forward=0.05, tokens=TOKENS + 1, schedule="ssd", **settings):
    """Decode with a draft whose second token is accepted wherever the first is rejected."""
    target = tiny_llama(vocab=16)
    settings = {"draft_tokens": LENGTH, **settings} if schedule == "ssd" else settings
    options = {"num_stages": NUM_STAGES, "max_new_tokens": tokens, "schedule": schedule}
    source = SimulatedSource(target, PROMPT, acceptance, length=64)
    engine = engine_for(
        target, source=source, cost=CostModel(draft_forward=forward), **options, **settings
    )
    result = engine.decode(PROMPT)
    assert result.token_ids == greedy_reference(target, PROMPT, tokens)
    return result


def serial_forwards(result):
    return [event[0] * event[1] for event in result.step_log if len(event) == 2]


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("outcomes", [1, 8])
@pytest.mark.parametrize("forward", [0.01, 0.2, 1.0])
def test_the_output_is_the_targets(acceptance, outcomes, forward):
    decode(acceptance, outcomes=outcomes, forward=forward)


def test_a_draft_that_is_always_right_waits_once():
    """A batch of m draft tokens gives m + 1 tokens in n steps, drafted during the one before."""
    result = decode(1.0)
    assert result.num_steps == NUM_STAGES * TOKENS / (LENGTH + 1)
    assert serial_forwards(result) == [LENGTH] and result.round_lengths == [TOKENS]
    expected = result.num_steps / NUM_STAGES + LENGTH * 0.05
    assert result.virtual_time == pytest.approx(expected)


def test_a_right_token_that_was_an_outcome_is_a_hit():
    """Each batch is rejected at once, but the token in its place was prepared for."""
    result = decode(0.0)
    assert result.num_steps == NUM_STAGES * TOKENS
    assert serial_forwards(result) == [LENGTH]


def test_a_verdict_that_was_no_outcome_is_a_miss():
    """Only a rejected first token is prepared for: it seems likelier than full acceptance.

    Each miss is followed by a batch of its own length, drafted while the stages wait.
    """
    result = decode(1.0, outcomes=1, draft_tokens=6)
    assert result.round_lengths == [7, 7, 7, 3]
    assert sum(serial_forwards(result)) == 4 * 6
    shorter = decode(1.0, outcomes=1, draft_tokens=6, fallback_tokens=5)
    assert shorter.round_lengths == [6] * 4
    assert sum(serial_forwards(shorter)) == 4 * 5


def test_a_late_row_of_a_batch_is_worth_more_than_all_probabilities_above_it():
    """For three accepted tokens 0.616 sqrt(0.616^3) exceeds the 0.226 for a rejected one."""
    assert decode(1.0, outcomes=1).round_lengths == [TOKENS]


def test_all_that_is_prepared_fits_beside_a_step():
    """A head's pass over text not yet read counts as one of the four forwards."""
    target = tiny_llama(vocab=16, layers=4)
    cost = CostModel(draft_forward=1 / 16)
    options = {"num_stages": 4, "max_new_tokens": 24, "cost": cost, "schedule": "ssd"}
    result = engine_for(target, draft=make_head(target), **options).decode(PROMPT)
    assert max(event[1] for event in result.step_log if len(event) > 2) == 4


def test_a_slow_draft_prepares_what_there_is_time_for():
    """One forward fits in a step, so n in all: the outcomes, and n - 1 draft tokens below each."""
    result = decode(1.0, forward=0.2, draft_tokens=NUM_STAGES)
    num_batches = 1 + math.ceil((TOKENS - NUM_STAGES - 1) / NUM_STAGES)
    assert result.num_steps == NUM_STAGES * num_batches
    assert serial_forwards(result) == [NUM_STAGES]


def test_real_drafts_prepare_too():
    target = tiny_llama(vocab=16, layers=4)
    drafts = [noisy_copy(target), make_head(target)]
    for draft in drafts:
        for temperature in (0.0, 1.0):
            options = {"num_stages": 4, "max_new_tokens": 16, "temperature": temperature}
            plain = engine_for(target, schedule="autoregressive", **options).decode(PROMPT)
            ours = engine_for(target, draft=draft, schedule="ssd", **options).decode(PROMPT)
            assert ours.token_ids == plain.token_ids


def test_prepared_batches_cost_the_stages_nothing():
    """Only a batch and its root enter; unused batches never do."""
    result = decode(0.5)
    widest = max(max(event[3:]) for event in result.step_log if len(event) > 2)
    assert widest == LENGTH + 1
    assert result.num_drafted > 4 * sum(result.round_lengths)


def test_a_hit_saves_the_drafting_of_a_one_batch_round():
    """Both emit equally many tokens per batch; from the second batch on, drafting costs no time."""
    shared = {"acceptance": 1.0, "forward": 0.1, "tokens": 49}
    ours = decode(**shared)
    theirs = decode(**shared, schedule="eagle", tree=TreeShape(kind="chain", depth=LENGTH))
    assert ours.num_steps == theirs.num_steps
    num_batches = ours.num_steps / NUM_STAGES
    saved = theirs.virtual_time - ours.virtual_time
    assert saved == pytest.approx((num_batches - 1) * LENGTH * 0.1)
