"""Estimates from --plan against the networks and runs themselves."""

import sys
from pathlib import Path

import pytest
import torch
from plan_runs import make_plan
from torch import nn
from train_runs import World
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3_5MoeTextConfig,
)

from pipedraft.endings import run_command
from pipedraft.models.speed import causal
from pipedraft.models.speed.cpu import argmax, chunk_bytes, planned_accelerator
from pipedraft.train.__main__ import main
from pipedraft.train.config import parse_run
from pipedraft.train.log import flop_counter
from pipedraft.train.methods import methods
from pipedraft.train.plan import LiveBytes, Plan, all_counted
from pipedraft.train.run import registry

TOKENS, ROWS = 192, 4


def plan_of(world: World, method: str, folder, **changes) -> Plan:
    changes = {"data__max_length": TOKENS, "batch_tokens": TOKENS * ROWS, **changes}
    run, model, _ = parse_run(world.arguments(method, folder, **changes), methods(), "")
    return Plan(run, model, registry()[method])


def counted(objective, precision: str) -> tuple[LiveBytes, LiveBytes, float]:
    """Bytes in a step and in an evaluation, and FLOPs per token, from the networks themselves."""
    batch, generator = all_counted(TOKENS, ROWS), torch.Generator().manual_seed(0)
    step, evaluation = LiveBytes(), LiveBytes()
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
    with step, autocast, flop_counter() as flops:
        objective(batch, generator).loss.backward()
    objective.zero_grad()
    with evaluation, autocast, torch.no_grad():
        objective(batch, generator, **objective.evaluation_options())
    return step, evaluation, flops.get_total_flops() / batch.ids_BT.numel()


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.all), "bf16"])
@pytest.mark.parametrize("method", ["spd", "ppsd", "eagle", "eagle3", "mtp", "dspark", "flexspec"])
def test_parameters_bytes_and_flops_are_those_of_the_real_networks(
    world, tmp_path, monkeypatch, method, precision
):
    # The plan is an accelerator's. On a CPU, blocks of causal attention skip future keys.
    monkeypatch.setattr(causal, "multiplies", lambda *_: False)
    own = {"model__draft_vocab_size": 60} if method in ("eagle3", "ppsd") else {}
    sizes = plan_of(world, method, tmp_path, precision=precision, **own).measure()
    trainer = world.trainer(method, tmp_path, precision="fp32", **own)  # one accelerator a process
    target = list(trainer.objective.target.parameters())
    assert sizes.target_layers + sizes.target_ends == sum(p.numel() for p in target)
    assert sizes.trained == trainer.num_trainable
    step, evaluation, flops = counted(trainer.objective, precision)
    assert sizes.step_bytes == pytest.approx(step.peak, rel=0.15)
    assert sizes.evaluation_bytes == pytest.approx(evaluation.peak, rel=0.15)
    assert sizes.flops == pytest.approx(flops, rel=0.05)


def test_storages_are_counted_while_they_exist():
    with LiveBytes() as memory:
        rows = torch.ones(1000)
        more = rows * 2
        del more
        view = rows[:10]
        kept = rows.double()
    assert (memory.live, memory.peak) == (12_000, 12_000)
    del rows
    assert memory.live == 12_000  # the view holds it
    del view, kept
    assert memory.live == 0


def test_checkpointing_is_seen(world, tmp_path):
    plain, less = (
        plan_of(world, "ppsd", tmp_path / str(on), checkpointing=on).measure().step_bytes
        for on in (False, True)
    )
    assert less < 0.8 * plain


def compare(
    method: str, target: PreTrainedConfig, tokens: int, options: list[str]
) -> list[tuple[float, float]]:
    """(planned, counted) bytes per process, of two under DDP: in a step, and in an evaluation."""
    plan = make_plan(method, target, tokens, tokens, options)
    sizes = plan.measure()
    parts = plan.memory_bytes(sizes, processes=2, strategy="ddp")
    # Buckets stay through an evaluation, gradients do not.
    weights = parts["target"] + parts["draft"] + parts["optimizer"]
    buckets = 4.0 * sizes.trained
    counted = count(plan, target, tokens)
    return [
        (weights + buckets + sizes.step_bytes, counted[0]),
        (weights + buckets + sizes.evaluation_bytes, counted[1]),
    ]


