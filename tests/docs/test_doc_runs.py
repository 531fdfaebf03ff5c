"""Run the commands in README.md and docs/*.md, scaled down to seconds, in a reader's folder.

test_doc_processes.py runs the commands with several processes. doc_place.py lists the commands left
out, with the reason.
"""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_commands import Command, make_command
from doc_place import (
    COMMANDS,
    HUB_TARGETS,
    PAGE_NAMES,
    Reader,
    failures_of,
    measurement,
    runner_of,
)
from fake_hub import FakeHub
from hub_runs import signed_in
from regenerate_runs import FakeServer
from tiny_models import REPOSITORY

pytestmark = pytest.mark.timeout(900)  # many commands in one test, maybe on a busy machine

RUNS = [command for command in COMMANDS if runner_of(command) == Path(__file__).name]
QUICK_PAGES = {"README.md", "data.md", "export.md", "scaling.md"}
QUICK = [command for command in RUNS if command.page in QUICK_PAGES]


@pytest.fixture(scope="module")
def readers(tmp_path_factory) -> dict[bool, Reader]:
    """Make two readers: for the quick pages only (False), and for every page (True)."""
    folder = tmp_path_factory.mktemp
    return {is_whole: Reader(folder("reader"), is_whole) for is_whole in (False, True)}


@pytest.fixture
def reader(readers, request) -> Reader:
    return readers[request.node.get_closest_marker("all") is not None]


@pytest.fixture
def hub(monkeypatch, tmp_path) -> Iterator[FakeHub]:
    with signed_in(monkeypatch, tmp_path / "cache") as running:
        yield running


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    """Serve the answers expected from a language model."""
    with FakeServer() as fake:
        fake.models = [*HUB_TARGETS]
        threading.Thread(target=fake.serve_forever, args=(0.02,), daemon=True).start()
        yield fake
        fake.shutdown()


def pages_of(commands: list[Command], *marks: pytest.MarkDecorator) -> list:
    names = [name for name in PAGE_NAMES if any(c.page == name for c in commands)]
    return [pytest.param(name, commands, marks=marks, id=name) for name in names]


@pytest.mark.parametrize("page, commands", pages_of(QUICK) + pages_of(RUNS, pytest.mark.all))
def test_commands_run(page, commands, reader, hub, server, monkeypatch, capfd):
    monkeypatch.chdir(reader.folder)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    reader.stand_ins["http://localhost:8000"] = server.url
    failures = failures_of(commands, page, reader.run)
    assert not failures, "\n".join(failures)


def test_a_case_is_measured_in_a_process_of_its_own(monkeypatch, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import json, os, sys; print(json.dumps([os.getpid(), *sys.argv[1:]]))")
    monkeypatch.setattr(sys, "argv", [str(script), "--json"])
    pid, *words = measurement.measure_apart("--method", "one")
    assert pid != os.getpid() and words == ["--json", "--method", "one"]


@pytest.mark.parametrize(
    "text",
    [
        "python benchmarks/papers/table.py none --out out/none",
        "python benchmarks/edge/draft_length.py --protocols none",
    ],
)
def test_a_command_that_fails_is_reported(text, reader, monkeypatch, capfd):
    monkeypatch.chdir(reader.folder)
    (failure,) = failures_of([make_command("page.md", 1, text)], "page.md", reader.run)
    assert failure.startswith(f"page.md:1: {text}")


def test_the_shell_makes_the_data_of_fine_tuned_targets(reader):
    page = (REPOSITORY / "docs" / "methods" / "flexspec.md").read_text()
    lines = re.findall(r"^    ((?:grep|zcat) .* > (.*))$", page, re.MULTILINE)
    assert len(lines) == 4
    for line, out in lines:
        subprocess.run(["bash", "-o", "pipefail", "-c", line], cwd=reader.folder, check=True)
        rows = [json.loads(row) for row in (reader.folder / out).read_text().splitlines()]
        assert rows and all("messages" in row for row in rows), line
