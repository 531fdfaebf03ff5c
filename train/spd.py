"""Training of SPD's speculation module: distillation with simulated pipeline fill."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from pipedraft.data_recipes.batch import document_lengths, reorder
from pipedraft.inference.closed_forms import continuous_acceptance_length
from pipedraft.models.spd import SPD, SPDConfig
from pipedraft.train.objective import LossOutput, NextTokenObjective, labeled_rows

# B batch, T positions, H hidden, M labeled rows


@dataclass(frozen=True, kw_only=True)
class SPDTrainConfig(SPDConfig):
    """The module and its loss."""

    loss: Literal["kl", "tv", "lk"] = "kl"
    """kl: KL(target || draft), the paper's. tv, lk: total variation and -log of the acceptance
    probability, which are what decoding pays for."""
    full_probability: float = 0.5
    """Share of examples seen with all n stages occupied; the others get 1..n-1 tokens in flight."""

    def architecture(self) -> SPDConfig:
        return SPDConfig(**{f.name: getattr(self, f.name) for f in fields(SPDConfig)})


def sample_occupancy(
    num_examples: int, num_stages: int, full_probability: float, generator: torch.Generator
) -> list[int]:
    """Tokens in flight for each example: n with ``full_probability``, else uniform in 1..n-1.

    Drawn per example as in the paper. Deviation from the authors' code, which draws once per
    micro-batch.
    """
    if num_stages == 1:
        return [1] * num_examples
    is_full = torch.rand(num_examples, generator=generator) < full_probability
    partial = torch.randint(1, num_stages, (num_examples,), generator=generator)
    return torch.where(is_full, num_stages, partial).tolist()


class SPDObjective(NextTokenObjective):
    """KL(target || module) at temperature 1, summed over rows that the assistant continues."""

    draft_class: ClassVar[type] = SPD

    def forward(
        self,
        batch: dict[str, Tensor],
        generator: torch.Generator,
        *,
        occupancies: Sequence[int] | None = None,
        name: str = "",
    ) -> LossOutput:
        """Loss of one batch.

        Args:
            occupancies: evaluation: run every example at each of these instead of a random draw.
        """
        draft, last = self.draft, self.num_target_layers
        if occupancies is None:
            batch, drawn = self._fill(batch, generator)
            runs = [drawn]
        else:
            runs = [[a] * len(batch["lengths"]) for a in occupancies]
        labeled_BT = labeled_rows(batch)
        taps = self.hidden(batch)
        teacher_MH = self.teacher(taps[last], labeled_BT)
        sums: dict[str, Tensor] = {}
        for run in runs:
            stream_BTH = draft(taps, run, document_lengths(batch))
            result = self.distil(stream_BTH, labeled_BT, teacher_MH)
            prefix = f"fill{run[0]}_" if occupancies is not None else ""
            sums[prefix + "acceptance"] = result.acceptance_sum
            sums[prefix + "agreement"] = result.agreement_sum
            sums["mass_outside"] = result.mass_outside_sum
        return LossOutput(result.loss, labeled_BT.sum(), sums)

    def _fill(
        self, batch: dict[str, Tensor], generator: torch.Generator
    ) -> tuple[dict[str, Tensor], list[int]]:
        """Draw the occupancies, and order the batch by them, fullest first, as the module likes."""
        drawn = sample_occupancy(
            len(batch["lengths"]),
            self.draft.config.num_stages,
            self.config.full_probability,
            generator,
        )
        fill, order = torch.tensor(drawn).sort(descending=True, stable=True)
        return reorder(batch, order), fill.tolist()

    def evaluation_passes(self) -> list[dict[str, Any]]:
        return [{"occupancies": range(1, self.draft.config.num_stages + 1)}]

    def summarize(self, sums: dict[str, float]) -> dict[str, float]:
        count = max(sums["count"], 1)
        metrics = {"loss": sums["loss"] / count}
        if self.config.draft_vocab_size:
            metrics["mass_outside"] = sums["mass_outside"] / count
        if "acceptance" in sums:
            metrics["acceptance"] = sums["acceptance"] / count
            metrics["agreement"] = sums["agreement"] / count
            return metrics
        num_stages = self.draft.config.num_stages
        for key, temperature in (("agreement", 0), ("acceptance", 1)):
            rates = [sums[f"fill{a}_{key}"] / count for a in range(1, num_stages + 1)]
            metrics[f"{key}_filling"] = rates[0]
            metrics[key] = rates[-1]
            simulated = continuous_acceptance_length(rates, num_stages)
            metrics[f"equivalent_acceptance_length_T{temperature}"] = simulated
        metrics["score"] = metrics["equivalent_acceptance_length_T0"]
        return metrics
