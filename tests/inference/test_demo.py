"""``pipedraft demo``: the same prompt without and with a draft."""

import os
import re
import sys

import pytest
from tiny_models import REPOSITORY

from pipedraft.inference import demo
from pipedraft.inference.demo import DemoRun, painted, play, verdict, wrapped
from pipedraft.inference.result import DecodeResult


@pytest.fixture
def at_home(monkeypatch):
    monkeypatch.chdir(REPOSITORY)


WORDS = ["--max-new-tokens", "12", "--repeats", "1"]


def test_both_answers_are_printed_and_compared(at_home, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["demo", *WORDS])
    demo.main()
    lines = capfd.readouterr().out.splitlines()
    first, second = (at for at, line in enumerate(lines) if line.endswith(" tokens/s"))
    assert lines[first].startswith("without a draft: ")
    assert re.match(r"with assets/heads/eagle3 \(eagle, chain:\d\): \d+ tok", lines[second])
    text = lines[first + 1 : second - 1]
    assert text == lines[second + 1 : second + 1 + len(text)] and text[0].startswith("def ")
    # A draft that loses, as on a busy machine, gets one more line of advice.
    end = [line for line in lines if line.endswith("verification rounds instead of 11 steps")]
    (speed,) = lines[lines.index(*end) + 1 :][:1]
    assert "times as fast (1 runs of each in turn: " in speed and "the same text" in speed


@pytest.mark.parametrize(
    "words, message",
    [
        (["--target", "assets/target"], "--target: 'assets/target' without a draft; give"),
        (["--prompt", " "], "--prompt: ' ' is empty"),
        (["--backend", "process"], "--backend: 'process'; leave it out"),
        (["--schedule", "autoregressive"], "--schedule: autoregressive is what the demo compares"),
        (["--repeats", "0"], "--repeats: 0; give at least 1"),
    ],
)
def test_bad_input_is_refused_by_its_option(words, message, at_home, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["demo", *words])
    with pytest.raises(ValueError, match=re.escape(message)):
        demo.main()


def test_an_answer_without_a_rate_is_refused(at_home, monkeypatch):
    emit = DecodeResult.emit
    monkeypatch.setattr(
        DecodeResult, "emit", lambda *args, **kw: emit(*args, **kw | {"max_new_tokens": 1})
    )
    monkeypatch.setattr(sys, "argv", ["demo", *WORDS])
    with pytest.raises(ValueError, match="answered with one token"):
        demo.main()


def answer(name: str, rates: list[float]) -> DemoRun:
    pieces = ["Sum", " of", "\n  two", " numbers"]
    return DemoRun(name, pieces, [False, True, True, False], [0.0, 0.1, 0.1, 0.2], rates)


def test_a_terminal_shows_both_beside_each_other(monkeypatch, capsys):
    monkeypatch.setattr(demo.shutil, "get_terminal_size", lambda: os.terminal_size((43, 20)))
    play([answer("a", [10.0]), answer("b", [20.0])])
    out = capsys.readouterr().out
    assert out.startswith("a: 10 tokens/s       | b: 20 tokens/s")
    assert out.rpartition("\x1b[2A")[2].splitlines() == [
        " | ".join(2 * [f"Sum\x1b[32m of\x1b[0m{' ' * 14}"]),
        " | ".join(2 * [f"\x1b[32m  two\x1b[0m numbers{' ' * 7}"]),
    ]


def test_lines_break_at_spaces_and_keep_indentation():
    lines = wrapped(["abc def", " ghi", "\n  ", "abcdefghijkl"], 8)
    assert ["".join(c for c, _ in line) for line in lines] == [
        "abc def ",
        "ghi",
        "  abcdef",
        "ghijkl",
    ]
    assert painted(lines[1], DemoRun("x", accepted=[False, True]), 2, 5) == "\x1b[32mghi\x1b[0m  "


def test_a_draft_that_costs_more_is_said_to():
    said = verdict([answer("a", [20.0]), answer("b", [10.0])], num_rounds=2, num_stages=4)
    assert "0.50 times as fast" in said and "costs more time than it saves" in said
    assert "one process runs the 4 stages one after the other" in said
