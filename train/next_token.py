"""Distillation of drafts whose row t predicts the token at t + 1: SPD's module and PPSD's head."""

# B batch, T positions, H hidden, M counted rows

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from pipedraft.data_recipes.recipe import TokenizedData
from pipedraft.models.draft import Draft, TargetReference
from pipedraft.models.layers import LayerConfig
from pipedraft.models.target import StagedTarget
from pipedraft.train.losses import DistillationLoss, chunked_distillation
from pipedraft.train.objective import DraftObjective


def counted_rows(batch: dict[str, Tensor]) -> Tensor:
    """Rows whose NEXT token is an assistant token: bool [B, T-1]."""
    return batch["loss_mask"][:, 1:].bool()


class NextTokenObjective(DraftObjective):
    """Base for drafts of a target cut into stages, with a norm and an LM head of their own.

    The configuration has the draft's fields, ``loss``, and says by ``architecture()`` which are
    the draft's.
    """

    draft_class: ClassVar[type]

    def __init__(
        self,
        config: Any,
        target: Any,
        *,
        target_name: str,
        revision: str | None,
        data: TokenizedData,
    ) -> None:
        note = {"loss": config.loss}
        super().__init__(target, target_name=target_name, revision=revision, data=data, note=note)
        self.config = config
        draft = self.make_draft(config, self.layer_config, self.reference)
        self.adopt(draft, config.draft_vocab_size)

    @classmethod
    def make_draft(cls, config: Any, layer: LayerConfig, reference: TargetReference) -> Draft:
        num_layers = reference.fingerprint["num_layers"]
        architecture = replace(config.architecture(), num_target_layers=num_layers)
        return cls.draft_class(architecture, layer, reference)

    @staticmethod
    def check(config: Any, target: Any) -> None:
        num_stages = StagedTarget(target, config.boundaries or config.num_stages).num_stages
        if num_stages != config.num_stages:
            raise ValueError(
                f"model.boundaries: {list(config.boundaries)} make {num_stages} stages, "
                f"model.num_stages is {config.num_stages}; give {config.num_stages + 1} numbers"
            )

    def num_counted(self, batch: dict[str, Tensor]) -> int:
        return int(counted_rows(batch).sum())

    def teacher(self, last_BTH: Tensor, counted_BT: Tensor) -> Tensor:
        """What the target's LM head reads on the counted rows [M, H]; last is layer L, raw."""
        with torch.no_grad():
            return self.target.get_decoder().norm(last_BTH[:, :-1][counted_BT])

    def distil(
        self, stream_BTH: Tensor, counted_BT: Tensor, teacher_MH: Tensor
    ) -> DistillationLoss:
        """Divergence of the draft's output rows from the teacher's, at temperature 1."""
        draft = self.draft
        return chunked_distillation(
            draft.norm(stream_BTH[:, :-1][counted_BT]),
            draft.lm_head.weight,
            teacher_MH,
            self.target.get_output_embeddings().weight,
            kind=self.config.loss,
            teacher_rows_U=draft.draft_ids if self.config.draft_vocab_size else None,
        )
