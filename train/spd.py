"""Training of SPD's speculation module: distillation with simulated pipeline fill."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pipedraft.cli import check_ranges
from pipedraft.data_recipes.batch import document_lengths, reorder
from pipedraft.files import Values
from pipedraft.models.draft import Draft
from pipedraft.models.spd import SPD, SPDConfig
from pipedraft.train.objective import (
    DivergenceConfig,
    LossOutput,
    StagedObjective,
    labeled_rows,
)

# B batch, T positions, H hidden, M labeled rows


@dataclass(frozen=True, kw_only=True)
class SPDTrainConfig(SPDConfig, DivergenceConfig):
    """The module and its loss."""

    full_probability: float = 0.5
    """Share of examples seen with the pipeline full, n tokens in flight (n - 1 with output states,
    m n to m n + m - 1 with m tokens a step); the others get 1 or more."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, {"full_probability": "[0, 1]"}, "model.")


def sample_occupancy(
    num_examples: int,
    most: int,
    full_probability: float,
    generator: torch.Generator,
    num_full: int = 1,
) -> list[int]:
    """Tokens in flight for each example: one of the most with ``full_probability``, else uniform
    below these ``num_full``, which a full pipeline has before the forwards of a step.

    Drawn per example as in the paper. Deviation from the authors' code, which draws once per
    micro-batch.
    """
    if most == 1:
        return [1] * num_examples
    is_full = torch.rand(num_examples, generator=generator) < full_probability
    partial = torch.randint(1, most - num_full + 1, (num_examples,), generator=generator)
    full = torch.full_like(partial, most)
    if num_full > 1:
        full -= torch.randint(0, num_full, (num_examples,), generator=generator)
    return torch.where(is_full, full, partial).tolist()


class SPDObjective(StagedObjective):
    """KL(target || module) at temperature 1, summed over rows that the assistant continues."""

    draft_class: ClassVar[type[Draft]] = SPD
    config: SPDTrainConfig
    draft: SPD

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
        if occupancies is None:
            batch, drawn = self._fill(batch, generator)
            runs = [drawn]
        else:
            runs = [[a] * len(batch["lengths"]) for a in occupancies]
        labeled_BT = labeled_rows(batch)
        # The target runs once, however often the module does.
        taps = self.hidden(batch)
        teacher_MH = self.teacher(taps[self.num_target_layers], labeled_BT)
        sums: dict[str, Tensor] = {}
        for run in runs:
            stream_BTH = self.draft(taps, run, document_lengths(batch))
            result = self.compare(stream_BTH, labeled_BT, teacher_MH)
            found = result.sums()
            # Rates depend on the fill; what the draft vocabulary lacks does not.
            sums["mass_outside"] = found.pop("mass_outside")
            prefix = f"fill{run[0]}_" if occupancies is not None else ""
            sums |= {prefix + name: value for name, value in found.items()}
        return LossOutput(result.loss, labeled_BT.sum(), sums)

    def _fill(
        self, batch: dict[str, Tensor], generator: torch.Generator
    ) -> tuple[dict[str, Tensor], list[int]]:
        """Draw the occupancies, and order the batch by them, fullest first, as the module likes."""
        drawn = sample_occupancy(
            len(batch["lengths"]),
            self.draft.config.max_in_flight,
            self.config.full_probability,
            generator,
            self.draft.config.tokens_per_step,
        )
        fill, order = torch.tensor(drawn).sort(descending=True, stable=True)
        return reorder(batch, order), fill.tolist()

    def evaluation_passes(self) -> list[Values]:
        return [{"occupancies": range(1, self.draft.config.max_in_flight + 1)}]

    def summarize(self, sums: dict[str, float]) -> dict[str, float]:
        count = max(sums["count"], 1)
        metrics = {"loss": sums["loss"] / count}
        if self.config.draft_vocab_size:
            metrics["mass_outside"] = sums["mass_outside"] / count
        names = ("acceptance", "agreement")
        if "acceptance" in sums:
            return metrics | {name: sums[name] / count for name in names}
        fills = range(1, self.draft.config.max_in_flight + 1)
        rates = {name: [sums[f"fill{a}_{name}"] / count for a in fills] for name in names}
        metrics |= {f"{name}_filling": rates[name][0] for name in names}
        return self.add_rates(metrics, rates, self.config.tokens_per_step)
