"""Bulk sampling equals decoding one row at a time; token rows survive writing and reading."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scripts import load_script
from transformers import LlamaConfig, LlamaForCausalLM

from pipedraft.data_recipes.bulk import Opening, repeats_itself, sample_rows
from pipedraft.pretrained import load_tokenizer

gpu_lease = load_script("benchmarks/gpu_lease.py")
END, BRIDGE = 7, (3, 4)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=24,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=END,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def sample(model: LlamaForCausalLM, openings: list[Opening], max_length: int = 60) -> list:
    generator = torch.Generator().manual_seed(1)
    return sample_rows(
        model,
        openings,
        assistant=BRIDGE,
        ends=[END],
        max_length=max_length,
        generator=generator,
    )


def test_greedy_rows_of_any_length_are_those_of_generate(model):
    """Rows end at different times, so that ended rows leave the caches on the way."""
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(8, 24, 1 + i % 9).tolist()) for i in range(40)]
    rows = sample(model, [Opening(ids, is_greedy=True) for ids in prompts])
    assert len({row.has_ended for row in rows}) == 2
    for ids, row in zip(prompts, rows, strict=True):
        expected = model.generate(torch.tensor([ids]), do_sample=False, max_length=60)[0]
        assert row.ids.tolist() == expected.tolist()
        assert row.answer_start == len(ids)
        assert row.has_ended == (row.ids[-1] == END)


def test_a_user_turn_is_written_first_and_the_answer_opened(model):
    rows = sample(model, [Opening((9, 10), i % 2 == 0, writes_user=True) for i in range(200)])
    assert 20 < len(rows) < 200  # user turns without an end are left out
    for row in rows:
        start = row.answer_start
        assert row.ids[start - 3 : start].tolist() == [END, *BRIDGE]
        assert END not in row.ids[: start - 3]
        if row.opening.is_greedy and len(row.ids) > start:
            logits = model(torch.tensor(row.ids[None, :-1], dtype=torch.long)).logits[0]
            assert (logits[start - 1 :].argmax(-1).numpy() == row.ids[start:]).all()


def test_first_tokens_are_drawn_from_the_model(model):
    rows = sample(model, [Opening((9, 10))] * 4000, max_length=3)
    found = np.bincount([row.ids[2] for row in rows], minlength=24) / 4000
    expected = model(torch.tensor([[9, 10]])).logits[0, -1].softmax(-1).detach().numpy()
    assert abs(found - expected).max() < 4 * np.sqrt(0.25 / 4000)


def test_a_loop_is_four_tokens_too_often():
    loop, text = np.arange(5).repeat(1), np.arange(400)
    assert repeats_itself(np.tile(loop, 14))
    assert not repeats_itself(text)
    assert not repeats_itself(np.array([1, 2]))


def test_token_rows_come_back_and_hold_out_rows(tmp_path: Path):
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 49152, n).astype(np.int32) for n in (30, 12, 40, 9)]
    prompts = [10, 2, 35, 8]
    gpu_lease.write_token_rows(tmp_path / "rows.safetensors", ids, prompts)
    found, marks = gpu_lease.read_token_rows(tmp_path / "rows.safetensors")
    assert marks == prompts
    assert all((a == b).all() for a, b in zip(found, ids, strict=True))
    data = gpu_lease.token_data(found, marks, num_valid=1, max_length=36, labels="all")
    assert (len(data.train), len(data.valid)) == (1, 1)  # two answers have too few tokens
    assert sum(data.train[0]["loss_mask"]) == 11
    assert sum(data.valid["loss_mask"][0]) == 20


def test_answered_prompts_become_token_rows(tmp_path: Path, monkeypatch):
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"{i}?"},
                {"role": "assistant", "content": "Yes."},
            ]
        }
        for i in range(70)
    ]
    prompts, own = tmp_path / "answered.jsonl", tmp_path / "own.safetensors"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = np.arange(20, 30, dtype=np.int32)
    gpu_lease.write_token_rows(own, [made], [-4])
    words = ["rows", "--target=assets/target", f"--prompts={prompts}", f"--self-made={own}"]
    monkeypatch.setattr(sys, "argv", ["benchmarks/gpu_lease.py", *words, f"--out={tmp_path}"])
    chosen = gpu_lease.read_options()
    chosen.run(chosen)
    ids, marks = gpu_lease.read_token_rows(tmp_path / "rows.safetensors")
    assert len(ids) == 71 and min(marks[:64]) > 0 and marks.count(-4) == 1
    assert (ids[marks.index(-4)] == made).all()
    tokenizer = load_tokenizer("assets/target")
    texts = {tokenizer.decode(row[n:]) for row, n in zip(ids, marks, strict=True) if n > 0}
    assert texts == {f"Yes.{tokenizer.eos_token}"}
    assert {tokenizer.decode(row[:n]) for row, n in zip(ids, marks, strict=True) if n > 0} == {
        tokenizer.apply_chat_template(
            line["messages"][:1], tokenize=False, add_generation_prompt=True
        )
        for line in lines
    }


@pytest.mark.all
def test_a_head_trains_for_some_seconds(tmp_path: Path, monkeypatch):
    rng = np.random.default_rng(0)
    ids = [rng.integers(5, 500, 40).astype(np.int32) for _ in range(80)]
    gpu_lease.write_token_rows(tmp_path / "rows.safetensors", ids, [10] * len(ids))
    words = ["head", "--name=spd_n4", "--of=heads", "--target=assets/target", "--seconds=1"]
    words += [f"--data={tmp_path}", f"--out={tmp_path / 'out'}", "--every=0", "--tokens=256", "--"]
    words += ["--model.depth_layers=[[2], [4], [6], [8]]", "--evaluation.decode_prompts=0"]
    words += ["--model.num_layers=1", "--model.draft_vocab_size=256", "--trackers=[]"]
    monkeypatch.setattr(sys, "argv", ["benchmarks/gpu_lease.py", *words])
    chosen = gpu_lease.read_options()
    chosen.run(chosen)
    assert (tmp_path / "out" / "best" / "model.safetensors").exists()
