"""Regenerated answers: thinking, order, the output file, and local targets."""

import json
import os
import random
import subprocess
import sys
from collections import Counter

import pytest
import regenerate_runs
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from regenerate_runs import call, conversation, make_data, read_rows, write_rows
from small_tokenizers import train_tokenizer
from tiny_models import tiny_llama

from pipedraft.data_recipes import chat_client as chat_server
from pipedraft.data_recipes.answers import (
    AnswerFile,
    Dialogue,
    RowFailed,
    kept_response,
    split_served,
)
from pipedraft.data_recipes.recipe import DataConfig, Source

signals = regenerate_runs.signals
"""Fixture."""

THOUGHT = "<think>\nhm\n</think>\n\n"


@pytest.mark.parametrize(
    ("content", "reasoning", "thought", "answer"),
    [
        ("yes ", "", "", "yes"),
        (THOUGHT + "yes", "", "hm", "yes"),
        ("hm\n</think>\n\nyes", "", "hm", "yes"),
        ("yes", "hm\n", "hm", "yes"),
        ("the mark </think>", "hm", "hm", "the mark </think>"),
        ("write <think>x</think>", "", "", "write <think>x</think>"),
        ("<think>a</think>b<think>c</think>d", "", "a", "b<think>c</think>d"),
    ],
)
def test_thinking_has_its_field_or_is_stripped(content, reasoning, thought, answer):
    read = split_served(content, reasoning)
    kept, stripped = (kept_response(read, thinking=x).message() for x in ("keep", "strip"))
    assert stripped == {"role": "assistant", "content": answer}
    assert kept == stripped | ({"reasoning_content": thought} if thought else {})


@pytest.mark.parametrize(
    "content", ["analysisShe greets.assistantfinalHello", "<|channel|>final<|message|>Hello"]
)
def test_an_answer_without_its_channels_is_refused(content):
    """A server without a reasoning parser returns gpt-oss's answers so."""
    with pytest.raises(RowFailed, match="reasoning parser"):
        split_served(content, "")


@pytest.mark.parametrize(
    ("content", "reasoning", "reason"),
    [("<think>hm", "", "does not end"), (THOUGHT, "", "without an answer"), ("", "hm", "without")],
)
@pytest.mark.parametrize("thinking", ["keep", "strip"])
def test_thinking_alone_is_no_answer(content, reasoning, reason, thinking):
    with pytest.raises(RowFailed, match=reason):
        kept_response(split_served(content, reasoning), thinking=thinking)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_a_servers_own_thinking_field_is_read(name):
    message = {"content": "yes", name: "hm"}
    payload = {"choices": [{"message": message, "finish_reason": "length"}]}
    assert chat_server.read_choice(payload) == ("yes", "hm", "length")


@pytest.mark.parametrize(
    "payload",
    [
        [],
        None,
        {"choices": []},
        {"choices": [{"message": None}]},
        {"choices": [{"message": {"content": [1]}}]},
        {"choices": [{"message": {"content": "x"}, "finish_reason": "abort"}]},
    ],
)
def test_what_is_no_answer_is_asked_again(payload):
    with pytest.raises(chat_server.TryAgain):
        chat_server.read_choice(payload)


def test_retry_after_is_a_bounded_number_of_seconds():
    read = chat_server.retry_after_s
    assert [read(text) for text in (None, "3", "soon", "nan", "-1")] == [0, 3, 0, 0, 0]
    assert read("1e9") == chat_server.LONGEST_RETRY_AFTER_S


def test_turns_are_answered_in_view_of_earlier_answers():
    system, ask = {"role": "system", "content": "s"}, {"role": "user", "content": "a"}
    more = {"role": "user", "content": "b"}
    turns = [system, ask, {"role": "assistant", "content": "OLD"}, more]
    dialogue = Dialogue.read(3, json.dumps({"messages": turns, "id": 9}))
    assert dialogue.question() == [system, ask]
    dialogue.history = [system, ask, {"role": "assistant", "content": "NEW"}]
    dialogue.num_answers = 1
    assert dialogue.question() == [*dialogue.history, more] and not dialogue.is_complete
    half = '{"prompt": "\\ud800"}'
    with pytest.raises(RowFailed, match="surrogate"):
        Dialogue.read(0, half)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), num_rows=st.integers(1, 12), share=st.floats(0, 0.6))
