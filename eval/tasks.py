"""Load benchmarks as lists of prompts, and encode prompts as token ids.

A benchmark is read from files in its own published format, from Spec-Bench's file, from the Hub, or
from any .jsonl file.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from ..chats import ChatRefused, render_chat
from ..data_recipes.config import Source
from ..data_recipes.sources import read_source
from ..errors import nearest
from ..files import Values
from .answer import find_number

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASSETS = Path(__file__).parents[1] / "assets" / "eval"
HUB = "hub:"
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


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Conversation with the user's message in each turn. The target generates the answers."""

    task: str
    """Benchmark name in results."""
    id: str
    category: str
    turns: list[str]
    reference: str | list[str] | None = None
    """The published answer, in the benchmark's own form; not used for decoding."""
    system: str | None = None
    expected: Decimal | None = None
    """A correct answer ends on this number; None: answers cannot be scored."""

    @property
    def form(self) -> str:
        """Return the name of the benchmark that has prompts of this form."""
        return FORMS.get(self.task, self.task)

    def messages(self, answers: Sequence[str] = ()) -> list[dict[str, str]]:
        """Return the chat messages through the first unanswered user turn."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        texts = [text for pair in zip(self.turns, answers, strict=False) for text in pair]
        texts.append(self.turns[len(answers)])
        roles = ["user", "assistant"] * len(self.turns)
        turns = zip(roles, texts, strict=False)
        return [*system, *({"role": role, "content": text} for role, text in turns)]


def text_of(row: Values, field: str, where: str) -> str:
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
    """Make a one-turn prompt with the line as its id. Task and category are filled in later."""
    number = where.rpartition(":")[2]
    return Prompt(
        task="", id=number, category="", turns=[turn], reference=reference, expected=expected
    )


def _questions(row: Values, where: str) -> Prompt:
    """Parse FastChat's format, which MT-Bench, Spec-Bench, FlowSpec and DeepSpec share."""
    reference = row.get("reference")
    if isinstance(reference, list) and reference and isinstance(reference[0], list):
        reference = reference[0]  # Spec-Bench's rag: all accepted answers of the one turn
    return Prompt(
        task="",
        id=str(row.get("question_id", where.rpartition(":")[2])),
        category=str(row.get("category") or ""),
        turns=turns_of(row.get("turns"), "turns", where),
        reference=reference,
    )


def _calculation(row: Values, where: str) -> Prompt:
    """Parse FastChat's format with GSM8K's solution as the reference."""
    prompt = _questions(row, where)
    reference: object = prompt.reference
    solution = reference[0] if isinstance(reference, list) and reference else reference
    text = text_of({"reference": solution}, "reference", where)
    return replace(prompt, expected=_expected_number(text, "reference", where))


def _spec_bench(row: Values, where: str) -> Prompt:
    category = text_of(row, "category", where)
    if category in MT_BENCH_CATEGORIES:
        return replace(_questions(row, where), category="mt_bench")
    if category not in SPEC_BENCH_CATEGORIES:
        known = ", ".join((*sorted(MT_BENCH_CATEGORIES), *SPEC_BENCH_CATEGORIES))
        raise ValueError(
            f"{where}: category is {category!r}, which Spec-Bench has not; give one of {known}, or "
            "the file's path in --benchmarks"
        )
    return _calculation(row, where) if category == MATH else _questions(row, where)


def _expected_number(solution: str, field: str, where: str) -> Decimal:
    _, mark, result = solution.rpartition("#### ")
    expected = find_number(result) if mark else None
    if expected is None:
        raise ValueError(
            f"{where}: {field} ends with {solution[-20:]!r}; it must end with '#### NUMBER'"
        )
    return expected


def _gsm8k(row: Values, where: str) -> Prompt:
    solution = text_of(row, "answer", where)
    expected = _expected_number(solution, "answer", where)
    reference = solution.rpartition("#### ")[2]
    return _single(text_of(row, "question", where), where, reference=reference, expected=expected)


