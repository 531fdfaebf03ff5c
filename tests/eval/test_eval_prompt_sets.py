"""Prompt sets on which other projects report results, in the sets' official file formats."""

import pytest
from tiny_models import write_rows

from pipedraft.eval.tasks import load_task

DEEPSPEC = {
    **{"math500": "math", "aime24": "math", "aime25": "math", "mbpp": "code"},
    **{"livecodebench": "code", "arena_hard": "chat"},
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


@pytest.mark.parametrize("name", FLOWSPEC)
def test_flowspecs_six_sets_are_prompts(tmp_path, name):
    category = "" if name == "alpaca" else FLOWSPEC[name]
    reference = {"reference": ["So.\n#### 18"]} if name == "gsm8k" else {}
    row = {"question_id": 0, "category": category, "turns": ["a"], **reference}
    write_rows(tmp_path / "flowspec" / f"{name}.jsonl", row)
    (prompt,) = load_task(f"flowspec_{name}", tmp_path)
    assert (prompt.id, prompt.category, prompt.turns) == ("0", FLOWSPEC[name], ["a"])
    assert (prompt.expected == 18) is (name == "gsm8k")
