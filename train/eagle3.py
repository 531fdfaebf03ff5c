"""Training of the EAGLE-3 head by training-time test: the loss of every draft token of a chain."""

# B batch, T positions, H hidden, M rows of one step or of all of them, L distinct labels, S steps

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from pipedraft.data_recipes.batch import document_lengths
from pipedraft.models import cpu
from pipedraft.models.draft import Draft, TargetReference
from pipedraft.models.eagle3 import Eagle3, Eagle3Config
from pipedraft.models.layers import LayerConfig
from pipedraft.train.objective import (
    DivergenceConfig,
    DraftObjective,
    LossOutput,
    acceptance_length,
)


@dataclass(frozen=True, kw_only=True)
class Eagle3TrainConfig(Eagle3Config, DivergenceConfig):
    """The head and its loss."""

    num_steps: int = 7
    """Draft tokens of a chain that are trained, the authors' 7."""
    step_decay: float = 0.8
    """The loss of draft token i (from 0) is multiplied by step_decay ** i."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_steps < 1:
            raise ValueError(f"model.num_steps: {self.num_steps} is below 1; the paper's is 7")
        if not 0 < self.step_decay <= 1:
            raise ValueError(
                f"model.step_decay: {self.step_decay} is outside (0, 1]; the paper's is 0.8"
            )


def chain_lengths(loss_mask_BT: Tensor, num_steps: int) -> Tensor:
    """How many steps count at each row: int64 [B, T] in 0 .. num_steps.

    Step i counts at row t if x_{t+1} and its label x_{t+2+i} are of the same turn, which is to say
    that all tokens from one to the other are assistant tokens.
    """
    T = loss_mask_BT.shape[1]
    positions_T = torch.arange(T, device=loss_mask_BT.device)
    ends_BT = torch.where(loss_mask_BT.bool(), T, positions_T)  # T, or a token outside any turn
    turn_end_BT = ends_BT.flip(1).cummin(1).values.flip(1)
    next_end_BT = F.pad(turn_end_BT[:, 1:], (0, 1), value=T)
    return (next_end_BT - positions_T - 2).clamp(0, num_steps)


class Eagle3Objective(DraftObjective):
    """sum_i step_decay^i KL(target || draft of step i), summed over the rows that count at step i.

    The mean that the loop takes is over the rows of step 0 (``num_counted``), so that a text counts
    as much as for any other head, and later steps as little as they have rows. The paper's loss is
    the cross-entropy: KL differs from it by the target's entropy, which the draft cannot change.
    """

    draft_class: ClassVar[type[Draft]] = Eagle3
    noted: ClassVar[tuple[str, ...]] = ("loss", "num_steps", "step_decay")

    config: Eagle3TrainConfig
    draft: Eagle3

    @classmethod
    def make_draft(cls, config: Any, layer: LayerConfig, reference: TargetReference) -> Eagle3:
        """The draft, its fused layers chosen by the target's depth."""
        known = {f.name: getattr(config, f.name) for f in fields(Eagle3Config)}
        depth = int(reference.fingerprint["num_layers"])
        return Eagle3(Eagle3Config(**known).for_target(depth), layer, reference)

    def num_counted(self, batch: dict[str, Tensor]) -> int:
        return int(chain_lengths(batch["loss_mask"], 1).sum())

    def forward(
        self, batch: dict[str, Tensor], generator: torch.Generator, *, name: str = ""
    ) -> LossOutput:
        """Loss of one batch; training and evaluation are the same."""
        draft, num_steps = self.draft, self.config.num_steps
        # Longest chains first: the rows of a step are then a prefix of those of the step before.
        lengths, order = (
            chain_lengths(batch["loss_mask"], num_steps)
            .flatten()
            .sort(descending=True, stable=True)
        )
        steps_S = torch.arange(num_steps, device=order.device)
        counts_S = (lengths[:, None] > steps_S).sum(0)
        counts = counts_S.tolist()
        # Later steps run on fewer rows, but on no fewer than a product does as fast.
        rows = [order[: cpu.whole_rows(count)] for count in counts]
        taps = self.hidden(batch)
        states = draft.unroll(
            draft.feature(taps), batch["input_ids"], rows, document_lengths(batch)
        )
        label_M = torch.cat([order[:count] + 2 + step for step, count in enumerate(counts)])
        state_MH = torch.cat([state[:count] for state, count in zip(states, counts, strict=True)])
        # By label: the rows that predict the same token share the target's distribution of it.
        label_M, by_label_M = label_M.sort(stable=True)
        label_L, teacher_index_M = label_M.unique_consecutive(return_inverse=True)
        step_M = steps_S.repeat_interleave(counts_S)[by_label_M]
        # Positions are flat over the batch, so that one index finds the row before a label.
        with torch.no_grad():
            last_BTH = taps[draft.config.num_target_layers]
            teacher_LH = self.target.get_decoder().norm(last_BTH.flatten(0, 1)[label_L - 1])
        result = self.distil(
            draft.normed(state_MH.index_select(0, by_label_M)),
            teacher_LH,
            kind=self.config.loss,
            teacher_index_M=teacher_index_M,
            weights_M=self.config.step_decay ** step_M.double(),
        )
        # The steps are mixed by now: their rates are added up again by step.
        zeros_S = result.loss.new_zeros(num_steps)
        sums_S = {
            "count": counts_S,
            "acceptance": zeros_S.index_add(0, step_M, result.acceptance_M),
            "agreement": zeros_S.index_add(0, step_M, result.agreement_M),
        }
        sums = {"mass_outside": result.mass_outside_M.sum()}
        for name, values_S in sums_S.items():
            sums |= {f"{name}_{step}": value for step, value in enumerate(values_S, 1)}
        return LossOutput(result.loss, counts_S[0], sums)

    def summarize(self, sums: dict[str, float]) -> dict[str, float]:
        """Rates of every draft token of a chain after right ones, and the tokens per round."""
        metrics = {"loss": sums["loss"] / max(sums["count"], 1)}
        steps = range(1, self.config.num_steps + 1)
        if self.config.draft_vocab_size:
            rows = sum(sums[f"count_{step}"] for step in steps)
            metrics["mass_outside"] = sums["mass_outside"] / max(rows, 1)
        for key, temperature in (("agreement", 0), ("acceptance", 1)):
            rates = [sums[f"{key}_{step}"] / max(sums[f"count_{step}"], 1) for step in steps]
            metrics |= {f"{key}_{step}": rate for step, rate in zip(steps, rates, strict=True)}
            metrics[f"acceptance_length_T{temperature}"] = acceptance_length(rates)
        return metrics | {"score": metrics["acceptance_length_T0"]}
