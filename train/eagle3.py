"""Training of the EAGLE-3 head by training-time test: the loss of every draft token of a chain."""

# B batch, T positions, H hidden, M rows of one step or of all of them, L distinct labels, S steps

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pipedraft.data_recipes.batch import document_lengths
from pipedraft.models import cpu
from pipedraft.models.draft import Draft, TargetReference
from pipedraft.models.eagle3 import Eagle3, Eagle3Config
from pipedraft.models.layers import LayerConfig
from pipedraft.train.losses import chunked_distillation
from pipedraft.train.objective import DraftObjective, LossOutput


@dataclass(frozen=True, kw_only=True)
class Eagle3TrainConfig(Eagle3Config):
    """The head and its loss."""

    num_steps: int = 7
    """Draft tokens of a chain that are trained, the authors' 7."""
    step_decay: float = 0.8
    """The loss of draft token i (from 0) is multiplied by step_decay ** i."""
    loss: Literal["kl", "tv", "lk"] = "kl"
    """kl: KL(target || draft). tv, lk: total variation and -log of the acceptance probability,
    which are what decoding pays for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_steps < 1:
            raise ValueError(f"model.num_steps: {self.num_steps} is below 1; the paper's is 7")
        if not 0 < self.step_decay <= 1:
            raise ValueError(
                f"model.step_decay: {self.step_decay} is outside (0, 1]; the paper's is 0.8"
            )

    def architecture(self, num_target_layers: int) -> Eagle3Config:
        values = {f.name: getattr(self, f.name) for f in fields(Eagle3Config)}
        return Eagle3Config(**values).for_target(num_target_layers)


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

    @property
    def draft_vocab_size(self) -> int | None:
        return self.config.draft_vocab_size

    @classmethod
    def make_draft(cls, config: Any, layer: LayerConfig, reference: TargetReference) -> Eagle3:
        return Eagle3(config.architecture(reference.fingerprint["num_layers"]), layer, reference)

    def num_counted(self, batch: dict[str, Tensor]) -> int:
        return int(chain_lengths(batch["loss_mask"], 1).sum())

    def forward(
        self, batch: dict[str, Tensor], generator: torch.Generator, *, name: str = ""
    ) -> LossOutput:
        """Loss of one batch; training and evaluation are the same."""
        target, draft, num_steps = self.target, self.draft, self.config.num_steps
        last = draft.config.num_target_layers
        # Longest chains first: the rows of a step are then a prefix of those of the step before.
        lengths, order = (
            chain_lengths(batch["loss_mask"], num_steps)
            .flatten()
            .sort(descending=True, stable=True)
        )
        steps_S = torch.arange(num_steps, device=order.device)
        counts_S = (lengths[:, None] > steps_S).sum(0)
        counts = counts_S.tolist()
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
        with torch.no_grad():
            teacher_LH = target.get_decoder().norm(taps[last].flatten(0, 1)[label_L - 1])
        result = chunked_distillation(
            draft.normed(state_MH.index_select(0, by_label_M)),
            draft.lm_head.weight,
            teacher_LH,
            target.get_output_embeddings().weight,
            kind=self.config.loss,
            teacher_index_M=teacher_index_M,
            teacher_rows_U=draft.draft_ids if self.config.draft_vocab_size else None,
            weights_M=self.config.step_decay ** step_M.double(),
        )
        sums = {"mass_outside": result.mass_outside_sum}
        zeros_S = result.loss.new_zeros(num_steps)
        acceptance_S = zeros_S.index_add(0, step_M, result.acceptance_M)
        agreement_S = zeros_S.index_add(0, step_M, result.agreement_M)
        for step in range(num_steps):
            sums[f"count_{step + 1}"] = counts_S[step]
            sums[f"acceptance_{step + 1}"] = acceptance_S[step]
            sums[f"agreement_{step + 1}"] = agreement_S[step]
        return LossOutput(result.loss, counts_S[0], sums)

    def summarize(self, sums: dict[str, float]) -> dict[str, float]:
        """Rates of every draft token of a chain after right ones, and the tokens per round they
        give: 1 + sum_i prod_{j<=i} a_j, as if draft tokens were accepted independently of each
        other."""
        metrics = {"loss": sums["loss"] / max(sums["count"], 1)}
        steps = range(1, self.config.num_steps + 1)
        if self.config.draft_vocab_size:
            rows = sum(sums[f"count_{step}"] for step in steps)
            metrics["mass_outside"] = sums["mass_outside"] / max(rows, 1)
        for key, temperature in (("agreement", 0), ("acceptance", 1)):
            rates = [sums[f"{key}_{step}"] / max(sums[f"count_{step}"], 1) for step in steps]
            metrics |= {f"{key}_{step}": rate for step, rate in zip(steps, rates, strict=True)}
            metrics[f"acceptance_length_T{temperature}"] = 1 + float(np.cumprod(rates).sum())
        metrics["score"] = metrics["acceptance_length_T0"]
        return metrics
