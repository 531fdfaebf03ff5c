"""docs/adding_a_head.md and docs/adding_a_schedule.md, followed in a copied repository."""

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from doc_commands import commands_of
from fork_server import forked, status_of
from tiny_models import REPOSITORY

PAGES = ("adding_a_head", "adding_a_schedule")
FOLDERS = ("data_recipes", "eval", "inference", "models", "train", "tests")
FILE = r"^`(?P<path>[\w/]+\.py)`:\n\n```python\n(?P<text>.*?)^```$"
CHANGE = r"^```diff\n# (?P<path>[\w/]+\.py)\n(?P<text>.*?)^```$"

# Runs both pages' commands, scaled down, in one process; a command is its words.
DRIVER = """
import runpy, shlex, sys
import pytest
tests = ["tests/models/test_markov.py", "tests/inference/test_windowed.py"]
status = pytest.main(["-q", "-p", "no:cacheprovider", *tests])
assert status == 0, status
for line in sys.stdin.read().splitlines():
    module, *words = shlex.split(line)
    sys.argv = [module, *words]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        assert not stop.code, (line, stop.code)
"""
SMALLER = {
    "pipedraft.train": ["--max_steps", "3", "--evaluation.max_rows", "4"],
    "pipedraft.inference": ["--max-new-tokens", "12"],
    "pipedraft.eval": ["--limit", "1", "--max-new-tokens", "6"],
}


def blocks(pattern: str) -> list[tuple[str, str]]:
    """Return (path, text) for one kind of code block on the pages."""
    found = []
    for page in PAGES:
        text = (REPOSITORY / "docs" / f"{page}.md").read_text()
        matches = re.finditer(pattern, text, re.MULTILINE | re.DOTALL)
        found += [(match["path"], match["text"]) for match in matches]
    return found


def apply_change(source: str, change: str) -> str:
    """Replace context and removed lines by context and added ones, hunk by hunk.

    A hunk ends at a context line whose predecessor is no neighbor in the file.
    """
    for hunk in split_hunks(source, change.splitlines()):
        before = "\n".join(line[1:] for line in hunk if line[0] != "+")
        after = "\n".join(line[1:] for line in hunk if line[0] != "-")
        assert source.count(before) == 1, f"{source.count(before)} places for:\n{before}"
        source = source.replace(before, after)
    return source


def split_hunks(source: str, lines: list[str]) -> list[list[str]]:
    hunks: list[list[str]] = [[]]
    for line in lines:
        longer = [*hunks[-1], line]
        before = "\n".join(x[1:] for x in longer if x[0] != "+")
        if hunks[-1] and before not in source:
            hunks.append([line])
        else:
            hunks[-1] = longer
    return [hunk for hunk in hunks if any(line[0] in "+-" for line in hunk)]


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """Copy the package into its own folder, and change it as the pages say."""
    root = tmp_path_factory.mktemp("copy") / "pipedraft"
    root.mkdir()
    for path in [*REPOSITORY.glob("*.py"), REPOSITORY / "pyproject.toml"]:
        shutil.copy(path, root)
    for name in FOLDERS:
        shutil.copytree(
            REPOSITORY / name, root / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("assets", "configs"):
        (root / name).symlink_to(REPOSITORY / name)
    for path, text in blocks(FILE):
        assert not (root / path).exists(), path
        (root / path).write_text(text)
    for path, change in blocks(CHANGE):
        (root / path).write_text(apply_change((root / path).read_text(), change))
    return root


def test_the_pages_have_all_their_parts():
    files, changes = blocks(FILE), blocks(CHANGE)
    assert [path for path, _ in files] == [
        "models/heads/markov.py",
        "train/markov.py",
        "inference/sources/markov.py",
        "tests/models/test_markov.py",
        "inference/schedules/window.py",
        "tests/inference/test_windowed.py",
    ]
    assert len(changes) == 5


def test_the_package_takes_the_added_parts(copy):
    """Run in a separate process, where the copy is imported as the package."""

    def take() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "pipedraft"]:
            del sys.modules[name]
        sys.path.insert(0, str(copy.parent))
        for path, _ in blocks(FILE):
            if not path.startswith("tests/"):
                module = importlib.import_module(f"pipedraft.{path[:-3].replace('/', '.')}")
                assert module.__file__ == str(copy / path)
        assert "markov" in importlib.import_module("pipedraft.train.methods").methods()
        config = importlib.import_module("pipedraft.inference.config").DecodeConfig
        assert config.of("windowed", num_stages=2).schedule.name == "windowed"

    assert status_of(forked(take)) == 0


@pytest.mark.all
def test_the_added_parts_pass_their_tests_and_run(copy, repository):
    lines = []
    for page in PAGES:
        for command in commands_of(repository / "docs" / f"{page}.md"):
            module, words = command.module, command.arguments
            # The copy's own head stands in for out/spd: its training is on the page.
            words = ["out/markov" if word == "out/spd" else word for word in words]
            lines.append(shlex.join([module, *words, *SMALLER[module]]))
    environment = {**os.environ, "PYTHONPATH": str(copy.parent), "ACCELERATE_MIXED_PRECISION": "no"}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        cwd=copy,
        env=environment,
        input="\n".join(lines),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "24 passed" in done.stdout
    assert "spd: windowed" in done.stdout or "markov: windowed" in done.stdout


def test_the_added_code_is_in_the_projects_style(copy):
    paths = [str(copy / path) for path, _ in blocks(FILE)]
    paths += [str(copy / path) for path, _ in blocks(CHANGE)]
    ruff = Path(sys.executable).parent / "ruff"
    for words in (["check"], ["format", "--check"]):
        done = subprocess.run([ruff, *words, *paths], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
