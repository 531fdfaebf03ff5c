"""Repeats of an evaluation: the same texts, times of their own, components in the report."""

import itertools

import eval_runs
import numpy as np
import pytest
from eval_runs import make_prompts, prompt_record
from msgspec import UNSET
from msgspec.structs import replace

from pipedraft.eval.metrics import AUTOREGRESSIVE, decode_seconds, repeats_record
from pipedraft.eval.record import RepeatsRecord
from pipedraft.eval.run import Evaluation, Method
from pipedraft.eval.traces import Traces, read_recordings
from pipedraft.files import to_json
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.result import DecodeResult

REPEATS = 3
model = eval_runs.model


def make_result(tokens: int, seconds: float, last: int = 0) -> DecodeResult:
    times = np.linspace(0.5, 0.5 + seconds, tokens + 1).tolist()
    return DecodeResult([1], [*[0] * tokens, last], "", "eos", 4, num_steps=9, token_times_s=times)


def evaluate(model, repeats: int, folder=None, temperature: float = 1.0) -> list[dict]:
    prompts = {
        name: make_prompts(name, *([f"{name} {i}"] for i in range(2))) for name in ("one", "two")
    }
    config = DecodeConfig.of(
        schedule="spd", num_stages=2, max_new_tokens=8, temperature=temperature
    )
    comparison = Evaluation(
        target=model.target,
        tokenizer=model.tokenizer,
        benchmarks=prompts,
        reference=None,
        repeats=repeats,
        traces=Traces(folder, {"target": "tiny"}),
    )
    return comparison.run([Method(name="spd", config=config, draft=model.draft)])


def test_repeats_decode_the_same_texts_at_times_of_their_own(model, tmp_path, monkeypatch) -> None:
    once, often = evaluate(model, 1), evaluate(model, REPEATS, tmp_path)
    for single, repeated in zip(once, often, strict=True):
        assert single.repeats is UNSET
        found = repeated.repeats
        assert (found.repeats, found.unequal_turns) == (REPEATS, 0)
        assert found.num_prompts == repeated.prompts
        for key in ("tokens", "steps", "position_tests", "equivalent_acceptance_length"):
            assert getattr(repeated, key) == getattr(single, key)
        rows = repeated.per_prompt
        seconds = np.array([row.decode_s_repeats for row in rows])
        assert seconds.shape == (repeated.prompts, REPEATS)
        assert len(np.unique(seconds)) == seconds.size
        np.testing.assert_allclose(seconds.mean(1), [row.decode_s for row in rows])
        speed = repeated.tokens / seconds.mean(1).sum()
        assert repeated.wallclock.tokens_per_s == pytest.approx(speed)
        pooled = repeated.tokens / seconds.sum(0)
        assert found.tokens_per_s == pytest.approx(pooled.tolist())
        assert 0 <= found.repeat_share <= 1
    monkeypatch.setattr("pipedraft.inference.engine.Engine.decode", None)  # would fail
    monkeypatch.setattr("pipedraft.eval.run.Evaluation._warm_up", lambda *_: None)
    again = evaluate(model, REPEATS, tmp_path)
    kept = [[replace(e, processes=[]) for e in entries] for entries in (often, again)]
    assert to_json(kept[0]) == to_json(kept[1])  # processes are of the last launch
    recordings = read_recordings([tmp_path])  # the repeats say nothing new of steps
    assert [len(recording.turns) for recording in recordings] == [4, 4]


def test_overall_has_the_prompts_of_all_benchmarks(model) -> None:
    entries = evaluate(model, 2)
    methods = itertools.groupby(entries, key=lambda entry: entry.method)
    for name, group in methods:
        one, two, overall = group
        assert overall.repeats.num_prompts == 4, name
        assert overall.per_prompt == one.per_prompt + two.per_prompt
    assert entries[0].method == AUTOREGRESSIVE


def test_a_slow_repeat_and_a_noisy_machine_are_told_apart() -> None:
    """Tokens/s of prompt p in repeat m: 100 + 10 p, 20 less in the last repeat."""
    speeds = [[100 + 10 * p - 20 * (m == 2) for p in range(4)] for m in range(REPEATS)]
    repeats = [
        {(p, 0): make_result(50, 50 / speed) for p, speed in enumerate(row)} for row in speeds
    ]
    seconds = [{p: decode_seconds(r) for (p, _), r in turns.items()} for turns in repeats]
    rows = [prompt_record(tokens=50, decode_s_repeats=[s[p] for s in seconds]) for p in range(4)]
    found = repeats_record(rows, repeats)
    assert found.residual == pytest.approx(0, abs=1e-9)
    assert found.between_repeats == pytest.approx(400 / 3)
    assert found.between_prompts == pytest.approx(np.var([0, 10, 20, 30], ddof=1))
    assert found.tokens_per_s[2] < found.tokens_per_s[0] == found.tokens_per_s[1]


def test_texts_that_differ_between_repeats_are_counted() -> None:
    first = {"a": make_result(5, 1.0), "b": make_result(5, 1.0)}
    second = {"a": make_result(5, 2.0), "b": make_result(5, 1.0, last=7)}
    rows = [
        prompt_record(tokens=5, decode_s_repeats=[1.0, 2.0]),
        prompt_record(tokens=5, decode_s_repeats=[1.0, 1.0]),
    ]
    assert repeats_record(rows, [first, second]).unequal_turns == 1
    assert repeats_record(rows, [first, {"a": first["a"]}]).unequal_turns == 1


def test_a_single_prompt_has_no_components() -> None:
    turns = {"a": make_result(5, 1.0)}
    rows = [prompt_record(tokens=5, decode_s_repeats=[1.0, 1.0])]
    assert repeats_record(rows, [turns, turns]) == RepeatsRecord(
        repeats=2, unequal_turns=0, tokens_per_s=[5.0, 5.0]
    )
