"""Commands in README.md and docs/**/*.md: find, split, and read them with the real parsers."""

import argparse
import importlib
import importlib.util
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tiny_models import REPOSITORY

from pipedraft.__main__ import COMMANDS, SUBCOMMANDS
from pipedraft.options import Options

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
STARTS = ("python", "pipedraft", "accelerate", "torchrun", "make", "pip", "vllm")
ENVIRONMENT = re.compile(r"[A-Z][A-Z0-9_]*=\S*")
LEFT_OUT = {
    "pipedraft.train": ["--config", "configs/spd/tiny.yaml"],
    "pipedraft.eval": ["--checkpoint", "out/spd", "--benchmarks", "gsm8k", "--out", "out/x"],
}
"""Options behind "..." in a command: those required by its parser."""


@dataclass(frozen=True)
class Command:
    page: str
    line: int
    text: str
    launcher: str
    """First word: python, pipedraft, accelerate, torchrun, or a program from elsewhere."""
    module: str = ""
    """Module as after ``python -m``, or a script's path."""
    arguments: list[str] = field(default_factory=list)
    launcher_arguments: list[str] = field(default_factory=list)
    is_abridged: bool = False

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def commands_of(path: Path) -> list[Command]:
    """List commands in fenced and indented blocks: join continued lines, unroll loops."""
    commands: list[Command] = []
    is_fenced, loop, lines = False, ("", [""]), path.read_text().splitlines()
    numbers = iter(range(len(lines)))
    for number in numbers:
        line = lines[number]
        if line.startswith("```"):
            is_fenced = not is_fenced
            continue
        if not is_fenced and not line.startswith("    "):
            continue
        text = line.strip()
        first = number + 1
        while text.endswith("\\"):
            text = text[:-1].rstrip() + " " + lines[next(numbers)].strip()
        if found := re.fullmatch(r"for (\w+) in (.*); do", text):
            loop = (f"${found[1]}", found[2].split())
        words = [word for word in text.split() if not ENVIRONMENT.fullmatch(word)]
        if words and Path(words[0]).name in STARTS:
            name, values = loop if loop[0] in text else ("", [""])
            texts = [text.replace(name, value) if name else text for value in values]
            commands += [make_command(path.name, first, text) for text in texts]
    return commands


def make_command(page: str, line: int, text: str) -> Command:
    words = shlex.split(text, comments=True)
    while ENVIRONMENT.fullmatch(words[0]):
        words.pop(0)
    for end in ("|", ">", "&&", "&"):
        words = words[: words.index(end)] if end in words else words
    launcher = Path(words[0]).name
    words, is_abridged = complete(words)
    head, module, arguments = [], "", words[1:]
    if launcher == "pipedraft":
        folders = {name: folder for name, (folder, _, _) in COMMANDS.items()}
        folder, arguments = folders.get(words[1], words[1]), words[2:]
        if pair := SUBCOMMANDS.get((words[1], *words[2:3])):
            folder, arguments = pair, words[3:]
        module = f"pipedraft.{folder.replace('/', '.')}"
    elif launcher == "python" and words[1] == "-m":
        module, arguments = words[2], words[3:]
    elif launcher == "python":
        module, arguments = words[1], words[2:]
    elif launcher in ("accelerate", "torchrun"):
        head, module, arguments = split_launch(launcher, words)
    return Command(page, line, text, launcher, module, arguments, head, is_abridged)


def complete(words: list[str]) -> tuple[list[str], bool]:
    """Drop the brackets around optional words, and add the options behind "..."."""
    if "..." not in words:
        return [unbracket(word) for word in words], False
    words = [word for word in words if word != "..."]
    if words[-1] == "--config":
        words.pop()
    module = words[words.index("-m") + 1]
    missing = LEFT_OUT[module]
    pairs = zip(missing[::2], missing[1::2], strict=True)
    return words + [x for pair in pairs if pair[0] not in words for x in pair], True


def unbracket(word: str) -> str:
    if word.startswith("[--"):
        return word[1:].removesuffix("]")
    return word.removesuffix("]") if word.count("]") > word.count("[") else word


