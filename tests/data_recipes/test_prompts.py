"""Prompts for a target: user turns and library functions."""

import email
import hashlib
import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "assets" / "train" / "prompts.py"
SPEC = importlib.util.spec_from_file_location("training_prompts", SCRIPT)
prompts = sys.modules[SPEC.name] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(prompts)

CHAT = [
    {"role": "user", "content": "How many legs do two cats have?"},
    {"role": "assistant", "content": "They have 8 legs."},
    {"role": "user", "content": "And three?"},
    {"role": "assistant", "content": "12 legs."},
]


def run(module, monkeypatch, *arguments) -> None:
    monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
    module.main()


def test_prompts_come_from_user_turns_and_library_functions(monkeypatch, tmp_path):
    part = Path(email.__file__).parent  # a part: the whole library takes seconds to read
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