def test_the_output_is_whole_and_ordered_after_any_crashes(tmp_path_factory, seed, num_rows, share):
    """Rows settle in any order; the files come from a killed process, or are cut at any byte."""
    rng = random.Random(seed)
    folder = tmp_path_factory.mktemp("crash")
    out, errors = folder / "own.jsonl", folder / "own.errors.jsonl"
    kept = [folder / f"own.sqlite{suffix}" for suffix in ("", "-wal")]
    failing = {row for row in range(num_rows) if rng.random() < share}
    settled: set[int] = set()
    for is_last in (False, False, False, True):
        retry = rng.random() < 0.5
        answers = AnswerFile(out, {"--seed": 1}, num_rows=num_rows, retry_errors=retry)
        rows = [row for row in range(num_rows) if answers.is_pending(row)]
        asked_again = failing if retry else set()
        assert settled.isdisjoint(set(rows) - asked_again), "settled rows are lost"
        rng.shuffle(rows)
        if is_last:
            failing = {row for row in failing if rng.random() < 0.5}
        for row in rows if is_last else rows[: rng.randint(0, len(rows))]:
            if row in failing:
                answers.fail(row, "because", json.dumps({"q": row}))
            else:
                answers.add(row, {"answer": row * "x"})
        if is_last:
            answers.finish()
            final_failed = answers.num_failed
            answers.close()
            continue
        files = {path: path.read_bytes() for path in kept}
        settled = {row for row in range(num_rows) if not answers.is_pending(row)}
        answers.close()
        if rng.random() < 0.5:  # a power cut may take as well
            files[kept[1]] = files[kept[1]][: rng.randint(0, len(files[kept[1]]))]
            settled = set()
        for path, data in files.items():
            path.write_bytes(data)
    rows = read_rows(out)
    failed = read_rows(errors) if errors.exists() else []
    answered = [row["input_row"] for row in rows]
    assert answered == sorted(set(answered))
    assert sorted(answered + [row["input_row"] for row in failed]) == list(range(num_rows))
    assert all(row["answer"] == row["input_row"] * "x" for row in rows)
    assert all(row["row"] == {"q": row["input_row"]} for row in failed)
    assert len(failed) == final_failed
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        path.name for path in (out, kept[0], errors) if path.exists()
    )


@pytest.mark.parametrize("content", [b"no database at all, but some text", b"", "torn"])
def test_a_damaged_database_is_refused_or_empty(content, tmp_path):
    out, database = tmp_path / "own.jsonl", tmp_path / "own.sqlite"
    if content == "torn":
        answers = AnswerFile(out, {}, num_rows=300, retry_errors=False)
        for row in range(300):
            answers.add(row, {"answer": "x" * 200})
        answers.close()
        content = database.read_bytes()[:9000]
    database.write_bytes(content)
    if not content:
        AnswerFile(out, {}, num_rows=3, retry_errors=False).close()
        return
    with pytest.raises(ValueError, match="--out: .*(cannot be written|is damaged) .*give another"):
        AnswerFile(out, {}, num_rows=300, retry_errors=False)


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """(folder, model, tokenizer) for a tiny chat model."""
    folder = tmp_path_factory.mktemp("model")
    data = write_rows(folder / "chats.jsonl", [conversation(i, 2) for i in range(20)])
    tokenizer = train_tokenizer(DataConfig(sources=[Source(path=str(data))]), 300)
    model = tiny_llama(layers=2, vocab=len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, model, tokenizer


def test_local_answers_are_transformers_greedy_ones(chat_model, monkeypatch, tmp_path, capsys):
    folder, model, tokenizer = chat_model
    data, _ = make_data(tmp_path, 11)
    out = tmp_path / "own.jsonl"
    given = ["--target", folder, "--data", data, "--out", out, "--max-tokens", 12]
    given += ["--dtype", "float32", "--greedy-share", 1, "--batch", 4]
    assert call(given, monkeypatch) == 0
    rows = read_rows(out)
    assert [row["id"] for row in rows] == list(range(11))
    num_cut = 0
    for number, row in enumerate(rows):
        messages: list[dict] = []
        for turn in range(1 + number % 3):
            messages.append({"role": "user", "content": f"user {number}.{turn}"})
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            end = tokenizer.eos_token_id
            made = model.generate(**ids, do_sample=False, max_new_tokens=12, eos_token_id=end)
            answer = made[0, ids.input_ids.shape[1] :]
            num_cut += end not in answer.tolist()
            text = tokenizer.decode(answer, skip_special_tokens=True).strip()
            messages.append({"role": "assistant", "content": text})
        assert row["messages"] == messages and row["greedy_answers"]
    assert f"11 rows answered, 0 failed; {num_cut} answers cut" in capsys.readouterr().out
    assert sum(row["cut_answers"] for row in rows) == num_cut > 0


def test_local_sampling_is_from_the_whole_distribution(chat_model, monkeypatch, tmp_path):
    """Compare first-token frequencies; requests in generation_config.json have no effect."""
    folder, model, tokenizer = chat_model
    data = write_rows(tmp_path / "chats.jsonl", [{"prompt": "q"}] * 3000)
    config = json.loads((folder / "generation_config.json").read_text())
    changed = {**config, "do_sample": True, "top_k": 2, "repetition_penalty": 5.0}
    (folder / "generation_config.json").write_text(json.dumps(changed))
    out = tmp_path / "own.jsonl"
    given = ["--target", folder, "--data", data, "--out", out, "--max-tokens", 1, "--batch", 1000]
    given += ["--dtype", "float32", "--greedy-share", 0, "--temperature", 0.8]
    assert call(given, monkeypatch) == 0
    (folder / "generation_config.json").write_text(json.dumps(config))
    drawn = Counter(row["messages"][-1]["content"] for row in read_rows(out))
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "q"}], add_generation_prompt=True, return_dict=True
    ).input_ids
    p_V = (model(torch.tensor([ids])).logits[0, -1].double() / 0.8).softmax(-1)
    p: Counter[str] = Counter()
    for token, probability in enumerate(p_V.tolist()):
        p[tokenizer.decode([token], skip_special_tokens=True).strip()] += probability
    del p[""], drawn[""]
    mass = sum(p.values())
    distance = sum(abs(drawn[text] / drawn.total() - p[text] / mass) for text in p) / 2
    # Expected distance of 3,000 draws: at most sum_v sqrt(p_v / (2 pi n)).
    bound = sum((p[text] / mass / (2 * torch.pi * drawn.total())) ** 0.5 for text in p)
    assert distance < 1.3 * bound
    assert len(drawn) > 2


