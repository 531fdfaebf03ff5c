"""Small heads with the names and settings that other packages write: used by test_peer_layouts.py.

Checked against the sources of NeMo AutoModel 0.7.0, nvidia-modelopt 0.47.0, AngelSlim 0.5.0,
speculators 0.9.0 and SpecForge 0.2.0.
"""

from peer_files import (
    BLOCK,
    DRAFT_IDS,
    HIDDEN,
    LAYERS,
    MASK,
    NUMBERS,
    SIZES,
    block_files,
    eagle3_files,
)

BASE = 1e6
HF = {"transformers_version": "5.14.1", "use_cache": True, "tie_word_embeddings": False}
HF |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
HF |= {"attention_dropout": 0.0, "initializer_range": 0.02}


def renamed(weights, prefix):
    return {key.replace("midlayer.", prefix): value for key, value in weights.items()}


def nemo(*, wrapper="model.", **flags):
    """NeMo's EAGLE-3 checkpoint; its vLLM export has no wrapper and another architecture."""
    _, weights = eagle3_files("sglang", flags=dict(flags))
    kept = ("d2t", "t2d", "lm_head.weight")
    weights = {
        (key if key in kept else wrapper + key): value
        for key, value in renamed(weights, "layers.0.").items()
    }
    name = "LlamaEagle3DraftModel" if wrapper else "LlamaForCausalLMEagle3"
    config = {key: value for key, value in SIZES.items() if key != "rope_theta"} | HF
    config |= {"architectures": [name], "model_type": "qwen3", "num_hidden_layers": LAYERS}
    config |= {"layer_types": ["full_attention"] * LAYERS, "max_window_layers": 28}
    config |= {"sliding_window": None, "use_sliding_window": False, "attention_bias": False}
    config |= {"rope_parameters": {"rope_type": "default", "rope_theta": BASE}}
    config |= {"draft_vocab_size": len(DRAFT_IDS), "target_hidden_size": HIDDEN}
    config |= {"fc_norm": False, "norm_output": False, "parallel_drafting": False}
    return config | {"attn_implementation": "eager", "_name_or_path": ""} | flags, weights


def modelopt(**changes):
    """The Hugging Face trainer's EAGLE-3 export, with its default rope_scaling."""
    _, weights = eagle3_files("sglang")
    del weights["t2d"]
    config = SIZES | HF | {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    config |= {"draft_vocab_size": len(DRAFT_IDS), "torch_dtype": "bfloat16", "mlp_bias": False}
    config |= {"pretraining_tp": None, "attention_bias": False}
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}
    config["rope_scaling"] = yarn
    config["eagle_config"] = {
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": 1,
    }
    return config | changes, renamed(weights, "layers.0.")


def angelslim(**changes):
    config, weights = eagle3_files("sglang")
    own = {"architectures": ["Eagle3LlamaForCausalLM"], "rope_theta": BASE, "pretraining_tp": 1}
    return config | HF | own | {"torch_dtype": "bfloat16"} | changes, weights


def specforge(**changes):
    config, weights = eagle3_files("sglang")
    rope = {"rope_type": "default", "rope_theta": BASE}
    return config | HF | {"rope_theta": BASE, "rope_parameters": rope} | changes, weights


def converted(**changes):
    """What speculators' converter makes of a head."""
    config, weights = eagle3_files("speculators", flags={"inner": {**HF, "pretraining_tp": 1}})
    own = {"auto_map": {"": "config.Eagle3SpeculatorConfig"}, "dtype": "float32", "fc_norm": False}
    own |= {"eagle_aux_hidden_state_layer_ids": None, "norm_before_fc": False, "norm_output": False}
    own |= {"embed_requires_grad": False, "target_hidden_size": None}
    own |= {"speculators_config": {"algorithm": "eagle3"}, "speculators_version": "0.9.0"}
    return config | own | changes, weights


def modelopt_dflash(target, **changes):
    config, weights = block_files("DFlash", target)
    own = {"rope_theta": BASE, "rope_scaling": None, "torch_dtype": "bfloat16"}
    block = {"mask_token_id": MASK, "target_layer_ids": NUMBERS, "causal": False}
    del config["auto_map"]
    return config | HF | own | {"dflash_config": block} | changes, weights


def nemo_dflash(target, **changes):
    """NeMo's DFlash checkpoint with the given changes in its dflash_config."""
    config, weights = block_files("DFlash", target)
    del config["auto_map"], config["rope_theta"]
    block = {"block_size": BLOCK, "mask_token_id": MASK, "target_layer_ids": NUMBERS}
    block |= {"output_multiplier": 1.0, "final_logit_softcapping": None}
    block |= {"input_embedding_scale": 1.0}
    own = {"architectures": ["Qwen3DFlashDraftModel"], "is_causal": False, "max_window_layers": 2}
    own |= {"sliding_window": None, "use_sliding_window": False}
    own |= {"rope_parameters": {"rope_type": "default", "rope_theta": BASE}}
    return config | HF | own | {"dflash_config": block | changes}, weights


def angelslim_dflash(target):
    config, weights = block_files("DFlash", target)
    del config["auto_map"]
    return config | HF | {"architectures": ["QwenDFlashDraftModel"]}, weights
