"""Training objective for the SPD head, by distillation with a simulated pipeline fill."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..files import Values
from ..models.heads.draft import Draft
from ..models.heads.spd import SPD
from ..models.transformer.layers import Attention
from .batch import Batch, pick, put
from .methods import SPDTrainConfig
from .objective import LossOutput, StagedObjective, labeled_rows
from .ridge import FITTED_ROWS, Ridge

# B batch, T positions, H hidden, M labeled or fitted rows, K width of the newest token's feature
# D distances, R values' rank, A entries of all value heads, E entries of a head, F frequencies

FIT_PENALTY, CONSTANT_PENALTY = 0.01, 1e-3
"""Fit penalties as shares of the inputs' mean squares."""
SCORE_DROP, LEAST_ANGLE = 2.0, 0.05
"""How far the attention scores of a fitted head's distance are above those of the next ones, and
the slowest rotary frequency used for it, in radians per token."""

FITTED_PIECE = 2048
"""Rows at once in float64, which bounds a fit's memory."""


def attend_to_distances(
    attention: Attention,
    frequencies_F: Tensor,
    distances: Sequence[int],
    asked_H: Tensor,
    seen_H: Tensor,
) -> None:
    """Let each group's query heads attend to one distance d each.

    Added to queries and keys, as complex entries: q = a e^(-i d w), k = a for frequencies w. At
    distance s, rotary embeddings turn their product by s w, so it is a^2 sum cos((s - d) w).

    Args:
        asked_H, seen_H: their products with normed inputs of queries and keys are about 1.
    """
    angle_F = frequencies_F.double().cpu()
    fast_F = (angle_F > LEAST_ANGLE).double()
    drop = float((fast_F * (1 - angle_F.cos())).sum()) / attention.head_size**0.5
    fast_F *= (SCORE_DROP / drop) ** 0.5
    groups = attention.num_heads // attention.num_key_value_heads

    def add(weight: Tensor, head: int, distance: int, constant_H: Tensor) -> None:
        turned_F = distance * angle_F
        entries_E = torch.cat([fast_F * turned_F.cos(), -fast_F * turned_F.sin()])
        rows = slice(head * attention.head_size, head * attention.head_size + len(entries_E))
        weight[rows] += (entries_E[:, None] * constant_H.cpu()).to(weight)

    for head in range(attention.num_heads):
        add(attention.q_proj.weight, head, distances[head % groups], asked_H)
    for head in range(attention.num_key_value_heads):
        add(attention.k_proj.weight, head, 0, seen_H)


def normed(x_H: Tensor) -> Tensor:
    """Return rows with a root mean square of 1."""
    return F.rms_norm(x_H, x_H.shape[-1:])


def sample_occupancy(
    num_examples: int,
    most: int,
    full_probability: float,
    generator: torch.Generator,
    num_full: int = 1,
) -> list[int]:
    """Sample the number of tokens in flight for each example.

    The pipeline is full with ``full_probability``. It then has one of the ``num_full`` largest
    counts, depending on the draft forward in its step. Otherwise the count is uniform over the
    smaller ones. Every example is sampled separately, as in the paper. Deviation: the authors' code
    samples once per micro-batch.
    """
    # The range of the partial counts below would be empty.
    if most == 1:
        return [1] * num_examples
    is_full = torch.rand(num_examples, generator=generator) < full_probability
    partial = torch.randint(1, most - num_full + 1, (num_examples,), generator=generator)
    full = torch.full_like(partial, most)
    if num_full > 1:
        full -= torch.randint(0, num_full, (num_examples,), generator=generator)
    return torch.where(is_full, full, partial).tolist()


