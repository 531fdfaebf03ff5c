"""Evaluations for tests: a stub engine, made-up results, questions."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_drafts import noisy_copy
from tiny_models import byte_tokenizer, tiny_llama
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from pipedraft.endings import run_command
from pipedraft.eval.__main__ import run
from pipedraft.eval.compare import Evaluated
from pipedraft.eval.lossless import generate_greedy
from pipedraft.eval.metrics import (
    AUTOREGRESSIVE,
    OVERALL,
    acceptance_by_category,
    acceptance_intervals_by_position,
    run_record,
)
from pipedraft.eval.record import LosslessRecord, PromptRecord, RunRecord
from pipedraft.eval.tasks import Prompt
from pipedraft.files import to_json
from pipedraft.inference.result import DecodeResult
from pipedraft.models.heads.language_model import LanguageModelDraft

MANIFEST = {
    "command": "python -m pipedraft.eval --out x",
    "dtype": "float32",
    "seed": 0,
    "target": {"name": "tiny"},
    "tokenizer": {"chat_template_sha256": None},
    "hardware": {"processor": "test", "torch_threads": 1},
}
OFFICIAL = Path(__file__).resolve().parents[3] / "shared" / "data" / "eval"
needs_official = pytest.mark.skipif(
    not OFFICIAL.is_dir(), reason=f"the official files are not at {OFFICIAL}"
)
PROMPTS = {
    "mt_bench/question.jsonl": {
        "question_id": 1,
        "category": "sums",
        "turns": ["1 plus 2?", "So?"],
    },
    "gsm8k/test.jsonl": {"question": "What is 3 plus 4?", "answer": "7\n#### 7"},
    "humaneval/HumanEval.jsonl": {
        "task_id": "HumanEval/0",
        "prompt": "def f(): ",
        "canonical_solution": "1",
        "test": "check",
        "entry_point": "f",
    },
}


@pytest.fixture(scope="module")
def no_pictures():
    """Skip the pictures in reports, for tests about something else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipedraft.eval.charts.Chart.files", lambda chart: {})
        patch.setattr("pipedraft.eval.charts.Chart.svg", lambda chart: "")
        yield


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def target(tokenizer):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model():
    """A target, a draft accepted now and then, and their tokenizer."""
    tokenizer = byte_tokenizer()
    target = tiny_llama(layers=2, hidden=16, vocab=len(tokenizer))
    return SimpleNamespace(target=target, tokenizer=tokenizer, draft=noisy_copy(target))


def make_prompts(task: str, *conversations: list[str]) -> list[Prompt]:
    return [
        Prompt(task=task, id=str(i), category="c", turns=turns)
        for i, turns in enumerate(conversations)
    ]


class StubEngine:
    wrong_last_token = False
    log: list = []

    pipeline = SimpleNamespace(clear=lambda: None, reports=list)
    draft_cost = 0.0

    def __init__(self, target, tokenizer, config, draft=None, *, connect=None):
        if config.num_stages > 16:
            raise ValueError(f"num_stages: {config.num_stages} is more than 16; give fewer")
        self.model, self.config, self.draft = target, config, draft
        self.target = SimpleNamespace(boundaries=tuple(range(config.num_stages + 1)))

    def decode(self, prompt_ids, *, prompt_index=0, on_token=None):
        config = self.config
        self.log.append((config, list(prompt_ids), prompt_index))
        tokens = generate_greedy(self.model, prompt_ids, max_new_tokens=config.max_new_tokens)
        if self.wrong_last_token and config.schedule.name == "spd":
            tokens[-1] = (tokens[-1] + 1) % 200
        draws = config.schedule.name == "spd"
        per_round = 2 if draws else 1
        num = len(tokens) - 1
        rounds = [per_round] * (num // per_round) + [1] * (num % per_round)
        return DecodeResult(
            prompt_ids=list(prompt_ids),
            token_ids=tokens,
            text="not used",
            stop_reason="max_new_tokens",
            num_stages=config.num_stages,
            num_steps=config.num_stages * len(rounds),
            round_lengths=rounds,
            round_ends="".join("r" if draws and n == 1 else "u" for n in rounds),
            round_drafted=[int(draws)] * len(rounds),
            round_forwards=[int(draws)] * len(rounds),
            position_tests=[len(rounds)] * draws,
            position_accepts=[len(rounds) - num % 2] * draws,
            virtual_time=float(len(rounds)),
            virtual_time_autoregressive=float(num),
            token_times_s=[0.1 + 0.01 * i / per_round for i in range(num + 1)],
        )


class AnyDraft(nn.Identity):
    num_stages = 4
    draft_type = "spd"

    def relative_cost(self, target):
        return 0.5


@pytest.fixture
def folders(tmp_path, target, tokenizer, monkeypatch):
    """A saved target, a checkpoint folder naming it, and a prompt file."""
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    draft = tmp_path / "run" / "spd"
    draft.mkdir(parents=True)
    description = {
        "draft_type": "spd",
        "architecture": {"num_stages": 4},
        "target": {"name": str(tmp_path / "target")},
    }
    (draft / "config.json").write_text(json.dumps(description))
    (draft / "model.safetensors").write_bytes(b"weights")
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"prompt": "hello"}\n{"prompt": "bye"}\n{"prompt": "why"}\n')
    monkeypatch.setattr("pipedraft.eval.command.load_head", lambda *_: AnyDraft())
    return SimpleNamespace(draft=draft, prompts=prompts, out=tmp_path / "out", root=tmp_path)


