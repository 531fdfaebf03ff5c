"""Round target and draft weights on a CPU: ``--dtype float16`` and ``--dtype int8``.

Inputs and sums stay in float32, as do embeddings, norms and attention. A row's numbers never depend
on the other rows, so drafts change no token.
"""

# M rows, H inputs, G output channels

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from pipedraft.models.families import PLAIN

JOINED = {"self_attn": ("q_proj", "k_proj", "v_proj"), "mlp": ("gate_proj", "up_proj")}
"""Linear layers in a decoder layer with the same input: block -> names."""
STEPS = 63
"""Steps from zero to a row's largest input. Inputs have 7 bits, because AVX2 adds two products in
16 bits."""
MOST_TRIED = 256
"""Largest row count tried by ``even_rows``; FBGEMM cuts more than 120 rows into blocks."""


class RoundedLinear(nn.Module, ABC):
    """Compute x W^T + b with rounded W; a row's result has the same bits next to any other rows."""

    def __init__(self, weight_GH: Tensor, bias_G: Tensor | None, *, keep_weight: bool) -> None:
        """``keep_weight``: also keep the float32 weight, for other readers."""
        super().__init__()
        self.out_features, self.in_features = weight_GH.shape
        self._packed = self.pack(weight_GH)
        self.bias = None if bias_G is None else nn.Parameter(bias_G.float(), requires_grad=False)
        if keep_weight:
            self.weight = weight_GH  # the same object, so a tied head stays tied

    @staticmethod
    @abstractmethod
    def pack(weight_GH: Tensor) -> object:
        """Return rounded weights in the kernel's layout."""

    @abstractmethod
    def product(self, rows_MH: Tensor) -> Tensor:
        """Return x W^T."""

    def forward(self, x: Tensor) -> Tensor:
        out_MG = self.product(x.reshape(-1, self.in_features))
        if self.bias is not None:
            out_MG += self.bias
        return out_MG.view(*x.shape[:-1], self.out_features)


class HalfLinear(RoundedLinear):
    """W in float16, half the bytes to read.

    FBGEMM has a kernel for each small row count, and some kernels sum in another order. So rows are
    padded to a count whose kernels agree: ``even_rows``.
    """

    @staticmethod
    def pack(weight_GH: Tensor) -> object:
        return torch.ops.quantized.linear_prepack_fp16(weight_GH, None)

    def product(self, rows_MH: Tensor) -> Tensor:
        num_rows, missing = len(rows_MH), -len(rows_MH) % even_rows()
        padded_MH = rows_MH
        if missing:  # copies of a row: cheaper than zeros
            padded_MH = torch.cat([rows_MH, rows_MH[:1].expand(missing, -1)])
        return torch.ops.quantized.linear_dynamic_fp16(padded_MH, self._packed)[:num_rows]


@cache
def even_rows() -> int:
    """Return the least row count whose multiples all yield equal bits for a row on this CPU.

    Raises:
        ValueError: there is none.
    """
    generator = torch.Generator().manual_seed(0)
    weight_GH, x_1H = (torch.randn(n, 1100, generator=generator) for n in (48, 1))
    packed, product = HalfLinear.pack(weight_GH), torch.ops.quantized.linear_dynamic_fp16
    tried = range(1, MOST_TRIED + 1)
    same = {count: product(x_1H.repeat(count, 1), packed) for count in tried}
    for least in range(1, 33):
        parts = (same[count] for count in tried[least - 1 :: least])
        if all((part_MG == same[least][0]).all() for part_MG in parts):
            return least
    raise ValueError("--dtype: float16 has no exact product for rows on this CPU; give float32")


