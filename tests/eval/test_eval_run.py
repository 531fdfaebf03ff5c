"""Multi-turn evaluation, the baseline, the greedy check and the command line, on a stub engine.

The stub replays the target's greedy output and counts steps like a draft that emits two tokens per
round. End-to-end tests with the real engine are elsewhere.
"""

import copy
import json
from types import SimpleNamespace

import eval_runs
import pytest
import torch
from eval_runs import AnyDraft, StubEngine, assert_refused, command, make_prompts, status
from transformers import GenerationConfig

from pipedraft.eval import command as command_module
from pipedraft.eval.evaluation import EvalMethod, Evaluation
from pipedraft.eval.lossless import GreedyReference, generate_greedy
from pipedraft.eval.metrics import AUTOREGRESSIVE, OVERALL
from pipedraft.eval.record import LosslessRecord
from pipedraft.eval.tables import warnings
from pipedraft.eval.traces import Traces
from pipedraft.eval.turns import evaluate, prompt_seed
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.result import DecodeResult

MAX_NEW_TOKENS = 6
tokenizer, target, folders = eval_runs.tokenizer, eval_runs.target, eval_runs.folders
no_pictures = eval_runs.no_pictures
pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr("pipedraft.eval.evaluation.Engine", StubEngine)
    monkeypatch.setattr(StubEngine, "log", [])
    return StubEngine


def make_method(**settings) -> EvalMethod:
    config = DecodeConfig.of(**{"max_new_tokens": MAX_NEW_TOKENS, "num_stages": 4} | settings)
    return EvalMethod(name="spd", config=config, draft=AnyDraft(), checkpoint="out/spd")


def compare(target, tokenizer, methods, *, lossless=True, prompts=None, **options):
    prompts = prompts or {
        "one": make_prompts("one", ["hello", "again"], ["bye", "now"]),
        "two": make_prompts("two", ["what"], ["who"], ["why"]),
    }
    comparison = Evaluation(
        target=target,
        tokenizer=tokenizer,
        benchmarks=prompts,
        reference=target if lossless else None,
        **options,
    )
    return comparison.run(methods)


DECODE = StubEngine.decode


@pytest.mark.parametrize("is_wrong", [False, True])
@pytest.mark.parametrize(
    ("temperature", "options"),
    [(1.0, {}), (0.0, {"lossless": False, "trusts_plain": True})],
    ids=["sampled", "greedy without a reference"],
)
def test_outputs_are_compared_with_plain_decodings(
    is_wrong, temperature, options, target, tokenizer, engine, monkeypatch
) -> None:
    monkeypatch.setattr(StubEngine, "wrong_last_token", is_wrong)
    method = make_method(temperature=temperature, tree_width=4)
    entries = compare(target, tokenizer, [method], **options)
    checks = [entry.lossless for entry in entries if entry.benchmark == "two"]
    # The sampled baseline is itself compared, greedily on two prompts, with transformers.
    assert [check.checked for check in checks] == [2 if temperature else 0, 3]
    assert checks[0].mismatches == 0
    assert checks[1].mismatches == 3 * is_wrong
    if temperature:
        assert {entry.verifier for entry in entries} == {"gumbel"}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bitwise_outputs_are_compared_with_plain_decodings_in_half_precision(
    temperature, target, tokenizer, engine, monkeypatch
) -> None:
    monkeypatch.setattr(StubEngine, "wrong_last_token", True)
    half = copy.deepcopy(target).to(torch.bfloat16)
    settings = {"temperature": temperature, "tree_width": 4}
    for is_bitwise in (True, False):
        method = make_method(bitwise=is_bitwise, **settings)
        entries = compare(half, tokenizer, [method], lossless=False)
        (found,) = [e.lossless for e in entries if (e.benchmark, e.method) == ("two", "spd")]
        expected = LosslessRecord(checked=3, mismatches=3)
        assert found == (expected if is_bitwise else LosslessRecord(checked=0, mismatches=0))


@pytest.mark.parametrize("place", ["cpu", "cuda:0"])
def test_ranks_on_gpus_load_no_whole_target(place, monkeypatch) -> None:
    loaded = []
    monkeypatch.setattr(command_module, "load_target", lambda *_, **__: loaded.append(1) or "all")
    monkeypatch.setattr(command_module, "resolve_dtype", lambda *_: torch.float32)
    ranks = SimpleNamespace(
        device=torch.device(place),
        job=SimpleNamespace(boundaries=(0, 2)),
        connect=None,
        num_stages=lambda wanted: 1,
        load_target=lambda *_, **__: "part",
    )
    options = SimpleNamespace(
        device="auto", dtype="auto", no_lossless=False, stages=1, boundaries=()
    )
    found = command_module._load_target(options, "name", None, [], ranks, usual=1)
    is_cpu = place == "cpu"
    assert (found.reference, found.trusts_plain) == ("all" if is_cpu else None, not is_cpu)
    assert len(loaded) == is_cpu


