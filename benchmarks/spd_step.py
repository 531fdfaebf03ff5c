"""CPU time and memory for one complete SPD training step, in float32 on one thread.

    python benchmarks/spd_step.py --json
    python benchmarks/spd_step.py --counted 0.4 --n 4 --query all

As in the training loop, a step runs the target without gradients, the head, distillation on the
supervised rows, backward, gradient clipping and AdamW. Every example has all n tokens in flight,
the most expensive occupancy. See `training_step.py` for the measured quantities.
"""

import argparse

from measurement import make_parser
from training_step import (
    NO_DATA,
    add_arguments,
    layer_gigaflop,
    random_target,
    run,
)

from pipedraft.models.heads.configs import SPDConfig
from pipedraft.models.heads.spd import feature_layers
from pipedraft.train.methods import SPDTrainConfig
from pipedraft.train.spd import SPDObjective

PARTS = (
    ("target", "pipedraft.train.objective.capture_hidden"),
    ("decoder layers", "pipedraft.models.heads.spd.SPD.forward"),
    ("feature projections", "pipedraft.models.heads.spd.SPD.feature"),
    ("static keys and values", "pipedraft.models.heads.spd.SPD._static_key_values"),
    ("structural attention", "pipedraft.models.heads.spd.structural_attention"),
    ("LM head and loss", "pipedraft.train.objective.chunked_distillation"),
)


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--n", type=int, default=8, help="pipeline stages")
    parser.add_argument("--num-layers", type=int, default=2, help="layers of the module (Ls)")
    parser.add_argument("--query", choices=("newest", "all"), default="newest")
    add_arguments(parser, length=1024)
    return parser.parse_args()


def build_objective(args: argparse.Namespace) -> SPDObjective:
    module = SPDTrainConfig(
        num_stages=args.n, num_layers=args.num_layers, query=args.query, full_probability=1.0
    )
    target = random_target(args)
    return SPDObjective(module, target, target_name="random", revision=None, data=NO_DATA)


def gigaflop(args: argparse.Namespace, counted: float) -> dict[str, float]:
    """Return GFLOP per step for products and attention, without elementwise operations.

    The fused attention has two products forward and five backward. Taps need no gradient, so a
    feature projection only computes the gradient for its weight.
    """
    rows, layers = args.batch * args.length, args.num_layers
    layer = layer_gigaflop(args, rows, args.hidden)
    config = SPDConfig(num_stages=args.n, num_target_layers=args.target_layers)
    pieces = sum(len(chosen) for chosen in feature_layers(config))
    streams = layers if args.query == "newest" else (layers - 1) * (args.n + 1) + 1
    return {
        "target": args.target_layers * sum(layer.values()),
        "feature projections": 4e-9 * pieces * rows * args.hidden**2,
        "keys and values": 3 * layers * (args.n + 1) * layer["key and value"],
        "other layer projections": 3 * streams * (layer["query"] + layer["rest"]),
        "attention": 3.5 * streams * layer["attention"],
        "LM heads": 8e-9 * counted * rows * args.hidden * args.vocabulary,
    }


def main() -> None:
    args = parse_arguments()
    more = {"n": args.n, "num_layers": args.num_layers, "query": args.query}
    run(args, build_objective, PARTS, gigaflop, occupancy=args.n, **more)


if __name__ == "__main__":
    main()
