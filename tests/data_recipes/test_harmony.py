"""A target that answers in gpt-oss's channels: regenerated, served and printed."""

import json
from types import SimpleNamespace

import data_rows
import pytest
import torch
from http_runs import serving
from regenerate_runs import call, read_rows, write_rows
from template_runs import TEMPLATES, with_marks
from transformers import LlamaConfig, LlamaForCausalLM

from pipedraft.chats import encode_chat, render_chat
from pipedraft.data_recipes.chat import ChatRenderer
from pipedraft.data_recipes.conversations import read_conversation
from pipedraft.endings import run_command
from pipedraft.inference import __main__ as inference
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.engine import Engine
from pipedraft.inference.generation import TextPieces
from pipedraft.models.target import load_target

THINKING, ANSWER = "She greets.", "Say ok: 12, 345."
OWN = (
    f"<|channel|>analysis<|message|>{THINKING}<|end|><|start|>assistant"
    f"<|channel|>final<|message|>{ANSWER}<|return|>"
)
QUESTION = [{"role": "user", "content": "Say ok."}]
NEW = 96


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A tiny target, trained to give one answer in channels."""
    folder = tmp_path_factory.mktemp("harmony")
    tokenizer = with_marks(data_rows.small_tokenizer(folder), TEMPLATES["channels"])
    tokenizer.eos_token = "<|return|>"
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        num_attention_heads=4,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        **sizes,
    )
    model = LlamaForCausalLM(config)
    before = encode_chat(tokenizer, QUESTION)
    after = tokenizer(OWN, add_special_tokens=False).input_ids
    ids, labels = torch.tensor([before + after]), torch.tensor([[-100] * len(before) + after])
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3, weight_decay=0.0)
    loss = torch.tensor(torch.inf)
    for _ in range(400):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=labels).loss
        if loss < 0.01:
            break
        loss.backward()
        optimizer.step()
    assert loss < 0.01 and len(after) < NEW
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return SimpleNamespace(folder=folder, tokenizer=tokenizer)


@pytest.mark.parametrize("thinking", ["keep", "strip"])
def test_a_regenerated_answer_is_what_the_target_wrote(world, tmp_path, monkeypatch, thinking):
    data, out = write_rows(tmp_path / "rows.jsonl", [{"prompt": "Say ok."}]), tmp_path / "own.jsonl"
    given = ["--target", world.folder, "--data", data, "--out", out, "--dtype", "float32"]
    given += ["--greedy-share", 1, "--max-tokens", NEW, "--thinking", thinking]
    assert call(given, monkeypatch) == 0
    (row,) = read_rows(out)
    turn = {"role": "assistant", "content": ANSWER}
    assert row["messages"][-1] == turn | (
        {"reasoning_content": THINKING} if thinking == "keep" else {}
    )
    chat = ChatRenderer(world.tokenizer).render(read_conversation(row))
    runs = [chat.text[a:b] for a, b in chat.spans]
    assert runs == [OWN if thinking == "keep" else OWN.partition("<|start|>assistant")[2]]


def test_a_chat_gets_thinking_and_answer_apart_streamed_or_not(world):
    target = load_target(str(world.folder), dtype=torch.float32)
    config = DecodeConfig.of("autoregressive", num_stages=1, max_new_tokens=NEW)
    asked = {"messages": QUESTION, "temperature": 0, "max_tokens": NEW}
    with serving(Engine(target, world.tokenizer, config)) as place:
        (choice,) = place.chat(**asked).json["choices"]
        raw = place.chat(**asked, skip_special_tokens=False).json["choices"][0]["message"]
        stopped = place.chat(**asked, stop=":").json["choices"][0]["message"]
        prompt = render_chat(world.tokenizer, QUESTION)
        completion = {"prompt": prompt, "temperature": 0, "max_tokens": NEW}
        text = place.ask("POST", "/v1/completions", completion).json["choices"][0]["text"]
        told = place.chat(**asked, stream=True, logprobs=True).content.decode()
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == (ANSWER, THINKING)
    assert choice["finish_reason"] == "stop"
    assert raw["content"] == OWN.removesuffix("<|return|>") and "reasoning_content" not in raw
    assert (stopped["content"], stopped["reasoning_content"]) == (
        ANSWER.partition(":")[0],
        THINKING,
    )
    assert text == raw["content"]  # a completion is what the target writes
    chunks = [json.loads(x[6:]) for x in told.split("\n\n") if x.startswith("data: {")]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    for name, expected in (("content", ANSWER), ("reasoning_content", THINKING)):
        pieces = [delta[name] for delta in deltas if delta.get(name)]
        assert "".join(pieces) == expected and len(pieces) > 1
    # Log-probabilities name every token, the format's marks as well.
    assert not any(mark in str(deltas) for mark in ("<|", "analysis", "assistantfinal"))


def test_raw_text_keeps_the_marks_of_the_channels(world):
    target = load_target(str(world.folder), dtype=torch.float32)
    config = DecodeConfig.of("autoregressive", num_stages=1, max_new_tokens=NEW)
    pieces = TextPieces(world.tokenizer, None)
    result = Engine(target, world.tokenizer, config).decode(
        encode_chat(world.tokenizer, QUESTION), observer=pieces
    )
    assert result.text == OWN.removesuffix("<|return|>")
    assert "".join(pieces.finish(result.text)) == result.text


@pytest.mark.parametrize(
    ("given", "out", "err"),
    [
        (["--quiet"], ANSWER, ""),
        ([], ANSWER, f"thinking: {THINKING}\n\n"),
    ],
)
def test_the_answer_is_printed_and_the_thinking_apart(world, capsys, given, out, err):
    line = ["--target", str(world.folder), "--schedule", "autoregressive", "--prompt", "Say ok."]
    line += ["--max-new-tokens", str(NEW), "--dtype", "float32", *given]
    run_command(lambda: inference.main(line))
    told = capsys.readouterr()
    assert told.out.splitlines()[-1] == out and told.err.startswith(err)
    assert "assistantfinal" not in told.out + told.err
