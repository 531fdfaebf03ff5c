"""Replay: what a recorded run says of other stages and costs equals real runs there, or is refused.

The real runs are tiny models on 2, 3 and 8 stages; every formula is checked prompt by prompt.
"""

import json
import shutil
from collections import Counter
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from conftest import byte_tokenizer, tiny_llama
from decode_runs import CHAIN, SMALL, PlainTokenizer, friendly_module
from eval_runs import assert_refused, first_layer, make_prompts, status
from tiny_drafts import make_draft, make_head

from pipedraft.eval.replay import Hardware, records, replay, speedups_by_row
from pipedraft.eval.run import Evaluation, Method, recorded_draft
from pipedraft.eval.tables import row_cost_table
from pipedraft.eval.traces import Recording, Traces, read_recordings
from pipedraft.files import to_json
from pipedraft.inference.clock import CostModel
from pipedraft.inference.config import ROW_COSTS, DecodeConfig
from pipedraft.inference.engine import Engine
from pipedraft.inference.schedules.base import Refusal
from pipedraft.inference.schedules.pipeinfer import PipeInfer
from pipedraft.inference.schedules.spd import SPDSchedule

STAGES = (2, 3, 8)
NEW_TOKENS = 10
PROMPTS = ([3], [1, 2, 7, 9, 4])
RECORDED = Hardware("recorded", None, None)
COST = CostModel(row=0.02, link=0.03, verify=0.05, draft_forward=0.1, is_asynchronous=True)
NO_EXPANSION = dict(expansion=False)
LONG_CHAIN = replace(CHAIN, depth=7)


@cache
def target(vocab: int = 16):
    """Eight layers, of which the first one says most."""
    model = tiny_llama(layers=8, hidden=16, vocab=vocab)
    for layer in model.model.layers[1:]:
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            projection.weight.mul_(0.2)
    return model


@cache
def make_network(kind: str):
    if kind == "flexspec, self":
        return make_draft(target(), feature_source="self", preset="practical")
    if kind == "flexspec":
        return make_draft(target())
    if kind in ("eagle", "eagle3"):
        return make_head(target(), kind)
    return first_layer(target()) if kind == "language_model" else None


@cache
def record(kind: str, stages: int, **way) -> Recording:
    """A real run, of which several tests may ask something."""
    config = DecodeConfig.of(num_stages=stages, max_new_tokens=NEW_TOKENS, **way)
    draft = make_network(kind)
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


def steps(found) -> list[int]:
    return [row.steps for row in found.rows]


def real_steps(recording: Recording) -> list[int]:
    return [result.num_steps for result in recording.turns.values()]


EXACT = [
    ("none", {"schedule": "autoregressive"}),
    ("language_model", {"schedule": "eagle", "tree": CHAIN, "temperature": 1.0}),
    ("language_model", {"schedule": "naive_pp", "tree": LONG_CHAIN}),
    ("language_model", {"schedule": "pruned_pp", "tree": LONG_CHAIN, "max_segment_rows": 2}),
    ("language_model", {"schedule": "flowspec", "tree": CHAIN, **NO_EXPANSION}),
    ("language_model", {"schedule": "spd"}),
    ("language_model", {"schedule": "spd", "temperature": 1.0}),
    ("language_model", {"schedule": "spd", "tokens_per_step": 3}),
    ("language_model", {"schedule": "ppsd"}),
    ("language_model", {"schedule": "pipeinfer"}),
    ("flexspec", {"schedule": "spd"}),
    ("flexspec, self", {"schedule": "pipedec", "tree_width": 1}),
    ("eagle", {"schedule": "pruned_pp", "tree": CHAIN}),
    ("eagle3", {"schedule": "eagle", "tree": SMALL}),
    ("eagle3", {"schedule": "naive_pp", "tree": SMALL, "micro_batches": 2}),
]


def way_name(case) -> str:
    kind, way = case
    shape = way["tree"].label if "tree" in way else ""
    details = [f"{k}={v}" for k, v in way.items() if isinstance(v, int | float | str)]
    return " ".join([kind, shape, *details])


