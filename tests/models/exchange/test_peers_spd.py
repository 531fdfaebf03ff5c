"""Speculation modules from the SPD authors: the import computes the same as its file says."""

import pytest
import torch
import torch.nn.functional as F
from command_runs import assert_one_line, call
from decode_runs import engine_for, greedy_reference
from peer_files import DRAFT_IDS, HIDDEN, IDS, LAYERS, LENGTH, command, random, save_target
from tiny_models import tiny_model
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from pipedraft.models import load_draft
from pipedraft.models.exchange.peers import import_head
from pipedraft.models.target import capture_hidden

N, MODULE_LAYERS = 4, 2
BOUNDS = [0, 2, 5, 7, 8]  # of eight layers; 7 is reached together with 8, which is normed


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"))


def tiny_qwen3_5():
    linear = {f"linear_{x}_head_dim": 8 for x in ("key", "value")}
    linear |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    model = tiny_model(
        Qwen3_5TextConfig, Qwen3_5ForCausalLM, layers=LAYERS, hidden=HIDDEN, **linear
    )
    model.get_decoder().norm.weight.add_(torch.linspace(-0.5, 0.5, HIDDEN))
    return model


def spd_file(folder, target, version, changes=None):
    """File as written by the authors' save_speculation_head."""
    generator = torch.Generator().manual_seed(7)
    settings = target.config
    heads, size = settings.num_attention_heads, settings.head_dim
    shapes = {"lm_head": (len(DRAFT_IDS), settings.hidden_size)}
    lists = [[0, 2, 4, 6], [0, 2, 4, 6], [0, 2, 4], [0, 2]]
    for index in range(MODULE_LAYERS):
        layer = f"spec_layers.{index}."
        for part, number in (("q", heads), ("k", settings.num_key_value_heads)):
            shapes[f"{layer}self_attn.{part}_proj"] = (number * size, settings.hidden_size)
            shapes[f"{layer}self_attn.{part}_norm"] = (size,)
        shapes[f"{layer}self_attn.v_proj"] = shapes[f"{layer}self_attn.k_proj"]
        shapes[f"{layer}self_attn.o_proj"] = (settings.hidden_size, heads * size)
        for part in ("gate", "up"):
            shapes[f"{layer}mlp.{part}_proj"] = (settings.intermediate_size, settings.hidden_size)
        shapes[f"{layer}mlp.down_proj"] = (settings.hidden_size, settings.intermediate_size)
        for part in ("input_layernorm", "post_attention_layernorm"):
            shapes[layer + part] = (settings.hidden_size,)
    hidden = settings.hidden_size
    config = {
        "hidden_size": hidden,
        "vocab_size": settings.vocab_size,
        "draft_vocab_size": len(DRAFT_IDS),
        "num_stages": N,
        "num_spec_layers": MODULE_LAYERS,
        "version": version,
        "trained_with_use_deepest": True,
        "base_model_path": "theirs",
        "draft_token_ids": DRAFT_IDS.tolist(),
    }
    if version == 11:
        config["aggr_feature_bound"] = BOUNDS
        shapes |= {f"aggr_projs.{i}": (hidden, (i + 1) * hidden) for i in range(len(BOUNDS))}
    else:
        config["shallow_hidden_layer_indices"] = lists
        shapes["g0_proj"] = (hidden, hidden)
        shapes |= {f"stage_projs.{i}": (hidden, len(x) * hidden) for i, x in enumerate(lists)}
        for place in ((index, i) for index in range(MODULE_LAYERS) for i in range(N)):
            shapes["fixed_stage_per_layer_projs.{}.{}".format(*place)] = (hidden, hidden)
    state = {f"{name}.weight": random(generator, *shape) for name, shape in shapes.items()}
    folder.mkdir(exist_ok=True)
    torch.save({"state_dict": state, "config": config | (changes or {})}, folder / "head.pt")
    return folder / "head.pt", state, config


