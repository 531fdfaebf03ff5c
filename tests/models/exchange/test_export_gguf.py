"""Heads as GGUF files: llama.cpp's names and keys, and weights in its rotation order."""

import json

import pytest
import torch
from command_runs import assert_one_line, call
from gguf_runs import write_gguf
from tiny_drafts import make_head, seeded
from tiny_models import tiny_llama

from pipedraft.models import load_draft
from pipedraft.models.exchange.llama_cpp import BLOCK

gguf = pytest.importorskip("gguf")
LAYERS = 8


@pytest.fixture(scope="module")
def target():
    return tiny_llama(layers=LAYERS, vocab=512)


def write_head(tmp_path, target, kind, **options):
    write_gguf(tmp_path / "target.gguf", target)
    head = make_head(target, kind, **options)
    (tmp_path / "head").mkdir()
    head.save(tmp_path / "head")
    words = ["export", "--checkpoint", str(tmp_path / "head"), "--format", "llama.cpp"]
    return head, [*words, "--target", str(tmp_path / "target.gguf"), "--out", str(tmp_path / "out")]


def read(path):
    reader = gguf.GGUFReader(path)
    tensors = {x.name: torch.tensor(x.data.copy()) for x in reader.tensors}
    return {name: x.contents() for name, x in reader.fields.items()}, tensors


def turned(x_TND, neighbors):
    """Rotate neighboring values, or the halves of a head."""
    T, _, D = x_TND.shape
    angle = torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(0, D, 2) / D)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = (x_TND[..., ::2], x_TND[..., 1::2]) if neighbors else x_TND.chunk(2, -1)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1)


def test_an_eagle_3_head_has_the_numbers_that_llama_cpp_rotates(
    tmp_path, target, monkeypatch, capfd
):
    head, words = write_head(
        tmp_path, target, "eagle3", feature_layers=(5, 2, 4), norm_before_fc=True
    )
    assert call("models", words, monkeypatch) == 0
    line = capfd.readouterr().out.splitlines()[-1]
    assert line == (
        f"llama-server -m {tmp_path / 'target.gguf'} -md {tmp_path / 'out' / 'draft.gguf'} "
        "--spec-type draft-eagle3 --spec-draft-n-max 3"
    )
    fields, tensors = read(tmp_path / "out" / "draft.gguf")
    assert fields["general.architecture"] == "eagle3"
    assert fields["eagle3.target_layers"] == [2, 4, 5] and fields["eagle3.norm_before_fc"]
    assert len(fields["tokenizer.ggml.tokens"]) == 512 and "d2t" not in tensors
    blocks = {f"blk.0.{x}.weight" for x in BLOCK.values() if not x.endswith(("q_norm", "k_norm"))}
    around = {f"{x}.weight" for x in ("fc", "enc.output_norm", "output_norm", "output")}
    assert tensors.keys() == blocks | around
    layer, attention = head.layer_config, head.midlayer.self_attn
    x = torch.randn(5, 2 * layer.hidden_size, generator=seeded(1))
    for name, ours in (("attn_q", attention.q_proj), ("attn_k", attention.k_proj)):
        theirs = x @ tensors[f"blk.0.{name}.weight"].T
        theirs = turned(theirs.unflatten(-1, (-1, layer.head_size)), neighbors=True)
        expected = turned(ours(x).unflatten(-1, (-1, layer.head_size)), neighbors=False)
        assert torch.allclose(theirs, expected, atol=1e-5)
    taps = {i: torch.randn(5, layer.hidden_size, generator=seeded(i)) for i in (2, 4, 5)}
    joined = torch.cat([taps[i] for i in (2, 4, 5)], -1)
    joined = joined * (joined.square().mean(-1, keepdim=True) + layer.rms_norm_eps).rsqrt()
    fused = joined * tensors["enc.output_norm.weight"] @ tensors["fc.weight"].T
    assert torch.allclose(fused, head.feature(taps), atol=1e-5)