@pytest.mark.parametrize("case", EXACT, ids=way_name)
def test_replay_gives_the_steps_and_the_time_of_real_runs(case) -> None:
    kind, way = case
    real = {stages: record(kind, stages, **way) for stages in STAGES}
    texts = {tuple(map(tuple, (r.token_ids for r in x.turns.values()))) for x in real.values()}
    assert len(texts) == 1
    for recorded_on in (2, 8):
        for stages in STAGES:
            found = replay(real[recorded_on], stages, RECORDED)
            assert steps(found) == real_steps(real[stages]), (recorded_on, stages)
            assert found.how == ("recorded" if stages == recorded_on else "exact")
            times = [result.virtual_time for result in real[stages].turns.values()]
            assert [row.virtual_time for row in found.rows] == pytest.approx(times)


@pytest.mark.parametrize("kind", ["language_model", "none"])
def test_another_cost_model_gives_the_time_of_a_run_under_it(kind) -> None:
    way = {"schedule": "spd", "tree_width": 3} if kind != "none" else {"schedule": "autoregressive"}
    free, costly = record(kind, 4, **way), record(kind, 4, cost=COST, **way)
    found = replay(free, 4, Hardware("costly", COST, None))
    for row, result in zip(found.rows, costly.turns.values(), strict=True):
        assert row.steps == result.num_steps
        assert row.virtual_time == pytest.approx(result.virtual_time)
        plain = result.virtual_time_autoregressive
        assert row.virtual_time_autoregressive == pytest.approx(plain)
    slower = replay(free, 4, Hardware("costly", COST, 3.0))
    assert slower.rows[0].virtual_time > found.rows[0].virtual_time
    assert slower.cost == replace(COST, link=3.0)


def test_some_draft_tokens_are_right_and_some_are_wrong() -> None:
    """Else the exact figures above would say little."""
    for kind in ("language_model", "flexspec", "flexspec, self", "eagle3"):
        schedule = {"schedule": "eagle", "tree": SMALL} if kind == "eagle3" else {"schedule": "spd"}
        results = record(kind, 4, **schedule).turns.values()
        ends = "".join(result.round_ends for result in results)
        assert ends.count("r") + ends.count("u") > 3, kind
        assert sum(result.num_accepted for result in results) > 0, kind


ASSUMED = [
    ("eagle3", {"schedule": "pipedec", "tree_width": 1}, 4),
    ("eagle3", {"schedule": PipeInfer(draft_tokens=1)}, 4),
]


@pytest.mark.parametrize("case", ASSUMED, ids=lambda case: way_name(case[:2]))
def test_draft_tokens_that_depend_on_the_stages_are_marked_as_assumed(case) -> None:
    kind, way, stages = case
    recording = record(kind, stages, **way)
    found = replay(recording, 8, RECORDED)
    assert found.how == "assumed"
    rounds = [len(result.round_lengths) for result in recording.turns.values()]
    tokens = [result.num_tokens for result in recording.turns.values()]
    if way["schedule"] == "pipedec":
        assert steps(found) == [n + 7 * r for n, r in zip(tokens, rounds, strict=True)]
    assert steps(replay(recording, stages, RECORDED)) == real_steps(recording)


def test_a_module_of_spd_is_assumed_to_be_right_as_often_on_other_stages() -> None:
    module = friendly_module(target(), num_stages=4)
    config = DecodeConfig.of(schedule="spd", num_stages=4, max_new_tokens=24)
    engine = Engine(target(), PlainTokenizer(), config, module)
    turns = {("b", "0", 0): engine.decode(PROMPTS[1])}
    recording = Recording(config, "spd", "", 0.1, engine.target.boundaries, turns)
    assert replay(recording, 2, RECORDED).how == "assumed"
    assert steps(replay(recording, 4, RECORDED)) == real_steps(recording)


REFUSED = [
    ("language_model", {"schedule": "spd", "tree_width": 2}, 4, "rows of a tree are pruned"),
    ("language_model", {"schedule": "pruned_pp", "tree": SMALL}, 4, "rows of a tree are pruned"),
    ("language_model", {"schedule": "flowspec", "tree": CHAIN}, 4, "rows of a tree are pruned"),
    ("language_model", {"schedule": "flowspec_continued"}, 4, "rows of a tree are pruned"),
    ("language_model", {"schedule": PipeInfer(accept=0.2)}, 4,
     "thresholds"),
    ("language_model", {"schedule": "spd", "tree_width": "auto"}, 4, "rows of a tree are pruned"),
    ("language_model", {"schedule": "pipeinfer", "draft_tokens": "auto"}, 4, "micro-batches"),
    ("language_model", {"schedule": "ppsd"}, 1, "on one stage ppsd"),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: way_name(case[:2]))
