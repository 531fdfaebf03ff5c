"""Right and wrong answers, the sandbox that runs them, and the scores of an evaluation."""

import json
import os
import sys
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import eval_runs
import pytest
from conftest import write_rows
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

from pipedraft.eval import scores
from pipedraft.eval.intervals import wilson_interval
from pipedraft.eval.metrics import OVERALL
from pipedraft.eval.report import format_report, format_table
from pipedraft.eval.run import Evaluation, Method
from pipedraft.eval.scores import (
    Limits,
    ProgramCheck,
    Scorer,
    build_program,
    find_number,
    isolation,
    run_program,
)
from pipedraft.eval.tasks import load_task, load_tasks
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.result import DecodeResult

tokenizer, target, folders = eval_runs.tokenizer, eval_runs.target, eval_runs.folders
no_pictures = eval_runs.no_pictures
pytestmark = pytest.mark.usefixtures("no_pictures")
linux = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")


# --- right answers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("It is 18.", "18"),
        ("9 * 2 = $18", "18"),
        ("so **$1,234,567.50** in all", "1234567.5"),
        ("10.00 dollars", "10"),
        ("a share of .5", "0.5"),
        ("x = -3", "-3"),
        ("x = \u22123", "-3"),
        ("a loss of -$5", "-5"),
        ("a loss of $-5", "-5"),
        ("10-3", "3"),
        ("between 5 and 10-12", "12"),
        (r"\boxed{1{,}000}", "1000"),
        ("5, 6", "6"),
        ("10 legs.\n#### 18 legs on 2 dogs", "18"),
        ("#### Step 1: 5 cats\nTogether 40", "40"),
        ("####\n7", "7"),
        ("none", None),
    ],
)
def test_number_of_an_answer(answer: str, number: str | None) -> None:
    assert find_number(answer) == (None if number is None else Decimal(number))


AREA = ProgramCheck(
    prompt='''import math


def helper(x):
    return x + 1


def area(r):
    """Area of a disc."""
''',
    entry_point="area",
    test="def check(candidate):\n    assert abs(candidate(2) - 12.566) < 1e-3\n",
)
WHOLE = "def area(r):\n    return math.pi * r * r"
ANSWERS = {
    "block": f"Here it is:\n```python\n{WHOLE}\n```\nCall area(2).",
    "block without a language": f"```\n{WHOLE}\n```",
    "second block": f"First\n```bash\npip install x\n```\nthen\n```python\n{WHOLE}\n```",
    "block never closed": f"```python\n{WHOLE}\n",
    "block in a list": "1. So:\n   ```python\n   " + WHOLE.replace("\n", "\n   ") + "\n   ```",
    "block after thoughts": f"<think>\n```\ndef area(r): 0\n```\n</think>\n```\n{WHOLE}\n```",
    "plain": f"Sure, I can help.\n\n{WHOLE}\n\nThis takes the radius.",
    "plain with imports": f"from math import pi\n{WHOLE}\nDone, it works.",
    "future import": f"```python\nfrom __future__ import annotations\nimport math\n{WHOLE}\n```",
    "continuation": "    return math.pi * r * r\n\n\ndef other():\n    return (",
    "continuation with helper": "    return math.pi * (helper(r) - 1) ** 2\nprint(area(1",
    "continuation in a block": "```python\n    s = r * r\n    return math.pi * s\n```",
    "continuation not indented": "```python\ns = r * r\nreturn math.pi * s\n```",
    "first line not indented": "s = r * r\n    return math.pi * s\n",
}


def passes(sources: list[str], check: ProgramCheck) -> bool:
    scope: dict = {"__name__": "answer"}
    try:
        for source in (*sources, check.test, f"check({check.entry_point})"):
            exec(source, scope)
    except (AssertionError, SyntaxError, NameError, TypeError):
        return False
    return True


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_right_program_passes_in_every_form(answer: str) -> None:
    assert passes(build_program(answer, AREA), AREA)
    assert not passes(build_program(answer.replace("math.pi", "3 + 0 "), AREA), AREA)


@pytest.mark.parametrize(
    "answer", ["", "I cannot.", "```python\n```", "def area(r", "\0", "(" * 300]
)
def test_answer_without_a_program_fails(answer: str) -> None:
    assert Scorer(run_programs=True).score(AREA, answer).passed is False


