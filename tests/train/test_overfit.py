"""The overfit gate: one conversation, learned by heart and accepted wholly in decoding."""

import re
import sys

import pytest
import torch
from tiny_models import REPOSITORY
from train_runs import train

from pipedraft.endings import run_command
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.custom_generate import NoText
from pipedraft.inference.engine import Engine
from pipedraft.models.target import load_target
from pipedraft.train import overfit
from pipedraft.train.__main__ import main, take_overfit
from pipedraft.train.eagle3 import Eagle3Objective
from pipedraft.train.run import registry

PASSED = re.compile(
    r"overfit-one: (\d+) of \1 draft tokens accepted after (\d+) steps: tau ([\d.]+), L' ([\d.]+), "
    r"loss ([\d.]+) to ([\d.]+), answer of (\d+) tokens\n"
)
CONFIGS = {
    "spd": "spd/tiny_n4",
    "ppsd": "ppsd/tiny_n4",
    "eagle": "eagle/tiny_eagle",
    "eagle3": "eagle/tiny_eagle3",
    "mtp": "mtp/tiny",
    "dflash": "dflash/tiny",
    "dspark": "dspark/tiny",
    "flexspec": "flexspec/tiny",
}


def gate(method, folder, *words: str) -> list[str]:
    config = REPOSITORY / "configs" / f"{CONFIGS[method]}.yaml"
    # As in the small world: a process has one precision.
    return ["--config", str(config), "--output_dir", str(folder), "--precision=fp32", *words]


def failure(arguments: list[str], monkeypatch, capsys) -> tuple[int, str]:
    """Return the command's exit status and its line on stderr."""
    monkeypatch.setattr(sys, "argv", ["train", *arguments])
    with pytest.raises(SystemExit) as ended:
        run_command(main)
    said = capsys.readouterr()
    assert said.out == ""
    return ended.value.code, said.err.strip()


@pytest.mark.parametrize(
    ("method", "words", "share"),
    [
        ("spd", ["--overfit-one=40", "--model.num_layers=1"], 0.1),
        # The fitted start begins close, and some processors pass at its first check.
        ("eagle3", ["--model.num_steps=1", "--overfit-one", "80"], 0.3),
    ],
)
def test_a_head_learns_one_conversation_by_heart(
    method, words, share, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(REPOSITORY)
    train(gate(method, tmp_path / "out", *words), monkeypatch)
    found = PASSED.fullmatch(capsys.readouterr().out)
    assert found
    _, steps, tau, _, first, last, answer = (float(text) for text in found.groups())
    assert steps <= 80 and last < share * first and answer >= overfit.LEAST_TOKENS
    # SPD never restarts. With one draft token, EAGLE's rounds have two tokens.
    assert tau == (answer - 1 if method == "spd" else 2)
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.all
@pytest.mark.parametrize("method", list(registry()))
def test_every_head_passes_with_its_configuration(method, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(REPOSITORY)
    train(gate(method, tmp_path, "--overfit-one"), monkeypatch)
    assert PASSED.fullmatch(capsys.readouterr().out)


def test_a_head_that_does_not_learn_fails_and_names_the_token(world, tmp_path, monkeypatch, capsys):
    arguments = [*world.arguments("eagle3", tmp_path, optim__lr=1e-9), "--overfit-one", "2"]
    status, line = failure(arguments, monkeypatch, capsys)
    assert status == 1
    assert re.search(
        r"only \d+ of \d+ draft tokens accepted after 2 steps: .*; token \d+ of the answer is "
        r"'.*', the head drafted '.*'; the loss hardly falls: give another --optim.lr "
        r"\(now 1e-09\)$",
        line,
    )


@pytest.mark.all
def test_decoding_with_another_head_than_training_is_found(tmp_path, monkeypatch, capsys):
    """The mutant decodes with a final norm that is not the trained one."""
    own = Eagle3Objective.draft_with

    def draft_with(self, weights):
        draft = own(self, weights)
        torch.nn.init.normal_(draft.norm.weight)
        return draft

    monkeypatch.setattr(Eagle3Objective, "draft_with", draft_with)
    monkeypatch.chdir(REPOSITORY)
    arguments = gate("eagle3", tmp_path, "--overfit-one=60", "--model.num_steps=1")
    status, line = failure(arguments, monkeypatch, capsys)
    assert status == 1
    assert "training and decoding differ" in line and "pipedraft eval parity" in line


def test_the_gate_refuses_what_it_cannot_do(world, tmp_path, monkeypatch, capsys):
    arguments = world.arguments("spd", tmp_path)
    for words, line in (
        (["--overfit-one", "chat.yaml"], "--overfit-one: 'chat.yaml' is no number of steps; give"),
        (["--overfit-one=0"], "--overfit-one: '0' is no number of steps; give"),
        (["--features", "x", "--overfit-one"], "--features: 'x' with --overfit-one, which decodes"),
    ):
        status, said = failure([*arguments, *words], monkeypatch, capsys)
        assert status == 2 and said.startswith(f"error: {line}"), said
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, said = failure([*arguments, "--overfit-one"], monkeypatch, capsys)
    assert status == 2 and "num_processes: 2 with --overfit-one, which runs in one" in said


def test_the_flag_takes_a_number_or_none():
    for words, rest, steps in (
        (["--seed", "1"], ["--seed", "1"], None),
        (["--overfit-one", "--seed", "1"], ["--seed", "1"], 400),
        (["--seed", "1", "--overfit_one"], ["--seed", "1"], 400),
        (["--overfit-one", "7", "--seed", "1"], ["--seed", "1"], 7),
        (["--overfit_one=8"], [], 8),
    ):
        assert take_overfit(words) == (rest, steps)


def test_the_answer_is_the_targets_own_and_the_clearest(world, monkeypatch):
    target = load_target(str(world.target))
    prompts = [[5, 6, 7], [8, 9], [3, 4, 5, 6]]
    engine = Engine(target, NoText(), DecodeConfig.of("autoregressive", max_new_tokens=32))
    answers = [engine.decode(ids).token_ids for ids in prompts]
    found = [
        overfit.margin(target, *pair) if len(pair[1]) >= overfit.LEAST_TOKENS else -1.0
        for pair in zip(prompts, answers, strict=True)
    ]
    at = found.index(max(found))
    assert overfit.clearest(target, prompts) == (prompts[at], answers[at])
    monkeypatch.setattr(overfit, "CLEAR", 0.0)
    first = next(i for i, value in enumerate(found) if value >= 0)
    assert overfit.clearest(target, prompts) == (prompts[first], answers[first])
    monkeypatch.setattr(overfit, "LEAST_TOKENS", 33)
    assert overfit.clearest(target, prompts) == ([], [])


def test_a_plan_overfits_nothing(tmp_path, monkeypatch, capsys):
    arguments = gate("spd", tmp_path, "--overfit-one", "--plan")
    status, said = failure(arguments, monkeypatch, capsys)
    assert status == 2 and said.startswith("error: --overfit-one: with --plan")
