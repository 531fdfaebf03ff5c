"""Multi-token prediction (MTP) layer, shipped with a target to continue its hidden states.

Row t joins the embedding of token t + 1 with the target's state at position t after its final norm:

    s_{t+1} = norm(layer(fc([norm_e(embed(x_{t+1})); norm_h(s_t)])))
    logits of x_{t+2} = LM head(s_{t+1})

For later draft tokens the layer's own output is fed back (DeepSeek-V3, arXiv:2412.19437; FastMTP,
arXiv:2509.18362). Weights have the names in Qwen3.5's checkpoints, minus the prefix ``mtp.``.
"""

# ... any leading axes, H hidden, N query heads, J key heads, D head size

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..speed.head_layers import finish
from ..transformer.decoder import norm_factor
from ..transformer.layers import (
    Attention,
    DecoderLayer,
    LayerConfig,
    RMSNorm,
    initialize_matrices,
    rotate,
)
from .configs import MTPConfig
from .draft import TargetReference
from .eagle import TiedHead

MTP_PREFIX = "mtp."
"""Prefix of the layer's weight names in a target's files."""


class OffsetRMSNorm(RMSNorm):
    """RMSNorm with factor 1 + weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        nn.init.zeros_(self.weight)  # factor 1

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, (self.weight + 1).to(x.dtype), self.eps)


class GatedAttention(Attention):
    """Qwen3.5 attention, where q_proj gives each head a query and a gate for its output."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__(config)
        bias = config.has_attention_bias
        self.q_proj = nn.Linear(config.hidden_size, 2 * self.q_proj.out_features, bias=bias)
        size, eps = config.head_size, config.rms_norm_eps
        self.q_norm, self.k_norm = OffsetRMSNorm(size, eps), OffsetRMSNorm(size, eps)

    def query_and_gate(self, x_H: Tensor, cos_D: Tensor, sin_D: Tensor) -> tuple[Tensor, Tensor]:
        """Return rotated queries [..., N, D] and gates [..., N D] for normed rows [..., H]."""
        heads = self.q_proj(x_H).unflatten(-1, (self.num_heads, 2 * self.head_size))
        query_ND, gate_ND = heads.chunk(2, -1)
        return rotate(self.q_norm(query_ND), cos_D, sin_D), gate_ND.flatten(-2)


class MTP(TiedHead):
    """A target's own MTP layer, or a new one in the same form."""

    draft_type: ClassVar[str] = "mtp"
    config_class: ClassVar[type] = MTPConfig

    def __init__(self, config: MTPConfig, layer: LayerConfig, reference: TargetReference) -> None:
        super().__init__(config, layer, reference)
        hidden, eps = layer.hidden_size, layer.rms_norm_eps
        norm = OffsetRMSNorm if config.native else RMSNorm
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = norm(hidden, eps), norm(hidden, eps)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([DecoderLayer(layer)])  # a list for Qwen3.5's names: layers.0
        if config.native:
            self.layer.self_attn = GatedAttention(layer)
            self.layer.input_layernorm = norm(hidden, eps)
            self.layer.post_attention_layernorm = norm(hidden, eps)
        self.norm = norm(hidden, eps)

    @property
    def layer(self) -> DecoderLayer:
        layer = self.layers[0]
        assert isinstance(layer, DecoderLayer)
        return layer

    @torch.no_grad()
    def initialize(self, target: PreTrainedModel, draft_ids: Tensor | None = None) -> None:
        """Copy the target's final norm into a new layer, and let fc pass the state through."""
        assert draft_ids is None, "an MTP layer reads its logits off the target's LM head"
        self.attach(target)
        self.pass_state_on()
        initialize_matrices(self.layer, 1)
        factor_H = norm_factor(target.config, target.get_decoder().norm.weight)
        # A native norm adds one to its weight.
        self.norm.weight.copy_(factor_H - 1 if self.config.native else factor_H)

    def project(
        self, embedding_H: Tensor, state_H: Tensor, cos_D: Tensor, sin_D: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        normed = [self.pre_fc_norm_embedding(embedding_H), self.pre_fc_norm_hidden(state_H)]
        residual_H = self.fc(torch.cat(normed, -1))
        x_H, attention = self.layer.input_layernorm(residual_H), self.layer.self_attn
        if isinstance(attention, GatedAttention):
            query_ND, gate = attention.query_and_gate(x_H, cos_D, sin_D)
            # finish gets only the residual, so the gate travels in it.
            residual_H = torch.cat([residual_H, gate], -1)
        else:
            query_ND = attention.query(x_H, cos_D, sin_D)
        return residual_H, query_ND, *attention.key_value(x_H, cos_D, sin_D)

    def finish(self, residual_H: Tensor, attended_ND: Tensor) -> Tensor:
        if self.config.native:
            hidden = self.layer_config.hidden_size
            residual_H, gate = residual_H[..., :hidden], residual_H[..., hidden:]
            attended_ND = attended_ND * gate.sigmoid().unflatten(-1, attended_ND.shape[-2:])
        return self.norm(finish(self.layer, residual_H, attended_ND))

    def normed(self, state_H: Tensor) -> Tensor:
        """Return the state as the LM head's input, because states are already normed."""
        return state_H

    @property
    def lm_head(self) -> nn.Module:
        """Target's LM head."""
        return self._head[0]


def native_parts(settings: PreTrainedConfig) -> tuple[MTPConfig, LayerConfig]:
    """Return the MTP layer's shape for a Qwen3.5 target, from its text configuration."""
    config = MTPConfig(num_target_layers=settings.num_hidden_layers, native=True)
    return config, LayerConfig.of_target_layer(settings)