def count(plan: Plan, config: PreTrainedConfig, tokens: int) -> tuple[float, float]:
    """Peaks for the real objective and its target: the second step, then an evaluation."""
    memory = LiveBytes()
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    objective = plan.make_objective(target.eval().requires_grad_(False), memory)
    del objective.hidden  # the class's own: the target runs
    held = bytes_of(objective) + bytes_of(target)
    parameters = [p for p in objective.parameters() if p.requires_grad]
    # Foreach kernels would make temporaries; the fused optimizer, as in train, does not.
    optimizer = torch.optim.AdamW(parameters, fused=True)
    batch, generator = all_counted(tokens), torch.Generator()
    autocast = torch.autocast("cpu", torch.bfloat16)
    with planned_accelerator(), memory:
        buckets = [torch.empty_like(p) for p in parameters]
        for _ in range(2):
            memory.peak = memory.live
            with autocast:
                objective(batch, generator.manual_seed(0)).loss.backward()
            for bucket, parameter in zip(buckets, parameters, strict=True):
                assert parameter.grad is not None
                bucket.copy_(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
        step, memory.peak = memory.peak, memory.live
        with autocast, torch.no_grad():
            objective.eval()(batch, generator, **objective.evaluation_options())
    return held + step, held + memory.peak


def bytes_of(network: nn.Module) -> int:
    """Return the parameters' bytes, each parameter counted once; buffers are small."""
    return sum(p.nbytes for p in network.parameters())


DENSE = {"intermediate_size": 2048}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
EXPERTS |= {"shared_expert_intermediate_size": 128, "head_dim": 128}


@pytest.mark.parametrize(
    ("family", "own", "num_layers"),
    [
        (LlamaConfig, DENSE, 2),
        pytest.param(Qwen3_5MoeTextConfig, EXPERTS, 1, marks=pytest.mark.all),
    ],
)
def test_a_plan_is_near_the_peaks_of_whole_steps(family, own, num_layers):
    """Draft weights, gradients and buckets, the optimizer, and the target's own forward."""
    options = ["--model.num_stages=2", f"--model.num_layers={num_layers}"]
    target = family(
        vocab_size=4000,
        hidden_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        dtype=torch.bfloat16,
        **own,
    )
    for plan, counted in compare("spd", target, 128, options):
        assert plan == pytest.approx(counted, rel=0.15)


def test_what_is_shared_among_processes(world, tmp_path):
    plan = plan_of(world, "spd", tmp_path, shard_target=True, target_dtype="fp32")
    sizes = plan.measure()

    def parts(strategy: str, processes: int = 4) -> dict[str, float]:
        return plan.memory_bytes(sizes, processes=processes, strategy=strategy)

    whole, zero2, zero3 = parts("ddp"), parts("zero2"), parts("fsdp2, zero3")
    assert whole["optimizer"] == 8 * sizes.trained == 4 * zero2["optimizer"]
    assert whole["draft"] == 4 * sizes.draft == zero2["draft"] == 4 * zero3["draft"]
    assert whole["gradients"] == 8 * sizes.trained == 2 * parts("ddp", 1)["gradients"]  # buckets
    assert whole["batch"] + 4 * sizes.trained == zero3["batch"] + zero3["gradients"]
    assert parts("ddp", 1)["target"] - whole["target"] == 3 * sizes.target_layers


def write_empty(folder: Path) -> str:
    (folder / "empty.yaml").write_text("{}")
    return str(folder / "empty.yaml")


def test_the_command_says_it_and_starts_nothing(world, tmp_path, monkeypatch, capsys):
    arguments = world.arguments("spd", tmp_path / "out", peak_tflops=100, max_steps=10)
    monkeypatch.setattr(sys, "argv", ["train", "--plan", write_empty(tmp_path), *arguments])
    main()
    said = capsys.readouterr().out
    for words in ("tokens/s on each device", "zero2", "fp32", "10 steps"):
        assert words in said
    assert not (tmp_path / "out").exists()


def test_parameters_are_printed_before_the_rest_is_known(world, tmp_path, monkeypatch):
    plan = plan_of(world, "spd", tmp_path)
    monkeypatch.setattr(plan, "measure", lambda: pytest.fail("measured"))
    lines = plan.lines()
    assert [next(lines).split()[0] for _ in range(2)] == ["target", "spd"]


def test_a_plan_takes_an_accelerators_chunks():
    """A CPU's would be 64 times as many, and would hide 3 GiB of logits."""
    cpu, logits = torch.device("cpu"), torch.randn(5, 256)
    assert chunk_bytes(1 << 30, cpu) < 1 << 30
    with planned_accelerator():
        assert chunk_bytes(1 << 30, cpu) == 1 << 30
        assert torch.equal(argmax(logits), logits.argmax(-1))
    assert chunk_bytes(1 << 30, cpu) < 1 << 30


def test_a_plan_that_cannot_be_made_says_why(world, tmp_path, monkeypatch, capsys):
    for method, changes, word in (
        ("spd", {"model__num_stages": 0}, "num_stages"),
        ("spd", {"target": str(tmp_path)}, "config.json"),
    ):
        arguments = world.arguments(method, tmp_path / "out", **changes)
        monkeypatch.setattr(sys, "argv", ["train", *arguments, f"--plan={write_empty(tmp_path)}"])
        with pytest.raises(SystemExit) as ended:
            run_command(main)
        assert ended.value.code == 2
        assert word in capsys.readouterr().err
