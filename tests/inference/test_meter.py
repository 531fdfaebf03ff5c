"""Never slower: the cost of the meter's trials, and exact outputs whatever it chooses."""

import random

import pytest
from decode_runs import (
    CHAIN,
    NEW_TOKENS,
    PROMPTS,
    SMALL,
    WAYS,
    assert_sampled_like_the_target,
    attentive_llama,
    decode_exactly,
    distribution_p_value,
    engine_for,
    sampling_target,
    simulate,
    unlike_plain_text,
    way_name,
)
from several_runs import decode_several
from tiny_drafts import make_head
from tiny_models import tiny_qwen3

from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.meter import PARTS, BatchMeter, DraftMeter
from pipedraft.inference.session import Session

OTHERS = [{"schedule": "spd"}, {"schedule": "pipeinfer"}]


def run_rounds(rounds, total, hiccup=0.0):
    """Time relative to the best part alone; ``rounds``: part -> (tokens, time)."""
    rng, meter, now, tokens = random.Random(0), DraftMeter(), 0.0, 0
    meter.begin(0.0)
    used = dict.fromkeys(PARTS, 0)
    while tokens < total:
        count, time = rounds[meter.part]
        now += time * (20 if rng.random() < hiccup else 1)
        tokens, used[meter.part] = tokens + count, used[meter.part] + count
        meter.count(count, now)
        meter.choose()
    best = min(rounds, key=lambda part: rounds[part][1] / rounds[part][0])
    assert used[best] > 0.9 * tokens
    return now / (tokens * rounds[best][1] / rounds[best][0])


@pytest.mark.parametrize(
    ("full", "half", "most"),
    [
        ((1, 1.5), (1, 1.3), 1.03),  # always rejected
        ((1, 3.0), (1, 2.0), 1.03),
        ((2, 1.9), (2, 1.4), 1.03),  # half accepted: a shorter draft makes as many tokens
        ((4, 1.5), (3, 1.4), 1.02),  # good
        ((8, 1.2), (4, 1.1), 1.02),
    ],
)
def test_trials_of_other_parts_cost_what_was_budgeted(full, half, most):
    rounds = {1.0: full, 0.5: half, 0.0: (1, 1.0)}
    assert run_rounds(rounds, 3_000) < most


def test_a_hiccup_while_drafting_is_no_verdict():
    rounds = {1.0: (4, 1.5), 0.5: (3, 1.4), 0.0: (1, 1.0)}
    assert run_rounds(rounds, 8_000, hiccup=0.01) > 1, "a good draft was in use nearly always"


STEPS = {
    1: {1.0: (4, 1.5), 0.5: (3, 1.4), 0.0: (1, 1.0)},
    16: {1.0: (64, 9.0), 0.5: (48, 6.0), 0.0: (16, 1.5)},
}
"""Sequences -> part -> tokens and time of a step: drafts pay for one sequence, not for sixteen."""


