"""PPSD's early-exit head, which drafts in pipeline-parallel self-speculative decoding.

The head continues the first stage's output for the newest token with a few decoder layers, a norm
and an LM head. All its input rows, in flight or committed, come from this stage. So plain causal
attention over the sequence suffices, and no row is computed twice.
"""

# B batch, T positions, R rows per decode call, C cached rows, H hidden, U draft vocabulary

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..speed.head_layers import cached_layer
from ..transformer.layers import (
    KeyValues,
    LayerConfig,
    causal_layer,
    initialize_matrices,
    positions_of,
)
from .configs import PPSDConfig
from .draft import StagedDraft, TargetReference, initialize_head


class PPSD(StagedDraft):
    """Decoder layers, norm and LM head on the target's first-stage output.

    Row t reads position t's state after this stage and predicts the token at t + 1. ``forward``
    computes whole sequences for training, and ``rows`` computes further rows in decoding. Both
    compute the same function.
    """

    draft_type: ClassVar[str] = "ppsd"
    config_class: ClassVar[type] = PPSDConfig
    config: PPSDConfig
    reads_rows: ClassVar[bool] = True

    def __init__(self, config: PPSDConfig, layer: LayerConfig, reference: TargetReference) -> None:
        super().__init__(config, layer, reference)
        # Layer index i is the output of layer i - 1, so the first boundary is the stage's output.
        self.exit_layer = config.cut[1]
        self.make_layers(config.num_layers)

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.exit_layer,)

    def feature(self, taps: Mapping[int, Tensor]) -> Tensor:
        return taps[self.exit_layer]

    @property
    def initial_layers(self) -> range:
        end = self.exit_layer + self.config.num_layers
        return range(self.exit_layer, min(end, self.config.num_target_layers))

    @torch.no_grad()
    def initialize(self, target: PreTrainedModel, draft_ids: Tensor | None = None) -> None:
        """Copy the layers after the first stage, the final norm and the LM head from the target.

        These layers were trained on exactly this input. Layers of another kind (recurrent, mixture
        of experts) cannot be copied. The head's layers then start random.
        """
        initialize_head(self, target, draft_ids)
        initialize_matrices(self.layers, len(self.layers))
        # Not strict: the head may have more layers than the target has after its first stage.
        for layer, index in zip(self.layers, self.initial_layers, strict=False):
            source = target.get_decoder().layers[index]
            if _shapes(layer) == _shapes(source):  # recurrent and expert layers differ
                layer.load_state_dict(source.state_dict())

    def forward(self, taps: Mapping[int, Tensor], lengths: Sequence[int] | None = None) -> Tensor:
        """Compute output rows for whole sequences with causal attention.

        Args:
            taps: target hidden states [B, T, H] by layer index.
            lengths: document lengths in a packed row [1, T].

        Returns:
            [B, T, H] before the norm. Row t predicts the token at position t + 1.
        """
        stream_BTH = taps[self.exit_layer]
        positions_T = positions_of(stream_BTH.shape[1], lengths, stream_BTH.device)
        cos, sin = self.rotary.of_heads(positions_T, stream_BTH.dtype)
        for layer in self.decoder_layers:
            stream_BTH = self.compute(causal_layer, layer, stream_BTH, cos, sin, lengths)
        return stream_BTH

    def rows(
        self,
        stream_RH: Tensor,
        *,
        positions_R: Tensor,
        caches: Sequence[KeyValues],
        visible_RC: Tensor,
    ) -> Tensor:
        """Run rows in decoding, append keys and values, and return the output rows [R, H].

        Args:
            stream_RH: first stage's output.
            caches: one per decoder layer, all with the same rows.
            visible_RC: bool, cache rows (including these R) visible to each row.
        """
        cos, sin = self.rotary.of_heads(positions_R, stream_RH.dtype)
        for layer, cache in zip(self.decoder_layers, caches, strict=True):
            stream_RH = cached_layer(layer, stream_RH, cos, sin, cache=cache, visible_RC=visible_RC)
        return stream_RH

    def step(
        self,
        tokens_R: Tensor,
        stream_RH: Tensor,
        positions_R: Tensor,
        caches: Sequence[KeyValues],
        visible_RC: Tensor,
        *,
        in_order: bool,
    ) -> Tensor:
        """Run ``rows`` with the arguments of a CUDA graph's call."""
        return self.rows(stream_RH, positions_R=positions_R, caches=caches, visible_RC=visible_RC)


def _shapes(layer: nn.Module) -> dict[str, torch.Size]:
    return {name: x.shape for name, x in layer.state_dict().items()}
