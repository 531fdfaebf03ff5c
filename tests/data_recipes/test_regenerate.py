"""Regenerated answers: no row lost, no question repeated, order kept, faults reported."""

import json
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
import regenerate_runs
from regenerate_runs import (
    DEADLINE_S,
    FAULTS,
    LIMIT_S,
    FakeServer,
    call,
    fault_of,
    make_data,
    read_rows,
    write_rows,
)

from pipedraft.data_recipes import chat_client as chat_server
from pipedraft.data_recipes import regenerate
from pipedraft.data_recipes.answers import AnswerFile

server, signals = regenerate_runs.server, regenerate_runs.signals
NUM_ROWS = 55
"""Includes every fault at least twice, and no two consecutive slow answers."""


def arguments(server: FakeServer, data: Path, out: Path, *more: object) -> list[str]:
    where = ["--server", server.url, "--model", "tiny", "--data", data, "--out", out]
    return [*map(str, where), "--deadline", str(DEADLINE_S), *map(str, more)]


def start(given: list[str]) -> subprocess.Popen:
    """Start a process with time to leave in order, however busy the machine is."""
    program = (
        "import runpy; runpy.run_module('pipedraft.data_recipes.regenerate', run_name='__main__')"
    )
    command = [sys.executable, "-c", program, *given]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def settled_rows(out: Path) -> list[int]:
    """Rows left in the database by a killed process, in order of arrival."""
    copy = out.with_name("copy.sqlite")
    for suffix in ("", "-wal"):
        shutil.copy(f"{out.with_suffix('.sqlite')}{suffix}", f"{copy}{suffix}")
    with closing(sqlite3.connect(copy)) as database:
        return [row for (row,) in database.execute("SELECT row FROM rows")]


def test_nothing_is_lost_at_a_server_that_fails_in_every_way(server, monkeypatch, tmp_path, capsys):
    data, expected = make_data(tmp_path, NUM_ROWS)
    questions = [m["content"] for messages in expected for m in messages[::2]]
    faults = Counter(filter(None, map(fault_of, questions)))
    assert set(faults) == set(FAULTS) and 0.15 < faults.total() / len(questions) < 0.3
    server.is_faulty, server.delay_s, server.least_in_flight = True, 0.005, 5
    out = tmp_path / "own.jsonl"
    assert call(arguments(server, data, out, "--concurrency", 12), monkeypatch) == 0
    rows, numbers = read_rows(out), [*range(NUM_ROWS)]
    assert [row["messages"] for row in rows] == expected
    assert [row["input_row"] for row in rows] == [row["id"] for row in rows] == numbers
    assert server.counts == Counter({q: 1 + bool(fault_of(q)) for q in questions})
    assert 4 < server.most_in_flight <= 12 + faults["slow"]  # a slow answer outlives its client
    busy = [server.times[question] for question in questions if fault_of(question) == "busy"]
    assert all(second - first >= 1 for first, second in busy)
    total, repeats = len(questions) + faults.total(), faults.total()
    said = capsys.readouterr().out
    assert f"{NUM_ROWS} rows answered, 0 failed" in said
    assert f"{total} requests, {repeats} of them repeats" in said
    assert not out.with_suffix(".errors.jsonl").exists()


def wait_for(server, process, requests) -> None:
    """Wait until the server has received this many requests."""
    while sum(server.counts.values()) < requests:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)


