"""Training objective that distills PPSD's early-exit head, with every row as in decoding."""

from typing import ClassVar

import torch

from ..models.heads.draft import Draft
from ..models.heads.ppsd import PPSD
from .batch import Batch, pick
from .methods import PPSDTrainConfig
from .objective import LossOutput, StagedObjective, labeled_rows

# B batch, T positions, H hidden


class PPSDObjective(StagedObjective[PPSDTrainConfig]):
    """Divergence at temperature 1, summed over rows before an assistant token.

    The default divergence is KL(target || head).
    """

    draft_class: ClassVar[type[Draft]] = PPSD
    draft: PPSD

    def forward(self, batch: Batch, generator: torch.Generator) -> LossOutput:
        labeled_BT = labeled_rows(batch)
        taps = self.hidden(batch)
        teacher_MH = self.teacher(taps[self.num_target_layers], labeled_BT)
        stream_BTH = self.draft(taps, batch.documents)
        result = self.compare(pick(stream_BTH, labeled_BT), teacher_MH)
        return LossOutput(result.loss, labeled_BT.sum(), result.sums())

    def summarize(self, sums: dict[str, float]) -> dict[str, float]:
        count = max(sums["count"], 1)
        metrics = {"loss": sums["loss"] / count}
        if self.config.draft_vocab_size:
            metrics["mass_outside"] = sums["mass_outside"] / count
        # One rate for all: the head's input is the same however full the pipeline is.
        rates = {name: [sums[name] / count] for name in ("agreement", "acceptance")}
        return self.add_rates(metrics, rates)
