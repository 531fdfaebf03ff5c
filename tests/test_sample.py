"""Sampled conversations: turns are read back exactly, greedy answers are greedy."""

import copy
import email
import hashlib
import json
import sys
from pathlib import Path

import pytest
import torch
from conftest import tiny_llama
from pretended_device import pretended_cuda
from small_tokenizers import train_tokenizer

from pipedraft.data_recipes import prompts, sample
from pipedraft.data_recipes.recipe import DataConfig, Source

CHAT = [
    {"role": "user", "content": "How many legs do two cats have?"},
    {"role": "assistant", "content": "They have 8 legs."},
    {"role": "user", "content": "And three?"},
    {"role": "assistant", "content": "12 legs."},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": CHAT}) + "\n" for _ in range(20)))
    return train_tokenizer(DataConfig(sources=[Source(path=str(path))]), 300)


def test_rendered_turns_are_parsed_back(tokenizer):
    markers = sample.Markers.of(tokenizer)
    text = tokenizer.apply_chat_template(CHAT, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert sample.parse_turns(tokenizer, markers, ids) == CHAT


def test_an_unfinished_answer_is_dropped_with_its_question(tokenizer):
    markers = sample.Markers.of(tokenizer)
    text = tokenizer.apply_chat_template(CHAT, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    last_end = len(ids) - 1 - ids[::-1].index(markers.end_of_turn)
    assert sample.parse_turns(tokenizer, markers, ids[:last_end]) == CHAT[:2]
    assert sample.parse_turns(tokenizer, markers, ids[3:]) == []


def test_a_tokenizer_without_an_end_of_text_is_sampled_to_the_most_tokens(tokenizer):
    for pad in (None, tokenizer.eos_token):
        other = copy.deepcopy(tokenizer)
        other.pad_token = pad
        markers = sample.Markers.of(other)
        assert markers.end_of_text == -1 and markers.end_of_turn == tokenizer.eos_token_id
    generator = torch.Generator().manual_seed(0)
    model, greedy_B = tiny_llama(layers=2, vocab=300), torch.tensor([False])
    rows = sample.sample_batch(
        model, markers, greedy_B=greedy_B, max_tokens=20, generator=generator
    )
    assert len(rows[0]) == 20
    for lacks in ("chat_template", "eos_token"):
        other = copy.deepcopy(tokenizer)
        setattr(other, lacks, None)
        with pytest.raises(ValueError, match="target: its chat template does not close a turn"):
            sample.Markers.of(other)


def test_conversations_are_made_on_the_models_device():
    markers = sample.Markers(user=(1, 2), assistant=(3,), end_of_turn=4, end_of_text=5)
    found = []
    for device in ("cpu", "cuda:0"):
        with pretended_cuda():
            target = tiny_llama(layers=2, vocab=12).to(device)
            torch.manual_seed(0)
            generator = torch.Generator(device).manual_seed(0)
            texts = sample.sample_batch(
                target,
                markers,
                greedy_B=torch.tensor([True, False] * 4, device=device),
                max_tokens=20,
                generator=generator,
            )
            prompts = torch.tensor([[1, 2, 3]] * 2, device=device)
            mask = torch.ones_like(prompts)
            answers = sample.decode_batch(
                target, prompts, mask, ends=[5], sampling=None, max_tokens=8
            )
            found.append((texts, answers))
    assert found[0] == found[1]


def test_answers_of_greedy_rows_follow_the_argmax_and_rows_may_end_early():
    target = tiny_llama(layers=2, vocab=12)
    markers = sample.Markers(user=(1, 2), assistant=(3,), end_of_turn=4, end_of_text=5)
    greedy_B = torch.tensor([True, False] * 8)
    texts = sample.sample_batch(
        target,
        markers,
        greedy_B=greedy_B,
        max_tokens=40,
        generator=torch.Generator().manual_seed(0),
    )
    assert all(len(text) == 40 or text[-1] == 5 for text in texts)
    assert any(len(text) < 40 for text in texts)
    followed = {True: [], False: []}
    for text, is_greedy in zip(texts, greedy_B.tolist(), strict=True):
        best = target(torch.tensor([text])).logits[0].argmax(-1).tolist()
        answering = False
        for index in range(2, len(text)):
            if answering:
                followed[is_greedy].append(text[index] == best[index - 1])
            answering = (answering or text[index] == 3) and text[index] != 4
    assert len(followed[True]) > 30 and all(followed[True])
    assert not all(followed[False])


def test_a_missing_model_is_bad_input(monkeypatch, capsys, tmp_path):
    out = tmp_path / "x.jsonl"
    monkeypatch.setattr(sys, "argv", ["sample", "--target", "nowhere", "--out", str(out)])
    with pytest.raises(SystemExit) as exit_status:
        sample.run_command(sample.main)
    assert exit_status.value.code == 2
    assert "--target: no folder 'nowhere'" in capsys.readouterr().err
    sys.argv += ["--greedy-share", "7"]
    with pytest.raises(ValueError, match="--greedy-share: 7; give a number from 0 to 1"):
        sample.main()


def run(module, monkeypatch, *arguments) -> None:
    monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
    module.main()


def test_prompts_come_from_user_turns_and_library_functions(monkeypatch, tmp_path):
    part = Path(email.__file__).parent  # of the library, which takes seconds to read as a whole
    monkeypatch.setattr(prompts.sysconfig, "get_paths", lambda: {"stdlib": part})
    chats = tmp_path / "chats.jsonl"
    odd = {
        "conversations": [{"from": "human", "value": "Which line\u2028ends here?"}],
        "source": "b",
    }
    rows = [{"messages": CHAT, "source": "a"}, odd]
    chats.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    out = tmp_path / "prompts.jsonl"
    takes = ["--take", "a=5:2", "--take", "b=1", "--functions", "3"]
    run(prompts, monkeypatch, "--conversations", chats, *takes, "--out", out)
    texts = [json.loads(line)["prompt"] for line in out.read_text().split("\n") if line]
    expected = {turn["content"] for turn in CHAT if turn["role"] == "user"}
    assert expected | {odd["conversations"][0]["value"]} <= set(texts) and len(texts) == 6
    stubs = [text for text in texts if text.startswith("Complete this")]
    for stub in stubs:
        compile(stub.split("```python\n")[1].removesuffix("\n```"), "stub", "exec")
    assert len(stubs) == 3


def test_prompts_with_known_answers_become_conversations(monkeypatch, tmp_path):
    chats, known = tmp_path / "chats.jsonl", tmp_path / "answers.jsonl"
    chats.write_text(json.dumps({"messages": CHAT}) + "\n")
    first, second = (turn["content"] for turn in CHAT if turn["role"] == "user")
    digest = hashlib.sha256(first.encode()).hexdigest()
    row = {"prompt_sha256": digest, "answer": "Known.", "greedy_answers": True}
    known.write_text(json.dumps(row) + "\n")
    out, left = tmp_path / "out.jsonl", tmp_path / "left.jsonl"
    files = ["--answers", known, "--out", out, "--unanswered", left]
    run(prompts, monkeypatch, "--conversations", chats, "--take", "all=1:2", *files)
    turns = [{"role": "user", "content": first}, {"role": "assistant", "content": "Known."}]
    assert json.loads(out.read_text()) == {"messages": turns, "greedy_answers": True}
    assert json.loads(left.read_text()) == {"prompt": second}
    known.write_text(json.dumps({"answer": "Whose?"}) + "\n")
    with pytest.raises(ValueError, match="--answers: .*answers.jsonl:1 has no prompt_sha256"):
        run(prompts, monkeypatch, "--conversations", chats, *files)
    for damaged in ("[1]", "{"):
        known.write_text(damaged)
        with pytest.raises(ValueError, match="--answers: .*answers.jsonl:1 has no"):
            prompts.read_answers(known)
    known.unlink()
    with pytest.raises(ValueError, match="--answers: no file"):
        prompts.read_answers(known)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--functions", "-1"], "--functions: -1; give at least 0"),
        (["--take", "all=1"], "--take: without --conversations"),
        (["--conversations", "o.jsonl"], "--conversations: 'o.jsonl' is --out, too"),
        (["--answers", "o.jsonl"], "--answers: 'o.jsonl' is --out, too"),
        (["--answers", "a.jsonl", "--unanswered", "./o.jsonl"], "--unanswered: 'o.jsonl' is --out"),
    ],
)
def test_options_that_would_lose_or_ignore_something_are_refused(
    words, said, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=said):
        run(prompts, monkeypatch, *words, "--out", "o.jsonl")


@pytest.mark.parametrize(
    ("takes", "words"),
    [
        (["--take", "c=1"], "--take: .*'c'; it has a"),
        (["--take", "a"], "SOURCE=ROWS"),
        (["--take", "a=x"], "--take: 'a=x' is not SOURCE=ROWS"),
    ],
)
def test_an_unknown_source_is_bad_input(takes, words, monkeypatch, tmp_path):
    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps({"messages": CHAT, "source": "a"}) + "\n")
    with pytest.raises(ValueError, match=words):
        run(prompts, monkeypatch, "--conversations", chats, *takes, "--out", tmp_path / "o.jsonl")


@pytest.mark.parametrize(
    "row", [[1], {"messages": [1]}, {"messages": [{"role": "user", "content": [{"text": "x"}]}]}]
)
def test_a_row_that_is_no_conversation_of_texts_is_named(row, monkeypatch, tmp_path):
    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps({"messages": CHAT}) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(ValueError, match="--conversations: .*chats.jsonl:2 is no conversation"):
        run(prompts, monkeypatch, "--conversations", chats, "--out", tmp_path / "o.jsonl")
