"""Prompts for a target to answer: users' turns of conversations, and Python functions to complete.

    python assets/train/prompts.py --conversations data/chat.jsonl --take all=2000 \\
        --functions 1000 --out prompts.jsonl

A draft learns to say what its target says, so the prompts should be of the kinds that it
will meet, and the answers the target's own: `data_recipes.regenerate` writes them.
"""

import ast
import hashlib
import json
import random
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pipedraft.endings import leave_at_interrupts, run_command
from pipedraft.errors import UsageError
from pipedraft.options import Options, option

if __name__ == "__main__":
    leave_at_interrupts()

from pipedraft.data_recipes.conversations import read_json
from pipedraft.data_recipes.overlap import user_turns
from pipedraft.data_recipes.sources import Source, read_source
from pipedraft.files import Values, make_place, write_atomically

COMPLETE = "Complete this Python function. Answer with the whole function.\n```python\n{}\n```"
MIN_DOCSTRING, MAX_DOCSTRING = 30, 500
MIN_PROMPT, MAX_PROMPT = 10, 1200


@dataclass(frozen=True, kw_only=True)
class PromptOptions(Options):
    PROG: ClassVar[str] = "python assets/train/prompts.py"
    DESCRIPTION: ClassVar[str] = __doc__ or ""

    conversations: Path | None = None
    """JSONL of conversations or messages"""
    take: tuple[str, ...] = option((), metavar="SOURCE=ROWS[:TURNS]", repeated=True)
    """conversations whose `source` is this (all: any), and how many user turns of each become
    prompts of their own (default 1); may be given several times"""
    functions: int = option(0, least=0)
    """functions of Python's standard library at most"""
    answers: Path | None = None
    """JSONL (.gz) of {"prompt_sha256", "answer"}: only prompts that have one, with it"""
    unanswered: Path | None = None
    """with --answers: JSONL file for the other prompts, which --out leaves out"""
    seed: int = 0
    """of the choice and the order"""
    out: Path
    """JSONL file to write"""


def parse_take(text: str) -> tuple[str, int, int]:
    """ "gsm8k=100:2" -> ("gsm8k", 100, 2)."""
    source, _, sizes = text.rpartition("=")
    rows, _, turns = sizes.partition(":")
    if not (source and rows.isdecimal() and (turns or "1").isdecimal()):
        raise ValueError(f"--take: {text!r} is not SOURCE=ROWS[:TURNS]; give for example all=100")
    return source, int(rows), int(turns or "1")


def check_turns(row: Any) -> Values:
    """The row itself; raises ValueError unless it is an object whose turns are texts."""
    turns = (row.get("messages") or row.get("conversations") or []) if type(row) is dict else None
    if not isinstance(turns, list) or not all(
        type(turn) is dict
        and isinstance(turn.get("content") or turn.get("value") or "", str | list)
        for turn in turns
    ):
        raise ValueError("no object whose turns are texts")
    return row


def conversation_prompts(path: Path, takes: list[str], rng: random.Random) -> list[str]:
    if not path.is_file():
        raise ValueError(f"--conversations: no file {path}; give a JSONL file")
    rows = []
    with path.open() as file:  # str.splitlines would also split inside texts, at U+2028
        for number, line in enumerate(file, 1):
            try:
                rows.append(check_turns(json.loads(line)))
            except ValueError as error:
                raise ValueError(
                    f"--conversations: {path}:{number} is no conversation ({error}); fix or drop it"
                ) from error
    prompts = []
    for source, count, turns in map(parse_take, takes or ["all=1000000"]):
        chosen = [row for row in rows if source in ("all", row.get("source"))]
        if not chosen:
            known = ", ".join(sorted({str(row.get("source")) for row in rows}))
            raise ValueError(f"--take: no row of {path} has the source {source!r}; it has {known}")
        for row in rng.sample(chosen, min(count, len(chosen))):
            prompts += user_turns(row)[:turns]
    return prompts