def test_second_turn_answers_the_generated_text(target, tokenizer, engine) -> None:
    stub = engine(target, tokenizer, make_method().config)
    prompts = make_prompts("one", ["hello", "again"])
    first, second = evaluate(stub, prompts, tokenizer)
    answer = tokenizer.decode(first.result.token_ids, skip_special_tokens=True)
    rendered = tokenizer.decode(second.result.prompt_ids)
    assert rendered == (
        f"<|user|>hello<|end|><|assistant|>{answer}<|end|><|user|>again<|end|><|assistant|>"
    )


def test_random_numbers_of_a_prompt_do_not_depend_on_the_others(target, tokenizer, engine) -> None:
    prompts = make_prompts("one", ["hello", "again"], ["bye", "now"])
    stub = engine(target, tokenizer, make_method().config)
    evaluate(stub, prompts, tokenizer)
    all_seeds = [index for _, _, index in engine.log]
    engine.log.clear()
    evaluate(stub, prompts[1:], tokenizer)
    assert [index for _, _, index in engine.log] == all_seeds[2:]
    assert len(set(all_seeds)) == 4
    assert all(0 <= seed < 2**31 for seed in all_seeds)
    assert prompt_seed(prompts[0], 0) != prompt_seed(make_prompts("two", ["hello"])[0], 0)


def test_baseline_is_decoded_once_per_temperature_on_the_smallest_n(
    target, tokenizer, engine
) -> None:
    methods = [
        make_method(num_stages=n, temperature=t, tree_width=w)
        for n in (8, 4)
        for t in (0.0, 1.0)
        for w in (1, 4)
    ]
    entries = compare(target, tokenizer, methods, lossless=False)
    baselines = [e for e in entries if e.schedule == AUTOREGRESSIVE and e.benchmark == "one"]
    assert [(e.temperature, e.stages, e.tree_width) for e in baselines] == [
        (0.0, 4, 1),
        (1.0, 4, 1),
    ]
    assert all(e.equivalent_acceptance_length.pooled == 1 for e in baselines)
    assert len(entries) == 3 * (2 + len(methods))


def test_overall_pools_the_counts_of_the_benchmarks(target, tokenizer, engine) -> None:
    entries = [e for e in compare(target, tokenizer, [make_method()]) if e.method == "spd"]
    one, two, overall = entries
    assert overall.benchmark == OVERALL
    for key in ("prompts", "turns", "tokens", "steps", "rounds"):
        assert getattr(overall, key) == getattr(one, key) + getattr(two, key)
    assert (one.prompts, one.turns) == (2, 4)
    pooled = 4 * overall.tokens / overall.steps
    assert overall.equivalent_acceptance_length.pooled == pytest.approx(pooled)
    assert overall.lossless == LosslessRecord(checked=7, mismatches=0)
    assert sum(row.tokens for row in overall.per_prompt) == overall.tokens
    assert overall.wallclock.speedup == pytest.approx(2)


def test_rows_of_single_prompts_add_up_to_the_entry(target, tokenizer, engine) -> None:
    for entry in compare(target, tokenizer, [make_method()]):
        rows = entry.per_prompt
        for key in ("tokens", "steps", "rounds", "turns"):
            assert sum(getattr(row, key) for row in rows) == getattr(entry, key)
        seconds = sum(row.decode_s for row in rows)
        assert entry.tokens / seconds == pytest.approx(entry.wallclock.tokens_per_s)
        modeled = sum(row.virtual_time_autoregressive for row in rows)
        modeled /= sum(row.virtual_time for row in rows)
        assert modeled == pytest.approx(entry.theoretical_speedup)
        for field in ("position_tests", "position_accepts"):
            assert sum(sum(getattr(row, field)) for row in rows) == sum(getattr(entry, field))
        assert len(entry.acceptance_by_position_ci95) == len(entry.acceptance_by_position)
        by_category = entry.acceptance_by_category.values()
        assert sum(category.prompts for category in by_category) == entry.prompts


