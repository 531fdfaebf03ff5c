"""Load benchmarks as lists of prompts, and encode prompts as token ids.

A benchmark is read from files in its own published format, from Spec-Bench's file, from the Hub, or
from any .jsonl file.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import pipedraft
from pipedraft.data_recipes.config import Source
from pipedraft.data_recipes.sources import read_source
from pipedraft.eval.scores import find_number
from pipedraft.files import Values

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASSETS = Path(pipedraft.__file__).parent / "assets" / "eval"
HUB_PREFIX = "hub:"
PACKAGED = {"mt_bench": "pipedraft-chat", "gsm8k": "pipedraft-math", "humaneval": "pipedraft-code"}
"""Names in results for the repository's own prompts, which only have a benchmark's form."""
FORMS = {name: form for form, name in PACKAGED.items()}
SPEC_BENCH_SOURCE = (
    "put Spec-Bench's question.jsonl (github.com/hemingkx/Spec-Bench, data/spec_bench) into "
    "DIR/spec_bench and give --data-dir DIR"
)
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
Row = Values
"""A JSON object from a file or the Hub."""
Rows = Iterator[tuple[str, Row]]
"""Pairs ("path:line", row)."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One conversation: the user's message in each turn. The answers are generated."""

    task: str
    """Benchmark name in results."""
    id: str
    category: str
    turns: list[str]
    reference: str | list[str] | None = None
    """The published answer, in the benchmark's own form; not used for decoding."""
    system: str | None = None
    expected: Decimal | None = None
    """Number that a correct answer ends on; None: answers cannot be scored."""

    @property
    def form(self) -> str:
        """Return the benchmark whose form this prompt has."""
        return FORMS.get(self.task, self.task)

    def messages(self, answers: Sequence[str] = ()) -> list[dict[str, str]]:
        """Return chat messages up to the user's turn ``len(answers)``."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        texts = [text for pair in zip(self.turns, answers, strict=False) for text in pair]
        texts.append(self.turns[len(answers)])
        roles = ["user", "assistant"] * len(self.turns)
        turns = zip(roles, texts, strict=False)
        return [*system, *({"role": role, "content": text} for role, text in turns)]


def text_of(row: Row, field: str, where: str) -> str:
    value = row.get(field)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}: {field} is {value!r}; it must be a text that is not empty")
    return value


def turns_of(value: object, field: str, where: str) -> list[str]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where}: {field} is {value!r}; it must be a list of user turns")
    return [
        text_of({f"{field}[{i}]": turn}, f"{field}[{i}]", where) for i, turn in enumerate(value)
    ]


# -- one prompt in each published format -----------------------------------------------------------


def _single(
    turn: str, where: str, *, reference: str | None = None, expected: Decimal | None = None
) -> Prompt:
    """Make a one-turn prompt; its id is its line, its task and category are the benchmark's."""
    number = where.rpartition(":")[2]
    return Prompt(
        task="", id=number, category="", turns=[turn], reference=reference, expected=expected
    )


def _questions(row: Row, where: str) -> Prompt:
    """Parse FastChat's format, which MT-Bench and Spec-Bench share."""
    reference = row.get("reference")
    if isinstance(reference, list) and reference and isinstance(reference[0], list):
        reference = reference[0]  # Spec-Bench's rag: all accepted answers of the one turn
    return Prompt(
        task="",
        id=str(row.get("question_id", where)),
        category=text_of(row, "category", where),
        turns=turns_of(row.get("turns"), "turns", where),
        reference=reference,
    )


def parse_spec_bench(row: Row, where: str) -> Prompt:
    prompt = _questions(row, where)
    category = "mt_bench" if prompt.category in MT_BENCH_CATEGORIES else prompt.category
    if category not in (*SPEC_BENCH_CATEGORIES, "mt_bench"):
        known = ", ".join((*sorted(MT_BENCH_CATEGORIES), *SPEC_BENCH_CATEGORIES))
        raise ValueError(
            f"{where}: category is {prompt.category!r}, which Spec-Bench has not; give one of "
            f"{known}, or the file's path in --benchmarks"
        )
    expected = None
    if category == MATH:
        solution = prompt.reference[0] if isinstance(prompt.reference, list) else prompt.reference
        expected = _expected_number(solution or "", "reference", where)
    return replace(prompt, category=category, expected=expected)


def _expected_number(solution: str, field: str, where: str) -> Decimal:
    _, mark, result = solution.rpartition("#### ")
    expected = find_number(result) if mark else None
    if expected is None:
        raise ValueError(
            f"{where}: {field} ends with {solution[-20:]!r}; it must end with '#### NUMBER'"
        )
    return expected


