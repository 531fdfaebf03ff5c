"""The pre-norm decoder layer of every head: RMSNorm, rotary positions, grouped queries, SwiGLU.

Attention itself is not here: each head has its own pattern. A layer offers its projections and its
second half, so that one set of weights serves training and decoding.
"""

# ... any leading axes, H hidden, N query heads, J key heads, D head size, I intermediate size
# M rows, G columns of any product

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """Shape of a decoder layer, taken from the target so that the draft is of its family."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_key_value_heads: int
    head_size: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_positions: int
    has_query_key_norm: bool = False
    """Qwen3 normalises each query and key head before the rotation."""
    has_attention_bias: bool = False

    @classmethod
    def from_target(cls, config: Any) -> "LayerConfig":
        """Read a target's text configuration (a transformers configuration object)."""
        rope = config.rope_parameters
        if "rope_type" not in rope:  # one entry per layer type
            rope = next(iter(rope.values()))
        allowed = {"rope_type", "rope_theta", "factor", "original_max_position_embeddings"}
        allowed |= {
            "low_freq_factor",
            "high_freq_factor",
            "attention_factor",
            "beta_fast",
            "beta_slow",
        }
        return cls(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_size=getattr(config, "head_dim", None)
            or config.hidden_size // config.num_attention_heads,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={key: rope[key] for key in sorted(rope) if key in allowed},
            max_positions=config.max_position_embeddings,
            has_query_key_norm=config.model_type.startswith(("qwen3", "qwen3_5")),
            has_attention_bias=config.model_type == "qwen2",
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class RotaryEmbedding(nn.Module):
    """cos and sin of rotary positions; frequencies by transformers, so scaled variants agree."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        source = LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=config.hidden_size,
                num_attention_heads=config.num_heads,
                head_dim=config.head_size,
                max_position_embeddings=config.max_positions,
                rope_parameters=dict(config.rope_parameters),
            )
        )
        self.scale = float(source.attention_scaling)
        self.register_buffer("frequencies", source.inv_freq.clone(), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions [...] -> cos, sin [..., D], computed in fp32 and returned in ``dtype``."""
        angles = positions[..., None].float() * self.frequencies.float()
        angles = torch.cat([angles, angles], -1)
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)

    def of_heads(self, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos, sin [T, 1, D]: for rows [..., T, N, D] of several heads."""
        cos_TD, sin_TD = self(positions_T, dtype)
        return cos_TD[:, None], sin_TD[:, None]


def rotate(x_ND: Tensor, cos_D: Tensor, sin_D: Tensor) -> Tensor:
    """Apply rotary positions to heads: x [..., D], cos and sin broadcastable to it."""
    left, right = x_ND.chunk(2, -1)
    return x_ND * cos_D + torch.cat([-right, left], -1) * sin_D


def linear(x_H: Tensor, weight_GH: Tensor, bias_G: Tensor | None = None) -> Tensor:
    """``F.linear``, by oneDNN where torch would give float32 rows to MKL on an AVX-512 CPU.

    On AMD processors MKL runs its AVX2 kernels: 93 GFLOP/s on one Zen 5 core, oneDNN 200.
    """
    if not _is_for_onednn(x_H):
        return F.linear(x_H, weight_GH, bias_G)
    return _OneDNNProduct.apply(x_H, weight_GH, bias_G)


def input_gradient(grad_G: Tensor, weight_GH: Tensor) -> Tensor:
    """[..., H], the gradient of `linear` with respect to its rows."""
    return linear(grad_G, weight_GH.t())


def weight_gradient(grad_MG: Tensor, x_MH: Tensor) -> Tensor:
    """[G, H], the gradient of `linear` with respect to its weight, in any memory order."""
    if not _is_for_onednn(grad_MG):
        return grad_MG.t() @ x_MH
    if grad_MG.shape[1] < x_MH.shape[1]:
        return _multiply(grad_MG.t(), x_MH.t())
    return _multiply(x_MH.t(), grad_MG.t()).t()  # oneDNN is faster with few rows and a large weight


class _OneDNNProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_H, weight_GH, bias_G):
        ctx.save_for_backward(x_H, weight_GH)
        return _multiply(x_H, weight_GH, bias_G)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_G):
        x_H, weight_GH = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_MG, dweight_GH = grad_G.flatten(0, -2), None
        dx_H = _multiply(grad_G, weight_GH.t()) if needs_x else None
        if needs_weight:
            dweight_GH = weight_gradient(grad_MG, x_H.flatten(0, -2)).contiguous()
        return dx_H, dweight_GH, grad_MG.sum(0) if needs_bias else None


def _multiply(x_H: Tensor, weight_GH: Tensor, bias_G: Tensor | None = None) -> Tensor:
    """The operator through which torch's own compiler reaches oneDNN's float32 product.

    It takes matrices and their transposes as they lie in memory; other strides would send it to a
    reference loop, 100 times slower.
    """
    x_H, weight_GH = (x if x.mT.is_contiguous() else x.contiguous() for x in (x_H, weight_GH))
    return torch.ops.mkldnn._linear_pointwise(x_H, weight_GH, bias_G, "none", [], "")


def _is_for_onednn(x_H: Tensor) -> bool:
    """Below 128 rows, and under autocast, ``F.linear`` is as fast."""
    return (
        x_H.dtype == torch.float32
        and x_H.device.type == "cpu"
        and x_H.numel() >= 128 * x_H.shape[-1]
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
    )


class OneDNNLinear(TorchFunctionMode):
    """``with OneDNNLinear():`` every ``F.linear`` is `linear`, also inside transformers models."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return (linear if func is F.linear else func)(*args, **(kwargs or {}))


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and x.dtype == self.weight.dtype:
            return _CPUNorm.apply(x, self.weight, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class _CPUNorm(torch.autograd.Function):
    """``F.rms_norm`` in 3 passes forward and 7 backward; torch's has no kernel for CPUs, and takes
    8 and 4 times as long. With n = x rstd: dx = rstd (g w - n mean(g w n))."""

    @staticmethod
    def forward(ctx, x_H, weight_H, eps):
        mean_square_1 = torch.linalg.vecdot(x_H, x_H)[..., None].div_(x_H.shape[-1])
        rstd_1 = mean_square_1.add_(eps).rsqrt_()
        ctx.save_for_backward(x_H, weight_H, rstd_1)
        return (x_H * rstd_1).mul_(weight_H)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_H):
        x_H, weight_H, rstd_1 = ctx.saved_tensors
        normed_H = x_H * rstd_1
        product_H = grad_H * normed_H
        dweight_H = product_H.flatten(0, -2).sum(0)
        mean_1 = (product_H @ weight_H)[..., None].div_(x_H.shape[-1])
        dx_H = torch.mul(grad_H, weight_H, out=product_H).addcmul_(normed_H, mean_1, value=-1)
        return dx_H.mul_(rstd_1), dweight_H, None


class Attention(nn.Module):
    """Projections of grouped-query attention, with the parameter names of transformers."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads = config.num_heads, config.num_key_value_heads
        self.head_size = config.head_size
        hidden, bias = config.hidden_size, config.has_attention_bias
        self.q_proj = nn.Linear(hidden, config.num_heads * config.head_size, bias=bias)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * config.head_size, bias=bias)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * config.head_size, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * config.head_size, hidden, bias=False)
        if config.has_query_key_norm:
            self.q_norm: nn.Module = RMSNorm(config.head_size, config.rms_norm_eps)
            self.k_norm: nn.Module = RMSNorm(config.head_size, config.rms_norm_eps)
        else:
            self.q_norm, self.k_norm = nn.Identity(), nn.Identity()

    def query(self, x_H: Tensor, cos_D: Tensor, sin_D: Tensor) -> Tensor:
        """Rotated queries [..., N, D] of normed rows [..., H]; cos and sin are [..., 1, D]."""
        heads = self.q_proj(x_H).unflatten(-1, (self.num_heads, self.head_size))
        return rotate(self.q_norm(heads), cos_D, sin_D)

    def key_value(self, x_H: Tensor, cos_D: Tensor, sin_D: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values, both [..., J, D], of normed rows [..., H]."""
        shape = (self.num_key_value_heads, self.head_size)
        keys = self.k_norm(self.k_proj(x_H).unflatten(-1, shape))
        return rotate(keys, cos_D, sin_D), self.v_proj(x_H).unflatten(-1, shape)


class GatedMLP(nn.Module):
    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Parameters named as in transformers, so that a target's layer can be copied into it."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.input_layernorm: nn.Module = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config)

    def finish(self, x_H: Tensor, attended_ND: Tensor) -> Tensor:
        """Residual rows after attention and MLP; attended [..., N, D]."""
        x_H = x_H + self.self_attn.o_proj(attended_ND.flatten(-2))
        return x_H + self.mlp(self.post_attention_layernorm(x_H))


@torch.no_grad()
def initialise_matrices(module: nn.Module, num_layers: int) -> None:
    """Random matrices of a draft's layers; those that write to the residual stream are smaller.

    Half of the usual 1 / sqrt(fan-in): the residual stream starts as a state of the target, and
    the layers are to change it slowly.
    """
    for name, parameter in module.named_parameters():
        if parameter.ndim == 2:
            is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
            scale = (2 * num_layers) ** -0.5 if is_output else 1.0
            nn.init.normal_(parameter, std=0.5 * scale * parameter.shape[1] ** -0.5)
