"""Replay: a recorded run priced by another cost model equals a run under it, or is refused."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
from decode_runs import SMALL, PlainTokenizer
from eval_runs import assert_refused, first_layer, make_prompts, status
from tiny_models import byte_tokenizer, tiny_llama

from pipedraft.eval.evaluation import EvalMethod, Evaluation, recorded_draft
from pipedraft.eval.replay import Hardware, NotReplayable, best_of, replay, speedups_by_row
from pipedraft.eval.tables import row_cost_table
from pipedraft.eval.traces import Recording, Traces, read_recordings
from pipedraft.inference.config import ROW_COSTS, DecodeConfig
from pipedraft.inference.cost_model import CostModel, StageCost
from pipedraft.inference.engine import Engine

NEW_TOKENS = 10
PROMPTS = ([3], [1, 2, 7, 9, 4])
COST = CostModel(row=0.02, link=0.03, verify=0.05, draft_forward=0.1, is_asynchronous=True)


@cache
def target(vocab: int = 16):
    """Eight layers, with the first one dominating the output."""
    model = tiny_llama(layers=8, hidden=16, vocab=vocab)
    for layer in model.model.layers[1:]:
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            projection.weight.mul_(0.2)
    return model


@cache
def record(kind: str, stages: int, **way) -> Recording:
    """Record a real run, shared by several tests."""
    config = DecodeConfig.of(num_stages=stages, max_new_tokens=NEW_TOKENS, **way)
    draft = first_layer(target()) if kind == "language_model" else None
    engine = Engine(target(), PlainTokenizer(), config, draft)
    turns = {("b", str(i), 0): engine.decode(prompt) for i, prompt in enumerate(PROMPTS)}
    recorded = recorded_draft(draft, engine.target)
    return Recording(
        config,
        recorded["draft_type"],
        "",
        recorded["relative_cost"],
        engine.target.boundaries,
        turns,
    )


def figures(result) -> list[float]:
    times = result.virtual_time, result.virtual_time_autoregressive
    return [result.num_tokens, result.num_steps, *times]


@pytest.mark.parametrize("kind", ["language_model", "none"])
def test_another_cost_model_gives_the_time_of_a_run_under_it(kind) -> None:
    way = {"schedule": "spd", "tree_width": 3} if kind != "none" else {"schedule": "autoregressive"}
    free, costly = record(kind, 4, **way), record(kind, 4, cost=COST, **way)
    (found,) = replay(free, Hardware("costly", COST, None))
    for row, result in zip(found.prompts_P4.tolist(), costly.turns.values(), strict=True):
        assert row == pytest.approx(figures(result))
    (slower,) = replay(free, Hardware("costly", COST, 3.0))
    assert slower.prompts_P4[0, 2] > found.prompts_P4[0, 2]
    assert slower.cost == replace(COST, link=3.0)


def test_a_cluster_of_unequal_stages_is_priced_and_cut_anew() -> None:
    way, stages = {"schedule": "spd", "tree_width": 3}, (StageCost(speed=0.25), StageCost(row=0.5))
    cluster = replace(COST, stages=stages)
    free = record("language_model", 2, **way)
    (kept,), (found,) = (replay(free, Hardware("c", cluster, None, cuts)) for cuts in (False, True))
    assert (kept.cut, found.cut) == ((0, 4, 8), (0, 1, 8))
    real = record("language_model", 2, cost=cluster, boundaries=(0, 1, 8), **way)
    for row, result in zip(found.prompts_P4.tolist(), real.turns.values(), strict=True):
        assert row == pytest.approx(figures(result))
    assert found.prompts_P4[0, 2] < kept.prompts_P4[0, 2]
    with pytest.raises(NotReplayable, match="has 2 devices"):
        replay(record("language_model", 4, **way), Hardware("c", cluster, None))
    small = replace(cluster, layer_gb=1.0, stages=(StageCost(memory_gb=2.0),) * 2)
    with pytest.raises(NotReplayable, match="no cut of 8 layers of 1 GB fits"):
        replay(free, Hardware("c", small, None, cuts=True))
    trained = replace(free, draft_type="spd")
    with pytest.raises(NotReplayable, match="spd was trained for the cut"):
        replay(trained, Hardware("c", cluster, None, cuts=True))


@pytest.mark.parametrize(
    "way",
    [{"schedule": name} for name in ("flowspec", "flowspec_continued")]
    + [{"schedule": "pipeinfer", "draft_tokens": "auto"}],
)
def test_a_schedule_that_drafts_by_its_cost_model_is_not_replayed_under_another(way) -> None:
    recording = record("language_model", 2, **way)
    with pytest.raises(NotReplayable, match="own cost model"):
        replay(recording, Hardware("costly", COST, None))


# -- trace files and the command ----------------------------------------------------------------


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """A folder with traces recorded on 4 stages, and that run's entries."""
    folder = tmp_path_factory.mktemp("evaluated")
    tokenizer = byte_tokenizer()
    model = target(len(tokenizer))
    draft = first_layer(model)
    prompts = {
        "one": make_prompts("one", ["hello", "again"], ["bye"]),
        "two": make_prompts("two", ["what"]),
    }

    ways = [
        {"schedule": "spd"},
        {"schedule": "pruned_pp", "tree": SMALL},
        {"schedule": "spd", "tree_width": "auto"},
    ]
    methods = [
        EvalMethod(
            name=way["schedule"],
            draft=draft,
            config=DecodeConfig.of(num_stages=4, max_new_tokens=8, **way),
        )
        for way in ways
    ]

    def comparison(traces: Traces) -> Evaluation:
        return Evaluation(
            target=model, tokenizer=tokenizer, benchmarks=prompts, reference=None, traces=traces
        )

    for shard in ((0, 2), (1, 2)):
        traces = Traces(folder / "traces", {"target": "tiny"}, shard)
        comparison(traces).decode_shard(methods[:2])
    traces = Traces(folder / "traces", {"target": "tiny"}, (0, 1))
    entries = comparison(traces).run(methods[:2])
    Evaluation(
        target=model, tokenizer=tokenizer, benchmarks={"two": prompts["two"]}, reference=None,
        traces=Traces(folder / "auto", {"target": "tiny"}),
    ).run(methods[2:])  # fmt: skip
    return folder, {(entry.method, entry.benchmark): entry for entry in entries}