def test_a_killed_run_goes_on_without_asking_for_finished_rows(server, monkeypatch, tmp_path):
    data, expected = make_data(tmp_path, 46)  # any slow answer is among the first 60
    server.is_faulty, server.delay_s = True, 0.03
    server.held, server.num_unheld = {"user 1.0"}, 60  # it neither ends nor finishes row 1
    out = tmp_path / "own.jsonl"
    given = arguments(server, data, out, "--concurrency", 8)
    with start(given) as process:
        wait_for(server, process, 50)
        process.kill()
    server.release()
    time.sleep(0.2)
    settled, asked = settled_rows(out), server.counts
    assert len(settled) > 5 and not out.exists()
    assert max(settled) >= len(settled), "the kill should find rows that wait for an earlier one"
    assert call(given, monkeypatch) == 0
    assert [row["messages"] for row in read_rows(out)] == expected
    for row in settled:
        for message in expected[row][::2]:
            assert server.counts[message["content"]] == asked[message["content"]]
    total = sum(server.counts.values())
    assert call(given, monkeypatch) == 0
    assert sum(server.counts.values()) == total, "a complete run asks for nothing"


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT], ids=lambda s: s.name)
def test_a_stopped_run_says_how_to_go_on(sent, server, monkeypatch, tmp_path):
    data, expected = make_data(tmp_path, 40)
    server.delay_s, server.num_unheld = 0.05, 40
    out = tmp_path / "own.jsonl"
    given = arguments(server, data, out, "--concurrency", 4)
    with start(given) as process:
        wait_for(server, process, 30)
        process.send_signal(sent)
        _, said = process.communicate(timeout=LIMIT_S)
    server.release()
    assert process.returncode == 130
    last = said.splitlines()[-1]
    assert last.startswith("error: interrupted; ") and "of 40 rows left, resume" in last
    server.delay_s = 0
    assert call(given, monkeypatch) == 0
    assert [row["messages"] for row in read_rows(out)] == expected


def test_a_server_that_goes_away_stops_the_run_and_spoils_no_row(
    server, monkeypatch, tmp_path, capsys
):
    data, expected = make_data(tmp_path, 30)
    out = tmp_path / "own.jsonl"
    given = arguments(server, data, out, "--concurrency", 2, "--attempts", 3)
    server.delay_s = 0.01
    settle, seen = regenerate.Run.settle, []

    def settle_and_leave(self, dialogue, reason):
        settle(self, dialogue, reason)
        seen.append(dialogue.row)
        if len(seen) == 10:
            monkeypatch.setattr(chat_server.ChatServer, "base", "http://127.0.0.1:1/v1")

    with monkeypatch.context() as patch:
        patch.setattr(regenerate.Run, "settle", settle_and_leave)
        base = chat_server.ChatServer.base
        assert call(given, monkeypatch) == 1
        monkeypatch.setattr(chat_server.ChatServer, "base", base)
    said = capsys.readouterr().err.splitlines()[-1]
    assert "no connection" in said and "rows left, resume with the same command" in said
    assert not out.with_suffix(".errors.jsonl").exists()
    assert call(given, monkeypatch) == 0
    assert [row["messages"] for row in read_rows(out)] == expected


def test_failed_rows_are_kept_with_their_reason_and_can_be_retried(
    server, monkeypatch, tmp_path, capsys
):
    good, refused = {"prompt": "Good?"}, {"prompt": "Too long?", "source": "b"}
    backwards = {"messages": [{"role": "assistant", "content": "Hi"}]}
    data = write_rows(tmp_path / "chats.jsonl", [refused, good, backwards, good])
    with data.open("a") as file:
        file.write("{half\n\n" + json.dumps(good) + "\n")
    out = tmp_path / "own.jsonl"
    errors = out.with_suffix(".errors.jsonl")
    server.refused = {"Too long?"}
    given = arguments(server, data, out)
    for _ in range(2):  # the second run has nothing to do
        assert call(given, monkeypatch) == 0
        assert "3 rows answered, 3 failed" in capsys.readouterr().out
        assert [row["input_row"] for row in read_rows(out)] == [1, 3, 5]
        failed = {row["input_row"]: row for row in read_rows(errors)}
        assert failed[0]["row"] == refused and "HTTP 400: " in failed[0]["reason"]
        assert failed[2]["row"] == backwards and "does not follow" in failed[2]["reason"]
        assert failed[4]["row"] == "{half" and failed[4]["reason"] == "not JSON"
    assert server.counts == Counter({"Good?": 3, "Too long?": 1})
    server.refused = set()
    assert call([*given, "--retry-errors"], monkeypatch) == 0
    rows = read_rows(out)
    assert [row["input_row"] for row in rows] == [0, 1, 3, 5]
    assert rows[0]["source"] == "b" and rows[0]["messages"][0]["content"] == "Too long?"
    assert [row["input_row"] for row in read_rows(errors)] == [2, 4]
    assert server.counts == Counter({"Good?": 3, "Too long?": 2})


