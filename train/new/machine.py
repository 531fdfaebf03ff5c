"""The device that a recipe is planned for: its memory and speed, measured here or named."""

import math
import os
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from ...devices import has_native_bf16

H100_BYTES, H100_TFLOPS, H100_SINGLE_TFLOPS, H100_BYTES_PER_S = 80e9, 989.0, 67.0, 3.35e12
"""The GPU to plan for where there is none: an H100 SXM, with dense bfloat16 and float32, by
NVIDIA's data sheet."""
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
    has_bf16: bool
    """bfloat16 products that save time."""
    flops: float
    """FLOP/s of a device in matrix products, in bfloat16 if it has them."""
    single_flops: float
    """The same in float32."""
    bytes_per_s: float
    """Speed at which a device reads weights."""

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


def measured(
    device: torch.device, shape: tuple[int, int, int], *, has_bf16: bool
) -> tuple[float, float, float]:
    """Return FLOP/s for products [M, K] x [K, N] and in float32, and bytes/s for reading weights.

    Args:
        shape: M, K, N; the target's own sizes, as small products are slower.
    """
    m, k, n = shape
    left, right = torch.ones(m, k, device=device), torch.ones(k, n, device=device)
    single = flops = 2.0 * m * k * n * rate(left, right)
    if has_bf16:
        flops = 2.0 * m * k * n * rate(left.bfloat16(), right.bfloat16())
    # One row times a weight, as in decoding.
    weight = torch.ones(1024, READ_WEIGHTS // 1024, device=device)
    reads = rate(weight, torch.ones(weight.shape[1], 1, device=device))
    return flops, single, weight.nbytes * reads


def cpu_machine(shape: tuple[int, int, int]) -> Machine:
    device, threads = torch.device("cpu"), torch.get_num_threads()
    has_bf16 = has_native_bf16(device)
    speeds = measured(device, shape, has_bf16=has_bf16)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    count = f"{threads} thread{'s' * (threads > 1)}"
    text = f"this CPU, {count}, {memory / 1e9:.0f} GB, {speeds[0] / 1e12:.3f} TFLOPS measured"
    return Machine(text, 0, memory, has_bf16, *speeds)


def gpu_machine(
    number: int, gigabytes: float | None, tflops: float | None, shape: tuple[int, int, int]
) -> Machine:
    """Return ``number`` GPUs like the one here, or like an H100 if there is none."""
    speeds = (1e12 * H100_TFLOPS, 1e12 * H100_SINGLE_TFLOPS, H100_BYTES_PER_S)
    name, memory, has_bf16, how = "GPU", H100_BYTES, True, ""
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        has_bf16 = has_native_bf16(device)
        speeds, how = measured(device, shape, has_bf16=has_bf16), " measured"
        memory = torch.cuda.get_device_properties(device).total_memory
        name = torch.cuda.get_device_name(device)
    elif gigabytes is None and tflops is None:
        name = "GPU like an H100"
    memory = memory if gigabytes is None else 1e9 * gigabytes
    if tflops is not None:
        speeds, how = (1e12 * tflops, *speeds[1:]), ""
    text = f"{f'{number} x ' * (number > 1)}{name}, {memory / 1e9:.0f} GB, "
    text += f"{speeds[0] / 1e12:.4g} TFLOPS{how}"
    return Machine(text, number, memory, has_bf16, *speeds)