def _gsm8k(row: Row, where: str) -> Prompt:
    solution = text_of(row, "answer", where)
    expected = _expected_number(solution, "answer", where)
    reference = solution.rpartition("#### ")[2]
    return _single(text_of(row, "question", where), where, reference=reference, expected=expected)


def _messages(value: object, where: str) -> tuple[list[str], str | None]:
    """Return user turns and system message; the target generates assistant messages itself."""
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


def _own_prompt(task: str, row: Row, where: str) -> Prompt:
    """Parse a row in a user's file: ``prompt`` (a string), ``turns`` (strings) or ``messages``."""
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


def _humaneval(row: Row, where: str) -> Prompt:
    code = text_of(row, "prompt", where).strip("\n")
    prompt = _single(f"{HUMANEVAL_INSTRUCTION}\n```python\n{code}\n```", where)
    reference = text_of(row, "canonical_solution", where)
    return replace(prompt, id=text_of(row, "task_id", where), reference=reference)


def _alpaca(row: Row, where: str) -> Prompt:
    """Join the instruction and its input, if any; the training template is not used."""
    if "turns" in row:  # the 80 questions that EAGLE's repository has, of an empty category
        return _questions({**row, "category": "instruction"}, where)
    turn = text_of(row, "instruction", where)
    if row.get("input"):
        turn += "\n\n" + text_of(row, "input", where)
    return _single(turn, where, reference=row.get("output"))


def _turns(row: Row, where: str) -> Prompt:
    """Parse a row in DeepSpec's files: only ``turns``."""
    return Prompt(
        task="",
        id=str(row.get("question_id", where.rpartition(":")[2])),
        category="",
        turns=turns_of(row.get("turns"), "turns", where),
    )


BOXED_INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
CODE_INSTRUCTION = (
    "You are an expert Python programmer. You will be given a question (problem specification) and "
    "will generate a correct Python program that matches the specification and passes all tests. "
    "You will NOT return anything except for the program"
)


def _math(row: Row, where: str) -> Prompt:
    """Parse MATH-500 and AIME: DeepSpec's rows, or ``problem`` and ``answer`` in the official
    files."""
    if "turns" in row:
        return _turns(row, where)
    field = next((name for name in ("problem", "Problem", "question") if name in row), "problem")
    answer = row.get("answer", row.get("Answer"))
    prompt = _single(f"{text_of(row, field, where)}\n{BOXED_INSTRUCTION}", where)
    return replace(prompt, reference=None if answer is None else str(answer))


def _mbpp(row: Row, where: str) -> Prompt:
    """Parse DeepSpec's rows, or the authors' ``text`` (mbpp.jsonl) or ``prompt``
    (sanitized-mbpp)."""
    if "turns" in row:
        return _turns(row, where)
    turn = text_of(row, "text" if "text" in row else "prompt", where)
    prompt = _single(turn, where, reference=row.get("code"))
    return replace(prompt, id=str(row.get("task_id", prompt.id)))


def _livecodebench(row: Row, where: str) -> Prompt:
    """Parse DeepSpec's rows, or ``question_content`` in the authors' files; programs are not
    run."""
    if "turns" in row:
        return _turns(row, where)
    question = text_of(row, "question_content", where)
    turn = f"{CODE_INSTRUCTION}\n\n### Question:\n{question}"
    if row.get("starter_code"):
        turn += f"\n\n### Starter code:\n```python\n{text_of(row, 'starter_code', where)}\n```"
    prompt = _single(turn, where)
    return replace(prompt, id=str(row.get("question_id", prompt.id)))


def _arena_hard(row: Row, where: str) -> Prompt:
    """Parse DeepSpec's rows, or Arena-Hard's question.jsonl: ``prompt`` (v2) or ``turns``
    (v0.1)."""
    if "prompt" in row:
        prompt = _single(text_of(row, "prompt", where), where)
        return replace(prompt, id=str(row.get("uid", prompt.id)))
    turns = row.get("turns")
    if isinstance(turns, list):  # v0.1 has {"content": text}
        turns = [turn.get("content") if isinstance(turn, dict) else turn for turn in turns]
    prompt = _turns({**row, "turns": turns}, where)
    return replace(prompt, id=str(row.get("question_id", prompt.id)))


def _flowspec(row: Row, where: str) -> Prompt:
    """Parse Spec-Bench's form; alpaca's categories are empty."""
    return _questions({**row, "category": row.get("category") or "flowspec"}, where)


def _flowspec_gsm8k(row: Row, where: str) -> Prompt:
    prompt = _flowspec(row, where)
    solution = prompt.reference[0] if isinstance(prompt.reference, list) else prompt.reference
    return replace(prompt, expected=_expected_number(solution or "", "reference", where))