RECORDED = Hardware("recorded", None, None)


def test_shards_replay_as_the_real_run_and_what_cannot_be_replayed_is_left_out(
    evaluated, capsys
) -> None:
    folder, real = evaluated
    found = [one for recording in read_recordings([folder]) for one in replay(recording, RECORDED)]
    assert {(one.config.schedule.name, one.benchmark) for one in found} == set(real)
    for one in found:
        entry = real[one.config.schedule.name, one.benchmark]
        expected = sorted([row.tokens, row.steps] for row in entry.per_prompt)
        assert sorted(one.prompts_P4[:, :2].tolist()) == expected
        assert one.length.pooled == entry.equivalent_acceptance_length.pooled
        if one.benchmark != "two":  # one prompt has no interval
            assert one.length.ci95 == entry.equivalent_acceptance_length.ci95
        assert one.speedup[0] == pytest.approx(entry.theoretical_speedup)
    assert status(["replay", str(folder), str(folder / "auto"), "--cost", "h100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("left out: language_model")]
    assert "on 4 stages: spd chose its draft tokens (auto)" in line


def test_the_best_run_of_every_pipeline_and_what_the_pipeline_costs(evaluated) -> None:
    found = [
        one
        for recording in read_recordings([evaluated[0]])
        for link in (0, 0.1)
        for one in replay(recording, Hardware("recorded", None, link))
    ]
    best = best_of(found)
    assert len(best) == 3 * 2 and len(found) == 3 * len(best)
    for one in best:
        alike = [x for x in found if (x.benchmark, x.cost.link) == (one.benchmark, one.cost.link)]
        assert one in alike and one.speedup[0] == max(x.speedup[0] for x in alike)
    for one in found:  # a baseline token takes a pass and a link for each stage
        over = one.speedup[0] / (1 + one.config.num_stages * one.cost.link)
        assert one.one_device_speedup == pytest.approx(over)


def test_earlier_settings_are_told_apart_and_turns_decoded_together_are_listed_once(
    evaluated, tmp_path, capsys
) -> None:
    traces = tmp_path / "traces"
    shutil.copytree(evaluated[0] / "traces", traces)

    def table(*more: str) -> str:
        assert status(["replay", str(tmp_path), *more]) == 0
        return capsys.readouterr().out

    def add(name: str, config: dict, **more) -> None:
        for file in (evaluated[0] / "traces").iterdir():
            header, *lines = file.read_text().splitlines()
            header = json.loads(header)
            header |= {"config": header["config"] | config, **more}
            (traces / f"{name}-{file.name}").write_text("\n".join([json.dumps(header), *lines]))

    def rows(shown: str) -> list[str]:
        return [x for x in shown.splitlines() if x.startswith(("one ", "two ", "overall "))]

    alone = table()
    add("together", {}, together=1)
    assert table() == alone and "max new" not in alone and "seed" not in alone
    for setting, column in (("max_new_tokens", "max new"), ("seed", "seed")):
        add(setting, {setting: 5})
        shown = table()
        assert column in shown and len(rows(shown)) == len(set(rows(shown)))
    settings = Counter(tuple(line.split()[-2:]) for line in rows(table("--best")))
    assert settings == {("8", "0"): 3, ("5", "0"): 3, ("8", "5"): 3}


def test_every_entry_has_its_speedup_over_the_cost_of_a_row(evaluated) -> None:
    """Equals a replay under that cost, and appears in the report."""
    folder, real = evaluated
    for (method, benchmark), entry in real.items():
        curve = {float(row): value for row, value in entry.theoretical_speedup_by_row.items()}
        assert sorted(curve) == list(ROW_COSTS)
        assert curve[0] == pytest.approx(entry.theoretical_speedup)
        if method != "pruned_pp":  # a row a segment
            assert set(curve.values()) == {curve[0]}
            continue
        values = list(curve.values())
        assert values == sorted(values, reverse=True) and values[-1] < values[0]
        recording = next(r for r in read_recordings([folder]) if r.config.schedule.name == method)
        hardware = Hardware("costly", CostModel(row=0.1), None)
        found = {r.benchmark: r for r in replay(recording, hardware)}
        assert curve[0.1] == pytest.approx(found[benchmark].speedup[0])
    table = row_cost_table([*real.values()])
    assert table.header[-3:] == ["0.035", "0.05", "0.1"]
    assert all(len(row) == len(table.header) for row in table.rows)


def test_a_curve_of_automatic_budgets_is_the_runs_own_point() -> None:
    recording = record("language_model", 4, schedule="spd", tree_width="auto", cost=COST)
    engine = SimpleNamespace(
        config=recording.config,
        target=SimpleNamespace(boundaries=recording.boundaries),
        draft_cost=COST.draft_forward,
    )
    assert [*speedups_by_row([*recording.turns.values()], engine)] == [f"{COST.row:g}"]


def test_command_shows_costs_and_links(evaluated, tmp_path, capsys) -> None:
    folder, _ = evaluated
    costs = []
    for name, cost in (("fast", CostModel()), ("slow", COST)):
        costs.append(tmp_path / f"{name}.json")
        costs[-1].write_text(json.dumps(vars(cost)))
    arguments = ["replay", str(folder / "traces"), "--cost", str(costs[0]), "--cost", str(costs[1])]
    assert status([*arguments, "--link", "0,10ms", "--pass-ms", "20"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "spd W=1" in line]
    overall = [line for line in lines if line[0] == "overall"]
    assert [(line[line.index("W=1") + 3], line[line.index("W=1") + 4]) for line in overall] == [
        ("fast", "0"), ("fast", "0.5"), ("slow", "0"), ("slow", "0.5"),
    ]  # fmt: skip


def test_recordings_name_what_was_decoded(evaluated) -> None:
    recordings = {recording.name: recording for recording in read_recordings([evaluated[0]])}
    digest = recordings.pop("autoregressive").draft_hash
    assert digest == ""
    for name, recording in recordings.items():
        shape = "spd W=1" if recording.config.schedule.name == "spd" else "pruned_pp dynamic:3:3:8"
        assert name == f"language_model {recording.draft_hash[:6]}: {shape}"
        assert recording.relative_cost == 1 / 8 and recording.boundaries == (0, 2, 4, 6, 8)
    assert len(recordings) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{place}/nowhere"], ["TRACES", "holds no traces"]),
        (["{place}/greedy.jsonl"], ["TRACES", "no decoded turn"]),
        (["{folder}", "--cost", "{place}/cost.json"], ["--cost", "no cost model"]),
        (["{folder}", "--link", "far"], ["--link", "'far'", "20ms"]),
        (["{folder}", "--link", "5ms"], ["--pass-ms", "5ms", "--pass-ms 35"]),
    ],
    ids=" ".join,
)
def test_bad_input_is_one_line_and_status_two(
    evaluated, tmp_path, capsys, monkeypatch, arguments, words
) -> None:
    monkeypatch.setattr("pipedraft.eval.replay.tqdm", lambda wanted, **_: wanted)
    (tmp_path / "cost.json").write_text('{"lnk": 1}')
    (tmp_path / "greedy.jsonl").write_text('{"greedy": "5"}\n[[1], [2]]\n')
    arguments = [word.format(place=tmp_path, folder=evaluated[0]) for word in arguments]
    assert_refused(capsys, ["replay", *arguments], words)
