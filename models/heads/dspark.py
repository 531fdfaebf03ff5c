"""DSpark head (arXiv:2607.05147), a DFlash with draft tokens that depend on the previous token.

One DFlash forward pass gives the block's outputs. A low-rank table, indexed by the previous token,
adds a bias to the logits at each place in the block. So each draft token fits the previous one
without another forward pass: a chain is drafted left to right, and every tree row has its own
distribution. A second head predicts the acceptance probability.
"""

# ... any leading axes, H hidden, r rank of the table, U draft vocabulary
# B batch, T positions, A blocks, S draft tokens per block

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..transformer.layers import LayerConfig
from .configs import DSparkConfig
from .dflash import DFlash
from .draft import TargetReference


class _Pairs(nn.Module):
    """Table [V, U] with rank r, a product of W_1 (previous token) and W_2 (draft token)."""

    def __init__(self, vocabulary: int, rank: int, num_draft: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, num_draft, bias=False)


class _Confidence(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)


class DSpark(DFlash):
    """DSpark head, a DFlash head with a previous-token table and a confidence head.

    logits at place k = LM head(h_k) + W_2 W_1[x_{k-1}]; acceptance = sigmoid(w [h_k; W_1[..]]).

    h_k is DFlash's output for place k. An output [H + r] is [h_k; W_1[x_{k-1}]].
    """

    draft_type: ClassVar[str] = "dspark"
    config_class: ClassVar[type] = DSparkConfig
    config: DSparkConfig

    def __init__(
        self, config: DSparkConfig, layer: LayerConfig, reference: TargetReference
    ) -> None:
        super().__init__(config, layer, reference)
        hidden, rank = layer.hidden_size, config.markov_rank
        vocabulary, has_confidence = self.target_vocab_size, config.confidence != "none"
        read = hidden + rank * (config.confidence == "pair")
        # Names as in the published files.
        self.markov_head = _Pairs(vocabulary, rank, len(self.draft_ids)) if rank else None
        self.confidence_head = _Confidence(read) if has_confidence else None

    @property
    def pair_UR(self) -> Tensor | None:
        """W_2 [U, r]."""
        return None if self.markov_head is None else self.markov_head.markov_w2.weight

    @torch.no_grad()
    def initialize(self, target: PreTrainedModel, draft_ids: Tensor | None = None) -> None:
        """Initialize the table to zero bias: W_2 = 0."""
        super().initialize(target, draft_ids)
        if self.markov_head is not None:
            nn.init.normal_(self.markov_head.markov_w1.weight, std=0.02)
            self.markov_head.markov_w2.weight.zero_()
        if self.confidence_head is not None:
            self.confidence_head.proj.weight.zero_()  # starts at probability 1/2 everywhere
            self.confidence_head.proj.bias.zero_()

    def forward(
        self,
        taps: Mapping[int, Tensor],
        ids_BT: Tensor,
        anchors: Sequence[Tensor],
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """Run DFlash's forward with the true token before each place (teacher forcing).

        Places past the end of the sequence have undefined values.

        Returns:
            Outputs [A, S, H + r].
        """
        states_ASH = super().forward(taps, ids_BT, anchors, lengths)
        steps_S = torch.arange(self.config.num_tokens, device=ids_BT.device)
        before_AS = torch.cat(list(anchors)).to(ids_BT.device)[:, None] + steps_S
        ids_P = ids_BT.flatten()
        # Clamped: a block at the end reaches past the sequence, where no row is supervised.
        return self.behind(states_ASH, ids_P[before_AS.clamp(max=len(ids_P) - 1)])

    def behind(self, state_H: Tensor, token: Tensor) -> Tensor:
        """Return [..., H + r], a DFlash output joined with the previous token's table row."""
        if self.markov_head is None:
            return state_H
        return torch.cat([state_H, self.markov_head.markov_w1(token).to(state_H.dtype)], -1)

    def logits(self, state_H: Tensor) -> Tensor:
        """Return draft logits [..., U] for a block's outputs."""
        hidden = self.layer_config.hidden_size
        logits_U = self.lm_head(state_H[..., :hidden])
        if self.pair_UR is None:
            return logits_U
        return logits_U + F.linear(state_H[..., hidden:], self.pair_UR)

    def acceptance(self, state_H: Tensor) -> Tensor:
        """Return the acceptance logit [...] for an output's draft token."""
        assert self.confidence_head is not None, "model.confidence is none"
        proj = self.confidence_head.proj
        return proj(state_H[..., : proj.in_features])[..., 0]
