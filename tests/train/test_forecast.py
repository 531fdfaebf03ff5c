"""Forecasts of a run's acceptance length, and their intervals."""

import json
import math
import sys
from dataclasses import replace

import numpy as np
import pytest
from train_runs import logged

from pipedraft.endings import run_command
from pipedraft.train.__main__ import main, take_wish
from pipedraft.train.forecast import (
    FRACTIONS,
    Curve,
    Forecaster,
    Interval,
    Kind,
    Point,
    RunForecast,
    alike,
    binned,
    points_of,
    read_curves,
    told,
)
from pipedraft.train.wish import Wish, short, tokens_for


def run_of(draws: np.random.Generator, *, spread: float = 1.0, noise: float = 1.0) -> Curve:
    """A run that follows the law: 100 records with noise, and an evaluation every 20."""
    c, g, offset = np.array([0.2, 0.15, 0.1]) + spread * 0.04 * draws.normal(size=3)
    end = 10 ** draws.uniform(5, 6)
    points = []
    for share in np.arange(1, 101) / 100:
        length = 0.5 + c * math.log(share * end / 1e4) + g * share
        kinds: list[tuple[Kind, float, float]] = [("train", 0.0, 0.03), ("decoded", offset, 0.05)]
        for kind, more, deviation in kinds:
            if kind == "train" or round(100 * share) % 20 == 0:
                seen = length + more + noise * deviation * draws.normal()
                points.append(Point(kind, round(share * end), share, math.exp(seen)))
    return Curve("spd", tuple(points))


@pytest.fixture(scope="module")
def made():
    draws = np.random.default_rng(0)
    return Forecaster.of([run_of(draws) for _ in range(30)], "decoded")


def test_a_run_that_follows_the_law_is_foretold(made):
    draws = np.random.default_rng(1)
    for _ in range(5):
        curve = run_of(draws, spread=0.3, noise=0.1)
        for fraction in (0.25, 0.5, 1.0):
            found = made.forecast(curve, curve.tokens, 1.0, now=fraction * curve.tokens)
            end = curve.of("decoded")[-1].length
            assert found.low < end < found.high
            assert found.value == pytest.approx(end, rel=0.08)


def test_intervals_hold_nine_of_ten_runs_and_narrow(made):
    draws = np.random.default_rng(2)
    for fraction in (0.1, 0.5):
        held, widths = [], []
        for _ in range(100):
            curve = run_of(draws)
            found = made.forecast(curve, curve.tokens, 1.0, now=fraction * curve.tokens)
            held.append(found.low <= curve.of("decoded")[-1].length <= found.high)
            widths.append(found.high / found.low)
        assert 0.84 <= np.mean(held) <= 0.99
        assert 1.1 < np.median(widths) < (1.6 if fraction == 0.1 else 1.4)


def test_a_forecast_further_away_is_wider_and_stays_below_a_full_round(made):
    curve = run_of(np.random.default_rng(3))
    near, far = (
        made.forecast(curve, times * curve.tokens, 1.0, now=curve.tokens) for times in (1, 100)
    )
    assert far.value > near.value and far.high / far.low > near.high / near.low
    capped = made.forecast(curve, 1e12, 1.0, now=curve.tokens, longest=4)
    assert capped.value == capped.high == 4


def test_what_comes_later_does_not_count(made):
    curve = run_of(np.random.default_rng(4))
    now = 0.3 * curve.tokens
    part = Curve("spd", tuple(p for p in curve.points if p.tokens <= now))
    assert made.forecast(curve, 1e6, 1.0, now=now) == made.forecast(part, 1e6, 1.0, now=now)
    assert made.forecast(curve, 1e6, 1.0, now=0.01 * curve.tokens) is None


def test_records_become_points():
    records = [
        {"step": 1, "tokens": 10, "lr": 0.5, "agreement": 0.5, "loss": 1.0},
        {"step": 2, "tokens": 20, "lr": 1.0, "acceptance_length_T0": 1.5, "agreement_1": 0.4},
        {"step": 3, "tokens": 30, "lr": 0.25, "agreement": 0.75},
        {"step": 3, "tokens": 30, "valid/agreement": 0.6, "valid/decoded_acceptance_length": 3.0},
    ]
    assert list(points_of(records, peak_rate=1.0)) == [
        Point("train", 10, 0.0, 2.0),  # the rate still rises
        Point("train", 20, 0.0, 1.5),
        Point("train", 30, 0.75, 4.0),
        Point("expected", 30, 0.75, 2.5),
        Point("decoded", 30, 0.75, 3.0),
    ]


def test_bins_have_the_noise_of_their_mean():
    draws = np.random.default_rng(5)
    points = [Point("train", 10_000 + n, 0.0, math.exp(0.1 * draws.normal())) for n in range(400)]
    (one,) = binned(points)
    assert one.noise == pytest.approx(0.1**2 / 400, rel=0.2)
    assert one.length == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("kind", ["decoded", "expected"])
def test_the_runs_that_ship_end_within_the_intervals_by_the_others(kind):
    curves = [curve for curve in read_curves().values() if curve.of(kind)]
    assert len(read_curves()) >= 12 and len({curve.method for curve in curves}) >= 4
    held = []
    for index, curve in enumerate(curves):
        others = alike(curves[:index] + curves[index + 1 :], curve.method, kind)
        made, end = Forecaster.of(others, kind), curve.of(kind)[-1]
        for fraction in FRACTIONS:
            now = fraction * curve.tokens
            found = made.forecast(curve, end.tokens, end.decayed, now=now)
            if found is not None:
                held.append(found.low <= end.length <= found.high)
    assert len(held) >= 12 and np.mean(held) >= 0.9