def run_steps(meter, loads):
    """Time relative to the best part, for each number of sequences."""
    tokens, times, drafted = dict.fromkeys(STEPS, 0), dict.fromkeys(STEPS, 0.0), meter.part
    for load in loads:
        count, time = STEPS[load][drafted]
        for _ in range(load):
            meter.count(count // load, 0.0)
        tokens[load], times[load] = tokens[load] + count, times[load] + time
        # Sequences choose before the step ends: the next step verifies what they draft now.
        drafted = meter.part
        meter.end_step(time, load, has_prompt_rows=False)
    best = {load: max(n / t for n, t in steps.values()) for load, steps in STEPS.items()}
    return [times[load] * best[load] / tokens[load] for load in STEPS if tokens[load]]


def test_each_number_of_sequences_has_its_own_choice():
    loads = [load for _ in range(20) for load in STEPS for _ in range(200)]
    assert max(run_steps(BatchMeter(), loads)) < 1.04


def test_a_request_in_place_of_one_that_ended_changes_nothing():
    meter = BatchMeter()
    run_steps(meter, [16] * 200)
    assert meter.part == 0
    for load in [1, 1, 16] * 20:
        meter.count(load, 0.0)
        meter.end_step(1.5, load, has_prompt_rows=load > 1)
        assert meter.part == 0
    run_steps(meter, [1] * 100)
    assert meter.part == 1


def test_one_choice_for_all_numbers_of_sequences_would_be_slower(monkeypatch):
    monkeypatch.setattr(BatchMeter, "_of", lambda self, power: one)
    one = DraftMeter()
    loads = [load for _ in range(20) for load in STEPS for _ in range(200)]
    assert max(run_steps(BatchMeter(), loads)) > 1.1


class Shuffled(DraftMeter):
    """Chooses another part after every round."""

    chosen: list[float] = []

    def choose(self) -> float:
        self.part = (0.0, 1.0, 0.5)[len(self.chosen) % 3]
        self.chosen.append(self.part)
        return self.part


@pytest.fixture
def shuffled(monkeypatch):
    monkeypatch.setattr(Shuffled, "chosen", [])
    monkeypatch.setattr("pipedraft.inference.engine.DraftMeter", Shuffled)
    # Meters made by a BatchMeter, too.
    monkeypatch.setattr("pipedraft.inference.meter.DraftMeter", Shuffled)


@pytest.mark.parametrize("way", [*WAYS, *OTHERS], ids=way_name)
def test_text_is_the_targets_whatever_part_is_drafted(shuffled, way):
    simulate(attentive_llama(8, vocab=16), PROMPTS[2], 0.6, never_slower=True, **way)
    assert Shuffled.chosen[:1] == [0]


TREES = {"schedule": "eagle", "tree": SMALL, "never_slower": True}
CHAINS = {**TREES, "tree": CHAIN, "verifier": "rejection"}


@pytest.mark.parametrize("way", [TREES, CHAINS], ids=way_name)
def test_sampled_text_has_the_targets_law_whatever_part_is_drafted(shuffled, way):
    target = sampling_target()
    assert_sampled_like_the_target(target, make_head(target), **way)
    assert {0.0, 0.5, 1.0} == {*Shuffled.chosen}


def test_both_tests_of_sampled_text_catch_a_token_changed_with_a_part(shuffled, monkeypatch):
    emit = Session._emit

    def mutant(session, token, accepted, logits_V):
        is_wrong = accepted and session.part != 1
        emit(session, 0 if is_wrong else token, accepted, logits_V)

    monkeypatch.setattr(Session, "_emit", mutant)
    target = sampling_target()
    assert unlike_plain_text(target, make_head(target), verifier="gumbel", **TREES) > 2
    assert distribution_p_value(target, make_head(target), **CHAINS) < 1e-6


@pytest.mark.parametrize("schedule", ["flowspec", "pipedec", "eagle", "ssd"])
def test_a_head_that_was_paused_catches_up(shuffled, schedule):
    target = tiny_qwen3(vocab=16)
    tree = {} if schedule in ("pipedec", "ssd") else {"tree": SMALL}
    way = {"schedule": schedule, "num_stages": 3, "max_new_tokens": NEW_TOKENS, **tree}
    draft = make_head(target, "eagle3")
    result = decode_exactly(engine_for(target, draft=draft, never_slower=True, **way), PROMPTS[1])
    assert 0 in Shuffled.chosen and result.num_drafted > 0


def test_several_sequences_share_the_meter_and_keep_their_texts(shuffled):
    target = tiny_qwen3(vocab=64)
    draft, texts = make_head(target, "eagle"), []
    for is_on in (True, False):
        way = {"num_stages": 2, "max_new_tokens": 6, "tree": SMALL, "never_slower": is_on}
        asked = [(prompt, DecodeConfig.of("eagle", **way), 0) for prompt in PROMPTS[:3]]
        _, handles = decode_several(target, draft, 2, asked)
        texts.append([handle.token_ids for handle in handles])
    assert texts[0] == texts[1] and {0.0, 0.5, 1.0} <= {*Shuffled.chosen}


def test_several_sequences_would_show_a_token_changed_with_a_part(shuffled, monkeypatch):
    emit = Session._emit

    def mutant(session, token, accepted, logits_V):
        emit(session, 0 if accepted and session.part != 1 else token, accepted, logits_V)

    monkeypatch.setattr(Session, "_emit", mutant)
    with pytest.raises(AssertionError):
        test_several_sequences_share_the_meter_and_keep_their_texts(None)


def test_off_means_no_meter():
    target = tiny_qwen3(vocab=16)
    engine = engine_for(target, draft=make_head(target, "eagle"), schedule="eagle", num_stages=2)
    assert engine.meter is None
