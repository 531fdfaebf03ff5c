"""Requirements for cutting a target into stages, and the differences between model families.

No list of model names decides which targets can be cut. A target needs decoder layers in a list,
rotary positions or none, a cache per layer (keys and values, or latents), a final norm and an LM
head. Its configuration decides the other steps in the forward. ``check_target`` compares the result
with transformers' own forward, on a copy without weights, and names the missing part.

Shape suffixes: l rows, T positions, H hidden, V vocabulary.
"""

import inspect
from collections.abc import Collection, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from ..files import Values
from ..pretrained import auto_class
from .fingerprint import HEAD
from .rotary_lengths import FollowingTable, short_lengths
from .stage_cache import StageCache, additive_mask

KINDS = ("full_attention", "sliding_attention", "linear_attention")
"""Layer kinds whose cached rows can be dropped by a ``stage_cache.KeepRows``."""
PLAIN = ("llama", "qwen2", "qwen3", "mistral")
"""Model types with pre-norm layers, RMSNorm, rotary positions for whole heads, and SwiGLU: no
experts, whose row counts vary with routing, and no recurrent layers."""
OFFSET_NORMS = ("gemma", "qwen3_5", "qwen3_next")
"""Prefixes of model types with one added to the RMSNorm's weight."""
PARTS = {"layers": nn.ModuleList, "embed_tokens": nn.Embedding, "norm": nn.Module}
PLACES = {"attention_mask", "position_embeddings", "position_ids", "past_key_values"}
"""Arguments passed by stages to layers."""


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


# -- what a target lacks ----------------------------------------------------------------------

NUM_ROWS, WINDOW = 6, 3
"""Sizes for the comparison: the window is shorter than the sequence."""


