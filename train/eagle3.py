"""Training-time test, with a loss on every draft token in a chain, and EAGLE-3's objective."""

# B batch, T positions, H hidden, M rows in one step or in all of them, S steps

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import check_ranges
from ..models import cpu
from ..models.draft import Draft, TargetReference
from ..models.eagle3 import Eagle3, Eagle3Config
from ..models.layers import LayerConfig
from ..models.mtp import MTP
from .batch import document_lengths, document_places, inner_mask
from .objective import ChainObjective, DivergenceConfig, LossOutput


@dataclass(frozen=True, kw_only=True)
class UnrolledConfig(DivergenceConfig):
    """Loss settings for heads that are trained on chains of their own states."""

    num_steps: int = 7
    """Draft tokens trained per chain; 7 in the authors' code."""
    step_decay: float = 0.8
    """The loss of draft token i (from 0) is multiplied by step_decay ** i."""
    rows: Literal["turn", "speculators", "specforge", "official"] = "turn"
    """Rows t that count at step i. turn: x_{t+1} .. x_{t+2+i} are in one assistant turn.
    speculators: x_{t+1+i} is an assistant token; specforge and official (EAGLE-3's authors):
    x_{t+i} is one."""

    def __post_init__(self) -> None:
        check_ranges(self, {"num_steps": "[1, inf)", "step_decay": "(0, 1]"}, "model.")


@dataclass(frozen=True, kw_only=True)
class Eagle3TrainConfig(Eagle3Config, UnrolledConfig):
    """EAGLE-3 head and its loss."""

    def __post_init__(self) -> None:
        Eagle3Config.__post_init__(self)
        UnrolledConfig.__post_init__(self)


def chain_lengths(loss_mask_BT: Tensor, num_steps: int) -> Tensor:
    """Return the number of supervised steps at each row, int64 [B, T] in 0 .. num_steps.

    Step i counts at row t if x_{t+1} and the step's label x_{t+2+i} are in the same turn. All
    tokens between them are then assistant tokens.
    """
    T = loss_mask_BT.shape[1]
    positions_T = torch.arange(T, device=loss_mask_BT.device)
    # T inside a turn, else the token's own position
    ends_BT = torch.where(loss_mask_BT.bool(), T, positions_T)
    # A running minimum from the right finds the nearest turn end at or after each position.
    turn_end_BT = ends_BT.flip(1).cummin(1).values.flip(1)
    next_end_BT = F.pad(turn_end_BT[:, 1:], (0, 1), value=T)
    # Step i counts if its label t + 2 + i comes before t + 1's turn ends.
    return (next_end_BT - positions_T - 2).clamp(0, num_steps)


def counted_steps(batch: dict[str, Tensor], num_steps: int, rows: str) -> Tensor:
    """Return bool [B, T, S], True where step i counts at a row by the rule ``UnrolledConfig.rows``.

    A document has the same supervised rows alone, padded or packed. A row's target distribution
    comes from the row's own document. SpecForge and the authors' code clear the mask of a
    document's last token. speculators keeps it: there a row that feeds this token learns what the
    target predicts behind the text.
    """
    if rows == "turn":
        steps_S = torch.arange(num_steps, device=batch["loss_mask"].device)
        return chain_lengths(batch["loss_mask"], num_steps)[..., None] > steps_S
    keeps_last = rows == "speculators"
    place_BT = document_places(batch)
    mask_BT = batch["loss_mask"].bool() if keeps_last else inner_mask(batch)
    T, shift = mask_BT.shape[1], int(keeps_last)
    mask_BT = F.pad(mask_BT, (0, num_steps + shift))
    fed_BT = F.pad(place_BT, (0, num_steps + shift), value=-1)
    starts = [shift + step for step in range(num_steps)]
    counted = [mask_BT[:, at : at + T] & (fed_BT[:, at : at + T] == place_BT) for at in starts]
    return torch.stack(counted, -1)


class UnrolledObjective(ChainObjective):
    """sum_i step_decay^i KL(target || draft at step i), summed over rows supervised at step i.

    The training loop divides by the number of rows at step 0 (``num_counted``). So a sequence
    weighs as much as for any other head. Later steps have fewer rows and weigh less. The paper's
    loss is the cross-entropy, which differs from KL by a constant, the target's entropy.
    """

    noted: ClassVar[tuple[str, ...]] = ("loss", "num_steps", "step_decay")
    config: UnrolledConfig
    draft: Eagle3 | MTP

    def num_counted(self, batch: dict[str, Tensor]) -> int:
        return int(counted_steps(batch, 1, self.config.rows).sum())

    def forward(
        self, batch: dict[str, Tensor], generator: torch.Generator, *, name: str = ""
    ) -> LossOutput:
        """Compute one batch's loss, in the same way for training and evaluation."""
        draft, num_steps = self.draft, self.config.num_steps
        counted_MS = counted_steps(batch, num_steps, self.config.rows).flatten(0, 1)
        steps_S = torch.arange(num_steps, device=counted_MS.device)
        # Longest chains first: each step's rows are then a prefix of the previous step's.
        ends_M = (counted_MS * (steps_S + 1)).amax(1)
        lengths, order = ends_M.sort(descending=True, stable=True)
        # Find the supervised ones among them (all, if rows is "turn"). Sizes and places of all
        # steps take one transfer, because each transfer makes the host wait for the device.
        flags_SM = counted_MS[order].T
        counts_S = flags_SM.sum(1)
        sizes = torch.stack([(lengths[:, None] > steps_S).sum(0), counts_S]).tolist()
        counts = sizes[0]
        picked = flags_SM.nonzero()[:, 1].split(sizes[1])
        # Later steps need fewer rows; rounded up, because each new count prepares a kernel anew.
        rows = [order[: cpu.whole_rows(count)] for count in counts]
        # Only now: the transfer above would have waited for the target's forward, too.
        taps = self.hidden(batch)
        states = draft.unroll(
            draft.feature(taps), batch["input_ids"], rows, document_lengths(batch)
        )
        label_M = torch.cat([order[rows_M] + 2 + step for step, rows_M in enumerate(picked)])
        state_MH = torch.cat([s_MH[rows_M] for s_MH, rows_M in zip(states, picked, strict=True)])
        step_M = steps_S.repeat_interleave(counts_S, output_size=len(label_M))
        result = self.distil_labels(
            draft.normed(state_MH),
            label_M,
            taps,
            measure=self.measure,
            weights_M=self.config.step_decay ** step_M.double(),
        )
        return self.by_step(result, step_M, counts_S)


class Eagle3Objective(UnrolledObjective):
    """EAGLE-3 objective with its training-time test.

    The head runs on its own states as in decoding. The loss is summed over a chain's draft tokens.
    """

    draft_class: ClassVar[type[Draft]] = Eagle3
    config: Eagle3TrainConfig
    draft: Eagle3

    @classmethod
    def make_draft(cls, config: Any, layer: LayerConfig, reference: TargetReference) -> Eagle3:
        """Build the draft, with fused layers that fit the target's depth."""
        known = {f.name: getattr(config, f.name) for f in fields(Eagle3Config)}
        depth = int(reference.fingerprint["num_layers"])
        return Eagle3(Eagle3Config(**known).for_target(depth), layer, reference)
