"""Repeats of an evaluation: the same outputs, separate times."""

import eval_runs
import numpy as np
import pytest
from eval_runs import make_prompts, prompt_record
from msgspec import UNSET
from msgspec.structs import replace

from pipedraft.eval.evaluation import EvalMethod, Evaluation
from pipedraft.eval.metrics import repeats_record
from pipedraft.eval.traces import Traces, read_recordings
from pipedraft.files import to_json
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.engine import Engine
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
    return comparison.run([EvalMethod(name="spd", config=config, draft=model.draft)])


def test_repeats_decode_the_same_texts_at_times_of_their_own(model, tmp_path, monkeypatch) -> None:
    once, often = evaluate(model, 1), evaluate(model, REPEATS, tmp_path)
    for single, repeated in zip(once, often, strict=True):
        assert single.repeats is UNSET
        found = repeated.repeats
        assert (found.repeats, found.unequal_turns) == (REPEATS, 0)
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
    monkeypatch.setattr("pipedraft.inference.engine.Engine.decode", None)  # would fail
    monkeypatch.setattr("pipedraft.eval.evaluation.Evaluation._warm_up", lambda *_: None)
    again = evaluate(model, REPEATS, tmp_path)
    kept = [[replace(e, processes=[]) for e in entries] for entries in (often, again)]
    assert to_json(kept[0]) == to_json(kept[1])  # processes are of the last launch
    recordings = read_recordings([tmp_path])  # the repeats say nothing new about steps
    assert [len(recording.turns) for recording in recordings] == [4, 4]


def test_texts_that_differ_between_repeats_are_counted() -> None:
    first = {"a": make_result(5, 1.0), "b": make_result(5, 1.0)}
    second = {"a": make_result(5, 2.0), "b": make_result(5, 1.0, last=7)}
    rows = [
        prompt_record(tokens=5, decode_s_repeats=[1.0, 2.0]),
        prompt_record(tokens=5, decode_s_repeats=[1.0, 1.0]),
    ]
    found = repeats_record(rows, [first, second])
    assert (found.unequal_turns, found.tokens_per_s) == (1, [5.0, 10 / 3])
    assert repeats_record(rows, [first, {"a": first["a"]}]).unequal_turns == 1


def test_methods_decode_a_conversation_in_turn(model, monkeypatch) -> None:
    """A machine that changes its pace slows all methods alike, and the speed-up stays."""
    decoded, right = [], Engine.decode

    def decode(engine, ids, **options):
        decoded.append((engine.config.schedule.name, tuple(ids)))
        return right(engine, ids, **options)

    monkeypatch.setattr(Engine, "decode", decode)
    monkeypatch.setattr(Evaluation, "_warm_up", lambda *_: None)
    runs = evaluate(model, 1)
    in_turn = [("autoregressive", "spd")] * 4
    names, prompts = zip(*decoded, strict=True)
    assert [*zip(names[::2], names[1::2], strict=True)] == in_turn
    assert prompts[::2] == prompts[1::2] and len(set(prompts)) == 4
    rows = [[(row.benchmark, row.id) for row in run.per_prompt] for run in runs]
    assert all(len(set(own)) == len(own) for own in rows)
