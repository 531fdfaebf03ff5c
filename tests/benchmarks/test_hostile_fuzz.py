"""The fuzzer finds nothing in its first inputs, and finds planted faults."""

import argparse
import json
import random
import threading
from pathlib import Path

import pytest
from scripts import load_script

fuzz = load_script("benchmarks/fuzz.py")


def arguments(out: Path | None = None, **given) -> argparse.Namespace:
    known = {"seed": 1, "inputs": 240, "minutes": 60.0, "only": "", "out": out}
    return argparse.Namespace(**{**known, "limit_s": 20.0, "wait_s": 60.0, **given})


def test_no_mutated_input_ends_in_a_traceback_or_another_sequence(tmp_path, capsys):
    found = fuzz.fuzz(arguments(), tmp_path)
    assert not found["failed"], capsys.readouterr().out[-3000:]
    refused = sum(count for name, count in found["counts"].items() if name.endswith("refused"))
    assert found["next"] == 240 and 60 < refused < 240


def test_a_run_goes_on_where_the_last_one_ended(tmp_path):
    def run(**given) -> dict:
        work = tmp_path / str(random.random())
        work.mkdir()
        return fuzz.fuzz(arguments(tmp_path / "out", only="results", **given), work)

    assert run(inputs=5)["next"] == 5 and run(inputs=7)["next"] == 12
    assert run(inputs=0, seed=2)["next"] == 0
    assert json.loads((tmp_path / "out" / "state.json").read_text())["seed"] == 2


def raises(_: random.Random) -> None:
    raise KeyError("x")


def hangs(_: random.Random) -> None:
    while True:
        pass


def waits(_: random.Random) -> None:
    threading.Event().wait()


def talks(_: random.Random) -> None:
    raise ValueError("a\nb\nc")


@pytest.mark.parametrize(
    "area, said",
    [
        (raises, "KeyError"),
        (hangs, "no end in time"),
        (waits, "no end in time"),
        (talks, "several lines"),
    ],
)
def test_what_should_not_be_is_found(area, said):
    limits = (0.1, 0.1 if area is waits else 60.0)
    assert said in fuzz.attempt(area, random.Random(0), *limits)
    assert fuzz.attempt(lambda _: None, random.Random(0), 0.1, 60.0) == "taken"
