"""Run commands in this process."""

import sys
from collections.abc import Callable

from pipedraft.data_recipes.__main__ import main as data_main
from pipedraft.endings import run_command
from pipedraft.eval.__main__ import main as eval_main
from pipedraft.eval.audit import run as audit_run
from pipedraft.inference.__main__ import main as inference_main
from pipedraft.inference.serving.__main__ import main as serve_main
from pipedraft.models.__main__ import main as models_main
from pipedraft.train.__main__ import main as train_main
from pipedraft.train.new.__main__ import main as new_main

MAINS: dict[str, Callable[[], None]] = {
    "train": train_main,
    "new": new_main,
    "inference": inference_main,
    "serve": serve_main,
    "eval": eval_main,
    "audit": lambda: audit_run(sys.argv[1:]),  # `call` ends as a command does
    "models": models_main,
    "data_recipes": data_main,
}


def call(command: str, arguments: list[str], monkeypatch) -> int:
    """Run a command in this process and return its exit status; raise anything but a clean exit."""
    monkeypatch.setattr(sys, "argv", [command, *arguments])
    try:
        run_command(MAINS[command])
    except SystemExit as stop:
        return stop.code or 0
    return 0


def assert_one_line(status: int, out: str, err: str, words: list[str]) -> None:
    assert status == 2, err
    assert out == ""
    lines = err.splitlines()
    if lines[0].endswith(" is used, the run's best head"):  # said when the head is found
        del lines[0]
    assert len(lines) == 1, err
    assert lines[0].startswith("error: ")
    for word in words:
        assert word in lines[0], lines[0]
