"""Targets whose rotary tables follow the text's length, decoded across that length."""

from itertools import product

import pytest
from decode_runs import SMALL, SimulatedSource, engine_for
from inline_ranks import connect_in_turns, connect_inline
from rotary_runs import FIRST, LENGTH, ORIGINAL, PROMPTS, QUICK, TARGETS, expected_of, target_of
from several_runs import decode_several
from staged_targets import random_ids

from pipedraft.eval.lossless import generate_greedy
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.pipelines.local import LocalPipeline
from pipedraft.models import target as target_module
from pipedraft.models.target import StagedTarget
from pipedraft.models.transformer.rotary_lengths import FollowingTable, recompute_length

WAYS = {
    "autoregressive": {},
    "eagle": {"tree": SMALL},
    "pruned_pp": {"tree": SMALL},
    "naive_pp": {"tree": SMALL},
    "spd": {"tree_width": 2},
    "flowspec": {"tree": SMALL},
    "flowspec_continued": {},
    "pipedec": {"tree_width": 3},
    "ppsd": {},
    "pipeinfer": {"branches": 2},
    "ssd": {"draft_tokens": 3},
}


FEW = ("autoregressive", "eagle")


def test_the_reference_does_not_depend_on_earlier_prompts():
    model, prompt = target_of("qwen3_dynamic"), PROMPTS["is longer"]
    first = generate_greedy(model, prompt, max_new_tokens=12)
    generate_greedy(model, random_ids(80).tolist(), max_new_tokens=2)
    assert generate_greedy(model, prompt, max_new_tokens=12) == first


def engine_of(name: str, schedule: str, prompt: list[int], **more):
    model, text = target_of(name), [*prompt, *expected_of(name, tuple(prompt))]
    source = SimulatedSource(model, prompt, 0.8, text=text)
    options = {"num_stages": 3, "max_new_tokens": LENGTH} | WAYS[schedule] | more
    return engine_for(model, source=source, schedule=schedule, **options)


def wrong_ways(name: str, prompts=PROMPTS, ways=WAYS, **more) -> list[tuple[str, str]]:
    """Return the schedules and prompts whose text is not that of `generate`."""
    wrong = []
    for which, schedule in product(prompts, ways):
        prompt = PROMPTS[which]
        found = engine_of(name, schedule, prompt, **more).decode(prompt).token_ids
        if found != expected_of(name, tuple(prompt))[:LENGTH]:
            wrong.append((which, schedule))
    return wrong


@pytest.mark.parametrize("name", QUICK)
def test_every_schedule_crosses_as_generate_does(name):
    assert not wrong_ways(name, list(PROMPTS)[:1])
    assert not wrong_ways(name, list(PROMPTS)[1:], FEW)


@pytest.mark.all
@pytest.mark.parametrize("name", TARGETS)
def test_every_schedule_crosses_from_every_prompt(name):
    assert not wrong_ways(name)


@pytest.mark.parametrize("name", FIRST)
def test_stage_processes_cross_as_generate_does(name):
    for connect in (connect_inline, connect_in_turns):
        assert not wrong_ways(name, list(PROMPTS)[:2], ("spd", "eagle"), connect=connect)


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize("connect", [LocalPipeline, connect_inline])
def test_several_sequences_cross_in_one_pipeline(name, connect):
    config = DecodeConfig.of(schedule="autoregressive", num_stages=2, max_new_tokens=LENGTH)
    asked = [(prompt, config, 0) for prompt in PROMPTS.values()]
    _, handles = decode_several(target_of(name), None, 2, asked, connect=connect)
    for handle, prompt in zip(handles, PROMPTS.values(), strict=True):
        assert handle.future.result(0).token_ids == expected_of(name, tuple(prompt))[:LENGTH]


def test_a_text_without_new_rows_at_the_crossing_is_noticed(monkeypatch):
    assert recompute_length(target_of("phi3")) == ORIGINAL + 1
    assert recompute_length(target_of("llama_longrope")) is None
    monkeypatch.setattr(target_module, "recompute_length", lambda model: None)
    assert wrong_ways("phi3", list(PROMPTS)[:1], FEW)


def test_rows_that_turn_by_the_longest_of_their_pass_are_noticed(monkeypatch):
    def by_the_longest(self, rows, ids, kind, length):
        return self._turn(rows, ids, kind, int(ids.max()) + 1)

    monkeypatch.setattr(FollowingTable, "__call__", by_the_longest)
    assert wrong_ways("qwen3_dynamic", list(PROMPTS)[:1], ["eagle"])


def test_a_dynamic_table_reaches_as_far_as_its_factor():
    assert StagedTarget(target_of("qwen3_dynamic"), 2).max_positions == 4 * ORIGINAL
