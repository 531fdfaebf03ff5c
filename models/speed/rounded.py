"""Round target and draft weights on a CPU to float16, bfloat16, int8 or int4 (``--dtype``).

Inputs and sums stay in float32, as do embeddings, norms and attention. A row's bits never depend on
the other rows, so drafting changes no token.
"""

# M rows, H inputs, G output channels

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...devices import dtype_named
from ..transformer.decoder import PLAIN
from . import kernels

JOINED = {"self_attn": ("q_proj", "k_proj", "v_proj"), "mlp": ("gate_proj", "up_proj")}
"""Linear layers in a decoder layer with the same input: block -> names."""
DTYPES = (torch.float16, torch.bfloat16, torch.int8, kernels.int4)


class RoundedLinear(nn.Module):
    """Linear layer x W^T + b with rounded W, in which no row's bits depend on the other rows.

    int8 stores round(W / s), with s = max |W| / 127 for each output channel. int4 stores blocks of
    32 inputs, as described in ``kernels.pack``.
    """

    def __init__(
        self, weight_GH: Tensor, bias_G: Tensor | None, dtype: torch.dtype, *, keep_weight: bool
    ) -> None:
        """Round the weight. With ``keep_weight``, also keep the float32 weight for other code."""
        super().__init__()
        self.out_features, self.in_features = weight_GH.shape
        self.dtype, self._packed = dtype, kernels.pack(weight_GH, dtype)
        self.bias = None if bias_G is None else nn.Parameter(bias_G.float(), requires_grad=False)
        if keep_weight:
            self.weight = weight_GH  # the same object, so a tied head stays tied

    def kernel_weight(self) -> kernels.Weight:
        return kernels.weight(*self._packed, self.bias)

    def forward(self, x: Tensor, channels: slice = slice(None)) -> Tensor:
        """Return the output [..., G], or only these channels of it."""
        if x.shape[-1] != self.in_features:
            raise ValueError(f"{x.shape[-1]} features, for {self.in_features} inputs")
        rows, *others = self._packed + (self.bias,)
        others = [None if one is None else one[channels] for one in others]
        weight = kernels.weight(rows[channels], *others)
        out_MG = kernels.product(weight, x.reshape(-1, self.in_features))
        return out_MG.view(*x.shape[:-1], -1)


class RoundedPart(nn.Module):
    """Linear layer with some output channels from a joined ``RoundedLinear``."""

    def __init__(self, joined: RoundedLinear, channels: slice) -> None:
        super().__init__()
        # In a list, so the parts do not each register the joined layer as a submodule.
        self._joined, self.channels = [joined], channels
        self.out_features, self.in_features = channels.stop - channels.start, joined.in_features

    @property
    def joined(self) -> RoundedLinear:
        return self._joined[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.joined(x, self.channels)


def rounded_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the dtype to which a module's weights are rounded, or None if they are not."""
    layers = (x.joined if isinstance(x, RoundedPart) else x for x in module.modules())
    return next((x.dtype for x in layers if isinstance(x, RoundedLinear)), None)


def dtype_of(model: PreTrainedModel) -> torch.dtype:
    """Return the weights' dtype, as given to ``load_target``."""
    return rounded_dtype(model) or model.dtype


def rounds(dtype: torch.dtype, config: PreTrainedConfig, device: torch.device | str) -> bool:
    """Return True if ``dtype`` rounds only the weights, while inputs and sums stay in float32.

    This needs a dtype other than float32, a CPU, a compiler, and a family that ``plain_layers`` can
    run. Without one of these, float16 and bfloat16 apply to the whole model's computation.

    Raises:
        ValueError: ``dtype`` is int8 or int4, but the device is not a CPU, ``plain_layers`` cannot
            run the family, or no compiler works.
    """
    is_plain = config.model_type in PLAIN and config.hidden_act == "silu"
    on_cpu = torch.device(device).type == "cpu"
    name = str(dtype).removeprefix("torch.")
    if dtype in (torch.int8, kernels.int4):
        if not is_plain:
            raise ValueError(
                f"--dtype: {name} is for targets of the families {', '.join(PLAIN)}, not "
                f"{config.model_type!r}; give float32 or bfloat16"
            )
        if not on_cpu:
            raise ValueError(f"--dtype: {name} runs on a CPU, not on {device}; give bfloat16")
        if kernels.library() is None:
            raise ValueError(
                f"--dtype: {name} needs kernels compiled by g++ (pipedraft doctor tries it); give "
                "float32"
            )
    return dtype in DTYPES and is_plain and on_cpu and kernels.library() is not None


@torch.no_grad()
def round_target(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Round the decoder layers' linear layers and the LM head, except on the meta device."""
    for layer in model.get_decoder().layers:
        for block, names in JOINED.items():
            _join(getattr(layer, block), names, dtype)
    for parent, name, linear in _linear_layers(model):
        _replace(parent, name, linear, dtype, is_head=linear is model.lm_head)


def round_head(head: nn.Module, dtype: str, target: PreTrainedModel) -> None:
    """Round a head's weights to the named ``dtype``, or like the target's weights for "auto".

    Raises:
        ValueError: ``dtype`` is not "auto", but the target is not on a CPU, it does not compute in
            float32, or no compiler works.
    """
    rounded = rounded_dtype(target) if dtype == "auto" else dtype_named(dtype, "draft_dtype")
    if dtype != "auto":
        like = target.get_input_embeddings().weight
        if like.device.type != "cpu" or like.dtype != torch.float32 or kernels.library() is None:
            raise ValueError(
                f"draft_dtype: {dtype} needs a CPU, a target that computes in float32, and kernels "
                "compiled by g++ (pipedraft doctor tries it); leave it out"
            )
    if rounded in DTYPES:
        round_draft(head, rounded)


@torch.no_grad()
def round_draft(draft: nn.Module, dtype: torch.dtype) -> None:
    """Round a draft's attention and MLP projections, its linear layers in lists, and its LM head.

    Other layers stay in float32. They are small, and some heads read parts of their weights.
    """
    for module in list(draft.modules()):
        if all(isinstance(getattr(module, name, None), nn.Linear) for name in JOINED["mlp"]):
            _join(module, JOINED["mlp"], dtype)
    for parent, name, linear in _linear_layers(draft):
        in_list = isinstance(parent, nn.ModuleList)
        if name.endswith("_proj") or in_list or name == "lm_head":
            _replace(parent, name, linear, dtype, is_head=name == "lm_head")


def _replace(
    parent: nn.Module, name: str, linear: nn.Linear, dtype: torch.dtype, *, is_head: bool
) -> None:
    # An LM head in int4 would change many tokens; GGUF files, too, keep more of its bits.
    dtype = torch.int8 if is_head and dtype == kernels.int4 else dtype
    setattr(parent, name, RoundedLinear(linear.weight, linear.bias, dtype, keep_weight=is_head))


def _linear_layers(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and child.weight.device.type == "cpu":
                yield parent, name, child


def _join(block: Any, names: tuple[str, ...], dtype: torch.dtype) -> None:
    """Join some of a block's linear layers into one, and replace each by its part."""
    parts = [getattr(block, name) for name in names]
    if parts[0].weight.device.type != "cpu":
        return
    biases = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
    whole_GH = torch.cat([part.weight for part in parts])
    joined = RoundedLinear(whole_GH, biases, dtype, keep_weight=False)
    first = 0
    for name, part in zip(names, parts, strict=True):
        channels = slice(first, first + part.out_features)
        setattr(block, name, RoundedPart(joined, channels))
        first = channels.stop
