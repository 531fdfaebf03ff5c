"""The frozen target in a run: its dtype, and the effect of its quantization."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tiny_models import REPOSITORY
from train_runs import World
from transformers import AutoModelForCausalLM

from pipedraft.models.target import capture_hidden, load_target
from pipedraft.train.config import parse_run
from pipedraft.train.launch import quantization_config, resolve_dtype
from pipedraft.train.methods import methods


def dtype_of(world: World, target: Path, mixed_precision: str, **changes) -> torch.dtype:
    arguments = world.arguments("spd", target / "out", target=target, **changes)
    run, _, _ = parse_run(arguments, methods(), "")
    return resolve_dtype(run, mixed_precision)


def test_a_bfloat16_target_stays_so_only_where_the_run_computes_in_it(world, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(world.target, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    for folder, mixed_precision, options, wanted in (
        (tmp_path, "bf16", {}, torch.bfloat16),
        (tmp_path, "no", {}, torch.float32),
        (tmp_path, "bf16", {"target_dtype": "fp32"}, torch.float32),
        (world.target, "bf16", {}, torch.float32),
        (world.target, "no", {"target_dtype": "bf16"}, torch.bfloat16),
    ):
        assert dtype_of(world, folder, mixed_precision, **options) == wanted
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"] = {"dtype": config.pop("dtype")}  # as multimodal checkpoints have it
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert dtype_of(world, tmp_path, "bf16") == torch.bfloat16


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_quantization_without_its_library_is_refused():
    with pytest.raises(ValueError, match="target_quantization: '8bit' needs bitsandbytes; pip"):
        quantization_config("8bit")


@pytest.mark.parametrize(("kind", "worst"), [("8bit", 0.1), ("4bit", 0.5)])
def test_a_quantized_target_is_nearly_the_same_and_trains_a_draft(world, tmp_path, kind, worst):
    pytest.importorskip("bitsandbytes", reason="needs pip install 'pipedraft[quantization]'")
    folder = (
        REPOSITORY / "assets" / "target"
    )  # blocks of 4 bits need wider layers than the tiny one
    ids_BT = torch.randint(0, 200, (2, 40), generator=torch.Generator().manual_seed(0))
    whole = capture_hidden(load_target(str(folder)), ids_BT, {4})[4]
    changes = {"target": folder, "target_quantization": kind, "max_steps": 2}
    for method in ("spd", "eagle3"):
        trainer = world.trainer(method, tmp_path / method, **changes)
        target = trainer.objective.target
        close = capture_hidden(target, ids_BT, {4})[4].float()
        assert 0 < (close - whole).norm() / whole.norm() < worst
        assert {p.dtype for p in target.get_decoder().layers[0].mlp.parameters()} <= {
            torch.int8,
            torch.uint8,
        }
        trainer.run()
        assert trainer.progress.step == 2
