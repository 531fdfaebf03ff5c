"""Scripts of docs/lab: fates of segments, and comparisons of outputs."""

import re
import runpy

import pytest
from doc_commands import run_module
from tiny_models import REPOSITORY

from pipedraft.inference.result import DecodeResult


def script(name: str) -> dict:
    return runpy.run_path(str(REPOSITORY / "docs" / "lab" / name))


def test_a_segment_is_invalidated_where_no_row_of_it_is_left():
    # [repeats, draft forwards, overlap, rows per stage]; the second segment is empty at stage 1.
    log = [[1, 1, 1, 1, 0], [1, 4], [1, 1, 1, 3, 1], [1, 1, 1, 1, 0], [1, 0, 1, 0, 1]]
    result = DecodeResult([], [], "", "", num_stages=2, step_log=log)
    assert script("runs.py")["fates"](result) == (3, 1, 5, 1)


@pytest.mark.all
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_every_schedule_has_the_tokens_of_autoregressive_decoding(capsys, dtype):
    run_module("docs/lab/same_tokens.py", [dtype, "--prompts=1", "--new-tokens=4"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 26 + (dtype == "float32")
    assert all(line.endswith("1 of 1 outputs equal") for line in lines), lines


@pytest.mark.all
def test_chains_and_auto_are_timed(capsys):
    assets = REPOSITORY / "assets"
    places = {"target": assets / "target", "head": assets / "heads/eagle3"}
    words = [f"--{name}={place}" for name, place in {**places, "data-dir": assets / "eval"}.items()]
    run_module("docs/lab/auto_tree.py", [*words, "--limit=1", "--new-tokens=4"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and all("3/3 outputs equal" in line for line in lines), lines


@pytest.mark.all
def test_greedy_verification_is_one_graph_without_further_kernels(capsys):
    run_module("docs/lab/launches.py", [])
    lines = capsys.readouterr().out.splitlines()
    figures = {line.split(" | ")[0]: re.findall(r"[\d.]+", line)[-4:] for line in lines[2::2]}
    assert figures["| autoregressive"] == ["2.0", "2.0", "1.0", "2.0"]
    assert len(figures) == 5


@pytest.mark.all
def test_a_training_step_waits_four_times_for_the_device(capsys):
    run_module("docs/lab/launches.py", ["--training"])
    figures = re.findall(r"\| (\w+) \| (\d+) \| (\d+) \| (\d+) \|", capsys.readouterr().out)
    assert [(name, int(waits)) for name, _, waits, _ in figures] == [
        ("eagle3", 4),
        ("spd", 4),
        ("ppsd", 4),
    ]
    assert all(int(kernels) > 100 and int(uploads) < 12 for _, kernels, _, uploads in figures)
