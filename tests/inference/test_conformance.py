"""Traces of our ranks and of vLLM's filling pass the checker. Every planted fault is named."""

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from decode_runs import CHAIN, SMALL, SimulatedSource, engine_for, greedy_reference
from tiny_models import tiny_llama
from vllm_faults import FAULTS
from vllm_runs import PLACES, Engine, random_load

from pipedraft.inference import conformance
from pipedraft.inference.__main__ import main as decode
from pipedraft.inference.conformance import check
from pipedraft.inference.trace_rows import TraceRows

PROMPT = [7, 3, 9, 3, 7, 1]
SCHEDULES = [
    {"schedule": "autoregressive"},
    {"schedule": "spd"},
    {"schedule": "spd", "tree_width": 3},
    {"schedule": "pipedec", "tree_width": 4},
    {"schedule": "ppsd"},
    {"schedule": "eagle", "tree": CHAIN},
    {"schedule": "naive_pp", "tree": SMALL},
    {"schedule": "pruned_pp", "tree": SMALL},
    {"schedule": "flowspec", "tree": SMALL},
]


def chain(*tokens, epoch=0, start=3):
    """Accepted rows, each followed by the next."""
    rows = [
        {"request": "a", "position": start + i, "token": token, "epoch": epoch, "accepted": True}
        for i, token in enumerate(tokens)
    ]
    for row, after in zip(rows, tokens[1:], strict=False):
        row["next"] = after
    return rows


def only(rows):
    (fault,) = check(rows)
    return fault


def test_a_plain_trace_has_no_fault():
    rows = chain(1, 2, 3)
    rows[-1]["next"] = 4
    wrong = {"request": "a", "position": 6, "token": 9, "epoch": 0, "accepted": False}
    assert not list(check([*rows, wrong, *chain(4, 5, epoch=1, start=6)]))
    again = chain(1, 2, 3, 4, epoch=1)  # after a preemption
    assert not list(check([*rows, *again]))
    assert not list(check([*rows, *({**row, "request": "b"} for row in rows)]))


@pytest.mark.parametrize(
    "rows, word",
    [
        ([*chain(1, 2), *chain(2, start=4)], "row 3: request a, position 4: the position was acc"),
        ([*chain(1, 2), *chain(5, start=6)], "positions 5 to 5 were left out"),
        ([*chain(1, 2), *chain(8, 9, epoch=1, start=4)], "token 2 was accepted here before, now 8"),
        ([*chain(1), *chain(2, epoch=1, start=4), *chain(3, start=5)], "epoch 0 is outdated by 1"),
        ([*chain(1), {**chain(2, start=4)[0], "cached": 6}], "6 tokens can be reused, but 5 are"),
        ([{**chain(1)[0], "next": 7}, *chain(8, start=4)], "token 8, but the target's is 7"),
    ],
)
def test_a_fault_is_named(rows, word):
    assert any(word in fault for fault in check(rows)), list(check(rows))


def test_a_ranks_own_rows_are_compared():
    rows = chain(1, 2, 3)
    own = [
        {"request": "a", "rank": 2, "position": r["position"], "token": r["token"]} for r in rows
    ]
    assert not list(check([*rows, *own, {**own[0], "position": 6}]))  # ahead when it ended
    assert "rank 2: request a, token 1: (4, 9) instead of (4, 2)" in only(
        [*rows, own[0], {**own[1], "token": 9}, own[2]]
    )
    assert "token 2: None instead of (5, 3)" in only([*rows, *own[:2]])


@pytest.mark.parametrize("row", [{}, {"request": "a", "position": "7", "token": 1}])
def test_a_row_without_its_fields_is_refused(row):
    with pytest.raises(ValueError, match="row 1: "):
        list(check([row]))


