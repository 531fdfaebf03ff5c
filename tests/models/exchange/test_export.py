"""Export of EAGLE-3 heads; benchmarks/peer_logits.py compares with the package speculators."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from command_runs import assert_one_line, call
from peer_files import assert_same_head
from safetensors.torch import load_file
from tiny_drafts import add_noise, make_head, seeded, step_logits
from tiny_models import tiny_llama, tiny_qwen3
from transformers import AutoConfig

from pipedraft.models import load_draft
from pipedraft.models.exchange.chain import best_chain
from pipedraft.models.exchange.export import Origin, export
from pipedraft.models.exchange.peers import import_head
from pipedraft.models.heads.configs import Eagle3Config
from pipedraft.models.heads.draft import TargetReference
from pipedraft.models.heads.eagle3 import Eagle3
from pipedraft.models.target import target_fingerprint
from pipedraft.models.transformer.fingerprint import read_target
from pipedraft.models.transformer.layers import LayerConfig
from pipedraft.pretrained import quieten

LAYERS, HIDDEN, VOCABULARY = 8, 32, 64
LENGTH = 10


@pytest.fixture(autouse=True, scope="module")
def no_loading_bars() -> None:
    quieten()


def make_checkpoint(folder: Path, make_target=tiny_llama, **options) -> Path:
    """Save a tokenizer-less target, and a head whose every weight matters."""
    target = make_target(layers=LAYERS, hidden=HIDDEN, vocab=VOCABULARY)
    target.save_pretrained(folder / "target")
    fingerprint = target_fingerprint(target)
    reference = TargetReference(name=str(folder / "target"), fingerprint=fingerprint)
    config = Eagle3Config(**options).for_target(LAYERS)
    head = Eagle3(config, LayerConfig.from_target(target.config), reference)
    generator = seeded(4)
    size, ids = config.draft_vocab_size, None
    if size is not None:
        ids = torch.randperm(VOCABULARY, generator=generator)[:size].sort().values
    head.initialize(target, ids)
    add_noise(head, generator=generator)
    (folder / "head").mkdir()
    head.save(folder / "head")
    return folder / "head"


def read(out: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    names = {"README.md", "config.json", "model.safetensors", "pipedraft.json"}
    assert {path.name for path in out.iterdir()} == names
    return json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")


def chain_logits(folder: Path, ids_T: torch.Tensor, depth: int) -> list[torch.Tensor]:
    """Logits [T-1, U] for steps 1 .. depth at every row, by the decode-time code in float32."""
    target = tiny_target(folder)
    head = load_draft(str(folder), target)
    found = step_logits(target, head, ids_T, depth)
    return [logits_RU[: len(logits_RU) - step] for step, logits_RU in enumerate(found)]


def tiny_target(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder.parent / "target").eval()


def text() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (LENGTH,), generator=seeded(6))


# -- the files ------------------------------------------------------------------------------

MIDLAYER = {
    "midlayer.self_attn.q_proj.weight": (32, 64),
    "midlayer.self_attn.k_proj.weight": (16, 64),
    "midlayer.self_attn.v_proj.weight": (16, 64),
    "midlayer.self_attn.o_proj.weight": (32, 32),
    "midlayer.mlp.gate_proj.weight": (64, 32),
    "midlayer.mlp.up_proj.weight": (64, 32),
    "midlayer.mlp.down_proj.weight": (32, 64),
    "midlayer.hidden_norm.weight": (32,),
    "midlayer.input_layernorm.weight": (32,),
    "midlayer.post_attention_layernorm.weight": (32,),
}
AROUND = {"fc.weight": (32, 96), "norm.weight": (32,), "lm_head.weight": (20, 32)}
MAPS = {"d2t": (20,), "t2d": (64,)}


@pytest.mark.parametrize("make_target", [tiny_llama, tiny_qwen3])
def test_the_layout_of_the_authors(tmp_path, make_target):
    """Qwen3 included: engines build every head from Llama's layer, without norms on queries."""
    folder = make_checkpoint(tmp_path, make_target, draft_vocab_size=20)
    export(folder, "sglang", tmp_path / "out")
    config, weights = read(tmp_path / "out")
    assert {name: tuple(x.shape) for name, x in weights.items()} == MIDLAYER | AROUND | MAPS
    assert {str(x.dtype) for x in weights.values()} == {
        "torch.float32",
        "torch.int64",
        "torch.bool",
    }
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["vocab_size"], config["draft_vocab_size"]) == (64, 20)
    assert config["head_dim"] == 8 and config["num_hidden_layers"] == 1
    assert config["tie_word_embeddings"] is False
    assert "eagle_config" not in config and "layer_ids" not in json.dumps(config)
    read_by_transformers = AutoConfig.from_pretrained(tmp_path / "out")
    assert read_by_transformers.num_key_value_heads == 2
    assert read_by_transformers.draft_vocab_size == 20


