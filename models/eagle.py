"""EAGLE heads: one decoder layer that continues the target's hidden states.

Row t of a sequence joins the embedding of token t + 1 with the hidden state of position t and
yields the hidden state of position t + 1, whose logits are those of token t + 2. The first state of
a row is made of the target's own; below it the head's output is fed back, one row per draft token.

This file holds what EAGLE-1 (arXiv:2401.15077) and EAGLE-3 share, and EAGLE-1 itself.
"""

# ... any leading axes, B batch, T positions, R rows of a decode call, P cached rows, H hidden
# N query heads, J key heads, D head size, U draft vocabulary

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipedraft.models.draft import Draft, TargetReference
from pipedraft.models.layers import (
    DecoderLayer,
    KeyValues,
    LayerConfig,
    RotaryEmbedding,
    causal_attention,
    initialize_matrices,
    positions_of,
)


class EagleHead(Draft):
    """Base of the EAGLE heads. The embedding stays the target's: it is attached, not saved.

    A subclass says what the first state is (``feature``), what enters attention (``project``), and
    how a state becomes logits (``logits``).
    """

    rotary: RotaryEmbedding
    draft_ids: Tensor
    num_caches: ClassVar[int] = 1
    shift: ClassVar[int] = 1
    """A row joins a token to the state at the position before it, and stands at that."""
    reads_rows: ClassVar[bool] = False

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.layer_config.hidden_size,)

    @property
    def window(self) -> int | None:
        """Positions that a row sees when it decodes, its own included; None: all."""
        return None

    def attach(self, target: PreTrainedModel) -> None:
        """Use this target's embedding. A list keeps the module out of the parameters."""
        self._embedding = [target.get_input_embeddings()]

    def embed(self, ids: Tensor) -> Tensor:
        """Frozen token embeddings: ids [...] -> [..., H]."""
        with torch.no_grad():
            return self._embedding[0](ids)

    @property
    @abstractmethod
    def taps(self) -> tuple[int, ...]:
        """Layer indices of the target that the head reads (0 the embedding, L the last, raw)."""

    @abstractmethod
    def initialize(self, target: PreTrainedModel, draft_ids: Tensor | None = None) -> None:
        """Take over from the target what the head starts with, and attach it."""

    @abstractmethod
    def feature(self, taps: Mapping[int, Tensor]) -> Tensor:
        """Hidden state of each position from the target's raw hidden states: [..., H]."""

    @abstractmethod
    def project(
        self, embedding_H: Tensor, state_H: Tensor, cos_D: Tensor, sin_D: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rows [..., H] -> residual [..., H], query [..., N, D], keys and values [..., J, D]."""

    @abstractmethod
    def finish(self, residual_H: Tensor, attended_ND: Tensor) -> Tensor:
        """State of the next position, [..., H], from the residual and attention's output."""

    @abstractmethod
    def logits(self, state_H: Tensor) -> Tensor:
        """[..., U]; entry u is target token draft_ids[u]."""

    def causal_rows(
        self, tokens_BR: Tensor, states_BRH: Tensor, lengths: Sequence[int] | None = None
    ) -> Tensor:
        """Next hidden states [B, R, H] of rows 0 .. R-1, each seeing those up to itself.

        Args:
            lengths: rows of each document in a packed row.
        """
        positions_R = positions_of(tokens_BR.shape[1], lengths, tokens_BR.device)
        cos, sin = self.rotary.of_heads(positions_R, states_BRH.dtype)

        def advance(states_BRH: Tensor) -> Tensor:
            residual_BRH, query_BRND, keys_BRJD, values_BRJD = self.project(
                self.embed(tokens_BR), states_BRH, cos, sin
            )
            attended_BRND = causal_attention(query_BRND, keys_BRJD, values_BRJD, lengths)
            return self.finish(residual_BRH, attended_BRND)

        return self.compute(advance, states_BRH)

    def step(
        self,
        tokens_R: Tensor,
        states_RH: Tensor,
        positions_R: Tensor,
        caches: Sequence[KeyValues],
        visible_RC: Tensor,
        *,
        in_order: bool,
    ) -> Tensor:
        """``rows``, as a recorded graph calls it."""
        (cache,) = caches
        return self.rows(
            tokens_R, states_RH, positions_R=positions_R, cache=cache, visible_RC=visible_RC
        )

    def rows(
        self,
        tokens_R: Tensor,
        states_RH: Tensor,
        *,
        positions_R: Tensor,
        cache: KeyValues,
        visible_RC: Tensor,
    ) -> Tensor:
        """Decode-time rows: appends their keys and values, returns the next hidden states [R, H].

        Args:
            tokens_R: token that follows each row's position.
            visible_RC: bool, rows of the cache (these R ones included) that each row may see.
        """
        cos, sin = self.rotary.of_heads(positions_R, states_RH.dtype)
        residual_RH, query_RND, keys_RJD, values_RJD = self.project(
            self.embed(tokens_R), states_RH, cos, sin
        )
        cache.append_rows(keys_RJD, values_RJD)
        attended_RND = cache.attend(query_RND, visible_RC)
        return self.finish(residual_RH, attended_RND)


@dataclass(frozen=True, kw_only=True)
class EagleConfig:
    """Architecture of the EAGLE-1 head."""

    num_target_layers: int = 0
    """L; filled in from the target."""
    fc_bias: bool = True
    """Bias of the projection; some of the authors' heads have none."""
    attention_bias: bool = False
    """Biases of the query, key and value projections."""

    @property
    def num_layers(self) -> int:
        return 1


class Eagle(EagleHead):
    """EAGLE-1: regresses the target's final hidden state; the target's own LM head reads it.

    z_t = fc([embed(x_{t+1}); f_t])  (2H -> H, bias);  f'_{t+1} = layer(z)_t  without input norm;
    logits of x_{t+2} = LM head(f'_{t+1}), f being the target's hidden state after its final norm.
    """

    draft_type: ClassVar[str] = "eagle"
    config_class: ClassVar[type] = EagleConfig

    def __init__(self, config: EagleConfig, layer: LayerConfig, reference: TargetReference) -> None:
        # As engines build it, whatever the target's family: a Llama's layer.
        layer = replace(layer, has_query_key_norm=False, has_attention_bias=config.attention_bias)
        super().__init__(config, layer, reference)
        hidden = layer.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden, bias=config.fc_bias)
        self.layer = DecoderLayer(layer)
        self.layer.input_layernorm = nn.Identity()
        self.rotary = RotaryEmbedding(layer)
        vocabulary = reference.fingerprint["vocab_size"]
        self.register_buffer("draft_ids", torch.arange(vocabulary), persistent=False)

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.config.num_target_layers,)

    def attach(self, target: PreTrainedModel) -> None:
        super().attach(target)
        self._norm, self._head = [target.get_decoder().norm], [target.get_output_embeddings()]

    @torch.no_grad()
    def initialize(self, target: PreTrainedModel, draft_ids: Tensor | None = None) -> None:
        """fc starts by passing the state on, so that f'_{t+1} starts near f_t."""
        assert draft_ids is None, "EAGLE-1 reads its logits off the target's LM head"
        self.attach(target)
        hidden = self.layer_config.hidden_size
        self.fc.weight.normal_(std=0.1 * hidden**-0.5)
        self.fc.weight[:, hidden:] += torch.eye(hidden)
        if self.config.fc_bias:
            self.fc.bias.zero_()
        initialize_matrices(self.layer, 1)

    def feature(self, taps: Mapping[int, Tensor]) -> Tensor:
        with torch.no_grad():
            return self._norm[0](taps[self.config.num_target_layers])

    def project(
        self, embedding_H: Tensor, state_H: Tensor, cos_D: Tensor, sin_D: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        joined_H = self.fc(torch.cat([embedding_H, state_H], -1))
        attention = self.layer.self_attn
        query_ND = attention.query(joined_H, cos_D, sin_D)
        return joined_H, query_ND, *attention.key_value(joined_H, cos_D, sin_D)

    def finish(self, residual_H: Tensor, attended_ND: Tensor) -> Tensor:
        return self.layer.finish(residual_H, attended_ND)

    @property
    def head_weight(self) -> Tensor:
        """The target's LM head [V, H]."""
        return self._head[0].weight

    def logits(self, state_H: Tensor) -> Tensor:
        return F.linear(state_H, self.head_weight)
