"""Correct and incorrect numbers, saved answers, and an evaluation's scores."""

import json
from pathlib import Path

import eval_runs
import pytest
from eval_runs import (
    MANIFEST,
    OFFICIAL,
    AnyDraft,
    StubEngine,
    assert_refused,
    needs_official,
    question,
    status,
)
from msgspec import UNSET
from scipy.stats import binomtest
from tiny_models import write_rows

from pipedraft.eval.answer import score_answer
from pipedraft.eval.evaluation import EvalMethod, Evaluation
from pipedraft.eval.intervals import wilson_interval
from pipedraft.eval.metrics import OVERALL
from pipedraft.eval.report import format_report
from pipedraft.eval.screen import screen_table
from pipedraft.eval.tasks import load_task, load_tasks
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.result import DecodeResult

tokenizer, target, folders = eval_runs.tokenizer, eval_runs.target, eval_runs.folders
no_pictures = eval_runs.no_pictures
pytestmark = pytest.mark.usefixtures("no_pictures")


# --- right answers ------------------------------------------------------------------------------


@pytest.mark.parametrize(("passed", "total"), [(0, 10), (5, 10), (10, 10), (1, 1), (812, 1319)])
def test_wilson_interval_is_scipys(passed: int, total: int) -> None:
    expected = binomtest(passed, total).proportion_ci(method="wilson")
    assert wilson_interval(passed, total) == pytest.approx((expected.low, expected.high))


@needs_official
def test_every_official_gsm8k_solution_is_right_and_another_number_is_wrong() -> None:
    rows = [json.loads(line) for line in (OFFICIAL / "gsm8k/test.jsonl").open()]
    for prompt, row in zip(load_task("gsm8k", OFFICIAL), rows, strict=True):
        assert score_answer(prompt.expected, row["answer"]).passed
        assert score_answer(prompt.expected, f"Thus ${prompt.reference}.00.").passed
        assert not score_answer(prompt.expected, row["answer"] + "1").passed


# --- scores of a run ----------------------------------------------------------------------------

HUMANEVAL_ROW = {
    "task_id": "T/0",
    "prompt": 'def double(x):\n    """Twice x."""\n',
    "entry_point": "double",
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(candidate):\n    assert candidate(3) == 6\n",
}
REPLIES = {"2 + 2": "It is 4.", "3 + 3": "It is 7.", "double": "    return 2 * x\n"}


class ScriptedEngine(StubEngine):
    """Answers by the prompt's contents; a draft that is not lossless spoils the first answer."""

    def decode(self, prompt_ids, *, prompt_index=0, on_token=None):
        text = self.tokenizer.decode(prompt_ids)
        reply = next((r for words, r in REPLIES.items() if words in text), "Hello.")
        if self.config.schedule.name == "spd":
            reply = reply.replace("4", "5")
        tokens = self.tokenizer.encode(reply)[: self.config.max_new_tokens]
        rounds = [1] * (len(tokens) - 1)
        return DecodeResult(
            prompt_ids=list(prompt_ids),
            token_ids=tokens,
            text=reply,
            stop_reason="eos" if len(reply) <= len(tokens) else "max_new_tokens",
            num_stages=self.config.num_stages,
            num_steps=self.config.num_stages * len(rounds),
            round_lengths=rounds,
            round_ends="u" * len(rounds),
            position_tests=[],
            position_accepts=[],
            token_times_s=[0.1 * i for i in range(1, len(tokens) + 1)],
        )

    def __init__(self, target, tokenizer, config, draft=None, *, connect=None):
        super().__init__(target, tokenizer, config, draft, connect=connect)
        self.tokenizer = tokenizer


@pytest.fixture
def benchmarks(tmp_path, monkeypatch):
    monkeypatch.setattr("pipedraft.eval.evaluation.Engine", ScriptedEngine)
    rows = [
        {"question": f"{q}?", "answer": f"So.\n#### {a}"} for q, a in (("2 + 2", 4), ("3 + 3", 6))
    ]
    write_rows(tmp_path / "gsm8k" / "test.jsonl", *rows)
    write_rows(tmp_path / "humaneval" / "HumanEval.jsonl", HUMANEVAL_ROW)
    write_rows(tmp_path / "mt_bench" / "question.jsonl", question(81, "writing", "Hi"))
    return tmp_path