def test_greedy_check_finds_a_wrong_last_token(target, tokenizer, engine, monkeypatch) -> None:
    """Known-bad engine."""
    monkeypatch.setattr(StubEngine, "wrong_last_token", True)
    entries = compare(target, tokenizer, [make_method()])
    assert [e.lossless for e in entries if e.benchmark == "two"] == [
        LosslessRecord(checked=3, mismatches=0),
        LosslessRecord(checked=3, mismatches=3),
    ]


def test_sampled_texts_are_not_compared_with_greedy_ones(target, tokenizer, engine) -> None:
    entries = compare(target, tokenizer, [make_method(temperature=1.0)])
    drafted = [e.lossless for e in entries if e.schedule != "autoregressive"]
    assert drafted and all(x == LosslessRecord(checked=0, mismatches=0) for x in drafted)
    assert entries[-1].verifier == "rejection"


def test_a_target_whose_every_schedule_is_wrong_is_not_lossless_at_any_temperature(
    target, tokenizer, engine, monkeypatch
) -> None:
    def wrong_everywhere(self, prompt_ids, **more):
        result = DECODE(self, prompt_ids, **more)
        result.token_ids[-1] = (result.token_ids[-1] + 1) % 200
        return result

    monkeypatch.setattr(StubEngine, "decode", wrong_everywhere)
    for temperature in (0.0, 1.0):
        method = make_method(temperature=temperature, tree_width=4)
        entries = compare(target, tokenizer, [method])
        (plain,) = [e for e in entries if (e.benchmark, e.schedule) == ("two", "autoregressive")]
        assert plain.lossless.mismatches == plain.lossless.checked > 0
        assert any("Not lossless (two, autoregressive" in line for line in warnings(entries))


def test_turns_that_do_not_fit_the_context_are_left_out_and_counted(
    target, tokenizer, engine
) -> None:
    prompts = {"one": make_prompts("one", ["short"], ["short", "long " * 60, "never"])}
    entries = compare(target, tokenizer, [make_method()], prompts=prompts)
    assert [(e.turns, e.skipped_turns) for e in entries] == [(2, 2), (2, 2)]
    with pytest.raises(ValueError, match="too few for any prompt of one; lower it"):
        compare(target, tokenizer, [make_method(max_new_tokens=250)], prompts=prompts)


def test_a_share_whose_prompts_are_all_too_long_has_none_of_that_benchmark(
    target, tokenizer, engine
) -> None:
    conversations = ["a"], ["b"], ["long " * 60], ["c"]
    benchmarks = {name: make_prompts(name, *conversations) for name in ("one", "two")}

    def decode(share: tuple[int, int], *names: str, **settings) -> int:
        comparison = Evaluation(
            target=target,
            tokenizer=tokenizer,
            benchmarks={name: benchmarks[name] for name in names},
            reference=None,
            traces=Traces(shard=share),
        )
        return comparison.decode_shard([make_method(**settings)])

    assert [decode((index, 4), "one") for index in range(4)] == [2, 2, 0, 2]
    assert decode((2, 5), "one", "two") == 2  # and one of the second
    with pytest.raises(ValueError, match="too few for any prompt of one; lower it"):
        decode((0, 4), "one", max_new_tokens=250)


def test_a_method_that_cannot_run_is_refused_before_anything_is_decoded(
    target, tokenizer, engine
) -> None:
    with pytest.raises(ValueError, match="num_stages: 17"):
        compare(target, tokenizer, [make_method(), make_method(num_stages=17)])
    assert engine.log == []