class SPDObjective(StagedObjective[SPDTrainConfig]):
    """Divergence at temperature 1, summed over rows before an assistant token.

    The default divergence is KL(target || head).
    """

    draft_class: ClassVar[type[Draft]] = SPD
    draft: SPD

    @torch.no_grad()
    def start_on(self, batches: Iterable[Batch]) -> None:
        """Fit the newest token's projection and the first layer's attention, by ridge regression.

        u_t = h_t / rms(h_t), where h_t is token t's state after the target's last layer, before the
        final norm. e_t is the newest token's feature, x_t^d the normed feature of token t - d in a
        full pipeline:

            W e_t + A x_t^1 = u_t,              A = W_v B with the values' rank
            sum_d O_d W_v x_t^d = u_t - W e_t,  d = 1, 2 .. query heads per key head

        So the head's own norm gives the LM head rows at a familiar scale. Each group's d-th query
        head attends to distance d: queries and keys get a constant part, turned by as much
        as the rotary embedding turns them apart. Distances begin after the tokens
        with the newest one's projection (m + 1 with m > 1 tokens per step).
        """
        draft, config = self.draft, self.config
        weight_HK: Tensor = draft.projections[draft.block_of_depth[0]].weight  # type: ignore[assignment]
        if config.start != "ridge" or config.init_from is not None or weight_HK.is_meta:
            return
        (hidden, width), place = weight_HK.shape, next(self.target.parameters()).device
        attention, batches = draft.decoder_layers[0].self_attn, iter(batches)
        start, count = next(batches), attention.num_heads // attention.num_key_value_heads
        # Tokens before share the newest one's projection, which is about to change.
        nearest = draft.block_of_depth.count(draft.block_of_depth[0])
        distances = range(nearest, nearest + count)
        first = Ridge(width + hidden, hidden, place)
        for own_MK, near_MDH, unit_MH in self._fitted_rows(chain([start], batches), distances[:1]):
            first.add(torch.cat([own_MK, near_MDH[:, 0]], -1), unit_MH)
        own_KH = first.solve(FIT_PENALTY, width)[:width]
        weight_HK.copy_(own_KH.T)
        values_HR, output_RH = first.solve_rank(FIT_PENALTY, len(attention.v_proj.weight), width)
        # Both factors get the same norm.
        values_HR *= (output_RH.norm() / values_HR.norm()).sqrt()
        attention.v_proj.weight[: values_HR.shape[1]] = values_HR.T.to(attention.v_proj.weight)
        values_HA = attention.v_proj.weight.T.to(place, torch.float64)

        second = Ridge(count * values_HA.shape[1], hidden, place)
        asked, seen = (Ridge(hidden, 1, place) for _ in range(2))
        later = next(batches, start)  # with few rows, both fits share a batch
        for own_MK, near_MDH, unit_MH in self._fitted_rows(chain([later], batches), distances):
            stream_MH = own_MK @ own_KH
            # Query heads are in the order of their key heads.
            values_MDJE = (near_MDH @ values_HA).unflatten(-1, (-1, attention.head_size))
            second.add(values_MDJE.transpose(1, 2).flatten(1), unit_MH - stream_MH)
            asked.add(normed(stream_MH), unit_MH.new_ones(len(unit_MH), 1))
            near_NH = near_MDH.flatten(0, 1)
            seen.add(near_NH, near_NH.new_ones(len(near_NH), 1))
        attention.o_proj.weight.copy_(second.solve(FIT_PENALTY).T)
        constants = [fit.solve(CONSTANT_PENALTY)[:, 0] for fit in (asked, seen)]
        attend_to_distances(
            attention, draft.rotary.get_buffer("frequencies"), distances, *constants
        )

    def _fitted_rows(
        self, batches: Iterable[Batch], distances: Sequence[int]
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield newest tokens' features, those at the distances (ascending), and u, in float64.

        Tokens without another one at the longest distance are left out.
        """
        draft, last, num_rows = self.draft, self.num_target_layers, 0
        longest = distances[-1]
        for batch in batches:
            taps, place_BT = self.hidden(batch), batch.places()
            # Padding would enter the fit as a frequent token.
            has_all_BT = (place_BT.roll(longest, 1) == place_BT) & (place_BT >= 0)
            has_all_BT[:, :longest] = False
            own = [pick(taps[layer], has_all_BT) for layer in draft.feature_layers[0]]
            near = [
                pick(self._deepest(taps, distance).roll(distance, 1), has_all_BT)
                for distance in distances
            ]
            rows = torch.cat(own, -1), torch.stack(near, 1), pick(taps[last], has_all_BT)
            for parts in zip(*(x.split(FITTED_PIECE) for x in rows), strict=True):
                own_MK, near_MDH, last_MH = (x.double() for x in parts)
                yield own_MK, normed(near_MDH), normed(last_MH)
            num_rows += len(rows[0])
            if num_rows >= FITTED_ROWS // 2:
                return

    def _deepest(self, taps: Mapping[int, Tensor], distance: int) -> Tensor:
        """Return the feature at a distance, up to its scale, before training.

        A feature's projection starts as the identity on its deepest layer.
        """
        draft = self.draft
        layer = draft.feature_layers[min(distance, draft.config.max_in_flight)][-1]
        if draft.config.normed_last and layer == self.num_target_layers:
            return taps[layer] * draft.norm.weight.to(taps[layer])
        return taps[layer]

    def forward(
        self,
        batch: Batch,
        generator: torch.Generator,
        *,
        occupancies: Sequence[int] | None = None,
    ) -> LossOutput:
        """Compute one batch's loss.

        Args:
            occupancies: numbers of tokens in flight to evaluate, each with all examples.
        """
        if occupancies is None:
            batch, drawn = self._fill(batch, generator)
        # The target runs once, however often the head does.
        batch = replace(batch, features=self.hidden(batch))
        if occupancies is None:
            runs = [(batch, drawn)]
            runs += [self._fill(batch, generator) for _ in range(self.config.fills - 1)]
        else:
            runs = [(batch, [a] * len(batch.lengths)) for a in occupancies]
        losses: list[Tensor] = []
        sums: dict[str, Tensor] = {}
        for run, fill in runs:
            labeled_BT = labeled_rows(run)
            last_BTH = run.features[self.num_target_layers]
            places_M = put(labeled_BT.flatten().nonzero()[:, 0], last_BTH)
            stream_MH = self.draft(run.features, fill, run.documents, places_M)
            result = self.compare(stream_MH, self.teacher(last_BTH, labeled_BT))
            losses.append(result.loss)
            found = result.sums()
            # Rates depend on the fill; mass outside the draft vocabulary does not.
            sums["mass_outside"] = found.pop("mass_outside")
            for name, value in found.items():
                if occupancies is not None:
                    # All examples of an evaluation's run have one fill.
                    sums[f"fill{fill[0]}_{name}"] = value
                else:  # mean over the fills, since every token counts once
                    sums[name] = sums.get(name, torch.zeros_like(value)) + value / len(runs)
        # Training takes the mean, as each row counts once; evaluation the fullest pipeline's loss.
        loss = losses[-1]
        if occupancies is None and len(losses) > 1:
            loss = torch.stack(losses).mean()
        return LossOutput(loss, labeled_BT.sum(), sums)

    def _fill(self, batch: Batch, generator: torch.Generator) -> tuple[Batch, list[int]]:
        """Sample occupancies and sort the batch, fullest first, which is fastest for the head."""
        drawn = sample_occupancy(
            len(batch.lengths),
            self.draft.config.max_in_flight,
            self.config.full_probability,
            generator,
            self.draft.config.tokens_per_step,
        )
        fill, order = torch.tensor(drawn).sort(descending=True, stable=True)
        return batch.reorder(order.tolist()), fill.tolist()

    def evaluation_options(self) -> Values:
        return {"occupancies": range(1, self.draft.config.max_in_flight + 1)}

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
