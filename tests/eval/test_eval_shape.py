"""Evaluations without --tree, --schedule and --stages choose a shape, and record it."""

import json

import eval_runs
import pytest
from eval_runs import make_runs
from msgspec.structs import replace

from pipedraft.eval import evaluation
from pipedraft.eval.__main__ import run
from pipedraft.eval.record import RepeatsRecord, ShapeRecord, WallClockRecord
from pipedraft.eval.screen import screen_table
from pipedraft.eval.tables import choices, slower_drafts, warnings
from pipedraft.inference.auto_tree import FIRST
from pipedraft.inference.shapes import PAPER

no_pictures = eval_runs.no_pictures
pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.fixture(scope="module")
def arguments(small_target):
    words = ["--target", small_target, "--draft-model", small_target, "--benchmarks", "gsm8k"]
    words += ["--limit", "2", "--max-new-tokens", "8"]
    return lambda out, *more: [*words, "--out", str(out), *more]


def drafted(out) -> dict:
    return json.loads((out / "results.json").read_text())["runs"][1]


def test_the_shape_is_measured_recorded_and_kept_by_a_resumed_run(
    arguments, tmp_path, capsys, monkeypatch
):
    run(arguments(tmp_path))
    said, found = capsys.readouterr().out, drafted(tmp_path)
    assert found["tree"] == found["chosen"]["tree"] and found["stages"] == 1
    assert found["schedule"] == "eagle" and found["chosen"]["tokens_per_s"]["none"] > 0
    assert found["lossless"] == {"checked": 2, "mismatches": 0}
    assert f"{found['tree']} is the fastest draft in first rounds (tokens/s: " in said
    for name in ("report.md", "report.html"):
        assert "is the fastest draft in first rounds" in (tmp_path / name).read_text()
    assert "accepted" in (tmp_path / "outputs.html").read_text()
    monkeypatch.setattr(evaluation, "measure_shape", None)  # would fail
    run(arguments(tmp_path))
    assert drafted(tmp_path)["chosen"] == found["chosen"]


def test_shares_decode_alike_and_a_named_shape_is_no_choice(arguments, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "measure_shape", None)  # would fail
    run(arguments(tmp_path / "shares", "--shard", "1/2"))
    run(arguments(tmp_path / "shares"))
    found = drafted(tmp_path / "shares")
    assert found["chosen"] == {"tree": FIRST.label, "tokens_per_s": {}}
    run(arguments(tmp_path / "named", "--tree", "paper"))
    found = drafted(tmp_path / "named")
    assert "chosen" not in found and found["tree"] == "dynamic:7:10:59" and found["stages"] == 1


def timed(tree: str, speedup: float, **fields):
    """Return make_runs' run of SPD with another shape and speed, on one stage."""
    entry = next(x for x in make_runs(("gsm8k",), stages=(4,)) if x.method == "spd")
    clock = WallClockRecord(tokens_per_s=50.0, speedup=speedup)
    changed = {"method": "eagle3", "schedule": "eagle", "tree": tree, "stages": 1}
    return replace(entry, **changed | {"wallclock": clock} | fields)


def test_advice_names_only_what_was_measured_faster_and_not_what_ran():
    tree, chain = timed(PAPER, 0.05), timed("chain:3", 1.26)
    assert slower_drafts([chain]) == []
    (alone,) = slower_drafts([tree])
    assert alone == "eagle3, dynamic:7:10:59, T=0: the draft costs more than it saves here (0.05)."
    (both,) = slower_drafts([tree, chain])
    assert both.endswith("saves here (0.05); chain:3 ran at 1.26.")
    slow = [tree, timed("chain:3", 0.4)]
    assert not any("ran at" in line for line in slower_drafts(slow))
    (steps,) = slower_drafts([timed("width:4", 0.1, stages=4)])
    assert "read L', not the speed-up: one process ran the 4 stages" in steps
    assert "--tree" not in screen_table([tree, chain])


def test_a_busy_machine_and_unsteady_repeats_are_told():
    clock = WallClockRecord(tokens_per_s=50.0, speedup=1.2, load_average=9.1, cores=2)
    (line,) = warnings([timed("chain:3", 1.2, wallclock=clock)])
    assert line.startswith("The machine was busy (load average 9.1 on 2 cores)")
    for load in (2.0, None):
        quiet = replace(clock, load_average=load)
        assert warnings([timed("chain:3", 1.2, wallclock=quiet)]) == []
    repeats = RepeatsRecord(repeats=2, unequal_turns=0, tokens_per_s=[20.0, 30.0])
    (line,) = warnings([timed("chain:3", 1.2, repeats=repeats)])
    assert "repeats ran at 20.0 to 30.0 tokens/s" in line
    steady = replace(repeats, tokens_per_s=[20.0, 21.0])
    assert warnings([timed("chain:3", 1.2, repeats=steady)]) == []


def test_a_choice_without_times_tells_why():
    record = ShapeRecord(tree="chain:3")
    (line,) = choices([timed("chain:3", 1.2, chosen=record)])
    assert line == "eagle3, T=0: chain:3 is not timed, so that all shares decode alike."
