"""Training-time test, with a loss on every draft token in a chain, and EAGLE-3's objective."""

# B batch, T positions, H hidden, M rows in one step or in all of them, S steps

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.heads.configs import Eagle3Config
from ..models.heads.draft import Draft, TargetReference
from ..models.heads.eagle3 import Eagle3
from ..models.heads.mtp import MTP
from ..models.transformer.layers import LayerConfig
from .batch import Batch, pick, put
from .methods import Eagle3TrainConfig, UnrolledConfig
from .objective import ChainObjective, LossOutput
from .ridge import FITTED_ROWS, Ridge

UnrolledC = TypeVar("UnrolledC", bound=UnrolledConfig)
FUSED_PENALTY, STEP_PENALTY = 1e-4, 0.01
"""Penalties of the two initial fits."""
SELF_SCORE = 8.0
"""Initial attention score of a row for itself; a higher one leaves less attention to learn."""


def chain_lengths(mask_BT: Tensor, num_steps: int) -> Tensor:
    """Return the number of supervised steps at each row, int64 [B, T] in 0 .. num_steps.

    Step i counts at row t if x_{t+1} and the step's label x_{t+2+i} are in the same turn. All
    tokens between them are then assistant tokens.
    """
    T = mask_BT.shape[1]
    positions_T = torch.arange(T)
    # T inside a turn, else the token's own position
    ends_BT = torch.where(mask_BT, T, positions_T)
    # A running minimum from the right finds the nearest turn end at or after each position.
    turn_end_BT = ends_BT.flip(1).cummin(1).values.flip(1)
    next_end_BT = F.pad(turn_end_BT[:, 1:], (0, 1), value=T)
    # Step i counts if its label t + 2 + i comes before t + 1's turn ends.
    return (next_end_BT - positions_T - 2).clamp(0, num_steps)


def counted_steps(batch: Batch | Mapping[str, Tensor], num_steps: int, rows: str) -> Tensor:
    """Return bool [B, T, S], True where step i counts at a row by the rule ``UnrolledConfig.rows``.

    A document has the same supervised rows alone, padded or packed. A row's target distribution
    comes from the row's own document. SpecForge and the authors' code clear the mask of a
    document's last token. speculators keeps it: a row with this token as input then learns the
    target's prediction after the text.

    Args:
        batch: or tensors by name, as ``Batch.of`` takes them, to compare with a peer's rows.
    """
    batch = Batch.of(batch)
    if rows == "turn":
        return chain_lengths(batch.mask_BT, num_steps)[..., None] > torch.arange(num_steps)
    keeps_last = rows == "speculators"
    place_BT = batch.places()
    mask_BT = batch.mask_BT if keeps_last else batch.inner_mask()
    T, shift = mask_BT.shape[1], int(keeps_last)
    mask_BT = F.pad(mask_BT, (0, num_steps + shift))
    fed_BT = F.pad(place_BT, (0, num_steps + shift), value=-1)
    starts = [shift + step for step in range(num_steps)]
    counted = [mask_BT[:, at : at + T] & (fed_BT[:, at : at + T] == place_BT) for at in starts]
    return torch.stack(counted, -1)


class UnrolledObjective(ChainObjective[UnrolledC]):
    """sum_i step_decay^i KL(target || draft at step i), summed over rows supervised at step i.

    The training loop divides by the number of rows at step 0 (``num_supervised``). So a sequence
    weighs as much as for any other head. Later steps have fewer rows and weigh less. The paper's
    loss is the cross-entropy: KL plus a constant, the target's entropy.

    With ``curriculum_steps``, a run's first part trains shorter chains. Evaluations never do.
    """

    noted: ClassVar[tuple[str, ...]] = ("loss", "feature_weight", "num_steps", "step_decay")
    draft: Eagle3 | MTP

    @property
    def num_steps(self) -> int:
        return self.config.num_steps

    def notes(self) -> Iterator[str]:
        yield from super().notes()
        first, share = self.config.curriculum_steps, self.config.curriculum_share
        if 0 < first < self.num_steps:
            yield (
                f"chains of {first} draft tokens in the first {share:.0%} of the steps, then of "
                f"{self.num_steps}: the loss then sums more terms, and a step takes longer"
            )

    def counted(self, batch: Batch) -> Tensor:
        """Return bool [P, S] on the host, True where step i of those at present counts at a row."""
        config, num_steps = self.config, self.num_steps
        if torch.is_grad_enabled() and self.done < config.curriculum_share:
            num_steps = min(config.curriculum_steps or num_steps, num_steps)
        return counted_steps(batch, num_steps, config.rows).flatten(0, 1)

    def num_supervised(self, batch: Batch) -> int:
        return int(self.counted(batch)[:, 0].sum())

    def forward(self, batch: Batch, generator: torch.Generator) -> LossOutput:
        """Compute one batch's loss, in the same way for training and evaluation."""
        draft, counted_PS = self.draft, self.counted(batch)
        steps_S = torch.arange(counted_PS.shape[1])
        # Longest chains first: each step's rows are then a prefix of the previous step's.
        ends_P = (counted_PS * (steps_S + 1)).amax(1)
        lengths_P, order_P = ends_P.sort(descending=True, stable=True)
        counts = (lengths_P[:, None] > steps_S).sum(0).tolist()
        # Find the supervised ones among them (all, if rows is "turn").
        flags_SP = counted_PS[order_P].T
        counts_S = flags_SP.sum(1)
        step_M, place_M = flags_SP.nonzero().unbind(1)
        label_M = order_P[place_M] + 2 + step_M
        order_P = put(order_P, batch.ids_BT)
        rows = [order_P[:count] for count in counts]  # later steps need fewer
        taps = self.hidden(batch)
        states = draft.unroll(draft.feature(taps), batch.ids_BT, rows, batch.documents)
        picked = put(place_M, batch.ids_BT).split(counts_S.tolist())
        state_MH = torch.cat([s_MH[rows_M] for s_MH, rows_M in zip(states, picked, strict=True)])
        result = self.distil_labels(
            draft.normed(state_MH),
            label_M,
            taps,
            weights_M=self.config.step_decay ** step_M.double(),
        )
        return self.by_step(result, step_M, counts_S)


