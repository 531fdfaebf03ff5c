"""Rows of published benchmarks as prompts, and where the benchmarks are found."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pipedraft.eval.scores import Check, NumberCheck, ProgramCheck, find_number

HUMANEVAL_INSTRUCTION = "Complete this Python function. Answer with the whole function."
# Spec-Bench (Xia et al. 2024, arXiv:2401.07851): 80 questions of each of six subtasks in one file.
# MT-Bench's keep their own eight categories there; the others have one each.
SPEC_BENCH_FILE = "spec_bench/question.jsonl"
MT_BENCH_CATEGORIES = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)
TRANSLATION, SUMMARIZATION, QUESTIONS = "translation", "summarization", "qa"
MATH, RETRIEVAL = "math_reasoning", "rag"
SPEC_BENCH_CATEGORIES = (TRANSLATION, SUMMARIZATION, QUESTIONS, MATH, RETRIEVAL)


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One conversation: what the user says in each turn. The answers are generated."""

    task: str
    id: str
    category: str
    turns: list[str]
    reference: str | list[str] | None = None
    """The published answer, in the benchmark's own form; not used for decoding."""
    system: str | None = None
    check: Check | None = None
    """Tells a right answer; None: no answer is right or wrong."""


def text_of(row: dict[str, Any], field: str, where: str) -> str:
    value = row.get(field)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}: {field} is {value!r}; it must be a text that is not empty")
    return value


def turns_of(value: Any, field: str, where: str) -> list[str]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where}: {field} is {value!r}; it must be a list of user texts")
    return [
        text_of({f"{field}[{i}]": turn}, f"{field}[{i}]", where) for i, turn in enumerate(value)
    ]


def _questions(row: dict[str, Any], where: str) -> Prompt:
    """FastChat's format, which MT-Bench and Spec-Bench share."""
    reference = row.get("reference")
    if isinstance(reference, list) and reference and isinstance(reference[0], list):
        reference = reference[0]  # Spec-Bench's rag: all accepted answers of the one turn
    return Prompt(
        task="mt_bench",
        id=str(row.get("question_id", where)),
        category=text_of(row, "category", where),
        turns=turns_of(row.get("turns"), "turns", where),
        reference=reference,
    )


def _subtask(category: str) -> str:
    """Spec-Bench's name of the part that a category of its file belongs to."""
    return "mt_bench" if category in MT_BENCH_CATEGORIES else category


def parse_spec_bench(row: dict[str, Any], where: str) -> Prompt:
    prompt = _questions(row, where)
    category = _subtask(prompt.category)
    if category not in (*SPEC_BENCH_CATEGORIES, "mt_bench"):
        known = ", ".join((*sorted(MT_BENCH_CATEGORIES), *SPEC_BENCH_CATEGORIES))
        raise ValueError(
            f"{where}: category is {prompt.category!r}, which Spec-Bench has not; give one of "
            f"{known}, or the file's path in --benchmarks"
        )
    check = None
    if category == MATH:
        solution = prompt.reference[0] if isinstance(prompt.reference, list) else prompt.reference
        check = _number_check(solution or "", "reference", where)
    return replace(prompt, task="spec_bench", category=category, check=check)


def _number_check(solution: str, field: str, where: str) -> NumberCheck:
    _, mark, result = solution.rpartition("#### ")
    expected = find_number(result) if mark else None
    if expected is None:
        raise ValueError(
            f"{where}: {field} ends with {solution[-20:]!r}; it must end with '#### NUMBER'"
        )
    return NumberCheck(expected)


def _gsm8k(row: dict[str, Any], where: str) -> Prompt:
    solution = text_of(row, "answer", where)
    return Prompt(
        task="gsm8k",
        id=where.rpartition(":")[2],
        category="math",
        turns=[text_of(row, "question", where)],
        reference=solution.rpartition("#### ")[2],
        check=_number_check(solution, "answer", where),
    )


def _humaneval(row: dict[str, Any], where: str) -> Prompt:
    head = text_of(row, "prompt", where)
    code = head.strip("\n")
    return Prompt(
        task="humaneval",
        id=text_of(row, "task_id", where),
        category="code",
        turns=[f"{HUMANEVAL_INSTRUCTION}\n```python\n{code}\n```"],
        reference=text_of(row, "canonical_solution", where),
        check=ProgramCheck(
            prompt=head,
            entry_point=text_of(row, "entry_point", where),
            test=text_of(row, "test", where),
        ),
    )


