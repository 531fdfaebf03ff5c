"""Training objective for EAGLE-1, by regression on the target's hidden states and distillation."""

from contextlib import nullcontext
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..files import Values
from ..models.heads.draft import Draft
from ..models.heads.eagle import Eagle
from .batch import Batch, pick
from .eagle3 import chain_lengths
from .losses import chunked_distillation
from .methods import EagleTrainConfig
from .objective import EVALUATED_DEPTH, DraftObjective, LossOutput, acceptance_length

# B batch, T positions, R rows (t = 0 .. T-2), H hidden, M supervised rows


def chain_rows(mask_BT: Tensor, depth: int = 1) -> Tensor:
    """Return bool [B, T-1], True at rows t with tokens t+1 .. t+1+depth all in one assistant turn.

    Row t reads token t + 1 and predicts token t + 1 + depth with a chain of ``depth`` draft tokens.
    """
    # The last position has no next token to read.
    return chain_lengths(mask_BT, depth)[:, :-1] >= depth


def counted_rows(batch: Batch, rows: str) -> Tensor:
    """Return bool [B, T-1], True at the supervised rows selected by ``EagleTrainConfig.rows``.

    The last position has no row, because it has no label.
    """
    if rows == "turn":
        return chain_rows(batch.mask_BT)
    return batch.inner_mask()[:, :-1]


def feature_noise(features_BTH: Tensor, lengths: Tensor, generator: torch.Generator) -> Tensor:
    """Sample U(-1/2, 1/2) * 512 / T, where T is each example's own length as in the authors' code.

    Args:
        lengths: one per row, or one per document in a packed row.
    """
    device = features_BTH.device
    if device.type != "cpu":  # millions of numbers: sampled on the device, from a seed sampled here
        seed = int(torch.randint(2**62, (), generator=generator))
        generator = torch.Generator(device).manual_seed(seed)
    # Drawn in float32 and then rounded, so that every precision sees the same noise.
    uniform_BTH = torch.rand(features_BTH.shape, generator=generator, device=device)
    uniform_BTH = uniform_BTH.to(features_BTH.dtype)
    # A packed row has several lengths: every position uses its own document's.
    if len(lengths) > len(features_BTH):
        lengths_BT = lengths.repeat_interleave(lengths)[None]
    else:
        lengths_BT = lengths[:, None]
    scale_BT1 = (512 / lengths_BT[..., None]).to(features_BTH, non_blocking=True)
    return (uniform_BTH - 0.5) * scale_BT1


def row_lengths(lengths: list[int] | None) -> list[int] | None:
    """Return a packed row's document lengths without the row's last token, which has no label."""
    if lengths is None:
        return None
    return [*lengths[:-1], lengths[-1] - 1] if lengths[-1] > 1 else lengths[:-1]


class EagleObjective(DraftObjective[EagleTrainConfig]):
    """SmoothL1(f', f) + w * KL(target || draft), summed over rows.

    f' is the predicted next hidden state and f the true one. SmoothL1 is a mean over H. The paper's
    second term is the cross-entropy with the target's distribution. KL and cross-entropy differ by
    a constant, the target's entropy. So gradients match the paper's, and values are comparable with
    SPD's.
    """

    draft_class: ClassVar[type[Draft]] = Eagle
    noted: ClassVar[tuple[str, ...]] = ("noise", "distillation_weight")

    draft: Eagle

    def num_supervised(self, batch: Batch) -> int:
        return int(counted_rows(batch, self.config.rows).sum())

    def forward(
        self,
        batch: Batch,
        generator: torch.Generator,
        *,
        depth: int | None = None,
    ) -> LossOutput:
        """Compute one batch's loss.

        Args:
            depth: draft tokens per chain to measure in evaluation, without noise. None: training.
        """
        draft, ids_BT = self.draft, batch.ids_BT
        features_BTH = states_BTH = draft.feature(self.hidden(batch))
        # No noise in evaluations: decoding reads clean states, too.
        if depth is None and self.config.noise > 0:
            noise_BTH = feature_noise(features_BTH, torch.tensor(batch.lengths), generator)
            states_BTH = features_BTH + self.config.noise * noise_BTH
        # Row t reads the noisy state t and the next token; its label is the clean state t + 1.
        predicted_BRH = draft.causal_rows(
            ids_BT[:, 1:], states_BTH[:, :-1], row_lengths(batch.documents)
        )
        counted_BR = counted_rows(batch, self.config.rows)
        predicted_MH = pick(predicted_BRH, counted_BR)
        wanted_MH = pick(features_BTH, F.pad(counted_BR, (1, 0)))
        regression = F.smooth_l1_loss(predicted_MH, wanted_MH, reduction="sum")
        regression = regression / features_BTH.shape[-1]
        # EAGLE-1 has no LM head of its own: both sides use the target's.
        head_VH = draft.head_weight
        result = chunked_distillation(predicted_MH, head_VH, wanted_MH, head_VH)
        sums = {"regression": regression.detach(), "kl": result.loss.detach(), **result.sums()}
        if depth is not None:
            sums |= self._deeper(batch, features_BTH, depth)
        loss = regression + self.config.distillation_weight * result.loss
        return LossOutput(loss, counted_BR.sum(), sums)

    def _deeper(self, batch: Batch, features_BTH: Tensor, depth: int) -> dict[str, Tensor]:
        """Return sums for draft tokens 2 .. depth, over rows with the chain inside one turn."""
        ids_BT, lengths = batch.ids_BT, row_lengths(batch.documents)
        every_M = torch.arange(ids_BT.numel() - len(ids_BT), device=ids_BT.device)
        # This attention has no float32 kernel on CUDA; training does not need it.
        autocast = torch.autocast("cuda", torch.bfloat16) if ids_BT.is_cuda else nullcontext()
        with torch.no_grad(), autocast:
            unrolled = self.draft.unroll(features_BTH[:, :-1], ids_BT, [every_M] * depth, lengths)
        head_VH = self.draft.head_weight
        sums: dict[str, Tensor] = {}
        for step in range(2, depth + 1):
            counted_BR = chain_rows(batch.mask_BT, step)
            # No chain row's chain reaches beyond the last position. A row may be shorter than step.
            wanted_MH = pick(features_BTH, F.pad(counted_BR, (step, 0))[:, : ids_BT.shape[1]])
            drafted_MH = unrolled[step - 1].unflatten(0, counted_BR.shape)
            drafted_MH = pick(drafted_MH, counted_BR).to(wanted_MH.dtype)
            result = chunked_distillation(drafted_MH, head_VH, wanted_MH, head_VH)
            found = {"count": counted_BR.sum(), **result.sums()}
            sums |= {f"{name}_{step}": value for name, value in found.items()}
        return sums

    def evaluation_options(self) -> Values:
        return {"depth": EVALUATED_DEPTH}

    def summarize(self, sums: dict[str, float]) -> dict[str, float]:
        """Compute metrics. In evaluation, add tokens per round and each draft token's rates."""
        count = max(sums["count"], 1)
        names = ("loss", "regression", "kl", "acceptance", "agreement")
        metrics = {name: sums[name] / count for name in names}
        if "count_2" not in sums:
            return metrics
        for key, temperature in (("agreement", 0), ("acceptance", 1)):
            rates = [metrics[key]]
            for step in range(2, EVALUATED_DEPTH + 1):
                rates.append(sums[f"{key}_{step}"] / max(sums[f"count_{step}"], 1))
                metrics[f"{key}_{step}"] = rates[-1]
            metrics[f"acceptance_length_T{temperature}"] = acceptance_length(rates)
        return metrics | {"score": metrics["acceptance_length_T0"]}
