"""Milliseconds of a pass of 1 to 60 rows through linear layers: usual, laid out and in bfloat16.

    python benchmarks/few_rows.py --json
    OMP_NUM_THREADS=2 python benchmarks/few_rows.py --json

The weights are those of a decoder of --layers layers of a Llama's shapes, more than the caches
hold, so that every product reads them from memory. Least wall-clock time of the repeats, the ways
taking turns; `bfloat16` is torch's own product of weights half as large.
"""

import json
import time
from copy import deepcopy

import torch
from torch import nn

from pipedraft.benchmarks.measurement import make_parser
from pipedraft.models.cpu import lay_out


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--json", action="store_true", help="nothing but a line of JSON")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--inner", type=int, default=1536)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 60])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    H, G = args.hidden, args.inner
    shapes = ((H, H), (H, H), (H, 2 * H), (H, 2 * G), (G, H))
    usual = nn.ModuleList(
        nn.Linear(*shape, bias=False) for _ in range(args.layers) for shape in shapes
    ).requires_grad_(False)
    laid_out = deepcopy(usual)
    lay_out(laid_out)
    ways = {"usual": usual, "laid_out": laid_out, "bfloat16": deepcopy(usual).bfloat16()}
    figures: dict[str, object] = {
        "weights_mb": round(sum(x.numel() * 4 for x in usual.parameters()) / 1e6),
        "threads": torch.get_num_threads(),
    }
    for rows in args.rows:
        least = dict.fromkeys(ways, float("inf"))
        for _ in range(args.repeats + 1):  # the first one compiles and lays out
            for way, layers in ways.items():
                least[way] = min(least[way], pass_seconds(layers, rows))
        figures[f"ms_{rows}_rows"] = {way: round(1e3 * s, 1) for way, s in least.items()}
    print(json.dumps(figures, indent=None if args.json else 1))


@torch.inference_mode()
def pass_seconds(layers: nn.ModuleList, rows: int) -> float:
    weights = list(layers.parameters())
    inputs = {x.shape[1]: x.new_ones(rows, x.shape[1]) for x in weights}
    started = time.perf_counter()
    for layer, weight in zip(layers, weights, strict=True):
        layer(inputs[weight.shape[1]])
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
