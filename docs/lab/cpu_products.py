"""Time matrix products of SmolLM2-135M on one core. Run `python docs/lab/cpu_products.py`.

Print GB of float32 weights per second, the median of seven passes over weights larger than the
caches. --compile times the layers' two halves instead, with and without torch.compile. With
ATEN_CPU_CAPABILITY=avx2, the kernels are those for AVX2.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from pipedraft.models.speed import kernels
from pipedraft.models.speed.rounded import DTYPES, RoundedLinear

SHAPES = {"q, k, v": (960, 576), "o": (576, 576), "gate, up": (3072, 576), "down": (576, 1536)}
HEADS, SHARED, SIZE = 9, 3, 64
Half = Callable[..., tuple[Tensor, ...]]
clock = time.perf_counter


def median_ms(run: Callable[[], object]) -> float:
    run()
    times = []
    for _ in range(7):
        start = clock()
        run()
        times.append(clock() - start)
    return 1e3 * sorted(times)[3]


def each(product: Callable[[Tensor, Tensor], Tensor], x: Tensor, weights: list[Tensor]) -> None:
    for weight in weights:
        product(x, weight)


def onednn(x: Tensor, packed: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def own(x: Tensor, weight: Tensor) -> Tensor:
    return kernels.product(kernels.weight(weight), x)


def print_products(shape: str | None) -> None:
    for name, (G, H) in {**SHAPES, "LM head": (49152, 576)}.items():
        if shape not in (None, name):
            continue
        weights = [torch.randn(G, H) for _ in range(1 + 150_000_000 // (4 * G * H))]
        ways = [
            ("F.linear", F.linear, weights),
            ("columns", lambda x, w: (w @ x.T).T, weights),
            ("transposed", torch.mm, [w.T.contiguous() for w in weights]),
            ("oneDNN", onednn, [torch.ops.mkldnn._reorder_linear_weight(w, 8) for w in weights]),
            (
                "16 bits",
                torch.ops.quantized.linear_dynamic_fp16,
                [torch.ops.quantized.linear_prepack_fp16(w, None) for w in weights],
            ),
            ("kernel", own, weights),
        ]
        for dtype in DTYPES:
            layers = [RoundedLinear(w, None, dtype, keep_weight=False) for w in weights]
            ways.append((f"kernel {str(dtype)[6:]}", lambda x, layer: layer(x), layers))
        megabytes = sum(w.nbytes for w in weights) / 1e6
        for num_rows in (1, 2, 4, 8):
            print(f"{name:<9}{num_rows} rows:", end="")
            for way, product, packed in ways:
                run = partial(each, product, torch.randn(num_rows, H), packed)
                print(f"  {way} {megabytes / median_ms(run):.1f}", end="", flush=True)
            print()


def first(x: Tensor, norm: Tensor, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    heads = F.linear(F.rms_norm(x, (576,), norm, 1e-5), qkv).unflatten(-1, (-1, SIZE))
    turned, value = heads.split([HEADS + SHARED, SHARED], 1)
    turned = turned * cos + turned.roll(SIZE // 2, -1) * sin
    parts = *turned.split([HEADS, SHARED], 1), value
    return tuple(part.transpose(0, 1)[None] for part in parts)


def second(
    x: Tensor, attended: Tensor, o: Tensor, norm: Tensor, up: Tensor, down: Tensor
) -> tuple[Tensor, ...]:
    x = x + F.linear(attended[0].transpose(0, 1).flatten(1), o)
    gate, value = F.linear(F.rms_norm(x, (576,), norm, 1e-5), up).chunk(2, -1)
    return (x + F.linear(F.silu(gate) * value, down),)


def step(halves: tuple[Half, Half], layers: list[list[Tensor]], num_rows: int) -> None:
    keys, values = (torch.zeros(1, SHARED, 130, SIZE) for _ in range(2))
    x, norm, table = torch.randn(num_rows, 576), torch.ones(576), torch.ones(num_rows, 1, SIZE)
    for qkv, o, up, down in layers:
        query, key, value = halves[0](x, norm, qkv, table, table)
        keys[:, :, -num_rows:], values[:, :, -num_rows:] = key, value
        attended = F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
        (x,) = halves[1](x, attended, o, norm, up, down)


def print_compiled() -> None:
    layers = [[torch.randn(shape) / 40 for shape in SHAPES.values()] for _ in range(30)]
    for num_rows in (1, 4):
        plain = median_ms(partial(step, (first, second), layers, num_rows))
        torch.compiler.reset()
        halves = torch.compile(first, dynamic=False), torch.compile(second, dynamic=False)
        start = time.perf_counter()
        step(halves, layers, num_rows)
        seconds = time.perf_counter() - start
        compiled = median_ms(partial(step, halves, layers, num_rows))
        print(f"{num_rows} rows: {plain:.1f} ms, compiled {compiled:.1f} after {seconds:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", action="store_true", help="time layers, compiled and not")
    parser.add_argument("--shape", choices=[*SHAPES, "LM head"], help="only this layer")
    parser.add_argument(
        "--cpu-seconds", action="store_true", help="count this thread's CPU time, not the clock's"
    )
    options = parser.parse_args()
    if options.cpu_seconds:
        global clock
        clock = time.thread_time
    torch.set_num_threads(1)
    with torch.inference_mode():
        print_compiled() if options.compile else print_products(options.shape)


if __name__ == "__main__":
    main()
