"""Objectives: the interface of methods to the training loop, and the base of all drafts."""

# B batch, T positions, M labeled rows, H hidden

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipedraft.data_recipes.batch import document_lengths
from pipedraft.data_recipes.recipe import TokenizedData
from pipedraft.inference.clock import continuous_acceptance_length
from pipedraft.models.draft import (
    Draft,
    StagedDraft,
    StagedDraftConfig,
    TargetReference,
    draft_vocabulary,
    read_description,
)
from pipedraft.models.layers import LayerConfig
from pipedraft.models.target import StagedTarget, capture_hidden
from pipedraft.train.losses import DistillationLoss, Divergence, chunked_distillation

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from pipedraft.train.feature_reader import Features


class LossOutput(NamedTuple):
    """A tuple, so that ZeRO-3 finds the tensors in it."""

    loss: Tensor
    """SUM over the counted tokens of this forward pass, differentiable."""
    counted: Tensor
    """Counted tokens of this forward pass, int64 scalar."""
    sums: dict[str, Tensor]
    """Detached sums for the metrics; ratios are computed after summing over processes."""


class Objective(nn.Module, ABC):
    """A module whose ``forward(batch, generator)`` is a method's ``LossOutput``.

    Only networks that are trained are its submodules, so a frozen target inside gets no optimizer
    state, is never saved and never broadcast.
    """

    features: "Features | None" = None
    """Hidden states computed before or elsewhere; the target then needs no layers."""

    @abstractmethod
    def num_counted(self, batch: dict[str, Tensor]) -> int:
        """Tokens that ``forward`` will count, known without running it."""

    @abstractmethod
    def use_checkpointing(self) -> None:
        """Keep of every layer its input alone, and compute the rest again in backward."""

    def evaluation_passes(self) -> list[dict[str, Any]]:
        """Keyword arguments of one validation pass each; their sums are prefixed by ``name``."""
        return [{}]

    @abstractmethod
    def summarize(self, sums: dict[str, float]) -> dict[str, float]:
        """Metrics from summed sums; the key ``score`` (higher is better) selects the best."""

    @abstractmethod
    def save(self, folder: Path, metrics: dict[str, float], weights: dict[str, Tensor]) -> None:
        """Write the network in the checkpoint format of its method.

        Args:
            weights: the module's whole state; the processes may hold a part of it each.
        """


def labeled_rows(batch: dict[str, Tensor]) -> Tensor:
    """Rows whose NEXT token is an assistant token: bool [B, T-1]."""
    return batch["loss_mask"][:, 1:].bool()


def acceptance_length(rates: list[float]) -> float:
    """Tokens per round of chains whose draft tokens are accepted at these rates.

    1 + sum_j prod_{i<=j} rates_i, as if draft tokens were accepted independently of each other.
    """
    return 1 + float(np.cumprod(rates).sum())


@dataclass(frozen=True, kw_only=True)
class DivergenceConfig:
    """The loss of heads that are trained by distillation alone."""

    loss: Divergence = "kl"
    """kl: KL(target || draft), the papers'. tv, lk: total variation and -log of the acceptance
    probability, which are what decoding pays for."""


