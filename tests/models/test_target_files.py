"""Target readers other than its stages: captured states, fingerprints, files on disk."""

import json

import pytest
import torch
import transformers as hf
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from staged_targets import (
    FAMILIES,
    NUM_LAYERS,
    SIZES,
    VOCAB,
    assert_close,
    chain_segment,
    random_ids,
    run,
    tiny,
    tolerance,
)

from pipedraft.models.heads.flexspec import FlexSpec
from pipedraft.models.speed.rounded import dtype_of, rounded_dtype
from pipedraft.models.target import (
    StagedTarget,
    capture_hidden,
    fingerprint_mismatch,
    load_target,
    load_tokenizer,
    target_fingerprint,
)
from pipedraft.models.target_part import load_target_part, weights_identity
from pipedraft.models.transformer.fingerprint import (
    read_target,
    template_hash,
    tokenizer_hash,
    vocabulary_hash,
)

# -- captured states ------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_taps_are_raw_layer_outputs_and_index_L_is_before_the_final_norm(name):
    model, ids = tiny(name), random_ids(14)
    raw: dict[int, torch.Tensor] = {}
    layers = [model.model.embed_tokens, *model.model.layers]
    handles = [
        layer.register_forward_hook(lambda m, a, out, i=i: raw.__setitem__(i, out[0]))
        for i, layer in enumerate(layers)
    ]
    model(ids[None], use_cache=False)
    for handle in handles:
        handle.remove()
    every = range(NUM_LAYERS + 1)
    target = StagedTarget(model, 3)
    _, prompt = target.prefill(ids[:9], taps=every, chunk_rows=4)
    taps = run(target, chain_segment(target, ids[9:]), taps=every).taps
    captured = capture_hidden(model, ids[None], layers=every)
    assert sorted(prompt) == sorted(taps) == sorted(captured) == list(every)
    for i in every:
        atol = tolerance(name)
        assert_close(torch.cat([prompt[i], taps[i]]), raw[i], atol)
        assert_close(captured[i][0], raw[i], 0)
    normed = model.model.norm(captured[NUM_LAYERS][0])
    assert not torch.allclose(normed, captured[NUM_LAYERS][0], atol=0.1)


@pytest.mark.parametrize("name", FAMILIES)
def test_captured_states_of_the_text_do_not_depend_on_right_padding(name):
    model, ids = tiny(name), random_ids(20).reshape(2, 10)
    padded = torch.cat([ids, torch.zeros(2, 6, dtype=torch.long)], dim=1)
    plain, wide = (capture_hidden(model, x, layers=[1, NUM_LAYERS]) for x in (ids, padded))
    assert sorted(plain) == [1, NUM_LAYERS]
    for i in plain:
        assert_close(wide[i][:, :10], plain[i])


def test_capture_computes_no_logits_and_leaves_no_hook():
    model = tiny("llama")
    hooks = [len(layer._forward_hooks) for layer in model.model.layers]
    sizes = []
    handle = model.lm_head.register_forward_hook(lambda m, a, out: sizes.append(out.numel()))
    captured = capture_hidden(model, random_ids(5)[None], layers=[2])
    handle.remove()
    assert sizes == [0]
    assert not captured[2].requires_grad
    assert [len(layer._forward_hooks) for layer in model.model.layers] == hooks


# -- fingerprints, loading ------------------------------------------------------------------


def test_fingerprint_sees_the_shared_weights_and_only_those():
    config = FAMILIES["llama"]()
    torch.manual_seed(1)
    model = hf.LlamaForCausalLM(config).requires_grad_(False)
    first = target_fingerprint(model)
    assert {k: first[k] for k in first if k != "hash"} == {
        "hidden_size": 32,
        "vocab_size": VOCAB,
        "num_layers": NUM_LAYERS,
    }
    model.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    assert fingerprint_mismatch(first, target_fingerprint(model)) is None
    for weight in (model.model.embed_tokens.weight, model.model.norm.weight, model.lm_head.weight):
        before = target_fingerprint(model)
        weight.view(-1)[-1] += 1
        assert fingerprint_mismatch(before, target_fingerprint(model)).startswith("hash: ")


def test_fingerprint_mismatch_names_the_first_field_and_both_values():
    a = {"hidden_size": 32, "vocab_size": 61, "num_layers": 4, "hash": "x"}
    assert fingerprint_mismatch(a, a) is None
    assert fingerprint_mismatch(a, {**a, "num_layers": 5, "hash": "y"}) == "num_layers: 4 != 5"


def test_eos_ids_are_a_tuple_from_the_generation_config_first():
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**{**SIZES, "eos_token_id": 2}))
    assert StagedTarget(model, 1).eos_token_ids == (2,)
    model.generation_config.eos_token_id = [3, 4]
    assert StagedTarget(model, 1).eos_token_ids == (3, 4)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    assert StagedTarget(model, 1).eos_token_ids == ()


def test_load_refuses_truncated_weights(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match="no loadable safetensors weights"):
        load_target(str(tmp_path))


