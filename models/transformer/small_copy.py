"""A model's configuration at a fraction of its size, for trials on a CPU.

The copy keeps what decides how a family computes (layer kinds, norms, rotary type, caps, experts
or none), and replaces the sizes.
"""

from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from ...files import Values

NUM_LAYERS = 4
VOCAB = 61
WINDOW = 4
"""Sliding window, shorter than a trial's text."""
SHORT = 6
"""Longest text with the usual rotary frequencies, also shorter."""
HEAD_DIM = 8
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    **dict.fromkeys(("head_dim", "swa_head_dim", "global_head_dim"), HEAD_DIM),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), WINDOW),
    # latent attention
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 12,
    "v_head_dim": 6,
    # experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(
        (
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "shared_intermediate_size",
            "moe_shared_expert_intermediate_size",
        ),
        16,
    ),
    # recurrent layers
    "linear_num_key_heads": 2,
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_expand": 2,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 4,
}
AT_MOST = {"first_k_dense_replace": 1, "num_dense_layers": 1}


def small_copy(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of a small text model of the same kind."""
    text = config.get_text_config()
    if text is config or type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return type(text).from_dict(_shrunk(text))
    whole = config.to_dict()
    for name, part in whole.items():
        if isinstance(part, dict) and isinstance(getattr(config, name), PreTrainedConfig):
            whole[name] = _shrunk(getattr(config, name))
    return type(config).from_dict(whole)


def _shrunk(config: PreTrainedConfig) -> Values:
    values = config.to_dict()
    num_layers = getattr(config, "num_hidden_layers", 0)
    chosen = _layers(config)
    for name, value in values.items():
        if value is None:
            continue
        if name in SIZES:
            values[name] = SIZES[name]
        elif name in AT_MOST:
            values[name] = min(value, AT_MOST[name])
        elif name.endswith("num_key_value_heads"):
            values[name] = _key_heads(values, value, config.num_attention_heads)
        elif isinstance(value, list | tuple) and len(value) == num_layers:
            values[name] = [value[layer] for layer in chosen]
    if getattr(config, "qk_rope_head_dim", None):  # head_dim may name one of the two sizes
        for name in ("qk_rope_head_dim", "qk_head_dim"):
            if values.get("head_dim") and config.head_dim == getattr(config, name, None):
                values["head_dim"] = SIZES[name]
    values["num_hidden_layers"] = len(chosen)
    values.pop("quantization_config", None)
    _shrink_rotary(values)
    return values


def _key_heads(values: Values, number: int, num_heads: int) -> int:
    """Keep one key head, a key head per query head, or something between."""
    return 4 if number == num_heads else min(number, 2)


def _layers(config: PreTrainedConfig) -> list[int]:
    """Choose about ``NUM_LAYERS`` layers, of each kind at least one; a single one twice."""
    num_layers = getattr(config, "num_hidden_layers", 0)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * num_layers
    firsts = [layer for layer, kind in enumerate(kinds) if kinds.index(kind) == layer]
    others = [layer for layer in range(num_layers) if layer not in firsts]
    chosen = sorted([*firsts, *others[: max(NUM_LAYERS - len(firsts), 0)]])
    return chosen * 2 if len(chosen) == 1 else chosen


def _shrink_rotary(values: Values) -> None:
    rope = values.get("rope_parameters") or {}
    for own in [rope, *(x for x in rope.values() if isinstance(x, dict))]:
        if own.get("rope_type") == "longrope":
            own["original_max_position_embeddings"] = SHORT
            share = own.get("partial_rotary_factor", values.get("partial_rotary_factor") or 1.0)
            for name in ("short_factor", "long_factor"):
                factors = own[name]
                own[name] = [factors[0], *factors[-(int(HEAD_DIM * share) // 2 - 1) :]]
            if values.get("original_max_position_embeddings"):
                values["original_max_position_embeddings"] = SHORT
        if own.get("mrope_section"):  # shares of the rotary pairs for time, height and width
            share = own.get("partial_rotary_factor", values.get("partial_rotary_factor") or 1.0)
            pairs = int(HEAD_DIM * share) // 2
            own["mrope_section"] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
        if own.get("rope_type") == "dynamic":
            values["max_position_embeddings"] = SHORT
