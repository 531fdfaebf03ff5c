"""Prompts for a target to answer: users' turns of conversations, and Python functions to complete.

    python -m pipedraft.data_recipes.prompts --conversations data/chat.jsonl --take all=2000 \\
        --functions 1000 --out prompts.jsonl

A draft learns to say what its target says, so the prompts should be of the kinds that it
will meet, and the answers the target's own: `data_recipes.regenerate` writes them.
"""

import ast
import json
import random
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pipedraft.errors import run_command
from pipedraft.files import write_atomically
from pipedraft.options import Options, option

COMPLETE = "Complete this Python function. Answer with the whole function.\n```python\n{}\n```"
MIN_DOCSTRING, MAX_DOCSTRING = 30, 500
MIN_PROMPT, MAX_PROMPT = 10, 1200


@dataclass(frozen=True, kw_only=True)
class PromptOptions(Options):
    PROG: ClassVar[str] = "python -m pipedraft.data_recipes.prompts"
    DESCRIPTION: ClassVar[str] = __doc__ or ""

    conversations: Path | None = None
    """JSONL of conversations or messages"""
    take: tuple[str, ...] = option((), metavar="SOURCE=ROWS[:TURNS]", repeated=True)
    """conversations whose `source` is this (all: any), and how many user turns of each become
    prompts of their own (default 1); may be given several times"""
    functions: int = 0
    """functions of Python's standard library at most"""
    seed: int = 0
    """of the choice and the order"""
    out: Path
    """JSONL file to write"""


def parse_take(text: str) -> tuple[str, int, int]:
    """ "gsm8k=100:2" -> ("gsm8k", 100, 2)."""
    source, _, sizes = text.rpartition("=")
    rows, _, turns = sizes.partition(":")
    if not source or not rows.isdecimal() or not (turns or "1").isdecimal():
        raise ValueError(f"--take: {text!r} is not SOURCE=ROWS[:TURNS]; give for example all=100")
    return source, int(rows), int(turns or "1")


def user_turns(row: dict[str, Any]) -> list[str]:
    """Texts of the users' turns, in the OpenAI or the ShareGPT form."""
    turns = row.get("messages") or row.get("conversations") or []
    return [
        turn.get("content") or turn.get("value") or ""
        for turn in turns
        if (turn.get("role") or turn.get("from")) in ("user", "human")
    ]


def conversation_prompts(path: Path, takes: list[str], rng: random.Random) -> list[str]:
    if not path.is_file():
        raise ValueError(f"--conversations: no file {path}; give a JSONL file")
    rows = []
    with path.open() as file:  # str.splitlines would also split inside texts, at U+2028
        for number, line in enumerate(file, 1):
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise ValueError(
                    f"--conversations: {path}:{number} is not JSON ({error}); fix or drop that row"
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


def main() -> None:
    options = PromptOptions.read(sys.argv[1:])
    rng = random.Random(options.seed)
    prompts = []
    if options.conversations is not None:
        prompts += conversation_prompts(options.conversations, list(options.take), rng)
    if options.functions:
        stubs = list(function_stubs(Path(sysconfig.get_paths()["stdlib"])))
        chosen = rng.sample(stubs, min(options.functions, len(stubs)))
        prompts += [COMPLETE.format(stub) for stub in chosen]
    prompts = [text for text in dict.fromkeys(prompts) if MIN_PROMPT <= len(text) <= MAX_PROMPT]
    if not prompts:
        raise ValueError("--conversations, --functions: they give no prompt; name at least one")
    rng.shuffle(prompts)
    text = "".join(json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n" for prompt in prompts)
    write_atomically(options.out, text.encode())
    print(f"{len(prompts)} prompts written to {options.out}")


if __name__ == "__main__":
    run_command(main)
