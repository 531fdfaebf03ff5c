"""Loading a model's folder may do nothing but give exactly its weights."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from staged_targets import NUM_LAYERS, VOCAB, tiny
from tiny_models import REPOSITORY

from pipedraft.models import target_part
from pipedraft.models.target import load_target
from pipedraft.models.transformer.fingerprint import read_target
from pipedraft.pretrained import load_config, load_model, load_tokenizer

WEIGHTS = "model.safetensors"
LAYERS = "model.layers"


def load_part(folder: str) -> Any:
    return target_part.load_target_part(folder, layers=[1], has_embedding=True, has_head=True)


LOADERS = [load_target, load_model, load_part]
by_every_loader = pytest.mark.parametrize("load", LOADERS, ids=lambda load: load.__name__)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny("llama").save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(REPOSITORY / "assets" / "target" / name, tmp_path / "model" / name)
    return tmp_path / "model"


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_weights(folder: Path, change: Any) -> None:
    tensors = change(load_file(folder / WEIGHTS))
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def refuses(load: Any, folder: Path) -> str:
    """Refuse to load, and return the one-line message."""
    with pytest.raises(ValueError) as caught:
        load(str(folder))
    line = str(caught.value)
    assert "\n" not in line and len(line) < 600 + len(str(folder)), line
    return line


# -- code of its own ------------------------------------------------------------------------


@pytest.fixture
def evil(folder: Path) -> Path:
    """A folder with code that leaves a mark when run."""
    code = f"open({str(folder / 'ran')!r}, 'w')\nfrom transformers import LlamaConfig as C\n"
    (folder / "evilcode.py").write_text(code)
    return folder


def no_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*words: Any) -> str:
        raise AssertionError("a question on stdin")

    monkeypatch.setattr("builtins.input", fail)


@pytest.mark.parametrize("model_type", ["evil", "llama"])
@pytest.mark.parametrize("load", [*LOADERS, lambda x: load_config(x, None), load_tokenizer])
def test_code_named_by_the_config_is_refused(load, model_type, evil, monkeypatch):
    no_questions(monkeypatch)
    (evil / "tokenizer_config.json").write_text("{}")
    names = {"AutoConfig": "evilcode.C", "AutoModelForCausalLM": "evilcode.C"}
    change_config(evil, model_type=model_type, auto_map=names)
    line = refuses(load, evil)
    assert "Python code of its own in config.json (auto_map), which is never run; give" in line
    assert not (evil / "ran").exists()


def test_code_named_by_the_tokenizer_is_refused(evil, monkeypatch):
    no_questions(monkeypatch)
    settings = {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["evilcode.T"] * 2}}
    (evil / "tokenizer_config.json").write_text(json.dumps(settings))
    assert "code of its own in tokenizer_config.json" in refuses(load_tokenizer, evil)
    assert not (evil / "ran").exists()


def test_an_adapter_does_not_lead_to_another_model(folder):
    named = {"base_model_name_or_path": "someone/else", "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(named))
    assert "is an adapter of another model" in refuses(load_target, folder)


# -- weights --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left_out", "fields", "reason"),
    [
        (
            f"{LAYERS}.3.",
            {},
            "has 9 tensors missing (model.layers.3.input_layernorm.weight, ",
        ),
        ("model.norm.weight", {}, "has 1 tensors missing (model.norm.weight)"),
        (None, {"num_hidden_layers": NUM_LAYERS + 1}, "has 9 tensors missing (model.layers.4."),
        (None, {"num_hidden_layers": NUM_LAYERS - 1}, "has 9 tensors unexpected (model.layers.3."),
        (
            None,
            {"vocab_size": VOCAB + 3},
            "has 2 tensors of another shape (lm_head.weight, model.embed_tokens.weight)",
        ),
    ],
    ids=["layer", "tensor", "deeper", "shallower", "wider"],
)
@by_every_loader
def test_weights_that_do_not_fit_the_config_are_refused(load, left_out, fields, reason, folder):
    if left_out is not None:
        change_weights(folder, lambda x: {n: t for n, t in x.items() if left_out not in n})
    change_config(folder, **fields)
    line = refuses(load, folder)
    assert line.startswith("target: ") and reason in line and "copy" in line and "again" in line


@pytest.mark.parametrize("name", ["llama", "llama_tied", "qwen3", "mixtral", "qwen3_5"])
@by_every_loader
def test_every_whole_model_loads(load, name, tmp_path):
    tiny(name).save_pretrained(tmp_path)
    assert load(str(tmp_path)).config.num_hidden_layers == NUM_LAYERS


@by_every_loader
def test_a_tied_head_may_be_in_the_file_or_not(load, tmp_path):
    tiny("llama_tied").save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / WEIGHTS)
    embedding = load(str(tmp_path)).get_input_embeddings().weight
    change_weights(
        tmp_path, lambda x: x | {"lm_head.weight": x["model.embed_tokens.weight"].clone()}
    )
    again = load(str(tmp_path))
    assert torch.equal(again.get_input_embeddings().weight, embedding)
    assert again.lm_head.weight.data_ptr() == again.get_input_embeddings().weight.data_ptr()


@by_every_loader
def test_pickled_weights_are_never_opened(load, folder):
    (folder / WEIGHTS).unlink()
    torch.save(tiny("llama").state_dict(), folder / "pytorch_model.bin")
    assert "has no loadable safetensors weights" in refuses(load, folder)


@pytest.mark.parametrize("shard", ["pytorch_model.bin", "../outside.safetensors", "/etc/passwd"])
@by_every_loader
def test_an_index_names_only_safetensors_of_its_folder(load, shard, folder):
    names = list(load_file(folder / WEIGHTS))
    torch.save(tiny("llama").state_dict(), folder / "pytorch_model.bin")
    (folder / WEIGHTS).rename(folder.parent / "outside.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, shard)}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    line = refuses(load, folder)
    assert f"({WEIGHTS}.index.json: it names {shard!r}); pickled weights are never" in line


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "\xff"]
)
@by_every_loader
def test_a_damaged_index_is_refused(load, text, folder):
    (folder / f"{WEIGHTS}.index.json").write_text(text, encoding="latin-1")
    assert f"({WEIGHTS}.index.json: " in refuses(load, folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@by_every_loader
def test_weights_that_are_no_numbers_are_refused(load, value, folder):
    def damage(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors[f"{LAYERS}.1.mlp.up_proj.weight"][3, 2] = value
        return tensors

    change_weights(folder, damage)
    line = refuses(load, folder)
    assert "holds NaN or infinite weights (model.layers.1.mlp.up_proj.weight); use" in line


# -- damaged settings -----------------------------------------------------------------------


BAD_SETTINGS = [
    {"vocab_size": "x"},
    {"hidden_size": 17},
    {"num_attention_heads": 7},
    {"hidden_act": "nope"},
    {"rope_parameters": {"rope_type": "nope"}},
    {"model_type": "nope"},
    {"text_config": 5},
    {"num_hidden_layers": 10**9},
    {"rms_norm_eps": "a"},
]
SIZES = [
    ("num_hidden_layers", "4"),
    ("num_hidden_layers", 0),
    ("vocab_size", -3),
    ("hidden_size", 1.5),
    ("max_position_embeddings", True),
]


@pytest.mark.parametrize(("key", "value"), SIZES)
def test_a_size_that_no_model_has_is_named_with_its_value(key, value, folder):
    change_config(folder, **{key: value})
    for load in LOADERS:
        assert f"has {key} {value!r} in config.json; a model has a whole" in refuses(load, folder)


def test_the_reason_behind_a_value_is_given(folder):
    change_config(folder, rms_norm_eps="a")
    assert "expected float, got str (value: 'a')" in refuses(load_target, folder)


def test_a_null_text_config_is_none(folder):
    expected = read_target(str(folder), None).fingerprint
    change_config(folder, text_config=None)
    assert read_target(str(folder), None).fingerprint == expected
    load_target(str(folder))


@pytest.mark.parametrize("fields", BAD_SETTINGS, ids=str)
@by_every_loader
def test_settings_that_make_no_model_are_refused_in_one_line(load, fields, folder):
    change_config(folder, **fields)
    assert refuses(load, folder).startswith("target: ")


@pytest.mark.parametrize("text", ["null", "[]", "3", "{}", "{", '"x"', "[" * 10**5, "\xff"])
@by_every_loader
def test_a_damaged_config_is_refused_in_one_line(load, text, folder):
    (folder / "config.json").write_text(text, encoding="latin-1")
    assert "has no config.json that can be read" in refuses(load, folder)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["null", "[]", "3", "{", '{"model": 3}', '{"added_tokens": 3}'])
def test_a_damaged_tokenizer_is_refused_in_one_line(text, file, folder):
    (folder / file).write_text(text)
    if file == "tokenizer_config.json" and text.startswith('{"'):
        pytest.skip("settings that no tokenizer reads")
    assert "has no tokenizer that loads" in refuses(load_tokenizer, folder)


def test_a_folder_without_a_model_is_refused_in_one_line(tmp_path):
    for load in LOADERS:
        assert "has no config.json that can be read" in refuses(load, tmp_path)
    for load in (*LOADERS, load_tokenizer):
        assert ": no folder '" in refuses(load, tmp_path / "nowhere")
    (tmp_path / "targets").mkdir()
    hint = f", did you mean {tmp_path / 'targets'}?; give an existing folder"
    assert hint in refuses(load_tokenizer, tmp_path / "target")