def _humaneval(row: Values, where: str) -> Prompt:
    code = text_of(row, "prompt", where).strip("\n")
    prompt = _single(f"{HUMANEVAL_INSTRUCTION}\n```python\n{code}\n```", where)
    reference = text_of(row, "canonical_solution", where)
    return replace(prompt, id=text_of(row, "task_id", where), reference=reference)


def _alpaca(row: Values, where: str) -> Prompt:
    """Join the instruction and its input, if any, without the training template."""
    turn = text_of(row, "instruction", where)
    if row.get("input"):
        turn += "\n\n" + text_of(row, "input", where)
    return _single(turn, where, reference=row.get("output"))


def _messages(value: object, where: str) -> tuple[list[str], str | None]:
    """Return the user turns and the system message. The target generates the answers itself."""
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


def _own_prompt(row: Values, where: str) -> Prompt:
    """Parse a user's row, which has ``prompt`` (a string), ``turns`` (strings) or ``messages``."""
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
        task="",
        id=str(row.get("id", where.rpartition(":")[2])),
        category=str(row.get("category", "")),
        turns=turns,
        reference=row.get("reference"),
        system=system,
    )


# -- where to find a benchmark ---------------------------------------------------------------------


@dataclass(frozen=True)
class Benchmark:
    files: tuple[str, ...]
    """Paths below the data folder; the first existing one is read."""
    parse: Callable[[Values, str], Prompt] = _questions
    category: str | None = None
    """Category for all its prompts; None: each row names its own."""
    hub: Source | None = None
    is_part: bool = False
    """The benchmark is one category in Spec-Bench's file."""


def _deepspec(name: str, category: str) -> Benchmark:
    """Define a benchmark from papers on draft heads, as stored in DeepSpec's repository."""
    return Benchmark((f"deepspec/{name}.jsonl",), category=category)


def _flowspec(
    name: str, category: str | None, parse: Callable[[Values, str], Prompt] = _questions
) -> Benchmark:
    """Define one of the six benchmarks in FlowSpec's table 1, as stored in its repository."""
    files = (f"flowspec/{name}.jsonl", f"flowspec/{name}/question.jsonl")
    return Benchmark(files, parse, category)


def _part(category: str) -> Benchmark:
    return Benchmark((SPEC_BENCH_FILE,), _spec_bench, category, is_part=True)


BENCHMARKS = {
    "mt_bench": Benchmark(("mt_bench/question.jsonl",), hub=Source(path="philschmid/mt-bench")),
    "gsm8k": Benchmark(
        ("gsm8k/test.jsonl",),
        _gsm8k,
        "math",
        Source(path="openai/gsm8k", subset="main", split="test"),
    ),
    "humaneval": Benchmark(
        ("humaneval/HumanEval.jsonl", "humaneval/HumanEval.jsonl.gz"),
        _humaneval,
        "code",
        Source(path="openai/openai_humaneval", split="test"),
    ),
    "alpaca": Benchmark(
        ("alpaca/alpaca_data.json",), _alpaca, "instruction", Source(path="tatsu-lab/alpaca")
    ),
    "cnn_dm": _part(SUMMARIZATION),
    "natural_questions": _part(QUESTIONS),
    "wmt14_de_en": _part(TRANSLATION),
    "rag": _part(RETRIEVAL),
    "spec_bench": Benchmark((SPEC_BENCH_FILE,), _spec_bench),
    "math500": _deepspec("math500", "math"),
    "aime24": _deepspec("aime24", "math"),
    "aime25": _deepspec("aime25", "math"),
    "mbpp": _deepspec("mbpp", "code"),
    "livecodebench": _deepspec("livecodebench", "code"),
    "arena_hard": _deepspec("arena-hard-v2", "chat"),
    "flowspec_mt_bench": _flowspec("mt_bench", None),
    "flowspec_humaneval": _flowspec("humaneval", "code"),
    "flowspec_gsm8k": _flowspec("gsm8k", "math", _calculation),
    "flowspec_alpaca": _flowspec("alpaca", "instruction"),
    "flowspec_sum": _flowspec("sum", SUMMARIZATION),
    "flowspec_qa": _flowspec("qa", QUESTIONS),
}
ALIASES = {"nq": "natural_questions"}
FILE_ENDINGS = (".jsonl", ".jsonl.gz")


