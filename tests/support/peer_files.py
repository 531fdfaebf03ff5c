"""Heads in other projects' formats, with random weights: imported by test_peers*.py."""

import json
from pathlib import Path

import torch
from command_runs import assert_one_line, call
from safetensors.torch import load_file, save_file
from tiny_models import tiny_llama

from pipedraft.models.exchange.peers import import_head

LAYERS, HIDDEN, VOCABULARY, STEPS, LENGTH = 8, 32, 64, 7, 12
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "rope_theta": 1e4,
    "max_position_embeddings": 512,
}
IDS = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(6))
DRAFT_IDS = torch.arange(0, VOCABULARY, 3)


def save_target(folder):
    model = tiny_llama(layers=LAYERS, hidden=HIDDEN, vocab=VOCABULARY)
    model.folder = folder
    model.save_pretrained(folder)
    return model


def random(generator, *shape):
    """Random matrix with usual magnitudes; norm weights lie around one."""
    noise = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
    return 1 + noise if len(shape) == 1 else noise


def layer_weights(generator, prefix, width, *, norms=(), biases=False):
    shapes = {
        "self_attn.q_proj.weight": (HIDDEN, width),
        "self_attn.k_proj.weight": (16, width),
        "self_attn.v_proj.weight": (16, width),
        "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        "mlp.gate_proj.weight": (48, HIDDEN),
        "mlp.up_proj.weight": (48, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, 48),
        "post_attention_layernorm.weight": (HIDDEN,),
        **{f"{name}.weight": (HIDDEN,) for name in norms if "q_" not in name and "k_" not in name},
        **{f"self_attn.{name}.weight": (8,) for name in norms if name in ("q_norm", "k_norm")},
    }
    if biases:
        shapes |= {f"self_attn.{x}_proj.bias": (size,) for x, size in (("q", 32), ("k", 16))}
        shapes["self_attn.v_proj.bias"] = (16,)
    return {prefix + name: random(generator, *shape) for name, shape in shapes.items()}


def eagle3_files(layout, *, ids=DRAFT_IDS, biases=False, norms=(), flags=None):
    """Files of an EAGLE-3 head, config.json and tensors, as its trainer would write them."""
    generator, flags = torch.Generator().manual_seed(4), flags or {}
    prefix = "layers.0." if layout == "speculators" else "midlayer."
    count = 3
    weights = layer_weights(
        generator,
        prefix,
        2 * HIDDEN,
        norms=("hidden_norm", "input_layernorm", *norms),
        biases=biases,
    )
    weights |= {
        "fc.weight": random(generator, HIDDEN, count * HIDDEN),
        "norm.weight": random(generator, HIDDEN),
        "lm_head.weight": random(generator, len(ids), HIDDEN),
    }
    if flags.get("norm_before_fc"):
        weights["input_norm.weight"] = random(generator, count * HIDDEN)
    if flags.get("fc_norm"):
        for index in range(count):
            weights[f"fc_norm.{index}.weight"] = random(generator, HIDDEN)
    if len(ids) < VOCABULARY:
        weights["d2t"] = ids - torch.arange(len(ids))
        weights["t2d"] = torch.isin(torch.arange(VOCABULARY), ids)
    config = SIZES | {"draft_vocab_size": len(ids)}
    if layout != "speculators":
        architectures = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
        return config | architectures | flags, weights
    inner = SIZES | {"model_type": "qwen3" if norms else "llama"} | flags.pop("inner", {})
    config = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": inner,
        "draft_vocab_size": len(ids),
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    }
    return config | flags, weights


def eagle_files(*, bias=True, biases=False):
    generator = torch.Generator().manual_seed(5)
    weights = layer_weights(generator, "layers.0.", HIDDEN, biases=biases)
    weights["fc.weight"] = random(generator, HIDDEN, 2 * HIDDEN)
    if bias:
        weights["fc.bias"] = random(generator, HIDDEN)
    config = SIZES | {"architectures": ["LlamaForCausalLM"], "bias": bias, "qkv_bias": biases}
    return config, weights


BLOCK, MASK, NUMBERS = 4, 60, [1, 3, 5]
NORMS = ("input_layernorm", "q_norm", "k_norm")
SIDES = {"markov_rank": 6, "markov_head_type": "vanilla", "enable_confidence_head": True}
SIDES |= {"confidence_head_with_markov": True}
TARGETS = ("embed_tokens.weight", "lm_head.weight")
"""Target tensors repeated in some layouts."""


