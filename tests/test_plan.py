"""What --plan says, against the networks and runs themselves."""

import sys

import pytest
import torch
from train_runs import World

from pipedraft.errors import run_command
from pipedraft.train.__main__ import main, methods, registry, take_plan
from pipedraft.train.config import parse_run
from pipedraft.train.log import flop_counter
from pipedraft.train.plan import NARROW_SEQUENCES, Plan, all_counted, kept_bytes

TOKENS = (64, 192)


def sizes_and_trainer(world: World, method: str, folder, **changes):
    changes = {"data__max_length": 192, **changes}
    run, model, _ = parse_run(world.arguments(method, folder, **changes), methods(), "")
    plan = Plan(run, model, registry()[method][1])
    changes["precision"] = "fp32"  # one accelerator a process
    return plan, plan.measure(), world.trainer(method, folder, **changes)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("method", ["spd", "ppsd", "eagle", "eagle3", "flexspec"])
def test_counts_and_kept_bytes_are_those_of_the_real_network(world, tmp_path, method, precision):
    _, sizes, trainer = sizes_and_trainer(world, method, tmp_path, precision=precision)
    objective = trainer.objective
    target = list(objective.target.parameters())
    assert sizes.target_layers + sizes.target_ends == sum(p.numel() for p in target)
    assert sizes.trained == trainer.num_trainable
    kept = [kept_bytes(objective, all_counted(n), precision) for n in TOKENS]
    per_token = (kept[1] - kept[0]) / (TOKENS[1] - TOKENS[0])
    assert sizes.kept_bytes == pytest.approx(per_token, rel=0.15)
    batch = all_counted(192, NARROW_SEQUENCES)
    with flop_counter() as counter:
        objective(batch, torch.Generator().manual_seed(0)).loss.backward()
    counted = counter.get_total_flops() / batch["input_ids"].numel()
    assert sizes.flops == pytest.approx(counted, rel=0.05)


def test_checkpointing_is_seen(world, tmp_path):
    plain, less = (
        sizes_and_trainer(world, "eagle3", tmp_path / str(on), checkpointing=on)[1].kept_bytes
        for on in (False, True)
    )
    assert less < 0.7 * plain


def test_what_is_shared_among_processes(world, tmp_path):
    plan, sizes, _ = sizes_and_trainer(
        world, "spd", tmp_path, shard_target=True, target_dtype="fp32"
    )

    def parts(strategy: str, processes: int = 4) -> dict[str, float]:
        return plan.memory_bytes(sizes, processes=processes, strategy=strategy)

    whole, zero2, zero3 = parts("ddp"), parts("zero2"), parts("fsdp2, zero3")
    assert whole["optimizer"] == 8 * sizes.trained == 4 * zero2["optimizer"]
    assert whole["draft"] == 4 * sizes.draft == zero2["draft"] == 4 * zero3["draft"]
    assert whole["batch"] == zero3["batch"]
    assert parts("ddp", 1)["target"] - whole["target"] == 3 * sizes.target_layers


def test_the_command_says_it_and_starts_nothing(world, tmp_path, monkeypatch, capsys):
    arguments = world.arguments("spd", tmp_path / "out", peak_tflops=100, max_steps=10)
    monkeypatch.setattr(sys, "argv", ["train", "--plan", *arguments])
    main()
    said = capsys.readouterr().out
    for words in ("tokens/s on each device", "zero2", "bf16", "59 training rows", "10 steps"):
        assert words in said
    assert not (tmp_path / "out").exists()


def test_a_plan_that_cannot_be_made_says_why(world, tmp_path, monkeypatch, capsys):
    assert take_plan(["--plan", "a.yaml", "--x", "1"]) == (["--config", "a.yaml", "--x", "1"], True)
    monkeypatch.setattr(sys, "argv", ["train", "--plan", "--method", "language_model"])
    for method, changes, word in (
        ("language_model", {}, "--plan"),
        ("spd", {"target": str(tmp_path)}, "config.json"),
    ):
        arguments = world.arguments(method, tmp_path / "out", **changes)
        monkeypatch.setattr(sys, "argv", ["train", *arguments, "--plan"])
        with pytest.raises(SystemExit) as ended:
            run_command(main)
        assert ended.value.code == 2
        assert word in capsys.readouterr().err
