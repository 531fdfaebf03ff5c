"""EAGLE heads, which continue the target's hidden states with one decoder layer.

Row t joins the embedding of token t + 1 with the hidden state at position t. It yields the hidden
state at position t + 1, whose logits predict token t + 2. The state for the first draft token comes
from the target. For each later one, a new row takes the head's own output as its state.

This module has the base that EAGLE-1 (arXiv:2401.15077), EAGLE-3 and MTP layers share, and EAGLE-1.
"""

# ... any leading axes, B batch, T positions, R rows per decode call, P cached rows, H hidden
# N query heads, J key heads, D head size, U draft vocabulary, M rows per training step

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..speed.head_layers import finish
from ..transformer.decoder import plain_embedding
from ..transformer.layers import (
    DecoderLayer,
    KeyValues,
    LayerConfig,
    RotaryEmbedding,
    causal_attention,
    initialize_matrices,
    positions_of,
)
from .banded_attention import ttt_attention
from .configs import EagleConfig
from .draft import Draft, TargetReference


class EagleHead(Draft):
    """Base class for EAGLE heads. The target's embedding is attached, not saved.

    Subclasses define the first state (``feature``), the attention input (``project``), and the map
    from state to logits (``logits``).
    """

    rotary: RotaryEmbedding
    draft_ids: Tensor
    shift: ClassVar[int] = 1
    """A row joins a token to the state one position earlier; its rotary position is the state's."""
    joins_rows: ClassVar[bool] = True

    @property
    def window(self) -> int | None:
        """Number of positions that a row sees, including its own, or None for all."""
        return None

    def attach(self, target: PreTrainedModel) -> None:
        """Use this target's embedding, held in a list to keep it out of the parameters."""
        super().attach(target)
        self._embedding = [plain_embedding(target)]

    def embed(self, ids: Tensor) -> Tensor:
        """Return frozen token embeddings [..., H] for ids [...]."""
        with torch.no_grad():  # the embedding is the target's: frozen
            return self._embedding[0](ids)

    @abstractmethod
    def initialize(self, target: PreTrainedModel, draft_ids: Tensor | None = None) -> None:
        """Copy initial weights from the target and attach it."""

    @abstractmethod
    def feature(self, taps: Mapping[int, Tensor]) -> Tensor:
        """Return each position's state [..., H], from the target's raw hidden states."""

    @abstractmethod
    def project(
        self, embedding_H: Tensor, state_H: Tensor, cos_D: Tensor, sin_D: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Map rows [..., H] to residual, query [..., N, D], keys and values [..., J, D].

        The residual is [..., H], plus any further data per row for ``finish``.
        """

    @abstractmethod
    def finish(self, residual_H: Tensor, attended_ND: Tensor) -> Tensor:
        """Compute the next position's state [..., H] from the residual and the attention output."""

    def causal_rows(
        self, tokens_BR: Tensor, states_BRH: Tensor, lengths: Sequence[int] | None = None
    ) -> Tensor:
        """Compute next hidden states [B, R, H] for rows 0 .. R-1, with causal attention.

        Args:
            lengths: rows per document in a packed row.
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

    def unroll(
        self,
        feature_BTH: Tensor,
        ids_BT: Tensor,
        rows: Sequence[Tensor],
        lengths: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """Run the training-time test, which extends every row's chain as decoding does.

        Step 0 starts row t from its feature. Step i continues row t from its state in step i - 1.
        The input token is the sequence's token t + 1 + i, as if all earlier draft tokens were
        accepted. The rotary position is t + i. See `ttt_attention` for visible rows.

        Args:
            rows: for each step, the rows b T + t to compute, a prefix of the previous step's rows.
            lengths: document lengths in a packed row [1, T].

        Returns:
            One tensor [M, H] per step, in row order. States in step i belong to position t + 1 + i,
            and their logits predict token t + 2 + i.
        """
        B, T, _ = feature_BTH.shape
        # Past its end a sequence has no rows in any step, so any token will do.
        tokens = F.pad(ids_BT, (0, len(rows)))
        positions_T = positions_of(T, lengths, ids_BT.device)

        def advance(
            step: int, state_MH: Tensor, keys: list[Tensor], values: list[Tensor]
        ) -> tuple[Tensor, Tensor, Tensor]:
            rows_M = rows[step]
            turn = self.rotary.of_heads(positions_T + step, feature_BTH.dtype)
            token_P = tokens[:, 1 + step : 1 + step + T].flatten()
            turn_P = [x_TD.expand(B, *x_TD.shape).flatten(0, 1) for x_TD in turn]
            if step:  # continue supervised rows only; no such row sees the others' keys
                token_P, *turn_P = (x.index_select(0, rows_M) for x in (token_P, *turn_P))
            residual, *heads = self.project(self.embed(token_P), state_MH, *turn_P)
            # Place keys at their positions in the sequence: each step's keys form a diagonal.
            if step:
                zeros = [x.new_zeros(B * T, *x.shape[1:]) for x in heads]
                heads = [x.index_put((rows_M,), y) for x, y in zip(zeros, heads, strict=True)]
            else:
                residual = residual.index_select(0, rows_M)
            query, key, value = (x.unflatten(0, (B, T)).transpose(1, 2) for x in heads)
            attended_BNTD = ttt_attention(
                query, [*keys, key], [*values, value], lengths, self.window
            )
            attended_PND = attended_BNTD.transpose(1, 2).flatten(0, 1)
            return self.finish(residual, attended_PND.index_select(0, rows_M)), key, value

        return self.repeat(advance, feature_BTH.flatten(0, 1), [len(rows_M) for rows_M in rows])

    def repeat(
        self,
        advance: Callable[[int, Tensor, list[Tensor], list[Tensor]], tuple[Tensor, Tensor, Tensor]],
        state_MH: Tensor,
        counts: Sequence[int],
    ) -> list[Tensor]:
        """Return the states for every step of ``unroll``.

        Args:
            advance: maps a step's number, the states to continue, and all earlier steps' keys and
                values to this step's states, keys and values. A row sees step 0 causally, and in
                later steps only itself.
            counts: rows per step.
        """
        keys: list[Tensor] = []
        values: list[Tensor] = []
        states: list[Tensor] = []
        for step, count in enumerate(counts):
            state_MH = state_MH[:count] if step else state_MH  # each step's rows are a prefix
            state_MH, key, value = self.compute(advance, step, state_MH, keys[:], values[:])
            keys.append(key)
            values.append(value)
            states.append(state_MH)
        return states

    def step(
        self,
        tokens_R: Tensor,
        states_RH: Tensor,
        positions_R: Tensor,
        caches: Sequence[KeyValues],
        visible_RC: Tensor,
        *,
        in_order: bool = True,
    ) -> Tensor:
        """Run rows in decoding, append keys and values, and return the next states [R, H].

        Args:
            tokens_R: token after each row's position.
            caches: the layer's cache.
            visible_RC: bool, cache rows (including these R) visible to each row.
            in_order: ignored, since the states are given.
        """
        cos, sin = self.rotary.of_heads(positions_R, states_RH.dtype)
        residual_RH, query_RND, keys_RJD, values_RJD = self.project(
            self.embed(tokens_R), states_RH, cos, sin
        )
        caches[0].append_rows(keys_RJD, values_RJD)
        return self.finish(residual_RH, caches[0].attend(query_RND, visible_RC))


class TiedHead(EagleHead):
    """Base class for heads that read the target's state after its final norm and use its LM head.

    A subclass's configuration has ``num_target_layers``.
    """

    fc: nn.Linear
    """[embedding; state] -> H."""

    def __init__(self, config: Any, layer: LayerConfig, reference: TargetReference) -> None:
        super().__init__(config, layer, reference)
        self.rotary = RotaryEmbedding(layer)
        vocabulary = reference.fingerprint["vocab_size"]
        self.register_buffer("draft_ids", torch.arange(vocabulary), persistent=False)

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.config.num_target_layers,)

    def attach(self, target: PreTrainedModel) -> None:
        super().attach(target)
        self._norm, self._head = [target.get_decoder().norm], [target.get_output_embeddings()]

    def feature(self, taps: Mapping[int, Tensor]) -> Tensor:
        with torch.no_grad():  # the norm is the target's: frozen
            return self._norm[0](taps[self.config.num_target_layers])

    @property
    def head_weight(self) -> Tensor:
        """Target's LM head [V, H]."""
        return self._head[0].weight

    def logits(self, state_H: Tensor) -> Tensor:
        return self._head[0](state_H)

    @torch.no_grad()
    def pass_state_on(self) -> None:
        """Initialize fc to pass the state through, plus a little of the embedding."""
        hidden = self.layer_config.hidden_size
        self.fc.weight.normal_(std=0.1 * hidden**-0.5)
        # Columns from H on read the state: the embedding comes first in the joined input.
        self.fc.weight[:, hidden:] += torch.eye(hidden)


class Eagle(TiedHead):
    """EAGLE-1 head, which predicts the target's final hidden state for the target's LM head.

    z_t = fc([embed(x_{t+1}); f_t])  (2H -> H, bias);  f'_{t+1} = layer(z)_t  without input norm;
    logits of x_{t+2} = LM head(f'_{t+1}); f is the target's hidden state after its final norm.
    """

    draft_type: ClassVar[str] = "eagle"
    config_class: ClassVar[type] = EagleConfig

    def __init__(self, config: EagleConfig, layer: LayerConfig, reference: TargetReference) -> None:
        # Inference engines build a Llama layer, whatever the target's family.
        layer = replace(layer, has_query_key_norm=False, has_attention_bias=config.attention_bias)
        super().__init__(config, layer, reference)
        hidden = layer.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden, bias=config.fc_bias)
        self.layer = DecoderLayer(layer)
        self.layer.input_layernorm = nn.Identity()  # EAGLE-1's layer has no input norm

    @torch.no_grad()
    def initialize(self, target: PreTrainedModel, draft_ids: Tensor | None = None) -> None:
        """Initialize fc to pass the state through, so f'_{t+1} starts near f_t."""
        assert draft_ids is None, "EAGLE-1 reads its logits off the target's LM head"
        self.attach(target)
        self.pass_state_on()
        if self.config.fc_bias:
            self.fc.bias.zero_()
        initialize_matrices(self.layer, 1)

    def project(
        self, embedding_H: Tensor, state_H: Tensor, cos_D: Tensor, sin_D: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        joined_H = self.fc(torch.cat([embedding_H, state_H], -1))
        return joined_H, *self.layer.self_attn.project(joined_H, cos_D, sin_D)

    def finish(self, residual_H: Tensor, attended_ND: Tensor) -> Tensor:
        return finish(self.layer, residual_H, attended_ND)