def block_files(name, target):
    """Return config.json and the tensors of a two-layer head, as the project publishes them."""
    generator = torch.Generator().manual_seed(4)
    weights = {"fc.weight": random(generator, HIDDEN, len(NUMBERS) * HIDDEN)}
    weights |= {f"{name}.weight": random(generator, HIDDEN) for name in ("norm", "hidden_norm")}
    for index in range(2):
        weights |= layer_weights(generator, f"layers.{index}.", HIDDEN, norms=NORMS)
    config = SIZES | {"model_type": "qwen3", "attention_bias": False}
    config |= {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    ids = DRAFT_IDS if "vocabulary" in name else torch.arange(VOCABULARY)
    sides, is_plain = SIDES if "DSpark" in name else {}, "speculators" not in name
    if "without" in name:
        sides = {"markov_rank": 0, "enable_confidence_head": False}
    elif sides:
        weights["markov_head.markov_w1.weight"] = random(generator, VOCABULARY, 6)
        weights["markov_head.markov_w2.weight"] = random(generator, len(ids), 6)
        weights["confidence_head.proj.weight"] = random(generator, 1, HIDDEN + 6)
        weights["confidence_head.proj.bias"] = torch.zeros(1)
    if is_plain:
        config |= {"num_target_layers": LAYERS, "block_size": BLOCK}
        block = {"mask_token_id": MASK, "target_layer_ids": NUMBERS}
        if "SpecForge" in name:
            config |= {"architectures": ["DSparkDraftModel"], "num_key_value_heads": 2}
            block |= sides | {"projector_type": "dspark", "attention_mode": "gqa"}
            return config | {"dflash_config": block}, weights
        if sides:
            weights |= {TARGETS[0]: target.get_input_embeddings().weight}
            weights |= {TARGETS[1]: target.lm_head.weight}
            own = {"architectures": ["Qwen3DSparkModel"], "num_anchors": 512}
            return config | own | block | sides, weights
        config |= {"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}}
        return config | {"architectures": ["DFlashDraftModel"], "dflash_config": block}, weights
    kind = "dspark" if sides else "dflash"
    if len(ids) < VOCABULARY:
        weights |= {
            "d2t": ids - torch.arange(len(ids)),
            "lm_head.weight": target.lm_head.weight[ids],
        }
        weights["t2d"] = torch.isin(torch.arange(VOCABULARY), ids)
    return {
        "architectures": ["DSparkDraftModel" if sides else "DFlashDraftModel"],
        "speculators_model_type": kind,
        "transformer_layer_config": config,
        "draft_vocab_size": len(ids),
        "block_size": BLOCK,
        "aux_hidden_state_layer_ids": [number + 1 for number in NUMBERS],
        "mask_token_id": MASK,
        "sample_from_anchor": bool(sides) and "not from" not in name,
        "sliding_window_non_causal": True,
        **sides,
    }, weights


def write(folder: Path, config, weights, *, pickled=False) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: value.clone() for name, value in weights.items()}
    if pickled:
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors")
    return folder


def import_files(folder: Path, target, config, weights, *, pickled=False) -> Path:
    """Import a head's files and return the checkpoint."""
    source = write(folder / "head", config, weights, pickled=pickled)
    import_head(str(source), str(target.folder), folder / "ours")
    return folder / "ours"


def assert_same_head(first: Path, second: Path) -> None:
    """Compare two checkpoints, tensor by tensor."""
    one, other = (json.loads((folder / "config.json").read_text()) for folder in (first, second))
    assert all(one[part] == other[part] for part in ("architecture", "layer", "target"))
    mine, theirs = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def assert_refused(folder: Path, target, config, weights, words, monkeypatch, capfd) -> None:
    """Expect the command to refuse with these words, and to write nothing."""
    source = write(folder / "head", config, weights)
    status = call("models", command(source, target, folder / "out"), monkeypatch)
    assert_one_line(status, *capfd.readouterr(), ["--from", *words])
    assert not (folder / "out").exists()


def command(source, target, out) -> list[str]:
    return ["import", "--from", str(source), "--target", str(target.folder), "--out", str(out)]
