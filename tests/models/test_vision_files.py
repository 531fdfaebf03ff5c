"""The text part of a model that also reads images decodes as ``generate`` of the whole."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from staged_targets import roughen
from torch import Tensor

from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.engine import Engine
from pipedraft.models.target import capture_hidden, load_target
from pipedraft.models.target_part import load_target_part
from pipedraft.models.transformer.fingerprint import read_target, target_fingerprint

LAYERS = 4
TEXT: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
PATCHES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
MERGED: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 14,
    "out_hidden_size": 32,
}
TURNS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
WINDOW = {"sliding_window": 8}


def of_pixtral(kind: str, **more: Any) -> Any:
    patches = PATCHES | {"model_type": "pixtral"}
    text = TEXT | {"model_type": kind} | more
    return hf.Mistral3Config(text_config=text, vision_config=patches, image_token_index=10)


CONFIGS = {
    "mistral3": lambda: of_pixtral("ministral3"),
    "mistral3_windows": lambda: of_pixtral("mistral", **WINDOW),
    "gemma3": lambda: hf.Gemma3Config(
        text_config=TEXT | WINDOW, vision_config=PATCHES, image_token_index=10, boi_token_index=11
    ),
    "qwen2_5_vl": lambda: hf.Qwen2_5_VLConfig(
        text_config=TEXT | {"hidden_size": 64, "rope_parameters": TURNS},
        vision_config=MERGED | {"out_hidden_size": 64},
    ),
    "qwen3_vl": lambda: hf.Qwen3VLConfig(
        text_config=TEXT | {"rope_parameters": TURNS},
        vision_config=MERGED | {"deepstack_visual_indexes": [0]},
    ),
    "llava": lambda: hf.LlavaConfig(
        text_config=TEXT | {"model_type": "llama"},
        vision_config=PATCHES | {"model_type": "siglip_vision_model"},
        image_token_index=10,
    ),
    "smolvlm": lambda: hf.SmolVLMConfig(
        text_config=TEXT | {"model_type": "llama"}, vision_config=PATCHES
    ),
}


class Ids:
    """A tokenizer that the engine only asks to decode."""

    def decode(self, ids: list[int], **_: object) -> str:
        return " ".join(map(str, ids))


def decoded(model: Any, ids: Tensor, schedule: str) -> list[int]:
    config = DecodeConfig.of(schedule, num_stages=2, max_new_tokens=20)
    return Engine(model, Ids(), config).decode(ids.tolist()).token_ids


FAST = ("mistral3", "qwen3_vl")


@pytest.mark.parametrize(
    "kind", [x if x in FAST else pytest.param(x, marks=pytest.mark.all) for x in CONFIGS]
)
def test_the_text_part_decodes_as_the_whole_model_without_an_image(kind: str, tmp_path: Path):
    torch.manual_seed(0)
    made = hf.AutoModelForImageTextToText.from_config(CONFIGS[kind]())
    roughen(made).save_pretrained(tmp_path)
    whole = hf.AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    ids_T = torch.arange(20, 40)
    answer = whole.generate(ids_T[None], max_new_tokens=20, do_sample=False)[0, 20:].tolist()
    target = load_target(str(tmp_path))
    part = load_target_part(str(tmp_path), layers=range(LAYERS), has_embedding=True, has_head=True)
    for model in (target, part):
        assert decoded(model, ids_T, "autoregressive") == answer
    assert read_target(str(tmp_path), None).fingerprint == target_fingerprint(target)
    alone = capture_hidden(target, ids_T[None, :12], [2, LAYERS])
    packed = capture_hidden(target, torch.cat([ids_T[12:], ids_T[:12]])[None], [2, LAYERS], [8, 12])
    for layer, states_BTH in alone.items():
        torch.testing.assert_close(packed[layer][:, 8:], states_BTH, atol=1e-4, rtol=0)
