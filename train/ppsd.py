"""Training of PPSD's early-exit head: distillation, every row as it is in decoding."""

from dataclasses import dataclass, fields
from typing import ClassVar, Literal

import torch
from torch import Tensor

from pipedraft.data_recipes.batch import document_lengths
from pipedraft.inference.closed_forms import continuous_acceptance_length
from pipedraft.models.ppsd import PPSD, PPSDConfig
from pipedraft.train.objective import LossOutput, NextTokenObjective, labeled_rows

# B batch, T positions, H hidden


@dataclass(frozen=True, kw_only=True)
class PPSDTrainConfig(PPSDConfig):
    """The head and its loss."""

    loss: Literal["kl", "tv", "lk"] = "kl"
    """kl: KL(target || draft). tv, lk: total variation and -log of the acceptance probability,
    which are what decoding pays for."""

    def architecture(self) -> PPSDConfig:
        return PPSDConfig(**{f.name: getattr(self, f.name) for f in fields(PPSDConfig)})


class PPSDObjective(NextTokenObjective):
    """KL(target || head) at temperature 1, summed over rows that the assistant continues."""

    draft_class: ClassVar[type] = PPSD

    def forward(
        self, batch: dict[str, Tensor], generator: torch.Generator, *, name: str = ""
    ) -> LossOutput:
        draft, last = self.draft, self.num_target_layers
        labeled_BT = labeled_rows(batch)
        taps = self.hidden(batch)
        stream_BTH = draft(taps, document_lengths(batch))
        result = self.distil(stream_BTH, labeled_BT, self.teacher(taps[last], labeled_BT))
        sums = {
            "acceptance": result.acceptance_sum,
            "agreement": result.agreement_sum,
            "mass_outside": result.mass_outside_sum,
        }
        return LossOutput(result.loss, labeled_BT.sum(), sums)

    def summarize(self, sums: dict[str, float]) -> dict[str, float]:
        """Rates, and the L' if draft tokens are accepted independently."""
        count = max(sums["count"], 1)
        metrics = {name: sums[name] / count for name in ("loss", "acceptance", "agreement")}
        if self.config.draft_vocab_size:
            metrics["mass_outside"] = sums["mass_outside"] / count
        for key, temperature in (("agreement", 0), ("acceptance", 1)):
            simulated = continuous_acceptance_length([metrics[key]], self.config.num_stages)
            metrics[f"equivalent_acceptance_length_T{temperature}"] = simulated
        metrics["score"] = metrics["equivalent_acceptance_length_T0"]
        return metrics
