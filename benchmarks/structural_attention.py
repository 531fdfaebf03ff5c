"""CPU time and memory of structural attention against its dense-mask form, forward + backward.

    python benchmarks/structural_attention.py --json
    python benchmarks/structural_attention.py --n 16 --length 1024 --key-heads 2

Each method runs in its own process at one thread; times are the least CPU time of the repeats.
`structural` is pipedraft.models.structural; `dense` is torch's scaled_dot_product_attention with a
boolean [T, (n + 1) T] mask; `causal` is ordinary causal attention over one block, the part of the
work that no implementation on the same kernel can avoid. Memory is read from /proc (Linux).
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pipedraft.benchmarks.measurement import extra_memory_mb, make_parser, measure_apart
from pipedraft.models.structural import structural_attention

METHODS = ("structural", "dense", "causal")


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--n", type=int, default=8, help="pipeline stages")
    parser.add_argument("--length", type=int, default=2048, help="positions")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=4, help="query heads")
    parser.add_argument("--key-heads", type=int, default=4, help="key heads; divides --heads")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--method", choices=METHODS, help="measure one, in this process")
    return parser.parse_args()


def random_rows(*shape: int) -> torch.Tensor:
    """Random rows [..., heads, T, D] in the memory order of a projection, [..., T, heads, D]."""
    *batch, heads, T, D = shape
    return torch.randn(*batch, T, heads, D).transpose(-3, -2).requires_grad_()


def dense_structural_mask(
    T: int, n: int, occupancy: int, depth: int = 0, block_of_depth: Sequence[int] | None = None
) -> Tensor:
    """Boolean mask of structural attention's rule: the reference, for tests, too.

    Returns:
        mask [T, R T], R = 1 + the largest block: entry (t, r T + T') is True if the query at
        position t sees position T' in block r.
    """
    blocks = torch.tensor(range(n + 1) if block_of_depth is None else block_of_depth)
    distance_TT = torch.arange(T)[:, None] - torch.arange(T)
    k_TT = torch.where(depth + distance_TT < occupancy, depth + distance_TT, n)
    visible_TT = (distance_TT >= 0) & (depth < occupancy or depth == n)
    mask_TRT = torch.zeros(T, int(blocks.max()) + 1, T, dtype=torch.bool)
    mask_TRT.scatter_(1, blocks[k_TT.clamp(0, n)][:, None], visible_TT[:, None])
    return mask_TRT.flatten(1)


def build(method: str, args: argparse.Namespace, T: int) -> tuple[list[torch.Tensor], Callable]:
    """The inputs of one method, and the function from them to the output."""
    B, N, J, D, n = args.batch, args.heads, args.key_heads, args.head_dim, args.n
    query = random_rows(B, N, T, D)
    if method == "structural":
        inputs = [query, random_rows(n + 1, B, J, T, D), random_rows(n + 1, B, J, T, D)]
        return inputs, lambda q, k, v: structural_attention(q, k, v, occupancy=[n] * B)
    num_keys = (n + 1) * T if method == "dense" else T
    inputs = [query, random_rows(B, J, num_keys, D), random_rows(B, J, num_keys, D)]
    mask = dense_structural_mask(T, n, n) if method == "dense" else None
    return inputs, lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=N != J
    )


def measure(method: str, args: argparse.Namespace) -> dict[str, float]:
    """Times are in ms; the extra memory is the peak above the inputs (the mask is an input)."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    small_inputs, attend = build(method, args, T=64)
    attend(*small_inputs).sum().backward()
    inputs, attend = build(method, args, args.length)
    upstream = torch.randn(args.batch, args.length, args.heads, args.head_dim).transpose(1, 2)
    forward_s, backward_s, total_s = [], [], []

    def repeat() -> None:
        for _ in range(args.repeats):
            for x in inputs:
                x.grad = None
            start = time.process_time()
            out = attend(*inputs)
            middle = time.process_time()
            out.backward(upstream)
            end = time.process_time()
            del out
            forward_s.append(middle - start)
            backward_s.append(end - middle)
            total_s.append(end - start)

    peak_extra_mb = extra_memory_mb(repeat)
    return {
        "forward_ms": 1e3 * min(forward_s),
        "backward_ms": 1e3 * min(backward_s),
        "cpu_ms": 1e3 * min(total_s),
        "peak_extra_mb": peak_extra_mb,
    }


def main() -> None:
    args = parse_arguments()
    if args.method:
        print(json.dumps(measure(args.method, args)))
        return
    results = {method: measure_apart("--method", method) for method in METHODS}
    columns = ("forward_ms", "backward_ms", "cpu_ms", "peak_extra_mb")
    print(f"{'method':<12}" + "".join(f"{name:>15}" for name in columns))
    for method, row in results.items():
        print(f"{method:<12}" + "".join(f"{row[name]:>15.1f}" for name in columns))
    own, dense, causal = (results[method] for method in METHODS)
    summary = {
        "ratio_vs_dense": round(dense["cpu_ms"] / own["cpu_ms"], 2),
        "ratio_vs_causal": round(own["cpu_ms"] / causal["cpu_ms"], 3),
        "cpu_ms": round(own["cpu_ms"], 1),
        "dense_cpu_ms": round(dense["cpu_ms"], 1),
        "causal_cpu_ms": round(causal["cpu_ms"], 1),
        "n": args.n,
        "N": args.length,
        "peak_extra_mb": round(own["peak_extra_mb"], 1),
        "dense_peak_extra_mb": round(dense["peak_extra_mb"], 1),
        "batch": args.batch,
        "heads": args.heads,
        "key_heads": args.key_heads,
        "head_dim": args.head_dim,
        "dtype": "float32",
        "threads": 1,
        "torch": torch.__version__,
    }
    if args.json:
        print(json.dumps(summary))
    else:
        print(f"{summary['ratio_vs_dense']} times less CPU time than the dense mask")


if __name__ == "__main__":
    main()