def test_what_the_trace_does_not_say_is_refused(case) -> None:
    kind, way, stages, words = case
    recording = record(kind, stages, **way)
    with pytest.raises(Refusal, match=words):
        replay(recording, 3, RECORDED)
    assert steps(replay(recording, stages, RECORDED)) == real_steps(recording)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(Refusal, match="8 layers, too few for 9 stages"):
        replay(record("none", 2, schedule="autoregressive"), 9, RECORDED)


@pytest.mark.parametrize(
    "way",
    [{"schedule": name} for name in ("flowspec", "flowspec_continued")]
    + [{"schedule": "pipeinfer", "draft_tokens": "auto"}],
)
def test_a_schedule_that_drafts_by_its_cost_model_is_not_replayed_under_another(way) -> None:
    recording = record("language_model", 2, **way)
    with pytest.raises(Refusal, match="own cost model"):
        replay(recording, 2, Hardware("costly", COST, None))


def test_a_run_that_does_not_follow_its_distribution_is_refused(monkeypatch) -> None:
    """Known-bad formula: a step more for every round."""
    recording = record("language_model", 4, schedule="spd")
    replay_round = SPDSchedule.replay

    def slower(schedule, clock, found):
        replay_round(schedule, clock, found)
        clock.step([0] * clock.num_stages, draft_forwards=0, overlap=True)

    monkeypatch.setattr(SPDSchedule, "replay", slower)
    with pytest.raises(Refusal, match="the recorded steps of b/0/0 are not those of spd's rounds"):
        replay(recording, 8, RECORDED)


# -- trace files and the command ----------------------------------------------------------------


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """A folder of traces recorded on 4 stages, and K of each prompt of real runs on others."""
    folder = tmp_path_factory.mktemp("evaluated")
    tokenizer = byte_tokenizer()
    model = target(len(tokenizer))
    draft = first_layer(model)
    prompts = {
        "one": make_prompts("one", ["hello", "again"], ["bye"]),
        "two": make_prompts("two", ["what"]),
    }

    def methods(stages: int, *ways: dict) -> list[Method]:
        return [
            Method(
                name=way["schedule"],
                draft=draft,
                config=DecodeConfig.of(num_stages=stages, max_new_tokens=8, **way),
            )
            for way in ways
        ]

    def comparison(traces: Traces | None = None) -> Evaluation:
        return Evaluation(
            target=model, tokenizer=tokenizer, benchmarks=prompts, reference=None,
            traces=traces or Traces(),
        )  # fmt: skip

    chain, tree = {"schedule": "spd"}, {"schedule": "pruned_pp", "tree": SMALL}
    for shard in ((0, 2), (1, 2)):
        traces = Traces(folder / "traces", {"target": "tiny"}, shard)
        comparison(traces).decode_shard(methods(4, chain, tree))
    traces = Traces(folder / "traces", {"target": "tiny"}, (0, 1))
    entries = {
        4: comparison(traces).run(methods(4, chain, tree)),
        2: comparison().run(methods(2, chain)),
        8: comparison().run(methods(8, chain)),
    }
    return folder, {
        stages: {(entry.method, entry.benchmark): entry for entry in found}
        for stages, found in entries.items()
    }


def test_command_reads_shards_and_agrees_with_real_runs(evaluated, tmp_path, capsys) -> None:
    folder, real = evaluated
    arguments = ["replay", str(folder), "--stages", "2,4,8", "--json", "--out", str(tmp_path)]
    assert status(arguments) == 0
    written = json.loads(capsys.readouterr().out)
    assert written == json.loads((tmp_path / "replay.json").read_text())
    spd = [r for r in written["replays"] if r["schedule"] == "spd"]
    assert {(r["benchmark"], r["stages"]) for r in spd} == {
        (name, n) for name in ("one", "two", "overall") for n in (2, 4, 8)
    }
    for found in spd:
        entry = real[found["stages"]]["spd", found["benchmark"]]
        expected = {(row.benchmark, row.id): row.steps for row in entry.per_prompt}
        assert {(r["benchmark"], r["id"]): r["steps"] for r in found["per_prompt"]} == expected
        assert (found["tokens"], found["steps"]) == (entry.tokens, entry.steps)
        length = found["equivalent_acceptance_length"]
        same = ("pooled", "ci95") if found["benchmark"] != "two" else ("pooled",)  # of one prompt
        expected = json.loads(to_json(entry.equivalent_acceptance_length))
        assert all(length[key] == expected[key] for key in same)
        assert found["theoretical_speedup"] == pytest.approx(entry.theoretical_speedup)
        assert found["how"] == ("recorded" if found["stages"] == 4 else "exact")
    plain = [r for r in written["replays"] if r["schedule"] == "autoregressive"]
    assert plain and all(r["steps"] == r["stages"] * r["tokens"] for r in plain)
    pruned = [r for r in written["replays"] if r["schedule"] == "pruned_pp"]
    assert {r["stages"] for r in pruned} == {4}
    (line,) = written["left_out"]
    assert "on 2, 8 stages: rows of a tree are pruned" in line
    assert "left out: language_model" in (tmp_path / "replay.md").read_text()


