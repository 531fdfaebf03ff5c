"""Small targets whose rotary tables follow the text's length, the same in every test."""

from functools import cache

import pytest
import torch
import transformers as hf
from staged_targets import SIZES, random_ids, roughen

from pipedraft.eval.lossless import generate_greedy

ORIGINAL, LENGTH = 24, 24
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [1.5, 3.0, 6.0, 12.0]}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": ORIGINAL,
    **FACTORS,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
SHORT = SIZES | {"max_position_embeddings": ORIGINAL}
KINDS = ["sliding_attention", "full_attention"]
TARGETS = {
    # transformers computes all rows of these again at the crossing ..
    "phi3": lambda: hf.Phi3Config(
        **SIZES, original_max_position_embeddings=ORIGINAL, rope_parameters=LONG
    ),
    "phimoe": lambda: hf.PhimoeConfig(
        **SIZES,
        original_max_position_embeddings=ORIGINAL,
        rope_parameters=LONG | {"short_mscale": 1.0, "long_mscale": 1.2},
        num_local_experts=2,
    ),
    # .. and keeps the keys of these
    "llama_longrope": lambda: hf.LlamaConfig(**SIZES, rope_parameters=LONG),
    "qwen3_dynamic": lambda: hf.Qwen3Config(**SHORT, head_dim=8, rope_parameters=DYNAMIC),
    "gemma3_dynamic": lambda: hf.Gemma3TextConfig(
        **SHORT,
        head_dim=8,
        sliding_window=6,
        layer_types=KINDS * 2,
        rope_parameters=dict(zip(KINDS, (LONG | {"rope_type": "default"}, DYNAMIC), strict=True)),
    ),
}
PROMPTS = {
    "ends before the crossing": random_ids(20).tolist(),
    "ends at the crossing": random_ids(ORIGINAL, 2).tolist(),
    "ends behind it": random_ids(ORIGINAL + 1, 3).tolist(),
    "is longer": random_ids(ORIGINAL + 9, 4).tolist(),
}
FIRST = ("phi3", "qwen3_dynamic")
QUICK = [*FIRST, *(pytest.param(x, marks=pytest.mark.all) for x in TARGETS if x not in FIRST)]


@cache
def target_of(name: str) -> hf.PreTrainedModel:
    torch.manual_seed(0)
    model = roughen(hf.AutoModelForCausalLM.from_config(TARGETS[name]()))
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.mul_(3)  # so that other positions give other tokens
    return model


@cache
def expected_of(name: str, prompt: tuple[int, ...]) -> list[int]:
    return generate_greedy(target_of(name), list(prompt), max_new_tokens=2 * LENGTH)