def run_scored(target, tokenizer, folder: Path, **settings) -> list[dict]:
    comparison = Evaluation(
        target=target,
        tokenizer=tokenizer,
        benchmarks=load_tasks(["gsm8k", "humaneval", "mt_bench"], folder),
        reference=None,
        **settings,
    )
    config = DecodeConfig.of(schedule="spd", num_stages=4, max_new_tokens=20)
    return comparison.run([EvalMethod(name="spd", config=config, draft=AnyDraft())])


def test_every_methods_own_texts_are_scored(target, tokenizer, benchmarks) -> None:
    runs = run_scored(target, tokenizer, benchmarks, scores=True)
    scores = {(run.method, run.benchmark): run.score for run in runs}
    plain = scores["autoregressive", "gsm8k"]
    assert (plain.kind, plain.passed, plain.scored) == ("accuracy", 1, 2)
    assert plain.ci95 == pytest.approx(wilson_interval(1, 2))
    assert scores["spd", "gsm8k"].mean == 0
    assert {run.benchmark for run in runs if run.score is not UNSET} == {"gsm8k"}
    assert scores["spd", OVERALL] is UNSET
    rows = next(run for run in runs if run.benchmark == "gsm8k").per_prompt
    assert [(row.score, row.outcome) for row in rows] == [(1, "passed"), (0, "7 for 6")]
    assert " score" in screen_table(runs)


def test_without_asking_nothing_is_scored(target, tokenizer, benchmarks) -> None:
    runs = run_scored(target, tokenizer, benchmarks)
    assert not any(run.score is not UNSET for run in runs)
    assert not any(row.score is not UNSET for run in runs for row in run.per_prompt)
    assert " score" not in screen_table(runs)


def test_report_says_which_answers_were_cut(target, tokenizer, benchmarks, monkeypatch) -> None:
    monkeypatch.setitem(REPLIES, "2 + 2", "It is 4, as everybody knows.")
    report = format_report(run_scored(target, tokenizer, benchmarks, scores=True), MANIFEST)
    assert "gsm8k, autoregressive, T=0: 1 of 2 scored answers did not end" in report
    assert "Wilson interval" in report


@pytest.fixture
def command(folders, benchmarks):
    def build(names: str, *more: str) -> list[str]:
        data = ["--data-dir", str(benchmarks), "--max-new-tokens", "20", "--no-lossless"]
        return [*eval_runs.command(folders, benchmarks=names), *data, *more]

    return build


def test_command_scores_numbers_and_saves_programs_for_other_harnesses(command, folders) -> None:
    assert status(command("gsm8k,humaneval", "--score", "--save-answers")) == 0
    runs = json.loads((folders.out / "results.json").read_text())["runs"]
    assert [run["benchmark"] for run in runs if "score" in run] == ["gsm8k", "gsm8k"]
    assert "| score |" in (folders.out / "report.md").read_text()
    files = sorted((folders.out / "answers" / "humaneval").iterdir())
    assert [file.name for file in files] == [
        "autoregressive_n=4_T=0_W=1.jsonl",
        "spd_n=4_T=0_W=1.jsonl",
    ]
    (line,) = files[0].read_text().splitlines()
    saved = json.loads(line)
    reply = REPLIES["double"]
    assert (saved["task_id"], saved["solution"]) == ("T/0", reply)  # evalplus
    assert (saved["doc_id"], saved["resps"]) == (0, [[reply]])  # lm-evaluation-harness


def test_what_cannot_be_scored_is_one_line_and_status_two(command, capsys) -> None:
    words = ["--score", "mt_bench, humaneval", "gsm8k", "--save-answers"]
    assert_refused(capsys, command("mt_bench,humaneval", "--score"), words)