def test_the_best_way_of_every_pipeline_and_what_the_pipeline_costs(evaluated, capsys) -> None:
    folder, _ = evaluated
    arguments = ["replay", str(folder), "--stages", "2,4", "--link", "0,0.1", "--json"]
    assert status(arguments) == 0
    every = json.loads(capsys.readouterr().out)["replays"]
    assert status([*arguments, "--best"]) == 0
    best = json.loads(capsys.readouterr().out)["replays"]

    def pipeline(record) -> tuple:
        return record["benchmark"], record["stages"], record["cost"]["link"]

    assert len(best) == 3 * 2 * 2 and len({record["schedule"] for record in every}) == 3
    for one in best:
        speeds = [r["theoretical_speedup"] for r in every if pipeline(r) == pipeline(one)]
        assert one in every and len(speeds) > 1 and one["theoretical_speedup"] == max(speeds)
    for record in every:  # a token of plain decoding takes a pass and a hop for each stage
        over = record["theoretical_speedup"] / (1 + record["stages"] * record["cost"]["link"])
        assert record["one_device_speedup"] == pytest.approx(over)


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

    alone = table()
    add("together", {}, together=1)
    assert table() == alone and "max new" not in alone and "seed" not in alone
    for setting, column in (("max_new_tokens", "max new"), ("seed", "seed")):
        add(setting, {setting: 5})
        shown = table()
        rows = [
            line for line in shown.splitlines() if line.startswith(("one ", "two ", "overall "))
        ]
        assert column in shown and len(rows) == len(set(rows))
    best = json.loads(table("--best", "--json"))["replays"]
    settings = Counter((record["max_new_tokens"], record["seed"]) for record in best)
    assert settings == {(8, 0): 3, (5, 0): 3, (8, 5): 3}


def test_every_entry_has_its_speedup_over_the_cost_of_a_row(evaluated) -> None:
    """As a replay under that cost has it, and in the report."""
    folder, real = evaluated
    for (method, benchmark), entry in real[4].items():
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
        found = {r.benchmark: r for r in records(replay(recording, 4, hardware))}
        assert curve[0.1] == pytest.approx(found[benchmark].theoretical_speedup)
    table = row_cost_table([*real[4].values()])
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
    assert [(line[line.index("W=1") + 4], line[line.index("W=1") + 5]) for line in overall] == [
        ("fast", "0"), ("fast", "0.5"), ("slow", "0"), ("slow", "0.5"),
    ]  # fmt: skip


def test_no_model_is_loaded(evaluated, monkeypatch) -> None:
    folder, _ = evaluated

    def fail(*_, **__):
        raise AssertionError("replay must not load a model or tokenizer")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", fail)
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", fail)
    monkeypatch.setattr(torch.nn.Module, "__init__", fail)
    assert status(["replay", str(folder), "--stages", "2"]) == 0


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
        (["{place}/empty"], ["TRACES", "holds no traces"]),
        (["{place}/old.jsonl"], ["TRACES", "before steps were recorded", "again"]),
        (["{place}/cost.json"], ["TRACES"]),
        (["{place}/greedy.jsonl"], ["TRACES", "no decoded turn"]),
        (["{folder}", "--cost", "{place}/cost.json"], ["--cost", "no cost model"]),
        (["{folder}", "--stages", "0"], ["--stages", "0", "at least 1"]),
        (["{folder}", "--stages", "99"], ["--stages", "nothing can be replayed", "8 layers"]),
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
    (tmp_path / "old.jsonl").write_text('{"config": {}}\n')
    (tmp_path / "empty").mkdir()
    (tmp_path / "greedy.jsonl").write_text('{"greedy": "5"}\n[[1], [2]]\n')
    arguments = [word.format(place=tmp_path, folder=evaluated[0]) for word in arguments]
    assert_refused(capsys, ["replay", *arguments], words)