def module_by_formula(target, state, config):
    """Logits after the newest token: rows with depth min(n, distance), each seeing earlier rows."""
    settings = target.config
    states = target(input_ids=IDS[None], output_hidden_states=True).hidden_states
    lps = settings.num_hidden_layers // N
    rows = []
    for position in range(LENGTH):
        depth = min(N, LENGTH - 1 - position)
        if config["version"] == 11:
            layers = [x for x in config["aggr_feature_bound"] if x <= depth * lps]
            name = f"aggr_projs.{len(layers) - 1}"
        else:
            layers = config["shallow_hidden_layer_indices"][N - depth] if depth else [0]
            name = f"stage_projs.{N - depth}" if depth else "g0_proj"
        parts = torch.cat([states[layer][0, position] for layer in layers])
        rows.append(F.linear(parts, state[name + ".weight"]))
    stream, size = torch.stack(rows), settings.head_dim
    fixed, positions = stream.clone(), torch.arange(LENGTH)[None]
    cos, sin = target.get_decoder().rotary_emb(stream, positions)

    def project(x, name):
        return F.linear(x, state[name + ".weight"])

    def norm(x, name):
        return F.rms_norm(x, x.shape[-1:], state[name + ".weight"], settings.rms_norm_eps)

    def turned(x):
        front, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        return torch.cat([apply_rotary_pos_emb(front, front, cos, sin)[0], rest], -1)

    for index in range(MODULE_LAYERS):
        layer = f"spec_layers.{index}."
        if config["version"] == 10:
            own = f"fixed_stage_per_layer_projs.{index}."
            for position in range(LENGTH - 1):
                depth = min(N, LENGTH - 1 - position)
                stream[position] = project(fixed[position], f"{own}{N - depth}")
        x = norm(stream, layer + "input_layernorm")
        q, k, v = (
            project(x, f"{layer}self_attn.{part}_proj").unflatten(-1, (-1, size)) for part in "qkv"
        )
        q, k = norm(q, layer + "self_attn.q_norm"), norm(k, layer + "self_attn.k_norm")
        q, k, v = turned(q.transpose(0, 1)[None]), turned(k.transpose(0, 1)[None]), v[None]
        attended = F.scaled_dot_product_attention(
            q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        stream = stream + project(
            attended[0].transpose(0, 1).flatten(1), f"{layer}self_attn.o_proj"
        )
        x = norm(stream, layer + "post_attention_layernorm")
        gate = F.silu(project(x, layer + "mlp.gate_proj")) * project(x, layer + "mlp.up_proj")
        stream = stream + project(gate, layer + "mlp.down_proj")
    return project(target.get_decoder().norm(stream[-1]), "lm_head")


def decoded(module, taps):
    """Return logits after the newest token, with N - 1 tokens in flight."""
    caches, first = module.new_caches(), LENGTH - N
    module.extend(caches, {x: y[:first] for x, y in taps.items()}, 0)
    return module.propose(
        caches,
        {x: y[first:] for x, y in taps.items()},
        depths=list(range(N))[::-1],
        positions=torch.arange(first, LENGTH),
        visible_RR=torch.ones(N, N, dtype=torch.bool).tril(),
    )[0]


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
@pytest.mark.parametrize("version", [10, 11])
def test_a_speculation_module_of_the_authors_computes_what_its_file_says(
    tmp_path, target, version, family
):
    """On Qwen3.5 a part of each head is rotated, and the final norm multiplies by 1 + weight."""
    if family == "qwen3_5":
        target = tiny_qwen3_5()
        target.folder = tmp_path / "target"
        target.save_pretrained(target.folder)
    source, state, config = spd_file(tmp_path / "theirs", target, version)
    import_head(str(source), str(target.folder), tmp_path / "out")
    module = load_draft(str(tmp_path / "out"), target)
    taps = {x: y[0] for x, y in capture_hidden(target, IDS[None], module.taps).items()}
    ours = decoded(module, taps)
    theirs = module_by_formula(target, state, config)
    assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()
    assert torch.equal(module.draft_ids, DRAFT_IDS)
    if family == "llama":
        options = {"schedule": "spd", "num_stages": N, "max_new_tokens": 12}
        result = engine_for(target, draft=module, **options).decode([3, 1, 4])
        assert result.token_ids == greedy_reference(target, [3, 1, 4], 12)


@pytest.mark.parametrize("version", [10, 11])
def test_training_and_decoding_agree_on_an_imported_module(tmp_path, target, version):
    source, _, _ = spd_file(tmp_path / "theirs", target, version)
    import_head(str(source), str(target.folder), tmp_path / "out")
    module = load_draft(str(tmp_path / "out"), target)
    taps = capture_hidden(target, IDS[None], module.taps)
    trained = module.logits(module(taps, [N]))[0, -1]
    found = decoded(module, {x: y[0] for x, y in taps.items()})
    assert (trained - found).abs().max() < 1e-4 * trained.abs().max()


@pytest.mark.parametrize(
    ("version", "changes", "words"),
    [
        (11, {"version": 12}, ["version", "12"]),
        (11, {"stage_layers": "3;5"}, ["stage_layers", "3;5"]),
        (11, {"num_stages": 3}, ["num_stages", "3", "8 layers"]),
        (11, {"aggr_feature_bound": [0, 2, 9]}, ["aggr_feature_bound", "9"]),
        (11, {"aggr_feature_bound": [2, 4]}, ["aggr_feature_bound", "[2, 4]"]),
        (10, {"shallow_hidden_layer_indices": [[0]]}, ["shallow_hidden_layer_indices", "4 "]),
        (11, {"hidden_size": 64}, ["hidden_size", "64"]),
        (11, {"draft_token_ids": [3, 3]}, ["draft_token_ids", "3..3", "each once"]),
        (11, {"draft_token_ids": [3, 10**6]}, ["draft_token_ids", "1000000"]),
        (11, {"num_spec_layers": "two"}, ["num_spec_layers"]),
    ],
    ids=str,
)
def test_modules_that_cannot_be_expressed_are_refused(
    tmp_path, target, version, changes, words, monkeypatch, capfd
):
    source, _, _ = spd_file(tmp_path / "theirs", target, version, changes)
    status = call("models", command(source, target, tmp_path / "out"), monkeypatch)
    assert_one_line(status, *capfd.readouterr(), ["--from", *words])