def test_head_without_a_docstring_may_be_repeated() -> None:
    check = ProgramCheck(prompt="def area(r):\n", entry_point="area", test=AREA.test)
    assert passes(build_program(f"```\nimport math\n{WHOLE}\n```", check), check)


@pytest.mark.parametrize(("passed", "total"), [(0, 10), (5, 10), (10, 10), (1, 1), (812, 1319)])
def test_wilson_interval_is_scipys(passed: int, total: int) -> None:
    expected = binomtest(passed, total).proportion_ci(method="wilson")
    assert wilson_interval(passed, total) == pytest.approx((expected.low, expected.high))


@needs_official
def test_every_official_gsm8k_solution_is_right_and_another_number_is_wrong() -> None:
    rows = [json.loads(line) for line in (OFFICIAL / "gsm8k/test.jsonl").open()]
    scorer = Scorer(run_programs=False)
    for prompt, row in zip(load_task("gsm8k", OFFICIAL), rows, strict=True):
        assert scorer.score(prompt.check, row["answer"]).passed
        assert scorer.score(prompt.check, f"Thus ${prompt.reference}.00.").passed
        assert not scorer.score(prompt.check, row["answer"] + "1").passed


@linux
@needs_official
@pytest.mark.parametrize("number", [0, 32, 38, 129])  # 32 and 38 have helpers in the prompt
def test_official_solution_passes_and_a_stub_fails(number: int) -> None:
    prompt = load_task("humaneval", OFFICIAL)[number]
    scorer = Scorer(run_programs=True)
    whole = f"```python\n{prompt.check.prompt}{prompt.reference}```"
    assert scorer.score(prompt.check, whole).passed
    assert scorer.score(prompt.check, prompt.reference).passed
    stub_score = scorer.score(prompt.check, "    return None\n")
    assert (stub_score.passed, stub_score.outcome[:7]) == (False, "raises ")


# --- sandbox ------------------------------------------------------------------------------------

SHORT = Limits(cpu_s=1, wall_s=100)


@linux
@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        ("assert sum(range(10)) == 45", "passed"),
        ("assert False", "raises AssertionError"),
        ("def f(:", "raises SyntaxError"),
        ("while True: pass", "time limit"),
        ("import signal\nsignal.signal(signal.SIGALRM, print)\nwhile True: pass", "time limit"),
        ("x = [0] * 10**10", "raises MemoryError"),
        ("x = []\nwhile True: x.append(bytes(10**8))", "raises MemoryError"),
        ("import os\nwhile True: os.fork()", "raises BlockingIOError"),
        ("import subprocess; subprocess.run(['true'])", "raises BlockingIOError"),
        ("open('big', 'wb').write(bytes(2**21))", "raises OSError"),
        ("import sys; sys.exit(0)", "raises SystemExit"),
        ("import os; os._exit(0)", "ended early"),
        ("import os; os.kill(os.getpid(), 15)", "ended by SIGTERM"),
        ("input()", "raises EOFError"),
        ("import resource as r; r.setrlimit(r.RLIMIT_AS, (2**40, 2**40))", "raises ValueError"),
        ("class passed(Exception): pass\nraise passed", "raises passed"),
        ("print('passed' * 10**6)", "passed"),
    ],
)
def test_sandbox_stops_what_goes_wrong(program: str, outcome: str) -> None:
    assert run_program([program], SHORT) == outcome


