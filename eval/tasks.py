"""Benchmarks as lists of prompts, and prompts as token ids.

A benchmark is read from files in its own published format, from the Hub, or from any .jsonl file.
Nothing is scored here: lossless decoding leaves the text, and so the score, as the target's own.
"""

import gzip
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

import pipedraft

ASSETS = Path(pipedraft.__file__).parent / "assets" / "eval"
HUB_PREFIX = "hub:"
HUMANEVAL_INSTRUCTION = "Complete this Python function. Answer with the whole function."


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


def _text(row: dict[str, Any], field: str, where: str) -> str:
    value = row.get(field)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}: {field} is {value!r}; it must be a text that is not empty")
    return value


def _turns(value: Any, field: str, where: str) -> list[str]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where}: {field} is {value!r}; it must be a list of user texts")
    return [_text({f"{field}[{i}]": turn}, f"{field}[{i}]", where) for i, turn in enumerate(value)]


def _mt_bench(row: dict[str, Any], where: str) -> Prompt:
    return Prompt(
        task="mt_bench",
        id=str(row.get("question_id", where)),
        category=_text(row, "category", where),
        turns=_turns(row.get("turns"), "turns", where),
        reference=row.get("reference"),
    )


def _gsm8k(row: dict[str, Any], where: str) -> Prompt:
    return Prompt(
        task="gsm8k",
        id=where.rpartition(":")[2],
        category="math",
        turns=[_text(row, "question", where)],
        reference=_text(row, "answer", where).rpartition("#### ")[2],
    )


def _humaneval(row: dict[str, Any], where: str) -> Prompt:
    code = _text(row, "prompt", where).strip("\n")
    return Prompt(
        task="humaneval",
        id=_text(row, "task_id", where),
        category="code",
        turns=[f"{HUMANEVAL_INSTRUCTION}\n```python\n{code}\n```"],
        reference=_text(row, "canonical_solution", where),
    )


def _messages(value: Any, where: str) -> tuple[list[str], str | None]:
    """User turns and system text; assistant messages are left out, the target answers itself."""
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise ValueError(f"{where}: messages must be a list of {{role, content}} objects")
    turns, system = [], None
    for message in value:
        role = message.get("role")
        if role == "user":
            turns.append(_text(message, "content", where))
        elif role == "system":
            system = _text(message, "content", where)
        elif role != "assistant":
            raise ValueError(f"{where}: role is {role!r}; use system, user or assistant")
    return _turns(turns, "user messages", where), system


def _own_prompt(task: str, row: dict[str, Any], where: str) -> Prompt:
    """A row of a user's file: ``prompt`` (one text), ``turns`` (texts) or ``messages``."""
    system = None
    if "turns" in row:
        turns = _turns(row["turns"], "turns", where)
    elif "messages" in row:
        turns, system = _messages(row["messages"], where)
    elif "prompt" in row:
        turns = [_text(row, "prompt", where)]
    else:
        raise ValueError(
            f"{where}: fields are {sorted(row)}; one of prompt, turns or messages is needed"
        )
    return Prompt(
        task=task,
        id=str(row.get("id", where.rpartition(":")[2])),
        category=str(row.get("category", task)),
        turns=turns,
        reference=row.get("reference"),
        system=system,
    )


@dataclass(frozen=True)
class Benchmark:
    files: tuple[str, ...]
    """Paths below the data folder; the first that exists is read."""
    hub: tuple[str, str | None, str]
    """Repository, configuration and split on the Hub."""
    parse: Callable[[dict[str, Any], str], Prompt]


BENCHMARKS = {
    "mt_bench": Benchmark(
        ("mt_bench/question.jsonl",), ("philschmid/mt-bench", None, "train"), _mt_bench
    ),
    "gsm8k": Benchmark(("gsm8k/test.jsonl",), ("openai/gsm8k", "main", "test"), _gsm8k),
    "humaneval": Benchmark(
        ("humaneval/HumanEval.jsonl", "humaneval/HumanEval.jsonl.gz"),
        ("openai/openai_humaneval", None, "test"),
        _humaneval,
    ),
}


