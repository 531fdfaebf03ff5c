"""Memory and CPU time of one training step over a long row, in float32 on one thread.

    python benchmarks/long_context.py --json
    python benchmarks/long_context.py --lengths 2048,4096 --methods spd --variants plain,packed

A step is that of `training_step.py` on one row of T tokens, every row of the loss counted, on a
random target. plain: the row is one text. checkpointed: the draft's layers are computed again in
backward. packed: the same tokens as documents of --document tokens. Each case runs in its own
process, after a step on a short row; the memory is the peak above what was resident then.
"""

import argparse
import json
from typing import Any

import torch
from torch import Tensor

from pipedraft.benchmarks.measurement import extra_memory_mb, make_parser, measure_apart, seconds
from pipedraft.benchmarks.training_step import NO_DATA, add_arguments, make_step, random_target
from pipedraft.data_recipes.batch import pack
from pipedraft.train.eagle3 import Eagle3Objective, Eagle3TrainConfig
from pipedraft.train.objective import DraftObjective
from pipedraft.train.spd import SPDObjective, SPDTrainConfig

METHODS: dict[str, tuple[Any, Any]] = {
    "spd": (SPDObjective, SPDTrainConfig(num_stages=4, full_probability=1.0)),
    "eagle3": (Eagle3Objective, Eagle3TrainConfig()),
}
VARIANTS = ("plain", "checkpointed", "packed")
SHORT_LENGTH = 128


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--lengths", default="2048,4096,8192,16384,32768")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--document", type=int, default=512, help="tokens of a packed document")
    parser.add_argument("--measure", help="METHOD:VARIANT at --length, in this process")
    add_arguments(parser, length=2048)
    return parser.parse_args()


def make_row(args: argparse.Namespace, length: int, document: int) -> dict[str, Tensor]:
    ids = torch.randint(args.vocabulary, (length,))
    rows = [{"input_ids": part, "loss_mask": torch.ones_like(part)} for part in ids.split(document)]
    return pack(rows)


def measure(args: argparse.Namespace) -> dict[str, float]:
    torch.set_num_threads(1)
    method, variant = args.measure.split(":")
    objective_class, config = METHODS[method]
    objective: DraftObjective = objective_class(
        config, random_target(args), target_name="random", revision=None, data=NO_DATA
    )
    if variant == "checkpointed":
        objective.use_checkpointing()
    step = make_step(objective)
    step(make_row(args, SHORT_LENGTH, SHORT_LENGTH))
    batch = make_row(args, args.length, args.document if variant == "packed" else args.length)
    figures: dict[str, float] = {}

    def work() -> None:
        figures["cpu_s"] = seconds(lambda: step(batch))

    figures["extra_mb"] = extra_memory_mb(work)
    return figures


def main() -> None:
    args = parse_arguments()
    if args.measure is not None:
        print(json.dumps(measure(args)))
        return
    lengths = [int(part) for part in args.lengths.split(",")]
    print(f"{'method':<8}{'variant':<14}{'T':>7}{'extra MB':>10}{'KB/token':>10}{'CPU s':>9}")
    summary: dict[str, dict[str, list[float]]] = {}
    for method in args.methods.split(","):
        for variant in args.variants.split(","):
            case = summary.setdefault(f"{method} {variant}", {"extra_mb": [], "cpu_s": []})
            for length in lengths:
                found = measure_apart("--measure", f"{method}:{variant}", "--length", str(length))
                per_token_kb = found["extra_mb"] * 1024 / length
                print(
                    f"{method:<8}{variant:<14}{length:>7}{found['extra_mb']:>10.0f}"
                    f"{per_token_kb:>10.1f}{found['cpu_s']:>9.2f}",
                    flush=True,
                )
                case["extra_mb"].append(round(found["extra_mb"]))
                case["cpu_s"].append(round(found["cpu_s"], 2))
    if args.json:
        shape = {name: getattr(args, name) for name in ("hidden", "target_layers", "vocabulary")}
        more = {"document": args.document, "dtype": "float32", "threads": 1, **shape}
        print(json.dumps({"lengths": lengths, **summary, **more, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
