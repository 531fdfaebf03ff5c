"""Training objective for the SPD head, by distillation with a simulated pipeline fill."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from ..files import Values
from ..models.heads.draft import Draft
from ..models.heads.spd import SPD
from ..models.transformer.decoder import embed
from .batch import Batch, pick, put
from .methods import SPDTrainConfig
from .objective import LossOutput, StagedObjective, labeled_rows
from .ridge import FITTED_ROWS, Ridge

# B batch, T positions, P = B T, H hidden, M labeled rows

RIDGE = 0.03
"""Fit penalty as a share of the mean squared embedding entry."""


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
        """Initialize the newest token's projection by ridge regression, in closed form.

        W = argmin sum_t |W e_t - u_t|^2 + lambda |W|^2,  u_t = h_t / rms(h_t)

        e_t is the token's embedding. h_t is the token's state after the target's last layer, before
        the final norm. The head's own norm then gives the LM head rows at a familiar scale. Without
        this fit, the stream starts as the embedding, and a tied LM head reads the token itself from
        the stream.
        """
        weight_HH: Tensor = self.draft.projections[self.draft.block_of_depth[0]].weight  # type: ignore[assignment]
        if self.config.start != "ridge" or self.config.init_from is not None or weight_HH.is_meta:
            return
        hidden, last = weight_HH.shape[0], self.num_target_layers
        decoder = self.target.get_decoder()
        # The head follows the target to its device in Trainer.
        fit, num_rows = Ridge(hidden, hidden, next(self.target.parameters()).device), 0
        for batch in batches:
            # Padding would enter the fit as a frequent token.
            is_token_BT = batch.places() >= 0
            states_PH = pick(self.hidden(batch)[last], is_token_BT).double()
            ids_P = pick(batch.ids_BT, is_token_BT)
            embedded_PH = embed(decoder.embed_tokens, decoder.config, ids_P)
            fit.add(embedded_PH, states_PH / states_PH.square().mean(-1, keepdim=True).sqrt())
            num_rows += len(embedded_PH)
            if num_rows >= FITTED_ROWS:
                break
        # The solution maps rows, [in, out]; nn.Linear stores [out, in].
        weight_HH.copy_(fit.solve(RIDGE).T)

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
