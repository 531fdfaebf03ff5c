"""PPSD's early-exit head: the draft of pipeline-parallel self-speculative decoding.

The head continues what the first stage of a pipelined target makes of the newest token: a few
decoder layers, a norm and an LM head on the first stage's output. All of its rows have the same
depth, in flight and committed, so it is plain causal attention over the text, and a row never has
to be computed twice.
"""

# B batch, T positions, R rows of a decode call, C cached rows, H hidden, U draft vocabulary

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from pipedraft.models.causal import cached_layer, causal_layer
from pipedraft.models.documents import positions_of
from pipedraft.models.draft import Draft, TargetReference
from pipedraft.models.key_values import KeyValues
from pipedraft.models.layers import (
    DecoderLayer,
    LayerConfig,
    RMSNorm,
    RotaryEmbedding,
    initialise_matrices,
)
from pipedraft.models.target import stage_boundaries


@dataclass(frozen=True, kw_only=True)
class PPSDConfig:
    """Architecture of the head."""

    num_stages: int = 4
    """n: pipeline stages of the target; the head reads the first one's output."""
    num_layers: int = 1
    """Decoder layers of the head (Ls). Every step waits for them: S = L' L / (Ls n + L)."""
    boundaries: tuple[int, ...] = ()
    """Stage boundaries 0..L when the split is uneven on purpose; empty: as even as possible."""
    num_target_layers: int = 0
    """L; filled in from the target."""
    draft_vocab_size: int | None = None
    """U: most frequent tokens of the training data; None: the target's vocabulary."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "boundaries", tuple(self.boundaries))
        if self.num_stages < 2:
            raise ValueError(
                f"model.num_stages: {self.num_stages} leaves nothing to guess while a token "
                "travels; give at least 2"
            )
        if self.num_layers < 1:
            raise ValueError(f"model.num_layers: {self.num_layers} is below 1; give at least 1")


class PPSD(Draft):
    """Decoder layers, norm and LM head on the output of the target's first stage.

    Row t reads the state of position t after that stage and predicts the token at t + 1. Train and
    decode compute the same function: ``forward`` for whole texts, ``rows`` for some more rows.
    """

    draft_type: ClassVar[str] = "ppsd"
    config_class: ClassVar[type] = PPSDConfig
    draft_ids: Tensor

    def __init__(self, config: PPSDConfig, layer: LayerConfig, reference: TargetReference) -> None:
        super().__init__(config, layer, reference)
        ends = config.boundaries or stage_boundaries(config.num_target_layers, config.num_stages)
        self.exit_layer = ends[1]
        self.layers = nn.ModuleList(DecoderLayer(layer) for _ in range(config.num_layers))
        self.norm = RMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.rotary = RotaryEmbedding(layer)
        size = config.draft_vocab_size or reference.fingerprint["vocab_size"]
        self.lm_head = nn.Linear(layer.hidden_size, size, bias=False)
        self.register_buffer("draft_ids", torch.arange(size))

    @property
    def num_stages(self) -> int:
        return self.config.num_stages

    @property
    def boundaries(self) -> tuple[int, ...]:
        return self.config.boundaries

    @property
    def taps(self) -> tuple[int, ...]:
        """Layer indices of the target that the head reads."""
        return (self.exit_layer,)

    @property
    def initial_layers(self) -> range:
        end = self.exit_layer + self.config.num_layers
        return range(self.exit_layer, min(end, self.config.num_target_layers))

    @torch.no_grad()
    def initialise(self, target: Any, draft_ids: Tensor | None = None) -> None:
        """Start from the target: the layers after the first stage, the final norm, the LM head.

        Those layers know this very input. Layers of another kind (recurrent, mixture-of-experts)
        cannot be taken over, and the head's start random in their place.
        """
        self.norm.weight.copy_(target.get_decoder().norm.weight)
        if draft_ids is not None:
            self.draft_ids.copy_(draft_ids)
        self.lm_head.weight.copy_(target.get_output_embeddings().weight[self.draft_ids])
        initialise_matrices(self.layers, len(self.layers))
        for layer, index in zip(self.layers, self.initial_layers, strict=False):
            source = target.get_decoder().layers[index]
            if _shapes(layer) == _shapes(source):
                layer.load_state_dict(source.state_dict())

    def _decoder_layers(self) -> list[DecoderLayer]:
        return cast(list[DecoderLayer], list(self.layers))

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        cos, sin = self.rotary(positions, dtype)
        return cos[:, None], sin[:, None]

    def forward(self, taps: Mapping[int, Tensor], lengths: Sequence[int] | None = None) -> Tensor:
        """Output rows of whole texts, each seeing those up to itself.

        Args:
            taps: hidden states [B, T, H] of the target, by layer index.
            lengths: of the documents in a packed row [1, T].

        Returns:
            [B, T, H], before the norm; row t predicts the token at position t + 1.
        """
        stream_BTH = taps[self.exit_layer]
        positions_T = positions_of(stream_BTH.shape[1], lengths, stream_BTH.device)
        cos, sin = self._rotation(positions_T, stream_BTH.dtype)
        for layer in self._decoder_layers():
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
        """Decode-time rows: appends their keys and values, returns the output rows [R, H].

        Args:
            stream_RH: the first stage's output.
            caches: one for each decoder layer, all with the same rows.
            visible_RC: bool, rows of the caches (these R ones included) that each row may see.
        """
        cos, sin = self._rotation(positions_R, stream_RH.dtype)
        for layer, cache in zip(self._decoder_layers(), caches, strict=True):
            stream_RH = cached_layer(layer, stream_RH, cos, sin, cache=cache, visible_RC=visible_RC)
        return stream_RH

    def logits(self, stream_H: Tensor) -> Tensor:
        """Draft logits [..., U] of output rows [..., H]; entry u is target token draft_ids[u]."""
        return self.lm_head(self.norm(stream_H))


def _shapes(layer: nn.Module) -> dict[str, torch.Size]:
    return {name: x.shape for name, x in layer.state_dict().items()}
