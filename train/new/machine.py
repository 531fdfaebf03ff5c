"""The device that a recipe is planned for: its memory and speed, measured here or named."""

import math
import os
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from ...devices import has_native_bf16

H100_BYTES, H100_TFLOPS, H100_BYTES_PER_S = 80e9, 989.0, 3.35e12
"""The GPU to plan for where there is none: an H100 SXM with dense bfloat16, by NVIDIA's data
sheet."""
GPU_LAYER_S = 4.9e-3 / 30
"""Least time of a decoder layer in a decoding pass on a GPU, whose kernels wait for their launch:
30 layers take 4.9 ms on an H200 (docs/lab/results.md)."""
GPU_PASS_S = 1 / 8.3
"""Least time of a training pass on a GPU, for the same reason: SmolLM2's EAGLE-3 head took 8.3
steps a second on an H200 (docs/lab/results.md)."""
MEASURED_S = 0.2
READ_WEIGHTS = 2**25
"""Entries of the weight that is read to measure the memory's speed: more than caches hold."""


@dataclass(frozen=True)
class Machine:
    """One or more equal devices."""

    text: str
    """Description for the reader."""
    num_gpus: int
    """0: the CPU."""
    memory: float
    """Bytes per device."""
    flops: float
    """FLOP/s of a device in matrix products."""
    bytes_per_s: float
    """Speed at which a device reads weights."""
    has_bf16: bool
    """bfloat16 products without emulation."""

    @property
    def processes(self) -> int:
        return max(1, self.num_gpus)

    @property
    def layer_s(self) -> float:
        return GPU_LAYER_S if self.num_gpus else 0.0

    @property
    def pass_s(self) -> float:
        return GPU_PASS_S if self.num_gpus else 0.0


def rate(left: Tensor, right: Tensor) -> float:
    """Return how often per second a device multiplies two matrices, undisturbed by other work."""
    best, begin = math.inf, time.perf_counter()
    while (start := time.perf_counter()) - begin < MEASURED_S:
        found = left @ right
        if found.is_cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 1 / best


def measured_speed(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]
) -> tuple[float, float]:
    """Return FLOP/s for products [M, K] x [K, N], and bytes/s for one row times a large weight.

    Args:
        shape: M, K, N; the target's own sizes, as small products are slower.
    """
    m, k, n = shape
    products = rate(
        torch.ones(m, k, dtype=dtype, device=device), torch.ones(k, n).to(device, dtype)
    )
    weight = torch.ones(1024, READ_WEIGHTS // 1024, device=device)
    reads = rate(weight, torch.ones(weight.shape[1], 1, device=device))
    return 2.0 * m * k * n * products, weight.nbytes * reads


def cpu_machine(shape: tuple[int, int, int]) -> Machine:
    device, threads = torch.device("cpu"), torch.get_num_threads()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    has_bf16 = has_native_bf16(device)
    flops, bytes_per_s = measured_speed(
        device, torch.bfloat16 if has_bf16 else torch.float32, shape
    )
    count = f"{threads} thread{'s' * (threads > 1)}"
    text = f"this CPU, {count}, {memory / 1e9:.0f} GB, {flops / 1e12:.3f} TFLOPS measured"
    return Machine(text, 0, memory, flops, bytes_per_s, has_bf16)


def gpu_machine(
    number: int, gigabytes: float | None, tflops: float | None, shape: tuple[int, int, int]
) -> Machine:
    """Return ``number`` GPUs like the one here, or like an H100 if there is none."""
    many = f"{number} x " if number > 1 else ""
    if not torch.cuda.is_available():
        memory, peak = 1e9 * (gigabytes or H100_BYTES / 1e9), tflops or H100_TFLOPS
        kind = "GPU like an H100" if gigabytes is None and tflops is None else "GPU"
        text = f"{many}{kind}, {memory / 1e9:.0f} GB, {peak:.0f} TFLOPS"
        return Machine(text, number, memory, 1e12 * peak, H100_BYTES_PER_S, has_bf16=True)
    device = torch.device("cuda", torch.cuda.current_device())
    has_bf16 = has_native_bf16(device)
    flops, bytes_per_s = measured_speed(
        device, torch.bfloat16 if has_bf16 else torch.float32, shape
    )
    total = torch.cuda.get_device_properties(device).total_memory
    memory = total if gigabytes is None else 1e9 * gigabytes
    flops, how = (flops, " measured") if tflops is None else (1e12 * tflops, "")
    name = torch.cuda.get_device_name(device)
    text = f"{many}{name}, {memory / 1e9:.0f} GB, {flops / 1e12:.1f} TFLOPS{how}"
    return Machine(text, number, memory, flops, bytes_per_s, has_bf16)