@linux
def test_program_has_an_empty_folder_and_no_environment(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    program = (
        "import os\n"
        "assert os.listdir() == []\n"
        "open('note', 'w').write('x')\n"
        "assert set(os.environ) <= {'PATH', 'OMP_NUM_THREADS', 'LC_CTYPE'}, 'environment'"
    )
    assert run_program([program]) == run_program([program]) == "passed"
    assert list(tmp_path.iterdir()) == []


def processes_with(value: str) -> Iterator[str]:
    """Those that have the value in their environment."""
    for file in Path("/proc").glob("[0-9]*/environ"):
        try:
            if value.encode() in file.read_bytes():
                yield file.parent.name
        except OSError:  # not ours, or gone
            continue


@linux
def test_program_that_leaves_its_group_and_sleeps_is_killed(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:{tmp_path}")  # marks its processes
    program = "import os, time\nos.setsid()\ntime.sleep(60)"
    assert run_program([program], Limits(wall_s=2)) == "time limit"
    deadline = time.monotonic() + 60
    while living := list(processes_with(str(tmp_path))):
        assert time.monotonic() < deadline, f"still there: {living}"
        time.sleep(0.02)


@linux
def test_program_has_no_network_where_namespaces_are_allowed() -> None:
    if not isolation():
        pytest.skip("the system does not permit `unshare --net --pid --mount`")
    program = (
        "import os, socket\n"
        "assert [name for _, name in socket.if_nameindex()] == ['lo']\n"
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(('192.0.2.1', 53))"
    )
    assert run_program([program]) == "raises OSError"


@linux
def test_limits_hold_where_namespaces_are_forbidden(monkeypatch) -> None:
    monkeypatch.setattr(scores, "isolation", tuple)
    if run_program(["0"]) != "passed":
        pytest.skip("another user cannot start root's Python")
    assert run_program(["import os; os.fork()"]) == "raises BlockingIOError"
    assert run_program(["while True: pass"], SHORT) == "time limit"


@linux
@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can become nobody")
def test_program_of_root_cannot_write_where_root_can(tmp_path) -> None:
    tmp_path.chmod(0o700)
    assert run_program([f"open({str(tmp_path / 'x')!r}, 'w')"]) == "raises PermissionError"


# --- scores of a run ----------------------------------------------------------------------------

ROOT_CHECK = ProgramCheck(
    prompt='def double(x):\n    """Twice x."""\n',
    entry_point="double",
    test="def check(candidate):\n    assert candidate(3) == 6\n",
)
HUMANEVAL_ROW = {
    "task_id": "T/0",
    "prompt": ROOT_CHECK.prompt,
    "entry_point": "double",
    "canonical_solution": "    return 2 * x\n",
    "test": ROOT_CHECK.test,
}
REPLIES = {"2 + 2": "It is 4.", "3 + 3": "It is 7.", "double": "    return 2 * x\n"}


class ScriptedEngine(StubEngine):
    """Answers by what the prompt contains; a draft that is not lossless spoils the first."""

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
            position_tests=[],
            position_accepts=[],
            token_times_s=[0.1 * i for i in range(1, len(tokens) + 1)],
        )

    def __init__(self, target, tokenizer, config, draft=None, *, connect=None):
        super().__init__(target, tokenizer, config, draft, connect=connect)
        self.tokenizer = tokenizer


@pytest.fixture
def benchmarks(tmp_path, monkeypatch):
    monkeypatch.setattr("pipedraft.eval.run.Engine", ScriptedEngine)
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
    return comparison.run([Method(name="spd", config=config, draft=AnyDraft())])


@linux
def test_every_methods_own_texts_are_scored(target, tokenizer, benchmarks) -> None:
    runs = run_scored(target, tokenizer, benchmarks, scorer=Scorer(run_programs=True))
    scores = {(run.method, run.benchmark): run.score for run in runs}
    plain = scores["autoregressive", "gsm8k"]
    assert (plain.kind, plain.passed, plain.scored) == ("accuracy", 1, 2)
    assert plain.ci95 == pytest.approx(wilson_interval(1, 2))
    assert scores["spd", "gsm8k"].mean == 0
    assert scores["autoregressive", "humaneval"].kind == "pass@1"
    assert scores["autoregressive", "humaneval"].mean == 1
    assert scores["spd", "mt_bench"] is UNSET and scores["spd", OVERALL] is UNSET
    rows = next(run for run in runs if run.benchmark == "gsm8k").per_prompt
    assert [(row.score, row.outcome) for row in rows] == [(1, "passed"), (0, "7 for 6")]
    assert "score" in format_table(runs).splitlines()[0]


def test_programs_are_not_run_unless_that_is_allowed(
    target, tokenizer, benchmarks, monkeypatch
) -> None:
    monkeypatch.setattr("pipedraft.eval.scores.run_program", lambda sources, **tests: 1 / 0)
    runs = run_scored(target, tokenizer, benchmarks, scorer=Scorer(run_programs=False))
    assert {run.benchmark for run in runs if run.score is not UNSET} == {"gsm8k"}


def test_without_a_scorer_nothing_is_scored(target, tokenizer, benchmarks) -> None:
    runs = run_scored(target, tokenizer, benchmarks)
    assert not any(run.score is not UNSET for run in runs)
    assert not any(row.score is not UNSET for run in runs for row in run.per_prompt)
    assert "score" not in format_table(runs)


def test_benchmark_longer_than_the_context_is_named(target, tokenizer, benchmarks) -> None:
    write_rows(benchmarks / "mt_bench" / "question.jsonl", question(81, "writing", "Hi " * 99))
    with pytest.raises(ValueError, match=r"shortest prompt of mt_bench has \d+ tokens.*leave mt_"):
        run_scored(target, tokenizer, benchmarks)


def test_equal_answers_are_run_once(monkeypatch) -> None:
    ran = []
    monkeypatch.setattr(
        "pipedraft.eval.scores.run_program",
        lambda sources, **tests: ran.append(sources) or "passed",
    )
    scorer = Scorer(run_programs=True)
    for answer in ("    return 1\n", "    return 1\n", "    return 2\n"):
        scorer.score(AREA, answer)
    assert len(ran) == 2


def test_report_says_which_answers_were_cut_or_not_isolated(
    target, tokenizer, benchmarks, monkeypatch
) -> None:
    monkeypatch.setattr("pipedraft.eval.scores.run_program", lambda sources, **tests: "passed")
    monkeypatch.setattr("pipedraft.eval.scores.isolation", tuple)
    monkeypatch.setitem(REPLIES, "double", "    return 2 * x  # twice the number\n")
    runs = run_scored(target, tokenizer, benchmarks, scorer=Scorer(run_programs=True))
    report = format_report(runs, MANIFEST)
    assert "humaneval, autoregressive, T=0: 1 of 1 scored answers did not end" in report
    assert "with the network, the user's files and other processes in reach" in report
    assert "Wilson interval" in report


@pytest.fixture
def command(folders, benchmarks):
    def build(names: str, *more: str) -> list[str]:
        data = ["--data-dir", str(benchmarks), "--max-new-tokens", "20", "--no-lossless"]
        return [*eval_runs.command(folders, benchmarks=names), *data, *more]

    return build


@linux
def test_command_scores_what_it_is_allowed_to(command, folders, capsys) -> None:
    assert status(command("gsm8k,humaneval", "--score")) == 0
    out = capsys.readouterr().out
    assert "humaneval is not scored" in out and "--allow-code-execution" in out
    runs = json.loads((folders.out / "results.json").read_text())["runs"]
    assert [run["benchmark"] for run in runs if "score" in run] == ["gsm8k", "gsm8k"]
    assert status(command("humaneval", "--score", "--allow-code-execution")) == 0
    runs = json.loads((folders.out / "results.json").read_text())["runs"]
    assert [run["score"]["mean"] for run in runs] == [1, 1]
    assert "| score |" in (folders.out / "report.md").read_text()


@pytest.mark.parametrize(
    ("names", "options", "words"),
    [
        ("gsm8k", ["--allow-code-execution"], ["--allow-code-execution", "without --score"]),
        (
            "humaneval",
            ["--score", "--allow-unisolated-code"],
            ["--allow-unisolated-code: given without --allow-code-execution"],
        ),
        ("mt_bench", ["--score"], ["--score", "mt_bench", "add gsm8k or humaneval"]),
        (
            "gsm8k",
            ["--score", "--allow-code-execution"],
            ["--allow-code-execution", "gsm8k", "add humaneval"],
        ),
        ("spec_bench", ["--score"], ["--data-dir", "spec_bench/question.jsonl", "hemingkx"]),
    ],
)
def test_bad_option_is_one_line_and_status_two(command, capsys, names, options, words) -> None:
    assert_refused(capsys, command(names, *options), words)


@pytest.mark.parametrize(
    ("outcomes", "words"),
    [
        (
            ["raises ModuleNotFoundError"],
            ["--allow-code-execution", "ModuleNotFoundError", "another user"],
        ),
        (["passed", "passed"], ["limit on processes", "another user"]),
    ],
)
def test_sandbox_that_does_not_hold_is_refused(
    command, capsys, monkeypatch, outcomes, words
) -> None:
    monkeypatch.setattr(scores, "run_program", lambda sources: outcomes.pop(0))
    monkeypatch.setattr(scores, "isolation", lambda: ("unshare",))
    monkeypatch.setattr(scores.sys, "platform", "linux")
    assert_refused(capsys, command("humaneval", "--score", "--allow-code-execution"), words)


def test_help_says_what_the_sandbox_does_not_prevent(capsys) -> None:
    assert status(["--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "nothing runs without --allow-unisolated-code" in text
