"""How the decoders of model families differ: positions, embeddings, norms and logits.

A target's configuration decides each step; names of families only where it does not say.

Shape suffixes: l rows, T positions, H hidden, V vocabulary.
"""

import inspect
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
)

from ...files import Values
from .fingerprint import HEAD
from .rotary_lengths import FollowingTable, short_lengths
from .stage_cache import additive_mask

KINDS = ("full_attention", "sliding_attention", "linear_attention")
"""Layer kinds whose cached rows can be dropped by a ``stage_cache.KeepRows``."""
PLAIN = ("llama", "qwen2", "qwen3", "mistral")
"""Model types with pre-norm layers, RMSNorm, rotary positions for whole heads, and SwiGLU: no
experts, whose row counts vary with routing, and no recurrent layers."""
OFFSET_NORMS = ("gemma", "qwen3_5", "qwen3_next")
"""Prefixes of model types with one added to the RMSNorm's weight."""


def layer_kinds(config: PreTrainedConfig) -> tuple[str, ...]:
    """Return one of ``KINDS`` per layer."""
    if (kinds := getattr(config, "layer_types", None)) is not None:
        return tuple(kinds)
    is_full = getattr(config, "sliding_window", None) is None
    return ("full_attention" if is_full else "sliding_attention",) * config.num_hidden_layers


def check_packable(config: PreTrainedConfig) -> None:
    """Raise ValueError if a layer's state would leak between packed documents."""
    if "linear_attention" in layer_kinds(config):
        raise ValueError(
            f"packing: true, but the recurrent layers of this {config.model_type} target carry "
            "their state from one document to the next; give --packing false"
        )


def has_latents(config: PreTrainedConfig) -> bool:
    """Return True if caches store latents that layers expand to keys and values (DeepSeek)."""
    return getattr(config, "kv_lora_rank", None) is not None


def choose_attention(config: PreTrainedConfig) -> str:
    """Return transformers' kernel name: "eager" for sinks and soft caps, else "sdpa"."""
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return "sdpa" if getattr(kind, "_supports_sdpa", True) else "eager"


def embed(embedding: nn.Module, config: PreTrainedConfig, ids: Tensor) -> Tensor:
    """Return layer index 0, the embeddings [..., H] of token ids."""
    rows: Tensor = embedding(ids)
    factor = getattr(config, "embedding_multiplier", 1.0)
    return rows if factor == 1 else rows * factor


def plain_embedding(target: PreTrainedModel) -> nn.Module:
    """Return the embedding without Gemma's scale, as drafts and engines read it."""
    embedding: Any = target.get_input_embeddings()
    if not hasattr(embedding, "embed_scale"):
        return embedding
    rows, hidden = embedding.weight.shape
    return nn.Embedding(rows, hidden, _weight=embedding.weight.detach()).requires_grad_(False)


def logits_divisor(config: PreTrainedConfig) -> float:
    """Return the divisor from the LM head's output to logits, for example Granite's, or 1."""
    return float(getattr(config, "logits_scaling", None) or 1.0)


def finish_logits(config: PreTrainedConfig, logits_lV: Tensor) -> Tensor:
    """Return logits, from the LM head's output."""
    if (divisor := logits_divisor(config)) != 1:
        logits_lV = logits_lV / divisor
    cap = getattr(config, "final_logit_softcapping", None)
    return logits_lV if cap is None else torch.tanh(logits_lV / cap) * cap


def norm_factor(config: PreTrainedConfig, weight_H: Tensor) -> Tensor:
    """Return the factor of a final RMSNorm, with ``logits_divisor`` folded in."""
    factor_H = weight_H + 1 if config.model_type.startswith(OFFSET_NORMS) else weight_H
    return factor_H / logits_divisor(config)


def is_tied(model: PreTrainedModel) -> bool:
    """Return True if the embedding is the LM head, too."""
    return HEAD in model.all_tied_weights_keys


def untie(model: PreTrainedModel) -> None:
    """Keep an LM head unlike the embedding, although config.json ties them.

    transformers does not tie such a head on loading, but would in the next ``tie_weights``.
    """
    model.all_tied_weights_keys.pop(HEAD, None)
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False


def packed_masks(config: PreTrainedConfig, positions_T: Tensor) -> Tensor | dict[str, Tensor]:
    """Return additive masks [1, 1, T, T] for a packed row, by kind if layers have kinds."""
    document_T = (positions_T == 0).cumsum(0)
    visible_TT = (document_T[:, None] == document_T).tril()
    dtype = getattr(torch, str(config.dtype).removeprefix("torch."), torch.float32)
    masks = {
        kind: additive_mask(
            visible_TT,
            positions_T,
            config.sliding_window if kind == "sliding_attention" else None,
            dtype,
        )
        for kind in set(layer_kinds(config))
    }
    return masks if getattr(config, "layer_types", None) else next(iter(masks.values()))


class LayerPositions:
    """Position arguments for layers, by layer kind."""

    def __init__(self, decoder: nn.Module) -> None:
        self.rotary: Any = getattr(decoder, "rotary_emb", None)
        self.is_by_kind = self.rotary is not None and (
            "layer_type" in inspect.signature(self.rotary.forward).parameters
        )
        config: Any = decoder.config
        self.follows_length = self.rotary is not None and bool(short_lengths(config))
        """True if a row's table depends on the length of its text."""
        self._following = FollowingTable(self.rotary, config) if self.follows_length else None

    def __call__(
        self,
        hidden_1lH: Tensor,
        positions_l: Tensor,
        kinds: Collection[str],
        length: int | None = None,
    ) -> dict[str, Values]:
        """Return keyword arguments for each layer kind.

        Args:
            length: text length, for prompt rows. None: each row is the last one in its text.
        """
        ids = positions_l[None]
        if self.rotary is None:
            return {kind: {"position_ids": ids} for kind in kinds}
        if self.is_by_kind:  # window layers may rotate faster than full attention
            turns = {kind: self._turn(hidden_1lH, ids, kind, length) for kind in set(kinds)}
        else:
            turns = dict.fromkeys(kinds, self._turn(hidden_1lH, ids, None, length))
        return {k: {"position_embeddings": x, "position_ids": ids} for k, x in turns.items()}

    def _turn(self, rows: Tensor, ids: Tensor, kind: str | None, length: int | None) -> Any:
        if self._following is not None:
            return self._following(rows, ids, kind, length)
        return self.rotary(rows, ids) if kind is None else self.rotary(rows, ids, kind)


def materialize(model: PreTrainedModel, device: torch.device | str) -> None:
    """Create a meta-device model's tensors absent from all weight files (rotary tables, scales)."""
    decoder = model.get_decoder()
    if (rotary := getattr(decoder, "rotary_emb", None)) is not None:
        decoder.rotary_emb = type(rotary)(config=decoder.config).to(device)
    embedding = decoder.embed_tokens
    if isinstance(scale := getattr(embedding, "scalar_embed_scale", None), float):
        embedding.embed_scale = torch.tensor(scale, dtype=model.dtype, device=device)
