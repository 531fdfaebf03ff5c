"""Train DSpark with DFlash's loss, given the true previous tokens, and with a confidence loss."""

# M supervised rows, L teacher rows, H hidden plus r, U draft vocabulary

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from ..models.heads.draft import Draft
from ..models.heads.dspark import DSpark
from .dflash import DFlashObjective
from .methods import DSparkTrainConfig
from .objective import LossOutput


class DSparkObjective(DFlashObjective[DSparkTrainConfig]):
    """DFlash's loss on the biased logits, plus cross-entropy between confidence c and label a.

    a = sum_v min(p_v, q_v) is the probability that a draft token sampled from q is accepted. It is
    a label without gradient. Both losses use the position weights.
    """

    draft_class: ClassVar[type[Draft]] = DSpark
    noted: ClassVar[tuple[str, ...]] = (*DFlashObjective.noted, "confidence_weight")

    draft: DSpark

    @property
    def pair_UR(self) -> Tensor | None:
        return self.draft.pair_UR

    def add_loss(
        self, output: LossOutput, states_MH: Tensor, acceptance_M: Tensor, weights_M: Tensor
    ) -> LossOutput:
        if self.config.confidence == "none":
            return output
        logit_M = self.draft.acceptance(states_MH).to(acceptance_M.dtype)
        # Rounding may leave a sum of probabilities above one.
        label_M = acceptance_M.clamp(max=1)
        entropy_M = F.binary_cross_entropy_with_logits(logit_M, label_M, reduction="none")
        loss = self.config.confidence_weight * (entropy_M * weights_M).sum()
        error = (logit_M.detach().sigmoid() - label_M).abs().sum()
        return output._replace(
            loss=output.loss + loss, sums=output.sums | {"confidence_error": error}
        )

    def summarize(self, sums: dict[str, float]) -> dict[str, float]:
        """Return DFlash's metrics and the confidence's mean absolute error."""
        metrics = super().summarize(sums)
        if "confidence_error" in sums:
            rows = sum(sums[f"count_{step}"] for step in range(1, self.num_steps + 1))
            metrics["confidence_error"] = sums["confidence_error"] / max(rows, 1)
        return metrics
