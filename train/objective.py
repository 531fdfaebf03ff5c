"""What the objectives of all draft heads share: the frozen target, the draft, its vocabulary."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipedraft.data_recipes.batch import document_lengths
from pipedraft.data_recipes.recipe import TokenizedData
from pipedraft.models.capture import capture_hidden
from pipedraft.models.draft import Draft, TargetReference, draft_vocabulary, read_description
from pipedraft.models.hub import CARD, model_card
from pipedraft.models.layers import LayerConfig
from pipedraft.models.target import target_fingerprint
from pipedraft.train.feature_reader import Features


class DraftObjective(nn.Module):
    """Base of the objectives that distil a frozen target into a draft.

    The target is held outside the module tree: no optimizer state, not saved, not broadcast.
    A subclass calls ``adopt`` with its draft and implements ``make_draft`` and the loop's
    ``Objective``.
    """

    draft: Any
    features: Features | None = None
    """Hidden states computed before or elsewhere; the target then needs no layers."""

    def __init__(
        self,
        target: Any,
        *,
        target_name: str,
        revision: str | None,
        data: TokenizedData,
        note: dict[str, Any],
    ) -> None:
        """
        Args:
            note: what the checkpoint says about its training, besides data and metrics.
        """
        super().__init__()
        self._target, self._data = [target], data
        self.layer_config = LayerConfig.from_target(target.get_decoder().config)
        self.reference = TargetReference(
            name=target_name, revision=revision, fingerprint=target_fingerprint(target)
        )
        self.training_note = {"data": data.report.to_dict(), **note}

    @staticmethod
    def check(config: Any, target: Any) -> None:
        """Raise ValueError for a configuration that does not fit the target; needs no data."""

    @classmethod
    def make_draft(cls, config: Any, layer: LayerConfig, reference: TargetReference) -> Draft:
        """The draft of a configuration, from shapes alone."""
        raise NotImplementedError

    @classmethod
    def num_auxiliary(cls, config: Any, layer: LayerConfig) -> int:
        """Parameters that are trained beside the draft and are no part of it."""
        return 0

    @property
    def target(self) -> Any:
        return self._target[0]

    @property
    def num_target_layers(self) -> int:
        return int(self.reference.fingerprint["num_layers"])

    def adopt(self, draft: Any, draft_vocab_size: int | None = None) -> None:
        """Make ``draft`` the module that is trained, started from the target.

        Args:
            draft_vocab_size: restrict its LM head to the most frequent labels of the data.
        """
        draft_ids = None
        if draft_vocab_size is not None:
            counts = label_counts(self._data, int(self.reference.fingerprint["vocab_size"]))
            draft_ids = draft_vocabulary(counts, draft_vocab_size)
        self.draft = draft
        draft.initialise(self.target, draft_ids)

    def hidden(self, batch: dict[str, Tensor]) -> dict[int, Tensor]:
        """Raw states [B, T, H] of the layers that the draft reads, and of the last, the teacher."""
        ids_BT, layers = batch["input_ids"], {*self.draft.taps, self.num_target_layers}
        if self.features is None:
            return capture_hidden(self.target, ids_BT, layers, document_lengths(batch))
        norm = self.target.get_decoder().norm
        hidden = self.features.read(batch, layers - {0}, norm.weight.dtype)
        return hidden | ({0: self.target.get_input_embeddings()(ids_BT)} if 0 in layers else {})

    def use_checkpointing(self) -> None:
        self.draft.checkpointing = True

    def num_counted(self, batch: dict[str, Tensor]) -> int:
        raise NotImplementedError

    def save(self, folder: Path, metrics: dict[str, float], weights: dict[str, Tensor]) -> None:
        own = {
            name.removeprefix("draft."): value
            for name, value in weights.items()
            if name.startswith("draft.")
        }
        note = {**self.training_note, "metrics": metrics}
        self.draft.save(folder, training=note, weights=own)
        (folder / CARD).write_text(model_card(read_description(folder)))


def label_counts(data: TokenizedData, vocab_size: int) -> Tensor:
    """How often each token is an assistant token of the training rows: int64 [V]."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for start in range(0, len(data.train), 1000):
        rows = data.train[start : start + 1000]
        for ids, mask in zip(rows["input_ids"], rows["loss_mask"], strict=True):
            supervised = torch.as_tensor(ids)[torch.as_tensor(mask, dtype=torch.bool)]
            counts += torch.bincount(supervised, minlength=vocab_size)
    return counts
