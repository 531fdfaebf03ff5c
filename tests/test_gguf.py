"""Targets in GGUF files: the logits of the model they were made of; others refused in a line."""

import sys
from pathlib import Path

import pytest
import torch
from command_processes import Process
from conftest import byte_tokenizer, tiny_llama
from huggingface_hub import constants
from transformers import PreTrainedModel

from pipedraft import pretrained
from pipedraft.cli import UsageError
from pipedraft.inference import __main__ as inference_command
from pipedraft.models import __main__ as models_command
from pipedraft.models.target import load_target, load_tokenizer

gguf = pytest.importorskip("gguf")

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers.": "blk.",
}


def paired(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Query or key rows in GGUF's order: the halves of a rotation beside each other."""
    rows, columns = weight.shape
    halves = weight.view(num_heads, 2, rows // num_heads // 2, columns)
    return halves.transpose(1, 2).reshape(rows, columns)


def write_gguf(path: Path, model: PreTrainedModel, *, architecture: str = "llama") -> Path:
    config, tokenizer = model.config, byte_tokenizer()
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    vocabulary += ["ab", *(f"<unused{i}>" for i in range(config.vocab_size - len(vocabulary) - 1))]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_bos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    for name, weight in model.state_dict().items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        part = name.split(".")[-2]
        held = paired(weight, heads[part]) if part in heads else weight
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name, held.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_llama(layers=2, vocab=300)


@pytest.fixture
def file(tmp_path, model) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", model)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pipedraft" / "gguf"


def test_logits_are_those_of_the_model_in_the_file(model, file):
    loaded = load_target(str(file))
    ids_BT = torch.randint(0, 200, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(loaded(ids_BT).logits, model(ids_BT).logits)
    assert loaded.dtype == torch.float32
    tokenizer = load_tokenizer(str(file))
    assert tokenizer.chat_template == byte_tokenizer().chat_template
    assert tokenizer("xyz").input_ids == byte_tokenizer()("xyz").input_ids


def test_a_file_is_read_once_and_known_by_its_hash(model, file, cache, monkeypatch):
    hashed = load_target(str(file)).config.gguf_sha256
    assert [place.name for place in cache.iterdir()] == [hashed]
    with monkeypatch.context() as patch:
        patch.setattr(pretrained, "convert_gguf", None)
        assert load_target(str(file)).config.gguf_sha256 == hashed
    write_gguf(file, tiny_llama(layers=2, vocab=300, seed=1))
    assert load_target(str(file)).config.gguf_sha256 != hashed


def test_the_command_writes_a_target_that_decodes(file, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["models", "from-gguf", str(file), "--out", str(out)])
    models_command.main()
    texts = []
    for target in (file, out):
        words = ["inference", "--target", str(target), "--prompt", "ab", "--max-new-tokens", "8"]
        monkeypatch.setattr(sys, "argv", words)
        capsys.readouterr()
        inference_command.main()
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != ""


@pytest.mark.parametrize(
    "content, message",
    [
        (b"PK\x03\x04" + bytes(64), "cannot be read as GGUF"),
        (b"GGUF" + b"\x03\0\0\0" + b"\xff" * 16, "cannot be read as GGUF"),
        (None, "cannot be read as GGUF"),
    ],
    ids=["zip", "counts", "cut"],
)
def test_a_broken_file_is_one_line_and_leaves_nothing(file, content, message, cache):
    file.write_bytes(file.read_bytes()[:3000] if content is None else content)
    with pytest.raises(ValueError, match=message) as caught:
        load_target(str(file))
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)
    assert not cache.exists() or not list(cache.iterdir())


def test_other_families_and_missing_files_are_refused(tmp_path, model):
    other = write_gguf(tmp_path / "other.gguf", model, architecture="bloom")
    with pytest.raises(ValueError, match="cannot be read as GGUF|supported as GGUF"):
        load_target(str(other))
    with pytest.raises(ValueError, match="no file"):
        load_target(str(tmp_path / "none.gguf"))
    with pytest.raises(UsageError, match="in use"):
        pretrained.convert_gguf(write_gguf(tmp_path / "tiny.gguf", model), tmp_path)


def test_a_broken_file_ends_the_command_with_status_2(tmp_path, parent):
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    words = ["--target", "broken.gguf", "--prompt", "a"]
    status, _, err = Process.start(parent, tmp_path, *words).finish()
    assert status == 2 and "Traceback" not in err
    assert "'broken.gguf' cannot be read as GGUF" in err
