"""Files written for an evaluation: keys, tables, plots, atomic replacement."""

import json
import math
import re

import numpy as np
import pytest
from eval_runs import MANIFEST, make_runs
from msgspec.structs import replace

from pipedraft.eval.command import ways_of
from pipedraft.eval.metrics import AUTOREGRESSIVE, OVERALL
from pipedraft.eval.record import LosslessRecord, ProcessRecord, WallClockRecord
from pipedraft.eval.report import write_report
from pipedraft.eval.screen import screen_table
from pipedraft.files import to_json


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    write_report(folder, make_runs(), MANIFEST)
    return folder


def test_results_keep_benchmarks_and_their_pool_apart(written) -> None:
    results = json.loads((written / "results.json").read_text())
    assert len(results["runs"]) == 12 and len(results["overall"]) == 4
    names = {run["benchmark"] for run in results["runs"]}
    assert names == {"mt_bench", "gsm8k", "humaneval"}
    baseline = results["runs"][0]  # values that do not exist are null
    assert baseline["method"] == AUTOREGRESSIVE
    assert baseline["draft_acceptance_rate"] is baseline["wallclock"]["speedup"] is None


def test_report_has_a_table_per_benchmark_with_the_baseline(written) -> None:
    report = (written / "report.md").read_text()
    for name in ("mt_bench", "gsm8k", "humaneval", OVERALL):
        section = report.partition(f"## {name}\n")[2].partition("\n## ")[0]
        rows = [line for line in section.splitlines() if line.startswith("| autoregressive |")]
        assert len(rows) == 1 and "| 1.000 | [1.000, 1.000] | 1.000 |" in rows[0]
        assert section.count("| spd |") == 3
    assert "16/16" in report and "no chat template" in report


@pytest.mark.parametrize("name", ["length_by_benchmark", "acceptance_by_position"])
def test_a_chart_is_a_picture_with_ink_a_drawing_and_its_numbers(written, name: str) -> None:
    from matplotlib.image import imread

    place = written / "charts" / name
    assert f"(charts/{name}.png)" in (written / "report.md").read_text()
    assert place.with_suffix(".svg").read_text().rstrip().endswith("</svg>")
    header, *lines = place.with_suffix(".csv").read_text().splitlines()
    assert header == "panel,series,place,value,low,high" and len(lines) > 8
    assert all(len(line.rsplit(",", 4)) == 5 for line in lines)
    picture = imread(place.with_suffix(".png"))
    assert picture.shape[0] > 400 and picture.shape[1] > 600
    assert np.unique(picture.reshape(-1, picture.shape[-1]), axis=0).shape[0] > 50


def test_mismatches_and_left_out_turns_are_said_in_the_report(tmp_path) -> None:
    runs = make_runs(("gsm8k",), stages=(4,))
    lossless = LosslessRecord(checked=16, mismatches=3)
    runs[1] = replace(runs[1], lossless=lossless, skipped_turns=2)
    write_report(tmp_path, runs, MANIFEST | {"created": "2026-01-02T03:04:05+00:00"})
    report = (tmp_path / "report.md").read_text()
    assert report.startswith("# spd on tiny, 2026-01-02\n")
    assert "**Not lossless** (gsm8k, spd, T=0): 13/16 turns agree" in report
    assert "2 turns left out" in report


def test_acceptance_by_position_has_intervals_around_every_share(written) -> None:
    report = (written / "report.md").read_text().partition("## Acceptance by position")[2]
    rows = [line for line in report.splitlines() if line.startswith("| spd |")][:3]
    for row in rows:
        for cell in row.strip("| ").split(" | ")[5:]:
            rate, low, high = (float(part) for part in re.findall(r"\d\.\d+", cell))
            assert low < rate < high
            assert low < 0.7 < high or abs(rate - 0.7) < 0.1  # the draft's true acceptance


def test_categories_are_shown_where_a_benchmark_has_several(written) -> None:
    report = (written / "report.md").read_text()
    section = report.partition("## mt_bench by category\n")[2]
    lines = [line for line in section.splitlines() if line.startswith("| spd |")]
    assert [line.split("|")[6:8] for line in lines] == [[" writing ", " 8 "], [" math ", " 8 "]] * 3
    assert report.count("by category") == 1


def test_lists_of_numbers_take_one_line_and_texts_are_left_alone() -> None:
    content = {
        "counts": [1, 2, 3],
        "bounds": [[0.5, math.nan], [-1e-9, 2.0]],
        "texts": ["[\n 1,\n 2\n]", "[ a ]"],
        "empty": [],
    }
    text = to_json(content).decode()
    expected = content | {"bounds": [[0.5, None], [-1e-9, 2.0]]}
    assert json.loads(text) == expected
    assert '"counts": [1, 2, 3],' in text and "[0.5, null]" in text


def test_the_terminals_table_is_narrow_and_has_the_baseline() -> None:
    lines = screen_table(make_runs()).splitlines()
    table = lines[[line.startswith("benchmark") for line in lines].index(True) :]
    column = table[0].index("lossless")
    assert all(len(line) == column + len("lossless") for line in table[:18])
    assert max(map(len, table[:18])) < 100
    assert any(AUTOREGRESSIVE in line for line in table)


@pytest.mark.parametrize(
    "tree, note",
    [
        (
            "dynamic:7:10:59",
            "dynamic:7:10:59, T=0: the draft costs more than it saves here (0.50).",
        ),
        ("chain:3", "chain:3, T=0: the draft costs more than it saves here (0.50)."),
    ],
)
def test_a_full_line_keeps_tau_and_advice_fits_what_ran(tree: str, note: str) -> None:
    runs = make_runs(("mt_bench", "gsm8k"), stages=(4,))
    slow = WallClockRecord(tokens_per_s=123456.7, speedup=0.5)
    named = {"method": "smollm2_eagle3, temperature 1.0", "tree": tree, "wallclock": slow}
    named |= {"processes": 4 * [ProcessRecord(name="rank", seconds={})]}
    runs += [replace(run, **named) for run in runs if run.method == "spd"]
    text = screen_table(runs)
    header = next(line for line in text.splitlines() if line.startswith("benchmark")).split()
    assert "tau" in header and "speed-up" in header and "S" not in header
    assert "Left out, as the line is full: S" in text and note in text
    assert text.count("costs more than it saves") == 1


def test_ways_that_no_column_tells_apart_have_their_settings_in_the_name() -> None:
    given = {"draft_tokens": 3, "accept": [0.0, 0.1], "tree": ["chain:3", "chain:7"]}
    assert [name for name, _ in ways_of("pipeinfer", given, "lm")] == [
        "lm, accept 0.0",
        "lm, accept 0.1",
    ]
    assert [name for name, _ in ways_of("eagle", given, "e")] == ["e", "e"]
