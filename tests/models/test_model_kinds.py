"""Adapters and quantized weights are named as what they are, whole and in parts."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from staged_targets import NUM_LAYERS, tiny
from tiny_models import REPOSITORY
from torch import Tensor

from pipedraft.data_recipes.local import load_on
from pipedraft.models.exchange.peer_files import read_head
from pipedraft.models.heads.draft import load_draft
from pipedraft.models.target import load_target
from pipedraft.models.target_part import load_target_part
from pipedraft.pretrained import load_config, load_tokenizer, unapplied_settings

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
LINEAR = ".mlp.up_proj"


def load_part(folder: str) -> Any:
    return load_target_part(folder, layers=range(NUM_LAYERS), has_embedding=True, has_head=True)


def load_for_answers(folder: str) -> Any:
    return load_on(folder, "cpu", "float32")


def line_of(call: Any, *given: Any) -> str:
    with pytest.raises(ValueError) as caught:
        call(*given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- adapters -------------------------------------------------------------------------------


def write_adapter(folder: Path, settings: Any, weights: str = "adapter_model.safetensors") -> Path:
    folder.mkdir(parents=True)
    save_file({"a.lora_A.weight": torch.zeros(2, 2)}, folder / weights)
    if settings is not None:
        (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize(
    ("settings", "weights", "said"),
    [
        ({"peft_type": "LORA", "base_model_name_or_path": "a/b"}, "adapter_model.safetensors", ""),
        ({"peft_type": "IA3"}, "adapter_model.bin", "adapter_config.json); merge it with peft's"),
        (
            {"peft_type": "PROMPT_TUNING", "base_model_name_or_path": "a/b"},
            "adapter_model.safetensors",
            "(adapter_config.json, PROMPT_TUNING, of 'a/b'); its tokens cannot be merged",
        ),
        (
            {"fine_tune_type": "lora", "model": "a/b"},
            "adapters.safetensors",
            "(adapter_config.json, lora, of 'a/b'); merge it with mlx_lm.fuse",
        ),
        (None, "adapter_model.safetensors", "(adapter_model.safetensors); merge it"),
        (None, "pytorch_lora_weights.safetensors", "(pytorch_lora_weights.safetensors); merge it"),
        ([], "adapter_model.safetensors", "(adapter_config.json); merge it"),
    ],
    ids=["lora", "ia3", "prompt", "mlx", "bare", "diffusers", "damaged"],
)
def test_an_adapter_is_named_as_one_wherever_a_model_is_wanted(settings, weights, said, tmp_path):
    target, place = tiny("llama"), str(write_adapter(tmp_path / "x", settings, weights))
    lines = [
        *(line_of(load, place) for load in (load_target, load_part, load_for_answers)),
        line_of(load_config, place, None),
        line_of(load_tokenizer, place),  # peft saves none by itself
        line_of(load_draft, place, target),
        line_of(read_head, place, Path(place)),
    ]
    for name in TOKENIZER_FILES:
        shutil.copy(REPOSITORY / "assets" / "target" / name, place)
    load_tokenizer(place)
    for line in lines:
        assert f"{place!r} is an adapter of another model" in line and said in line
    names = [line.partition(": ")[0] for line in lines]
    assert names == ["target", "target", "--target", "target", "target", "checkpoint", "--from"]


def test_an_adapter_in_a_folder_of_its_name_is_found(tmp_path):
    write_adapter(tmp_path / "run" / "mine", {"peft_type": "LORA"})
    assert "(mine/adapter_config.json)" in line_of(load_target, str(tmp_path / "run"))


@pytest.mark.parametrize("load", [load_target, load_part, load_for_answers])
def test_an_adapter_beside_a_whole_model_is_refused(load, tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert "is an adapter of another model" in line_of(load, str(tmp_path))


def test_the_record_of_a_merged_adapter_beside_a_whole_model_is_no_reason(tmp_path):
    model = tiny("llama")
    model.save_pretrained(tmp_path)
    write_adapter(tmp_path / "adapter", {"peft_type": "LORA"})
    assert load_target(str(tmp_path)).config.hidden_size == model.config.hidden_size


# -- quantized weights ----------------------------------------------------------------------


def int8(name: str, x: Tensor) -> dict[str, Tensor]:
    return {f"{name}.weight": (x * 9).to(torch.int8)}


def fp8(name: str, x: Tensor) -> dict[str, Tensor]:
    return {f"{name}.weight": x.to(torch.float8_e4m3fn)}


def with_scale(suffix: str, weight: Any = fp8) -> Any:
    return lambda name, x: weight(name, x) | {f"{name}.{suffix}": torch.ones(1)}


def packed(*suffixes: str) -> Any:
    return lambda name, x: {f"{name}.{s}": torch.zeros(4, 4, dtype=torch.int32) for s in suffixes}


PLAIN: dict[str, Any] = {}
MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
QUANTIZED: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "fp8": (fp8, {"quantization_config": {"quant_method": "fp8"}}, {}, "quant_method 'fp8'"),
    "nested": (fp8, {"text_config": {"quantization_config": {"quant_method": "x"}}}, {}, "'x'"),
    "text": (fp8, {"quantization_config": "int4"}, {}, "'int4'"),
    "older": (
        with_scale("weight_scale"),
        {"compression_config": {"quant_method": "compressed-tensors", "config_groups": {}}},
        {},
        "(compression_config in config.json, quant_method 'compressed-tensors')",
    ),
    "modelopt": (
        with_scale("weight_scale"),
        {"quantization_config": {"quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8}}},
        {},
        "quant_algo 'FP8'",
    ),
    "modelopt_file": (
        with_scale("weight_scale_2"),
        {},
        {"hf_quant_config.json": MODELOPT},
        "(hf_quant_config.json, tensor model.layers.0.mlp.up_proj.weight_scale_2)",
    ),
    "gptq": (
        packed("qweight", "qzeros", "scales", "g_idx"),
        {},
        {"quantize_config.json": {"bits": 4}},
        "(quantize_config.json, tensor",
    ),
    "awq": (packed("qweight", "scales"), {}, {"quant_config.json": {}}, "(quant_config.json, "),
    "mlx": (packed("weight", "scales", "biases"), {"quantization": {"bits": 4}}, {}, "{'bits': 4}"),
    "mlx_bare": (packed("weight", "scales", "biases"), {}, {}, "up_proj.biases)"),
    "deepseek": (with_scale("weight_scale_inv"), {}, {}, "up_proj.weight_scale_inv)"),
    "torchao": (fp8, {"quantization_config": {"quant_method": "torchao"}}, {}, "'torchao'"),
    "torchao_bare": (with_scale("_weight_scale", int8), {}, {}, "._weight_scale)"),
    "bnb_4bit": (with_scale("weight.absmax", int8), {}, {}, ".weight.absmax)"),
    "bnb_8bit": (with_scale("SCB", int8), {}, {}, ".SCB)"),
    "quanto": (with_scale("weight._scale", int8), {}, {"quanto_qmap.json": {}}, "(quanto_qmap.js"),
    "integers": (int8, {}, {}, "weight of I8)"),
}


def write_model(folder: Path, change: Any, config: dict[str, Any], files: dict[str, Any]) -> Any:
    model = tiny("llama")
    model.save_pretrained(folder)
    tensors: dict[str, Tensor] = {}
    for name, x in model.state_dict().items():
        is_changed = name.endswith(f"{LINEAR}.weight")
        tensors |= change(name.removesuffix(".weight"), x) if is_changed else {name: x}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(settings))
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return model


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_weights_are_named_in_every_way_a_scheme_is(kind, tmp_path):
    change, config, files, said = QUANTIZED[kind]
    write_model(tmp_path, change, config, files)
    for load in (load_target, load_part, load_for_answers):
        line = line_of(load, str(tmp_path))
        assert "is stored quantized" in line and said in line, line
        assert line.endswith("give the unquantized checkpoint")


CACHE_ALONE = {
    "bare": {},
    "modelopt": {"quant_method": "modelopt", "quant_algo": None, "kv_cache_scheme": {"type": "f"}},
    "compressed": {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "kv_cache_scheme": {"num_bits": 8},
    },
}


@pytest.mark.parametrize("suffixes", [("k_proj.k_scale", "v_proj.v_scale"), ("kv_scale",)])
@pytest.mark.parametrize("scheme", CACHE_ALONE)
def test_scales_of_a_cache_alone_are_told_and_not_applied(scheme, suffixes, tmp_path):
    def beside(name: str, x: Tensor) -> dict[str, Tensor]:
        attention = name.replace(LINEAR, ".self_attn")
        return {f"{name}.weight": x} | {f"{attention}.{s}": torch.ones(1) for s in suffixes}

    config = {"quantization_config": CACHE_ALONE[scheme]} if CACHE_ALONE[scheme] else {}
    model = write_model(tmp_path, beside, config, {})
    ids = torch.tensor([[3, 1, 2]])
    for load in (load_target, load_part):
        found = load(str(tmp_path))
        torch.testing.assert_close(found(ids).logits, model(ids).logits, rtol=0, atol=0)
        (line,) = unapplied_settings(found)
        assert f"{NUM_LAYERS * len(suffixes)} scales for a quantized cache" in line