def _read_rows(source: Source, option: str) -> Iterator[tuple[str, Values]]:
    """Yield ("path:line", row) from a JSON file or a Hub data set, as recipes read them."""
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


def _parse_row(text: str, where: str) -> Values:
    try:
        row = json.loads(text)
        json.dumps(row, ensure_ascii=False).encode()  # refuse an unpaired surrogate
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error}); write one object per line") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: {str(row)[:40]!r} is not an object; write {{...}}")
    return row


def _source(name: str, data_dir: str | Path | None) -> Source:
    """Return a benchmark's file, or its data set on the Hub."""
    benchmark = BENCHMARKS[name]
    fix = f"put {benchmark.files[0]} into DIR and give --data-dir DIR"
    if benchmark.files == (SPEC_BENCH_FILE,):
        fix = SPEC_BENCH_SOURCE
    if data_dir == HUB:
        if benchmark.hub is None:
            raise ValueError(f"--data-dir: the Hub has no {name} of its authors; {fix}")
        return benchmark.hub
    folder = ASSETS if data_dir is None else Path(data_dir)
    for path in (folder / file for file in benchmark.files):
        if path.is_file():
            return Source(path=str(path))
    if benchmark.hub is not None:
        fix += ", or --data-dir hub:"
    own = " (the repository's own prompts are mt_bench, gsm8k and humaneval)"
    raise ValueError(
        f"--data-dir: {str(folder)!r} has no {' nor '.join(benchmark.files)}"
        f"{own if data_dir is None else ''}; {fix}"
    )


def task_name(name: str) -> str:
    """Return the name in results, either the benchmark's name or a user file's name."""
    if name.endswith(FILE_ENDINGS):
        return Path(name).name.partition(".jsonl")[0]
    return ALIASES.get(name, name)


def load_task(
    name: str, data_dir: str | Path | None = None, limit: int | None = None
) -> list[Prompt]:
    """Read a benchmark.

    Args:
        name: one of ``BENCHMARKS``, or the path of a .jsonl(.gz) file with ``prompt``, ``turns`` or
            ``messages`` in its rows (``id``, ``category``, ``reference`` optional). cnn_dm,
            natural_questions (nq), wmt14_de_en and rag are parts of spec_bench's file.
        data_dir: folder with the files in ``BENCHMARKS``; None reads the repository's own prompts
            in assets/eval; "hub:" downloads the published benchmark.
        limit: takes the FIRST rows in the file, never a sample, so that two runs with one limit see
            the same prompts. MT-Bench and Spec-Bench are sorted by category, so a small limit takes
            only writing prompts.

    Raises:
        ValueError: names the field or file and line, the value, and the fix.
    """
    task = task_name(name)
    if name.endswith(FILE_ENDINGS):
        if not Path(name).is_file():
            raise ValueError(f"--benchmarks: there is no file {name!r}; check the path")
        benchmark = Benchmark((name,), _own_prompt)
        rows = _read_rows(Source(path=name), "--benchmarks")
    elif task in BENCHMARKS:
        benchmark = BENCHMARKS[task]
        rows = _read_rows(_source(task, data_dir), "--data-dir")
        if benchmark.is_part:
            rows = (entry for entry in rows if entry[1].get("category") == benchmark.category)
        if data_dir is None or Path(data_dir).resolve() == ASSETS.resolve():
            task = PACKAGED.get(task, task)
    else:
        raise ValueError(
            f"--benchmarks: unknown benchmark {name!r}; {nearest(name, BENCHMARKS)}; or give "
            "the path of a .jsonl file"
        )
    prompts = []
    for where, row in islice(rows, limit):
        prompt = benchmark.parse(row, where)
        category = benchmark.category or prompt.category or task
        prompts.append(replace(prompt, task=task, category=category))
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
    """Return the token ids up to the first unanswered user turn, ready for its answer.

    The chat template is applied to the whole conversation, including the generated ``answers`` in
    earlier turns. Without a chat template (a base model), the texts are joined by newlines, as the
    manifest shows.
    """
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
