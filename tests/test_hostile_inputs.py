"""Bounded input files: sizes, depths, ranges and templates."""

import gzip
import io
import json
import math
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml
from tiny_models import byte_tokenizer

from pipedraft.chats import ChatRefused, render_chat
from pipedraft.data_recipes.chat_client import TryAgain, read_choice
from pipedraft.data_recipes.config import DataConfig, Source
from pipedraft.data_recipes.sources import TOO_MANY_BYTES, read_source
from pipedraft.devices import resolve_device
from pipedraft.errors import UsageError, check_ranges
from pipedraft.eval.traces import read_recordings
from pipedraft.files import (
    MAX_YAML_BYTES,
    bounded_lines,
    check_yaml,
    locked,
    make_place,
    read_bounded,
    read_json,
    read_yaml,
)
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.decode_options import DecodeOptions
from pipedraft.options import Options
from pipedraft.train.config import EvaluationConfig, OptimConfig, RunConfig
from pipedraft.train.run import RESOLVED

LAUGHS = "a0: &a0 [1]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 11)
)


@pytest.mark.parametrize(
    "text, reason",
    [
        (LAUGHS, "an alias: write out what it stands for"),
        ("&a {x: *a}", "an alias"),
        ("x: " * 100, "mapping values are not allowed"),
        ("a: 1\nb: {c: 1, c: 2}", "the key 'c' twice"),
        ("a" * (MAX_YAML_BYTES + 1), "more than 1048576 characters"),
    ],
    ids=["laughs", "itself", "nonsense", "twice", "long"],
)
def test_yaml_that_could_grow_is_refused(text, reason, tmp_path):
    with pytest.raises(yaml.YAMLError) as refused:
        check_yaml(text)
    assert reason in str(refused.value)
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match="^--config: "):
        read_yaml(path, "--config")
    path.write_text("[" * 5000)
    with pytest.raises(UsageError, match="^--config: "):
        read_yaml(path, "--config")


def test_yaml_of_this_repository_is_taken():
    for path in Path(__file__).parents[1].glob("configs/**/*.yaml"):
        assert read_yaml(path, "x") == yaml.safe_load(path.read_text())


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"[" * 100_000, "does not hold what it should"),
        (b'{"a": NaN}', "does not hold what it should"),
        (b'{"a": "\xff"}', "does not hold what it should"),
        (b"null", "Expected `object`, got `null`"),
        (b'{"a": 1}' + b" " * 1000, "has more than 1000 bytes"),
    ],
)
def test_json_is_read_into_what_it_should_be(content, reason, tmp_path):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(UsageError) as refused:
        read_json(path, "--cost", dict[str, float], most=1000 if b" " * 9 in content else 10**6)
    assert reason in str(refused.value) and str(refused.value).startswith("--cost: ")


def test_only_regular_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for name in ("fifo", ".", "missing", "n" * 300):
        with pytest.raises(UsageError, match="^--x: "):
            read_bounded(tmp_path / name, "--x")
    with pytest.raises(UsageError, match="is no regular file"):
        read_bounded(Path("/dev/zero"), "--x")


def test_long_lines_are_skipped_whole():
    lines = bounded_lines(io.BytesIO(b"ab\n" + b"x" * 50 + b"\ncd\n" + b"y" * 50), 4)
    assert list(lines) == [b"ab\n", None, b"cd\n", None]


ROW = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.json", "x.txt"])
def test_a_row_takes_no_more_than_its_limit(name, tmp_path):
    long = {"messages": [{"role": "user", "content": "a" * 18_000_000}]}
    rows = [ROW, long, ROW]
    text = json.dumps(rows) if name == "x.json" else "\n".join(map(json.dumps, rows))
    opener = gzip.open if name.endswith("gz") else open
    with opener(tmp_path / name, "wb") as file:
        file.write(text.encode())
    kind = "text" if name == "x.txt" else "conversations"
    source = Source(path=str(tmp_path / name), kind=kind)
    errors = [row.error for row in read_source(source)]
    assert errors == ([TOO_MANY_BYTES] if kind == "text" else ["", TOO_MANY_BYTES, ""])
    kept = read_source(replace(source, max_row_bytes=10**8))
    assert not any(row.error for row in kept)


