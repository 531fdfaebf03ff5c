"""Training of an MTP layer (FastMTP, arXiv:2509.18362): one layer unrolled for several tokens."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from pipedraft.models.draft import Draft, TargetReference, load_untied, resolve_folder
from pipedraft.models.layers import LayerConfig
from pipedraft.models.mtp import MTP, MTPConfig
from pipedraft.train.eagle3 import UnrolledConfig, UnrolledObjective


@dataclass(frozen=True, kw_only=True)
class MTPTrainConfig(UnrolledConfig):
    """Where the layer starts, and its loss."""

    num_steps: int = 3
    """Draft tokens of a chain that are trained, the paper's 3."""
    step_decay: float = 0.6
    """The loss of draft token i (from 0) is multiplied by step_decay ** i; 0.6 is the paper's."""
    init_from: str | None = None
    """Checkpoint of an MTP layer, such as one that `pipedraft models import --from TARGET` made;
    None: a new layer."""


class MTPObjective(UnrolledObjective):
    """The loss of EAGLE-3's training-time test with an MTP layer."""

    draft_class: ClassVar[type[Draft]] = MTP
    config: MTPTrainConfig
    draft: MTP

    def __init__(self, config: MTPTrainConfig, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        if config.init_from is not None and not self.draft.norm.weight.is_meta:
            self.draft.load_state_dict(load_start(config.init_from).state_dict())

    @staticmethod
    def check(config: MTPTrainConfig, target: PreTrainedModel) -> None:
        if config.init_from is not None:
            start = load_start(config.init_from)
            start.reference.check_fingerprint(MTP.fingerprint(target))

    @classmethod
    def make_draft(cls, config: Any, layer: LayerConfig, reference: TargetReference) -> MTP:
        """Shaped as the checkpoint that it starts from."""
        if config.init_from is not None:
            start = load_start(config.init_from)
            return MTP(start.config, start.layer_config, reference)
        depth = int(reference.fingerprint["num_layers"])
        return MTP(MTPConfig(num_target_layers=depth), layer, reference)


def load_start(place: str) -> MTP:
    """
    Raises:
        ValueError: it holds no MTP layer.
    """
    with torch.device("cpu"):  # also where networks are made on the meta device
        draft = load_untied(resolve_folder(place))
    if not isinstance(draft, MTP):
        raise ValueError(
            f"model.init_from: {place!r} holds a draft of type {draft.draft_type!r}; give one of "
            "type 'mtp', or leave it out"
        )
    return draft