# -- where to find a benchmark ---------------------------------------------------------------------

Parse = Callable[[Row, str], Prompt]


@dataclass(frozen=True)
class Benchmark:
    files: tuple[str, ...]
    """Paths below the data folder; the first that exists is read."""
    hub: Source | None
    parse: Parse
    """Parses one row in its own format."""
    category: str | None = None
    """Category for all its prompts; None: each row names its own."""
    is_part: bool = False
    """The benchmark is one category in Spec-Bench's file."""


def _peers(name: str, parse: Parse, category: str, *files: str) -> Benchmark:
    """Define a set from papers on draft heads, in DeepSpec's form or in its own authors' form."""
    return Benchmark((f"deepspec/{name}.jsonl", *files), None, parse, category)


def _of_flowspec(name: str, parse: Parse, category: str | None) -> Benchmark:
    """Define one of the six sets in FlowSpec's table 1, as its repository has them."""
    files = (f"flowspec/{name}.jsonl", f"flowspec/{name}/question.jsonl")
    return Benchmark(files, None, parse, category)


def _part(category: str) -> Benchmark:
    return Benchmark((SPEC_BENCH_FILE,), None, parse_spec_bench, category, is_part=True)


BENCHMARKS = {
    "mt_bench": Benchmark(
        ("mt_bench/question.jsonl",), Source(path="philschmid/mt-bench"), _questions
    ),
    "gsm8k": Benchmark(
        ("gsm8k/test.jsonl",),
        Source(path="openai/gsm8k", subset="main", split="test"),
        _gsm8k,
        "math",
    ),
    "humaneval": Benchmark(
        ("humaneval/HumanEval.jsonl", "humaneval/HumanEval.jsonl.gz"),
        Source(path="openai/openai_humaneval", split="test"),
        _humaneval,
        "code",
    ),
    "alpaca": Benchmark(
        ("alpaca/alpaca_data.json", "alpaca/alpaca_data.jsonl", "alpaca/question.jsonl"),
        Source(path="tatsu-lab/alpaca"),
        _alpaca,
        "instruction",
    ),
    "cnn_dm": _part(SUMMARIZATION),
    "natural_questions": _part(QUESTIONS),
    "wmt14_de_en": _part(TRANSLATION),
    "rag": _part(RETRIEVAL),
    "spec_bench": Benchmark((SPEC_BENCH_FILE,), None, parse_spec_bench),
    "math500": _peers("math500", _math, "math", "math500/test.jsonl"),
    "aime24": _peers("aime24", _math, "math", "aime24/test.jsonl"),
    "aime25": _peers("aime25", _math, "math", "aime25/test.jsonl"),
    "mbpp": _peers("mbpp", _mbpp, "code", "mbpp/mbpp.jsonl", "mbpp/sanitized-mbpp.json"),
    "livecodebench": _peers("livecodebench", _livecodebench, "code", "livecodebench/test.jsonl"),
    "arena_hard": _peers("arena-hard-v2", _arena_hard, "chat", "arena_hard/question.jsonl"),
    "flowspec_mt_bench": _of_flowspec("mt_bench", _questions, None),
    "flowspec_humaneval": _of_flowspec("humaneval", _flowspec, "code"),
    "flowspec_gsm8k": _of_flowspec("gsm8k", _flowspec_gsm8k, "math"),
    "flowspec_alpaca": _of_flowspec("alpaca", _flowspec, "instruction"),
    "flowspec_sum": _of_flowspec("sum", _flowspec, SUMMARIZATION),
    "flowspec_qa": _of_flowspec("qa", _flowspec, QUESTIONS),
}
ALIASES = {"nq": "natural_questions", "math-500": "math500", "arena-hard": "arena_hard"}
FILE_ENDINGS = (".jsonl", ".jsonl.gz")


def _read_rows(source: Source, option: str) -> Rows:
    """Yield rows from a JSON file or a Hub data set, as recipes read them."""
    try:
        for row in read_source(source):
            if row.error:
                raise ValueError(f"{row.location}: {row.error}; fix the row")
            yield row.location, _parse_row(row.text, row.location)
    except ValueError as error:
        message = str(error)
        if not message.startswith("sources."):
            raise
        raise ValueError(f"{option}: {message.partition(': ')[2]}") from error


def _parse_row(text: str, where: str) -> Row:
    try:
        row = json.loads(text)
        json.dumps(row, ensure_ascii=False).encode()  # refuse an unpaired surrogate
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error}); write one object per line") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: {str(row)[:40]!r} is not an object; write {{...}}")
    return row


