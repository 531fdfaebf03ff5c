"""CPU time and memory of one whole training step of the SPD module, in float32 on one thread.

    python benchmarks/spd_step.py --json
    python benchmarks/spd_step.py --counted 0.4 --n 4 --query all

A step is what the training loop runs: target without gradients, module, distillation on the counted
rows, backward, gradient clipping, AdamW. Every example has all n tokens in flight (the most
expensive occupancy). Two cases, each in its own process: every row counted, and a share of the rows
(those of the assistant). Times are the least CPU time of the repeats; memory is the peak of the
whole process, imports included. The floor is the arithmetic of the step at the rate at which this
core multiplies float32 matrices, measured between the steps.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import LlamaConfig, LlamaForCausalLM

from pipedraft.models.layers import linear
from pipedraft.models.spd import SPDConfig, feature_layers
from pipedraft.train.config import OptimConfig
from pipedraft.train.loop import make_optimizers
from pipedraft.train.spd import SPDObjective, SPDTrainConfig

HEAD_SIZE = 64
# The last one stops the profiler's remarks on stderr.
CHILD_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"}
# (label, what to wrap); an operator counts for the innermost part that it runs in.
PARTS = (
    ("target", "pipedraft.train.spd.capture_hidden"),
    ("decoder layers", "pipedraft.models.spd.SPD.forward"),
    ("feature projections", "pipedraft.models.spd.SPD.feature"),
    ("static keys and values", "pipedraft.models.spd.SPD._static_key_values"),
    ("structural attention", "pipedraft.models.spd.structural_attention"),
    ("LM head and loss", "pipedraft.train.spd.chunked_distillation"),
)
OPTIMIZER = "clipping and AdamW"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--n", type=int, default=8, help="pipeline stages")
    parser.add_argument("--num-layers", type=int, default=2, help="layers of the module (Ls)")
    parser.add_argument("--query", choices=("newest", "all"), default="newest")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=1024, help="positions")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--target-layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=4, help=f"query heads of {HEAD_SIZE}")
    parser.add_argument("--key-heads", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--counted", type=float, default=0.6, help="share of the second case")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--case", type=float, help="measure this share alone, in this process")
    parser.add_argument("--breakdown", action="store_true", help="with --case: profile it too")
    return parser.parse_args()


def build_objective(args: argparse.Namespace) -> SPDObjective:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.target_layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.key_heads,
        head_dim=HEAD_SIZE,
        vocab_size=args.vocabulary,
        max_position_embeddings=args.length,
        tie_word_embeddings=False,
    )
    target = LlamaForCausalLM(config).eval().requires_grad_(False)
    module = SPDTrainConfig(
        num_stages=args.n, num_layers=args.num_layers, query=args.query, full_probability=1.0
    )
    no_data: Any = SimpleNamespace(report=SimpleNamespace(to_dict=dict))
    return SPDObjective(module, target, target_name="random", revision=None, data=no_data)


def make_step(args: argparse.Namespace, counted: float) -> Callable[[], int]:
    """One optimizer step on a fixed batch; returns how many rows were counted."""
    objective = build_objective(args)
    parameters = [p for p in objective.parameters() if p.requires_grad]
    (optimizer,) = make_optimizers(list(objective.named_parameters()), OptimConfig())
    # Turns of 128 positions, each a prompt and an answer.
    answered_T = torch.arange(args.length) % 128 >= 128 * (1 - counted)
    batch = {
        "input_ids": torch.randint(args.vocabulary, (args.batch, args.length)),
        "loss_mask": answered_T.long().expand(args.batch, -1),
    }
    generator = torch.Generator().manual_seed(0)

    def step() -> int:
        output = objective(batch, generator)
        (output.loss / output.count).backward()
        with record_function(OPTIMIZER):
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return int(output.count)

    return step


def seconds(work: Callable[[], Any]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def measure(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    step = make_step(args, args.case)
    num_counted = step()
    rows, weight = torch.randn(2048, 512), torch.randn(512, 512)
    times, onednn, blas = [], [], []
    for _ in range(args.repeats):
        times.append(seconds(step))
        onednn += [seconds(lambda: linear(rows, weight)) for _ in range(3)]
        blas += [seconds(lambda: rows @ weight) for _ in range(3)]
    gigaflop = 2 * rows.numel() * len(weight) / 1e9
    result: dict[str, Any] = {
        "cpu_s": min(times),
        "cpu_s_median": statistics.median(times),
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "counted_rows": num_counted,
        "blas_gflops": gigaflop / min(blas),
        "gemm_gflops": gigaflop / min(*onednn, *blas),
    }
    if args.breakdown:
        result["breakdown"] = breakdown(step)
    return result


def breakdown(step: Callable[[], Any], repeats: int = 5) -> dict[str, float]:
    """Share of each part in the step, its backward included; each part's least of the repeats.

    A backward operator belongs to the part whose forward made it: autograd gives both one number.
    """
    least: dict[str, float] = defaultdict(lambda: float("inf"))
    with ExitStack() as wrapped:
        for label, name in PARTS:
            wrapped.enter_context(patch(name, _labelled(label, resolve_name(name))))
        for _ in range(repeats):
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                step()
            for label, microseconds in _by_part(profiler.events()).items():
                least[label] = min(least[label], microseconds)
    total = sum(least.values())
    return {label: value / total for label, value in least.items()}


def _labelled(label: str, function: Callable) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        with record_function(label):
            return function(*args, **kwargs)

    return call


def _by_part(events: Any) -> dict[str, float]:
    labels = {OPTIMIZER, *(label for label, _ in PARTS)}
    part_of_sequence: dict[int, str] = {}
    times: dict[str, float] = defaultdict(float)

    def part(event: Any) -> str:
        while event is not None:
            if event.name in labels:
                return event.name
            if event.name.startswith("autograd::engine"):
                return part_of_sequence.get(event.sequence_nr, "other")
            event = event.cpu_parent
        return "other"

    for event in events:  # forward first: events come in the order of their start
        name = part(event)
        if event.sequence_nr >= 0 and not event.name.startswith("autograd::engine"):
            part_of_sequence.setdefault(event.sequence_nr, name)
        times[name] += event.self_cpu_time_total
    return times


def gigaflop(args: argparse.Namespace, counted_rows: int) -> dict[str, float]:
    """Products and attention of one step; everything elementwise is left out.

    Causal attention is two products over half a square, its fused backward five. Taps need no
    gradient, so a feature projection has only that of its weight.
    """
    rows, hidden, layers = args.batch * args.length, args.hidden, args.num_layers
    heads, key_heads = args.heads * HEAD_SIZE, args.key_heads * HEAD_SIZE
    key_value = 2 * rows * hidden * 2 * key_heads
    rest = 2 * rows * hidden * (2 * heads + 3 * args.intermediate)
    attention = 2 * rows * args.length * heads
    config = SPDConfig(num_stages=args.n, num_target_layers=args.target_layers)
    pieces = sum(len(chosen) for chosen in feature_layers(config))
    streams = layers if args.query == "newest" else (layers - 1) * (args.n + 1) + 1
    parts = {
        "target": args.target_layers * (key_value + rest + attention),
        "feature projections": 2 * pieces * 2 * rows * hidden * hidden,
        "keys and values": 3 * layers * (args.n + 1) * key_value,
        "other layer projections": 3 * streams * rest,
        "attention": 3.5 * streams * attention,
        "LM heads": 4 * 2 * counted_rows * hidden * args.vocabulary,
    }
    return {name: flop / 1e9 for name, flop in parts.items()}


def measure_apart(case: float, *options: str) -> dict[str, Any]:
    child = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], "--case", str(case), *options],
        env={**os.environ, **CHILD_ENVIRONMENT},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return json.loads(child.stdout)


def main() -> None:
    args = parse_arguments()
    if args.case is not None:
        print(json.dumps(measure(args)))
        return
    every, some = measure_apart(1.0, "--breakdown"), measure_apart(args.counted)
    rate = max(every["gemm_gflops"], some["gemm_gflops"])
    print(f"{'rows':<28}{'least s':>9}{'median s':>9}{'peak MB':>9}{'GFLOP':>9}{'floor s':>9}")
    for name, case in (("all counted", every), (f"{args.counted:.0%} counted", some)):
        case["gflop"] = sum(gigaflop(args, case["counted_rows"]).values())
        case["floor_s"] = case["gflop"] / rate
        case["fraction_of_floor"] = case["floor_s"] / case["cpu_s"]
        print(
            f"{name:<28}{case['cpu_s']:>9.3f}{case['cpu_s_median']:>9.3f}"
            f"{case['peak_rss_mb']:>9.0f}{case['gflop']:>9.1f}{case['floor_s']:>9.3f}"
        )
    print(f"this core multiplies at {rate:.0f} GFLOP/s ({every['blas_gflops']:.0f} by torch.mm)")
    print(f"all counted, GFLOP: {_listed(gigaflop(args, every['counted_rows']), 1)}")
    seconds_of = {name: share * every["cpu_s"] for name, share in every["breakdown"].items()}
    print(f"all counted, s by profiled share: {_listed(seconds_of, 3)}")
    if args.json:
        print(json.dumps(summarize(args, every, some)))


def _listed(values: dict[str, float], digits: int) -> str:
    largest_first = sorted(values.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {value:.{digits}f}" for name, value in largest_first)


def summarize(
    args: argparse.Namespace, every: dict[str, Any], some: dict[str, Any]
) -> dict[str, Any]:
    """The case of all rows at the top level, the other one in `assistant_rows`."""

    def rounded(case: dict[str, Any]) -> dict[str, Any]:
        names = ("cpu_s", "cpu_s_median", "peak_rss_mb", "gflop", "floor_s", "fraction_of_floor")
        figures = {name: round(case[name], 1 if case[name] > 10 else 3) for name in names}
        return {**figures, "counted_rows": case["counted_rows"]}

    return {
        **rounded(every),
        "assistant_rows": rounded(some),
        "gemm_gflops": round(every["gemm_gflops"], 1),
        "blas_gflops": round(every["blas_gflops"], 1),
        "breakdown": {name: round(share, 3) for name, share in every["breakdown"].items()},
        "occupancy": args.n,
        "n": args.n,
        "num_layers": args.num_layers,
        "query": args.query,
        "batch": args.batch,
        "N": args.length,
        "hidden": args.hidden,
        "target_layers": args.target_layers,
        "vocabulary": args.vocabulary,
        "dtype": "float32",
        "threads": 1,
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    main()
