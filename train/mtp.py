"""Training of an MTP layer (FastMTP, arXiv:2509.18362): one layer unrolled for several tokens."""

from dataclasses import dataclass
from typing import Any, ClassVar

from pipedraft.models.draft import Draft, TargetReference
from pipedraft.models.layers import LayerConfig
from pipedraft.models.mtp import MTP, MTPConfig
from pipedraft.train.eagle3 import UnrolledConfig, UnrolledObjective
from pipedraft.train.objective import load_start


@dataclass(frozen=True, kw_only=True)
class MTPTrainConfig(UnrolledConfig):
    """An MTP layer's loss; init_from takes what `pipedraft models import --from TARGET` makes."""

    num_steps: int = 3
    """Draft tokens of a chain that are trained, the paper's 3."""
    step_decay: float = 0.6
    """The loss of draft token i (from 0) is multiplied by step_decay ** i; 0.6 is the paper's."""


class MTPObjective(UnrolledObjective):
    """The loss of EAGLE-3's training-time test with an MTP layer."""

    draft_class: ClassVar[type[Draft]] = MTP
    config: MTPTrainConfig
    draft: MTP

    @classmethod
    def make_draft(cls, config: Any, layer: LayerConfig, reference: TargetReference) -> MTP:
        """Shaped as the checkpoint that it starts from."""
        if config.init_from is not None:
            start = load_start(config.init_from, MTP)
            return MTP(start.config, start.layer_config, reference)
        depth = int(reference.fingerprint["num_layers"])
        return MTP(MTPConfig(num_target_layers=depth), layer, reference)
