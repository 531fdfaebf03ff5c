"""Training objective for an MTP layer, unrolled over several steps (FastMTP, arXiv:2509.18362)."""

from typing import ClassVar

from ..models.heads.configs import MTPConfig
from ..models.heads.draft import Draft, TargetReference
from ..models.heads.mtp import MTP
from ..models.transformer.layers import LayerConfig
from .eagle3 import UnrolledObjective
from .methods import MTPTrainConfig
from .objective import load_start


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