def _hub_rows(name: str, repository: str) -> Rows:
    """Yield a benchmark's rows from the Hub.

    Args:
        repository: "" for the published one.
    """
    hub = BENCHMARKS[name].hub
    if repository:
        hub = replace(hub or Source(path=repository), path=repository)
    if hub is None:
        is_part = SPEC_BENCH_FILE in BENCHMARKS[name].files
        fix = SPEC_BENCH_SOURCE if is_part else f"put {BENCHMARKS[name].files[0]} into DIR"
        raise ValueError(f"--data-dir: the Hub has no {name} of its authors; {fix}")
    return _read_rows(hub, "--data-dir")


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


def _benchmark_rows(name: str, data_dir: str | Path | None) -> tuple[Rows, Parse]:
    benchmark = BENCHMARKS[name]
    if isinstance(data_dir, str) and data_dir.startswith(HUB_PREFIX):
        rows = _hub_rows(name, data_dir.removeprefix(HUB_PREFIX))
    else:
        path = _benchmark_file(name, data_dir)
        rows = _read_rows(Source(path=str(path)), "--data-dir")

    is_own = data_dir is None or Path(data_dir).resolve() == ASSETS.resolve()
    shown = PACKAGED.get(name, name) if is_own else name

    def parse(row: Row, where: str) -> Prompt:
        prompt = benchmark.parse(row, where)
        return replace(prompt, task=shown, category=benchmark.category or prompt.category)

    if benchmark.is_part:
        rows = ((where, row) for where, row in rows if row.get("category") == benchmark.category)
    return rows, parse


def task_name(name: str) -> str:
    """Return a benchmark's name in results: its own, or its file's."""
    if name.endswith(FILE_ENDINGS):
        return Path(name).name.partition(".jsonl")[0]
    return ALIASES.get(name, name)


def _rows(name: str, data_dir: str | Path | None) -> tuple[Rows, Parse]:
    task = task_name(name)
    if name.endswith(FILE_ENDINGS):
        path = Path(name)
        if not path.is_file():
            raise ValueError(f"--benchmarks: there is no file {name!r}; check the path")
        return _read_rows(Source(path=name), "--benchmarks"), lambda row, where: _own_prompt(
            task, row, where
        )
    if task in BENCHMARKS:
        return _benchmark_rows(task, data_dir)
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
        name: one of ``BENCHMARKS``, or the path of a .jsonl(.gz) file with ``prompt``, ``turns`` or
            ``messages`` in its rows (``id``, ``category``, ``reference`` optional). cnn_dm,
            natural_questions (nq), wmt14_de_en and rag are parts of spec_bench's file.
        data_dir: folder with the files in ``BENCHMARKS``; None reads the repository's own prompts
            in assets/eval; "hub:" downloads the benchmark (the whole published one, not
            Spec-Bench's 80 questions), "hub:owner/name" another data set with the same fields.
        limit: takes the FIRST rows in the file, never a sample, so that two runs with one limit see
            the same prompts. MT-Bench and Spec-Bench are sorted by category, so a small limit takes
            only writing prompts.

    Raises:
        ValueError: names the field or file and line, the value, and the fix.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"--limit: {limit} leaves no prompt; give 1 or more, or leave it out")
    rows, parse = _rows(name, data_dir)
    prompts = [parse(row, where) for where, row in islice(rows, limit)]
    if not prompts:
        raise ValueError(f"--benchmarks: {name!r} holds no prompt; add at least one row")
    (repeated, times), *_ = Counter(prompt.id for prompt in prompts).most_common(1)
    if times > 1:
        raise ValueError(
            f"--benchmarks: {name!r} has {times} prompts of the id {repeated!r}; give each its own"
        )
    return prompts


def load_tasks(
    names: Iterable[str], data_dir: str | Path | None = None, limit: int | None = None
) -> dict[str, list[Prompt]]:
    """Read several benchmarks by their names in results, each as ``load_task`` does."""
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
    """Return the conversation's token ids up to the user's turn ``len(answers)``, ready to answer.

    The chat template is applied to the whole conversation, including the generated ``answers`` in
    earlier turns. Without a chat template (a base model), join the texts by newlines; the manifest
    says so.
    """
    from pipedraft.chats import ChatRefused, render_chat

    messages = prompt.messages(answers)
    if not tokenizer.chat_template:
        return tokenizer.encode("\n".join(turn["content"] for turn in messages) + "\n")
    try:
        text = render_chat(tokenizer, messages)
    except ChatRefused as error:
        raise ValueError(
            f"{prompt.task} {prompt.id}: {error} ({tokenizer.name_or_path!r}); change the prompt's "
            "roles"
        ) from error
    # A template writes its own BOS.
    return tokenizer.encode(text, add_special_tokens=False)
