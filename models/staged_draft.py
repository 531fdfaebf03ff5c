"""What drafts share that are made for a target cut into a certain number of stages."""

# H hidden, U draft vocabulary

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from pipedraft.models.draft import Draft
from pipedraft.models.layers import DecoderLayer, RMSNorm
from pipedraft.models.target import stage_boundaries


@dataclass(frozen=True, kw_only=True)
class StagedDraftConfig:
    num_stages: int = 4
    """n: pipeline stages of the target."""
    boundaries: tuple[int, ...] = ()
    """Stage boundaries 0..L when the split is uneven on purpose; empty: as even as possible."""
    num_target_layers: int = 0
    """L; filled in from the target."""
    draft_vocab_size: int | None = None
    """U: most frequent tokens of the training data; None: the target's vocabulary."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "boundaries", tuple(self.boundaries))

    @property
    def cut(self) -> tuple[int, ...]:
        """The boundaries 0..L, even ones too."""
        return self.boundaries or stage_boundaries(self.num_target_layers, self.num_stages)


class StagedDraft(Draft):
    """Has decoder layers, a norm and an LM head of its own."""

    config: StagedDraftConfig
    layers: nn.ModuleList
    norm: RMSNorm
    lm_head: nn.Linear
    draft_ids: Tensor

    @property
    def num_stages(self) -> int:
        return self.config.num_stages

    @property
    def boundaries(self) -> tuple[int, ...]:
        return self.config.boundaries

    @property
    def decoder_layers(self) -> list[DecoderLayer]:
        return cast(list[DecoderLayer], list(self.layers))

    @torch.no_grad()
    def initialise_head(self, target: Any, draft_ids: Tensor | None) -> None:
        """The target's final norm, and the rows of its LM head that the draft vocabulary has."""
        self.norm.weight.copy_(target.get_decoder().norm.weight)
        if draft_ids is not None:
            self.draft_ids.copy_(draft_ids)
        self.lm_head.weight.copy_(target.get_output_embeddings().weight[self.draft_ids])

    def logits(self, stream_H: Tensor) -> Tensor:
        """Draft logits [..., U] of output rows [..., H]; entry u is target token draft_ids[u]."""
        return self.lm_head(self.norm(stream_H))
