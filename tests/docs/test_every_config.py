"""Every configuration runs on a fresh clone, or names the command that makes its inputs."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tiny_models import REPOSITORY

from pipedraft.endings import needed

CONFIGS = [
    path
    for path in sorted((REPOSITORY / "configs").glob("*/*.yaml"))
    if path.parent.name != "accelerate"  # of the launcher
]


def label(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def things(path: Path) -> Iterator[str]:
    """Models, heads and data named by a configuration."""
    spec = yaml.safe_load(path.read_text())
    yield from (spec[key] for key in ("target", "tokenizer", "init_from") if key in spec)
    yield from spec.get("drafts", {}).values()
    for source in spec.get("data", {}).get("sources", []):
        is_hub = "/" in source.get("path", "") and not source["path"].startswith(
            ("data/", "assets/", "out/")
        )
        if "path" in source and not is_hub:  # a data set on the Hub is read over the network
            yield source["path"]


def missing(path: Path) -> list[str]:
    return [thing for thing in things(path) if not thing.startswith("assets/")]


@pytest.mark.parametrize("path", CONFIGS, ids=label)
def test_a_configuration_has_what_it_names_or_says_what_makes_it(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where nothing has been made yet
    for thing in things(path):
        if thing.startswith("assets/"):
            assert (REPOSITORY / thing).exists()
            continue
        line = needed(f"'{thing}' does not exist", ["--config", str(path)])
        assert line.startswith("; this makes it: "), thing
        made_by = line.partition(": ")[2].split()
        if made_by[0] == "make":
            rule = rf"(?m)^(?:\S+ )*{re.escape(made_by[1])}(?: \S+)*:"
            assert re.search(rule, (REPOSITORY / "Makefile").read_text())
        for word in made_by:
            assert not word.endswith((".yaml", ".py")) or (REPOSITORY / word).is_file()


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=500
    )


def test_an_error_ends_with_the_command_that_makes_what_is_missing(tmp_path):
    (tmp_path / "assets").symlink_to(REPOSITORY / "assets")
    config = str(REPOSITORY / "configs" / "real" / "smollm2_eagle3.yaml")
    ended = run(["-m", "pipedraft.train", "--config", config], tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.endswith("this makes it: make out/smollm2/config.json\n")


TRAINED = [p for p in CONFIGS if "output_dir:" in p.read_text() and not missing(p)]


@pytest.mark.all
@pytest.mark.parametrize("path", TRAINED, ids=label)
def test_a_configuration_trains_two_steps(path, tmp_path):
    (tmp_path / "assets").symlink_to(REPOSITORY / "assets")
    words = ["--config", str(path), "--output_dir", "out/two"]
    if path.parent.name == "target":
        command = ["assets/target/train.py", *words, "--training.max_steps", "2"]
    else:
        command = ["-m", "pipedraft.train", *words, "--max_steps", "2"]
        command += ["--evaluation.max_rows", "2", "--data.max_length", "128"]
        command += ["--evaluation.decode_prompts", "1"]
    ended = run(command, tmp_path)
    assert ended.returncode == 0, ended.stderr
