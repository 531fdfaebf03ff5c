"""DFlash head (arXiv:2602.06036), which drafts a whole block of tokens in one forward pass.

A block is the anchor, the newest token in the sequence, followed by mask tokens. The block's rows
see each other. In every layer they also see the target's hidden states at all positions before the
anchor, projected to keys and values. Row k gives the logits for the token k positions after the
anchor, whatever tokens lie in between.
"""

# ... any leading axes, H hidden, N query heads, J key heads, D head size, U draft vocabulary
# B batch, T positions, P = B T context rows, A blocks, R rows and S draft tokens per block
# G rows in a group of blocks, K keys visible to a group

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..speed.head_layers import finish
from ..transformer.decoder import norm_factor, plain_embedding
from ..transformer.layers import (
    DecoderLayer,
    KeyValues,
    LayerConfig,
    RMSNorm,
    RotaryEmbedding,
    document_slices,
    initialize_matrices,
    masked_attention,
    positions_of,
)
from .configs import DFlashConfig
from .draft import Draft, TargetReference

GROUP_ROWS = 128
"""Block rows per attention call. A block sees no other block, so a larger call would compute more
pairs only to mask them out."""


class _Group(NamedTuple):
    """Adjacent blocks in one document that attend together."""

    blocks: slice
    context: slice
    """Context rows: all before the group's last anchor."""
    visible_GK: Tensor
    """bool [G, K]: G rows in these blocks; K keys, the context rows and then these G rows."""