def split_launch(launcher: str, words: list[str]) -> tuple[list[str], str, list[str]]:
    """Split a launch with the launcher's own parser into its words and the started program."""
    if launcher == "accelerate":
        from accelerate.commands.launch import launch_command_parser

        assert words[1] == "launch", words
        options = launch_command_parser().parse_args(words[2:])
        script, rest, known = options.training_script, options.training_script_args, words[2:]
        if options.config_file is not None:
            assert (REPOSITORY / options.config_file).is_file(), options.config_file
    else:
        from torch.distributed.run import get_args_parser

        options = get_args_parser().parse_args(words[1:])
        script, rest, known = options.training_script, options.training_script_args, words[1:]
    return known[: len(known) - len(rest)], script, list(rest)


# -- reading by the real parsers ------------------------------------------------------------


class Parsed(Exception):
    """A command's own parser has accepted its words."""


@contextmanager
def stopping_after_the_parser() -> Iterator[None]:
    original = argparse.ArgumentParser.parse_args

    def parse_args(self: Any, args: Any = None, namespace: Any = None) -> Any:
        raise Parsed(original(self, args, namespace))

    def read(kind: type[Options], words: Sequence[str]) -> Any:
        raise Parsed(original_read(kind, words))

    original_read = Options.read.__func__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        patch.setattr(Options, "read", classmethod(read))
        yield


def check(command: Command) -> None:
    """Fail if the command has an unknown option, choice or configuration."""
    if command.launcher == "make":
        targets = re.findall(r"^([\w./ -]+):", (REPOSITORY / "Makefile").read_text(), re.M)
        assert set(command.arguments) <= set(" ".join(targets).split()), command
    elif command.launcher == "pip":
        check_extras(command)
    elif re.match(r"pipedraft\b|.*\.py$", command.module):
        for word in command.arguments:
            if re.match(r"(configs|assets|benchmarks)/[\w./-]+$", word):
                assert (REPOSITORY / word).exists(), word
        read(command.module, command.arguments)


def check_extras(command: Command) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    for extras in re.findall(r"(?:pipedraft|\.)\[([\w,]+)\]", command.text):
        assert set(extras.split(",")) <= project["optional-dependencies"].keys(), command


def read(module: str, words: list[str]) -> None:
    if module == "pipedraft.train":
        from pipedraft.train.__main__ import take_overfit, take_plan, take_wish
        from pipedraft.train.config import parse_run
        from pipedraft.train.methods import methods

        parse_run(take_wish(take_overfit(take_plan(words)[0])[0])[0], methods(), "")
    elif module == "pipedraft.train.features":
        from pipedraft.train.features.options import FeatureOptions, read_heads

        own, rest = FeatureOptions.read_own([w for w in words if w != "serve"])
        read_heads(rest, list(own.also))
    elif module == "pipedraft.inference.conformance":
        assert words and not [word for word in words if word.startswith("-")]  # files only
    elif module == "assets/target/train.py":
        with training_script() as script:
            script.read(words)
    elif module == "pipedraft.data_recipes":
        from pipedraft.data_recipes.options import build_parser
        from pipedraft.options import parse

        parser = build_parser()
        parser.instantiate(parse(parser, words))
    else:
        with stopping_after_the_parser(), pytest.raises(Parsed):
            run_module(module, words)


@contextmanager
def training_script() -> Iterator[Any]:
    """Import the targets' training script as a module, with its folder importable."""
    place = REPOSITORY / "assets" / "target"
    spec = importlib.util.spec_from_file_location("target_training", place / "train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(place))
        patch.setitem(sys.modules, "target_training", module)
        spec.loader.exec_module(module)
        yield module


def run_module(module: str, words: list[str]) -> None:
    """Run a module's or script's entry point in this process, like ``python``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [module, *words])
        if module.endswith(".py"):
            patch.syspath_prepend(str((REPOSITORY / module).parent))
            runpy.run_path(str(REPOSITORY / module), run_name="__main__")
        else:
            main_of(module)()


def main_of(module: str) -> Any:
    """Return ``main`` from a module as named after ``python -m``."""
    spec = importlib.util.find_spec(module)
    assert spec is not None, module
    name = f"{module}.__main__" if spec.submodule_search_locations else module
    return importlib.import_module(name).main
