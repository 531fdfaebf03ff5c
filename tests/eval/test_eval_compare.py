"""Runs compared prompt by prompt: matched entries and prompts, warnings, verdicts, bad input."""

import json
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from eval_runs import assert_refused, status

from pipedraft.eval.compare import Evaluated, compare_runs, counterparts, find_warnings, verdicts
from pipedraft.eval.metrics import AUTOREGRESSIVE, OVERALL
from pipedraft.eval.record import RunRecord

NUM_PROMPTS = 16


def make_rows(
    *, stages: int, rejection: float, seed: int = 0, prompts: int = NUM_PROMPTS, benchmark="b"
) -> list[dict]:
    """Rows for a chain draft; outputs, and the seconds per step, depend on the prompt alone."""
    tokens = np.random.default_rng(1).integers(20, 120, prompts)
    rounds = 1 + np.random.default_rng(seed).binomial(tokens - 1, rejection)
    return [
        {
            "benchmark": benchmark,
            "id": str(i),
            "category": "c",
            "tokens": int(n),
            "steps": int(n + (stages - 1) * r),
            "virtual_time": float(n + (stages - 1) * r) / stages,
            "virtual_time_autoregressive": float(n),
            "decode_s": 0.01 * float(n + (stages - 1) * r),
        }
        for i, (n, r) in enumerate(zip(tokens, rounds, strict=True))
    ]


def make_entry(rows: list[dict], **fields) -> dict:
    """Entry as in results.json, with the fields written by every version."""
    entry = {
        "method": "spd", "schedule": "spd", "benchmark": "b", "stages": 4, "temperature": 0.0,
        "tree_width": 1, "tree": None, "prompts": len(rows), "tokens": 0, "steps": 0, "rounds": 0,
        "equivalent_acceptance_length": {"pooled": None, "mean": None, "ci95": [None, None]},
        "mean_acceptance_length": None, "draft_acceptance_rate": None, "wallclock": None,
        "theoretical_speedup": None, "lossless": {"checked": 0, "mismatches": 0},
        "acceptance_histogram": [], "acceptance_by_position": [], "position_tests": [],
        "position_accepts": [], "per_prompt": rows,
    }  # fmt: skip
    return entry | fields


def make_manifest(**changes) -> dict:
    manifest = {
        "target": {"fingerprint": {"hash": "a" * 64}},
        "tokenizer": {"sha256": "b" * 64},
        "dtype": "float32",
        "config": {"max_new_tokens": 128, "backend": "local"},
        "hardware": {"processor": "this", "torch_threads": 1, "accelerator": None},
        "prompts": {"b": {"sha256": "c" * 64}},
    }
    return manifest | changes


def write(folder: Path, *entries: dict, **manifest) -> str:
    folder.mkdir()
    pooled = [entry for entry in entries if entry["benchmark"] == OVERALL]
    single = [entry for entry in entries if entry["benchmark"] != OVERALL]
    (folder / "results.json").write_text(json.dumps({"runs": single, "overall": pooled}))
    (folder / "manifest.json").write_text(json.dumps(make_manifest(**manifest)))
    return str(folder)


def read(folder: Path, *entries: dict, **manifest) -> Evaluated:
    return Evaluated.read(Path(write(folder, *entries, **manifest)))


def slow_and_fast(tmp_path: Path) -> tuple[Evaluated, Evaluated]:
    slow = make_entry(make_rows(stages=4, rejection=0.5))
    fast = make_entry(make_rows(stages=4, rejection=0.3, seed=5))
    return read(tmp_path / "slow", slow), read(tmp_path / "fast", fast)


def test_values_are_the_pooled_ones_and_the_better_draft_is_seen(tmp_path) -> None:
    slow, fast = slow_and_fast(tmp_path)
    length, speedup, per_second = compare_runs(slow, fast)
    rows = [run.entries[0].per_prompt for run in (slow, fast)]
    tokens = [sum(row.tokens for row in side) for side in rows]
    steps = [sum(row.steps for row in side) for side in rows]
    assert length.result.baseline == pytest.approx(4 * tokens[0] / steps[0])
    assert length.result.compared == pytest.approx(4 * tokens[1] / steps[1])
    assert speedup.result.compared == pytest.approx(length.result.compared)
    assert per_second.result.ratio == pytest.approx(length.result.ratio)
    assert length.result.ratio == pytest.approx(steps[0] / steps[1])
    low, high = length.result.ratio_ci95
    assert 1 < low < length.result.ratio < high
    (said,) = verdicts([length, speedup, per_second])
    assert said.startswith("b, T=0, spd, n=4, W=1: the second run is faster (S ")
    (said,) = verdicts(compare_runs(fast, slow)[:1])
    assert "the first run is faster (L' " in said
    (said,) = verdicts(compare_runs(fast, fast))
    assert "these prompts do not tell the runs apart" in said


