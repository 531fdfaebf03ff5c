"""Training objective for FlexSpec, by regression on final hidden states and distillation."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..files import Values
from ..models.heads.draft import Draft
from ..models.heads.flexspec import FlexSpec, check_anchor
from ..models.transformer.layers import LayerConfig
from .batch import Batch, pick, put
from .methods import FlexSpecTrainConfig
from .objective import EVALUATED_DEPTH, DraftObjective, LossOutput, labeled_rows

# B batch, T positions, S rows (t = 0 .. T-2), E readings, H hidden, M labeled rows


def prefix_survival(rates_M: Tensor, labeled_BS: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Sum the probabilities that chains with 1 .. depth draft tokens are accepted as a whole.

    A chain starts after each row. Each rate assumes that the chain's earlier draft tokens are the
    sequence's own.

    Args:
        rates_M: acceptance probability for the draft token after each supervised row.
        labeled_BS: bool, True at rows before an assistant token.

    Returns:
        Two tensors [depth], for the lengths 1 .. depth: the product of this many consecutive rates,
        summed over all rows; and the number of rows starting a run of this many supervised rows.
    """
    # Other rows have rate 0: no chain survives its turn's end.
    rates_BS = rates_M.new_zeros(labeled_BS.shape).masked_scatter(labeled_BS, rates_M)
    alive_BS, inside_BS = torch.ones_like(rates_BS), torch.ones_like(labeled_BS)
    num_rows, sums, counts = labeled_BS.shape[1], [], []
    # A longer chain survives if the shorter one did and the row after it does.
    for step in range(depth):
        rows = slice(step, step + num_rows)
        alive_BS = alive_BS * F.pad(rates_BS, (0, depth))[:, rows]
        inside_BS = inside_BS & F.pad(labeled_BS, (0, depth))[:, rows]
        sums.append(alive_BS.sum())
        counts.append(inside_BS.sum())
    return torch.stack(sums), torch.stack(counts)


class FlexSpecObjective(DraftObjective[FlexSpecTrainConfig]):
    """l1 * mean_H (W_p h_d - h_t)^2 + l2 * T^2 * KL(target || draft), summed over rows.

    The rows are those before an assistant token. h_t is the target's hidden state after its final
    norm, and h_d is the input to the draft's vocabulary projection (equations 5 and 6 in the
    paper). The matrix W_p is trained, too, but does not belong to the draft.
    """

    draft_class: ClassVar[type[Draft]] = FlexSpec
    noted: ClassVar[tuple[str, ...]] = (
        "feature_weight",
        "distillation_weight",
        "distillation_temperature",
    )

    draft: FlexSpec

    def __init__(self, config: FlexSpecTrainConfig, target: PreTrainedModel, **origin: Any) -> None:
        super().__init__(config, target, **origin)
        if config.feature_weight > 0:
            hidden = self.layer_config.hidden_size
            self.regressor = nn.Linear(hidden, hidden, bias=False)
            nn.init.eye_(self.regressor.weight)

    @classmethod
    def num_auxiliary(cls, config: FlexSpecTrainConfig, layer: LayerConfig) -> int:
        return layer.hidden_size**2 if config.feature_weight > 0 else 0

    @staticmethod
    def check(config: FlexSpecTrainConfig, target: PreTrainedModel) -> None:
        check_anchor(target)

    def forward(
        self,
        batch: Batch,
        generator: torch.Generator,
        *,
        depth: int | None = None,
    ) -> LossOutput:
        """Compute one batch's loss.

        Args:
            depth: maximum draft tokens per chain to measure survival in evaluation. None: training.
        """
        config, temperature = self.config, self.config.distillation_temperature
        labeled_BT = labeled_rows(batch)
        # Both terms compare the LM heads' inputs on the same rows, those before a label.
        last_BTH = self.hidden(batch)[self.num_target_layers]
        readings_BTEH = self.draft(batch.ids_BT, batch.documents)
        wanted_MH = self.teacher(last_BTH, labeled_BT)
        hidden_MH = pick(readings_BTEH[:, :, -1], labeled_BT)
        # Heads are linear: dividing their inputs divides the logits.
        result = self.distil(hidden_MH / temperature, wanted_MH / temperature)
        # Gradients shrink with 1 / T^2; the factor keeps the balance between the terms.
        loss = config.distillation_weight * temperature**2 * result.loss
        sums = {"kl": result.loss.detach(), **result.sums()}
        if config.feature_weight > 0:
            regression = self._regression(hidden_MH, wanted_MH)
            loss = loss + config.feature_weight * regression
            sums["regression"] = regression.detach()
        if not config.draft_vocab_size:
            del sums["mass_outside"]
        if temperature != 1:  # it compares the scaled distributions, which decoding never uses
            del sums["acceptance"]
        if depth is not None:
            sums |= self._survival(hidden_MH, wanted_MH, labeled_BT[:, :-1], depth)
        return LossOutput(loss, labeled_BT.sum(), sums)

    def _regression(self, hidden_MH: Tensor, wanted_MH: Tensor) -> Tensor:
        # In 16 bits, small errors would underflow when squared.
        dtype = torch.promote_types(wanted_MH.dtype, torch.float32)
        mapped_MH = self.regressor(hidden_MH).to(dtype)
        error = F.mse_loss(mapped_MH, wanted_MH.to(dtype), reduction="sum")
        return error / wanted_MH.shape[-1]

    def _survival(
        self, hidden_MH: Tensor, wanted_MH: Tensor, labeled_BS: Tensor, depth: int
    ) -> dict[str, Tensor]:
        """Return survival sums by chain length at temperatures 0 and 1, independent of the loss."""
        result = self.distil(hidden_MH, wanted_MH)
        sums = {"acceptance": result.acceptance_M.sum()}
        for key, rates_M in (("T0", result.agreement_M), ("T1", result.acceptance_M)):
            survived, counts = prefix_survival(rates_M, put(labeled_BS, rates_M), depth)
            for step in range(depth):
                sums[f"survived_{key}_{step + 1}"] = survived[step]
                sums[f"chains_{step + 1}"] = counts[step]
        return sums

    def evaluation_options(self) -> Values:
        return {"depth": EVALUATED_DEPTH}

    def summarize(self, sums: dict[str, float]) -> dict[str, float]:
        """Compute metrics.

        In evaluation, add measured chain survival and tokens per round, 1 + sum_j s_j. The survival
        s_j is the fully accepted share among the chains with j draft tokens.
        """
        count = max(sums["count"], 1)
        names = ("loss", "regression", "kl", "acceptance", "agreement", "mass_outside")
        metrics = {name: sums[name] / count for name in names if name in sums}
        if "chains_1" not in sums:
            return metrics
        for key in ("T0", "T1"):
            survival = [
                sums[f"survived_{key}_{step}"] / max(sums[f"chains_{step}"], 1)
                for step in range(1, EVALUATED_DEPTH + 1)
            ]
            metrics |= {f"survival_{key}_{j}": rate for j, rate in enumerate(survival, 1)}
            metrics[f"acceptance_length_{key}"] = 1 + sum(survival)
        metrics["score"] = metrics["acceptance_length_T0"]
        return metrics
