"""MTP layers shipped with targets: import, export, computation, decoding and fine-tuning."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from attention_runs import tune
from command_runs import assert_one_line, call
from decode_runs import (
    NEW_TOKENS,
    PROMPTS,
    WAYS,
    decode_exactly,
    engine_for,
    greedy_reference,
    way_name,
)
from peer_files import assert_same_head
from safetensors.torch import load_file, save_file
from staged_targets import tiny
from tiny_drafts import make_head, step_logits
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer

from pipedraft.models.exchange.export import Origin, export, mtp_parts
from pipedraft.models.exchange.peers import import_head
from pipedraft.models.heads.draft import load_draft
from pipedraft.models.heads.mtp import MTP
from pipedraft.models.target import load_target
from pipedraft.models.transformer.fingerprint import read_target
from pipedraft.train.batch import Batch
from pipedraft.train.methods import MTPTrainConfig
from pipedraft.train.mtp import MTPObjective

STEPS, LENGTH = 4, 10
IDS = torch.randint(61, (LENGTH,), generator=torch.Generator().manual_seed(6))
OTHER_WAYS = [{"schedule": "pipeinfer"}, {"schedule": "ssd", "draft_tokens": 3}]


def mtp_weights(target):
    """Weights as in a checkpoint from this family."""
    layer = Qwen3_5DecoderLayer(target.config, target.config.layer_types.index("full_attention"))
    hidden = target.config.hidden_size
    shapes = {f"layers.0.{name}": tuple(x.shape) for name, x in layer.state_dict().items()}
    shapes |= {"fc.weight": (hidden, 2 * hidden), "norm.weight": (hidden,)}
    shapes |= {f"pre_fc_norm_{name}.weight": (hidden,) for name in ("embedding", "hidden")}
    generator = torch.Generator().manual_seed(4)
    return {
        f"mtp.{name}": torch.randn(shape, generator=generator) * 0.7 / shape[-1] ** 0.5
        for name, shape in shapes.items()
    }


def write_target(folder, target, weights):
    """Write the target as large models are saved: its tensors, ``weights``, and an index file."""
    target.save_pretrained(folder)
    main = folder / "model.safetensors"
    own = load_file(main)
    save_file(own, folder / "model-1.safetensors", metadata={"format": "pt"})
    main.unlink()
    files = dict.fromkeys(own, "model-1.safetensors")
    if weights:
        save_file(weights, folder / "model-2.safetensors", metadata={"format": "pt"})
        files |= dict.fromkeys(weights, "model-2.safetensors")
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A target with its MTP layer, and its checkpoint."""
    folder = tmp_path_factory.mktemp("native")
    weights = mtp_weights(tiny("qwen3_5"))
    path = write_target(folder / "target", tiny("qwen3_5"), weights)
    import_head(str(path), str(path), folder / "mtp")
    target = load_target(str(path))
    head = load_draft(str(folder / "mtp"), target)
    return SimpleNamespace(folder=folder, path=path, weights=weights, target=target, head=head)


# -- what it computes -----------------------------------------------------------------------