class DFlash(Draft):
    """DFlash head, with a block of draft rows that attends to the target's fused features.

    The features are c_t = norm(fc([h_1; ..; h_k]_t)), the block rows x = [embed(anchor);
    embed(mask); ..]. In every layer, keys and values come from [c before the anchor; norm(x)] and
    queries from norm(x). Attention within a block is bidirectional. The target's embedding and LM
    head are attached, not saved. Layers are Qwen3 layers, as published, for every target.
    """

    draft_type: ClassVar[str] = "dflash"
    config_class: ClassVar[type] = DFlashConfig
    config: DFlashConfig
    draft_ids: Tensor

    def __init__(
        self, config: DFlashConfig, layer: LayerConfig, reference: TargetReference
    ) -> None:
        vocabulary = reference.fingerprint["vocab_size"]
        if config.mask_token_id is None or config.mask_token_id >= vocabulary:
            raise ValueError(f"mask_token_id: {config.mask_token_id} is no token of {vocabulary}")
        layer = replace(layer, has_query_key_norm=True, has_attention_bias=False)  # Qwen3's layer
        super().__init__(config, layer, reference)
        hidden, eps = layer.hidden_size, layer.rms_norm_eps
        self.fc = nn.Linear(len(config.feature_layers) * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.layers = nn.ModuleList(DecoderLayer(layer) for _ in range(config.num_layers))
        self.norm = RMSNorm(hidden, eps)
        self.rotary = RotaryEmbedding(layer)
        size = config.draft_vocab_size
        self.register_buffer(
            "draft_ids", torch.arange(size or vocabulary), persistent=size is not None
        )

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.feature_layers

    @property
    def decoder_layers(self) -> list[DecoderLayer]:
        return cast(list[DecoderLayer], list(self.layers))

    def attach(self, target: PreTrainedModel) -> None:
        """Use this target's embedding and LM head, in lists to keep them out of the parameters."""
        head = target.get_output_embeddings()
        if self.config.draft_vocab_size is not None:
            part = nn.Linear(head.in_features, len(self.draft_ids), bias=False, device="meta")
            part.weight = nn.Parameter(head.weight.detach()[self.draft_ids], requires_grad=False)
            head = part
        self._embedding, self._head = [plain_embedding(target)], [head]

    @property
    def lm_head(self) -> nn.Linear:
        """Target's LM head, or its rows for the draft vocabulary."""
        return self._head[0]

    @torch.no_grad()
    def initialize(self, target: PreTrainedModel, draft_ids: Tensor | None = None) -> None:
        """Copy the target's final norm, and let fc pass the deepest fused layer through."""
        if draft_ids is not None:
            self.draft_ids.copy_(draft_ids)
        self.attach(target)
        self.norm.weight.copy_(norm_factor(target.config, target.get_decoder().norm.weight))
        self.fc.weight.zero_()
        self.fc.weight[:, -self.layer_config.hidden_size :].fill_diagonal_(1)
        initialize_matrices(self.layers, len(self.layers))

    def feature(self, taps: Mapping[int, Tensor]) -> Tensor:
        """Return the features [..., H] that every layer projects to keys and values."""
        fused = [taps[layer] for layer in self.config.feature_layers]
        return self.hidden_norm(self.fc(torch.cat(fused, -1)))

    def embed_blocks(self, anchors_A: Tensor, num_rows: int) -> Tensor:
        """Return block rows [A, R, H], the anchor token's embedding and then mask embeddings."""
        assert self.config.mask_token_id is not None, "refused above"
        ids_AR = anchors_A.new_full((len(anchors_A), num_rows), self.config.mask_token_id)
        ids_AR[:, 0] = anchors_A
        with torch.no_grad():  # the embedding is the target's: frozen
            return self._embedding[0](ids_AR)

    def forward(
        self,
        taps: Mapping[int, Tensor],
        ids_BT: Tensor,
        anchors: Sequence[Tensor],
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """Compute blocks at many anchors in whole sequences, each block as in decoding.

        Args:
            taps: target hidden states [B, T, H] by layer index.
            anchors: on the host, for each sequence or document its ascending rows b T + t with t >
                0.
            lengths: document lengths in a packed row [1, T].

        Returns:
            Outputs [A, S, H] for ``logits``. Row k predicts the token k + 1 positions after its
            anchor.
        """
        B, T = ids_BT.shape
        # Blocks see only their own document's rows before their anchor: they attend in groups.
        groups, anchors_A = self._groups(anchors, lengths or [T] * B, ids_BT.device)
        feature_PH, R = self.feature(taps).flatten(0, 1), self.config.block_size
        # A block's rows take the positions of the tokens they predict or stand for.
        positions_P = positions_of(T, lengths, ids_BT.device).repeat(B)
        positions_AR = positions_P[anchors_A, None] + torch.arange(R, device=ids_BT.device)
        context_turn = self.rotary.of_heads(positions_P, feature_PH.dtype)
        flat_turn = self.rotary.of_heads(positions_AR.flatten(), feature_PH.dtype)
        turn = [x.unflatten(0, (-1, R)) for x in flat_turn]

        def advance(layer: DecoderLayer, stream_ARH: Tensor, feature_PH: Tensor) -> Tensor:
            # Every layer projects the target's states to context keys and values anew.
            attention, normed_ARH = layer.self_attn, layer.input_layernorm(stream_ARH)
            context = attention.key_value(feature_PH, *context_turn)
            block = attention.key_value(normed_ARH, *turn)
            query_ARND = attention.query(normed_ARH, *turn)
            return layer.finish(stream_ARH, _attend_in_groups(groups, query_ARND, context, block))

        stream_ARH = self.embed_blocks(ids_BT.flatten()[anchors_A], R).to(feature_PH.dtype)
        for layer in self.decoder_layers:
            stream_ARH = self.compute(advance, layer, stream_ARH, feature_PH)
        return self.norm(stream_ARH[:, self.config.first_row :])

    def _groups(
        self, anchors: Sequence[Tensor], lengths: Sequence[int], device: torch.device
    ) -> tuple[list[_Group], Tensor]:
        """Return groups with their visibility, and all anchors [A] on the device."""
        R, anchors_A = self.config.block_size, torch.cat(list(anchors)).to(device)
        groups, first = [], 0
        for document, places in zip(document_slices(lengths), anchors, strict=True):
            starts = range(0, len(places), max(1, GROUP_ROWS // R))
            # A few blocks per group: one call for all would mask out nearly every pair.
            for start, stop in pairwise([*starts, len(places)]):
                blocks = slice(first + start, first + stop)
                context = slice(document.start, int(places[stop - 1]))
                rows_K = torch.arange(context.start, context.stop, device=device)
                # In decoding, the target's state at the anchor is not known yet.
                before_AK = rows_K < anchors_A[blocks, None]
                own_AA = torch.eye(stop - start, dtype=torch.bool, device=device)
                visible_AK = torch.cat([before_AK, own_AA.repeat_interleave(R, 1)], 1)
                groups.append(_Group(blocks, context, visible_AK.repeat_interleave(R, 0)))
            first += len(places)
        return groups, anchors_A

    def propose(
        self,
        anchor: Tensor,
        num_rows: int,
        feature_CH: Tensor,
        *,
        position: int,
        caches: Sequence[KeyValues],
    ) -> Tensor:
        """Run a block in decoding, and cache keys and values of the context but not of the block.

        Args:
            anchor: int64 [1], the token at ``position``.
            num_rows: block rows, including the anchor. More rows than in training extrapolate.
            feature_CH: new context, up to the row before the anchor.
            caches: one per decoder layer.

        Returns:
            [S, H] after the final norm.
        """
        end = position + num_rows
        positions = torch.arange(position - len(feature_CH), end, device=anchor.device)
        visible_RC = anchor.new_ones(num_rows, end, dtype=torch.bool)
        out_SH = self.fill_block(
            anchor, num_rows, feature_CH, positions=positions, caches=caches, visible_RC=visible_RC
        )
        for cache in caches:
            # A block's rows hold masks, not tokens: later blocks must not read them.
            cache.keep(position, [])
        return out_SH

    def fill_block(
        self,
        anchor: Tensor,
        num_rows: int,
        feature_CH: Tensor,
        *,
        positions: Tensor,
        caches: Sequence[KeyValues],
        visible_RC: Tensor,
    ) -> Tensor:
        """Run ``propose`` on fixed-shape tensors, leaving the block's keys and values cached.

        Args:
            positions: for the new context, then for the block.
            visible_RC: bool, cache rows visible to the block's rows.
        """
        cos, sin = self.rotary.of_heads(positions, feature_CH.dtype)
        num_new = len(feature_CH)
        stream_RH = self.embed_blocks(anchor, num_rows)[0].to(feature_CH.dtype)
        for layer, cache in zip(self.decoder_layers, caches, strict=True):
            attention, normed_RH = layer.self_attn, layer.input_layernorm(stream_RH)
            rows = torch.cat([feature_CH, normed_RH])
            cache.append_rows(*attention.key_value(rows, cos, sin))
            query_RND = attention.query(normed_RH, cos[num_new:], sin[num_new:])
            stream_RH = finish(layer, stream_RH, cache.attend(query_RND, visible_RC))
        return self.norm(stream_RH[self.config.first_row :])

    def logits(self, state_H: Tensor) -> Tensor:
        """Return draft logits [..., U] for rows after the final norm."""
        return self.lm_head(state_H)


def _attend_in_groups(
    groups: Sequence[_Group],
    query_ARND: Tensor,
    context: Sequence[Tensor],
    block: Sequence[Tensor],
) -> Tensor:
    """Return attention [A, R, N, D] from block rows to their block and the context before it.

    Args:
        context: keys and values [P, J, D].
        block: keys and values [A, R, J, D].
    """
    outs = []
    for blocks, rows, visible_GK in groups:
        # Context up to the last anchor, then the blocks; the mask hides the rest.
        keys_KJD, values_KJD = (
            torch.cat([before_PJD[rows], own_ARJD[blocks].flatten(0, 1)])
            for before_PJD, own_ARJD in zip(context, block, strict=True)
        )
        query_GND = query_ARND[blocks].flatten(0, 1)
        attended_GND = masked_attention(
            query_GND, keys_KJD.transpose(0, 1), values_KJD.transpose(0, 1), visible_GK
        )
        outs.append(attended_GND.unflatten(0, (-1, query_ARND.shape[1])))
    # No block, yet every parameter needs a gradient, as other processes may have blocks.
    if not outs:
        return query_ARND + 0 * sum(x.sum() for x in (*context, *block))
    return torch.cat(outs)