class Eagle3Objective(UnrolledObjective[Eagle3TrainConfig]):
    """EAGLE-3 objective with its training-time test.

    The head runs on its own states as in decoding. The loss is summed over a chain's draft tokens.
    """

    draft_class: ClassVar[type[Draft]] = Eagle3
    draft: Eagle3

    @torch.no_grad()
    def start_on(self, batches: Iterable[Batch]) -> None:
        """Fit ``fc`` and attention's values in closed form, by ridge regression.

        With u_t = h_t / rms(h_t), where h_t is the target's state before its final norm:

            fc [h_low; h_mid; h_high]_t = u_t
            W_o W_v [norm(e_{t+1}); norm(u_t)] = u_{t+1} - u_t

        Some query heads attend to their own row, so the residual stream ends near u_{t+1}, in every
        step of a chain. Other matrices stay random.
        """
        draft, config = self.draft, self.config
        if config.start != "ridge" or config.init_from is not None or draft.fc.weight.is_meta:
            return
        (hidden, num_inputs), place = draft.fc.weight.shape, next(self.target.parameters()).device
        first = Ridge(num_inputs, hidden, place)
        second, num_rows = Ridge(2 * hidden, hidden, place), 0
        scale_H = draft.norm.weight.to(place) if config.norm_output else 1.0
        for batch in batches:
            taps, place_BT = self.hidden(batch), batch.places()
            # The last token of a document has no next one, and padding would be a frequent token.
            has_next_BT = F.pad(place_BT[:, 1:] == place_BT[:, :-1], (0, 1)) & (place_BT >= 0)
            next_BT = has_next_BT.roll(1, 1)
            last_BTH = taps[self.num_target_layers].float()
            unit_BTH = last_BTH * last_BTH.square().mean(-1, keepdim=True).rsqrt()
            state_MH = pick(unit_BTH, has_next_BT) * scale_H
            embedded_MH = draft.embed(pick(batch.ids_BT, next_BT)).float()
            joined_MH = torch.cat([F.rms_norm(x, (hidden,)) for x in (embedded_MH, state_MH)], -1)
            first.add(pick(draft.fused(taps), has_next_BT), state_MH)
            second.add(joined_MH, pick(unit_BTH, next_BT) - state_MH)
            num_rows += len(state_MH)
            if num_rows >= FITTED_ROWS:
                break
        draft.fc.weight.copy_(first.solve(FUSED_PENALTY).T)
        attention = draft.midlayer.self_attn
        size, count = attention.head_size, attention.num_key_value_heads
        values_KR, output_RH = second.solve_rank(STEP_PENALTY, size * count)
        # Both factors get the same norm.
        balance = (values_KR.norm() / output_RH.norm()).sqrt()
        rank = values_KR.shape[1]
        attention.v_proj.weight[:rank] = (values_KR / balance).T
        group = attention.num_heads // count
        generator = torch.Generator().manual_seed(0)
        for index in range(count):
            own = slice(index * size, (index + 1) * size)
            query = slice(index * group * size, (index * group + 1) * size)
            part_HR = (output_RH[own] * balance).T
            attention.o_proj.weight[:, query][:, : part_HR.shape[1]] = part_HR
            # |P x|^2 / sqrt(D) = SELF_SCORE for a normed embedding x, in expectation.
            random_DH = torch.randn(size, hidden, generator=generator)
            random_DH *= (SELF_SCORE / (size**0.5 * hidden)) ** 0.5
            attention.k_proj.weight[own, :hidden] = random_DH.to(attention.k_proj.weight)
            attention.q_proj.weight[query] = 0
            attention.q_proj.weight[query, :hidden] = random_DH.to(attention.q_proj.weight)

    @classmethod
    def make_draft(
        cls, config: Eagle3TrainConfig, layer: LayerConfig, reference: TargetReference
    ) -> Eagle3:
        """Build the draft, with fused layers that fit the target's depth."""
        known = {f.name: getattr(config, f.name) for f in fields(Eagle3Config)}
        depth = int(reference.fingerprint["num_layers"])
        return Eagle3(Eagle3Config(**known).for_target(depth), layer, reference)
