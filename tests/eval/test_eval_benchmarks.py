"""Every benchmark in its published format, and its prompts."""

import json
from collections import Counter
from decimal import Decimal
from pathlib import Path

import pytest
from datasets import Dataset
from eval_runs import OFFICIAL, needs_official, question
from tiny_models import write_rows

from pipedraft.eval.tasks import load_task, load_tasks

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem")
SOLUTION = "He pays 400*.5=$<<400*.5=200>>200.\n#### 1,000"


def spec_bench(folder: Path, *extra: dict) -> Path:
    write_rows(
        folder / "spec_bench" / "question.jsonl",
        *(question(81 + i, name, "first", "second") for i, name in enumerate(MT_BENCH)),
        question(151, "humanities", "Why?", "And how?", reference=["so", ""]),
        question(161, "translation", "Translate German to English: Ja .", reference=["Yes ."]),
        question(241, "summarization", "Summarize: It rained.", reference=["Rain."]),
        question(321, "qa", "Who was it?"),
        question(322, "qa", "When was it?"),
        question(401, "math_reasoning", "How much?", reference=[SOLUTION]),
        question(481, "rag", "A passage.\nWhat?", reference=[["one", "two"]]),
        *extra,
    )
    return folder


def test_spec_bench_is_read_whole_with_its_six_subtasks(tmp_path) -> None:
    prompts = load_task("spec_bench", spec_bench(tmp_path))
    assert Counter(prompt.category for prompt in prompts) == {
        "mt_bench": 8,
        "translation": 1,
        "summarization": 1,
        "qa": 2,
        "math_reasoning": 1,
        "rag": 1,
    }
    assert {prompt.task for prompt in prompts} == {"spec_bench"}
    assert prompts[7].turns == ["Why?", "And how?"]
    assert [p.expected for p in prompts if p.expected is not None] == [Decimal(1000)]


@pytest.mark.parametrize(
    ("name", "ids", "turn", "reference"),
    [
        ("wmt14_de_en", ["161"], "Translate German to English: Ja .", ["Yes ."]),
        ("cnn_dm", ["241"], "Summarize: It rained.", ["Rain."]),
        ("natural_questions", ["321", "322"], "Who was it?", None),
        ("rag", ["481"], "A passage.\nWhat?", ["one", "two"]),
    ],
)
def test_part_of_spec_bench_is_its_category(tmp_path, name, ids, turn, reference) -> None:
    prompts = load_task(name, spec_bench(tmp_path))
    assert [prompt.id for prompt in prompts] == ids
    assert (prompts[0].task, prompts[0].turns) == (name, [turn])
    assert prompts[0].reference == reference
    assert load_task(name, tmp_path, limit=1) == prompts[:1]


def test_nq_is_natural_questions_and_not_a_second_benchmark(tmp_path) -> None:
    spec_bench(tmp_path)
    assert list(load_tasks(["nq", "rag"], tmp_path)) == ["natural_questions", "rag"]
    with pytest.raises(ValueError, match="two are called 'natural_questions'; leave 'nq' out"):
        load_tasks(["natural_questions", "nq"], tmp_path)


ALPACA = {"instruction": "Name a color.", "input": "", "output": "Red."}


def test_alpaca_joins_instruction_and_input(tmp_path) -> None:
    path = tmp_path / "alpaca" / "alpaca_data.json"
    path.parent.mkdir()
    path.write_text(json.dumps([ALPACA, {"instruction": "Double it.", "input": "4"}]))
    first, second = load_task("alpaca", tmp_path)
    assert (first.turns, first.reference) == (["Name a color."], "Red.")
    assert second.turns == ["Double it.\n\n4"]


