"""Where a target and its draft run, and in which dtype: ``--device`` and ``--dtype``."""

from typing import TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from pipedraft.pretrained import read_config

Network = TypeVar("Network", bound=nn.Module)


def resolve_device(name: str, field: str = "--device") -> torch.device:
    """The device of a name, checked by using it.

    Args:
        name: auto (the first accelerator, if there is one), cpu, cuda or cuda:N.

    Raises:
        ValueError: a device that this machine does not have.
    """
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        found = torch.zeros(1, device=name)
        found.tolist()  # a device that holds nothing, as meta, cannot say it
        return found.device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{field}: {name!r} cannot be used ({reason}); give cpu or leave it out"
        ) from error


def has_native_bf16(device: torch.device) -> bool:
    """Whether products of bfloat16 are computed as such; emulated ones are slow, or refused."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type != "cpu" or torch.cpu._is_avx512_bf16_supported()


def stored_dtype(name: str, revision: str | None) -> torch.dtype | None:
    """The dtype that a model's config.json says its weights are stored in."""
    config = read_config(name, revision)
    config = config.get("text_config", config)
    found = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)
    return found if isinstance(found, torch.dtype) else None


def resolve_dtype(
    dtype: str, device: torch.device, name: str, revision: str | None = None
) -> torch.dtype:
    """The dtype of target and draft. auto: float32 on a CPU, on a GPU as the target is stored.

    A GPU without bfloat16 of its own (before Ampere) takes float16 in place of it.
    """
    if dtype != "auto":
        return getattr(torch, dtype)
    stored = stored_dtype(name, revision)
    if device.type == "cpu" or stored not in (torch.bfloat16, torch.float16):
        return torch.float32
    return stored if stored == torch.float16 or has_native_bf16(device) else torch.float16


def place_draft(draft: Network, target: PreTrainedModel) -> Network:
    """Move a draft to its target: to the embedding's device, and in the target's dtype."""
    device = target.get_input_embeddings().weight.device
    return draft.to(device, target.dtype)  # type: ignore[arg-type]  # Module's weight is untyped