def run_checker(*files):
    command = [sys.executable, conformance.__file__, *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_checker_is_a_program_of_at_most_100_lines(tmp_path):
    assert len(Path(conformance.__file__).read_text().splitlines()) <= 100
    good, bad, broken = (tmp_path / name for name in ("good", "bad", "broken"))
    good.write_text("".join(json.dumps(row) + "\n" for row in chain(1, 2)))
    bad.write_text("".join(json.dumps(row) + "\n" for row in [*chain(1), *chain(1)]))
    broken.write_text("{\n")
    done = run_checker(good)
    assert (done.returncode, done.stdout) == (0, "0 faults in 2 rows\n")
    done = run_checker(bad)
    assert done.returncode == 1 and "the position was accepted before" in done.stdout
    for files in ((broken,), (tmp_path / "none",), ()):
        done = run_checker(*files)
        assert done.returncode == 2 and done.stderr.startswith("error: trace: ")
        assert done.stderr.count("\n") == 1


# -- our ranks ------------------------------------------------------------------------------


@pytest.mark.parametrize("way", SCHEDULES, ids=lambda way: "-".join(map(str, way.values())))
def test_our_schedules_conform(way):
    target = tiny_llama(layers=4)
    expected = greedy_reference(target, PROMPT, 24)
    source = SimulatedSource(target, PROMPT, 0.7)
    has_draft = way["schedule"] != "autoregressive"
    draft = {"source": source} if has_draft else {}
    engine = engine_for(target, num_stages=4, max_new_tokens=24, **draft, **way)
    observer = TraceRows("a")
    result = engine.decode(PROMPT, observer=observer)
    assert result.token_ids == expected
    assert not list(check(observer.rows))
    accepted = [row["token"] for row in observer.rows if row["accepted"]]
    assert accepted[: len(expected) - 1] == expected[: len(accepted)][: len(expected) - 1]
    assert has_draft == (not all(row["accepted"] for row in observer.rows))
    # A row that is left out, kept twice, or kept from an older epoch is found.
    place = len(observer.rows) // 2
    while not observer.rows[place]["accepted"]:
        place += 1
    row = observer.rows[place]
    without = [*observer.rows[:place], *observer.rows[place + 1 :]]
    assert list(check(without)) and list(check([*observer.rows[: place + 1], row]))


def test_the_command_writes_a_trace_that_passes(tmp_path, capsys):
    file = tmp_path / "trace.jsonl"
    words = ["--checkpoint", "assets/heads/spd_n4", "--prompt", "Hi", "--max-new-tokens", "16"]
    decode([*words, "--conformance", str(file)])
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) > 15 and not list(check(rows))


# -- vLLM's filling ---------------------------------------------------------------------------


def traced(folder, seed, place):
    """Run a random load with a trace, and return the trace's rows."""
    file = folder / "trace"
    engine = Engine(2 + seed % 3, rate=(0.5, 0.9)[seed % 2], trace=str(file), **place)
    with suppress(AssertionError, RuntimeError, IndexError, KeyError):
        random_load(engine, seed)  # up to a fault
    engine.close()
    lines = [f for f in (file, folder / "trace.rank0") if f.exists()]
    return [json.loads(line) for f in lines for line in f.read_text().splitlines()]


def test_the_filling_conforms(tmp_path):
    num_dropped = 0
    for seed in range(20):
        place = [*PLACES.values()][seed % len(PLACES)]
        rows = traced(tmp_path, seed, place)
        assert rows and not list(check(rows)), (seed, list(check(rows))[:3])
        num_dropped += sum(row.get("accepted") is False for row in rows)
    assert num_dropped > 20


IN_THE_TRACE = {
    "no truncation": "rank 0: request",
    "stale output and its sample kept": "but the target's is",
    "position over-advanced": "were left out",
    "token recorded twice": "request",
}
"""Fault -> what the checker says. The others leave the scheduler's decisions as they are."""


@pytest.mark.parametrize("name", IN_THE_TRACE)
def test_the_checker_names_a_planted_fault(name, tmp_path, monkeypatch):
    for owner, attribute, fault in FAULTS[name]:
        monkeypatch.setattr(owner, attribute, fault)
    said = ""
    for seed in range(60):
        place = [*PLACES.values()][seed % len(PLACES)]
        said = "\n".join(check(traced(tmp_path, seed, place)))
        if IN_THE_TRACE[name] in said:
            return
    raise AssertionError(said)
