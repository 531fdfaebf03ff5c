"""Round target and draft weights to 8 bits on a CPU: ``--dtype int8``.

Each output channel has its own scale, and each input row too. Integer sums are exact, so a row's
numbers never depend on the other rows. Embeddings, norms and attention stay in float32.
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
"""Steps from zero to a row's largest input: 7 bits, because AVX2 adds two products in 16 bits."""


class Int8Linear(nn.Module):
    """Compute x W^T + b with W = round(W / s) s, s = max |W| / 127 per channel.

    The kernel takes 8-bit inputs. Rounding x to 8 bits would lose more than rounding W, so x enters
    as two rows, x = s' (high + low / 126) with s' = max |x| / 63 and both in -63 .. 63. The
    remaining error is at most max |x| / 2^13.
    """

    def __init__(self, weight_GH: Tensor, bias_G: Tensor | None, *, keep_weight: bool) -> None:
        """``keep_weight``: also keep the float32 weight, for code that reads it."""
        super().__init__()
        self.out_features, self.in_features = weight_GH.shape
        scale_G = (weight_GH.abs().amax(1).double() / 127).clamp(min=1e-30)
        zeros_G = torch.zeros_like(scale_G, dtype=torch.long)
        with warnings.catch_warnings():  # torch will remove this kind of tensor one day
            warnings.simplefilter("ignore")
            rounded = torch.quantize_per_channel(weight_GH, scale_G, zeros_G, 0, torch.qint8)
        self._packed = torch.ops.quantized.linear_prepack(rounded, None)
        self.bias = None if bias_G is None else nn.Parameter(bias_G.float(), requires_grad=False)
        if keep_weight:
            self.weight = weight_GH  # the same object, so a tied head stays tied

    def forward(self, x: Tensor) -> Tensor:
        rows_MH = x.reshape(-1, self.in_features)
        # Few operators: a model with 30 layers comes here 121 times per token.
        step_M1 = rows_MH.abs().amax(1, keepdim=True).clamp_(min=1e-30).div_(STEPS)
        rows_MH = rows_MH / step_M1
        high_MH = rows_MH.round()
        low_MH = rows_MH.sub_(high_MH).mul_(2 * STEPS)
        out = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            torch.cat([high_MH, low_MH]), 1.0, STEPS + 1, self._packed
        )
        high_MG, low_MG = out.chunk(2)
        out_MG = torch.add(high_MG, low_MG, alpha=0.5 / STEPS).mul_(step_M1)
        if self.bias is not None:
            out_MG += self.bias
        return out_MG.view(*x.shape[:-1], self.out_features)


class Int8Part(nn.Module):
    """One of several joined linear layers: some of their output channels."""

    def __init__(self, joined: Int8Linear, channels: slice) -> None:
        super().__init__()
        # In a list, so the parts do not each register the joined layer as a submodule.
        self._joined, self.channels = [joined], channels
        self.out_features, self.in_features = channels.stop - channels.start, joined.in_features

    @property
    def joined(self) -> Int8Linear:
        return self._joined[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.joined(x)[..., self.channels]


def is_int8(module: nn.Module) -> bool:
    return any(isinstance(x, Int8Linear | Int8Part) for x in module.modules())


def dtype_of(model: PreTrainedModel) -> torch.dtype:
    """Return the weights' dtype as given to ``load_target``: int8, or the model's own."""
    return torch.int8 if is_int8(model) else model.dtype


@torch.no_grad()
def round_target(model: PreTrainedModel) -> None:
    """Replace all linear layers in decoder layers, and the LM head, except on the meta device.

    Raises:
        ValueError: another device, or a family without a pass in ``plain_layers``.
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
    """Replace a draft's projections in attention and MLP, and its LM head.

    Others stay in float32: they are small, and some heads read parts of their weights.
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
    """Join some of a block's linear layers in one, and put parts of it in their places."""
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