@pytest.mark.parametrize("layout", ["sglang", "speculators"])
def test_a_full_vocabulary_says_its_size_and_has_maps_for_sglang_alone(tmp_path, layout):
    """Without a size SGLang uses the target's LM head; without maps SpecForge's are uninitialized.

    vLLM refuses maps for a whole vocabulary.
    """
    export(make_checkpoint(tmp_path), layout, tmp_path / "out")
    config, weights = read(tmp_path / "out")
    if layout == "sglang":
        assert weights["d2t"].tolist() == [0] * 64 and weights["t2d"].all()
    else:
        assert "d2t" not in weights and "t2d" not in weights
    assert config["draft_vocab_size"] == 64
    assert tuple(weights["lm_head.weight"].shape) == (64, 32)


def test_the_layout_for_openvino(tmp_path):
    """optimum-intel reads the authors' names, draws a missing embedding, and needs a stop token."""
    folder = make_checkpoint(tmp_path, draft_vocab_size=20, feature_layers=(5, 2, 4))
    path = tmp_path / "target" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [7, 9]}))
    export(folder, "openvino", tmp_path / "out", target=str(tmp_path / "target"))
    config, weights = read(tmp_path / "out")
    held = MIDLAYER | AROUND | MAPS | {"embed_tokens.weight": (64, 32)}
    assert {name: tuple(x.shape) for name, x in weights.items()} == held
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["hidden_layers_list"] == [1, 3, 4]  # outputs of layers
    assert config["eos_token_id"] == 7


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"fc_norm": True}, "model.fc_norm True"),
        ({"norm_before_fc": True}, "model.norm_before_fc True"),
        ({"norm_output": True}, "model.norm_output True"),
        ({"norm_before_residual": True}, "model.norm_before_residual True"),
        ({"feature_layers": (2, 5)}, "[2, 5], only for three"),
    ],
    ids=str,
)
def test_heads_that_openvino_cannot_hold_are_refused(options, word, tmp_path, monkeypatch, capfd):
    folder = make_checkpoint(tmp_path, **options)
    status = call("models", command(folder, "openvino", tmp_path / "out"), monkeypatch)
    assert_one_line(status, *capfd.readouterr(), ["'openvino' has no place", word, "--format"])


def test_other_layers_are_numbered_as_each_engine_counts(tmp_path):
    folder = make_checkpoint(tmp_path, feature_layers=(1, 3, 7))
    export(folder, "sglang", tmp_path / "sglang")
    export(folder, "speculators", tmp_path / "vllm")
    numbers = read(tmp_path / "sglang")[0]["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert numbers == [0, 2, 6]  # SGLang adds one
    assert read(tmp_path / "vllm")[0]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 7]


