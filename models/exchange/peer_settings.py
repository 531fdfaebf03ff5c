"""Judge every setting in another project's config.json: read, without effect, or refused.

An unknown setting could change each draft token. A setting therefore passes in three cases only: a
reader uses it, it never has an effect, or its value has none.
"""

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from ...files import Values
from ..transformer.layers import ROPE_SETTINGS

LAYER_SETTINGS = frozenset(
    (
        *("architectures", "attention_bias", "draft_vocab_size", "head_dim", "hidden_act"),
        *("hidden_size", "intermediate_size", "layer_types", "max_position_embeddings"),
        *("mlp_bias", "model_type", "num_attention_heads", "num_hidden_layers"),
        *("num_key_value_heads", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta"),
        *("sliding_window", "target_hidden_size", "tie_word_embeddings", "vocab_size"),
    )
)
"""Decoder layer settings used by the readers."""
OUTER_SETTINGS = frozenset(
    ("architectures", "draft_vocab_size", "target_hidden_size", "tie_word_embeddings")
)
"""Settings outside ``transformer_layer_config`` in speculators' layout."""
WITHOUT_EFFECT = frozenset(
    (
        # written by transformers for every model
        *("add_cross_attention", "attention_dropout", "attn_implementation", "auto_map"),
        *("bos_token_id", "chunk_size_feed_forward", "cross_attention_hidden_size"),
        *("decoder_start_token_id", "dtype", "eos_token_id", "finetuning_task", "id2label"),
        *("initializer_range", "is_decoder", "is_encoder_decoder", "label2id"),
        *("max_window_layers", "name_or_path", "output_attentions", "output_hidden_states"),
        *("pad_token_id", "prefix", "pretraining_tp", "problem_type", "pruned_heads"),
        *("return_dict", "sep_token_id", "task_specific_params", "tf_legacy_loss"),
        *("tie_encoder_decoder", "tokenizer_class", "torch_dtype", "torchscript"),
        *("transformers_version", "unsloth_version", "use_bfloat16", "use_cache"),
        # defaults for generation, which transformers 4 wrote, too
        *("bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample"),
        *("early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty"),
        *("forced_bos_token_id", "forced_eos_token_id", "length_penalty", "max_length"),
        *("min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams"),
        *("num_return_sequences", "output_scores", "remove_invalid_values"),
        *("repetition_penalty", "return_dict_in_generate", "suppress_tokens", "temperature"),
        *("top_k", "top_p", "typical_p"),
        # notes about training
        *("embed_requires_grad", "is_local", "modal_type", "num_anchors", "quantization_method"),
        *("speculators_config", "speculators_version", "target_model_type"),
        # Sliding is up to layer_types.
        "use_sliding_window",
    )
)
NEUTRAL: dict[str, Any] = {
    "attention_multiplier": None,
    "attention_sink_bias": False,
    "attn_logit_softcapping": None,
    "bias": False,
    "dflash_query_causal": False,
    "embedding_multiplier": 1.0,
    "embedding_scale": 1.0,
    "final_logit_softcapping": 0.0,
    "has_own_lm_head": False,
    "input_embedding_scale": 1.0,
    "is_causal": False,
    "is_neox_style": True,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "num_nextn_predict_layers": 0,
    "output_multiplier": 1.0,
    "parallel_drafting": False,
    "partial_rotary_factor": 1.0,
    "residual_multiplier": 1.0,
    "rope_interleaved": False,
    "rope_is_neox_style": True,
    "scale_embeddings": False,
    "use_aux_norm": False,
    "use_gemma_norm": False,
}
"""Setting -> value without effect. Null has no effect, either."""
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": (
        *("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    ),
}
"""Rotary type -> required settings."""
MOST = 1e18
"""Larger numbers than any rotary setting."""
ROPE_NEUTRAL = {"partial_rotary_factor": 1.0, "truncate": True}
ROPE_UNUSED = ("mrope_section", "mrope_interleaved")
"""These part positions of text, image and video; a head here reads text alone."""


class Refusing(Protocol):
    """What this module needs of a peer's head."""

    def refuse(self, key: str, value: object, fix: str) -> ValueError: ...


def check_settings(
    peer: Refusing,
    settings: Mapping[str, Any],
    read: Collection[str],
    *,
    neutral: Mapping[str, Any] = NEUTRAL,
    place: str = "",
) -> None:
    """Refuse the first setting that is neither read nor without effect.

    Args:
        read: settings that the caller takes or checks.
        neutral: settings that pass with one value.
        place: name of the table that holds the settings, with a dot.
    """
    for key, value in settings.items():
        if value is None or key in read or key in WITHOUT_EFFECT or key.startswith("_"):
            continue
        if key not in neutral:
            raise peer.refuse(
                place + key,
                value,
                "it is unknown here, so it could change every draft token; take it out of "
                "config.json if it changes nothing",
            )
        if value != neutral[key]:
            raise peer.refuse(place + key, value, f"only {neutral[key]!r} can be expressed here")


def check_agreement(peer: Refusing, outer: Values, inner: Values, place: str) -> None:
    """Refuse a setting that has one value in a table and another one outside of it.

    Packages differ in which of the two they prefer.
    """
    for key in outer.keys() & inner.keys():
        if None not in (outer[key], inner[key]) and outer[key] != inner[key]:
            both = f"{place}.{key} is {inner[key]!r}, and packages differ in which one they read"
            raise peer.refuse(key, outer[key], f"{both}; remove the wrong one")


# -- rotary positions -----------------------------------------------------------------------


def with_one_rope(peer: Refusing, settings: Values, entry: str | None) -> Values:
    """Return the settings with their rotary positions as one checked ``rope_parameters``.

    Args:
        entry: key of the entry that the layout's trainer reads from a table with one entry for each
            layer type; None if its trainer knows no such table.
    """
    theta = settings.get("rope_theta")
    if theta is not None and not _is_positive(theta):
        raise peer.refuse("rope_theta", theta, "it is to be a positive number")
    forms = {"rope_theta": {} if theta is None else {"rope_theta": theta}}
    for key in ("rope_scaling", "rope_parameters"):
        forms[key] = _flat(peer, key, settings.get(key), entry)
    rope: Values = {}
    for key, form in forms.items():
        for name in rope.keys() & form.keys():
            if rope[name] != form[name]:
                other = f"{name} is {rope[name]!r} outside of it"
                fix = f"{other}, and versions of transformers differ in which one they read"
                raise peer.refuse(key, settings[key], f"{fix}; remove the wrong one")
        rope |= form
    key = "rope_scaling" if settings.get("rope_parameters") is None else "rope_parameters"
    _check_rope(peer, key, rope)
    known = {key: value for key, value in settings.items() if key not in forms}
    return known | {"rope_parameters": {k: rope[k] for k in ROPE_SETTINGS if k in rope}}


def _flat(peer: Refusing, key: str, value: object, entry: str | None) -> Values:
    """Return one layer's table without nulls, with its type under ``rope_type``."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise peer.refuse(key, value, "it is to be a table")
    if any(isinstance(inner, dict) for inner in value.values()):
        chosen = value.get(entry)
        if entry is None and all(inner == next(iter(value.values())) for inner in value.values()):
            chosen = next(iter(value.values()))
        if not isinstance(chosen, dict):
            fix = "this layout's trainer reads no entry of a layer type"
            fix = fix if entry is None else f"this layout's trainer reads {entry!r}, which it lacks"
            raise peer.refuse(key, value, f"{fix}; write the table of the head's layer alone")
        value = chosen
    flat = {("rope_type" if name == "type" else name): x for name, x in value.items()}
    if "type" in value and value.get("rope_type", value["type"]) != value["type"]:
        raise peer.refuse(key, value, "type and rope_type differ; remove the wrong one")
    return {name: x for name, x in flat.items() if x is not None}


def _check_rope(peer: Refusing, key: str, rope: Values) -> None:
    kind = rope.get("rope_type", "default")
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise peer.refuse(key, rope, f"known types: {', '.join(ROPE_TYPES)}")
    if missing := [name for name in ROPE_TYPES[kind] if name not in rope]:
        raise peer.refuse(key, rope, f"{kind} needs {', '.join(missing)}")
    for name, value in rope.items():
        if name == "rope_type" or name in ROPE_UNUSED:
            continue
        if name in ROPE_NEUTRAL:
            if value != ROPE_NEUTRAL[name]:
                fix = f"only {name} {ROPE_NEUTRAL[name]!r} can be expressed here"
                raise peer.refuse(key, rope, fix)
        elif name not in ROPE_SETTINGS:
            raise peer.refuse(key, rope, f"{name} is unknown here")
        elif not _is_positive(value):
            raise peer.refuse(key, rope, f"{name} is to be a positive number")


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < MOST
