"""Self-made conversations: kept and dropped rows, and resuming a run."""

import copy
import json
import sqlite3

import pytest
from regenerate_runs import call, read_rows
from transformers import AutoTokenizer

from pipedraft.data_recipes.answers import WAS_CUT
from pipedraft.data_recipes.self_prompt import TurnMarkers

TARGET = "assets/target"
WORDS = ["--target", TARGET, "--dtype", "float32", "--batch", "12", "--max-tokens", "72"]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TARGET)


def test_markers_make_the_template(tokenizer):
    markers = TurnMarkers.of(tokenizer)
    user, answer = "How many?", "Four."
    chat = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
    parts = [
        [*markers.user],
        tokenizer(user, add_special_tokens=False).input_ids,
        [markers.end, *markers.assistant],
        tokenizer(answer, add_special_tokens=False).input_ids,
    ]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False)
    assert rendered.startswith(tokenizer.decode(sum(parts, [])))
    for lacks in ("chat_template", "eos_token"):
        other = copy.deepcopy(tokenizer)
        setattr(other, lacks, None)
        with pytest.raises(ValueError, match="--target: its chat template does not close"):
            TurnMarkers.of(other)


def settled(out) -> dict[int, str]:
    database = sqlite3.connect(out.with_suffix(".sqlite"))
    rows = dict(database.execute("SELECT row, reason FROM rows").fetchall())
    database.close()
    return rows


def test_rows_are_conversations_filtered_and_the_same_when_a_run_is_repeated(
    monkeypatch, tmp_path, capsys
):
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    assert call(["--self-prompt", "24", *WORDS, "--out", str(first)], monkeypatch) == 0
    said = capsys.readouterr().out
    rows, reasons = read_rows(first), settled(first)
    left_out = [reason for reason in reasons.values() if reason]
    assert len(reasons) == 24 and 0 < len(rows) == 24 - len(left_out)
    assert f"{len(rows)} rows answered, {len(left_out)} failed" in said
    assert f"{sum(row['cut_answers'] for row in rows)} answers cut at" in said
    assert "tokens sampled" in said
    for row in rows:
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
        assert all(message["content"].strip() for message in row["messages"])
    assert {row["greedy_answers"] for row in rows} == {True, False}
    # A benchmark prompt repeated by the model is found in the rows of the same seed.
    benchmark = tmp_path / "benchmark.jsonl"
    longest = max((row["messages"][0]["content"] for row in rows), key=len)
    benchmark.write_text(json.dumps({"prompt": longest}) + "\n")
    more = ["--decontaminate", str(benchmark), "--out", str(second)]
    assert call(["--self-prompt", "24", *WORDS, *more], monkeypatch) == 0
    kept = [row["messages"] for row in read_rows(second)]
    assert kept == [r["messages"] for r in rows if r["messages"][0]["content"] != longest]
    assert "contains a prompt of a benchmark" in settled(second).values()


@pytest.mark.parametrize(
    "words, message",
    [
        (["--temperature", "0.5"], "--temperature: 0.5 with --self-prompt"),
        (["--data", "x.jsonl"], "--data"),
        (["--retry-errors"], "--retry-errors"),
    ],
)
def test_options_that_would_be_ignored_are_refused(words, message, monkeypatch, tmp_path, capsys):
    given = ["--self-prompt", "4", *WORDS, "--out", str(tmp_path / "own.jsonl"), *words]
    assert call(given, monkeypatch) == 2
    assert message in capsys.readouterr().err


@pytest.mark.all
def test_rows_with_a_cut_answer_can_be_left_out(monkeypatch, tmp_path, capsys):
    out = tmp_path / "own.jsonl"
    assert call(["--self-prompt", "24", *WORDS, "--drop-cut", "--out", str(out)], monkeypatch) == 0
    assert not any(row["cut_answers"] for row in read_rows(out))
    dropped = list(settled(out).values()).count(WAS_CUT)
    assert dropped and f"{dropped} of these for an answer cut at" in capsys.readouterr().out
