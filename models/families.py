"""Requirements for cutting a target into stages.

No list of model names decides which targets can be cut. A target needs decoder layers in a list,
rotary positions or none, a cache per layer (keys and values, or latents), a final norm and an LM
head. ``check_target`` compares the layers' forward with transformers' own, on a copy without
weights, then lets a small copy with weights decode. It names the missing part.

Shape suffixes: l rows, T positions, H hidden, V vocabulary.
"""

from collections.abc import Sequence
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
from .stages.acceptance import trial
from .transformer.decoder import (
    KINDS,
    LayerPositions,
    embed,
    finish_logits,
    layer_kinds,
    materialize,
)
from .transformer.stage_cache import StageCache, additive_mask

NUM_ROWS, WINDOW = 6, 3
"""Sizes for the comparison: the window is shorter than the sequence."""
PARTS = {"layers": nn.ModuleList, "embed_tokens": nn.Embedding, "norm": nn.Module}
PLACES = {"attention_mask", "position_embeddings", "position_ids", "past_key_values"}
"""Arguments passed by stages to layers."""
_lacks: dict[str, str | None] = {}  # cached by configuration, because a check builds a model


def check_target(config: PreTrainedConfig, name: str) -> None:
    """Raise ValueError, naming the missing part, if a model cannot be cut into stages.

    The check takes a fraction of a second per family and process.
    """
    key = f"{type(config)} {config.to_json_string(use_diff=False)}"
    if key not in _lacks:
        try:
            with torch.random.fork_rng(devices=[]):  # leave the caller's random numbers alone
                _lacks[key] = _lack(config) or trial(config)
        except Exception as error:  # any fault in a model's own code
            said = " ".join(f"{type(error).__name__}: {error}".split())
            _lacks[key] = f"its layers do not run by themselves ({said[:200]})"
    if (reason := _lacks[key]) is not None:
        raise ValueError(
            f"target: {str(name)!r} ({config.model_type}) cannot be cut into stages: {reason}; "
            "give another target, see docs/targets.md"
        )


@torch.inference_mode()
def _lack(config: PreTrainedConfig) -> str | None:
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
    if not any(type(model.config) in kind for kind in kinds_of_model):
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
