"""DFlash and DSpark heads in other projects' layouts: import, export, and equal computation."""

import json

import pytest
import torch
import torch.nn.functional as F
from command_runs import call
from peer_files import (
    DRAFT_IDS,
    HIDDEN,
    IDS,
    LAYERS,
    SIZES,
    VOCABULARY,
    assert_refused,
    assert_same_head,
    import_files,
    layer_weights,
    random,
    save_target,
)
from safetensors.torch import load_file
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from pipedraft.models.draft import load_draft
from pipedraft.models.exchange.export import export
from pipedraft.models.exchange.peers import import_head
from pipedraft.models.layers import KeyValues

BLOCK, MASK, NUMBERS = 4, 60, [1, 3, 5]
NORMS = ("input_layernorm", "q_norm", "k_norm")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"))


SIDES = {"markov_rank": 6, "markov_head_type": "vanilla", "enable_confidence_head": True}
SIDES |= {"confidence_head_with_markov": True}
TARGETS = ("embed_tokens.weight", "lm_head.weight")
"""Target tensors repeated in some layouts."""
LAYOUTS = {
    "DFlash": "sglang",
    "DFlash, speculators": "speculators",
    "DFlash, speculators, vocabulary": "speculators",
    "DSpark": "sglang",
    "DSpark, SpecForge": None,
    "DSpark, speculators": "speculators",
    "DSpark, speculators, vocabulary": "speculators",
    "DSpark, speculators, not from the anchor": "speculators",
    "DSpark without heads": "sglang",
}
"""Source project -> export layout; SpecForge's heads return in their authors' layout."""


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


def block_by_formula(target, weights, anchor):
    """Block states from the file's tensors, with transformers' states and rotation."""
    states = target(input_ids=IDS[None], output_hidden_states=True).hidden_states

    def norm(x, name):
        return F.rms_norm(x, x.shape[-1:], weights[name + ".weight"], SIZES["rms_norm_eps"])

    def heads(x, name):
        return F.linear(x, weights[name + ".weight"]).unflatten(-1, (-1, 8)).transpose(0, 1)[None]

    joined = torch.cat([states[number + 1][0, :anchor] for number in NUMBERS], -1)
    context = norm(F.linear(joined, weights["fc.weight"]), "hidden_norm")
    x = target.get_input_embeddings()(torch.tensor([int(IDS[anchor])] + [MASK] * (BLOCK - 1)))
    positions = torch.arange(anchor + BLOCK)[None]
    cos, sin = LlamaRotaryEmbedding(target.config)(x, positions)
    for index in range(2):
        at = f"layers.{index}.self_attn."
        normed = norm(x, f"layers.{index}.input_layernorm")
        seen = torch.cat([context, normed])
        # All rows are rotated as queries, too, so that one call serves both; the last ones count.
        query, key = norm(heads(seen, at + "q_proj"), at + "q_norm"), heads(seen, at + "k_proj")
        query, key = apply_rotary_pos_emb(query, norm(key, at + "k_norm"), cos, sin)
        attended = F.scaled_dot_product_attention(
            query[:, :, anchor:], key, heads(seen, at + "v_proj"), enable_gqa=True
        )
        x = x + F.linear(attended[0].transpose(0, 1).flatten(1), weights[at + "o_proj.weight"])
        y, mlp = norm(x, f"layers.{index}.post_attention_layernorm"), f"layers.{index}.mlp."
        gate, up = (F.linear(y, weights[f"{mlp}{name}_proj.weight"]) for name in ("gate", "up"))
        x = x + F.linear(F.silu(gate) * up, weights[mlp + "down_proj.weight"])
    return norm(x, "norm")


def greedy_by_formula(config, weights, target, anchor):
    """Logits for the block's draft tokens, each after the best one before it."""
    states = block_by_formula(target, weights, anchor)
    if not config.get("sample_from_anchor", "Qwen3DSparkModel" in config["architectures"]):
        states = states[1:]
    ids = torch.arange(VOCABULARY)
    if "d2t" in weights:
        ids = torch.arange(len(weights["d2t"])) + weights["d2t"]
    token, out = int(IDS[anchor]), []
    for row in states:
        logits = target.lm_head.weight[ids] @ row
        if "markov_head.markov_w1.weight" in weights:
            pair = weights["markov_head.markov_w1.weight"][token]
            logits = logits + weights["markov_head.markov_w2.weight"] @ pair
        out.append(logits)
        token = int(ids[logits.argmax()])
    return torch.stack(out)


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_imported_head_computes_what_its_files_say(tmp_path, target, name):
    config, weights = block_files(name, target)
    head = load_draft(str(import_files(tmp_path, target, config, weights)), target)
    assert head.config.feature_layers == (2, 4, 6)
    states = target(input_ids=IDS[None], output_hidden_states=True).hidden_states
    if "SpecForge" in name:
        config["sample_from_anchor"] = True
    for anchor in (1, 7):
        feature = head.feature({layer: states[layer][0, :anchor] for layer in head.taps})
        caches = [KeyValues() for _ in head.layers]
        token, ours = IDS[anchor, None], []
        for state in head.propose(token, BLOCK, feature, position=anchor, caches=caches):
            output = head.behind(state, token[0]) if head.draft_type == "dspark" else state
            ours.append(head.logits(output))
            token = head.draft_ids[ours[-1].argmax()][None]
        theirs = greedy_by_formula(config, weights, target, anchor)
        assert (torch.stack(ours) - theirs).abs().max() < 1e-5 * theirs.abs().max()


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_imported_head_goes_back_as_it_came(tmp_path, target, name):
    config, weights = block_files(name, target)
    folder = import_files(tmp_path, target, config, weights)
    if name == "DSpark without heads":  # SGLang has no such layout
        with pytest.raises(ValueError, match="no place for model.markov_rank 0"):
            export(folder, LAYOUTS[name] or "sglang", tmp_path / "back")
        return
    export(folder, LAYOUTS[name] or "sglang", tmp_path / "back")
    found = load_file(tmp_path / "back" / "model.safetensors")
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    if LAYOUTS[name] is None:
        assert found.keys() == weights.keys() | {*TARGETS}
        config |= config.pop("dflash_config") | {"architectures": ["Qwen3DSparkModel"]}
        config = {key: config[key] for key in config.keys() - {"projector_type", "attention_mode"}}
    else:
        assert found.keys() == weights.keys()
    assert all(torch.equal(found[key], value) for key, value in weights.items())
    for key in config.keys() - {"auto_map", "transformer_layer_config"}:
        assert back[key] == config[key], key
    for key, value in config.get("transformer_layer_config", {}).items():
        assert back["transformer_layer_config"][key] == value, key
    import_head(str(tmp_path / "back"), str(target.folder), tmp_path / "again")
    assert_same_head(folder, tmp_path / "again")


