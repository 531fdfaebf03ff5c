"""The target of a run: its dtype, its quantization, and its layers shared among the processes."""

from importlib.util import find_spec
from typing import Any

import torch
from accelerate import Accelerator

from pipedraft.models.target import load_target, read_config
from pipedraft.train.config import RunConfig


def load_frozen_target(config: RunConfig, accelerator: Accelerator) -> Any:
    """Load the target of a run of a draft onto this process's device.

    Raises:
        ValueError: nothing to load, or no library for its quantization.
    """
    assert config.target is not None
    return load_target(
        config.target,
        revision=config.target_revision,
        dtype=resolve_dtype(config, accelerator.mixed_precision),
        device=accelerator.device,
        quantization=quantization_config(config.target_quantization),
    )


def resolve_dtype(config: RunConfig, mixed_precision: str) -> torch.dtype:
    """A target stored in bfloat16 stays so where it computes in it anyway: half the memory."""
    if config.target_dtype != "auto":
        return {"fp32": torch.float32, "bf16": torch.bfloat16}[config.target_dtype]
    assert config.target is not None
    stored = read_config(config.target, config.target_revision)
    stored = stored.get("text_config", stored)
    name = stored.get("dtype") or stored.get("torch_dtype")
    return torch.bfloat16 if (name, mixed_precision) == ("bfloat16", "bf16") else torch.float32


def quantization_config(kind: str | None) -> Any:
    """transformers' configuration of bitsandbytes."""
    if kind is None:
        return None
    if find_spec("bitsandbytes") is None:
        raise ValueError(
            f"target_quantization: {kind!r} needs bitsandbytes; pip install "
            "'pipedraft[quantization]', or leave it out"
        )
    from transformers import BitsAndBytesConfig

    if kind == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)


def shard_target(target: Any, accelerator: Accelerator) -> None:
    """Leave each process a part of every decoder layer, gathered when the layer runs (FSDP2).

    Embedding, final norm and LM head stay whole: the teacher reads them outside the model's
    forward. Every process must then run the target as often as the others, which the loop does.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    for layer in target.get_decoder().layers:
        fully_shard(layer, mesh=mesh)
