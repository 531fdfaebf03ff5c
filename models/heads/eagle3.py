"""EAGLE-3 head (arXiv:2503.01840): fuses three target layers, and learns only from logits."""

# ... any leading axes, H hidden, N query heads, J key heads, D head size, U draft vocabulary
# B batch, T rows per sequence, M rows per training step, C = (N + 2 J) D

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..speed import cpu
from ..speed.head_layers import finish
from ..transformer.layers import (
    Attention,
    DecoderLayer,
    GatedMLP,
    LayerConfig,
    RMSNorm,
    RotaryEmbedding,
    initialize_matrices,
    positions_of,
    rotate,
)
from .banded_attention import ttt_attention
from .configs import Eagle3Config
from .draft import TargetReference, initialize_head
from .eagle import EagleHead


class Eagle3Layer(nn.Module):
    """Decoder layer with the 2H-wide attention input [norm(embedding); norm(state)].

    r = s + attention([norm(e); norm(s)]), out = r + mlp(norm(r)). The residual s stays un-normed
    unless the head has ``norm_before_residual``.
    """

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.self_attn = Attention(config)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            wide = nn.Linear(2 * hidden, narrow.out_features, bias=narrow.bias is not None)
            setattr(self.self_attn, name, wide)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = GatedMLP(config)

    finish = DecoderLayer.finish