def function_stubs(folder: Path) -> Iterator[str]:
    """Signature and docstring of every public function under ``folder``, tests excluded."""
    for path in sorted(folder.rglob("*.py")):
        if {"test", "tests", "site-packages", "idlelib"} & set(path.parts):
            continue
        try:
            tree = ast.parse(path.read_text())
        except (SyntaxError, UnicodeDecodeError):  # the library has files wrong on purpose
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            names = [argument.arg for argument in node.args.args]
            docstring = ast.get_docstring(node) or ""
            is_function = bool(names) and names[0] not in ("self", "cls")
            if is_function and MIN_DOCSTRING < len(docstring) < MAX_DOCSTRING:
                body = docstring.replace("\n", "\n    ")
                signature = f"def {node.name}({ast.unparse(node.args)}):"
                yield f'{signature}\n    """{body}\n    """'


def read_answers(path: Path) -> dict[str, Values]:
    """Rows of a file of answers by the SHA-256 of the prompt that each is the answer to."""
    if not path.is_file():
        raise UsageError(f"--answers: no file {path}; give a JSONL file")
    answers: dict[str, Values] = {}
    for raw in read_source(Source(path=str(path))):
        try:
            row = read_json(raw.text)
        except ValueError:
            row = None
        names = ("prompt_sha256", "answer")
        if type(row) is not dict or not all(isinstance(row.get(name), str) for name in names):
            raise ValueError(
                f"--answers: {raw.location} has no prompt_sha256 or no answer; give both as text"
            )
        answers[row["prompt_sha256"]] = row
    return answers


def conversation(prompt: str, row: Values) -> Values:
    turns = (("user", prompt), ("assistant", row["answer"]))
    messages = [{"role": role, "content": text} for role, text in turns]
    return {"messages": messages, "greedy_answers": bool(row.get("greedy_answers"))}


def write_rows(path: Path, rows: list[Values]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_atomically(path, text.encode())


def main() -> None:
    options = PromptOptions.read(sys.argv[1:])
    if options.unanswered and not options.answers:
        raise ValueError("--unanswered: without --answers every prompt is; leave it out")
    if options.conversations is None and options.take:
        raise UsageError("--take: without --conversations; give that, too, or neither")
    for name in ("conversations", "answers", "unanswered"):
        place = getattr(options, name)
        if place is not None and place.resolve() == options.out.resolve():
            raise UsageError(f"--{name}: {str(place)!r} is --out, too; give another file")
    has_answers = options.answers is not None
    make_place("--out", options.out, b'{"messages": ' if has_answers else b'{"prompt": ')
    if options.unanswered is not None:
        make_place("--unanswered", options.unanswered, b'{"prompt": ')
    rng = random.Random(options.seed)
    prompts = []
    if options.conversations is not None:
        prompts += conversation_prompts(options.conversations, list(options.take), rng)
    if options.functions:
        found = list(function_stubs(Path(sysconfig.get_paths()["stdlib"])))
        chosen = rng.sample(found, min(options.functions, len(found)))
        prompts += [COMPLETE.format(stub) for stub in chosen]
    prompts = [text for text in dict.fromkeys(prompts) if MIN_PROMPT <= len(text) <= MAX_PROMPT]
    if not prompts:
        raise ValueError("--conversations, --functions: they give no prompt; name at least one")
    rng.shuffle(prompts)
    if options.answers is not None:
        answers = read_answers(options.answers)
        digests = {prompt: hashlib.sha256(prompt.encode()).hexdigest() for prompt in prompts}
        known = [conversation(p, answers[digests[p]]) for p in prompts if digests[p] in answers]
        write_rows(options.out, known)
        print(f"{len(known)} of {len(prompts)} prompts have answers, written to {options.out}")
        if options.unanswered is None:
            return
        prompts = [prompt for prompt in prompts if digests[prompt] not in answers]
    out = options.unanswered or options.out
    write_rows(out, [{"prompt": prompt} for prompt in prompts])
    print(f"{len(prompts)} prompts written to {out}")


if __name__ == "__main__":
    run_command(main)