def _read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """("path:line", row) of every line that is not blank."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{where}: not JSON ({error.msg}); write one object per line"
                ) from error
            if not isinstance(row, dict):
                raise ValueError(f"{where}: {line.strip()[:40]!r} is not an object; write {{...}}")
            yield where, row


def _read_hub(
    repository: str, configuration: str | None, split: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    import datasets

    try:
        rows = datasets.load_dataset(repository, configuration, split=split)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"--data-dir: {repository} (split {split}) cannot be read from the Hub ({reason}); "
            "give --data-dir DIR with the benchmark files"
        ) from error
    for number, row in enumerate(rows, start=1):
        yield f"{repository}:{number}", row


def _benchmark_file(name: str, data_dir: str | Path | None) -> Path:
    folder = Path(data_dir) if data_dir is not None else ASSETS
    candidates = [folder / file for file in BENCHMARKS[name].files]
    for path in candidates:
        if path.is_file():
            return path
    missing = " nor ".join(str(path) for path in candidates)
    if data_dir is None:
        raise ValueError(
            f"--data-dir: not given, and there is no {missing} (an installed wheel carries no "
            "prompt files); give --data-dir DIR or --data-dir hub:"
        )
    raise ValueError(
        f"--data-dir: {str(folder)!r} has no {missing}; put {name}'s file there or use "
        "--data-dir hub:"
    )


def _rows(
    name: str, data_dir: str | Path | None
) -> tuple[Iterable[tuple[str, dict[str, Any]]], Callable[[dict[str, Any], str], Prompt]]:
    if name in BENCHMARKS:
        benchmark = BENCHMARKS[name]
        if isinstance(data_dir, str) and data_dir.startswith(HUB_PREFIX):
            repository, configuration, split = benchmark.hub
            repository = data_dir.removeprefix(HUB_PREFIX) or repository
            return _read_hub(repository, configuration, split), benchmark.parse
        return _read_jsonl(_benchmark_file(name, data_dir)), benchmark.parse
    if name.endswith((".jsonl", ".jsonl.gz")):
        path = Path(name)
        if not path.is_file():
            raise ValueError(f"--benchmarks: there is no file {name!r}; check the path")
        task = path.name.partition(".jsonl")[0]
        return _read_jsonl(path), lambda row, where: _own_prompt(task, row, where)
    near = get_close_matches(name, BENCHMARKS, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? Known" if near else "known"
    raise ValueError(
        f"--benchmarks: unknown benchmark {name!r}; {hint}: {', '.join(BENCHMARKS)}, "
        "or the path of a .jsonl file"
    )


def load_task(
    name: str, data_dir: str | Path | None = None, limit: int | None = None
) -> list[Prompt]:
    """Read a benchmark.

    Args:
        name: mt_bench, gsm8k, humaneval, or the path of a .jsonl(.gz) file whose rows hold
            ``prompt``, ``turns`` or ``messages`` (``id``, ``category``, ``reference`` optional).
        data_dir: folder with mt_bench/question.jsonl, gsm8k/test.jsonl and
            humaneval/HumanEval.jsonl(.gz); None reads the repository's own prompts in assets/eval;
            "hub:" downloads the benchmark, "hub:owner/name" another data set of the same fields.
        limit: takes the FIRST rows of the file, never a sample, so that two runs with one limit
            see the same prompts. MT-Bench is sorted by category: a small limit is all writing.

    Raises:
        ValueError: names the field or file and line, the value, and the mend.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"--limit: {limit} leaves no prompt; give 1 or more, or leave it out")
    rows, parse = _rows(name, data_dir)
    prompts = [parse(row, where) for where, row in islice(rows, limit)]
    if not prompts:
        raise ValueError(f"--benchmarks: {name!r} holds no prompt; add at least one row")
    return prompts


def encode_turn(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, answers: list[str]
) -> list[int]:
    """Token ids of the conversation up to the user's turn ``len(answers)``, ready to be answered.

    The chat template is applied to the whole conversation, the generated ``answers`` of the
    earlier turns included. A tokenizer without a chat template (a base model) gets the texts
    joined by newlines; the manifest says so.
    """
    texts = [text for pair in zip(prompt.turns, answers, strict=False) for text in pair]
    texts.append(prompt.turns[len(answers)])
    if not tokenizer.chat_template:
        if prompt.system is not None:
            texts.insert(0, prompt.system)
        return tokenizer.encode("\n".join(texts) + "\n")
    roles = ["user", "assistant"] * len(prompt.turns)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    if prompt.system is not None:
        messages.insert(0, {"role": "system", "content": prompt.system})
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise ValueError(
            f"{prompt.task} {prompt.id}: the chat template of {tokenizer.name_or_path!r} refuses "
            f"the conversation ({error}); change the prompt's roles"
        ) from error
    # A template writes its own BOS.
    return tokenizer.encode(text, add_special_tokens=False)