class Int8Linear(RoundedLinear):
    """W = round(W / s) s, s = max |W| / 127 per channel.

    The kernel takes 8-bit inputs. Rounding x to 8 bits would lose more than rounding W, so x enters
    as two rows, x = s' (high + low / 126) with s' = max |x| / 63 and both in -63 .. 63. The
    remaining error is at most max |x| / 2^13. Integer sums are exact.
    """

    @staticmethod
    def pack(weight_GH: Tensor) -> object:
        scale_G = (weight_GH.abs().amax(1).double() / 127).clamp(min=1e-30)
        zeros_G = torch.zeros_like(scale_G, dtype=torch.long)
        with warnings.catch_warnings():  # torch will remove this kind of tensor one day
            warnings.simplefilter("ignore")
            rounded = torch.quantize_per_channel(weight_GH, scale_G, zeros_G, 0, torch.qint8)
        return torch.ops.quantized.linear_prepack(rounded, None)

    def product(self, rows_MH: Tensor) -> Tensor:
        # Few operators: a model with 30 layers comes here 121 times per token.
        step_M1 = rows_MH.abs().amax(1, keepdim=True).clamp_(min=1e-30).div_(STEPS)
        rows_MH = rows_MH / step_M1
        high_MH = rows_MH.round()
        low_MH = rows_MH.sub_(high_MH).mul_(2 * STEPS)
        out = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            torch.cat([high_MH, low_MH]), 1.0, STEPS + 1, self._packed
        )
        high_MG, low_MG = out.chunk(2)
        return torch.add(high_MG, low_MG, alpha=0.5 / STEPS).mul_(step_M1)


KINDS: dict[torch.dtype, type[RoundedLinear]] = {torch.float16: HalfLinear, torch.int8: Int8Linear}
"""Weight dtype -> linear layer."""


class RoundedPart(nn.Module):
    """One of several linear layers joined into one: its output channels."""

    def __init__(self, joined: RoundedLinear, channels: slice) -> None:
        super().__init__()
        # In a list, so the parts do not each register the joined layer as a submodule.
        self._joined, self.channels = [joined], channels
        self.out_features, self.in_features = channels.stop - channels.start, joined.in_features

    @property
    def joined(self) -> RoundedLinear:
        return self._joined[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.joined(x)[..., self.channels]


def rounded_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the rounded weights' dtype in a module; None: it has none."""
    dtypes: dict[type, torch.dtype] = {kind: dtype for dtype, kind in KINDS.items()}
    layers = (x.joined if isinstance(x, RoundedPart) else x for x in module.modules())
    return next((dtypes[type(x)] for x in layers if type(x) in dtypes), None)


def dtype_of(model: PreTrainedModel) -> torch.dtype:
    """Return the weights' dtype as given to ``load_target``."""
    return rounded_dtype(model) or model.dtype


def rounds(dtype: torch.dtype, config: PreTrainedConfig, device: torch.device | str) -> bool:
    """Return True if a dtype rounds only weights: float16 and int8 on a CPU.

    In families without a pass in ``plain_layers``, float16 computes in half precision.

    Raises:
        ValueError: int8 on another device or in such a family, or no exact float16 product.
    """
    is_plain = config.model_type in PLAIN and config.hidden_act == "silu"
    on_cpu = torch.device(device).type == "cpu"
    if dtype == torch.int8 and not is_plain:
        raise ValueError(
            f"--dtype: int8 is for targets of the families {', '.join(PLAIN)}, not "
            f"{config.model_type!r}; give float32 or bfloat16"
        )
    if dtype == torch.int8 and not on_cpu:
        raise ValueError(f"--dtype: int8 runs on a CPU, not on {device}; give bfloat16")
    if dtype not in KINDS or not is_plain or not on_cpu:
        return False
    if dtype == torch.float16:
        even_rows()  # refuse before anything is decoded
    return True


@torch.no_grad()
def round_target(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Replace all linear layers in decoder layers, and the LM head; meta weights stay."""
    for layer in model.get_decoder().layers:
        for block, names in JOINED.items():
            _join(getattr(layer, block), names, dtype)
    for parent, name, linear in _linear_layers(model):
        is_head = linear is model.lm_head
        setattr(parent, name, KINDS[dtype](linear.weight, linear.bias, keep_weight=is_head))


@torch.no_grad()
def round_draft(draft: nn.Module, dtype: torch.dtype) -> None:
    """Replace a draft's projections in attention and MLP, and its LM head.

    Other layers stay in float32: they are small, and some heads read parts of their weights.
    """
    for parent, name, linear in _linear_layers(draft):
        if name.endswith("_proj") or name == "lm_head":
            is_head = name == "lm_head"
            setattr(parent, name, KINDS[dtype](linear.weight, linear.bias, keep_weight=is_head))


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
    joined = KINDS[dtype](whole_GH, biases, keep_weight=False)
    first = 0
    for name, part in zip(names, parts, strict=True):
        channels = slice(first, first + part.out_features)
        setattr(block, name, RoundedPart(joined, channels))
        first = channels.stop
