"""Killed evaluations resume, and an evaluation's shards give the report of the whole."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import eval_runs
import pytest
from fork_server import forked, status_of
from tiny_models import REPOSITORY

from pipedraft.endings import run_command
from pipedraft.errors import UsageError
from pipedraft.eval import traces
from pipedraft.eval.__main__ import run
from pipedraft.eval.traces import TraceFile

no_pictures = eval_runs.no_pictures
pytestmark = pytest.mark.usefixtures("no_pictures")
METHODS = 2
CLOCK = (
    "wallclock",
    "processes",
    "decode_s",
    "decode_s_repeats",
    "tokens_per_s",
    "wallclock_speedup",
)


@pytest.fixture(scope="module")
def arguments(small_target) -> Callable[..., list[str]]:
    """Options: six prompts with two turns or one; the target drafts for itself."""
    words = ["--target", small_target, "--draft-model", small_target, "--schedule", "eagle"]
    words += ["--stages", "2", "--tree", "chain:2", "--benchmarks", "mt_bench,gsm8k"]
    words += ["--limit", "3", "--max-new-tokens", "5"]
    return lambda out, *more: [*words, "--out", str(out), *more]


def timeless(value: object) -> object:
    """Results without clock readings."""
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if k not in CLOCK}
    return [timeless(v) for v in value] if isinstance(value, list) else value


def results(out: Path) -> object:
    return timeless(json.loads((out / "results.json").read_text()))


def lines(out: Path) -> list[str]:
    """Lines of all trace files without the headers."""
    files = (out / "traces").glob("*.jsonl")
    return [line for file in sorted(files) for line in file.read_text().splitlines()[1:]]


@pytest.fixture(scope="module")
def whole(arguments, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    run(arguments(out))
    return out


def test_every_turn_and_every_reference_text_is_kept_once(whole):
    keys = [json.dumps(json.loads(line)[0]) for line in lines(whole)]
    turns = json.loads((whole / "results.json").read_text())
    entries = turns["runs"] if isinstance(turns, dict) else turns
    decoded = sum(r["turns"] for r in entries[0]["per_prompt"] + entries[1]["per_prompt"])
    # One line for each way to decode a turn, its reference text, and its entropies.
    assert len(keys) == len(lines(whole)) == (METHODS + 2) * decoded


def test_a_finished_evaluation_is_reported_again_without_decoding(whole, arguments, monkeypatch):
    before, expected = lines(whole), results(whole)
    monkeypatch.setattr("pipedraft.inference.engine.Engine.decode", None)  # would fail
    monkeypatch.setattr("pipedraft.eval.evaluation.Evaluation._warm_up", lambda *_: None)
    monkeypatch.setattr("pipedraft.eval.lossless.generate_greedy", None)
    run(arguments(whole))
    assert results(whole) == expected and lines(whole) == before


def test_a_killed_evaluation_goes_on_without_redoing_turns(whole, arguments, tmp_path):
    """The kill comes while the evaluation writes its fifth line."""
    write = TraceFile._write

    def write_and_die(file: TraceFile, path: Path, line: str) -> None:
        write(file, path, line)
        if len(lines(tmp_path)) == 5:
            os.truncate(path, path.stat().st_size - len(line) // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    def evaluate() -> None:
        TraceFile._write = write_and_die  # type: ignore[method-assign]
        run(arguments(tmp_path))

    assert status_of(forked(evaluate)) == -signal.SIGKILL
    kept = [line for line in lines(tmp_path) if line.endswith("]")]
    assert len(kept) == 4 and len(lines(tmp_path)) == 5
    run(arguments(tmp_path))
    assert results(tmp_path) == results(whole)
    again = [line for line in lines(tmp_path) if line.endswith("]")]
    assert len(again) == len(lines(whole)) and set(kept) <= set(again)


def test_shares_make_the_report_of_the_whole(whole, arguments, tmp_path, capsys):
    """Each shard may also start afresh."""
    for share in ("1/2", "2/2"):
        run(arguments(tmp_path, "--fresh", "--shard", share))
        assert "decoded turns of this share" in capsys.readouterr().out
        assert not (tmp_path / "results.json").exists()
    before = sorted(lines(tmp_path))
    run(arguments(tmp_path))
    assert sorted(lines(tmp_path)) == before
    assert results(tmp_path) == results(whole)


@pytest.mark.parametrize("number", range(1, 8))
def test_shares_are_even_though_benchmarks_are_short(number):
    benchmarks = {"a": [0], "b": [1], "c": [], "d": [2, 3, 4, 5]}
    shares = [traces.Traces(shard=(index, number)).mine(benchmarks) for index in range(number)]
    found = [[x for prompts in share.values() for x in prompts] for share in shares]
    assert sorted(sum(found, [])) == list(range(6))
    assert max(map(len, found)) - min(map(len, found)) <= 1
    assert all(x in benchmarks[name] for share in shares for name in share for x in share[name])
    assert all(prompts for share in shares for prompts in share.values())


def test_other_settings_and_fresh_runs_do_not_read_old_traces(arguments, tmp_path):
    short = ["--benchmarks", "gsm8k", "--limit", "1", "--max-new-tokens", "4"]
    run(arguments(tmp_path, *short))
    first = len(lines(tmp_path))
    with pytest.raises(UsageError, match="--seed was 0, is 7"):
        run(arguments(tmp_path, *short, "--seed", "7"))
    (tmp_path / "manifest.json").unlink()  # like an evaluation that did not end
    run(arguments(tmp_path, *short, "--seed", "7"))
    assert len(lines(tmp_path)) > first
    run(arguments(tmp_path, *short, "--fresh"))
    assert len(lines(tmp_path)) == first


def test_a_fresh_share_forgets_all_but_the_other_shares_of_its_division(tmp_path):
    names = ["a", "a-1-of-2", "a-2-of-2", "a-11-of-12", "a-2-of-12", "b-1-of-2", "b-2-of-2"]
    (tmp_path / "traces").mkdir()
    for name in names:
        (tmp_path / "traces" / f"{name}.jsonl").touch()

    def left() -> set[str]:
        return {path.stem for path in (tmp_path / "traces").glob("*")}

    traces.remove_traces(tmp_path, "01/2")
    assert left() == {"a-2-of-2", "b-2-of-2"}
    traces.remove_traces(tmp_path)
    assert not left()
    traces.remove_traces(tmp_path, "1/2")


def test_changed_code_does_not_read_old_traces(tmp_path):
    before = traces.code_hash()
    for folder in ("inference", "models"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text("x = 1")
    first = traces.code_hash(tmp_path)
    assert first == traces.code_hash(tmp_path) != before == traces.code_hash(REPOSITORY)
    (tmp_path / "models" / "a.py").write_text("x = 2")
    assert traces.code_hash(tmp_path) != first


def refuse():
    raise AssertionError("decoded again")


def test_a_line_that_was_cut_short_is_written_again(tmp_path):
    file = TraceFile(tmp_path, {"seed": 0}, (0, 1))
    assert file.find(["a", 1], lambda: {"x": 1}) == {"x": 1}
    with file.path.open("a") as end:
        end.write('[["b", 2], {"x"')
    file = TraceFile(tmp_path, {"seed": 0}, (0, 1))
    assert file.find(["a", 1], refuse) == {"x": 1} and file.find(["b", 2], lambda: 3) == 3
    again = TraceFile(tmp_path, {"seed": 0}, (1, 2))
    assert (again.find(["a", 1], refuse), again.find(["b", 2], refuse)) == ({"x": 1}, 3)
    with pytest.raises(AssertionError):
        TraceFile(tmp_path, {"seed": 1}, (0, 1)).find(["b", 2], refuse)


@pytest.mark.parametrize("share", ["0/2", "3/2", "1", "a/b", "1/0"])
def test_a_share_that_is_none_is_refused(share, arguments, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: run(arguments(tmp_path, "--shard", share)))
    assert ended.value.code == 2
    assert "--shard" in capsys.readouterr().err
