"""Small targets of many families, the same in every test."""

from collections.abc import Callable
from functools import cache

import transformers as hf
from staged_targets import FAMILIES as STAGED
from staged_targets import NUM_LAYERS, SIZES, WINDOW, random_ids, tiny

from pipedraft.models.transformer.decoder import choose_attention

EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=16)
ROUTED = EXPERTS | dict(n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1)
HALF = ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2)
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}
WINDOWED = dict(head_dim=8, sliding_window=WINDOW, layer_types=HALF)
MULTIPLIED = dict(
    embedding_multiplier=3.0,
    attention_multiplier=0.2,
    residual_multiplier=0.4,
    logits_scaling=2.0,
)
LATENT = dict(q_lora_rank=12, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6)
SIGHT = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28
)
UNSHARED = SIZES | {"num_key_value_heads": 4}
LLAMA_4_SCALE = {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}
FAMILIES: dict[str, Callable[[], hf.PreTrainedConfig]] = {
    "gemma2": lambda: hf.Gemma2Config(
        **SIZES, **WINDOWED, attn_logit_softcapping=5.0, final_logit_softcapping=3.0
    ),
    "gemma3": lambda: hf.Gemma3TextConfig(**SIZES, **WINDOWED, rope_parameters=ROPES),
    "gemma3_that_sees": lambda: hf.Gemma3Config(
        text_config=FAMILIES["gemma3"]().to_dict(), vision_config=SIGHT, mm_tokens_per_image=4
    ),
    "gpt_oss": lambda: hf.GptOssConfig(
        **SIZES, **WINDOWED, num_local_experts=4, num_experts_per_tok=2
    ),
    "phi3": lambda: hf.Phi3Config(**SIZES, sliding_window=WINDOW),
    "phi4": lambda: hf.Phi3Config(
        **SIZES,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ),
    "olmo2": lambda: hf.Olmo2Config(**SIZES),
    "olmo3": lambda: hf.Olmo3Config(**SIZES, sliding_window=WINDOW, layer_types=HALF),
    "granite": lambda: hf.GraniteConfig(**SIZES, **MULTIPLIED),
    "granitemoe": lambda: hf.GraniteMoeConfig(
        **SIZES, **MULTIPLIED, num_local_experts=4, num_experts_per_tok=2
    ),
    "glm4": lambda: hf.Glm4Config(**SIZES, head_dim=8),
    "glm4_moe": lambda: hf.Glm4MoeConfig(
        **SIZES, **ROUTED, head_dim=8, n_shared_experts=1, use_qk_norm=True
    ),
    "smollm3": lambda: hf.SmolLM3Config(**SIZES, no_rope_layer_interval=2),
    "ministral": lambda: hf.MinistralConfig(**SIZES, **WINDOWED),
    "ministral3": lambda: hf.Ministral3Config(
        **SIZES, head_dim=8, rope_parameters=YARN | LLAMA_4_SCALE
    ),
    "mistral": STAGED["mistral_sliding"],
    "qwen3_moe": STAGED["qwen3_moe"],
    "deepseek_v3": lambda: hf.DeepseekV3Config(
        **UNSHARED, **ROUTED, **LATENT, n_shared_experts=1, rope_parameters=YARN
    ),
}
PROMPT = random_ids(2 * WINDOW + 1).tolist()
LENGTH = 24
SAMPLED = dict(temperature=0.9, verifier="gumbel")


@cache
def model_of(name: str) -> hf.PreTrainedModel:
    STAGED.setdefault(name, FAMILIES[name])
    return tiny(name, choose_attention(FAMILIES[name]()))