def test_a_server_that_refuses_everything_stops_the_run(server, monkeypatch, tmp_path, capsys):
    data = write_rows(tmp_path / "chats.jsonl", [{"prompt": "No?"}] * 150)
    server.refused = {"No?"}
    out = tmp_path / "own.jsonl"
    assert call(arguments(server, data, out, "--concurrency", 2), monkeypatch) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert "100 rows in a row have failed: HTTP 400" in said and " of 150 rows left" in said
    assert 100 <= len(read_rows(out.with_suffix(".errors.jsonl"))) < 103


def test_other_settings_or_another_input_are_refused(server, monkeypatch, tmp_path, capsys):
    data, _ = make_data(tmp_path, 6)
    other = write_rows(tmp_path / "other.jsonl", [{"prompt": "Other?"}])
    out = tmp_path / "own.jsonl"
    assert call(arguments(server, data, out, "--temperature", 0.7), monkeypatch) == 0
    before = out.read_bytes()
    for bad, words in (
        (arguments(server, data, out), "--temperature: 1.0, but"),
        (arguments(server, other, out, "--temperature", 0.7), "--data (digest): "),
        (arguments(server, data, other), "other.jsonl' exists and has no other.sqlite"),
    ):
        capsys.readouterr()
        assert call(bad, monkeypatch) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert words in said and "another" in said
    assert out.read_bytes() == before
    held = AnswerFile(tmp_path / "held.jsonl", {}, num_rows=6, retry_errors=False)
    assert call(arguments(server, data, tmp_path / "held.jsonl"), monkeypatch) == 2
    assert "another process is writing" in capsys.readouterr().err
    held.close()


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"--server": "localhost:8000"}, 2, ["--server: 'localhost:8000'", "give for example"]),
        ({"--server": "http://localhost:port"}, 2, ["--server: 'http://localhost:port'"]),
        ({"--server": "http://localhost:99999"}, 2, ["--server: 'http://localhost:99999'"]),
        ({"--server": "http://127.0.0.1:1"}, 1, ["--server: http://127.0.0.1:1/v1", "start it"]),
        (
            {"--server": "{url}/v2"},
            2,
            ["--server: ", "/v2/models answered HTTP 404", "check address"],
        ),
        ({"--model": "large"}, 2, ["--model: 'large' is not served", "it has tiny"]),
        ({"--batch": "3"}, 2, ["--batch: 3 is for --target"]),
        ({"--temperature": "0"}, 2, ["--temperature: 0", "--greedy-share 1"]),
        ({"--key-variable": "NO_KEY"}, 2, ["--key-variable: 'NO_KEY' is not set", "export"]),
        ({"--data": "nowhere.jsonl"}, 2, ["--data: no file nowhere.jsonl"]),
        ({"--out": "own.parquet"}, 2, ["--out: 'own.parquet' does not end in .jsonl"]),
        ({"--out": "/nowhere/own.jsonl"}, 2, ["--out: ", "cannot be written"]),
    ],
    ids=lambda value: next(iter(value.values())) if isinstance(value, dict) else "",
)
def test_bad_input_is_one_line(change, status, words, server, monkeypatch, tmp_path, capsys):
    data, _ = make_data(tmp_path, 2)
    given = arguments(server, data, tmp_path / "own.jsonl")
    for name, value in change.items():
        value = value.replace("{url}", server.url)
        if name in given:
            given[given.index(name) + 1] = value
        else:
            given += [name, value]
    assert call(given, monkeypatch) == status
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and all(word in said[0] for word in words), said


