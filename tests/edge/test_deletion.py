"""Without the edge everything else works: a copy of the checkout has none of its folders.

Pages of docs/ still describe the edge, so tests that read pages are left out.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from source_imports import resolved
from tiny_models import REPOSITORY

from pipedraft.inference.__main__ import main
from pipedraft.inference.schedules import SCHEDULES

WING = ("inference/edge", "eval/edge", "benchmarks/edge", "tests/edge")
PACKAGE = ("models", "data_recipes", "inference", "eval", "train")
QUICK = ("config", "tree")
OF_PAGES = ("docs", "benchmarks/test_published_numbers.py")
"""Tests that read pages, or run the commands on them."""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    copy = tmp_path_factory.mktemp("without") / "pipedraft"
    left_out = [".*", "out", "build", "dist", "*.egg-info", "__pycache__", "assets"]
    shutil.copytree(REPOSITORY, copy, ignore=shutil.ignore_patterns(*left_out))
    shutil.copytree(REPOSITORY / "assets", copy / "assets", copy_function=os.symlink)
    for folder in WING:
        shutil.rmtree(copy / folder)
    return copy


def run(checkout: Path, *words: str, limit_s: float) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "PYTHON"))}
    place = {"cwd": checkout, "env": environment | {"PYTHONPATH": str(checkout.parent)}}
    command = [sys.executable, *words]
    done = subprocess.run(command, text=True, capture_output=True, timeout=limit_s, **place)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def test_every_other_import_is_found(checkout):
    for folder in PACKAGE:
        number, missing = resolved(checkout / folder, checkout)
        assert number > 20 and not missing
    planted = checkout / "eval" / "planted.py"
    planted.write_text("from ..inference.edge import wire\n")
    assert len(resolved(checkout / "eval", checkout)[1]) == 1
    planted.unlink()
    scripts = [path for name in ("tests", "benchmarks") for path in (checkout / name).rglob("*.py")]
    helpers = {path.stem for folder in WING for path in (REPOSITORY / folder).glob("*.py")}
    helpers -= {path.stem for path in scripts}
    for path in scripts:
        for name in re.findall(r"^ *(?:from|import) ([a-z][\w.]*)", path.read_text(), re.MULTILINE):
            top, _, rest = name.partition(".")
            file = checkout / rest.replace(".", "/")
            assert top not in helpers, f"{path.name}: {name}"
            assert top != "pipedraft" or file.is_dir() or file.with_suffix(".py").is_file(), name


EVERYTHING = """
import importlib, sys
from pathlib import Path
import pipedraft, pytest
root = Path(pipedraft.__file__).parent
assert root == Path.cwd(), root
for folder in {folders!r}:
    for path in sorted((root / folder).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        try:
            importlib.import_module(".".join(["pipedraft", *parts]).removesuffix(".__init__"))
        except ModuleNotFoundError as error:
            assert error.name == "vllm", error  # two files extend its classes
assert not [name for name in sys.modules if name.startswith("pipedraft.") and ".edge" in name]
from pipedraft.inference.__main__ import main
from pipedraft.eval.__main__ import SUBCOMMANDS
from pipedraft.inference.schedules import SCHEDULES
print(*SUBCOMMANDS, *SCHEDULES)
try:
    main(["--help"])
except SystemExit as end:
    assert not end.code
main({words!r})
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-m", "not all", *{tests!r}]))
"""


@pytest.mark.all
def test_modules_are_imported_a_prompt_is_decoded_and_tests_pass(checkout, capsys):
    head = str(REPOSITORY / "assets" / "heads" / "spd_n4")
    words = ["--checkpoint", head, "--prompt", "Hi", "--max-new-tokens", "24"]
    main(words)
    answer = capsys.readouterr().out.strip()
    tests = [f"tests/inference/test_{name}.py" for name in QUICK]
    code = EVERYTHING.format(folders=PACKAGE, tests=tests, words=words)
    names, *lines = run(checkout, "-c", code, limit_s=300).splitlines()
    of_links = [name for name, kind in SCHEDULES.items() if ".edge." in kind.__module__]
    assert len(of_links) > 4 and not {*of_links, "edge"} & {*names.split()}
    assert {"spd", "eagle", "parity"} <= {*names.split()}
    assert lines[0].startswith("usage: pipedraft inference")
    assert "--server" not in "".join(lines) and len(answer) > 20 and answer in "\n".join(lines)
    assert " passed" in lines[-1]


@pytest.mark.all
@pytest.mark.timeout(4 * 3600)
def test_all_other_tests_pass(checkout):
    ignored = [f"--ignore=tests/{name}" for name in OF_PAGES]
    words = ["-q", "-n", "2", "--dist", "loadfile", "-m", "not all", *ignored, "tests"]
    assert " passed" in run(checkout, "-m", "pytest", *words, limit_s=4 * 3600)
