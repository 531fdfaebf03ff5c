"""``--tree auto``: its trials' cost, and exact outputs with any chosen shape."""

import random
import statistics
from collections import Counter

import pytest
from decode_runs import (
    NEW_TOKENS,
    PROMPTS,
    attentive_llama,
    decode_exactly,
    engine_for,
    simulate,
)
from several_runs import decode_several
from tiny_drafts import make_head
from tiny_models import tiny_qwen3

from pipedraft.inference.auto_tree import SHAPES, ShapeMeter
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.session import Session
from pipedraft.inference.shapes import TreeShape

AUTO = {"schedule": "eagle", "tree": TreeShape.parse("auto")}
PARSED = list(SHAPES.values())
TIMES = {
    "costly tokens": lambda shape: 1 + 0.12 * shape.most + 0.06 * shape.depth,
    "cheap tokens": lambda shape: 1 + 0.01 * shape.most + 0.05 * shape.depth,
    "steps": lambda shape: (
        (1.1 if shape.most < 3 else 1.6 + 0.05 * shape.most) + 0.08 * shape.depth
    ),
}
"""Time per round on simulated machines."""


def rates(shape, acceptance, gain):
    """Acceptance by level; a tree's siblings raise it."""
    last = [acceptance[-1]] * shape.depth
    own = [*acceptance, *last][: shape.depth]
    return own if shape.is_chain else [min(1.0, rate * gain) for rate in own]


def expected_tokens(own):
    tokens = reached = 1.0
    for rate in own:
        reached *= rate
        tokens += reached
    return tokens


@pytest.mark.parametrize("machine", TIMES)
@pytest.mark.parametrize(
    "acceptance", [(0.3,), (0.55, 0.5, 0.45), (0.7, 0.6, 0.5), (0.9,)], ids=str
)
def test_trials_cost_little_beside_the_best_chain(acceptance, machine):
    """Compare the used shapes' expected time per token with the best chain's, over ten runs."""
    time_of, gain, used = TIMES[machine], 1.15, Counter()
    for seed in range(10):
        rng, meter, tokens = random.Random(seed), ShapeMeter(), 0
        while tokens < 3_000:
            shape, length = meter.shape, 1
            for rate in rates(shape, acceptance, gain):
                if rng.random() > rate:
                    break
                length += 1
            noise = (1 + 0.05 * rng.random()) * (10 if rng.random() < 0.005 else 1)
            meter.count(shape, length, time_of(shape) * noise)
            tokens, used[shape.label] = tokens + length, used[shape.label] + 1
    own = {shape.label: expected_tokens(rates(shape, acceptance, gain)) for shape in PARSED}
    times = {shape.label: time_of(shape) for shape in PARSED}
    best = min(times[text] / own[text] for text in own if text.startswith("chain"))
    spent = sum(count * times[text] for text, count in used.items())
    assert spent <= 1.02 * best * sum(count * own[text] for text, count in used.items())


def test_a_machine_that_changes_changes_the_shape():
    meter = ShapeMeter()
    for now, name in enumerate(("steps", "cheap tokens")):
        for _ in range(4_000):
            shape = meter.shape
            meter.count(shape, 1 + shape.depth, TIMES[name](shape))
        assert (meter.shape.most > 2) or not now


class Shuffled(ShapeMeter):
    """Chooses another shape after every round."""

    chosen: list[TreeShape] = []

    @property
    def shape(self):
        self.chosen.append(PARSED[len(self.chosen) % len(PARSED)])
        return self.chosen[-1]


@pytest.fixture
def shuffled(monkeypatch):
    monkeypatch.setattr(Shuffled, "chosen", [])
    for module in ("engine", "batch"):
        monkeypatch.setattr(f"pipedraft.inference.{module}.ShapeMeter", Shuffled)


@pytest.mark.parametrize("schedule", ["eagle", "naive_pp"])
def test_greedy_text_is_the_targets_whatever_is_drafted(shuffled, schedule):
    simulate(attentive_llama(8, vocab=16), PROMPTS[2], 0.6, **{**AUTO, "schedule": schedule})
    assert len(Shuffled.chosen) > 2


def test_a_token_changed_with_a_shape_is_caught(shuffled, monkeypatch):
    emit = Session._emit

    def mutant(session, token, accepted, logits_V):
        is_wrong = accepted and session._shape == TreeShape.parse("chain:1")
        emit(session, (token + 1) % 16 if is_wrong else token, accepted, logits_V)

    monkeypatch.setattr(Session, "_emit", mutant)
    with pytest.raises(AssertionError):
        simulate(attentive_llama(8, vocab=16), PROMPTS[2], 0.6, **AUTO)


def test_real_rounds_are_timed():
    target = tiny_qwen3(vocab=16)
    way = {**AUTO, "num_stages": 1, "max_new_tokens": NEW_TOKENS}
    engine = engine_for(target, draft=make_head(target, "eagle3"), **way)
    result = decode_exactly(engine, PROMPTS[1])
    assert engine.shapes._total > 0 and result.num_drafted > 0


def test_several_sequences_share_the_meter_and_keep_their_texts(shuffled):
    target = tiny_qwen3(vocab=64)
    draft, texts = make_head(target, "eagle"), []
    for tree in ("auto", "chain:2"):
        way = {"num_stages": 2, "max_new_tokens": 6, "tree": TreeShape.parse(tree)}
        asked = [(prompt, DecodeConfig.of("eagle", **way), 0) for prompt in PROMPTS[:3]]
        _, handles = decode_several(target, draft, 2, asked)
        texts.append([handle.token_ids for handle in handles])
    assert texts[0] == texts[1] and Shuffled.chosen


def test_schedules_without_rounds_refuse_it():
    with pytest.raises(ValueError, match="tree: auto with schedule 'flowspec'.*eagle or naive_pp"):
        DecodeConfig.of("flowspec", tree=TreeShape.parse("auto"))
    assert TreeShape.parse("auto").label == "auto"


@pytest.mark.parametrize("time_of", [None, max, statistics.fmean])
def test_a_first_round_may_capture_graphs(monkeypatch, time_of):
    """Known-bad meters let a slow round decide, and shut the shape out."""
    if time_of is not None:
        monkeypatch.setattr(ShapeMeter, "_time", lambda self, text: time_of(self._times[text]))
    meter, drafted = ShapeMeter(), Counter()
    for _ in range(300):
        shape = meter.shape
        slow = 20.0 if shape.depth == 6 and not drafted[shape.label] else 0.0
        drafted[shape.label] += 1
        meter.count(shape, 1 + shape.depth, 1 + 0.05 * shape.most + slow)
    assert (meter.shape.depth == 6) == (time_of is None)


def test_rounds_of_sequences_that_are_behind_are_charged():
    meter, slow = ShapeMeter(), TreeShape.parse("chain:3")
    for _ in range(5):
        meter.count(TreeShape.parse("chain:1"), 2, 1.0)
        meter.count(slow, 1, 3.0)
    charged = meter._due[slow.label] - meter._total
    meter.count(slow, 1, 3.0)
    assert meter._due[slow.label] - meter._total > charged