@pytest.mark.parametrize("method", ["ppsd", "eagle3"])
def test_a_run_logs_its_forecasts(method, world, tmp_path, capsys):
    """Heads with a longest chain have no forecast beyond their run's end."""
    changes = {"max_steps": 60, "evaluation__every_steps": 0, "evaluation__decode_prompts": 2}
    changes |= {"model__num_stages": 2} if method == "ppsd" else {}
    world.trainer(method, tmp_path, data__valid_fraction=0.3, **changes).run()
    made = [r for r in logged(tmp_path) if any("forecast/" in key for key in r)]
    steps = [record["step"] for record in made]
    assert 30 in steps and (60 in steps) == (method == "ppsd")
    for record in made:
        names = [key for key in record if key.startswith("forecast/")]
        assert ("forecast/end" in names) == (record["step"] < 60)
        assert ("forecast/100x" in names) == (method == "ppsd")
        for name in names[::3]:
            low, value, high = (record[name + end] for end in ("_low", "", "_high"))
            assert 1 <= low <= value <= high <= (math.inf if method == "ppsd" else 8)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("forecast")]
    assert said == [told(record, "decoded") for record in made]
    assert said[0].startswith("forecast (with 90 % intervals): tau ") and " at the end" in said[0]


def test_a_run_from_a_trained_head_makes_no_forecast():
    records = [
        {"step": step, "tokens": 100.0 * step, "agreement": 0.3 + step / 200, "lr": 1e-3}
        for step in range(1, 41)
    ]
    run = RunForecast(
        method="spd", kind="expected", num_steps=80, peak_rate=1e-3, final_decay=1.0, longest=99
    )
    assert "forecast/end" in run.figures(records)
    assert not replace(run, is_first=False).figures(records)


def test_a_forecast_is_due_once_at_each_share():
    whole = {"peak_rate": 1.0, "final_decay": 1.0, "longest": math.inf}
    run = RunForecast(method="spd", kind="decoded", num_steps=1000, **whole)
    due = [step for step in range(10, 1001, 10) if run.is_due(step - 10, step)]
    assert due == [round(1000 * fraction) for fraction in FRACTIONS]


# -- a wish ---------------------------------------------------------------------------------


def test_the_tokens_of_a_wish_reach_it(made):
    curve = run_of(np.random.default_rng(6))
    tokens, low, high = tokens_for(3.0, curve, made, 1.0)
    assert low < tokens < high
    found = made.forecast(curve, tokens, 1.0, now=curve.tokens)
    assert found.value == pytest.approx(3.0, rel=0.01)
    assert tokens_for(1e4, curve, made, 1.0)[0] == math.inf
    assert short(math.inf) == "out of reach" and short(1_234_567) == "1.2 M"
    assert short(999_600) == "1.0 M" and short(80_543) == "81,000" and short(94.2) == "94"


def test_the_plan_says_what_a_wish_needs(world, tmp_path, monkeypatch, capsys):
    def plan(method: str, *words: str) -> tuple[int, str, str]:
        arguments = [*world.arguments(method, tmp_path / "new"), "--plan", *words]
        monkeypatch.setattr(sys, "argv", ["train", *arguments])
        status = 0
        try:
            run_command(main)
        except SystemExit as error:
            status = int(error.code or 0)
        return status, *capsys.readouterr()

    status, said, _ = plan("spd", "--wish-tau", "3.5")
    assert status == 0
    wish, conversations, hint = said.splitlines()[-3:]
    assert wish.startswith("tau 3.5, decoded: about ") and "our run spd_quickstart" in wish
    assert conversations.endswith(" supervised tokens each") and "--curve FOLDER" in hint
    for method, words, line in (
        ("spd", ["--wish-tau=3", "--curve=none"], "--curve: 'none' is no run; give a run's"),
        ("eagle3", ["--wish-tau=3"], "--wish-tau: 3 for eagle3, but the measured runs can"),
        ("spd", ["--wish-tau=high"], "--wish-tau: 'high' is no acceptance length; give one above"),
        ("spd", ["--curve", "x"], "--curve: 'x' without --wish-tau; give the wished tau"),
        ("spd", ["--wish-tau"], "--wish-tau: no value; give one"),
    ):
        status, _, error = plan(method, *words)
        assert status == 2 and error.startswith(f"error: {line}"), error


def test_a_curve_of_ones_own_is_read(world, tmp_path):
    records = [
        {"step": n, "tokens": 100 * n, "lr": 1 - n / 40, "agreement": 0.2 + 0.1 * math.log(n)}
        for n in range(1, 41)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in records))
    (tmp_path / "config.yaml").write_text("method: spd\noptim: {lr: 1.0}\n")
    curve, name = Wish(2.5, tmp_path).curve("spd")
    assert name == str(tmp_path) and curve.tokens == 4000 and len(curve.of("train")) == 40
    with pytest.raises(ValueError, match=r"is a run of spd, and this plan is for eagle3"):
        Wish(2.5, tmp_path).curve("eagle3")


def test_the_flags_of_a_wish_are_taken_out():
    assert take_wish(["--seed", "1"]) == (["--seed", "1"], None, None)
    rest, length, folder = take_wish(["--wish_tau=2.5", "--seed", "1", "--curve", "out/a"])
    assert (rest, length, str(folder)) == (["--seed", "1"], 2.5, "out/a")


def test_an_interval_reads_as_text():
    assert str(Interval(2.0, 1.5, 2.5)) == "2.00 (1.50 to 2.50)"