@torch.no_grad()
def logits_by_formula(target, weights, row, depth):
    """Logits for 1 .. depth draft tokens below a row, by transformers' own decoder layer."""
    config = target.config
    kind = type(target.model.layers[-1])
    rotary = type(target.model.rotary_emb)
    types = getattr(config, "layer_types", None) or ["full_attention"]
    layer = kind(config, types.index("full_attention"))
    of_layer = {n.removeprefix("mtp.layers.0."): x for n, x in weights.items() if ".layers." in n}
    layer.load_state_dict(of_layer)
    offset = config.model_type.startswith("qwen3_5")

    def norm(x, name):
        weight = offset + weights[f"mtp.{name}.weight"]
        return x * (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt() * weight

    raw = {}
    hook = target.model.norm.register_forward_hook(lambda *call: raw.update(last=call[2]))
    target(input_ids=IDS[None])
    hook.remove()
    states, out = raw["last"][0, : row + 1], []
    for step in range(depth):
        embedded = target.get_input_embeddings()(IDS[1 : row + 2 + step])
        normed = norm(embedded, "pre_fc_norm_embedding"), norm(states, "pre_fc_norm_hidden")
        x = F.linear(torch.cat(normed, -1), weights["mtp.fc.weight"])[None]
        positions = torch.arange(x.shape[1])[None]
        hidden = layer(
            x,
            position_embeddings=rotary(config)(x, positions),
            attention_mask=torch.full((len(states),) * 2, -torch.inf).triu(1)[None, None],
        )
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        states = torch.cat([states, norm(hidden[0, -1:], "norm")])
        out.append(target.lm_head(states[-1]))
    return out


def assert_logits_by_formula(target, head, weights):
    ours = step_logits(target, head, IDS, STEPS)
    for row in (0, 3, LENGTH - STEPS - 1):
        for step, theirs in enumerate(logits_by_formula(target, weights, row, STEPS)):
            assert (ours[step][row] - theirs).abs().max() < 1e-5 * theirs.abs().max(), (row, step)


def test_an_imported_layer_computes_what_transformers_layer_says(place):
    assert_logits_by_formula(place.target, place.head, place.weights)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_new_layer_computes_what_transformers_layer_says(family):
    target = tiny(family)
    head = make_head(target, "mtp")
    weights = {f"mtp.{name}": value for name, value in head.state_dict().items()}
    assert_logits_by_formula(target, head, weights)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3", "llama"])
def test_the_states_of_training_are_those_of_decoding(family):
    target = tiny(family)
    head = make_head(target, "mtp")
    assert head.config.native == (family == "qwen3_5")
    taps = {head.taps[0]: torch.empty(0)}
    hook = target.model.norm.register_forward_hook(
        lambda module, inputs, out: taps.update({head.taps[0]: inputs[0]})
    )
    target(input_ids=torch.stack([IDS, IDS.flip(0)]))
    hook.remove()
    rows = torch.tensor([t for t in range(2 * LENGTH) if t % LENGTH < LENGTH - STEPS])
    ids_BT = torch.stack([IDS, IDS.flip(0)])
    unrolled = head.unroll(head.feature(taps), ids_BT, [rows] * STEPS)
    for text, ids_T in enumerate(ids_BT):
        decoded = step_logits(target, head, ids_T, STEPS)
        for step in range(STEPS):
            ours = head.logits(unrolled[step]).view(2, -1, 61)[text]
            torch.testing.assert_close(ours, decoded[step][: len(ours)], rtol=1e-4, atol=1e-4)


# -- files ----------------------------------------------------------------------------------


def test_a_layer_goes_back_as_it_came(place, tmp_path):
    files = export(place.folder / "mtp", "sglang", tmp_path / "back")
    assert tmp_path / "back" / "model.safetensors" in files
    found = load_file(tmp_path / "back" / "model.safetensors")
    ours = {name: x for name, x in found.items() if name.startswith("mtp.")}
    assert ours.keys() == place.weights.keys()
    assert all(torch.equal(x, place.weights[name]) for name, x in ours.items())
    ends = found.keys() - ours.keys()
    assert ends == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    own = json.loads((place.path / "config.json").read_text())
    assert config == own | {"mtp_num_hidden_layers": 1}
    import_head(str(tmp_path / "back"), str(place.path), tmp_path / "again")
    assert_same_head(place.folder / "mtp", tmp_path / "again")
    line = Origin.read(tmp_path / "back").launch_line("OUT")
    assert "--speculative-algorithm NEXTN --speculative-draft-model-path OUT" in line


def test_the_configuration_of_a_model_that_also_sees_keeps_its_form(place):
    found = read_target(str(place.path), None)
    nested = replace(found, config={"model_type": "qwen3_5", "text_config": found.config})
    config, _ = mtp_parts(place.head, nested)
    text = found.config | {"mtp_num_hidden_layers": 1}
    assert config == {"model_type": "qwen3_5", "text_config": text}


def other_target(folder):
    model = tiny("qwen3_5")
    other = type(model)(model.config)
    other.load_state_dict(model.state_dict())
    other.model.norm.weight.data.add_(0.5)
    return write_target(folder / "other", other, {})


def without(name):
    return lambda weights: weights.pop(name)


REFUSED = {
    "none": (lambda weights: weights.clear(), ["no mtp.*", "no head"]),
    "missing": (without("mtp.layers.0.self_attn.k_norm.weight"), ["lacks", "k_norm"]),
    "shape": (
        lambda weights: weights.update({"mtp.fc.weight": torch.zeros(32, 32)}),
        ["fc.weight", "(32, 32)", "(32, 64)"],
    ),
    "two layers": (
        lambda weights: weights.update({"mtp.layers.1.mlp.up_proj.weight": torch.zeros(3, 3)}),
        ["tensor", "layers.1.mlp.up_proj"],
    ),
    "experts": (
        lambda weights: weights.update({"mtp.layers.0.mlp.gate.weight": torch.zeros(4, 32)}),
        ["tensor", "mlp.gate.weight"],
    ),
    "not finite": (lambda weights: weights["mtp.norm.weight"].fill_(torch.nan), ["norm", "NaN"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_expressed_is_refused_by_name(place, tmp_path, name, monkeypatch, capfd):
    change, words = REFUSED[name]
    weights = {key: x.clone() for key, x in place.weights.items()}
    change(weights)
    source = str(write_target(tmp_path / "source", tiny("qwen3_5"), weights))
    words_of_command = ["import", "--from", source, "--target", source, "--out", "out"]
    monkeypatch.chdir(tmp_path)
    capfd.readouterr()
    status = call("models", words_of_command, monkeypatch)
    assert_one_line(status, *capfd.readouterr(), ["--from", *words])
    assert not (tmp_path / "out").exists()


def test_another_target_is_refused(place, tmp_path, monkeypatch, capfd):
    other_family = str(write_target(tmp_path / "mixtral", tiny("mixtral"), {}))
    llama = str(write_target(tmp_path / "llama", tiny("llama"), {}))
    for target, words in (
        (other_family, ["--target", "is a mixtral", "qwen3_5"]),
        (llama, ["--target", "is a llama", "qwen3_5"]),
        (str(other_target(tmp_path)), ["target: does not match", "other"]),
    ):
        words_of_command = ["import", "--from", str(place.path), "--target", target]
        capfd.readouterr()
        status = call("models", [*words_of_command, "--out", str(tmp_path / "out")], monkeypatch)
        assert_one_line(status, *capfd.readouterr(), words)


def test_a_layer_of_another_form_has_no_layout(tmp_path):
    make_head(tiny("llama"), "mtp").save(tmp_path)
    path = write_target(tmp_path / "target", tiny("llama"), {})
    with pytest.raises(ValueError, match="not the target's own; give a checkpoint"):
        export(tmp_path, "sglang", tmp_path / "out", target=str(path))
    with pytest.raises(ValueError, match="'mtp'; the layout speculators \\(vLLM\\) is for eagle3"):
        export(tmp_path, "speculators", tmp_path / "out", target=str(path))


# -- decoding -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "way",
    [
        *WAYS[::3],
        *OTHER_WAYS,
        *(pytest.param(way, marks=pytest.mark.all) for way in WAYS if way not in WAYS[::3]),
    ],
    ids=way_name,
)
def test_greedy_text_is_the_targets(way, place):
    engine = engine_for(
        place.target, draft=place.head, num_stages=2, max_new_tokens=NEW_TOKENS, **way
    )
    expected = greedy_reference(place.target, PROMPTS[2], NEW_TOKENS)
    assert decode_exactly(engine, PROMPTS[2], expected).num_drafted > 0


# -- fine-tuning ----------------------------------------------------------------------------


def make_objective(target, **options) -> MTPObjective:
    config = MTPTrainConfig(**options)
    MTPObjective.check(config, target)
    data = SimpleNamespace(report=SimpleNamespace(to_dict=dict))
    return MTPObjective(config, target, target_name="tiny", revision=None, data=data)


def test_a_layer_is_fine_tuned_and_goes_back_into_its_target(place, tmp_path):
    objective = make_objective(place.target, init_from=str(place.folder / "mtp"), loss="ce")
    draft = objective.draft.requires_grad_(True)
    for name, value in place.head.state_dict().items():
        assert torch.equal(draft.state_dict()[name], value)
    ids = torch.randint(61, (2, 24), generator=torch.Generator().manual_seed(2)).tolist()
    batch = Batch.padded([{"input_ids": row, "loss_mask": [0] * 2 + [1] * 22} for row in ids], 0)
    first, *_, last = tune(objective, batch, 15)
    assert last["loss"] < 0.5 * first["loss"] and last["score"] > first["score"] + 0.3
    (tmp_path / "tuned").mkdir()
    draft.save(tmp_path / "tuned")
    export(tmp_path / "tuned", "sglang", tmp_path / "out", target=str(place.path))
    found = load_file(tmp_path / "out" / "model.safetensors")
    changed = [name for name, x in place.weights.items() if not torch.equal(x, found[name])]
    assert changed == [*place.weights]


def test_the_loss_of_a_later_token_decays(place):
    """Doubling the decay for two steps moves the loss by the second step's weight."""
    batch = Batch.padded([{"input_ids": IDS.tolist(), "loss_mask": [1] * LENGTH}], 0)
    first, half, whole = (
        make_objective(place.target, init_from=str(place.folder / "mtp"), **options)(
            batch, torch.Generator()
        ).loss.item()
        for options in ({"num_steps": 1}, {"step_decay": 0.5}, {"step_decay": 1.0})
    )
    second = make_objective(
        place.target, init_from=str(place.folder / "mtp"), num_steps=2, step_decay=1.0
    )(batch, torch.Generator()).loss.item()
    third = whole - second
    assert half == pytest.approx(first + (second - first) / 2 + third / 4, rel=1e-5)


def test_a_start_that_is_no_layer_of_this_target_is_refused(place, tmp_path):
    make_head(tiny("llama"), "eagle").save(tmp_path)
    with pytest.raises(ValueError, match="init_from: .* of type 'eagle'; give one of type 'mtp'"):
        make_objective(place.target, init_from=str(tmp_path))
    other = load_target(str(other_target(tmp_path)))
    with pytest.raises(ValueError, match="target: does not match this draft"):
        make_objective(other, init_from=str(place.folder / "mtp"))
    assert isinstance(place.head, MTP)