@pytest.mark.parametrize("layout", ["sglang", "speculators"])
@pytest.mark.parametrize("norm", ["norm_output", "fc_norm", "norm_before_fc"])
@pytest.mark.parametrize("layers", [(5, 2, 4), (7, 1, 4, 2, 3)], ids=str)
def test_layers_in_another_order_are_sorted_with_the_columns_that_read_them(
    tmp_path, layout, norm, layers
):
    """Engines collect hidden states in layer order. The logits equal the head's own."""
    folder = make_checkpoint(tmp_path, feature_layers=layers, **{norm: True})
    head = load_draft(str(folder), tiny_target(folder))
    export(folder, layout, tmp_path / "out")
    config, weights = read(tmp_path / "out")
    size = config if layout == "sglang" else config["transformer_layer_config"]
    assert size["num_aux_hidden_states"] == len(layers)
    assert weights["fc.weight"].shape == (32, 32 * len(layers))
    taps = {layer: torch.randn(6, HIDDEN, generator=seeded(layer)) for layer in layers}
    parts = [taps[layer] for layer in sorted(layers)]
    root_mean = lambda x: x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()  # noqa: E731
    if norm == "fc_norm":
        norms = (weights[f"fc_norm.{i}.weight"] for i in range(len(layers)))
        parts = [root_mean(x) * w for x, w in zip(parts, norms, strict=True)]
    joined = torch.cat(parts, -1)
    if norm == "norm_before_fc":
        joined = root_mean(joined) * weights["input_norm.weight"]
    assert torch.allclose(joined @ weights["fc.weight"].T, head.feature(taps), atol=1e-5)
    import_head(str(tmp_path / "out"), str(tmp_path / "target"), tmp_path / "again")
    ids_T = text()
    steps = zip(
        chain_logits(folder, ids_T, 3), chain_logits(tmp_path / "again", ids_T, 3), strict=True
    )
    for ours, theirs in steps:
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_a_whole_vocabulary_in_another_order_is_sorted(tmp_path):
    """Engines read no map for a whole vocabulary. Every token's logit equals the head's own."""
    folder = make_checkpoint(tmp_path, draft_vocab_size=VOCABULARY)
    head = load_draft(str(folder), tiny_target(folder))
    with torch.no_grad():
        head.draft_ids.copy_(torch.randperm(VOCABULARY, generator=seeded(7)))
    head.save(folder)
    export(folder, "speculators", tmp_path / "out")
    import_head(str(tmp_path / "out"), str(tmp_path / "target"), tmp_path / "again")
    again = load_draft(str(tmp_path / "again"), tiny_target(folder))
    state = torch.randn(5, HIDDEN, generator=seeded(8))
    assert torch.equal(head.logits(state), again.logits(state)[:, head.draft_ids])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"feature_layers": (2, 5, 2)}, ["[2, 5, 2]", "twice"]),
        ({"attention_bias": True}, ["attention_bias", "drop"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", ["sglang", "speculators"])
def test_what_every_engine_would_drop_is_refused(tmp_path, layout, options, words):
    folder = make_checkpoint(tmp_path, **options)
    with pytest.raises(ValueError, match=f"--checkpoint: .*{'.*'.join(map(re.escape, words))}"):
        export(folder, layout, tmp_path / "out")


@pytest.mark.parametrize("fc_bias", [True, False])
def test_eagle_1_is_written_for_vllm_only_without_a_bias(tmp_path, fc_bias):
    """vLLM drops the bias; SGLang has one in every head."""
    target = tiny_llama(layers=LAYERS, hidden=HIDDEN, vocab=VOCABULARY)
    head = make_head(target, "eagle", fc_bias=fc_bias, attention_bias=True)
    target.save_pretrained(tmp_path / "target")
    object.__setattr__(head.reference, "name", str(tmp_path / "target"))
    (tmp_path / "head").mkdir()
    head.save(tmp_path / "head")
    export(tmp_path / "head", "sglang", tmp_path / "out")
    config, weights = read(tmp_path / "out")
    names = ["LlamaForCausalLMEagle", "EagleLlamaForCausalLM"]
    assert config["architectures"] == names[: 1 + (not fc_bias)]
    assert "bias" not in config and config["attention_bias"]
    assert bool(weights["fc.bias"].any()) == fc_bias
    assert not weights["layers.0.self_attn.o_proj.bias"].any()
    import_head(str(tmp_path / "out"), str(tmp_path / "target"), tmp_path / "again")
    assert_same_head(tmp_path / "head", tmp_path / "again")


def test_the_layout_of_vllm(tmp_path):
    folder = make_checkpoint(tmp_path, draft_vocab_size=20)
    export(folder, "speculators", tmp_path / "out")
    config, weights = read(tmp_path / "out")
    layer = {name.replace("midlayer.", "layers.0."): size for name, size in MIDLAYER.items()}
    embedding = weights.pop("embed_tokens.weight")
    assert torch.equal(embedding, tiny_target(folder).get_input_embeddings().weight)
    assert {name: tuple(x.shape) for name, x in weights.items()} == layer | AROUND | MAPS
    assert config["architectures"] == ["Eagle3DraftModel"]
    assert config["norm_before_residual"] is False
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    verifier = config["speculators_config"]["verifier"]
    expected = {"name_or_path": str(tmp_path / "target"), "architectures": ["LlamaForCausalLM"]}
    assert verifier == expected


def test_scaled_rotary_positions_are_given_in_both_forms(tmp_path):
    scaled = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    make = lambda **sizes: tiny_llama(**sizes, rope_parameters=scaled)  # noqa: E731
    export(make_checkpoint(tmp_path, make), "sglang", tmp_path / "out")
    config, _ = read(tmp_path / "out")
    assert config["rope_parameters"] == scaled and config["rope_theta"] == 5e5
    assert config["rope_scaling"] == {k: v for k, v in scaled.items() if k != "rope_theta"}
    assert AutoConfig.from_pretrained(tmp_path / "out").rope_parameters == scaled


# -- refusals and the command ---------------------------------------------------------------


def command(folder: Path, layout: str, out: Path, *more: str) -> list[str]:
    words = ["export", "--checkpoint", str(folder), "--format", layout, "--out", str(out)]
    return [*words, *more]


def test_the_command_prints_the_files_and_how_to_launch(tmp_path, monkeypatch, capfd):
    folder = make_checkpoint(tmp_path, draft_vocab_size=20)
    for layout, words in (
        ("sglang", ["sglang.launch_server", "--speculative-algorithm EAGLE3"]),
        ("speculators", ["vllm serve", '"method": "eagle3"']),
        ("vllm", ["vllm serve", '"method": "eagle3"']),
        ("openvino", ["python -m pipedraft.models.exchange.openvino_ir"]),
    ):
        out = tmp_path / layout
        assert call("models", command(folder, layout, out), monkeypatch) == 0
        *files, where, line = capfd.readouterr().out.splitlines()
        engine = {"sglang": "SGLang", "openvino": "OpenVINO"}.get(layout, "vLLM")
        assert where.startswith(f"# where {engine} is installed")
        names = ("README.md", "config.json", "model.safetensors", "pipedraft.json")
        assert files == [str(out / name) for name in names]
        served = [] if layout == "openvino" else [str(tmp_path / "target")]
        for word in (*words, str(out), *served):
            assert word in line
    assert not list(tmp_path.glob(".*"))


def test_an_export_is_replaced_and_other_folders_are_not(tmp_path, monkeypatch, capfd):
    folder, out = make_checkpoint(tmp_path, draft_vocab_size=20), tmp_path / "out"
    words = command(folder, "vllm", out)
    assert call("models", words, monkeypatch) == 0
    (out / "config.json").write_text("{}")
    assert call("models", words, monkeypatch) == 0
    assert (out / "config.json").read_text() != "{}"
    (out / "notes.txt").write_text("mine")
    assert call("models", words, monkeypatch) == 2
    assert "did not write" in capfd.readouterr().err and (out / "notes.txt").exists()
    (out / "pipedraft.json").unlink()
    assert call("models", words, monkeypatch) == 2
    assert "holds other files; give another folder" in capfd.readouterr().err


def test_the_best_chain_weighs_tokens_against_draft_passes():
    """The shipped SmolLM2 head's validation, and the acceptance measured with chain:7."""
    assert best_chain([0.661, 0.637, 0.614, 0.595], 0.09) == 3
    assert best_chain([0.9] * 7, 0.02) == 7
    assert best_chain([0.2, 0.1], 0.5) == 1
    assert best_chain([], 0.1) == 3


@pytest.mark.parametrize("layout", ["sglang", "speculators"])
def test_names_with_spaces_are_quoted_in_the_launch_line(layout):
    description = {"draft_type": "eagle3", "target": {"name": "my target"}}
    origin = Origin(layout=layout, weights_sha256="", description=description)
    words = shlex.split(origin.launch_line("it's out"))
    assert "my target" in words and "it's out" in " ".join(words)


def test_another_name_of_the_target_goes_into_the_files_and_the_launch_line(
    tmp_path, monkeypatch, capfd
):
    folder = make_checkpoint(tmp_path)
    (tmp_path / "target").rename(tmp_path / "moved")
    arguments = command(folder, "speculators", tmp_path / "out")
    status = call("models", arguments, monkeypatch)
    assert_one_line(status, *capfd.readouterr(), ["target", "no folder", "give an existing"])
    moved = str(tmp_path / "moved")
    assert call("models", [*arguments, "--target", moved], monkeypatch) == 0
    assert f"vllm serve {moved} " in capfd.readouterr().out
    config, _ = read(tmp_path / "out")
    assert config["speculators_config"]["verifier"]["name_or_path"] == moved


def test_other_drafts_are_refused_by_name(tmp_path, monkeypatch, capfd):
    make_head(tiny_llama(layers=LAYERS), "eagle").save(tmp_path)
    status = call("models", command(tmp_path, "speculators", tmp_path / "out"), monkeypatch)
    assert_one_line(
        status,
        *capfd.readouterr(),
        ["--checkpoint", "'eagle'", "eagle3, dflash and dspark heads", "give"],
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"norm_before_residual": True}, ["--format", "'sglang'", "residual", "give --format"]),
        ({"query_key_norm": True}, ["--format", "'sglang'", "query_key_norm", "give --format"]),
        ({"feature_layers": (1, 8)}, ["--format", "[1, 8]", "1..7", "give --format speculators"]),
        ({"feature_layers": (0, 3, 5)}, ["--format", "[0, 3, 5]", "give --format speculators"]),
    ],
    ids=str,
)
def test_heads_that_sglang_cannot_describe_are_refused(
    options, words, tmp_path, monkeypatch, capfd
):
    folder = make_checkpoint(tmp_path, **options)
    status = call("models", command(folder, "sglang", tmp_path / "out"), monkeypatch)
    assert_one_line(status, *capfd.readouterr(), words)
    assert call("models", command(folder, "speculators", tmp_path / "out"), monkeypatch) == 0