def blocks(**changes):
    return lambda config, weights: config["dflash_config"].update(changes)


REFUSED = {
    "dflash2": (lambda config, _: config.update(architectures=["DFlash2DraftModel"]), ["DFlash2"]),
    "selector": (blocks(selector_rank=4), ["dflash_config", "selector_rank"]),
    "causal": (blocks(causal=True), ["causal", "True"]),
    "window": (
        lambda config, _: config.update(layer_types=["sliding_attention"] * 2),
        ["layer_types", "sliding_attention"],
    ),
    "too deep": (blocks(target_layer_ids=[1, 7]), ["target_layer_ids", "[1, 7]", "0..6"]),
    "mask": (blocks(mask_token_id=64), ["mask_token_id 64", "0..63"]),
    "no mask": (lambda config, _: config["dflash_config"].pop("mask_token_id"), ["mask_token_id"]),
    "block": (lambda config, _: config.update(block_size=10**9), ["block_size: 1000000000"]),
    "layers": (
        lambda config, _: config.update(num_hidden_layers=10**9),
        ["num_hidden_layers", "1000000000"],
    ),
    "missing": (lambda _, weights: weights.pop("layers.1.self_attn.q_norm.weight"), ["q_norm"]),
    "another head": (
        lambda _, weights: weights.update({"lm_head.weight": torch.zeros(VOCABULARY, HIDDEN)}),
        ["lm_head.weight", "not the target's"],
    ),
    "bias": (
        lambda _, weights: weights.update({"layers.0.self_attn.o_proj.bias": torch.zeros(32)}),
        ["tensor", "o_proj.bias"],
    ),
}


SPARK_REFUSED = {
    "gated": (lambda config, _: config.update(markov_head_type="gated"), ["markov_head_type"]),
    "rank": (lambda config, _: config.update(markov_rank=10**9), ["markov_rank", "only 6"]),
    "deaf": (
        lambda config, _: config.update(enable_confidence_head=False),
        ["enable_confidence_head"],
    ),
    "too deep": (lambda config, _: config.update(target_layer_ids=[7]), ["[7]", "-1..6"]),
    "missing": (
        lambda _, weights: weights.pop("markov_head.markov_w2.weight"),
        ["lacks markov_head.markov_w2.weight"],
    ),
    "kind": (lambda config, _: config.update(speculators_model_type="domino"), ["domino"]),
}
REFUSED |= {f"dspark, {name}": case for name, case in SPARK_REFUSED.items()}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_expressed_is_refused_by_name(tmp_path, target, name, monkeypatch, capfd):
    change, words = REFUSED[name]
    config, weights = block_files("DSpark" if "dspark" in name else "DFlash", target)
    change(config, weights)
    assert_refused(tmp_path, target, config, weights, words, monkeypatch, capfd)


@pytest.mark.parametrize("name", ["DFlash", "DSpark"])
def test_the_launch_line_names_the_algorithm(tmp_path, target, monkeypatch, capfd, name):
    folder = import_files(tmp_path, target, *block_files(name, target))
    words = ["export", "--checkpoint", str(folder), "--out"]
    line = {}
    for layout in ("sglang", "speculators"):
        out = str(tmp_path / layout)
        assert call("models", [*words, out, "--format", layout], monkeypatch) == 0
        line[layout] = capfd.readouterr().out.splitlines()[-1]
    assert f"--speculative-algorithm {name.upper()} " in line["sglang"]
    assert "topk" not in line["sglang"]
    assert line["speculators"] == f"vllm serve {tmp_path / 'speculators'} --dtype bfloat16"


LOCAL = {
    "vocabulary": ("DFlash, speculators, vocabulary", "draft_vocab_size"),
}


@pytest.mark.parametrize("case", LOCAL)
def test_what_a_layout_has_no_place_for_is_named(tmp_path, target, case):
    name, word = LOCAL[case]
    folder = import_files(tmp_path, target, *block_files(name, target))
    with pytest.raises(ValueError, match=f"no place for model.{word}.*; this head was trained"):
        export(folder, "sglang", tmp_path / "out")