def test_a_fixed_command_may_follow_one_that_never_began(server, monkeypatch, tmp_path):
    data, expected = make_data(tmp_path, 2)
    given = arguments(server, data, tmp_path / "own.jsonl")
    assert call([*given, "--model", "large"], monkeypatch) == 2
    assert call(given, monkeypatch) == 0
    assert [row["messages"] for row in read_rows(tmp_path / "own.jsonl")] == expected


def test_the_key_comes_from_the_environment(server, monkeypatch, tmp_path, capsys):
    data, _ = make_data(tmp_path, 2)
    given = arguments(server, data, tmp_path / "own.jsonl")
    server.key = "secret"
    assert call(given, monkeypatch) == 2
    assert "--key-variable: " in capsys.readouterr().err
    monkeypatch.setenv("MY_KEY", "secret")
    assert call([*given, "--key-variable", "MY_KEY"], monkeypatch) == 0
    assert b"secret" not in (tmp_path / "own.sqlite").read_bytes()


def test_sampled_rows_carry_settings_and_a_seed_of_their_own(server, monkeypatch, tmp_path):
    data = write_rows(tmp_path / "chats.jsonl", [{"prompt": f"q{i}"} for i in range(8)])
    out = tmp_path / "own.jsonl"
    options = ["--temperature", 0.6, "--top-p", 0.9, "--max-tokens", 7, "--greedy-share", 0.25]
    assert call(arguments(server, data, out, *options), monkeypatch) == 0
    greedy = [row["messages"][0]["content"] for row in read_rows(out) if row["greedy_answers"]]
    assert len(greedy) == 2
    seeds = set()
    for body in server.bodies:
        assert body["max_tokens"] == 7 and body["model"] == "tiny"
        if body["messages"][0]["content"] in greedy:
            assert body["temperature"] == 0
        else:
            assert body["temperature"] == 0.6 and body["top_p"] == 0.9
            seeds.add(body["seed"])
    assert len(seeds) == 6


def test_an_answer_without_end_is_refused_and_no_answer_at_all_is_a_failure(
    server, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(chat_server, "LARGEST_ANSWER_BYTES", 1 << 16)
    server.answer_all_with = b" " * (1 << 20)
    data = write_rows(tmp_path / "chats.jsonl", [{"prompt": "q"}])
    assert call(arguments(server, data, tmp_path / "own.jsonl"), monkeypatch) == 1
    assert "no row was answered; the first reason: answer above" in capsys.readouterr().err
    assert sum(server.counts.values()) == 1


@pytest.mark.parametrize("drops", [False, True])
def test_cut_answers_are_counted_over_all_runs_or_left_out(
    drops, server, monkeypatch, tmp_path, capsys
):
    """Row 1 has its first of two answers cut, row 3 its only one; the second run resumes."""
    data, _ = make_data(tmp_path, 6)
    out, words = tmp_path / "own.jsonl", ["--drop-cut"] if drops else []
    server.cut, server.refused = {"user 1.0", "user 3.0"}, set() if drops else {"user 5.0"}
    assert call(arguments(server, data, out, *words), monkeypatch) == 0
    capsys.readouterr()
    server.refused = set()
    words += [] if drops else ["--retry-errors"]
    assert call(arguments(server, data, out, *words), monkeypatch) == 0
    said, rows = capsys.readouterr().out, read_rows(out)
    if not drops:
        assert "6 rows answered, 0 failed; 2 answers cut at --max-tokens" in said
        assert [row["cut_answers"] for row in rows] == [0, 1, 0, 1, 0, 0]
        return
    assert "4 rows answered, 2 failed" in said
    assert "2 of these for an answer cut at --max-tokens" in said
    assert [row["input_row"] for row in rows] == [0, 2, 4, 5]
    failed = read_rows(tmp_path / "own.errors.jsonl")
    assert {row["reason"] for row in failed} == {"an answer was cut at --max-tokens (--drop-cut)"}
    # A conversation ends at its cut answer: the next turn would read it.
    assert not server.counts["user 1.1"]
