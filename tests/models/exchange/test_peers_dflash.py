"""DFlash and DSpark heads in other projects' layouts: import, export, and equal computation."""

import json

import pytest
import torch
from command_runs import call
from peer_files import (
    BLOCK,
    HIDDEN,
    IDS,
    TARGETS,
    VOCABULARY,
    assert_refused,
    assert_same_head,
    block_files,
    import_files,
    save_target,
)
from peer_formulas import greedy_by_formula
from safetensors.torch import load_file

from pipedraft.models.exchange.export import export
from pipedraft.models.exchange.peers import import_head
from pipedraft.models.heads.draft import load_draft
from pipedraft.models.transformer.layers import KeyValues


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"))


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
