"""Benchmarks as lists of prompts, and prompts as token ids.

A benchmark is read from files in its own published format, from Spec-Bench's file, from the Hub, or
from any .jsonl file.
"""

import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pipedraft
from pipedraft.eval.formats import (
    ALIASES,
    BENCHMARKS,
    SPEC_BENCH_FILE,
    HubSet,
    Parse,
    Prompt,
    parse_spec_bench,
    text_of,
    turns_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASSETS = Path(pipedraft.__file__).parent / "assets" / "eval"
HUB_PREFIX = "hub:"
SPEC_BENCH_SOURCE = (
    "put Spec-Bench's question.jsonl (github.com/hemingkx/Spec-Bench, data/spec_bench) into "
    "DIR/spec_bench and give --data-dir DIR"
)

Rows = Iterator[tuple[str, dict[str, Any]]]
"""("path:line", row)"""


def _messages(value: Any, where: str) -> tuple[list[str], str | None]:
    """User turns and system text; assistant messages are left out, the target answers itself."""
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise ValueError(f"{where}: messages must be a list of {{role, content}} objects")
    turns, system = [], None
    for message in value:
        role = message.get("role")
        if role == "user":
            turns.append(text_of(message, "content", where))
        elif role == "system":
            system = text_of(message, "content", where)
        elif role != "assistant":
            raise ValueError(f"{where}: role is {role!r}; use system, user or assistant")
    return turns_of(turns, "user messages", where), system


def _own_prompt(task: str, row: dict[str, Any], where: str) -> Prompt:
    """A row of a user's file: ``prompt`` (one text), ``turns`` (texts) or ``messages``."""
    system = None
    if "turns" in row:
        turns = turns_of(row["turns"], "turns", where)
    elif "messages" in row:
        turns, system = _messages(row["messages"], where)
    elif "prompt" in row:
        turns = [text_of(row, "prompt", where)]
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


def _read_json(path: Path) -> Rows:
    """Every entry of a file that is one JSON list."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}:{error.lineno}: not JSON ({error.msg}); write one list of objects"
        ) from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path}: {str(rows)[:40]!r} is no list of objects; write [{{...}}, ...]")
    for number, row in enumerate(rows, start=1):
        yield f"{path}:{number}", row


def _read_jsonl(path: Path) -> Rows:
    """Every line that is not blank."""
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


def _read_hub(source: HubSet) -> Rows:
    import datasets

    try:
        rows = datasets.load_dataset(
            source.repository, source.configuration, split=source.split, streaming=source.streaming
        )
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"--data-dir: {source.repository} (split {source.split}) cannot be read from the Hub "
            f"({reason}); give --data-dir DIR with the benchmark files"
        ) from error
    for number, row in enumerate(rows, start=1):
        yield f"{source.repository}:{number}", row


def _hub_rows(name: str, repository: str) -> Rows:
    """
    Args:
        repository: "" for the published one.
    """
    hub = BENCHMARKS[name].hub
    if repository:
        hub = replace(hub, repository=repository) if hub else HubSet(repository, None, "train")
    if hub is None:
        raise ValueError(f"--data-dir: the Hub has no {name} of its authors; {SPEC_BENCH_SOURCE}")
    return _read_hub(hub)


def _benchmark_file(name: str, data_dir: str | Path | None) -> Path:
    benchmark = BENCHMARKS[name]
    folder = Path(data_dir) if data_dir is not None else ASSETS
    candidates = [folder / file for file in benchmark.files]
    for path in candidates:
        if path.is_file():
            return path
    missing = " nor ".join(str(path) for path in candidates)
    if data_dir is None:
        raise ValueError(
            f"--data-dir: not given, and there is no {missing} (the repository's own prompts are "
            "mt_bench, gsm8k and humaneval, and an installed wheel carries none); give --data-dir "
            f"DIR{' or --data-dir hub:' if benchmark.hub else ''}"
        )
    fix = SPEC_BENCH_SOURCE if SPEC_BENCH_FILE in benchmark.files else f"put {name}'s file there"
    from_hub = ", or use --data-dir hub:" if benchmark.hub else ""
    raise ValueError(f"--data-dir: {str(folder)!r} has no {missing}; {fix}{from_hub}")


def _in_category(rows: Rows, category: str) -> Rows:
    """Of Spec-Bench's rows those of the category; rows of another format are all of it."""
    for where, row in rows:
        if "turns" not in row or row.get("category") == category:
            yield where, row


def _benchmark_rows(name: str, data_dir: str | Path | None) -> tuple[Rows, Parse]:
    benchmark = BENCHMARKS[name]
    if isinstance(data_dir, str) and data_dir.startswith(HUB_PREFIX):
        rows = _hub_rows(name, data_dir.removeprefix(HUB_PREFIX))
    else:
        path = _benchmark_file(name, data_dir)
        rows = _read_json(path) if path.suffix == ".json" else _read_jsonl(path)
    if benchmark.category is None:
        return rows, benchmark.parse

    def parse(row: dict[str, Any], where: str) -> Prompt:
        if "turns" in row:
            return replace(parse_spec_bench(row, where), task=name)
        return benchmark.parse(row, where)

    return _in_category(rows, benchmark.category), parse


def _rows(name: str, data_dir: str | Path | None) -> tuple[Rows, Parse]:
    name = ALIASES.get(name, name)
    if name in BENCHMARKS:
        return _benchmark_rows(name, data_dir)
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
        name: one of ``BENCHMARKS``, or the path of a .jsonl(.gz) file whose rows hold ``prompt``,
            ``turns`` or ``messages`` (``id``, ``category``, ``reference`` optional). cnn_dm,
            natural_questions (nq), wmt14_de_en and rag are parts of spec_bench's file.
        data_dir: folder with the files that ``BENCHMARKS`` names; None reads the repository's own
            prompts in assets/eval; "hub:" downloads the benchmark (the whole published one, not
            Spec-Bench's 80 questions of it), "hub:owner/name" another data set of the same fields.
        limit: takes the FIRST rows of the file, never a sample, so that two runs with one limit
            see the same prompts. MT-Bench and Spec-Bench are sorted by category: a small limit is
            all writing.

    Raises:
        ValueError: names the field or file and line, the value, and the fix.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"--limit: {limit} leaves no prompt; give 1 or more, or leave it out")
    rows, parse = _rows(name, data_dir)
    prompts = [parse(row, where) for where, row in islice(rows, limit)]
    if not prompts:
        raise ValueError(f"--benchmarks: {name!r} holds no prompt; add at least one row")
    return prompts


def load_tasks(
    names: Iterable[str], data_dir: str | Path | None = None, limit: int | None = None
) -> dict[str, list[Prompt]]:
    """Several benchmarks by name, each as ``load_task`` reads it."""
    benchmarks: dict[str, list[Prompt]] = {}
    for name in names:
        prompts = load_task(name, data_dir, limit)
        task = prompts[0].task
        if task in benchmarks:
            raise ValueError(
                f"--benchmarks: two are called {task!r}; leave {name!r} out, or rename the file"
            )
        benchmarks[task] = prompts
    return benchmarks


def encode_turn(
    tokenizer: "PreTrainedTokenizerBase", prompt: Prompt, answers: list[str]
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