def test_local_rows_that_do_not_fit_are_told(chat_model, monkeypatch, tmp_path, capsys):
    folder, _, _ = chat_model
    rows = [{"prompt": "long " * 400}, {"prompt": "short"}]
    data = write_rows(tmp_path / "chats.jsonl", rows)
    out = tmp_path / "own.jsonl"
    given = ["--target", folder, "--data", data, "--out", out, "--max-tokens", 8]
    assert call([*given, "--dtype", "float32", "--greedy-share", 1], monkeypatch) == 0
    assert "1 rows answered, 1 failed" in capsys.readouterr().out
    (failed,) = read_rows(out.with_suffix(".errors.jsonl"))
    assert failed["input_row"] == 0 and "exceed the target's 512 positions" in failed["reason"]
    assert call([*given[:1], "nowhere", *given[2:]], monkeypatch) == 2
    assert "--target: no folder 'nowhere'" in capsys.readouterr().err


def test_answers_take_the_room_that_is_left_and_read_the_system_field(
    chat_model, monkeypatch, tmp_path
):
    """The default of 1,024 tokens exceeds the target's 512 positions."""
    folder, *_ = chat_model
    ask, system = {"role": "user", "content": "q"}, {"role": "system", "content": "Be brief."}
    rows = [{"system": "Be brief.", "messages": [ask]}, {"messages": [system, ask]}]
    rows.append({"messages": [system, ask, {"role": "assistant", "content": None}]})
    data, out = write_rows(tmp_path / "chats.jsonl", rows), tmp_path / "own.jsonl"
    given = ["--target", folder, "--data", data, "--out", out, "--dtype", "float32"]
    assert call([*given, "--greedy-share", 1], monkeypatch) == 0
    answered = [row["messages"] for row in read_rows(out)]
    assert len(answered) == 3 and answered[0] == answered[1] == answered[2]


def test_a_server_run_loads_no_torch():
    code = (
        "import sys, pipedraft.data_recipes.regenerate, pipedraft.data_recipes.chat_client;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], env=os.environ).returncode == 0


def test_a_changed_output_is_refused(tmp_path):
    out = tmp_path / "own.jsonl"
    answers = AnswerFile(out, {}, num_rows=3, retry_errors=False)
    for row in range(3):
        answers.add(row, {"answer": "x"})
    answers.finish()
    answers.close()
    before = out.stat()
    AnswerFile(out, {}, num_rows=3, retry_errors=False).close()
    assert out.stat().st_mtime_ns == before.st_mtime_ns
    for change in ("".join(reversed(out.read_text().splitlines(True))), "edited\n"):
        out.write_text(change)
        with pytest.raises(ValueError, match="was changed after it was written; give another"):
            AnswerFile(out, {}, num_rows=3, retry_errors=False)
        assert out.read_text() == change