# -- values -----------------------------------------------------------------------------------

SOURCES = {"sources": [Source(path="x.jsonl")]}
RUN = {"method": "spd", "output_dir": Path("out"), "data": DataConfig(**SOURCES)}
BAD_VALUES = [
    (OptimConfig, {}, "clip_norm", (-1.0, math.nan, math.inf)),
    (OptimConfig, {}, "weight_decay", (-1.0, math.nan)),
    (OptimConfig, {}, "final_fraction", (-5.0, 1e300, math.nan)),
    (OptimConfig, {}, "lr", (0.0, math.inf, 1e99, math.nan)),
    (OptimConfig, {}, "betas", ((0.9, 1.0), (-0.1, 0.9), (math.nan, 0.9))),
    (OptimConfig, {}, "warmup_fraction", (-0.1, 1.0, math.nan)),
    (EvaluationConfig, {}, "every_steps", (-1,)),
    (EvaluationConfig, {}, "max_rows", (-1, 0)),
    (EvaluationConfig, {}, "patience", (-1,)),
    (RunConfig, RUN, "output_dir", (Path(""), Path("."))),
    (RunConfig, RUN, "save_every_steps", (0, -1)),
    (RunConfig, RUN, "batch_group", (0, -2)),
    (RunConfig, RUN, "epochs", (0.0, math.nan, math.inf)),
    (RunConfig, RUN, "max_minutes", (0.0, math.nan, math.inf)),
    (RunConfig, RUN, "peak_tflops", (math.nan, -1.0)),
    (RunConfig, RUN, "log_every_steps", (0,)),
    (DataConfig, SOURCES, "max_length", (1, 2**80)),
    (DataConfig, SOURCES, "valid_fraction", (1.0, math.nan)),
    (DataConfig, SOURCES, "seed", (-1, 10**40)),
    (Source, {"path": "x.jsonl"}, "weight", (0.0, math.nan)),
    (Source, {"path": "x.jsonl"}, "max_row_bytes", (0,)),
]


@pytest.mark.parametrize(
    "kind, others, name, value",
    [(kind, others, name, x) for kind, others, name, values in BAD_VALUES for x in values],
)
def test_numbers_out_of_range_are_refused_when_they_are_parsed(kind, others, name, value):
    with pytest.raises(ValueError, match=name):
        kind(**{**others, name: value})
    kind(**others)


@pytest.mark.parametrize(
    "interval, inside, outside",
    [
        ("[0, 1)", (0, 0.5, None), (-1e-9, 1, math.nan)),
        ("(0, 1]", (1, 1e-300, None), (0, 1.1, math.inf)),
        ("[0, inf)", (0, 1e308), (math.inf, -1, math.nan)),
    ],
)
def test_intervals_are_those_of_mathematics(interval, inside, outside):
    class Values:
        x: float | None

    values = Values()
    for values.x in inside:
        check_ranges(values, {"x": interval})
    for values.x in outside:
        with pytest.raises(UsageError, match=r"^a\.x: .*; give .* and "):
            check_ranges(values, {"x": interval}, "a.")


@pytest.mark.parametrize(
    "settings",
    [
        {"schedule": "flowspec", "tree": "chain:999999999999999999"},
        {"schedule": "flowspec", "tree": "dynamic:7:9999:59"},
        {"schedule": "spd", "tree_width": 10**9},
        {"max_new_tokens": 10**18},
    ],
)
def test_settings_that_would_never_end_are_refused(settings):
    with pytest.raises(ValueError):
        DecodeConfig.of(**{"schedule": "spd", **settings})


# -- chat templates ---------------------------------------------------------------------------

TURNS = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "template, reason",
    [
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% if %}", "Expected an expression"),
        ("{{ raise_exception('no') }}", "no"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
    ids=str,
)
def test_chat_templates_end_in_one_line_and_reach_no_python(template, reason):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ChatRefused, match=f"chat template refused: .*{reason}"):
        render_chat(tokenizer, TURNS)