def test_only_prompts_with_the_same_id_meet_whatever_their_order(tmp_path) -> None:
    rows = make_rows(stages=4, rejection=0.4)
    first = read(tmp_path / "a", make_entry(rows))
    second = read(tmp_path / "b", make_entry(rows[:3:-1]), prompts={"b": {"sha256": "d" * 64}})
    lines = compare_runs(first, second)
    assert all((x.result.num_prompts, x.left_out) == (NUM_PROMPTS - 4, 4) for x in lines)
    assert all(line.result.ratio == 1 for line in lines)
    assert find_warnings(first, second, lines) == [
        "4 prompts of b are in one run only: left out",
        "prompts of b: cccccccccccc and dddddddddddd differ",
    ]


def test_conditions_that_differ_are_said(tmp_path) -> None:
    rows = make_rows(stages=4, rejection=0.4)
    first = read(tmp_path / "a", make_entry(rows))
    other = {"processor": "that", "torch_threads": 1, "accelerator": None}
    second = read(
        tmp_path / "b", make_entry(rows[1:]), dtype="bfloat16", hardware=other,
        target={"fingerprint": {"hash": "e" * 64}},
    )  # fmt: skip
    assert find_warnings(first, second, compare_runs(first, second)) == [
        "1 prompts of b are in one run only: left out",
        "target: aaaaaaaaaaaa and eeeeeeeeeeee differ",
        "dtype: float32 and bfloat16 differ",
        "processor: this and that differ",
    ]
    assert find_warnings(first, first, compare_runs(first, first)) == []


def test_entries_meet_their_namesakes_else_the_most_alike() -> None:
    def entry(method: str, schedule: str, **fields) -> RunRecord:
        fields = make_entry([], method=method, schedule=schedule, **fields)
        return msgspec.convert(fields, RunRecord)

    baseline = [
        entry(AUTOREGRESSIVE, AUTOREGRESSIVE),
        entry("spd", "spd"),
        entry("spd", "spd", tree_width=4),
        entry("eagle3: flowspec", "flowspec", tree="dynamic:7:10:59"),
        entry("spd", "spd", temperature=1.0),
        entry("spd", "spd", benchmark="other"),
    ]
    assert counterparts(baseline[2], baseline) == [baseline[2]]
    assert counterparts(entry("spd (b)", "spd"), baseline) == [baseline[1]]
    assert counterparts(entry("spd", "spd", stages=8, tree_width=4), baseline) == [baseline[2]]
    same = entry("eagle3", "flowspec", tree="dynamic:7:10:59")
    assert counterparts(same, baseline) == [baseline[3]]
    assert counterparts(entry("spd", "spd", tree_width=9), baseline) == baseline[1:3]
    assert counterparts(entry("ppsd", "ppsd"), baseline) == baseline[1:4]
    plain = entry(AUTOREGRESSIVE, AUTOREGRESSIVE, stages=8)
    assert counterparts(plain, baseline) == [baseline[0]]
    assert counterparts(entry("spd", "spd", temperature=0.5), baseline) == []


def test_plain_decoding_is_compared_by_its_wall_clock_alone(tmp_path) -> None:
    rows = make_rows(stages=4, rejection=1.0)
    entry = make_entry(rows, method=AUTOREGRESSIVE, schedule=AUTOREGRESSIVE)
    plain = read(tmp_path / "a", entry)
    assert [line.quantity.label for line in compare_runs(plain, plain)] == ["tokens/s"]


def test_a_machine_that_was_slower_for_one_run_is_said(tmp_path) -> None:
    """Otherwise a user would believe a tokens/s difference between equal methods."""
    plain = {"method": AUTOREGRESSIVE, "schedule": AUTOREGRESSIVE}
    rows = make_rows(stages=4, rejection=1.0)
    slower = [row | {"decode_s": 2 * row["decode_s"]} for row in rows]
    first = read(tmp_path / "a", make_entry(rows, **plain))
    second = read(tmp_path / "b", make_entry(slower, **plain))
    (warning,) = find_warnings(first, second, compare_runs(first, second))
    assert "not equally fast: plain decoding of b at T = 0 ran at 0.50 times" in warning