@pytest.mark.parametrize(
    ("name", "row", "asked", "turn", "reference"),
    [
        (
            "gsm8k",
            {"question": "1 + 1?", "answer": "2\n#### 2"},
            ("openai/gsm8k", "main", "test"),
            "1 + 1?",
            "2",
        ),
        ("alpaca", ALPACA, ("tatsu-lab/alpaca", None, "train"), "Name a color.", "Red."),
    ],
)
def test_rows_of_the_hub_are_those_of_the_files(
    monkeypatch, name, row, asked, turn, reference
) -> None:
    calls = []

    def load_dataset(repository, *, name, split, **_):
        calls.append((repository, name, split))
        return Dataset.from_list([row])

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    (prompt,) = load_task(name, "hub:")
    assert calls == [asked]
    assert (prompt.task, prompt.turns, prompt.reference) == (name, [turn], reference)


@pytest.mark.parametrize(
    ("name", "data_dir", "words"),
    [
        (
            "rag",
            "hub:",
            ["--data-dir", "no rag", "github.com/hemingkx/Spec-Bench", "--data-dir DIR"],
        ),
        ("spec_bench", None, ["mt_bench, gsm8k and humaneval", "spec_bench/question.jsonl", "DIR"]),
        ("cnn_dm", "nowhere", ["'nowhere'", "spec_bench/question.jsonl", "hemingkx"]),
        ("alpaca", "nowhere", ["put alpaca/alpaca_data.json into DIR", "hub:"]),
    ],
)
def test_missing_benchmark_is_named_with_its_fix(name, data_dir, words) -> None:
    with pytest.raises(ValueError) as error:
        load_task(name, data_dir)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("name", "file", "row", "words"),
    [
        (
            "spec_bench",
            "spec_bench/question.jsonl",
            question(1, "poetry", "x"),
            ["'poetry'", "rag"],
        ),
        ("rag", "spec_bench/question.jsonl", question(1, "qa", "x"), ["'rag'", "no prompt"]),
        (
            "spec_bench",
            "spec_bench/question.jsonl",
            question(1, "math_reasoning", "x", reference=["it is 5"]),
            [":1", "reference", "it is 5", "#### NUMBER"],
        ),
        (
            "gsm8k",
            "gsm8k/test.jsonl",
            {"question": "x", "answer": "5"},
            [":1: answer", "'5'", "####"],
        ),
        (
            "humaneval",
            "humaneval/HumanEval.jsonl",
            {"task_id": "a", "prompt": "p", "entry_point": "f"},
            [":1", "canonical_solution is None"],
        ),
    ],
)
def test_bad_row_is_named_with_its_line_field_and_fix(tmp_path, name, file, row, words) -> None:
    write_rows(tmp_path / file, row)
    with pytest.raises(ValueError) as error:
        load_task(name, tmp_path)
    for word in words:
        assert word in str(error.value)


@needs_official
def test_official_files_have_their_published_counts() -> None:
    counts = {"mt_bench": 80, "gsm8k": 1319, "humaneval": 164, "spec_bench": 480}
    parts = dict.fromkeys(("wmt14_de_en", "cnn_dm", "natural_questions", "rag"), 80)
    read = load_tasks([*counts, *parts], OFFICIAL)
    assert {name: len(prompts) for name, prompts in read.items()} == counts | parts
    assert set(Counter(prompt.category for prompt in read["mt_bench"]).values()) == {10}
    assert set(Counter(prompt.category for prompt in read["spec_bench"]).values()) == {80}
    for name, category in (("cnn_dm", "summarization"), ("rag", "rag"), ("mt_bench", "mt_bench")):
        same = [p.turns for p in read["spec_bench"] if p.category == category]
        assert [prompt.turns for prompt in read[name]] == same


@needs_official
def test_official_calculations_of_spec_bench_are_gsm8ks() -> None:
    read = load_tasks(["gsm8k", "spec_bench"], OFFICIAL)
    expected = {prompt.turns[0]: prompt.expected for prompt in read["gsm8k"]}
    scored = [prompt for prompt in read["spec_bench"] if prompt.expected is not None]
    assert len(scored) == 80
    assert all(prompt.expected == expected[prompt.turns[0]] for prompt in scored)
