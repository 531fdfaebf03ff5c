"""Training objective for DFlash, with blocks at random anchors and a loss on their masked rows."""

# B batch, T positions, P = B T, A anchors, S draft tokens per block, M supervised rows

from collections.abc import Sequence
from dataclasses import fields
from typing import ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.heads.dflash import DFlash
from ..models.heads.draft import Draft, TargetReference
from ..models.transformer.layers import LayerConfig, document_slices
from .batch import Batch, pick, put
from .eagle3 import chain_lengths
from .methods import DFlashTrainConfig, LossKind
from .objective import ChainObjective, LossOutput

DFlashC = TypeVar("DFlashC", bound=DFlashTrainConfig)


def block_lengths(batch: Batch, num_steps: int) -> tuple[Tensor, list[slice]]:
    """Return the supervised row count in the block at each position, and documents' slices.

    The counts are int64 [P] on the host. A block counts only labels in its anchor's turn, because
    in decoding an anchor is never a prompt token.
    """
    mask_BT = batch.mask_BT
    lengths = batch.documents or [mask_BT.shape[1]] * len(mask_BT)
    # Row t of a chain starts at token t + 1, the anchor here.
    counts_BT = F.pad(chain_lengths(mask_BT, num_steps), (1, 0))[:, :-1]
    return counts_BT.flatten(), document_slices(lengths)


def draw_anchors(
    counts_P: Tensor, documents: Sequence[slice], most: int, generator: torch.Generator
) -> list[Tensor]:
    """Choose up to ``most`` anchors per document at random, and return them in ascending order.

    Only positions with a supervised row can be anchors.
    """
    anchors = []
    for rows in documents:
        found = rows.start + counts_P[rows].nonzero()[:, 0]
        if len(found) > most:
            drawn = torch.randperm(len(found), generator=generator)[:most]
            # Sorted again: a group of blocks reads the context up to its last anchor.
            found = found[drawn].sort().values
        anchors.append(found)
    return anchors


def dpace_weights(correct_AS: Tensor, counted_AS: Tensor, alpha: float) -> Tensor:
    """Return D-PACE's loss weights [A, S] (arXiv:2605.18810).

    w_i = sum_{j >= i} prod_{k <= j} ((1 - alpha) q_k + alpha), where q_k is the draft's probability
    for row k's label. Unsupervised rows are left out of sums and products, and have weight 0.
    """
    smooth_AS = ((1 - alpha) * correct_AS + alpha).where(counted_AS, 1.0)
    # Uncounted rows come last in a block, so they change no counted row's product.
    prefix_AS = smooth_AS.cumprod(-1) * counted_AS
    return prefix_AS.flip(-1).cumsum(-1).flip(-1)


class DFlashObjective(ChainObjective[DFlashC]):
    """Sum of w_i KL(target || draft) over all anchors and each draft token i in an anchor's block.

    The training loop divides this sum by the anchor count. Each anchor has at least one
    supervised row. The paper's loss is the cross-entropy with the sequence's tokens. ``loss: ce``
    equals the paper's loss if the target wrote the sequence greedily.
    """

    draft_class: ClassVar[type[Draft]] = DFlash
    noted: ClassVar[tuple[str, ...]] = ("loss", "feature_weight", "position_weights", "decay_gamma")

    draft: DFlash

    @classmethod
    def make_draft(cls, config: DFlashC, layer: LayerConfig, reference: TargetReference) -> Draft:
        """Build the draft, with fused layers and mask token that fit the target."""
        kind = cls.draft_class.config_class
        known = {f.name: getattr(config, f.name) for f in fields(kind)}
        sizes = (int(reference.fingerprint[name]) for name in ("num_layers", "vocab_size"))
        return cls.draft_class(kind(**known).for_target(*sizes), layer, reference)

    @property
    def num_steps(self) -> int:
        return self.config.num_tokens

    def num_supervised(self, batch: Batch) -> int:
        counts_P, documents = block_lengths(batch, self.num_steps)
        # The number of anchors is known without drawing them.
        return sum(
            min(self.config.num_anchors, int((counts_P[rows] > 0).sum())) for rows in documents
        )

    def forward(self, batch: Batch, generator: torch.Generator) -> LossOutput:
        """Compute one batch's loss, in the same way for training and evaluation."""
        ids_BT = batch.ids_BT
        counts_P, documents = block_lengths(batch, self.num_steps)
        anchors = draw_anchors(counts_P, documents, self.config.num_anchors, generator)
        anchors_A1, steps_S = torch.cat(anchors)[:, None], torch.arange(self.num_steps)
        counted_AS = steps_S < counts_P[anchors_A1]
        place_M = counted_AS.flatten().nonzero()[:, 0]
        step_M, label_M = place_M % self.num_steps, (anchors_A1 + 1 + steps_S).flatten()[place_M]
        taps = self.hidden(batch)
        states_ASH = self.draft(taps, ids_BT, anchors, batch.documents)
        states_MH = pick(states_ASH, counted_AS)
        if self.config.position_weights == "dpace":
            # Draft probability for each label, known only after an LM head pass.
            with torch.no_grad():
                hard = self.distil_labels(states_MH, label_M, taps, measure=LossKind(kind="ce"))
            correct_AS = hard.divergence_M.new_zeros(counted_AS.numel())
            place_M = put(place_M, correct_AS)
            correct_AS = correct_AS.index_copy(0, place_M, (-hard.divergence_M).exp())
            weights_AS = dpace_weights(
                correct_AS.view_as(counted_AS), put(counted_AS, correct_AS), self.config.dpace_alpha
            )
            weights_M = weights_AS.flatten()[place_M]
        else:
            weights_M = (-step_M.double() / self.config.decay_gamma).exp()
        result = self.distil_labels(states_MH, label_M, taps, weights_M=weights_M)
        output = self.by_step(result, step_M, counted_AS.sum(0))
        return self.add_loss(output, states_MH, result.acceptance_M, put(weights_M, states_MH))

    def add_loss(
        self, output: LossOutput, states_MH: Tensor, acceptance_M: Tensor, weights_M: Tensor
    ) -> LossOutput:
        """Add the head's other losses to the divergence. DFlash has none."""
        return output