def test_runs_without_times_of_prompts_are_compared_by_their_length(tmp_path) -> None:
    rows = make_rows(stages=4, rejection=0.5)
    for row in rows:
        del row["virtual_time"], row["decode_s"]
    slow = read(tmp_path / "slow", make_entry(rows))
    fast = read(tmp_path / "fast", make_entry(make_rows(stages=4, rejection=0.3, seed=5)))
    assert [line.quantity.label for line in compare_runs(slow, fast)] == ["L'"]


def test_command_prints_tables_and_verdicts_and_writes_what_it_printed(tmp_path, capsys) -> None:
    plain = make_entry(
        make_rows(stages=4, rejection=1.0), method=AUTOREGRESSIVE, schedule=AUTOREGRESSIVE
    )
    rows = [make_rows(stages=4, rejection=p, seed=s) for p, s in ((0.5, 0), (0.4, 5), (0.3, 6))]
    folders = [
        write(
            tmp_path / name,
            plain,
            make_entry(side),
            make_entry(side, benchmark=OVERALL),
        )
        for name, side in zip("abc", rows, strict=True)
    ]
    file = tmp_path / "compared.json"
    assert status(["compare", *folders, "--json", str(file)]) == 0
    out, err = capsys.readouterr()
    assert err == "" and "warning" not in out
    assert f"{folders[1]} compared with {folders[0]}" in out
    assert f"{folders[2]} compared with {folders[0]}" in out
    assert out.count("overall, T=0, spd, n=4, W=1: the second run is faster") == 2
    written = json.loads(file.read_text())
    assert written["runs"] == folders and written["warnings"] == []
    assert len(written["comparisons"]) == 2 * (1 + 3 + 3)
    line = written["comparisons"][1]
    assert line["of_compared"] == {
        "run": folders[1], "method": "spd", "schedule": "spd", "stages": 4, "tree_width": 1,
        "tree": None,
    }  # fmt: skip
    assert line["ratio"] == pytest.approx(line["compared"] / line["baseline"])
    assert f"{line['ratio']:.3f}" in out


def test_control_characters_in_results_are_not_printed(tmp_path, capsys) -> None:
    entry = make_entry(make_rows(stages=4, rejection=0.5), method="a\x1b[31m")
    folders = [write(tmp_path / name, entry, dtype=f"{name}\x1b[2J") for name in "ab"]
    assert status(["compare", *folders]) == 0
    out, _ = capsys.readouterr()
    assert r"dtype: a\x1b[2J and b\x1b[2J differ" in out and r"a\x1b[31m, n=4" in out
    assert all(line.isprintable() for line in out.splitlines())


def test_a_single_prompt_has_no_interval_in_table_or_file(tmp_path, capsys) -> None:
    rows = make_rows(stages=4, rejection=0.4, prompts=1)
    folder, file = write(tmp_path / "a", make_entry(rows)), tmp_path / "c.json"
    assert status(["compare", folder, folder, "--json", str(file)]) == 0
    assert "nan" not in capsys.readouterr().out
    line = json.loads(file.read_text())["comparisons"][0]
    assert line["ratio_ci95"] == [None, None]
    assert math.isfinite(line["ratio"])


def bad_entry(rows: list[dict], name: str) -> dict:
    if name == "short":
        return make_entry(
            [{"benchmark": "b", "id": r["id"], "tokens": 0, "steps": 0} for r in rows]
        )
    if name == "groups":
        return make_entry([row | {"groups": {"language/en": [1, 1, 1]}} for row in rows])
    return make_entry([row | {"id": f"x{row['id']}"} for row in rows])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("absent", ["results.json", "No such file"]),
        ("disjoint", ["share no prompt", "same --benchmarks"]),
        ("short", ["no prompt with a token after the first", "--max-new-tokens above 1"]),
        ("unnamed", ["has no manifest.json", "give an evaluation's folder"]),
        ("groups", ["results.json", "length >= 4", "groups"]),
    ],
)
def test_bad_runs_are_one_line_and_status_two(tmp_path, capsys, name, words) -> None:
    rows = make_rows(stages=4, rejection=0.4)
    good = write(tmp_path / "good", make_entry(rows))
    if name != "absent":
        write(tmp_path / name, bad_entry(rows, name))
    if name == "unnamed":
        (tmp_path / name / "manifest.json").unlink()
    assert_refused(capsys, ["compare", good, str(tmp_path / name)], ["RUN", name, *words])