@pytest.mark.parametrize("layout", ["sglang", "speculators"])
@pytest.mark.parametrize(
    ("other", "word"),
    [({"layers": 6}, "num_layers: 8 != 6"), ({"layers": LAYERS, "seed": 9}, "hash: ")],
    ids=str,
)
def test_another_target_is_refused(layout, other, word, tmp_path, monkeypatch, capfd):
    folder = make_checkpoint(tmp_path)
    tiny_llama(vocab=VOCABULARY, **other).save_pretrained(tmp_path / "other")
    more = ("--target", str(tmp_path / "other"))
    status = call("models", command(folder, layout, tmp_path / "out", *more), monkeypatch)
    assert_one_line(status, *capfd.readouterr(), ["target", word, "give that target"])
    assert not (tmp_path / "out").exists()


def test_a_tied_target_in_shards_is_recognized(tmp_path):
    """Read file by file; its fingerprint equals the loaded model's."""
    target = tiny_llama(layers=2, vocab=512)
    target.lm_head.weight = target.model.embed_tokens.weight
    target.config.tie_word_embeddings = True
    target.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    found = read_target(str(tmp_path), None)
    assert found.fingerprint == target_fingerprint(target)
    assert torch.equal(found.embedding_VH, target.model.embed_tokens.weight)
    assert found.config["architectures"] == ["LlamaForCausalLM"]


def test_a_target_without_weights_is_refused_by_name(tmp_path, monkeypatch, capfd):
    folder = make_checkpoint(tmp_path)
    (tmp_path / "target" / "model.safetensors").unlink()
    status = call("models", command(folder, "speculators", tmp_path / "out"), monkeypatch)
    assert_one_line(status, *capfd.readouterr(), ["target", "safetensors", "convert them"])


@pytest.mark.parametrize("layout", ["sglang", "speculators"])
def test_a_head_without_an_lm_head_of_its_own_is_written_with_the_targets(tmp_path, layout):
    folder = make_checkpoint(tmp_path, draft_vocab_size=20, share_head=True)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    export(folder, layout, tmp_path / "out")
    weights, target = read(tmp_path / "out")[1], tiny_target(folder)
    rows_UH = target.get_output_embeddings().weight[weights["t2d"]]
    assert torch.equal(weights["lm_head.weight"], rows_UH)
