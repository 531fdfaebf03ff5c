"""Prompt sets on which other projects report results, in the sets' official file formats."""

import pytest
from conftest import write_rows

from pipedraft.eval.tasks import load_task

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
DEEPSPEC = {
    **{"math500": "math", "aime24": "math", "aime25": "math", "mbpp": "code"},
    **{"livecodebench": "code", "arena_hard": "chat"},
}
AUTHORS = {
    "math500": ("test.jsonl", {"problem": "1 + 1?", "answer": "2"}, "1 + 1?" + BOXED, "2"),
    "aime24": ("test.jsonl", {"Problem": "1 + 1?", "Answer": 2}, "1 + 1?" + BOXED, "2"),
    "mbpp": ("mbpp.jsonl", {"task_id": 2, "text": "Add.", "code": "x"}, "Add.", "x"),
    "arena_hard": ("question.jsonl", {"uid": "a", "prompt": "Hi"}, "Hi", None),
}
FLOWSPEC = {
    **{"mt_bench": "writing", "humaneval": "code", "gsm8k": "math", "alpaca": "instruction"},
    **{"sum": "summarization", "qa": "qa"},
}


@pytest.mark.parametrize("name", DEEPSPEC)
def test_deepspecs_rows_are_prompts(tmp_path, name):
    file = {"arena_hard": "arena-hard-v2"}.get(name, name)
    write_rows(tmp_path / "deepspec" / f"{file}.jsonl", {"turns": ["a"]}, {"turns": ["b"]})
    prompts = load_task(name, tmp_path)
    assert [(p.task, p.id, p.category, p.turns) for p in prompts] == [
        (name, "1", DEEPSPEC[name], ["a"]),
        (name, "2", DEEPSPEC[name], ["b"]),
    ]
    assert all(p.expected is None for p in prompts)


@pytest.mark.parametrize("name", AUTHORS)
def test_the_authors_rows_are_prompts(tmp_path, name):
    file, row, turn, reference = AUTHORS[name]
    write_rows(tmp_path / name / file, row)
    (prompt,) = load_task(name, tmp_path)
    assert (prompt.turns, prompt.reference) == ([turn], reference)


def test_a_program_of_livecodebench_begins_with_its_starter_code(tmp_path):
    row = {"question_id": "q1", "question_content": "Add.", "starter_code": "class A:"}
    write_rows(tmp_path / "livecodebench" / "test.jsonl", row)
    (prompt,) = load_task("livecodebench", tmp_path)
    assert prompt.id == "q1" and "Question:\nAdd.\n" in prompt.turns[0]
    assert prompt.turns[0].endswith("```python\nclass A:\n```")


@pytest.mark.parametrize("name", FLOWSPEC)
def test_flowspecs_six_sets_are_prompts(tmp_path, name):
    category = "" if name == "alpaca" else FLOWSPEC[name]
    reference = {"reference": ["So.\n#### 18"]} if name == "gsm8k" else {}
    row = {"question_id": 0, "category": category, "turns": ["a"], **reference}
    write_rows(tmp_path / "flowspec" / f"{name}.jsonl", row)
    (prompt,) = load_task(f"flowspec_{name}", tmp_path)
    assert (prompt.id, prompt.category, prompt.turns) == ("0", FLOWSPEC[name], ["a"])
    assert (prompt.expected == 18) is (name == "gsm8k")


def test_a_row_without_its_field_is_named(tmp_path):
    write_rows(tmp_path / "math500" / "test.jsonl", {"answer": "2"})
    with pytest.raises(ValueError, match=r"test.jsonl:1: problem is None"):
        load_task("math500", tmp_path)
