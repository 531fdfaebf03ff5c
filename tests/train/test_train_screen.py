"""A run's screen output, and acceptance measured by decoding."""

import json
import random
from contextlib import nullcontext

import pytest
import torch
from train_runs import assert_equal_weights, logged, train, weights

from pipedraft.inference.custom_generate import NoText
from pipedraft.inference.engine import Engine
from pipedraft.models import load_draft
from pipedraft.train import loop
from pipedraft.train.decoding import (
    DECODED_LENGTH,
    DECODED_TAU,
    decode_config,
    first_turns,
)

DECODED = {
    "evaluation__decode_prompts": 3,
    "evaluation__every_steps": 1,
    "max_steps": 2,
    "data__valid_fraction": 0.3,
}


def test_a_run_says_what_it_does_a_row_each_log_step_and_what_is_next(
    world, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "out"
    train(world.arguments("eagle3", out, **DECODED, log_every_steps=2), monkeypatch)
    screen = capsys.readouterr()
    lines = screen.err.splitlines()
    assert screen.out == ""
    (start,) = [at for at, line in enumerate(lines) if line.startswith("train eagle3 (pip")]
    assert " M parameters, for " in lines[start] and lines[start].endswith(
        "on cpu x 1, single, fp32"
    )
    assert lines[start + 1].startswith(
        "2 steps of 256 tokens (accumulation 1), adamw, lr 0.003; evaluated every 1"
    )
    assert lines[start + 1].endswith(" held-out rows, 3 prompts decoded")
    assert lines[start + 2] == f"into {out}: metrics.jsonl, best/, checkpoints/"
    head = [line.split() for line in lines].index(
        ["step", "loss", "accepted", "lr", "tokens/s", "left"]
    )
    assert lines[head + 1].split()[0] == "2" and lines[head + 1].split()[-1] == "00:00"
    held_out = [line for line in lines if "held out: " in line]
    assert len(held_out) == 2 and "teacher-forced), decoded L' " in held_out[0]
    best, following, _ = lines[-3:]
    assert best.startswith("best: step ") and best.endswith(f": {out / 'best'}")
    assert following.startswith(f"next: pipedraft eval --checkpoint {out} ")


@pytest.mark.parametrize("method", ["spd", "eagle3", "flexspec"])
def test_decoding_measures_the_head_and_disturbs_nothing(method, world, tmp_path):
    """The figures equal the saved head's, and the run is the same without them."""
    runs = {}
    for name, count in (("with", 3), ("without", 0)):
        changes = DECODED | {"evaluation__decode_prompts": count}
        changes["evaluation__best_by"] = "expected"  # the same score in both runs
        runs[name] = world.trainer(method, tmp_path / name, **changes)
        runs[name].run()
    assert_equal_weights(*(weights(tmp_path / name / "best") for name in runs))
    ours, plain = (logged(tmp_path / name) for name in runs)
    decoded = ("valid/decoded_acceptance_length", "valid/decoded_equivalent_acceptance_length")
    assert [{k: v for k, v in entry.items() if k not in decoded} for entry in ours] == plain

    trainer = runs["with"]
    last = json.loads((tmp_path / "with" / "metrics.jsonl").read_text().splitlines()[-1])
    target = trainer.objective.target
    newest = max((tmp_path / "with" / "checkpoints").iterdir())
    draft = load_draft(str(newest), target)
    config = decode_config(draft, trainer.objective.num_steps)
    engine = Engine(target, NoText(), config, draft)
    assert len(trainer.prompts) == 3
    results = [engine.decode(ids) for ids in trainer.prompts]
    rounds = [length for result in results for length in result.round_lengths]
    assert last[decoded[0]] == sum(rounds) / len(rounds) >= 1
    tokens, steps = (sum(getattr(r, x) for r in results) for x in ("num_tokens", "num_steps"))
    assert last[decoded[1]] == config.num_stages * tokens / steps


@pytest.mark.parametrize("is_mutant", [False, True])
def test_decoding_draws_from_no_global_generator(is_mutant, world, tmp_path, monkeypatch):
    """The mutant builds the decoded copy with the global generator, and is caught."""
    trainer = world.trainer("eagle3", tmp_path, **DECODED)
    if is_mutant:
        monkeypatch.setattr(torch.random, "fork_rng", lambda **_: nullcontext())
    weights = {name: x.clone() for name, x in trainer.module.state_dict().items()}
    metrics, torch_state, python_state = {}, torch.get_rng_state(), random.getstate()
    trainer._add_decoded(metrics, trainer.accelerator.get_state_dict(trainer.module))
    assert metrics["decoded_acceptance_length"] >= 1
    assert torch.equal(torch.get_rng_state(), torch_state) is not is_mutant
    assert random.getstate() == python_state
    assert trainer.module.training and torch.is_grad_enabled()
    assert all(x.equal(weights[name]) for name, x in trainer.module.state_dict().items())


def test_prompts_end_where_the_assistant_begins():
    rows = [
        {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]},
        {"input_ids": [5, 6], "loss_mask": [1, 1]},  # no prompt
        {"input_ids": [9, 8, 7, 6], "loss_mask": [0, 0, 0, 1]},  # too long
        {"input_ids": [3, 2, 1], "loss_mask": [0, 1, 1]},
        {"input_ids": [4, 2, 1], "loss_mask": [0, 1, 1]},
    ]
    assert first_turns(rows, 2, max_positions=34) == [[5, 6], [3]]