def _alpaca(row: dict[str, Any], where: str) -> Prompt:
    """The instruction, then the input if there is one; without the training template."""
    if "turns" in row:  # the 80 questions that EAGLE's repository has, of an empty category
        return replace(_questions({**row, "category": "instruction"}, where), task="alpaca")
    texts = [text_of(row, "instruction", where)]
    if row.get("input"):
        texts.append(text_of(row, "input", where))
    return Prompt(
        task="alpaca",
        id=where.rpartition(":")[2],
        category="instruction",
        turns=["\n\n".join(texts)],
        reference=row.get("output"),
    )


# What the Hub has of Spec-Bench's sources, in the words of Spec-Bench.


def _wmt14(row: dict[str, Any], where: str) -> Prompt:
    pair = row.get("translation")
    if not isinstance(pair, dict):
        raise ValueError(f"{where}: translation is {pair!r}; it must hold the texts de and en")
    return Prompt(
        task="wmt14_de_en",
        id=where.rpartition(":")[2],
        category=TRANSLATION,
        turns=["Translate German to English: " + text_of(pair, "de", where)],
        reference=text_of(pair, "en", where),
    )


def _cnn_dm(row: dict[str, Any], where: str) -> Prompt:
    return Prompt(
        task="cnn_dm",
        id=where.rpartition(":")[2],
        category=SUMMARIZATION,
        turns=["Summarize: " + text_of(row, "article", where)],
        reference=text_of(row, "highlights", where),
    )


def _natural_questions(row: dict[str, Any], where: str) -> Prompt:
    question = text_of(row, "question", where)
    return Prompt(
        task="natural_questions",
        id=where.rpartition(":")[2],
        category=QUESTIONS,
        turns=[question[0].upper() + question[1:].rstrip("? ") + "?"],
        reference=row.get("answer"),
    )


Parse = Callable[[dict[str, Any], str], Prompt]


@dataclass(frozen=True)
class HubSet:
    repository: str
    configuration: str | None
    split: str
    streaming: bool = False
    """Reads the first rows over the network each time: the other splits are gigabytes."""


@dataclass(frozen=True)
class Benchmark:
    files: tuple[str, ...]
    """Paths below the data folder; the first that exists is read."""
    hub: HubSet | None
    parse: Parse
    """Of a row of its own format."""
    category: str | None = None
    """Of Spec-Bench's file these rows alone."""


def _of_spec_bench(category: str, hub: HubSet | None, parse: Parse = parse_spec_bench) -> Benchmark:
    return Benchmark((SPEC_BENCH_FILE,), hub, parse, category)


BENCHMARKS = {
    "mt_bench": Benchmark(
        ("mt_bench/question.jsonl",), HubSet("philschmid/mt-bench", None, "train"), _questions
    ),
    "gsm8k": Benchmark(("gsm8k/test.jsonl",), HubSet("openai/gsm8k", "main", "test"), _gsm8k),
    "humaneval": Benchmark(
        ("humaneval/HumanEval.jsonl", "humaneval/HumanEval.jsonl.gz"),
        HubSet("openai/openai_humaneval", None, "test"),
        _humaneval,
    ),
    "alpaca": Benchmark(
        ("alpaca/alpaca_data.json", "alpaca/alpaca_data.jsonl", "alpaca/question.jsonl"),
        HubSet("tatsu-lab/alpaca", None, "train"),
        _alpaca,
    ),
    "cnn_dm": _of_spec_bench(
        SUMMARIZATION, HubSet("abisee/cnn_dailymail", "3.0.0", "test", streaming=True), _cnn_dm
    ),
    "natural_questions": _of_spec_bench(
        QUESTIONS,
        HubSet("google-research-datasets/nq_open", None, "validation"),
        _natural_questions,
    ),
    "wmt14_de_en": _of_spec_bench(
        TRANSLATION, HubSet("wmt/wmt14", "de-en", "test", streaming=True), _wmt14
    ),
    "rag": _of_spec_bench(RETRIEVAL, None),
    "spec_bench": Benchmark((SPEC_BENCH_FILE,), None, parse_spec_bench),
}
ALIASES = {"nq": "natural_questions"}
