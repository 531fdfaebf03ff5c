"""Pre-norm decoder layer for all heads: RMSNorm, rotary positions, grouped queries, SwiGLU.

A layer exposes its projections and the part after attention, so training and decoding share one set
of weights. Each head adds its own attention pattern. This module has causal attention over whole
sequences, packed or not, and over cached rows.
"""

# ... any leading axes, H hidden, N query heads, J key heads, D head size, I intermediate size
# B batch, T positions, R rows in a decode call, P cached rows, C cached and new rows, g rows for
# all query heads sharing a key head

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import LlamaConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ...files import Values
from ...model_kinds import HEAD_ROPES
from .decoder import packed_masks

ROPE_SETTINGS = (
    *("attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor"),
    *("low_freq_factor", "original_max_position_embeddings", "rope_theta", "rope_type"),
)


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """Decoder layer sizes, taken from the target."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_key_value_heads: int
    head_size: int
    rms_norm_eps: float
    rope_parameters: Values
    max_positions: int
    has_query_key_norm: bool = False
    """Normalize each query and key head before the rotation (Qwen3)."""
    has_attention_bias: bool = False

    @classmethod
    def from_target(cls, config: PreTrainedConfig) -> "LayerConfig":
        """Read a target's text configuration (a transformers configuration object)."""
        config = config.get_text_config()
        rope = getattr(config, "rope_parameters", None) or {"rope_type": "default"}
        if "rope_type" not in rope:  # one entry per layer type
            rope = rope.get("full_attention") or next(iter(rope.values()))
        if rope["rope_type"] not in HEAD_ROPES:
            raise ValueError(
                f"target: its rope_type {rope['rope_type']!r} changes with the length of a text, "
                f"which no draft head does; heads have {', '.join(HEAD_ROPES)}; draft with "
                "--draft-model or --draft ngram"
            )
        return cls(
            hidden_size=config.hidden_size,
            intermediate_size=intermediate_size(config),
            num_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_size=getattr(config, "head_dim", None)
            or config.hidden_size // config.num_attention_heads,
            rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
            rope_parameters={key: rope[key] for key in ROPE_SETTINGS if key in rope},
            max_positions=config.max_position_embeddings,
            has_query_key_norm=config.model_type.startswith(("qwen3", "qwen3_5")),
            has_attention_bias=config.model_type == "qwen2",
        )

    @classmethod
    def of_target_layer(cls, config: PreTrainedConfig) -> "LayerConfig":
        """Read as ``from_target``, but rotate only the part of a head that the target rotates."""
        layer = cls.from_target(config)
        partial = config.rope_parameters.get("partial_rotary_factor", 1.0)
        if partial == 1.0:
            return layer
        rope = layer.rope_parameters | {"partial_rotary_factor": partial}
        return replace(layer, rope_parameters=rope)


def intermediate_size(config: PreTrainedConfig) -> int:
    """Return the target's MLP size, or the experts' total size per token if it has only experts."""
    if (size := getattr(config, "intermediate_size", None)) is not None:
        return int(size)
    chosen = config.num_experts_per_tok * config.moe_intermediate_size
    return int(chosen + config.shared_expert_intermediate_size)


class RotaryEmbedding(nn.Module):
    """Rotary positions (cos, sin) with transformers' frequencies, so scaled variants agree."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        rope = dict(config.rope_parameters)
        rotated = rope.pop("partial_rotary_factor", 1.0)  # only these first entries of a head
        source = LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=config.hidden_size,
                num_attention_heads=config.num_heads,
                head_dim=int(config.head_size * rotated),
                max_position_embeddings=config.max_positions,
                rope_parameters=rope,
            )
        )
        # YaRN scales cos and sin, and so the scores by the square of this factor.
        self.scale = float(source.attention_scaling)
        self.register_buffer("frequencies", source.inv_freq.clone(), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move frequencies with the module, but keep them in float32.

        Frequencies rounded to bfloat16 turn position 500 by half a radian too far.
        """

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(move, recurse)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Map positions [...] to cos, sin [..., D] in ``dtype``, computed in float32."""
        angles = positions[..., None].float() * self.frequencies  # 16 bits lose positions
        # Halves, not neighbors, are rotated together: entry i goes with entry i + D / 2.
        angles = torch.cat([angles, angles], -1)
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)

    def of_heads(self, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos, sin [T, 1, D], for rows [..., T, N, D]."""
        cos_TD, sin_TD = self(positions_T, dtype)
        return cos_TD[:, None], sin_TD[:, None]