@pytest.mark.parametrize("name", ["llama_tied", "qwen3_5"])
def test_saved_target_loads_frozen_with_the_same_fingerprint(name, tmp_path):
    tiny(name).save_pretrained(tmp_path)
    model = load_target(str(tmp_path))
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    assert fingerprint_mismatch(target_fingerprint(model), target_fingerprint(tiny(name))) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "llama_tied", "qwen3_5"])
def test_a_target_stored_in_float32_is_the_same_one_in_16_bits(name, dtype, tmp_path):
    tiny(name).save_pretrained(tmp_path)
    model, fingerprint = load_target(str(tmp_path), dtype=dtype), FlexSpec.fingerprint
    assert dtype_of(model) == dtype and fingerprint(model) == fingerprint(tiny(name))
    can_tune = rounded_dtype(model) is None
    last = [model.model.layers[-1].mlp.up_proj.weight] if can_tune else []
    for weight in (model.model.norm.weight, *last):
        before = fingerprint(model)
        weight.view(-1)[-1] += 1  # tuned after it was loaded
        assert fingerprint_mismatch(before, fingerprint(model)) is not None


@pytest.mark.parametrize("name", ["Qwen3_5", "Qwen3_5Moe"])
def test_text_part_of_a_multimodal_checkpoint_is_staged(tmp_path, name):
    text = dict(FAMILIES[name.lower().replace("5moe", "5_moe")]().to_dict())
    vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32)
    config = getattr(hf, f"{name}Config")(text_config=text, vision_config=vision)
    torch.manual_seed(0)
    whole = getattr(hf, f"{name}ForConditionalGeneration")(config).eval()
    whole.save_pretrained(tmp_path)
    model, ids = load_target(str(tmp_path)), random_ids(12)
    logits_V, _ = StagedTarget(model, 2).prefill(ids)
    reference_V = whole(input_ids=ids[None]).logits[0, -1]
    assert_close(logits_V, reference_V)
    rounded = load_target(str(tmp_path), dtype=torch.bfloat16)
    assert target_fingerprint(rounded) == target_fingerprint(model)
    part = whole_part(tmp_path)
    assert part.name_or_path == model.name_or_path == str(tmp_path)
    logits_V, _ = StagedTarget(part, 2).prefill(ids)
    assert_close(logits_V, reference_V)


def whole_part(folder, **options) -> hf.PreTrainedModel:
    """Read all layers, the embedding and the LM head as a stage process reads its part."""
    ends = dict(has_embedding=True, has_head=True)
    return load_target_part(str(folder), layers=range(NUM_LAYERS), **ends, **options)


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
HEADS = {
    "another": lambda weights: weights | {HEAD: weights[EMBEDDING] + 0.02},
    "a repeat": lambda weights: weights | {HEAD: weights[EMBEDDING].clone()},
    "no embedding": lambda weights: {HEAD if k == EMBEDDING else k: x for k, x in weights.items()},
}


def save_sharded(weights, folder) -> None:
    """Write one tensor per file: the embedding and the LM head are in two."""
    places = {}
    for index, (name, weight) in enumerate(weights.items()):
        places[name] = f"model-{index}.safetensors"
        save_file({name: weight}, folder / places[name], metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("held", HEADS)
def test_a_tied_config_is_one_model_whatever_head_the_files_hold(held, dtype, tmp_path):
    tiny("llama_tied").save_pretrained(tmp_path)
    weights = HEADS[held](load_file(tmp_path / "model.safetensors"))
    (tmp_path / "model.safetensors").unlink()
    save_sharded(weights, tmp_path)
    theirs = hf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    own = [load(str(tmp_path), dtype=dtype, may_round=False) for load in (load_target, whole_part)]
    for model in own:
        model.tie_weights()  # as libraries do that move or shard a model
        assert torch.equal(model.lm_head.weight, theirs.lm_head.weight)
        assert torch.equal(model.model.embed_tokens.weight, theirs.model.embed_tokens.weight)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == (held != "another")
    assert target_fingerprint(own[0]) == target_fingerprint(own[1])
    if held != "no embedding":
        assert read_target(str(tmp_path), None).fingerprint == target_fingerprint(own[0])
    last = load_target_part(
        str(tmp_path), layers=[1], has_embedding=False, has_head=True, dtype=dtype, may_round=False
    )
    assert torch.equal(last.lm_head.weight, theirs.lm_head.weight)


def test_an_untied_config_without_an_lm_head_is_refused_whole_and_in_parts(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights[HEAD]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for load in (load_target, whole_part):
        with pytest.raises(ValueError, match=r"1 tensors missing \(lm_head.weight\)"):
            load(str(tmp_path))


def test_attention_kernels_without_tree_masks_are_refused():
    with pytest.raises(ValueError, match="attention: 'flash_attention_2'"):
        load_target("unused", attention="flash_attention_2")


def test_a_hub_target_is_identified_by_its_commit(tmp_path, monkeypatch):
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "models--user--tiny" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(commit)
    tiny("llama").config.save_pretrained(snapshot)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert weights_identity("user/tiny") == f"commit:{commit}"


@pytest.mark.parametrize(
    ("hashed", "expected"),
    [
        (tokenizer_hash, "8805e8eb21b20cc4"),
        (template_hash, "f68f04ccc02ed603"),
        (vocabulary_hash, "7c38dda4f8b81ed6"),
    ],
)
def test_hashes_of_a_tokenizer_stay_what_files_hold(repository, hashed, expected):
    """Manifests, stored hidden states and servers from other versions are compared with these."""
    tokenizer = load_tokenizer(str(repository / "assets" / "target"))
    assert hashed(tokenizer).startswith(expected)
