"""Targets in GGUF files: logits equal the original model's; others are refused in a line."""

import sys
from pathlib import Path

import pytest
import torch
from gguf_runs import write_gguf
from huggingface_hub import constants
from tiny_models import byte_tokenizer, tiny_llama
from transformers import PreTrainedModel

from pipedraft import gguf_files
from pipedraft.errors import UsageError
from pipedraft.inference import __main__ as inference_command
from pipedraft.models import __main__ as models_command
from pipedraft.models.target import load_target, load_tokenizer

gguf = pytest.importorskip("gguf")


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
        patch.setattr(gguf_files, "convert_gguf", None)
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
    with pytest.raises(ValueError, match="cannot be read as GGUF"):
        load_target(str(other))
    with pytest.raises(ValueError, match="no file"):
        load_target(str(tmp_path / "none.gguf"))
    with pytest.raises(UsageError, match="holds other files"):
        gguf_files.convert_gguf(write_gguf(tmp_path / "tiny.gguf", model), tmp_path)