# -- output folders ---------------------------------------------------------------------------

HOLD = "from pathlib import Path; from pipedraft.files import locked\n"
HOLD += "with locked(Path('.'), 'x'): print('up', flush=True); input()"


def test_a_second_run_in_a_folder_is_refused_until_the_first_is_killed(tmp_path):
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert first.stdout is not None and first.stdout.readline() == b"up\n"
    with pytest.raises(UsageError) as refused, locked(tmp_path, "--out"):
        pass
    assert f"--out: {str(tmp_path)!r} is written to by another run" in str(refused.value)
    first.kill()
    first.communicate()
    with locked(tmp_path, "--out"):
        pass
    assert not list(tmp_path.iterdir())


def test_shares_of_one_evaluation_lock_out_only_others(tmp_path):
    share = {"field": "--out", "shared": True}
    with locked(tmp_path, **share), locked(tmp_path, **share):  # noqa: SIM117
        with pytest.raises(UsageError), locked(tmp_path, "--out"):
            pass


def test_an_output_file_replaces_only_its_own_kind(tmp_path):
    path, place = tmp_path / "new" / "config.yaml", ("output_dir", RESOLVED.encode())
    refused = "^output_dir: '.*' was not written by this command and would be replaced; give"
    make_place(place[0], path, place[1])
    for content in (b"", b"# mine\nmethod: spd\n", bytes(2000) + place[1]):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=refused):
            make_place(place[0], path, place[1])
        assert path.read_bytes() == content
    for other in (tmp_path, Path("/dev/null")):
        with pytest.raises(UsageError, match=refused):
            make_place(place[0], other, place[1])
    path.write_text(RESOLVED + "method: spd\n")
    make_place(place[0], path, place[1])


def test_options_take_no_number_that_is_none():
    @dataclass(frozen=True, kw_only=True)
    class Some(Options):
        """x"""

        share: float = 0.5
        """y"""

    for value in (".nan", "nan", "inf", "-inf"):
        with pytest.raises(UsageError, match="--share"):
            Some.read(["--share", value])


HEADER = {"config": {}, "recorded": {"draft_type": "x", "relative_cost": 1.0, "boundaries": []}}
TURN = {"prompt_ids": [1], "token_ids": [2], "text": "", "stop_reason": "eos", "num_stages": 1}


@pytest.mark.parametrize(
    "lines",
    [
        [None],
        [5],
        [[]],
        [{**HEADER, "config": "x"}],
        [{**HEADER, "recorded": 7}],
        [{"config": {}}],
        [HEADER, [["a", "b"], TURN]],
        [HEADER, [["a", "b", 0, 0], {}]],
        [HEADER, [["a", "b", 0, 0], []]],
        [HEADER, [["a", "b", 0, 0], {**TURN, "token_ids": "x"}]],
        [HEADER, [["a", "b", 0, 0], {**TURN, "num_steps": None}]],
        [HEADER, 5],
        [HEADER],
    ],
)
def test_traces_are_read_into_what_they_should_be(lines, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UsageError, match="^TRACES: "):
        read_recordings([path])
    path.write_bytes(b"[" * 10**5)
    with pytest.raises(UsageError, match="^TRACES: "):
        read_recordings([path])


def test_a_device_that_holds_nothing_is_refused():
    with pytest.raises(ValueError, match="--device: 'meta' cannot be used"):
        resolve_device("meta")


def test_an_empty_option_is_no_value():
    with pytest.raises(UsageError, match="--checkpoint: ''; give a trained draft's folder"):
        DecodeOptions.read(["--checkpoint", "", "--prompt", "x"])


@pytest.mark.parametrize("reason", [["stop"], {}, 5, "length"])
def test_what_a_chat_server_gives_as_a_reason_is_a_text(reason):
    payload = {"choices": [{"message": {"content": "x"}, "finish_reason": reason}]}
    if isinstance(reason, str):
        assert read_choice(payload)[2] == reason
        return
    with suppress(TryAgain):
        assert not read_choice(payload)[2]
