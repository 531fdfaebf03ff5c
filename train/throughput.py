"""Model FLOPs of a step from parameter counts and text lengths, and the share of the peak reached.

    products   2 * passes * weights * rows          a weight matrix, met once by every row
    attention  4 * passes * N * D * pairs           per layer: scores and mixing of N heads
    passes     1 forward only: the frozen target    (FORWARD)
               2 one gradient less: of the input of the first weights, or of a frozen weight that
                 the gradient only passes           (ONE_GRADIENT)
               3 forward and both gradients         (TRAINED)
    pairs      sum over texts of l (l + 1) / 2: causal, whatever the kernel computes
    MFU        FLOPs of all processes / (seconds * processes * peak_tflops * 1e12)

Padding, norms, rotations, softmax, optimizers, evaluation and saving are not counted, so that MFU
falls by all of these. Attention of linear layers is not counted either; a window is not subtracted.
"""

# H hidden, N query heads, J key heads, D head size

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipedraft.models.layers import LayerConfig
from pipedraft.models.target import layer_kinds

FORWARD, ONE_GRADIENT, TRAINED = 1, 2, 3


def causal_pairs(lengths: Sequence[int]) -> float:
    return sum(length * (length + 1) / 2 for length in lengths)


def products(weights: float, rows: float, passes: int) -> float:
    return 2.0 * passes * weights * rows


def attention(width: float, pairs: float, passes: int) -> float:
    """
    Args:
        width: N * D, summed over layers if they see the same pairs.
    """
    return 4.0 * passes * width * pairs


@dataclass(frozen=True)
class DecoderCost:
    """What one row meets in the layers of a transformers decoder, embedding and head left out."""

    weights: float
    """Of experts the share that a token is sent to."""
    width: float
    """N * D summed over the layers with softmax attention."""

    @classmethod
    def of(cls, decoder: Any) -> "DecoderCost":
        config, weights = decoder.config, 0.0
        for name, parameter in decoder.layers.named_parameters():
            is_experts = ".experts." in name
            share = config.num_experts_per_tok / len(parameter) if is_experts else 1.0
            weights += share * parameter.numel() * (parameter.ndim >= 2)
        num_attentions = sum("linear" not in kind for kind in layer_kinds(config))
        layer = LayerConfig.from_target(config)
        return cls(weights, float(num_attentions * layer.num_heads * layer.head_size))

    def flops(self, lengths: Sequence[int], passes: int) -> float:
        return products(self.weights, sum(lengths), passes) + attention(
            self.width, causal_pairs(lengths), passes
        )


@dataclass(frozen=True)
class LayerCost:
    """Weights of a draft's decoder layer, from its shape: sharded parameters have no sizes."""

    query: int
    key_value: int
    rest: int
    """Of the output projection and the MLP."""
    width: int
    """N * D."""

    @classmethod
    def of(cls, layer: LayerConfig) -> "LayerCost":
        hidden, width = layer.hidden_size, layer.num_heads * layer.head_size
        return cls(
            query=hidden * width,
            key_value=2 * hidden * layer.num_key_value_heads * layer.head_size,
            rest=hidden * width + 3 * hidden * layer.intermediate_size,
            width=width,
        )

    @property
    def weights(self) -> int:
        return self.query + self.key_value + self.rest


class Pace:
    """Sums over the steps since the last report: seconds until their batches were there, seconds in
    all, FLOPs of all processes."""

    def __init__(self) -> None:
        self.waited_s = self.total_s = self.flops = 0.0

    def report(self, *, peak_tflops: float | None, num_processes: int) -> dict[str, float]:
        """``data_share`` of the steps' time, and ``mfu`` if the peak is known; starts afresh."""
        seconds = max(self.total_s, 1e-9)
        figures = {"data_share": self.waited_s / seconds}
        if peak_tflops is not None:
            figures["mfu"] = self.flops / (seconds * num_processes * peak_tflops * 1e12)
        self.waited_s = self.total_s = self.flops = 0.0
        return figures
