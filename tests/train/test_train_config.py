"""Training configuration: layers, overrides, types, and error messages."""

from pathlib import Path

import pytest
import yaml
from tiny_models import REPOSITORY

from pipedraft.data_recipes.config import Source
from pipedraft.errors import UsageError
from pipedraft.train.config import EvaluationConfig, parse_run
from pipedraft.train.methods import methods


def parse(*arguments: str):
    return parse_run(arguments, methods(), "")


def layer(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


@pytest.fixture
def base(tmp_path) -> str:
    return layer(
        tmp_path,
        "base.yaml",
        "method: spd\noutput_dir: out/x\ntarget: some/where\n"
        "data: {sources: [{path: a.jsonl}], max_length: 128}\n"
        "model: {num_stages: 8}\noptim: {lr: 1e-3, betas: [0.8, 0.9]}\n",
    )


def test_layers_override_each_other_and_flags_override_layers(base, tmp_path):
    second = layer(tmp_path, "second.yaml", "optim: {lr: 5e-4}\nmodel: {num_layers: 3}\n")
    run, model, _ = parse("--config", base, "--config", second, "--optim.clip_norm", "2")
    assert (run.optim.lr, run.optim.betas, run.optim.clip_norm) == (5e-4, (0.8, 0.9), 2.0)
    assert (model.num_stages, model.num_layers, run.data.max_length) == (8, 3, 128)
    run, model, _ = parse(f"--config={base}", "--optim.lr=3e-4", "--model.num_stages=4")
    assert (run.optim.lr, model.num_stages, run.target) == (3e-4, 4, "some/where")


@pytest.mark.parametrize("is_one_word", [False, True])
def test_later_sources_replace_earlier_ones(base, tmp_path, is_one_word):
    """Those of the command line, or of a later file."""
    early = "data: {sources: [{path: a, kind: text, text_field: body, max_rows: 3}]}"
    late = layer(tmp_path, "late", "data: {sources: [{path: own.jsonl}]}")
    files = [f"--config={path}" for path in (base, layer(tmp_path, "early", early))]
    name, value = "--data.sources", '[{"path": "own.jsonl"}]'
    words = [f"{name}={value}"] if is_one_word else [name, value]
    for more in (words, [f"--config={late}"]):
        run, _, _ = parse(*files, *more)
        assert run.data.sources == [Source(path="own.jsonl")]


def test_the_resolved_configuration_reads_back_as_the_same_run(base, tmp_path):
    run, model, resolved = parse("--config", base, "--optim.name", "muon")
    again = parse("--config", layer(tmp_path, "resolved.yaml", resolved))
    assert again[:2] == (run, model)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--optim.lrr", "1"], ["optim.lrr", "unknown", "optim.lr"]),
        (["--batch_token", "1"], ["batch_token:", "unknown", "batch_tokens"]),
        (["--model.stages", "1"], ["model.stages", "unknown", "model.num_stages"]),
        (["--max_steps", "ten"], ["max_steps", "ten", "whole number"]),
        (["--optim.lr", "fast"], ["optim.lr", "fast", "is not a number"]),
        (["--optim.schedule", "liner"], ["optim.schedule", "liner", "'linear'"]),
        (["--model.loss", "mse"], ["model.loss", "mse", "kl, tv", "lk_hybrid"]),
        (["--model.full_probability", "5"], ["model.full_probability", "5", "at most 1"]),
        (["--batch_tokens", "0"], ["batch_tokens", "0", "at least 1"]),
        (["--max_steps", "0"], ["max_steps", "0", "leave it out"]),
        (["--evaluation.patience", "-1"], ["evaluation.patience", "-1", "0 switches it off"]),
        (
            ["--evaluation.patience", "2", "--evaluation.every_steps", "0"],
            ["evaluation.patience", "2", "every_steps"],
        ),
        (["--data.max_length", "1"], ["data.max_length", "1", "at least 2"]),
        (["--method", "sdp"], ["method", "'sdp'", "did you mean 'spd'"]),
    ],
)
def test_bad_settings_are_refused_with_field_value_and_fix(base, arguments, words):
    with pytest.raises(UsageError) as caught:
        parse("--config", base, *arguments)
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: {num_stage: 4}", ["model.num_stage:", "unknown", "model.num_stages"]),
        (
            "data: {sources: [{pat: x}]}",
            ["data.sources:", "'pat' is unknown", "'path'?"],
        ),
        ("model: {hidden_size: 4}", ["model.hidden_size", "unknown"]),  # another method's key
        ("- a list", ["--config", "holds no mapping"]),
        ("a: [1", ["--config", "not valid YAML"]),
        ("method: other", ["method", "'other'", "give one of spd, ppsd"]),
        ("modle: {}", ["modle: unknown"]),
        ("optim: {lr: null}", ["optim.lr: null", "leave it out"]),
        ("model: {num_stages: null}", ["model.num_stages: null"]),
        ("data: {max_length: null}", ["data.max_length: null"]),
        ("model: 0.5", ["model: 0.5", "give a mapping"]),
    ],
)
def test_bad_files_are_refused_with_field_value_and_fix(base, tmp_path, text, words):
    with pytest.raises(UsageError) as caught:
        parse("--config", base, "--config", layer(tmp_path, "bad.yaml", text))
    for word in words:
        assert word in str(caught.value)


