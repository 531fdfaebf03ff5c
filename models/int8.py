"""Target and draft weights in 8 bits on a CPU: ``--dtype int8``.

Every output channel of a linear layer has its own scale, and each row is multiplied by itself, so a
row's numbers never depend on the rows next to it. Embeddings, norms and attention stay float32.
"""

# M rows, H inputs, G output channels

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipedraft.models.families import PLAIN

JOINED = {"self_attn": ("q_proj", "k_proj", "v_proj"), "mlp": ("gate_proj", "up_proj")}
"""Linear layers in a decoder layer with the same input: block -> names."""
STEPS = 63
"""Steps from zero to a row's largest input: 7 bits, so AVX2's 16-bit sums cannot overflow."""


class Int8Linear(nn.Module):
    """x W^T + b with W = round(W / s) s, s the largest weight of a channel / 127.

    Kernels exist for 8-bit inputs alone. So an input is split in two, x = a (hi + lo / 126) with
    a = max |x| and both parts on a grid of 63 steps: two rows in one product, rounded to 2^-14.
    """

    def __init__(self, weight_GH: Tensor, bias_G: Tensor | None, *, keep_weight: bool) -> None:
        """``keep_weight``: keep the float32 weight too, for others to read."""
        super().__init__()
        self.out_features, self.in_features = weight_GH.shape
        scale_G = (weight_GH.abs().amax(1).double() / 127).clamp(min=1e-30)
        zeros_G = torch.zeros_like(scale_G, dtype=torch.long)
        with warnings.catch_warnings():  # the kernel is packed from a tensor kind on its way out
            warnings.simplefilter("ignore")
            rounded = torch.quantize_per_channel(weight_GH, scale_G, zeros_G, 0, torch.qint8)
        self._packed = torch.ops.quantized.linear_prepack(rounded, None)
        self.bias = None if bias_G is None else nn.Parameter(bias_G.float(), requires_grad=False)
        if keep_weight:
            self.weight = weight_GH  # the same object: a tied head stays tied

    def forward(self, x: Tensor) -> Tensor:
        rows_MH = x.reshape(-1, self.in_features)
        # Few operators: a token passes here 121 times in a model with 30 layers.
        largest_M1 = torch.linalg.vector_norm(rows_MH, torch.inf, 1, keepdim=True).clamp_(min=1e-30)
        rows_MH = rows_MH / largest_M1
        high_MH = torch.fake_quantize_per_tensor_affine(rows_MH, 1 / STEPS, 0, -STEPS, STEPS)
        low_MH = rows_MH.sub_(high_MH).mul_(2 * STEPS)
        out = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            torch.cat([high_MH, low_MH]), 1 / STEPS, STEPS + 1, self._packed
        )
        high_MG, low_MG = out.chunk(2)
        out_MG = torch.add(high_MG, low_MG, alpha=0.5 / STEPS).mul_(largest_M1)
        if self.bias is not None:
            out_MG += self.bias
        return out_MG.view(*x.shape[:-1], self.out_features)


class Int8Part(nn.Module):
    """Some output channels of joined linear layers."""

    def __init__(self, joined: Int8Linear, channels: slice) -> None:
        super().__init__()
        # In a list: the joined layer is no part of the module's tree, it would be saved twice.
        self._joined, self.channels = [joined], channels
        self.out_features, self.in_features = channels.stop - channels.start, joined.in_features

    @property
    def joined(self) -> Int8Linear:
        return self._joined[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.joined(x)[..., self.channels]


def is_int8(module: nn.Module) -> bool:
    return any(isinstance(x, Int8Linear | Int8Part) for x in module.modules())


@torch.no_grad()
def round_target(model: PreTrainedModel) -> None:
    """Replace the layers' and the LM head's linear layers; weights on the meta device stay.

    Raises:
        ValueError: no CPU, or a family without a pass whose rows are independent.
    """
    config = model.get_decoder().config
    if config.model_type not in PLAIN or config.hidden_act != "silu":
        raise ValueError(
            f"--dtype: int8 is for targets of the families {', '.join(PLAIN)}, not "
            f"{config.model_type!r}; give float32 or bfloat16"
        )
    # Layers in other processes stay on the meta device.
    if elsewhere := {weight.device.type for weight in model.parameters()} - {"cpu", "meta"}:
        raise ValueError(f"--dtype: int8 runs on a CPU, not on {elsewhere.pop()}; give bfloat16")
    for layer in model.get_decoder().layers:
        for block, names in JOINED.items():
            _join(getattr(layer, block), names)
    for parent, name, linear in _linear_layers(model):
        is_head = linear is model.lm_head
        setattr(parent, name, Int8Linear(linear.weight, linear.bias, keep_weight=is_head))


@torch.no_grad()
def round_draft(draft: nn.Module) -> None:
    """Replace the linear layers of a draft's decoder layers, and its LM head.

    Others stay: they are small, and heads read parts of their weights.
    """
    for parent, name, linear in _linear_layers(draft):
        if name.endswith("_proj") or name == "lm_head":
            is_head = name == "lm_head"
            setattr(parent, name, Int8Linear(linear.weight, linear.bias, keep_weight=is_head))


def _linear_layers(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and child.weight.device.type == "cpu":
                yield parent, name, child


def _join(block: Any, names: tuple[str, ...]) -> None:
    parts = [getattr(block, name) for name in names]
    if parts[0].weight.device.type != "cpu":
        return
    biases = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
    joined = Int8Linear(torch.cat([part.weight for part in parts]), biases, keep_weight=False)
    first = 0
    for name, part in zip(names, parts, strict=True):
        channels = slice(first, first + part.out_features)
        setattr(block, name, Int8Part(joined, channels))
        first = channels.stop
