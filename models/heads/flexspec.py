"""FlexSpec (arXiv:2601.00644), a small draft model around a frozen copy of the last target block.

The draft reads only token ids, so it can run on another machine. It stays usable for a fine-tuned
target as long as the copied block, called the anchor, is unchanged in the target.
"""

# ... any leading axes, B batch, T positions, R rows per decode call, C cached rows, Q known rows
# E readings, H hidden, D head size, U draft vocabulary

from collections.abc import Mapping, Sequence
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..speed.head_layers import cached_layer
from ..speed.rounded import rounded_dtype
from ..stages.stage import Stage
from ..target import StagedTarget
from ..target_part import load_target_part
from ..transformer.fingerprint import as_stored, target_fingerprint, weights_hash
from ..transformer.layers import (
    DecoderLayer,
    KeyValues,
    LayerConfig,
    RMSNorm,
    RotaryEmbedding,
    causal_layer,
    initialize_matrices,
    positions_of,
)
from .configs import FlexSpecConfig
from .draft import Draft, TargetReference

SAME_BLOCK = 0.05
"""Relative difference below which two blocks count as equal, also in 16 bits."""


class FlexSpec(Draft):
    """FlexSpec draft with the target's last block between a trained stem and a trained MLP.

    x_t = embedding of token t;  a = B_L(stem(x));  h_t = MLP(a_t);  logits of t + 1 = head(h_t)

    Embedding, last block B_L and, in preset practical, the final norm are frozen copies. They are
    saved with the draft, so it decodes without the target. A row depends only on tokens up to its
    own, so states computed for a draft token remain valid once it is accepted. The block uses full
    attention, even if the target limits it to a window.

    A state [..., E, H] has all readings' outputs for a position. The last output is h_t.
    """

    draft_type: ClassVar[str] = "flexspec"
    config_class: ClassVar[type] = FlexSpecConfig
    draft_ids: Tensor

    def __init__(
        self, config: FlexSpecConfig, layer: LayerConfig, reference: TargetReference
    ) -> None:
        super().__init__(config, layer, reference)
        hidden, vocabulary = layer.hidden_size, reference.fingerprint["vocab_size"]
        self.embedding = nn.Embedding(vocabulary, hidden).requires_grad_(False)
        self.stem: nn.Module = nn.Identity()
        self.norm: nn.Module = nn.Identity()
        if config.preset == "practical":
            self.stem = nn.Sequential(
                nn.Linear(config.num_readings * hidden, hidden, bias=False),
                RMSNorm(hidden, layer.rms_norm_eps),
            )
            self.norm = RMSNorm(hidden, layer.rms_norm_eps).requires_grad_(False)
        self.stem_layers = nn.ModuleList(DecoderLayer(layer) for _ in range(config.stem_layers))
        self.anchor = DecoderLayer(layer).requires_grad_(False)  # loading compares its hash
        self.mlp = nn.Sequential(
            nn.Linear(hidden, hidden, bias=False), nn.SiLU(), nn.Linear(hidden, hidden, bias=False)
        )
        self.rotary = RotaryEmbedding(layer)
        size = config.draft_vocab_size or vocabulary
        self.lm_head = nn.Linear(hidden, size, bias=False)
        self.register_buffer("draft_ids", torch.arange(size))

    @staticmethod
    def fingerprint(target: PreTrainedModel) -> dict[str, int | str]:
        """Return the target's fingerprint, with its last block's hash as ``anchor``.

        Layers 1 .. L-1 are not hashed. So a target fine-tuned only in them keeps its draft.
        """
        return {**target_fingerprint(target), "anchor": anchor_hash(target)}

    def feature(self, taps: Mapping[int, Tensor]) -> Tensor:
        raise NotImplementedError("no hidden state of the target is read")

    @property
    def num_caches(self) -> int:
        return self.config.num_readings * self.config.num_layers

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.config.num_readings, self.layer_config.hidden_size

    @property
    def initial_layers(self) -> tuple[int, ...]:
        return (self.reference.fingerprint["num_layers"] - 1,)

    def relative_cost(self, target: StagedTarget) -> float:
        """Return a forward's relative cost by weights, as if all target layers had anchor size."""
        layer = _num_weights(self.anchor)
        own = layer + sum(_num_weights(part) for part in (self.stem, self.stem_layers, self.mlp))
        return self.config.num_readings * own / (layer * target.num_layers)

    @torch.no_grad()
    def initialize(self, target: PreTrainedModel, draft_ids: Tensor | None = None) -> None:
        """Copy the frozen parts. In preset practical, the anchor at first gets plain embeddings."""
        decoder, hidden = target.get_decoder(), self.layer_config.hidden_size
        self.embedding.load_state_dict(decoder.embed_tokens.state_dict())
        self.anchor.load_state_dict(decoder.layers[-1].state_dict())
        initialize_matrices(self.stem_layers, len(self.stem_layers))
        initialize_matrices(self.mlp, 1)
        if self.config.preset == "practical":
            self.norm.load_state_dict(decoder.norm.state_dict())
            linear = cast(nn.Linear, cast(nn.Sequential, self.stem)[0])
            linear.weight.zero_()
            # With two readings, the half for the previous reading's output stays zero.
            linear.weight[:, :hidden].fill_diagonal_(1)
        if self.config.residual:
            # With a residual the MLP starts as the identity.
            cast(nn.Linear, self.mlp[-1]).weight.zero_()
        if draft_ids is not None:
            self.draft_ids.copy_(draft_ids)
        if self.config.head_init == "target":
            self.lm_head.weight.copy_(target.get_output_embeddings().weight[self.draft_ids])
        else:
            nn.init.normal_(self.lm_head.weight, std=hidden**-0.5)

    @property
    def _layers(self) -> list[DecoderLayer]:
        return cast(list[DecoderLayer], [*self.stem_layers, self.anchor])

    def _enter(self, embedding_H: Tensor, before_H: Tensor) -> Tensor:
        """Return the stream for the first decoder layer.

        Args:
            before_H: previous reading's output at the previous position.
        """
        if self.config.num_readings > 1:
            # A state is about 20 times as large as an embedding and would dominate it.
            size = embedding_H.shape[-1:]
            parts = (F.rms_norm(part_H, size) for part_H in (embedding_H, before_H))
            embedding_H = torch.cat([*parts], -1)
        return self.stem(embedding_H)

    def _leave(self, stream_H: Tensor) -> Tensor:
        stream_H = self.norm(stream_H)
        changed_H = self.mlp(stream_H)
        return stream_H + changed_H if self.config.residual else changed_H

    def forward(self, tokens_BT: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
        """Compute hidden states [B, T, E, H] for sequences. Row t predicts token t + 1.

        Args:
            lengths: document lengths in a packed row [1, T].
        """
        embedding_BTH = self.embedding(tokens_BT)
        positions_T = positions_of(tokens_BT.shape[1], lengths, tokens_BT.device)
        cos, sin = self.rotary.of_heads(positions_T, embedding_BTH.dtype)
        before_BTH, states = torch.zeros_like(embedding_BTH), []
        for _ in range(self.config.num_readings):
            stream_BTH = self._enter(embedding_BTH, before_BTH)
            for layer in self._layers:
                stream_BTH = self.compute(causal_layer, layer, stream_BTH, cos, sin, lengths)
            states.append(self._leave(stream_BTH))
            # Shift by one position; the first token in each document has none before it.
            before_BTH = F.pad(states[-1][:, :-1], (0, 0, 1, 0))
            before_BTH = before_BTH.masked_fill(positions_T[:, None] == 0, 0)
        return torch.stack(states, -2)

    def rows(
        self,
        tokens_R: Tensor,
        *,
        positions_R: Tensor,
        caches: Sequence[KeyValues],
        visible_RC: Tensor,
        known_QEH: Tensor,
        before_R: Tensor,
    ) -> Tensor:
        """Run rows in decoding, append keys and values, and return hidden states [R, E, H].

        Args:
            caches: one per decoder layer and reading, all with the same rows.
            visible_RC: bool, cache rows (including these R) visible to each row.
            known_QEH: states computed earlier, or zeros before a sequence's first token.
            before_R: int64, index of each row's predecessor in the Q known rows followed by the R
                new rows.
        """
        embedding_RH = self.embedding(tokens_R)
        cos, sin = self.rotary.of_heads(positions_R, embedding_RH.dtype)
        before_RH, states, num_layers = torch.zeros_like(embedding_RH), [], len(self._layers)
        for reading in range(self.config.num_readings):
            stream_RH = self._enter(embedding_RH, before_RH)
            own = caches[reading * num_layers : (reading + 1) * num_layers]
            for layer, cache in zip(self._layers, own, strict=True):
                stream_RH = cached_layer(
                    layer, stream_RH, cos, sin, cache=cache, visible_RC=visible_RC
                )
            states.append(self._leave(stream_RH))
            before_RH = torch.cat([known_QEH[:, reading], states[-1]])[before_R]
        return torch.stack(states, -2)

    def step(
        self,
        tokens_R: Tensor,
        states_REH: Tensor,
        positions_R: Tensor,
        caches: Sequence[KeyValues],
        visible_RC: Tensor,
        *,
        in_order: bool,
    ) -> Tensor:
        """Run ``rows`` with the arguments of a CUDA graph's call.

        ``states_REH`` has the state of every row's predecessor. With ``in_order`` only its first
        entry is read, and each further row follows the row before it.
        """
        index_R = torch.arange(len(tokens_R), device=tokens_R.device)
        # In order, row i follows new row i - 1, which stands after the known rows.
        before_R = torch.where(index_R > 0, index_R + len(tokens_R) - 1, 0)
        return self.rows(
            tokens_R,
            positions_R=positions_R,
            caches=caches,
            visible_RC=visible_RC,
            known_QEH=states_REH,
            before_R=before_R if in_order else index_R,
        )

    def logits(self, states_EH: Tensor) -> Tensor:
        """Return logits [..., U] for states [..., E, H]. Entry u is for token draft_ids[u]."""
        return self.lm_head(states_EH[..., -1, :])


def anchor_hash(target: PreTrainedModel) -> str:
    """Return SHA-256 over all weights in the target's last block."""
    last = len(target.get_decoder().layers) - 1
    weights = last_block(target).state_dict().items()
    named = {f"model.layers.{last}.{name}": weight for name, weight in weights}
    return weights_hash(as_stored(target, named))


def last_block(target: PreTrainedModel) -> nn.Module:
    """Return the target's last decoder layer, and load it if its weights are rounded or missing."""
    block = target.get_decoder().layers[-1]
    if not next(block.parameters()).is_meta and rounded_dtype(block) is None:
        return block
    part = load_target_part(
        str(target.name_or_path),
        layers=[len(target.get_decoder().layers) - 1],
        has_embedding=False,
        has_head=False,
        revision=target.config.loaded_revision,
        dtype=target.dtype,
        may_round=False,
    )
    return part.get_decoder().layers[-1]


def check_anchor(target: PreTrainedModel) -> None:
    """Raise ValueError if the target's last block cannot be copied into an anchor."""
    block = target.get_decoder().layers[-1]
    for name, weight in block.named_parameters():
        if not weight.is_floating_point():
            raise ValueError(
                f"target_quantization: {name} of the last block holds {weight.dtype}, and FlexSpec "
                "trains around an exact copy of that block; leave target_quantization out"
            )
    kind = f"target: its last block ({target.config.model_type})"
    fix = "FlexSpec needs a dense attention block, choose another method"
    decoder = target.get_decoder()
    with torch.device("meta"):  # draws no random numbers
        anchor = DecoderLayer(LayerConfig.from_target(decoder.config))
    try:
        anchor.load_state_dict(block.state_dict(), assign=True)
    except RuntimeError as error:
        found = " ".join(str(error).split())[:200]
        raise ValueError(f"{kind} has other weights ({found}); {fix}") from error
    if len(decoder.layers) > 1 and next(block.parameters()).device.type != "meta":
        own_TH, theirs_TH = _what_last_block_adds(target, anchor)
        if (own_TH - theirs_TH).norm() > SAME_BLOCK * theirs_TH.norm():
            raise ValueError(f"{kind} computes more than attention and MLP; {fix}")


@torch.inference_mode()
def _what_last_block_adds(target: PreTrainedModel, anchor: DecoderLayer) -> tuple[Tensor, Tensor]:
    """Return what the anchor and the last target block each add to random rows, float32 [T, H]."""
    layer = LayerConfig.from_target(target.get_decoder().config)
    rows_TH = torch.randn(4, layer.hidden_size, generator=torch.Generator().manual_seed(0))
    rows_TH = rows_TH.to(anchor.mlp.up_proj.weight)
    positions_T = torch.arange(4, device=rows_TH.device)
    turn = RotaryEmbedding(layer).to(rows_TH.device).of_heads(positions_T, rows_TH.dtype)
    own_1TH = causal_layer(anchor, rows_TH[None], *turn, None)
    last = len(target.get_decoder().layers) - 1
    theirs_TH, _ = Stage(target, last, last + 1).prefill(rows_TH, positions_T)
    return (own_1TH[0] - rows_TH).float(), (theirs_TH - rows_TH).float()


def _num_weights(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