@torch.inference_mode()
def lack(config: PreTrainedConfig) -> str | None:
    """Return what a model lacks to be cut into stages, by its layers alone, or None."""
    kinds_of_model = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    if not any(type(config) in kind for kind in kinds_of_model):
        return "transformers has no causal language model of it"
    config = deepcopy(config)  # changed below
    vars(config).pop("quantization_config", None)
    if (text := config.get_text_config()) and getattr(text, "sliding_window", None) is not None:
        text.sliding_window = WINDOW  # shorter than the compared rows, so its mask shows
    with torch.device("meta"):
        model = auto_class(config).from_config(
            config, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
        )
    if type(model.config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "transformers has no causal language model of its text part alone"
    decoder, head = model.eval().get_decoder(), model.get_output_embeddings()
    for part, wanted in PARTS.items():
        if not isinstance(getattr(decoder, part, None), wanted):
            return f"its decoder has no {wanted.__name__} named {part}"
    if not isinstance(head, nn.Linear):
        return "it has no linear LM head"
    if not isinstance(getattr(decoder.norm, "weight", None), Tensor):
        return "its final norm has no weight"
    further = [n for n, x in decoder.named_children() if n not in PARTS and [*x.parameters()]]
    if further:
        return f"its decoder also has {', '.join(further)}"
    kinds = layer_kinds(decoder.config)
    if strange := sorted(set(kinds) - set(KINDS)):
        return f"no KeepRows drops rows of its layers of kind {', '.join(strange)}"
    materialize(model, "cpu")
    for module in (decoder.embed_tokens, decoder.norm, head):
        for name, weight in module.named_parameters(recurse=False):
            few = weight.shape if module is decoder.norm else (NUM_ROWS, *weight.shape[1:])
            setattr(module, name, nn.Parameter(torch.randn(few), requires_grad=False))
    decoder.embed_tokens.padding_idx = None  # the short table may lack this row
    return _lack_of_layers(decoder, kinds) or _difference(model, decoder, head, kinds)


def materialize(model: PreTrainedModel, device: torch.device | str) -> None:
    """Create a meta-device model's tensors absent from all weight files (rotary tables, scales)."""
    decoder = model.get_decoder()
    if (rotary := getattr(decoder, "rotary_emb", None)) is not None:
        decoder.rotary_emb = type(rotary)(config=decoder.config).to(device)
    embedding = decoder.embed_tokens
    if isinstance(scale := getattr(embedding, "scalar_embed_scale", None), float):
        embedding.embed_scale = torch.tensor(scale, dtype=model.dtype, device=device)


def _inputs(decoder: Any, kinds: Sequence[str]) -> tuple[Tensor, dict[str, Values]]:
    """Return the first layer's input rows, and the arguments for each layer kind."""
    ids, positions = torch.arange(NUM_ROWS), torch.arange(NUM_ROWS)
    hidden_1TH = embed(decoder.embed_tokens, decoder.config, ids[None])
    causal_TT = torch.ones(NUM_ROWS, NUM_ROWS, dtype=torch.bool).tril()
    given = LayerPositions(decoder)(hidden_1TH, positions, kinds)
    for kind in given:
        window = WINDOW if kind == "sliding_attention" else None
        mask = additive_mask(causal_TT, positions, window, torch.float32)
        given[kind]["attention_mask"] = None if kind == "linear_attention" else mask
    return hidden_1TH, given


def _lack_of_layers(decoder: Any, kinds: Sequence[str]) -> str | None:
    """Run a layer of each kind and structure on the meta device, and return what it lacks."""
    inputs = _inputs(decoder, kinds)
    hidden, given = tree_map_only(Tensor, lambda x: x.to("meta"), inputs)
    forms = {
        (kind, *(type(x) for x in layer.modules())): (kind, index, layer)
        for index, (kind, layer) in enumerate(zip(kinds, decoder.layers, strict=True))
    }
    for kind, index, layer in forms.values():
        cache = StageCache([index] if kind == "linear_attention" else [])
        cache.begin(torch.zeros(NUM_ROWS, dtype=torch.long, device="meta"))
        next(cache.recurrent_calls())
        try:
            output = layer(hidden, past_key_values=cache, **given[kind])
        except RuntimeError:  # experts: routing reads numbers, missing on the meta device
            if kind != "linear_attention" and not cache.num_bytes:
                raise
            output = hidden
        except AttributeError as error:  # the cache lacks a method
            return f"its layers do not run on a stage's cache ({error})"
        if not isinstance(output, Tensor):
            return "its layers return more than hidden states"
        if kind != "linear_attention" and not cache.num_bytes:
            return "its layers keep no keys and values in the cache"
    return None


def _difference(
    model: PreTrainedModel, decoder: Any, head: nn.Module, kinds: Sequence[str]
) -> str | None:
    """Return the first difference from transformers' forward in the work around the layers.

    Stand-ins replace the layers and negate their input.
    """
    calls: list[tuple[Tensor, Values]] = []

    def negate(hidden_states: Tensor, **given: Any) -> Tensor:
        calls.append((hidden_states, given))
        return -hidden_states

    for layer in decoder.layers:
        layer.forward = negate
    logits_TV = model(input_ids=torch.arange(NUM_ROWS)[None], use_cache=False).logits[0]
    if len(calls) != len(kinds):
        return f"its forward calls its {len(kinds)} layers {len(calls)} times"
    hidden_1TH, expected = _inputs(decoder, kinds)
    for kind, (rows_1TH, given) in zip(kinds, calls, strict=True):
        if not torch.equal(rows_1TH, hidden_1TH):
            return "its forward changes hidden states before or between its layers"
        hidden_1TH = -rows_1TH
        others = given.keys() - PLACES
        if further := sorted(n for n in others if given[n] is not None and given[n] is not False):
            return f"its layers also need {', '.join(further)}"
        mask, own_mask = given["attention_mask"], expected[kind]["attention_mask"]
        if own_mask is not None and (mask is None or not torch.equal(mask == 0, own_mask == 0)):
            return f"its layers of kind {kind} see other rows"
        turns = (x.get("position_embeddings", ()) for x in (given, expected[kind]))
        if not all(map(torch.equal, *(tree_leaves(x) for x in turns))):
            return f"its layers of kind {kind} have other positions"
    own_TV = finish_logits(decoder.config, head(decoder.norm(hidden_1TH[0])))
    if not torch.equal(own_TV, logits_TV):
        return "its logits are more than those of its LM head after its final norm"
    return None