def status(arguments: list[str]) -> int:
    """Run the command and return its exit status."""
    try:
        run_command(lambda: run(arguments))
    except SystemExit as stop:
        return stop.code
    return 0


def assert_refused(capsys, arguments: list[str], words: Sequence[str]) -> None:
    """Assert status 2 and one line on stderr with these words."""
    assert status(arguments) == 2
    out, err = capsys.readouterr()
    line = err.removesuffix("\n")
    assert out == "" and "\n" not in line and line.startswith("error: "), (out, err)
    assert all(word in line for word in words), line


def command(folders, *more: str, benchmarks: str | None = None) -> list[str]:
    benchmarks = benchmarks or str(folders.prompts)
    return [
        "--checkpoint", str(folders.draft), "--benchmarks", benchmarks, "--out", str(folders.out),
        "--max-new-tokens", "6", *more,
    ]  # fmt: skip


def draw_result(rng: np.random.Generator, stages: int, alpha: float) -> DecodeResult:
    """Draw a chain draft with acceptance alpha: geometric rounds, n - 1 steps lost per round."""
    rounds = (rng.geometric(1 - alpha, size=12) if alpha else np.ones(40, int)).tolist()
    tests = [sum(length > j for length in rounds) for j in range(max(rounds))]
    accepts = [sum(length > j + 1 for length in rounds) for j in range(max(rounds))]
    tokens = sum(rounds)
    return DecodeResult(
        prompt_ids=[1],
        token_ids=[0] * (tokens + 1),
        text="",
        stop_reason="eos",
        num_stages=stages,
        num_steps=tokens + (stages - 1) * len(rounds),
        round_lengths=rounds,
        position_tests=tests if alpha else [],
        position_accepts=accepts if alpha else [],
        virtual_time=1.0,
        virtual_time_autoregressive=2.0,
        token_times_s=np.linspace(0.1, 1.0, tokens + 1).tolist(),
    )


def prompt_record(**fields) -> PromptRecord:
    return PromptRecord(**({"benchmark": "b", "id": "0", "tokens": 0, "steps": 0} | fields))


def make_row(benchmark: str, result: DecodeResult, index: int) -> PromptRecord:
    """Make a row; mt_bench has two categories, and the other benchmarks have one."""
    return PromptRecord(
        benchmark=benchmark,
        id=str(index),
        category=("writing", "math")[index % 2] if benchmark == "mt_bench" else "all",
        tokens=result.num_tokens,
        steps=result.num_steps,
        position_tests=result.position_tests,
        position_accepts=result.position_accepts,
    )


def make_runs(benchmarks=("mt_bench", "gsm8k", "humaneval"), stages=(4, 8, 16)) -> list[RunRecord]:
    rng = np.random.default_rng(0)
    runs = []
    settings = [(AUTOREGRESSIVE, stages[0], 0.0)] + [("spd", n, 0.7) for n in stages]
    for method, n, alpha in settings:
        parts = {name: [draw_result(rng, n, alpha) for _ in range(16)] for name in benchmarks}
        if len(parts) > 1:
            parts[OVERALL] = [result for results in parts.values() for result in results]
        for name, results in parts.items():
            rows = [make_row(name, result, index) for index, result in enumerate(results)]
            runs.append(
                run_record(
                    results,
                    method=method,
                    schedule=method,
                    benchmark=name,
                    temperature=0.0,
                    tree_width=1,
                    lossless=LosslessRecord(checked=len(results), mismatches=0),
                    acceptance_by_category=acceptance_by_category(rows, num_stages=n),
                    acceptance_by_position_ci95=acceptance_intervals_by_position(rows),
                    per_prompt=rows,
                )
            )
    return runs


def read_back(entries: list[RunRecord]) -> list[dict]:
    """Return the entries as results.json holds them."""
    return json.loads(to_json(entries))


def source(
    entries: list, name: str = "a", *, manifest: dict | None = None, latency: Sequence[dict] = ()
) -> Evaluated:
    """
    Args:
        entries: records, or the result of ``read_back`` on them.
    """
    content = to_json({"runs": entries, "latency": list(latency)})
    return Evaluated.of(content, manifest or {}, Path(), name)


def first_layer(model) -> LanguageModelDraft:
    """Return a cheap language model, often but not always right: the target's first layer."""
    draft = tiny_llama(layers=1, hidden=16, vocab=model.config.vocab_size)
    draft.load_state_dict(model.state_dict(), strict=False)
    return LanguageModelDraft(draft, model)


def question(number: int, category: str, *turns: str, **more) -> dict:
    return {"question_id": number, "category": category, "turns": list(turns), **more}
