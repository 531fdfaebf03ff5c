"""Prompt files in the benchmarks' own formats, and their token ids."""

import gzip
import json
from dataclasses import replace

import pytest
from tiny_models import byte_tokenizer, write_rows

from pipedraft.eval.tasks import ASSETS, Prompt, encode_turn, load_task
from pipedraft.eval.turns import prompt_seed


@pytest.mark.parametrize(("name", "num_turns"), [("mt_bench", 2), ("gsm8k", 1), ("humaneval", 1)])
def test_shipped_benchmark_has_sixteen_distinct_prompts(name: str, num_turns: int) -> None:
    prompts = load_task(name)
    assert len({tuple(prompt.turns) for prompt in prompts}) == len(prompts) == 16
    assert all(len(prompt.turns) == num_turns for prompt in prompts)


def read_rows(file: str) -> list[dict]:
    return [json.loads(line) for line in (ASSETS / file).read_text().splitlines()]


def test_every_shipped_function_passes_its_own_test() -> None:
    for row in read_rows("humaneval/HumanEval.jsonl"):
        scope: dict = {}
        program = row["prompt"] + row["canonical_solution"] + row["test"]
        exec(program, scope)
        scope["check"](scope[row["entry_point"]])


def test_every_shipped_calculation_is_right() -> None:
    for row in read_rows("gsm8k/test.jsonl"):
        marks = row["answer"].split("<<")[1:]
        for mark in marks:
            left, right = mark.partition(">>")[0].split("=")
            assert eval(left) == float(right)
        result = row["answer"].rpartition("#### ")[2]
        assert float(marks[-1].partition(">>")[0].split("=")[1]) == float(result)


def test_prompts_that_share_an_id_are_refused(tmp_path) -> None:
    name = write_rows(tmp_path / "mine.jsonl", *({"prompt": text, "id": 1} for text in "abc"))
    with pytest.raises(ValueError, match="mine.jsonl' has 3 prompts of the id '1'; give each its"):
        load_task(name)
    assert len(load_task(name, limit=1)) == 1


@pytest.mark.parametrize("fault", ["short", "damaged", "plain"])
def test_a_damaged_gzip_file_is_an_error_that_names_it(tmp_path, fault) -> None:
    rows = "".join(f'{{"prompt": "q {i * i}"}}\n' for i in range(500)).encode()
    whole, path = gzip.compress(rows), tmp_path / "mine.jsonl.gz"
    damaged = whole[:10] + b"\xff" + whole[11:]
    path.write_bytes({"short": whole[:-40], "damaged": damaged, "plain": rows}[fault])
    with pytest.raises(ValueError, match="mine.jsonl.gz. is not a whole gzip file .*; compress"):
        load_task(str(path))


def test_humaneval_prompt_holds_the_function_in_a_code_block(tmp_path) -> None:
    row = {
        "task_id": "X/0",
        "prompt": "def f():\n",
        "entry_point": "f",
        "canonical_solution": "    return 1\n",
        "test": "def check(candidate):\n    assert candidate() == 1\n",
    }
    path = tmp_path / "humaneval" / "HumanEval.jsonl.gz"
    path.parent.mkdir()
    with gzip.open(path, "wt") as file:
        file.write(json.dumps(row))
    (prompt,) = load_task("humaneval", tmp_path)
    assert prompt.turns[0].endswith("```python\ndef f():\n```")
    assert prompt.reference == "    return 1\n"


@pytest.mark.parametrize("reference", [[5], {}, [], "no number", ["no mark 5"]])
def test_a_solution_in_another_form_is_one_line(tmp_path, reference) -> None:
    row = {"question_id": 1, "turns": ["1 + 1?"], "reference": reference}
    write_rows(tmp_path / "flowspec" / "gsm8k.jsonl", row)
    with pytest.raises(ValueError, match=r"gsm8k.jsonl:1: reference .* must (be a text|end with)"):
        load_task("flowspec_gsm8k", tmp_path)


