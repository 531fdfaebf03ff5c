"""CPU time and memory for one complete EAGLE-3 training step, in float32 on one thread.

    python benchmarks/eagle3_step.py --json
    python benchmarks/eagle3_step.py --lengths 512,1024,2048,4096 --json

As in the training loop, a step runs the target without gradients, the head's draft tokens in
sequence, distillation on the supervised rows of each token, backward, gradient clipping and AdamW.
The draft vocabulary is the target's. See `training_step.py` for the measured quantities. --lengths
runs each length in its own process, and measures how far one step's peak memory exceeds a short
step's.
"""

import argparse
import json

import torch
from measurement import extra_memory_mb, make_parser, measure_apart
from training_step import (
    HEAD_SIZE,
    NO_DATA,
    add_arguments,
    layer_gigaflop,
    make_batch,
    make_step,
    random_target,
    run,
)

from pipedraft.train.eagle3 import Eagle3Objective, chain_lengths
from pipedraft.train.methods import Eagle3TrainConfig

PARTS = (
    ("target", "pipedraft.train.objective.capture_hidden"),
    ("fused features", "pipedraft.models.heads.eagle3.Eagle3.feature"),
    ("decoder layer", "pipedraft.models.heads.eagle3.Eagle3.unroll"),
    ("attention", "pipedraft.models.heads.eagle3.ttt_attention"),
    ("LM head and loss", "pipedraft.train.objective.chunked_distillation"),
)
SHORT_LENGTH = 128


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=7, help="draft tokens of a chain")
    parser.add_argument("--lengths", help="measure memory at these lengths instead: 512,1024")
    parser.add_argument("--memory", action="store_true", help="of --length, in this process")
    add_arguments(parser, length=512)
    return parser.parse_args()


def build_objective(args: argparse.Namespace) -> Eagle3Objective:
    head = Eagle3TrainConfig(num_steps=args.steps)
    target = random_target(args)
    return Eagle3Objective(head, target, target_name="random", revision=None, data=NO_DATA)


def gigaflop(args: argparse.Namespace, counted: float) -> dict[str, float]:
    """Return GFLOP per step for products and attention, without elementwise operations.

    All draft tokens share the embedding projections and the target's distribution for a token, so
    both count once. The fused attention has two products forward and five backward. Taps need no
    gradient, so their fusion only computes the gradient for its weight.
    """
    rows, hidden = args.batch * args.length, args.hidden
    lengths = chain_lengths(make_batch(args, counted, args.length).mask_BT, args.steps)
    drafted, labels = int(lengths.sum()), int((lengths > 0).sum())
    layer, step = layer_gigaflop(args, rows, hidden), layer_gigaflop(args, drafted, hidden)
    one_head = 2e-9 * hidden * args.vocabulary
    return {
        "target": args.target_layers * sum(layer.values()),
        "fused features": 4e-9 * rows * 3 * hidden**2,
        "embedding projections": 3 * (layer["query"] + layer["key and value"]),
        "draft token projections": 3 * (step["query"] + step["key and value"] + step["rest"]),
        "attention": 3.5 * args.steps * layer["attention"],
        "LM heads": one_head * (3 * drafted + labels),
    }


def measure_memory(args: argparse.Namespace) -> dict[str, float]:
    torch.set_num_threads(1)
    step = make_step(build_objective(args))
    step(make_batch(args, 1.0, SHORT_LENGTH))
    batch = make_batch(args, 1.0, args.length)
    return {"extra_mb": extra_memory_mb(lambda: step(batch))}


def compare_lengths(args: argparse.Namespace) -> None:
    lengths = [int(part) for part in args.lengths.split(",")]
    extra = [measure_apart("--memory", "--length", str(length))["extra_mb"] for length in lengths]
    print(f"{'positions':>9}{'extra MB':>10}{'MB a token':>12}")
    for length, megabytes in zip(lengths, extra, strict=True):
        per_token = megabytes / (args.batch * length)
        print(f"{length:>9}{megabytes:>10.0f}{per_token:>12.3f}")
    if args.json:
        growth = [round(b / a, 2) for a, b in zip(extra, extra[1:], strict=False)]
        summary = {"lengths": lengths, "extra_mb": [round(x) for x in extra], "growth": growth}
        print(json.dumps({**summary, "batch": args.batch, "steps": args.steps}))


def main() -> None:
    args = parse_arguments()
    if args.memory:
        print(json.dumps(measure_memory(args)))
    elif args.lengths and args.case is None:
        compare_lengths(args)
    else:
        more = {"key_heads": args.key_heads, "head_dim": HEAD_SIZE}
        run(args, build_objective, PARTS, gigaflop, steps=args.steps, heads=args.heads, **more)


if __name__ == "__main__":
    main()
