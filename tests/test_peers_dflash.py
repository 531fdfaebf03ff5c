"""DFlash heads in the layout of their authors: in, out, and computing what the files say."""

import json

import pytest
import torch
import torch.nn.functional as F
from command_runs import assert_one_line, call
from peer_files import (
    HIDDEN,
    IDS,
    LAYERS,
    SIZES,
    command,
    layer_weights,
    random,
    save_target,
    write,
)
from safetensors.torch import load_file
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from pipedraft.models.draft import load_draft
from pipedraft.models.export import export
from pipedraft.models.layers import KeyValues
from pipedraft.models.peers import import_head

BLOCK, MASK, NUMBERS = 4, 60, [1, 3, 5]
NORMS = ("input_layernorm", "q_norm", "k_norm")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"))


def dflash_files():
    """config.json and tensors of a head of two layers, as published."""
    generator = torch.Generator().manual_seed(4)
    weights = {"fc.weight": random(generator, HIDDEN, len(NUMBERS) * HIDDEN)}
    weights |= {f"{name}.weight": random(generator, HIDDEN) for name in ("norm", "hidden_norm")}
    for index in range(2):
        weights |= layer_weights(generator, f"layers.{index}.", HIDDEN, norms=NORMS)
    config = SIZES | {"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}
    config |= {"num_hidden_layers": 2, "num_target_layers": LAYERS, "block_size": BLOCK}
    config |= {"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "attention_bias": False}
    config["layer_types"] = ["full_attention"] * 2
    return config | {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": NUMBERS}}, weights


def block_by_formula(target, weights, anchor):
    """Logits of a block from the tensors of the file, with transformers' states and rotation."""
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
    return target.lm_head(norm(x, "norm")[1:])


def test_an_imported_head_computes_what_its_files_say(tmp_path, target):
    config, weights = dflash_files()
    source = write(tmp_path / "head", config, weights)
    import_head(str(source), str(target.folder), tmp_path / "out")
    head = load_draft(str(tmp_path / "out"), target)
    assert head.config.feature_layers == (2, 4, 6)
    states = target(input_ids=IDS[None], output_hidden_states=True).hidden_states
    for anchor in (1, 7):
        feature = head.feature({layer: states[layer][0, :anchor] for layer in head.taps})
        caches = [KeyValues() for _ in head.layers]
        token = IDS[anchor, None]
        ours = head.logits(head.propose(token, BLOCK, feature, position=anchor, caches=caches))
        theirs = block_by_formula(target, weights, anchor)
        assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()


def test_an_imported_head_goes_back_as_it_came(tmp_path, target):
    config, weights = dflash_files()
    source = write(tmp_path / "head", config, weights)
    import_head(str(source), str(target.folder), tmp_path / "ours")
    export(tmp_path / "ours", "sglang", tmp_path / "back")
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[key], value) for key, value in weights.items())
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    for key in config.keys() - {"auto_map"}:
        assert back[key] == config[key], key
    import_head(str(tmp_path / "back"), str(target.folder), tmp_path / "again")
    first, second = (
        json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("ours", "again")
    )
    assert all(first[one] == second[one] for one in ("architecture", "layer", "target"))


def blocks(**changes):
    return lambda config, weights: config["dflash_config"].update(changes)


REFUSED = {
    "dflash2": (lambda config, _: config.update(architectures=["DFlash2DraftModel"]), ["DFlash2"]),
    "selector": (blocks(selector_rank=4), ["dflash_config", "selector_rank"]),
    "causal": (blocks(causal=True), ["dflash_config.causal", "True"]),
    "window": (
        lambda config, _: config.update(layer_types=["sliding_attention"] * 2),
        ["layer_types", "sliding_attention"],
    ),
    "too deep": (blocks(target_layer_ids=[1, 7]), ["target_layer_ids", "[1, 7]", "0..6"]),
    "mask": (blocks(mask_token_id=64), ["mask_token_id: 64", "0..63"]),
    "no mask": (lambda config, _: config["dflash_config"].pop("mask_token_id"), ["mask_token_id"]),
    "block": (lambda config, _: config.update(block_size=10**9), ["block_size: 1000000000"]),
    "layers": (
        lambda config, _: config.update(num_hidden_layers=10**9),
        ["num_hidden_layers", "1000000000"],
    ),
    "missing": (lambda _, weights: weights.pop("layers.1.self_attn.q_norm.weight"), ["q_norm"]),
    "bias": (
        lambda _, weights: weights.update({"layers.0.self_attn.o_proj.bias": torch.zeros(32)}),
        ["tensor", "o_proj.bias"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_expressed_is_refused_by_name(tmp_path, target, name, monkeypatch, capfd):
    change, words = REFUSED[name]
    config, weights = dflash_files()
    change(config, weights)
    source = write(tmp_path / "head", config, weights)
    status = call("models", command(source, target, tmp_path / "out"), monkeypatch)
    assert_one_line(status, *capfd.readouterr(), ["--from", *words])
    assert not (tmp_path / "out").exists()


def test_the_launch_line_names_the_algorithm(tmp_path, target, monkeypatch, capfd):
    source = write(tmp_path / "head", *dflash_files())
    import_head(str(source), str(target.folder), tmp_path / "ours")
    words = ["export", "--checkpoint", str(tmp_path / "ours"), "--out", str(tmp_path / "out")]
    assert call("models", [*words, "--format", "sglang"], monkeypatch) == 0
    line = capfd.readouterr().out.splitlines()[-1]
    assert "--speculative-algorithm DFLASH" in line and "topk" not in line
    status = call("models", [*words, "--format", "speculators"], monkeypatch)
    assert_one_line(status, *capfd.readouterr(), ["--checkpoint", "'dflash'", "eagle3 heads"])