def test_a_dflash_head_reads_embedding_and_lm_head_off_the_target(
    tmp_path, target, monkeypatch, capfd
):
    head, words = write_head(tmp_path, target, "dflash")
    assert call("models", words, monkeypatch) == 0
    assert "--spec-type draft-dflash --spec-draft-n-max 7" in capfd.readouterr().out
    fields, tensors = read(tmp_path / "out" / "draft.gguf")
    assert fields["dflash.target_layers"] == list(head.config.feature_layers)
    assert fields["tokenizer.ggml.mask_token_id"] == head.config.mask_token_id
    own = load_draft(str(tmp_path / "head"), target).state_dict()
    assert len(tensors) == len(own) and fields["dflash.block_size"] == 8
    same = {"hidden_norm": "enc.output_norm", "layers.1.self_attn.q_proj": "blk.1.attn_q"}
    for ours, theirs in (same | {"layers.0.self_attn.q_norm": "blk.0.attn_q_norm"}).items():
        assert torch.equal(own[f"{ours}.weight"], tensors[f"{theirs}.weight"])


@pytest.mark.parametrize("confidence", ["pair", "state"])
def test_a_dspark_head_is_a_dflash_head_with_a_table(
    tmp_path, target, confidence, monkeypatch, capfd
):
    options = {"confidence": confidence, "sample_from_anchor": False}
    head, words = write_head(tmp_path, target, "dspark", **options)
    assert call("models", words, monkeypatch) == 0
    count = head.config.num_tokens
    assert f"--spec-type draft-dspark --spec-draft-n-max {count}" in capfd.readouterr().out
    fields, tensors = read(tmp_path / "out" / "draft.gguf")
    assert fields["general.architecture"] == "dflash"
    assert fields["dflash.block_size"] == count + 1 and not fields["dflash.sample_from_anchor"]
    assert fields["dflash.has_confidence_head"] == (confidence == "pair")
    own = load_draft(str(tmp_path / "head"), target).state_dict()
    names = {"markov_head.markov_w1.weight": "markov_w1.weight"}
    names |= {"markov_head.markov_w2.weight": "markov_w2.weight"}
    if confidence == "pair":  # llama.cpp has no place for another one
        names |= {f"confidence_head.proj.{x}": f"conf_proj.{x}" for x in ("weight", "bias")}
    for ours, theirs in names.items():
        assert torch.equal(own[ours], tensors[theirs])
    assert ("conf_proj.weight" in tensors) == (confidence == "pair")


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("dspark", {"markov_rank": 0, "confidence": "none"}, ["--format", "markov_rank 0"]),
        ("eagle3", {"fc_norm": True}, ["--format", "'gguf'", "model.fc_norm"]),
        ("eagle3", {"norm_output": True}, ["--format", "model.norm_output"]),
        ("eagle3", {"feature_layers": (1, 2, 3, 5)}, ["feature_layers [1, 2, 3, 5]"]),
        ("eagle", {}, ["--checkpoint", "'eagle'", "eagle3, dflash and dspark"]),
    ],
    ids=str,
)
def test_what_llama_cpp_cannot_express_is_refused_by_name(
    tmp_path, target, kind, options, words, monkeypatch, capfd
):
    _, command = write_head(tmp_path, target, kind, **options)
    assert_one_line(call("models", command, monkeypatch), *capfd.readouterr(), words)
    assert not (tmp_path / "out").exists()


def test_the_target_that_a_checkpoint_names_is_not_blamed_on_the_option(
    tmp_path, target, monkeypatch, capfd
):
    _, command = write_head(tmp_path, target, "dflash", draft_vocab_size=64)
    path = tmp_path / "head" / "config.json"
    description = json.loads(path.read_text())
    description["target"]["name"] = "out/gone"
    path.write_text(json.dumps(description))
    status = call("models", command, monkeypatch)
    said = ["--checkpoint: weights of its target 'out/gone'", str(path), "set target.name there"]
    assert_one_line(status, *capfd.readouterr(), said)


def test_another_target_is_refused(tmp_path, target, monkeypatch, capfd):
    _, command = write_head(tmp_path, target, "eagle3")
    (tmp_path / "target.gguf").unlink()
    write_gguf(tmp_path / "target.gguf", tiny_llama(layers=2, vocab=512))
    status = call("models", command, monkeypatch)
    assert_one_line(status, *capfd.readouterr(), ["--target", "num_layers: 8 != 2"])