class Eagle3(EagleHead):
    """EAGLE-3 head: continues fused target states with its own outputs.

    The first state is s_t = fc([h_low; h_mid; h_high]_t). Later states are the head's outputs,
    un-normed unless ``norm_output``. Logits for x_{t+2} are LM head(norm(out_t)) over the draft
    vocabulary.
    """

    draft_type: ClassVar[str] = "eagle3"
    removed: ClassVar[tuple[str, ...]] = ("candidate_rank", "num_candidates")
    config_class: ClassVar[type] = Eagle3Config

    def __init__(
        self, config: Eagle3Config, layer: LayerConfig, reference: TargetReference
    ) -> None:
        # Inference engines build a Llama layer by default, whatever the target's family.
        layer = replace(
            layer,
            has_query_key_norm=config.query_key_norm,
            has_attention_bias=config.attention_bias,
            rope_parameters=config.rope(layer.rope_parameters),
        )
        super().__init__(config, layer, reference)
        hidden, count = layer.hidden_size, len(config.feature_layers)
        norms = [RMSNorm(hidden, layer.rms_norm_eps) for _ in range(count * config.fc_norm)]
        self.fc_norm = nn.ModuleList(norms)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(count * hidden, layer.rms_norm_eps)
        self.fc = nn.Linear(count * hidden, hidden, bias=False)
        self.midlayer = Eagle3Layer(layer)
        self.norm = RMSNorm(hidden, layer.rms_norm_eps)
        size = config.draft_vocab_size or reference.fingerprint["vocab_size"]
        self.lm_head = nn.Linear(hidden, size, bias=False)
        self.lm_head.requires_grad_(not config.share_head)  # a shared one stays the target's
        self.rotary = RotaryEmbedding(layer)
        self.register_buffer("draft_ids", torch.arange(size))

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.feature_layers

    @property
    def window(self) -> int | None:
        return self.config.sliding_window

    @torch.no_grad()
    def initialize(self, target: PreTrainedModel, draft_ids: Tensor | None = None) -> None:
        """Copy the LM head and final norm, and let fc pass the deepest fused layer through."""
        self.attach(target)
        initialize_head(self, target, draft_ids)
        hidden = self.layer_config.hidden_size
        self.fc.weight.zero_()
        # The last H columns read the deepest layer if feature_layers ascends.
        self.fc.weight[:, -hidden:] = torch.eye(hidden)
        initialize_matrices(self.midlayer, 1)

    def feature(self, taps: Mapping[int, Tensor]) -> Tensor:
        return self.fc(self.fused(taps))

    def fused(self, taps: Mapping[int, Tensor]) -> Tensor:
        """Return the input of ``fc``, the target's joined states."""
        fused = [taps[layer] for layer in self.config.feature_layers]
        if self.config.fc_norm:
            fused = [norm(x) for norm, x in zip(self.fc_norm, fused, strict=True)]
        joined_H = torch.cat(fused, -1)
        return self.input_norm(joined_H) if self.config.norm_before_fc else joined_H

    def project(
        self, embedding_H: Tensor, state_H: Tensor, cos_D: Tensor, sin_D: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        layer = self.midlayer
        normed_H = layer.hidden_norm(state_H)
        joined = torch.cat([layer.input_layernorm(embedding_H), normed_H], -1)
        residual_H = normed_H if self.config.norm_before_residual else state_H
        return residual_H, *layer.self_attn.project(joined, cos_D, sin_D)

    def unroll(
        self,
        feature_BTH: Tensor,
        ids_BT: Tensor,
        rows: Sequence[Tensor],
        lengths: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """Unroll faster than the base class, by projecting each token's embedding only once.

        Projections are linear in [norm(embedding); norm(state)]. So the embedding's half is
        computed once per token instead of once per step.
        """
        layer, attention = self.midlayer, self.midlayer.self_attn
        B, T, H = feature_BTH.shape
        # Split [embedding; state] along H: the embedding's half does not depend on the step.
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        weight_CH, state_weight_CH = torch.cat([p.weight for p in projections]).split(H, 1)
        bias_C = None if projections[0].bias is None else torch.cat([p.bias for p in projections])
        # Past its end a sequence has no rows in any step, so any token will do.
        tokens = F.pad(ids_BT, (0, len(rows)))
        embedded_BTC = cpu.linear(layer.input_layernorm(self.embed(tokens)), weight_CH, bias_C)
        positions_T = positions_of(T, lengths, ids_BT.device)
        sizes = [p.out_features // attention.head_size for p in projections]

        def advance(
            step: int, state_MH: Tensor, keys: list[Tensor], values: list[Tensor]
        ) -> tuple[Tensor, Tensor, Tensor]:
            # Continue supervised rows only; no supervised row sees the others' keys.
            rows_M = rows[step]
            normed_MH = layer.hidden_norm(state_MH)
            joint_MC = cpu.linear(normed_MH, state_weight_CH)
            if step:
                # Backward of index_put needs only the rows; index_copy would need joint_MC, too.
                zeros_MC = joint_MC.new_zeros(B * T, joint_MC.shape[1])
                joint_MC = zeros_MC.index_put((rows_M,), joint_MC)
            joint_BTC = joint_MC.view(B, T, -1) + embedded_BTC[:, 1 + step : 1 + step + T]
            query, key, value = joint_BTC.unflatten(-1, (-1, attention.head_size)).split(sizes, 2)
            # A drafted row moves one position later at every step.
            turn = self.rotary.of_heads(positions_T + step, embedded_BTC.dtype)
            query_BTND = rotate(attention.q_norm(query), *turn)
            key_BJTD = rotate(attention.k_norm(key), *turn).transpose(1, 2)
            # Copy: otherwise values saved for later steps would keep the queries' memory alive.
            value_BJTD = value.contiguous().transpose(1, 2)
            attended_BNTD = ttt_attention(
                query_BTND.transpose(1, 2),
                [*keys, key_BJTD],
                [*values, value_BJTD],
                lengths,
                self.window,
            )
            attended_MND = attended_BNTD.transpose(1, 2).flatten(0, 1).index_select(0, rows_M)
            residual_MH = normed_MH if self.config.norm_before_residual else state_MH
            residual_MH = residual_MH if step else residual_MH.index_select(0, rows_M)
            return self.finish(residual_MH, attended_MND), key_BJTD, value_BJTD

        return self.repeat(advance, feature_BTH.flatten(0, 1), [len(rows_M) for rows_M in rows])

    def finish(self, residual_H: Tensor, attended_ND: Tensor) -> Tensor:
        layer = self.midlayer
        out_H = finish(layer, residual_H, attended_ND)
        return self.norm(out_H) if self.config.norm_output else out_H

    def normed(self, state_H: Tensor) -> Tensor:
        """Return the LM head's input, the state after one final norm."""
        return state_H if self.config.norm_output else self.norm(state_H)

    def logits(self, state_H: Tensor) -> Tensor:
        return self.lm_head(self.normed(state_H))