def test_the_configuration_can_be_printed_instead_of_used(base, capsys):
    with pytest.raises(SystemExit) as stop:
        parse("--config", base, "--optim.lr", "3e-4", "--print_config")
    assert stop.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["optim"]["lr"] == 3e-4 and printed["model"]["num_stages"] == 8


@pytest.mark.parametrize(
    ("arguments", "shown", "absent"),
    [
        ([], "--model.num_stages", "--model.noise"),
        (["--method", "eagle"], "--model.noise", "--model.num_stages"),
        (["--method=dflash"], "--model.block_size", "--model.num_stages"),
    ],
    ids=str,
)
def test_help_shows_the_options_of_the_named_method(arguments, shown, absent, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(*arguments, "--help")
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert shown in text and absent not in text
    assert "dflash" in text and "eagle" in text


def test_missing_settings_are_named(tmp_path):
    for arguments, name in (
        ([], "method"),
        (["--method", "spd"], "output_dir"),
        (["--method", "spd", "--output_dir", "x"], "data.sources"),
        (["--config", str(tmp_path / "absent.yaml")], "absent.yaml"),
    ):
        with pytest.raises(UsageError, match=name):
            parse(*arguments)


SHIPPED = [
    p
    for folder in ("spd", "ppsd", "eagle", "dflash", "dspark", "mtp", "flexspec")
    for p in (REPOSITORY / "configs" / folder).iterdir()
]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_shipped_configuration_parses(path):
    run, model, resolved = parse("--config", str(path))
    assert isinstance(model, methods()[run.method])
    assert yaml.safe_load(resolved)["method"] == run.method


def test_hyphens_and_out_are_other_spellings(base):
    given = ("--max_steps", "5", "--data.valid_fraction=0", "--output_dir", "out/y")
    other = ("--max-steps", "5", "--data.valid-fraction=0", "--out", "out/y")
    assert parse("--config", base, *given) == parse("--config", base, *other)
    assert parse("--config", base, "--model.num-layers=3")[1].num_layers == 3


@pytest.mark.parametrize("flag", ["--data", "--data.sources"])
def test_a_bare_file_is_a_source(base, flag, tmp_path):
    comma = tmp_path / "a,b.jsonl"
    comma.touch()
    paths = {
        "chats.jsonl": ["chats.jsonl"],
        "a.json, user/name": ["a.json", "user/name"],
        str(comma): [str(comma)],
        '[{"path": "a b.parquet"}]': ["a b.parquet"],
    }
    for text, expected in paths.items():
        for words in ([flag, text], [f"{flag}={text}"]):
            if flag == "--data" and text[0] == "[":
                continue
            run, _, _ = parse("--config", base, *words, "--data.seed", "3")
            assert [source.path for source in run.data.sources] == expected
            assert (run.data.seed, run.data.max_length) == (3, 128)


def test_a_yaml_file_for_data_is_its_section(base, tmp_path):
    section = layer(tmp_path, "section.yaml", "sources: [{path: b.jsonl}]\nmax_length: 9\n")
    run, _, _ = parse("--config", base, "--data", section)
    assert ([s.path for s in run.data.sources], run.data.max_length) == (["b.jsonl"], 9)


@pytest.mark.parametrize(
    "words, message",
    [
        (["--confg", "x.yaml"], "--confg: unknown; did you mean --config?"),
        (["--method", "spd", "--max-stps", "3"], "--max-stps: unknown; did you mean --max_steps?"),
        (["--method", "spd", "--model.num_layrs", "3"], "did you mean --model.num_layers?"),
        (["--method", "spd", "--precision", "bf61"], "'bf61' is unknown; did you mean 'bf16'?"),
        (["--method", "spd", "--learning_rate", "1"], "did you mean --optim.lr?"),
        (["--method", "spd", "--model", "x/y"], "--model: 'x/y' is no YAML file"),
        (["--method", "spd", "--optim", "adamw"], "give one, or --optim.KEY VALUE (see --help)"),
        (["--method", "spd", "--num-epochs", "1"], "did you mean --epochs?"),
        (["--seed", "1"], "method: missing; give --config FILE or --method"),
    ],
)
def test_a_misspelled_option_is_named_before_a_missing_one(words, message):
    with pytest.raises(UsageError) as raised:
        parse(*words)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "every, num_steps, steps, words",
    [
        (1000, 600, [300], "after 300 steps and at the end"),
        (600, 600, [300], "after 300 steps and at the end"),
        (200, 600, [200, 400, 600], "every 200 steps"),
        (200, 49, [], "every 200 steps"),
        (0, 600, [], "at the end"),
    ],
)
def test_a_run_too_short_for_its_evaluations_has_one_in_the_middle(every, num_steps, steps, words):
    evaluation = EvaluationConfig(every_steps=every)
    due = [step for step in range(1, num_steps + 1) if evaluation.is_due(step, num_steps)]
    assert due == steps and evaluation.when(num_steps) == words
