"""The plan's memory against the peak of whole steps, target included, on tensors without numbers.

A dense target and its draft of real width run a training step (forward, backward, buckets of
DDP, AdamW) and an evaluation; every storage that an operation makes is counted while it exists.

    python benchmarks/plan_peaks.py --json      # last line {"largest_error": ..}

CPU only; the whole table takes about half an hour, --tokens 2048 --vocabularies 32000 a minute.
"""

import argparse
import json
import tempfile

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from pipedraft.train.__main__ import methods, registry
from pipedraft.train.config import parse_run
from pipedraft.train.objective import DraftObjective
from pipedraft.train.plan import LiveBytes, Plan, all_counted

PROCESSES = 2
OPTIONS = {
    "eagle3": [],
    "spd": ["--model.num_stages=4", "--model.num_layers=4"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", nargs="+", default=list(OPTIONS), choices=list(OPTIONS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048, 8192, 32_768])
    parser.add_argument("--vocabularies", nargs="+", type=int, default=[32_000, 128_256, 248_320])
    parser.add_argument("--hidden_size", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    print("| method | T | V | step, plan | step, counted | evaluation, plan | counted |")
    print("|---|---|---|---|---|---|---|")
    largest = 0.0
    for method in options.methods:
        for vocab_size in options.vocabularies:
            for tokens in options.tokens:
                target = LlamaConfig(
                    vocab_size=vocab_size,
                    hidden_size=options.hidden_size,
                    intermediate_size=options.hidden_size * 7 // 2,
                    num_hidden_layers=options.layers,
                    num_attention_heads=options.hidden_size // 128,
                    num_key_value_heads=max(1, options.hidden_size // 512),
                    max_position_embeddings=131_072,
                    dtype=torch.bfloat16,
                )
                pairs = compare(method, target, tokens)
                cells = [f"{value / 2**30:.2f}" for pair in pairs for value in pair]
                print(f"| {method} | {tokens:,} | {vocab_size:,} | {' | '.join(cells)} |")
                largest = max(largest, *(abs(plan / found - 1) for plan, found in pairs))
    if options.json:
        print(json.dumps({"largest_error": round(largest, 4)}))


def compare(method: str, target: LlamaConfig, tokens: int) -> list[tuple[float, float]]:
    """Bytes of a process of two under DDP, (plan, counted): of a training step, an evaluation."""
    plan = make_plan(method, target, tokens, tokens, OPTIONS[method])
    sizes = plan.measure()
    parts = plan.memory_bytes(sizes, processes=PROCESSES, strategy="ddp")
    # Buckets stay through an evaluation, gradients do not.
    weights = parts["target"] + parts["draft"] + parts["optimizer"]
    buckets = 4.0 * sizes.trained
    counted = count(plan, target, tokens)
    return [
        (weights + buckets + sizes.step_bytes, counted[0]),
        (weights + buckets + sizes.evaluation_bytes, counted[1]),
    ]


def make_plan(
    method: str, target: PreTrainedConfig, tokens: int, batch_tokens: int, options: list[str]
) -> Plan:
    """Of sequences of so many tokens and batches of so many, in bfloat16."""
    with tempfile.TemporaryDirectory() as folder:
        target.save_pretrained(folder)
        arguments = [f"--method={method}", f"--target={folder}", f"--output_dir={folder}/out"]
        arguments += [f"--data.max_length={tokens}", f"--batch_tokens={batch_tokens}"]
        arguments += ["--precision=bf16", "--data.sources=[{path: none}]", *options]
        run, model, _ = parse_run(arguments, methods(), "")
        return Plan(run, model, registry()[method][1])


def count(plan: Plan, config: LlamaConfig, tokens: int) -> tuple[float, float]:
    """Peaks of the real objective and its target: the second step, then an evaluation."""
    memory = LiveBytes()
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    objective = plan.make_objective(target.eval().requires_grad_(False), memory)
    del objective.hidden  # the class's own: the target runs
    held = bytes_of(objective) + bytes_of(target)
    parameters = [p for p in objective.parameters() if p.requires_grad]
    # Foreach kernels would make temporaries that the fused one, which runs train, does not.
    optimizer = torch.optim.AdamW(parameters, fused=True)
    batch, generator = all_counted(tokens), torch.Generator()
    autocast = torch.autocast("cpu", torch.bfloat16)
    with memory:
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
            for options in objective.eval().evaluation_passes():
                objective(batch, generator, **options)
    return held + step, held + memory.peak


def bytes_of(network: nn.Module | DraftObjective) -> int:
    """Of its parameters, each once; buffers are small."""
    return sum(p.nbytes for p in network.parameters())


if __name__ == "__main__":
    main()