class DraftObjective(Objective):
    """Base of the objectives that distil a frozen target into a draft.

    The target is held outside the module tree. A subclass names its draft class, implements
    ``forward`` and ``summarize``, and overrides what differs from a loss on the rows whose next
    token is the assistant's.
    """

    draft_class: ClassVar[type[Draft]]
    noted: ClassVar[tuple[str, ...]] = ()
    """Fields of the configuration that the checkpoint tells about its training."""
    config: Any
    """The draft's architecture and its loss, by the method's dataclass."""
    draft: Draft
    card: Callable[[dict[str, Any]], str] | None = None
    """Makes the README.md of a checkpoint from its config.json."""

    def __init__(
        self,
        config: "DataclassInstance",
        target: PreTrainedModel,
        *,
        target_name: str,
        revision: str | None,
        data: TokenizedData,
    ) -> None:
        super().__init__()
        self.config, self._target, self._data = config, [target], data
        self.layer_config = LayerConfig.from_target(target.get_decoder().config)
        self.reference = TargetReference(
            name=target_name,
            revision=revision,
            fingerprint=self.draft_class.fingerprint(target),
        )
        note = {name: getattr(config, name) for name in self.noted}
        self.training_note = {"data": data.report.to_dict(), **note}
        draft_ids = None
        if (size := self.draft_vocab_size) is not None:
            counts = label_counts(data, int(self.reference.fingerprint["vocab_size"]))
            draft_ids = draft_vocabulary(counts, size)
        self.draft = self.make_draft(config, self.layer_config, self.reference)
        self.draft.initialize(target, draft_ids)

    @staticmethod
    def check(config: Any, target: PreTrainedModel) -> None:
        """Raise ValueError for a configuration that does not fit the target; needs no data."""

    @classmethod
    def make_draft(cls, config: Any, layer: LayerConfig, reference: TargetReference) -> Draft:
        """The draft of a configuration, from shapes alone."""
        kind = cls.draft_class.config_class
        known: dict[str, Any] = {f.name: getattr(config, f.name) for f in fields(kind)}
        if "num_target_layers" in known:
            known["num_target_layers"] = reference.fingerprint["num_layers"]
        return cls.draft_class(kind(**known), layer, reference)

    @classmethod
    def num_auxiliary(cls, config: Any, layer: LayerConfig) -> int:
        """Parameters that are trained beside the draft and are no part of it."""
        return 0

    @property
    def draft_vocab_size(self) -> int | None:
        """Restricts the draft's LM head to the most frequent labels of the data."""
        return vars(self.config).get("draft_vocab_size")

    @property
    def target(self) -> PreTrainedModel:
        return self._target[0]

    @property
    def num_target_layers(self) -> int:
        return int(self.reference.fingerprint["num_layers"])

    def hidden(self, batch: dict[str, Tensor]) -> dict[int, Tensor]:
        """Raw hidden states [B, T, H] of the layers the draft reads, and of the last, the teacher.

        From the target, or from a dump of it.
        """
        ids_BT, layers = batch["input_ids"], {*self.draft.taps, self.num_target_layers}
        if self.features is None:
            return capture_hidden(self.target, ids_BT, layers, document_lengths(batch))
        norm = self.target.get_decoder().norm
        hidden = self.features.read(batch, layers - {0}, norm.weight.dtype)
        return hidden | ({0: self.target.get_input_embeddings()(ids_BT)} if 0 in layers else {})

    def teacher(self, last_BTH: Tensor, labeled_BT: Tensor) -> Tensor:
        """Input of the target's LM head on the labeled rows [M, H]; last is layer L, raw."""
        with torch.no_grad():
            return self.target.get_decoder().norm(last_BTH[:, :-1][labeled_BT])

    def distil(self, hidden_MH: Tensor, teacher_LH: Tensor, **options: Any) -> DistillationLoss:
        """Divergence of what the draft's LM head says from what the target's says.

        Args:
            options: of ``chunked_distillation``.
        """
        draft: Any = self.draft  # of a class with an LM head
        return chunked_distillation(
            hidden_MH,
            draft.lm_head.weight,
            teacher_LH,
            self.target.get_output_embeddings().weight,  # type: ignore[arg-type]  # a Linear
            teacher_rows_U=None if self.draft_vocab_size is None else draft.draft_ids,
            **options,
        )

    def use_checkpointing(self) -> None:
        self.draft.checkpointing = True

    def num_counted(self, batch: dict[str, Tensor]) -> int:
        return int(labeled_rows(batch).sum())

    def save(self, folder: Path, metrics: dict[str, float], weights: dict[str, Tensor]) -> None:
        prefix = "draft."  # what is trained beside the draft is no part of it
        own = {n.removeprefix(prefix): x for n, x in weights.items() if n.startswith(prefix)}
        note = {**self.training_note, "metrics": metrics}
        self.draft.save(folder, training=note, weights=own)
        if self.card is not None:
            (folder / "README.md").write_text(self.card(read_description(folder)))


class StagedObjective(DraftObjective):
    """Base for drafts of a target cut into stages, whose row t predicts the token at t + 1."""

    noted: ClassVar[tuple[str, ...]] = ("loss",)
    draft: StagedDraft

    @staticmethod
    def check(config: StagedDraftConfig, target: PreTrainedModel) -> None:
        num_stages = StagedTarget(target, config.boundaries or config.num_stages).num_stages
        if num_stages != config.num_stages:
            raise ValueError(
                f"model.boundaries: {list(config.boundaries)} make {num_stages} stages, "
                f"model.num_stages is {config.num_stages}; give {config.num_stages + 1} numbers"
            )

    def compare(
        self, stream_BTH: Tensor, labeled_BT: Tensor, teacher_MH: Tensor
    ) -> DistillationLoss:
        """Divergence of the draft's output rows from the teacher's, at temperature 1."""
        rows_MH = self.draft.norm(stream_BTH[:, :-1][labeled_BT])
        return self.distil(rows_MH, teacher_MH, kind=self.config.loss)

    def add_rates(
        self, metrics: dict[str, float], rates: Mapping[str, list[float]]
    ) -> dict[str, float]:
        """Metrics with the L' that follows if draft tokens are accepted independently.

        Args:
            rates: agreement and acceptance, each with 1 .. n tokens in the pipeline, or always.
        """
        for key, temperature in (("agreement", 0), ("acceptance", 1)):
            metrics[key] = rates[key][-1]
            simulated = continuous_acceptance_length(rates[key], self.config.num_stages)
            metrics[f"equivalent_acceptance_length_T{temperature}"] = simulated
        return metrics | {"score": metrics["equivalent_acceptance_length_T0"]}


def label_counts(data: TokenizedData, vocab_size: int) -> Tensor:
    """How often each token is an assistant token of the training rows: int64 [V]."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for start in range(0, len(data.train), 1000):
        rows = data.train[start : start + 1000]
        for ids, mask in zip(rows["input_ids"], rows["loss_mask"], strict=True):
            supervised = torch.as_tensor(ids)[torch.as_tensor(mask, dtype=torch.bool)]
            counts += torch.bincount(supervised, minlength=vocab_size)
    return counts