def test_own_file_may_hold_prompt_turns_or_messages(tmp_path) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "not used"},
        {"role": "user", "content": "two"},
    ]
    name = write_rows(
        tmp_path / "mine.jsonl",
        {"prompt": "hello", "id": 7},
        {"turns": ["a", "b"], "category": "x"},
        {"messages": messages},
    )
    first, second, third = load_task(name)
    assert (first.task, first.id, first.turns) == ("mine", "7", ["hello"])
    assert (second.category, second.turns) == ("x", ["a", "b"])
    assert (third.system, third.turns) == ("Be brief.", ["one", "two"])


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "  "}, ["mine.jsonl:1", "prompt", "'  '", "not empty"]),
        ({"turns": []}, ["mine.jsonl:1", "turns", "[]"]),
        ({"turns": ["a", ""]}, ["turns[1]", "''"]),
        ({"text": "x"}, ["mine.jsonl:1", "['text']", "prompt, turns or messages"]),
        ({"messages": [{"role": "tool", "content": "x"}]}, ["'tool'", "system, user or assistant"]),
        ({"messages": "x"}, ["messages", "list"]),
        (["x"], ["mine.jsonl:1", "not an object"]),
    ],
)
def test_bad_row_is_named_with_its_line_field_and_fix(tmp_path, row, words) -> None:
    with pytest.raises(ValueError) as error:
        load_task(write_rows(tmp_path / "mine.jsonl", row))
    for word in words:
        assert word in str(error.value)


def test_broken_json_is_named_with_its_line(tmp_path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "x"}\n\n{"prompt"\n')
    with pytest.raises(ValueError, match=r"mine.jsonl:3: not JSON"):
        load_task(str(path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gsm8",), "did you mean 'gsm8k'"),
        (("absent.jsonl",), "no file 'absent.jsonl'"),
        (("gsm8k", "nowhere"), "--data-dir: 'nowhere' has no gsm8k/test.jsonl"),
    ],
)
def test_bad_argument_is_named_with_its_fix(arguments, message) -> None:
    with pytest.raises(ValueError) as error:
        load_task(*arguments)
    assert message in str(error.value)


def test_empty_file_is_refused(tmp_path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text("\n")
    with pytest.raises(ValueError, match="no prompt"):
        load_task(str(path))


def test_missing_assets_ask_for_a_data_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("pipedraft.eval.tasks.ASSETS", tmp_path)
    with pytest.raises(ValueError, match="--data-dir DIR, or --data-dir hub:"):
        load_task("gsm8k")


def test_unreachable_hub_is_an_error_with_a_fix(monkeypatch) -> None:
    def load_dataset(*args, **kwargs):
        raise ConnectionError("no network")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with pytest.raises(ValueError, match=r"--data-dir: .*no network"):
        load_task("gsm8k", "hub:")


def make_prompt(*turns: str, system: str | None = None) -> Prompt:
    return Prompt(task="t", id="0", category="c", turns=list(turns), system=system)


def test_second_turn_contains_the_generated_answer_of_the_first() -> None:
    tokenizer = byte_tokenizer()
    ids = encode_turn(tokenizer, make_prompt("hi", "more", system="S"), ["an answer"])
    assert tokenizer.decode(ids) == (
        "<|system|>S<|end|><|user|>hi<|end|><|assistant|>an answer<|end|><|user|>more<|end|>"
        "<|assistant|>"
    )


def test_tokenizer_without_template_gets_plain_text() -> None:
    tokenizer = byte_tokenizer(template=None)
    ids = encode_turn(tokenizer, make_prompt("hi", "more"), ["an answer"])
    assert tokenizer.decode(ids) == "hi\nan answer\nmore\n"


def test_template_that_refuses_a_role_is_an_error_with_the_prompts_name() -> None:
    template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    )
    with pytest.raises(ValueError, match=r"t 0: .*no system"):
        encode_turn(byte_tokenizer(template), make_prompt("hi", system="S"), [])


def test_packaged_prompts_have_names_of_their_own_and_the_same_random_numbers() -> None:
    prompt = load_task("gsm8k", limit=1)[0]
    assert (prompt.task, prompt.form) == ("pipedraft-math", "gsm8k")
    assert prompt_seed(prompt, 0) == prompt_seed(replace(prompt, task="gsm8k"), 0)
