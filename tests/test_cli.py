"""Every command: bad input is one line on stderr and status 2."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from command_processes import Process
from command_runs import assert_one_line, call
from tiny_models import byte_tokenizer, tiny_llama
from train_runs import World, make_world

from pipedraft.endings import run_command
from pipedraft.eval.arguments import EvalOptions
from pipedraft.inference.serving.options import ServeOptions
from pipedraft.inference.text_stream import PrintedAnswer

NUM_STAGES = 2


@dataclass(frozen=True)
class Place:
    """A trained checkpoint, damaged copies, other targets, benchmark files."""

    world: World
    folder: Path

    def fill(self, argument: str) -> str:
        """Replace {name} with a path in the folder, and {} with the folder."""
        return re.sub(r"\{(\w*)\}", lambda found: str(self.folder / found[1]), argument)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    folder = tmp_path_factory.mktemp("cli")
    world = make_world(folder)
    with pytest.MonkeyPatch.context() as patch:
        arguments = world.arguments("spd", folder / "run", max_steps=2)
        assert call("train", arguments, patch) == 0
    target = tiny_llama(layers=4, vocab=300, seed=1)
    target.save_pretrained(folder / "other_weights")
    for file in world.target.glob("tokenizer*"):
        shutil.copy(file, folder / "other_weights")
    tiny_llama(layers=1, vocab=300).save_pretrained(folder / "other_tokens")
    byte_tokenizer().save_pretrained(folder / "other_tokens")
    (folder / "empty").mkdir()
    (folder / "a_file").write_text("")
    (folder / "gsm8k").mkdir()
    (folder / "gsm8k" / "test.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    make_damaged_copies(folder)
    return Place(world, folder)


def make_damaged_copies(folder: Path) -> None:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(folder / "run" / "best", folder / name))

    weights = copy("short_weights") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])
    (copy("no_weights") / "model.safetensors").unlink()
    config = copy("short_config") / "config.json"
    config.write_text(config.read_text()[:90])
    (copy("no_text") / "config.json").write_bytes(b"\xff\xfe\x00")
    (copy("no_object") / "config.json").write_text("[]")
    changes: dict[str, Callable[[dict], object]] = {
        "unknown_type": lambda c: c.update(draft_type="sdp"),
        "no_target": lambda c: c.pop("target"),
        "no_target_name": lambda c: c["target"].pop("name"),
        "no_fingerprint": lambda c: c["target"].pop("fingerprint"),
        "worded_number": lambda c: c["architecture"].update(num_stages="two"),
        "unknown_setting": lambda c: c["architecture"].update(width=3),
        "too_many_stages": lambda c: c["architecture"].update(num_stages=9),
        "worded_layer": lambda c: c["layer"].update(num_heads="x"),
        "moved_target": lambda c: c["target"].update(name="/nowhere/target"),
        "is_a_target": lambda c: c.pop("draft_type"),
    }
    for name, change in changes.items():
        path = copy(name) / "config.json"
        description = json.loads(path.read_text())
        change(description)
        path.write_text(json.dumps(description))


def damaged(name: str, file: str, *words: str) -> tuple[str, list[str]]:
    """Return a folder from make_damaged_copies, and words from its refusal."""
    return f"{{{name}}}", ["checkpoint", f"{name}/{file}", *words]


DAMAGED = [
    ("/nowhere/run", ["checkpoint", "/nowhere/run", "give a folder"]),
    ("nowhere", ["checkpoint", "nowhere", "give a folder"]),
    ("some/where", ["checkpoint", "some/where", "give a folder"]),
    ("{empty}", ["checkpoint", "empty", "give a folder"]),
    damaged("short_weights", "model.safetensors", "another checkpoint"),
    damaged("no_weights", "model.safetensors", "checkpoint"),
    *(
        damaged(name, "config.json", "copy it again")
        for name in ("short_config", "no_text", "no_target", "no_target_name")
    ),
    *(damaged(name, "config.json", "import --from") for name in ("no_object", "is_a_target")),
]
DAMAGED_ON_LOADING = [
    ("{unknown_type}", ["checkpoint", "'sdp'", "known: spd"]),
    ("{too_many_stages}", ["num_stages", "9", "choose 1 to 4"]),
    ("{moved_target}", ["target", "'/nowhere/target'", "give an existing folder"]),
    damaged("unknown_setting", "config.json", "'width'", "copy it"),
    *(
        damaged(name, "config.json", "copy it again")
        for name in ("no_fingerprint", "worded_number", "worded_layer")
    ),
]
INFERENCE = ["--prompt", "hi", "--max-new-tokens", "4"]
EVAL = ["--benchmarks", "gsm8k", "--data-dir", "{}", "--out", "{out}", "--max-new-tokens", "4"]
ALONE = ["--target", "{target}", "--schedule", "autoregressive"]
RUN = ["--checkpoint", "{run}"]
DRY_RUN = ["--repo", "a/b", "--dry-run"]
WITH_MODEL = ["--target", "{target}", "--draft-model", "{other_weights}"]

CASES: list[tuple[str, list[str], list[str]]] = [
    *(("inference", ["--checkpoint", c, *INFERENCE], w) for c, w in DAMAGED + DAMAGED_ON_LOADING),
    *(("models", ["push", "--checkpoint", c, *DRY_RUN], w) for c, w in DAMAGED[:4]),
    (
        "models",
        ["push", *RUN, "--repo", "a/b", "--dry-run", "--results", "nowhere.json"],
        ["--results", "nowhere.json", "that eval wrote"],
    ),
    # inference
    ("inference", INFERENCE, ["--checkpoint", "missing", "give a trained draft"]),
    (
        "inference",
        ["--target", "{target}", "--schedule", "spd", *INFERENCE],
        ["--schedule", "'spd'", "--checkpoint"],
    ),
    ("inference", [*RUN, *INFERENCE, "--micro-batches", "3"], ["--micro-batches", "naive_pp"]),
    (
        "inference",
        [*RUN, *INFERENCE, "--schedule", "spd", "--tree", "chain:4", "--restart"],
        ["'spd'", "tree", "belongs to", "eagle"],
    ),
    ("eval", [*RUN, *EVAL, "--schedule", "spd", "--restart"], ["--restart", "spd", "pipeinfer"]),
    (
        "inference",
        [*RUN, *INFERENCE, "--schedule", "flowspec"],
        ["schedule", "'flowspec'", "grows trees", "spd or pipedec or ppsd"],
    ),
    ("inference", [*RUN, "--prompt", " \n"], ["--prompt", "' \\n'", "give at least one word"]),
    ("inference", [*RUN, "--prompt", "hi " * 600], ["prompt", "tokens", "512", "shorten it"]),
    (
        "inference",
        [*RUN, *INFERENCE, "--temperature", "1e-320"],
        ["'1e-320' is", "give 0 (greedy)"],
    ),
    (
        "inference",
        ["--target", "{target}", "--draft", "ngram", *INFERENCE, "--draft-dtype", "int8"],
        ["--draft-dtype: int8", "give --checkpoint or --draft-model"],
    ),
    ("eval", ["--target", "t", "--draft", "ngram", *EVAL, "--draft-dtype", "int4"], ["int4, but"]),
    ("inference", [*RUN, *INFERENCE, "--trace", "t.json"], ["--trace", "'t.json'", "--backend"]),
    ("inference", [*RUN, *INFERENCE, "--backend", "process"], ["--backend", "torchrun"]),
    ("eval", [*RUN, *EVAL, "--seed", "-1"], ["--seed: -1", "give at least 0"]),
    ("inference", [*RUN, *INFERENCE, "--stages", "3"], ["--stages: 3", "give --stages 2"]),
    (
        "inference",
        [*RUN, *INFERENCE, "--boundaries", "0,2,4,4"],
        ["--boundaries", "0,2,4,4", "4 twice; leave one out"],
    ),
    ("inference", [*ALONE, *INFERENCE, "--stages", "9"], ["--stages: 9", "choose 1 to 4"]),
    (
        "inference",
        [*RUN, *INFERENCE, "--tree-width", "wide"],
        ["--tree-width", "'wide'", "or auto"],
    ),
    (
        "inference",
        [*RUN, *INFERENCE, "--verifier", "rejection"],
        ["verifier", "'rejection'", "use"],
    ),
    (
        "inference",
        [*RUN, *INFERENCE, "--target", "{other_weights}"],
        ["target", "hash: ", "give that target"],
    ),
    (
        "inference",
        ["--target", "{nowhere}", "--schedule", "autoregressive", *INFERENCE],
        ["target", "nowhere", "give an existing folder"],
    ),
    ("inference", [*WITH_MODEL[2:], *INFERENCE], ["--target", "missing", "--draft-model"]),
    (
        "inference",
        [*RUN, *WITH_MODEL, *INFERENCE],
        ["--draft-model", "not allowed", "--checkpoint"],
    ),
    (
        "inference",
        [*WITH_MODEL[:3], "{other_tokens}", *INFERENCE],
        ["--draft-model", "other_tokens", "another tokenizer", "give a model"],
    ),
    ("inference", [*WITH_MODEL[:3], "{empty}", *INFERENCE], ["--draft-model", "empty", "give a"]),
    (
        "inference",
        [*WITH_MODEL, *INFERENCE, "--schedule", "ssd", "--draft-tokens", "auto"],
        ["--draft-tokens", "'auto'"],
    ),
    ("inference", [*RUN, *INFERENCE, "--step-timeout", "-3"], ["--step-timeout", "'-3'", "above"]),
    # eval (more in test_eval_run)
    ("eval", [*WITH_MODEL[2:], *EVAL], ["--target", "missing", "--draft-model"]),
    ("eval", [*WITH_MODEL, *EVAL, "--accept", "2"], ["accept", "2", "at least 0 and at most 1"]),
    ("eval", EVAL, ["--checkpoint", "missing", "--help"]),
    ("eval", [*RUN, *EVAL, "--stages", "9"], ["--stages", "9", "leave --stages out"]),
    ("eval", [*RUN, *EVAL, "--target", "{other_weights}"], ["target", "hash", "give that target"]),
    ("eval", [*RUN, *EVAL, "--max-new-tokens", "500"], ["--max-new-tokens", "500", "lower it"]),
    ("eval", [*RUN, *EVAL, "--out", "{a_file}"], ["--out", "a_file", "give another folder"]),
    # models
    ("models", [], ["command", "missing", "--help"]),
    ("models", ["pull"], ["command", "'pull'", "push"]),
    ("models", ["push", *RUN], ["--repo", "missing", "--help"]),
    ("models", ["push", *RUN, "--repo", "a/b", "--out", "{up}"], ["--out", "up", "--dry-run"]),
    # data
    ("data_recipes", [], ["tokenizer", "data.sources", "missing"]),
    (
        "data_recipes",
        ["--data.sources", '[{"pth": "x"}]', "--tokenizer", "x", "--out", "x"],
        ["--data.sources", "'pth'", "did you mean 'path'?"],
    ),
    ("data_recipes", ["--config", "/nowhere.yaml"], ["config", "/nowhere.yaml"]),
]


def shown(case: tuple[str, list[str], list[str]]) -> str:
    return " ".join([case[0], *case[1]])[:60]


@pytest.mark.parametrize("case", CASES, ids=shown)
def test_bad_input_is_one_line_with_field_value_and_fix(case, place, monkeypatch, capfd):
    command, arguments, words = case
    monkeypatch.chdir(place.folder)
    status = call(command, [place.fill(part) for part in arguments], monkeypatch)
    assert_one_line(status, *capfd.readouterr(), words)


TRAIN_CASES: list[tuple[dict[str, object], list[str]]] = [
    ({"target": None}, ["target", "missing", "name the folder"]),
    ({"target": "/nowhere/t"}, ["target", "'/nowhere/t'", "give an existing folder"]),
    ({"target": "{empty}"}, ["tokenizer", "empty", "give a folder"]),
    ({"model__num_stages": 9}, ["num_stages", "9", "choose 1 to 4"]),
    ({"model__boundaries": "[0, 9, 4]"}, ["boundaries", "(0, 9, 4)", "from 0 to 4"]),
    ({"model__boundaries": "[0, 1, 2, 4]"}, ["model.boundaries", "3 stages", "give 3 numbers"]),
    ({"model__num_stages": 0}, ["model.num_stages", "0", "at least 1"]),
    ({"model__draft_vocab_size": 999}, ["model.draft_vocab_size", "999", "leave it out"]),
    ({"batch_tokens": 9}, ["batch_tokens", "9", "raise it"]),
    ({"data__sources": '[{"path": "/no.jsonl"}]'}, ["sources.path", "'/no.jsonl'", "give an"]),
    ({"config": "{a_file}", "method": None}, ["--config", "a_file", "see configs/"]),
    ({"output_dir": "{a_file}"}, ["output_dir", "a_file", "give another folder"]),
    (
        {"output_dir": "{run}", "model__num_layers": 2},
        ["--model.num_layers", "1 then, 2 now", "step-0000002", "--output_dir"],
    ),
    ({"output_dir": "{run}", "resume": "false"}, ["resume", "false", "--resume true"]),
]


@pytest.mark.parametrize("case", TRAIN_CASES, ids=lambda case: " ".join(map(str, case[0].items())))
def test_bad_training_input_is_one_line_with_field_value_and_fix(
    case, place, monkeypatch, capfd, tmp_path
):
    changes, words = case
    arguments = place.world.arguments("spd", tmp_path / "out", **changes)
    status = call("train", [place.fill(argument) for argument in arguments], monkeypatch)
    assert_one_line(status, *capfd.readouterr(), words)
    assert not list(tmp_path.glob("out/checkpoints"))


def test_damaged_rows_are_bad_input_with_their_counts(place, tmp_path, monkeypatch, capfd):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": []}\n{"text": "no turns"}\nnot JSON\n')
    changes = {"data__sources": json.dumps([{"path": str(rows)}])}
    status = call("train", place.world.arguments("spd", tmp_path / "out", **changes), monkeypatch)
    words = ["data.sources", "none of 3 rows is usable", "not valid JSON", "fix the rows"]
    assert_one_line(status, *capfd.readouterr(), words)


def test_the_traceback_of_bad_input_can_be_asked_for(place, monkeypatch):
    monkeypatch.setenv("PIPEDRAFT_TRACEBACK", "1")
    with pytest.raises(ValueError, match="--prompt"):
        call("inference", [place.fill(part) for part in [*RUN, "--prompt", ""]], monkeypatch)


def test_a_failure_of_the_program_is_not_called_bad_input(place, monkeypatch, capfd):
    def fails(*args, **kwargs):
        raise RuntimeError("a defect")

    monkeypatch.setattr("pipedraft.inference.engine.Engine.decode", fails)
    with pytest.raises(RuntimeError, match="a defect"):
        call("inference", [place.fill(part) for part in [*RUN, *INFERENCE]], monkeypatch)
    assert "error:" not in capfd.readouterr().err


def test_the_example_of_the_upload_works_as_written(place, tmp_path, monkeypatch, capfd):
    """--dry-run needs no --out; the training state stays local."""
    monkeypatch.chdir(tmp_path)
    arguments = ["push", *RUN, "--repo", "user/name", "--dry-run"]
    assert call("models", [place.fill(part) for part in arguments], monkeypatch) == 0
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    names = ("README.md", "config.json", "model.safetensors")
    shown = {f"out/upload/user/name/{name}" for name in names}
    assert files == shown
    assert sorted(capfd.readouterr().out.split()) == sorted(shown)


def test_a_language_model_drafts_and_is_evaluated(place, tmp_path, monkeypatch, capfd):
    arguments = [place.fill(part) for part in WITH_MODEL]
    budget = ["--draft-tokens", "auto", "--cost", "h100"]
    decode = [*arguments, *INFERENCE, "--stages", "2", *budget]
    assert call("inference", decode, monkeypatch) == 0
    pipelined = capfd.readouterr()
    assert pipelined.err.startswith("[pipeinfer, n = 2] 3 tokens after the first")
    plain = [place.fill(part) for part in [*ALONE, *INFERENCE, "--quiet"]]
    assert call("inference", plain, monkeypatch) == 0
    assert capfd.readouterr().out == pipelined.out
    options = ["--schedule", "pipeinfer,eagle", "--tree", "chain:2", "--draft-tokens", "2"]
    evaluate = [place.fill(part) for part in EVAL] + options
    evaluate[evaluate.index("--out") + 1] = str(tmp_path)
    assert call("eval", [*arguments, *evaluate], monkeypatch) == 0
    results = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert [(r["method"], r["tree"]) for r in results] == [
        ("autoregressive", None),
        ("draft model: pipeinfer", "micro-batch:2"),
        ("draft model: eagle", "chain:2"),
    ]
    assert all(r["lossless"] == {"checked": 1, "mismatches": 0} for r in results)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["draft_model"]["name"] == place.fill("{other_weights}")
    assert manifest["checkpoints"] == {}


# -- real processes -------------------------------------------------------------------------


def run_module(*words: str, stdin: str = "") -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, capture_output=True, text=True, input=stdin, timeout=500)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["pipedraft.inference"], ["--prompt", "missing"]),
        (["pipedraft", "inference", "--prompt", "-"], ["--prompt", "''", "at least one word"]),
        (["pipedraft.models", "push", "--repo", "a/b"], ["--checkpoint", "missing"]),
        (["pipedraft.eval", "--limt", "3"], ["--limt", "did you mean --limit?"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_process_ends_with_status_two_and_one_line(words, expected):
    done = run_module(*words)
    assert_one_line(done.returncode, done.stdout, done.stderr, expected)


@pytest.mark.parametrize("is_forked", [True, pytest.param(False, marks=pytest.mark.all)])
def test_a_training_process_that_has_read_its_data_still_prints_one_line(
    is_forked, place, parent, tmp_path
):
    """Warnings and progress bars from libraries would show here."""
    changes = {"batch_tokens": 9, "data__cache_dir": tmp_path / "cache"}
    arguments = place.world.arguments("spd", tmp_path / "out", **changes)
    if is_forked:
        end = Process.start(parent, tmp_path, *arguments, module="pipedraft.train").finish()
    else:
        done = run_module("pipedraft.train", *arguments)
        end = done.returncode, done.stdout, done.stderr
    assert_one_line(*end, ["batch_tokens", "9", "raise it"])
    assert os.listdir(tmp_path / "cache")


# -- streaming ------------------------------------------------------------------------------


class ByteTokenizer:
    def decode(self, ids, skip_special_tokens):
        return bytes(ids).decode("utf-8", "replace")


@pytest.mark.parametrize("kind", [EvalOptions, ServeOptions])
def test_the_short_help_is_short(kind):
    short, whole = (kind.parser(is_short=one).format_help() for one in (True, False))
    assert len(short.splitlines()) < 75 and "--help-all" in short
    options, rare = short.partition("example:")[0], [x.replace("_", "-") for x in kind.RARE]
    assert rare and all(f"--{name}" in whole and f"  --{name} " not in options for name in rare)


@pytest.mark.parametrize("text", ["plain", "naïve € 😀 end", "ends with 😀", "a\n\nb"])
def test_the_stream_prints_whole_characters_only_and_all_of_them(text, capsys):
    stream, ids = PrintedAnswer(ByteTokenizer(), None), list(text.encode())
    printed = ""
    for token in ids:
        stream(token)
        printed += capsys.readouterr().out
        assert text.startswith(printed)
    stream.finish_line()
    assert printed + capsys.readouterr().out == text + "\n"


def test_a_character_that_the_terminal_lacks_does_not_end_the_text(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    run_command(lambda: print("a × b"))
    assert sys.stdout.buffer.getvalue() == b"a ? b\n"


def test_a_token_costs_the_same_however_long_the_text_is():
    sizes = []

    class Counting(ByteTokenizer):
        def decode(self, ids, skip_special_tokens):
            sizes.append(len(ids))
            return super().decode(ids, skip_special_tokens)

    stream = PrintedAnswer(Counting(), None)
    for token in "naïve € 😀 end ".encode() * 200:
        stream.add(token)
    assert max(sizes) < 100


def test_random_tokens_stream_to_their_decoded_text(capsys):
    generator = torch.Generator().manual_seed(0)
    for length in [40] * 50 + [600] * 5:  # longer than the decoded window
        ids = torch.randint(0, 256, (length,), generator=generator).tolist()
        stream = PrintedAnswer(ByteTokenizer(), None)
        for token in ids:
            stream(token)
        text = ByteTokenizer().decode(ids, True)
        stream.finish_line()
        assert capsys.readouterr().out == text + "\n"
