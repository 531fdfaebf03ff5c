"""Defaults: a measured shape where times are real, the paper's where steps are counted."""

import random

import pytest
from decode_runs import PROMPTS, decode_exactly, engine_for
from tiny_drafts import make_head
from tiny_models import REPOSITORY, tiny_qwen3

import pipedraft
from pipedraft.inference.auto_tree import FIRST, SHAPES, ShapeMeter
from pipedraft.inference.command import load_engine
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.decode_options import DecodeOptions
from pipedraft.inference.defaults import (
    AUTO,
    choose_way,
    fastest,
    measure_shape,
    pipeline_note,
    with_shape,
)
from pipedraft.inference.schedules.eagle import EagleSchedule
from pipedraft.inference.session import Session
from pipedraft.inference.shapes import NO_DRAFT, PAPER, TreeShape

EAGLE = {"draft_type": "eagle3", "schedule": None, "num_stages": 1, "settings": {}}


@pytest.mark.parametrize(
    "given, schedule, is_measured",
    [
        ({}, "eagle", True),
        ({"schedule": "eagle"}, "eagle", True),
        ({"num_stages": 4, "in_processes": True}, "eagle", True),
        ({"num_stages": 4, "in_processes": True, "schedule": "eagle"}, "eagle", False),
        ({"num_stages": 4}, "eagle", False),
        ({"settings": {"tree": "paper"}}, "eagle", False),
        ({"settings": {"verifier": "traversal"}}, "eagle", False),
        ({"schedule": "flowspec", "num_stages": 4}, "flowspec", False),
        ({"draft_type": None}, "autoregressive", False),
        ({"draft_type": "spd", "num_stages": 4}, "spd", False),
        ({"draft_type": "language_model"}, "eagle", True),
        ({"draft_type": "language_model", "settings": {"accept": 0.1}}, "pipeinfer", False),
        ({"draft_type": "language_model", "num_stages": 4}, "pipeinfer", False),
    ],
)
def test_a_shape_is_measured_only_where_nothing_is_asked_for(given, schedule, is_measured):
    way = choose_way(**EAGLE | given)
    assert (way.schedule, way.is_measured) == (schedule, is_measured)
    assert (way.settings.get("tree") == AUTO) == is_measured


def test_the_papers_tree_has_a_name_and_the_first_draft_is_a_chain():
    assert TreeShape.parse("paper") == TreeShape() == EagleSchedule().tree
    assert TreeShape.parse("paper").label == PAPER and PAPER in SHAPES
    assert ShapeMeter().shape == FIRST == TreeShape(kind="chain", depth=3)
    with pytest.raises(ValueError, match="'chain:0' is no tree; give auto, paper"):
        TreeShape.parse("chain:0")
    with pytest.raises(ValueError, match="a chain of 0 drafts nothing"):
        DecodeConfig.of("eagle", tree=NO_DRAFT)


@pytest.mark.parametrize(
    "head, given, num_stages",
    [
        ("eagle3", {}, 1),
        ("eagle3", {"tree": "paper"}, 1),
        ("eagle3", {"stages": 4}, 4),
        ("spd_n4", {}, 4),
    ],
)
def test_commands_and_python_decide_alike(head, given, num_stages):
    place = str(REPOSITORY / "assets" / "heads" / head)
    settings = {name: value for name, value in given.items() if name != "stages"}
    words = {"checkpoint": place, "prompt": "x", "stages": given.get("stages")}
    options = DecodeOptions(**words, settings=settings)
    engine = load_engine(options, None, options.decode_settings())
    model = pipedraft.load(str(REPOSITORY / "assets" / "target"), draft=place)
    config = model.configure({}, **given)
    assert config.schedule == engine.config.schedule
    assert config.num_stages == engine.config.num_stages == num_stages
    note = pipeline_note(options, engine.config)
    assert ("one process runs the 4 stages" in note) == (head == "spd_n4")


def time_rounds(meter: ShapeMeter, acceptance: float, num_tokens: int) -> tuple[float, int]:
    """Return the time for at least these tokens, in rounds without a draft, and their number."""
    rng, total, tokens = random.Random(0), 0.0, 0
    while tokens < num_tokens:
        shape, length = meter.shape, 1
        while length <= shape.depth and rng.random() < acceptance:
            length += 1
        time = 1 + 0.1 * shape.depth + 0.05 * shape.most
        meter.count(shape, length, time)
        total, tokens = total + time, tokens + length
    return total, tokens


def test_a_useless_draft_costs_little_more_than_none():
    time, tokens = time_rounds(ShapeMeter(), acceptance=0.0, num_tokens=500)
    assert time < 1.02 * tokens
    time, tokens = time_rounds(ShapeMeter(), acceptance=0.8, num_tokens=500)
    assert time < 0.75 * tokens


def test_shapes_in_turn_are_compared_with_no_draft():
    meter = ShapeMeter(in_turn=True)
    time_rounds(meter, acceptance=0.0, num_tokens=60)
    found = fastest(meter)
    assert found is not None and not found.pays and found.shape.label == "chain:1"
    assert next(iter(found.tokens_per_s)) == "none" and "slower than none" in found.told
    meter = ShapeMeter(in_turn=True)
    time_rounds(meter, acceptance=0.9, num_tokens=200)
    found = fastest(meter)
    assert found is not None and found.pays and found.shape.is_chain and found.shape.depth > 2
    assert fastest(ShapeMeter()) is None


@pytest.mark.parametrize("is_wrong", [False, True])
def test_measured_rounds_and_the_chosen_shape_keep_the_targets_text(is_wrong, monkeypatch):
    """The known-bad session emits another token where a round had no draft."""
    target = tiny_qwen3(vocab=64)
    way = choose_way(**EAGLE)
    options = {"num_stages": 1, "max_new_tokens": 40, **way.settings}
    engine = engine_for(target, draft=make_head(target, "eagle3"), schedule="eagle", **options)
    emit = Session._emit

    def mutant(session, token, *rest):
        emit(session, (token + (session._shape == NO_DRAFT)) % 64, *rest)

    if is_wrong:
        monkeypatch.setattr(Session, "_emit", mutant)
        with pytest.raises(AssertionError):
            decode_exactly(engine, PROMPTS[1])
        return
    decode_exactly(engine, PROMPTS[1])
    assert engine.shapes.speeds.keys() >= {FIRST.label, NO_DRAFT.label}
    found = measure_shape(engine, [PROMPTS[1]])
    assert found is not None and found.tokens_per_s.keys() > {"chain:1", "none"}
    engine.config = with_shape(engine.config, found.shape)
    decode_exactly(engine, PROMPTS[2])
