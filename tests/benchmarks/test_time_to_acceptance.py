"""benchmarks/time_to_acceptance.py: its rates and budgets, and a race of seconds."""

import json
import sys
import time

import pytest
from scripts import load_script

race = load_script("benchmarks/time_to_acceptance.py")


def test_the_packages_rates_rise_and_then_fall_to_the_end_of_the_budget():
    for recipe in (race.SPECFORGE, race.SPECULATORS, race.Recipe()):
        rates = [race.rate_factor(part, race.PARTS, recipe.optim) for part in range(race.PARTS + 1)]
        peak = rates.index(1.0)
        assert peak == round(race.PARTS * recipe.optim.warmup_fraction)
        assert rates[0] > 0 and rates[-1] == pytest.approx(0, abs=1e-9)
        assert rates[peak:] == sorted(rates[peak:], reverse=True)


def test_an_entrant_that_is_none_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks/time_to_acceptance.py", "--only=SpecForge"])
    with pytest.raises(SystemExit, match="2"):
        race.main()
    assert "--only: 'SpecForge' is no entrant" in capsys.readouterr().err


def test_a_budget_knows_what_its_seconds_went_to():
    budget = race.Budget(10.0, fit_s=0.5)

    def work(seconds: float) -> str:
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass
        return "done"

    assert budget.timed("target", work)(0.02) == "done"
    work(0.02)
    shares = budget.report()
    assert sum(shares.values()) == pytest.approx(1) and 0 < shares["target"] < 0.9
    assert shares["start"] > shares["target"] and 0.054 <= budget.share < 0.5


@pytest.mark.all
def test_a_race_is_run_once(tmp_path, monkeypatch, capsys):
    words = ["--minutes=0.02", f"--out={tmp_path}", "--only=pipedraft, PPSD", "--json"]
    monkeypatch.setattr(sys, "argv", ["benchmarks/time_to_acceptance.py", *words])
    race.main()
    (result,) = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["steps"] >= 1 and result["cpu_s"] >= 1.2 and result["tau"] >= 1
    assert sum(result["parts"].values()) == pytest.approx(1, abs=0.01)
    start = time.process_time()
    race.main()
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == [result]
    assert time.process_time() - start < 1