@pytest.mark.parametrize(
    ("changes", "score"),
    [
        ({}, "decoded_equivalent_acceptance_length"),
        ({"evaluation__best_by": "decoded"}, "decoded_equivalent_acceptance_length"),
        ({"evaluation__best_by": "expected"}, "acceptance_length_T0"),
        ({"evaluation__decode_prompts": 0}, "acceptance_length_T0"),
    ],
)
def test_best_is_chosen_by_what_is_decoded_where_prompts_are(changes, score, world, tmp_path):
    metrics = world.trainer("eagle3", tmp_path, **DECODED | changes).run()
    assert metrics["score"] == metrics[score]


def test_a_run_whose_decoded_curve_turns_ends_and_keeps_the_best_head(
    world, tmp_path, monkeypatch, capsys
):
    curve = {1: 1.2, 2: 1.5, 3: 1.4, 4: 1.5, 5: 1.3, 6: 1.6, 7: 1.7}
    changes = DECODED | {"max_steps": 7, "save_every_steps": 1, "keep_checkpoints": 7}

    def launch(patience):
        trainer = world.trainer("eagle3", tmp_path, **changes, evaluation__patience=patience)
        figures = lambda *_: {DECODED_TAU: 9.0, DECODED_LENGTH: curve[trainer.progress.step]}  # noqa: E731
        monkeypatch.setattr(loop, "decode", figures)
        trainer.restore()
        capsys.readouterr()
        trainer.run()
        return trainer, capsys.readouterr().err

    for _ in range(2):  # once more, and it stays ended
        trainer, said = launch(2)
        assert (
            "stopped at step 4 of 7: the decoded L' of 3 prompts turned: 1.5000 now, at most "
            "1.5000 in the last 2 evaluations (evaluation.patience); best/ has step 2;"
        ) in said
        assert trainer.stop.status == 0
        best = weights(tmp_path / "best")
        assert_equal_weights(best, weights(tmp_path / "checkpoints" / "step-0000002"))
    trainer, said = launch(4)  # the curve rises again, and the same run goes on
    assert trainer.stop is None and trainer.progress.best_step == 7
    _, said = launch_with_other_prompts(world, tmp_path, changes, capsys)
    assert "best was chosen by another score: the next evaluation writes it anew" in said


def launch_with_other_prompts(world, folder, changes, capsys):
    trainer = world.trainer("eagle3", folder, **changes | {"evaluation__decode_prompts": 2})
    trainer.restore()
    return trainer, capsys.readouterr().err


def test_decoding_that_must_choose_best_needs_prompts(world, tmp_path):
    decoded = {"evaluation__best_by": "decoded"}
    for changes, fix in (
        ({"evaluation__decode_prompts": 0}, "give prompts"),
        ({"data__valid_fraction": 0.0}, "which needs validation rows"),
    ):
        with pytest.raises(ValueError, match=f"evaluation.best_by: 'decoded'.*{fix}"):
            world.trainer("eagle3", tmp_path / "no", **DECODED | decoded | changes)


def test_only_wandb_takes_an_artifact(world, tmp_path):
    with pytest.raises(ValueError, match=r"wandb_artifact: true, but trackers are \[\]"):
        world.trainer("spd", tmp_path, wandb_artifact="true")
