"""Training objective for an MTP layer, unrolled over several steps (FastMTP, arXiv:2509.18362)."""

from dataclasses import dataclass
from typing import ClassVar

from ..models.heads.draft import Draft, TargetReference
from ..models.heads.mtp import MTP, MTPConfig
from ..models.transformer.layers import LayerConfig
from .eagle3 import UnrolledConfig, UnrolledObjective
from .objective import load_start


@dataclass(frozen=True, kw_only=True)
class MTPTrainConfig(UnrolledConfig):
    """MTP layer's loss. init_from takes the output of `pipedraft models import --from TARGET`."""

    num_steps: int = 3
    """Draft tokens trained per chain; 3 in the paper."""
    step_decay: float = 0.6
    """Multiply the loss for draft token i (from 0) by step_decay ** i; 0.6 in the paper."""


class MTPObjective(UnrolledObjective[MTPTrainConfig]):
    """EAGLE-3's training-time test with an MTP layer."""

    draft_class: ClassVar[type[Draft]] = MTP
    draft: MTP

    @classmethod
    def make_draft(
        cls, config: MTPTrainConfig, layer: LayerConfig, reference: TargetReference
    ) -> MTP:
        """Build the layer, with the same shape as the checkpoint in init_from if there is one."""
        if config.init_from is not None:
            start = load_start(config.init_from, MTP)
            return MTP(start.config, start.layer_config, reference)
        depth = int(reference.fingerprint["num_layers"])
        return MTP(MTPConfig(num_target_layers=depth), layer, reference)
