"""Measure one optimizer step for a draft on a random target, for the step benchmarks.

Two cases run, each in its own process. The first supervises all rows, the second only a share
(--counted), like the assistant's rows. Times are CPU seconds. Memory is the whole process's peak,
imports included. The floor is the time for the step's arithmetic at this core's rate for float32
matrix products, measured between the steps.
"""

import argparse
import json
import resource
import statistics
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from measurement import ProductRate, breakdown, measure_apart, seconds
from torch.profiler import record_function
from transformers import LlamaConfig, LlamaForCausalLM

from pipedraft.train.batch import Batch
from pipedraft.train.config import OptimConfig
from pipedraft.train.loop import make_optimizers

HEAD_SIZE = 64
OPTIMIZER = "clipping and AdamW"
NO_DATA: Any = SimpleNamespace(report=SimpleNamespace(to_dict=dict))


def add_arguments(parser: argparse.ArgumentParser, *, length: int) -> None:
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=length, help="positions")
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


def random_target(args: argparse.Namespace) -> Any:
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
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def make_batch(args: argparse.Namespace, counted: float, length: int) -> Batch:
    """Return turns with 128 positions. In each turn the last share ``counted`` is supervised."""
    answered_T = torch.arange(length) % 128 >= 128 * (1 - counted)
    return Batch(
        ids_BT=torch.randint(args.vocabulary, (args.batch, length)),
        mask_BT=answered_T.expand(args.batch, -1),
        lengths=[length] * args.batch,
    )


def make_step(objective: Any) -> Callable[[Batch], int]:
    """Return a function that runs one optimizer step and returns its supervised row count."""
    parameters = [p for p in objective.parameters() if p.requires_grad]
    (optimizer,) = make_optimizers(list(objective.named_parameters()), OptimConfig())
    generator = torch.Generator().manual_seed(0)

    def step(batch: Batch) -> int:
        output = objective(batch, generator)
        (output.loss / output.counted).backward()
        with record_function(OPTIMIZER):
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return int(output.counted)

    return step


def measure_case(
    args: argparse.Namespace, objective: Any, parts: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    """Measure the case given by --case, in this process."""
    torch.set_num_threads(1)
    step, batch = make_step(objective), make_batch(args, args.case, args.length)
    num_counted = step(batch)
    times, rate = [], ProductRate()
    for _ in range(args.repeats):
        times.append(seconds(lambda: step(batch)))
        rate.sample()
    result: dict[str, Any] = {
        "cpu_s": min(times),
        "cpu_s_median": statistics.median(times),
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "counted_rows": num_counted,
        "gemm_gflops": rate.by_blas,
    }
    if args.breakdown:
        result["breakdown"] = breakdown(lambda: step(batch), (*parts, (OPTIMIZER, "")))
    return result


def compare_cases(
    args: argparse.Namespace, gigaflop: Callable[[float], dict[str, float]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure both cases, each in its own process, and print them.

    Args:
        gigaflop: share of supervised rows -> GFLOP for each part of the step.
    """
    every = measure_apart("--case", "1.0", "--breakdown")
    some = measure_apart("--case", str(args.counted))
    rate = max(every["gemm_gflops"], some["gemm_gflops"])
    print(f"{'rows':<28}{'least s':>9}{'median s':>9}{'peak MB':>9}{'GFLOP':>9}{'floor s':>9}")
    for name, share, case in (
        ("all counted", 1.0, every),
        (f"{args.counted:.0%} counted", args.counted, some),
    ):
        case["gflop"] = sum(gigaflop(share).values())
        case["floor_s"] = case["gflop"] / rate
        case["fraction_of_floor"] = case["floor_s"] / case["cpu_s"]
        print(
            f"{name:<28}{case['cpu_s']:>9.3f}{case['cpu_s_median']:>9.3f}"
            f"{case['peak_rss_mb']:>9.0f}{case['gflop']:>9.1f}{case['floor_s']:>9.3f}"
        )
    print(f"this core multiplies at {rate:.0f} GFLOP/s")
    print(f"all counted, GFLOP: {_listed(gigaflop(1.0), 1)}")
    seconds_of = {name: share * every["cpu_s"] for name, share in every["breakdown"].items()}
    print(f"all counted, s by profiled share: {_listed(seconds_of, 3)}")
    return every, some


def _listed(values: dict[str, float], digits: int) -> str:
    largest_first = sorted(values.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {value:.{digits}f}" for name, value in largest_first)


def run(
    args: argparse.Namespace,
    build: Callable[[argparse.Namespace], Any],
    parts: Sequence[tuple[str, str]],
    gigaflop: Callable[[argparse.Namespace, float], dict[str, float]],
    **more: Any,
) -> None:
    """Measure the case given by --case, or compare both cases.

    Args:
        more: fields to add to the JSON line.
    """
    if args.case is not None:
        print(json.dumps(measure_case(args, build(args), parts)))
        return
    every, some = compare_cases(args, lambda counted: gigaflop(args, counted))
    if args.json:
        print_summary(args, every, some, **more)


def print_summary(
    args: argparse.Namespace, every: dict[str, Any], some: dict[str, Any], **more: Any
) -> None:
    """Print one JSON line, with the case of all rows, and the other case in `assistant_rows`."""

    def rounded(case: dict[str, Any]) -> dict[str, Any]:
        names = ("cpu_s", "cpu_s_median", "peak_rss_mb", "gflop", "floor_s", "fraction_of_floor")
        figures = {name: round(case[name], 1 if case[name] > 10 else 3) for name in names}
        tokens = args.batch * args.length
        return {
            **figures,
            "tokens_per_cpu_s": round(tokens / case["cpu_s"]),
            "tokens_per_cpu_s_median": round(tokens / case["cpu_s_median"]),
            "counted_rows": case["counted_rows"],
        }

    summary = {
        **rounded(every),
        "assistant_rows": rounded(some),
        "gemm_gflops": round(every["gemm_gflops"], 1),
        "breakdown": {name: round(share, 3) for name, share in every["breakdown"].items()},
        **more,
        "batch": args.batch,
        "N": args.length,
        "hidden": args.hidden,
        "target_layers": args.target_layers,
        "vocabulary": args.vocabulary,
        "dtype": "float32",
        "threads": 1,
        "torch": torch.__version__,
    }
    print(json.dumps(summary))


def layer_gigaflop(args: argparse.Namespace, rows: float, hidden_in: int) -> dict[str, float]:
    """Return GFLOP for a decoder layer's forward products, and for causal attention, which has two
    products over half a square."""
    heads, key_heads = args.heads * HEAD_SIZE, args.key_heads * HEAD_SIZE
    return {
        "query": 2e-9 * rows * hidden_in * heads,
        "key and value": 2e-9 * rows * hidden_in * 2 * key_heads,
        "rest": 2e-9 * rows * args.hidden * (heads + 3 * args.intermediate),
        "attention": 2e-9 * args.batch * args.length * args.length * heads,
    }