def rotate(x_ND: Tensor, cos_D: Tensor, sin_D: Tensor) -> Tensor:
    """Rotate the entries of heads x [..., D], or only the first ones if cos and sin are shorter."""
    if (size := cos_D.shape[-1]) < x_ND.shape[-1]:
        return torch.cat([rotate(x_ND[..., :size], cos_D, sin_D), x_ND[..., size:]], -1)
    left, right = x_ND.chunk(2, -1)
    return x_ND * cos_D + torch.cat([-right, left], -1) * sin_D


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Grouped-query attention projections, with transformers' parameter names."""

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
        """Return rotated queries [..., N, D] from normed rows [..., H] and cos, sin [..., 1, D]."""
        heads = self.q_proj(x_H).unflatten(-1, (self.num_heads, self.head_size))
        # Norm before the rotation: Qwen3's order. The norm's weights would not commute with it.
        return rotate(self.q_norm(heads), cos_D, sin_D)

    def key_value(self, x_H: Tensor, cos_D: Tensor, sin_D: Tensor) -> tuple[Tensor, Tensor]:
        """Return rotated keys and values, both [..., J, D], from normed rows [..., H]."""
        shape = (self.num_key_value_heads, self.head_size)
        keys = self.k_norm(self.k_proj(x_H).unflatten(-1, shape))
        return rotate(keys, cos_D, sin_D), self.v_proj(x_H).unflatten(-1, shape)

    def project(self, x_H: Tensor, cos_D: Tensor, sin_D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``query`` and ``key_value`` for the same rows."""
        return self.query(x_H, cos_D, sin_D), *self.key_value(x_H, cos_D, sin_D)


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
    """Decoder layer with transformers' parameter names, for copying a target's layer."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.input_layernorm: nn.Module = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config)

    def finish(self, x_H: Tensor, attended_ND: Tensor) -> Tensor:
        """Return residual rows after attention and MLP, given ``attended_ND`` [..., N, D]."""
        x_H = x_H + self.self_attn.o_proj(attended_ND.flatten(-2))
        return x_H + self.mlp(self.post_attention_layernorm(x_H))


@torch.no_grad()
def initialize_matrices(module: nn.Module, num_layers: int) -> None:
    """Initialize a head's matrices randomly, smaller if they write to the residual stream.

    The scale is half the usual 1 / sqrt(fan-in), because the residual stream starts as a target
    state and layers should change it slowly.
    """
    for name, parameter in module.named_parameters():
        if parameter.ndim == 2:
            is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
            scale = (2 * num_layers) ** -0.5 if is_output else 1.0
            nn.init.normal_(parameter, std=0.5 * scale * parameter.shape[1] ** -0.5)


# -- packed documents -------------------------------------------------------------------------

# A packed row [1, T] is documents one after the other, without padding; ``lengths`` are their token
# counts. Everywhere, lengths=None means one sequence per batch row.


def document_slices(lengths: Sequence[int]) -> list[slice]:
    """Return each document's slice in the row."""
    return [slice(start, stop) for start, stop in pairwise(accumulate(lengths, initial=0))]


def positions_of(num_positions: int, lengths: Sequence[int] | None, device: torch.device) -> Tensor:
    """Return every token's position in its own document as int64 [T]."""
    if lengths is None:
        return torch.arange(num_positions, device=device)
    return torch.cat([torch.arange(length, device=device) for length in lengths])


def causal_attention(
    query_BTND: Tensor, keys_BTJD: Tensor, values_BTJD: Tensor, lengths: Sequence[int] | None = None
) -> Tensor:
    """Run causal attention, in which rows see their document up to themselves, without a mask.

    Returns:
        [B, T, N, D].
    """
    inputs = [x.transpose(1, 2) for x in (query_BTND, keys_BTJD, values_BTJD)]
    options: dict[str, object] = {"is_causal": True}
    options["enable_gqa"] = query_BTND.shape[2] != keys_BTJD.shape[2]
    attend: Callable[..., Tensor] = F.scaled_dot_product_attention
    if lengths is None:
        attended_BNTD = attend(*inputs, **options)
    else:
        attended_BNTD = _attend_apart(attend, inputs, lengths, options)
    return attended_BNTD.transpose(1, 2)


class WithinDocuments(TorchFunctionMode):
    """Context to run attention document by document on a packed row, in transformers models, too.

    No pair across documents is computed, and no mask for the whole row is built.

    Use it for forward passes only. When backward recomputes a layer, the mode is not active.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__()
        self.lengths = lengths

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return _attend_apart(func, args, self.lengths, kwargs)


def _attend_apart(
    attend: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    lengths: Sequence[int],
    options: Values,
) -> Tensor:
    """Run attention within each packed document.

    Args:
        options: for ``attend``. A sliding window's ``attn_mask`` over the whole row is cut, too.
    """
    mask, outs = options.pop("attn_mask", None), []
    parts = zip(*(x.split(list(lengths), 2) for x in inputs), strict=True)
    for part, rows in zip(parts, document_slices(lengths), strict=True):
        mask_of_part = None if mask is None else mask[..., rows, rows]
        outs.append(attend(*part, attn_mask=mask_of_part, **options))
    return torch.cat(outs, 2)


def packed_call(
    config: PreTrainedConfig, input_ids_BT: Tensor, lengths: Sequence[int] | None
) -> tuple[Values, AbstractContextManager]:
    """Return arguments and a context for running a transformers decoder on a packed row.

    When positions restart, some transformers models build a mask [T, T], and sdpa kernels compute
    it in full. A padding mask of ones prevents this, and the context separates documents. Kernels
    other than sdpa get a mask from here, because not all models build one.
    """
    if lengths is None:
        return {}, nullcontext()
    positions_T = positions_of(input_ids_BT.shape[1], lengths, input_ids_BT.device)
    options: Values = {"position_ids": positions_T[None]}
    if config._attn_implementation != "sdpa":
        return {**options, "attention_mask": packed_masks(config, positions_T)}, nullcontext()
    return {**options, "attention_mask": torch.ones_like(input_ids_BT)}, WithinDocuments(lengths)


# -- decoding ---------------------------------------------------------------------------------

MIN_ROWS = 64
"""Initial buffer capacity."""


class KeyValues:
    """Keys and values in row order, in buffers that double when full.

    Appending a row takes as long after 1,000 rows as after 30,000."""

    def __init__(self) -> None:
        self.num_rows = 0
        self._buffers_2JCD: Tensor | None = None

    @property
    def keys(self) -> Tensor:
        """All keys, [J, P, D]."""
        return self._rows(self.num_rows)[0]

    @property
    def values(self) -> Tensor:
        """All values, [J, P, D]."""
        return self._rows(self.num_rows)[1]

    def _rows(self, count: int) -> Tensor:
        assert self._buffers_2JCD is not None, "no row is here yet"
        return self._buffers_2JCD[:, :, :count]

    def append_rows(self, keys_RJD: Tensor, values_RJD: Tensor) -> None:
        """Append results from ``Attention.key_value``."""
        self._write(keys_RJD, values_RJD)
        self.num_rows += len(keys_RJD)

    def _write(self, keys_RJD: Tensor, values_RJD: Tensor) -> Tensor:
        """Write R rows after the P counted ones, and return all of them, [2, J, P + R, D]."""
        end, used = self.num_rows + len(keys_RJD), self._buffers_2JCD
        if used is None or end > used.shape[2]:
            _, J, D = keys_RJD.shape
            capacity = max(end, MIN_ROWS, 2 * self.num_rows)  # doubling: few copies per row
            self._buffers_2JCD = keys_RJD.new_zeros(2, J, capacity, D)
            if used is not None:
                self._rows(self.num_rows).copy_(used[:, :, : self.num_rows])
        new_2JRD = self._rows(end)[:, :, self.num_rows :]
        new_2JRD[0], new_2JRD[1] = keys_RJD.transpose(0, 1), values_RJD.transpose(0, 1)
        return self._rows(end)

    def keep(self, first: int, places: list[int]) -> None:
        """Drop all rows from ``first`` on except ``places``, ascending offsets from ``first``."""
        if places and places != list(range(len(places))):  # a prefix is in place already
            rows_2JKD = self._rows(self.num_rows)[:, :, first:]
            rows_2JKD[:, :, : len(places)] = rows_2JKD[:, :, places]
        self.num_rows = first + len(places)

    def attend_with(
        self, query_RND: Tensor, keys_KJD: Tensor, values_KJD: Tensor, visible_RC: Tensor
    ) -> Tensor:
        """Attend to the cached rows and to more rows, without keeping the latter."""
        keys_JCD, values_JCD = self._write(keys_KJD, values_KJD)
        return masked_attention(query_RND, keys_JCD, values_JCD, visible_RC)

    def attend(self, query_RND: Tensor, visible_RP: Tensor) -> Tensor:
        """Return attention [R, N, D] over the cached rows.

        Args:
            visible_RP: bool, cached rows visible to each query.
        """
        return masked_attention(query_RND, self.keys, self.values, visible_RP)


class FixedKeyValues(KeyValues):
    """Fixed-size buffers with rows at any places, all read by queries through a mask."""

    def __init__(self, num_places: int) -> None:
        super().__init__()
        self.num_rows = num_places
        self.slots_R = torch.empty(0, dtype=torch.long)
        """Buffer places for the next rows."""

    def append_rows(self, keys_RJD: Tensor, values_RJD: Tensor) -> None:
        self._write(keys_RJD, values_RJD)

    def _write(self, keys_RJD: Tensor, values_RJD: Tensor) -> Tensor:
        if self._buffers_2JCD is None:  # zeros: 0 * NaN in a masked row would reach others
            _, J, D = keys_RJD.shape
            self._buffers_2JCD = keys_RJD.new_zeros(2, J, self.num_rows, D)
        rows_2JRD = torch.stack([keys_RJD, values_RJD]).transpose(1, 2)
        return self._buffers_2JCD.index_copy_(2, self.slots_R, rows_2JRD)

    def move(self, from_M: Tensor, to_M: Tensor) -> None:
        if self._buffers_2JCD is not None:
            self._buffers_2JCD.index_copy_(2, to_M, self._buffers_2JCD.index_select(2, from_M))

    def grow(self, num_places: int) -> None:
        small_2JCD, self.num_rows = self._buffers_2JCD, num_places
        if small_2JCD is not None:
            _, J, C, D = small_2JCD.shape
            self._buffers_2JCD = small_2JCD.new_zeros(2, J, num_places, D)
            self._rows(C).copy_(small_2JCD)


def masked_attention(
    query_RND: Tensor, keys_JPD: Tensor, values_JPD: Tensor, visible_RP: Tensor
) -> Tensor:
    """Return each row's attention over the keys visible in its mask, [R, N, D]."""
    inputs = (query_RND.transpose(0, 1)[None], keys_JPD[None], values_JPD[None])
    G = query_RND.shape[1] // len(keys_JPD)
    if G > 1 and query_RND.is_cuda:
        out_1NRD = grouped_attention(*inputs, visible_RP.repeat(G, 1))
    else:
        out_1NRD = F.scaled_dot_product_attention(*inputs, visible_RP, enable_gqa=G > 1)
    return out_1NRD[0].transpose(0, 1)


def grouped_attention(
    query_1NRD: Tensor,
    keys_1JPD: Tensor,
    values_1JPD: Tensor,
    mask_gP: Tensor,
    scale: float | None = None,
) -> Tensor:
    """Run masked attention [1, N, R, D], with query heads folded into rows of their key head.

    A GPU has no kernel for grouped heads with a mask. Without folding, torch would copy keys and
    values for each query head, in every layer and step.

    Args:
        mask_gP: bool or additive [..., g, P], where g rows are N / J copies of the R rows.
    """
    rows_1JgD = query_1NRD.reshape(1, keys_1JPD.shape[1], -1, query_1NRD.shape[-1])
    out_1JgD = F.scaled_dot_product_attention(
        rows_1JgD, keys_1JPD, values_1JPD, attn_mask=mask_gP, scale=scale
    )
    return out_1JgD.reshape(query_1NRD.shape)


# -- plain causal layers ----------------------------------------------------------------------


def causal_layer(
    layer: DecoderLayer,
    stream_BTH: Tensor,
    cos_T1D: Tensor,
    sin_T1D: Tensor,
    lengths: Sequence[int] | None,
) -> Tensor:
    """Apply a decoder layer to whole sequences, so that each row sees rows up to itself.

    Args:
        lengths: document lengths in a packed row [1, T].
    """
    heads = layer.self_attn.project(layer.input_layernorm(stream_BTH), cos_T1D, sin_T1D)
    return layer.finish(stream_BTH, causal_attention(*heads, lengths))


def cached_layer(
    layer: DecoderLayer,
    stream_RH: Tensor,
    cos_R1D: Tensor,
    sin_R1D: Tensor,
    *,
    cache: KeyValues,
    visible_RC: Tensor,
    finish: Callable[[DecoderLayer, Tensor, Tensor], Tensor] = DecoderLayer.finish,
) -> Tensor:
    """Apply a decoder layer to more rows, appending their keys and values to the cache.

    Args:
        visible_RC: bool, cached rows (including these R) visible to each row.
        finish: computes what follows attention.
    """
    normed_RH = layer.input_layernorm(stream_RH)
    query_RND, *key_value = layer.self_attn.project(normed_RH, cos_R1D, sin_R1D)
    cache.append_rows(*key_value)  # before attending: a row sees itself, too
    return finish(layer, stream_RH, cache.attend(query_RND, visible_RC))
