"""How fast a run is: FLOPs as torch counts them, and the share of the peak that is reached.

MFU = FLOPs of all processes / (seconds * processes * peak_tflops * 1e12)

FLOPs are those of the matrix products and of attention, whole squares also where it is causal, of
target and draft, forward, backward, and what checkpointing computes again. Elementwise work,
optimizers, evaluation and saving are not counted, so that MFU falls by all of these.
"""

from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)


def flop_counter() -> FlopCounterMode:
    """``with flop_counter() as counter:``, then ``counter.get_total_flops()``."""

    def linear(x: Any, weight: Any, *rest: Any, **more: Any) -> int:
        return 2 * prod(x) * weight[0]

    def attention(query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> int:
        return sdpa_flop_count(query, key, value)

    def backward(grad: Any, query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> int:
        return sdpa_backward_flop_count(grad, query, key, value)

    aten = torch.ops.aten  # torch has no formula for what only CPUs run
    formulas: dict[Any, Any] = {
        torch.ops.mkldnn._linear_pointwise: linear,
        aten._scaled_dot_product_flash_attention_for_cpu: attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }
    return FlopCounterMode(display=False, custom_mapping=formulas)


class Pace:
    """Sums over the steps since the last report: seconds until their batches were there, seconds in
    all, FLOPs of all processes."""

    def __init__(self) -> None:
        self.waited_s = self.total_s = self.flops = self.flops_per_token = 0.0

    def flops_of(self, num_tokens: int, counter: FlopCounterMode | None) -> float:
        """FLOPs of a step of this process: those counted in it, or per token in an earlier one.

        Args:
            num_tokens: padding included.
        """
        if counter is not None:
            self.flops_per_token = counter.get_total_flops() / num_tokens
        return num_tokens * self.flops_per_token

    def report(self, *, peak_tflops: float | None, num_processes: int) -> dict[str, float]:
        """``data_share`` of the steps' time, and ``mfu`` if the peak is known; starts afresh."""
        seconds = max(self.total_s, 1e-9)
        figures = {"data_share": self.waited_s / seconds}
        if peak_tflops is not None:
            figures["mfu"] = self.flops / (seconds * num_processes * peak_tflops * 1e12)
        self.waited_s = self.total_s = self.flops = 0.0
        return figures