def greedy_by_hand(target, prompt_ids, max_new_tokens, eos=()) -> list[int]:
    ids = list(prompt_ids)
    for _ in range(max_new_tokens):
        with torch.inference_mode():
            ids.append(int(target(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in eos:
            break
    return ids[len(prompt_ids) :]


def test_reference_is_plain_greedy_whatever_the_targets_own_settings(target, monkeypatch) -> None:
    expected = greedy_by_hand(target, [5, 6, 7], 12)
    own = GenerationConfig(
        do_sample=True, temperature=0.7, top_k=3, repetition_penalty=5.0, min_new_tokens=3
    )
    monkeypatch.setattr(target, "generation_config", own)
    assert generate_greedy(target, [5, 6, 7], max_new_tokens=12) == expected
    assert target.generation_config is own


def test_reference_stops_at_any_of_a_list_of_eos_tokens(target, monkeypatch) -> None:
    free = greedy_by_hand(target, [5, 6, 7], 12)
    eos = [255, free[4]]
    monkeypatch.setattr(target, "generation_config", GenerationConfig(eos_token_id=eos))
    got = generate_greedy(target, [5, 6, 7], max_new_tokens=12)
    assert got == greedy_by_hand(target, [5, 6, 7], 12, eos)
    assert got[-1] == free[4]


def test_a_text_cut_by_the_context_is_compared_as_far_as_it_goes(target) -> None:
    text = greedy_by_hand(target, [5, 6], 8)
    result = DecodeResult([5, 6], text[:5], "", "max_length", 4)
    reference = GreedyReference(target, 8)
    assert reference.check([result]) == LosslessRecord(checked=1, mismatches=0)
    result.stop_reason = "max_new_tokens"
    assert reference.check([result]) == LosslessRecord(checked=1, mismatches=1)


def test_command_writes_every_file_and_prints_the_table(folders, engine, capsys) -> None:
    assert status(command(folders, "--limit", "2", "--temperature", "0,1")) == 0
    results = json.loads((folders.out / "results.json").read_text())
    assert [(r["method"], r["temperature"]) for r in results["runs"]] == [
        (AUTOREGRESSIVE, 0.0),
        ("spd", 0.0),
        (AUTOREGRESSIVE, 1.0),
        ("spd", 1.0),
    ]
    assert all(r["prompts"] == 2 and r["stages"] == 4 for r in results["runs"])
    assert results["runs"][1]["lossless"] == {"checked": 2, "mismatches": 0}
    manifest = json.loads((folders.out / "manifest.json").read_text())
    assert manifest["prompts"]["mine"]["count"] == 2
    assert manifest["dtype"] == "float32"
    assert "--temperature 0,1" in manifest["command"]
    assert len(manifest["tokenizer"]["sha256"]) == 64
    assert AUTOREGRESSIVE in (folders.out / "report.md").read_text()
    said = capsys.readouterr()
    assert AUTOREGRESSIVE in said.out and "has only" not in said.err


def test_a_limit_above_a_benchmarks_prompts_is_said(folders, engine, capsys) -> None:
    assert status(command(folders, "--limit", "99")) == 0
    assert "mine has only" in capsys.readouterr().err


def test_bitwise_of_the_command_is_every_methods(folders, engine) -> None:
    words = ["--limit", "1", "--bitwise"]
    assert status(command(folders, *words)) == 0
    assert all(config.bitwise for config, *_ in engine.log) and engine.log
    checks = [
        run["lossless"] for run in json.loads((folders.out / "results.json").read_text())["runs"]
    ]
    assert [check["checked"] for check in checks] == [1, 1] and "noise" not in checks[1]


def test_an_unknown_subcommand_is_told_the_nearest(capsys) -> None:
    assert status(["comapre", "a", "b"]) == 2
    assert "command: 'comapre' is unknown; did you mean 'compare'?" in capsys.readouterr().err


def test_two_checkpoints_make_one_table_with_one_baseline(folders, engine) -> None:
    second = folders.root / "other" / "spd"
    second.mkdir(parents=True)
    for file in folders.draft.iterdir():
        (second / file.name).write_bytes(file.read_bytes())
    assert status(command(folders, "--checkpoint", str(second), "--no-lossless")) == 0
    results = json.loads((folders.out / "results.json").read_text())
    methods = [r["method"] for r in results["runs"]]
    assert methods == [AUTOREGRESSIVE, "spd (run/spd)", "spd (other/spd)"]


def test_heads_for_other_stages_are_all_decoded(folders, engine, monkeypatch) -> None:
    second = folders.root / "n8"
    second.mkdir()
    text = (folders.draft / "config.json").read_text()
    (second / "config.json").write_text(text.replace('"num_stages": 4', '"num_stages": 8'))
    (second / "model.safetensors").write_bytes(b"weights")

    def load(folder, target, dtype):
        draft = AnyDraft()
        draft.num_stages = 8 if folder == second else 4
        return draft

    monkeypatch.setattr(command_module, "load_head", load)
    assert status(command(folders, "--checkpoint", str(second), "--no-lossless")) == 0
    results = json.loads((folders.out / "results.json").read_text())
    methods = [(r["method"], r["stages"]) for r in results["runs"]]
    assert methods == [(AUTOREGRESSIVE, 4), ("spd", 4), ("spd", 8)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--temperature", "0,hot"], ["--temperature", "'hot'", "0 (greedy)"]),
        (["--tree-width", "1,,4"], ["--tree-width", "empty entry"]),
        (["--device", "abacus"], ["--device", "'abacus'", "give cpu"]),
        (["--calibrate", "x.json", "--shard", "1/2"], ["--shard: 1/2", "leave out", "--calibrate"]),
    ],
)
def test_bad_input_is_one_line_and_status_two(folders, engine, capsys, change, words) -> None:
    assert_refused(capsys, command(folders, *change), words)
