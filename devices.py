"""Devices and dtypes: --device and --dtype."""

from typing import TypeVar

import torch
from transformers import PreTrainedModel

from .pretrained import read_config

Network = TypeVar("Network", bound=torch.nn.Module)


def resolve_device(name: str, field: str = "--device") -> torch.device:
    """Return the named device, after a check that it works.

    Args:
        name: auto (the first accelerator, if there is one), cpu, cuda or cuda:N.

    Raises:
        ValueError: a device missing on this machine.
    """
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        found = torch.zeros(1, device=name)
        found.tolist()  # a device without storage, as meta, fails here
        return found.device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{field}: {name!r} cannot be used ({reason}); give cpu or leave it out"
        ) from error


def has_native_bf16(device: torch.device) -> bool:
    """Return True if the device multiplies bfloat16 natively. Emulation is slow or refused."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type != "cpu" or torch.cpu._is_avx512_bf16_supported()


def stored_dtype(name: str, revision: str | None) -> torch.dtype | None:
    """Return the weights' dtype as stated in a model's config.json."""
    config = read_config(name, revision)
    config = config.get("text_config", config)
    found = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)
    return found if isinstance(found, torch.dtype) else None


WEIGHT_DTYPES = ("float32", "float16", "bfloat16", "int8", "int4")


def dtype_named(name: str, option: str) -> torch.dtype:
    """Return the weights' dtype with this name."""
    if name not in WEIGHT_DTYPES:
        known = ", ".join(WEIGHT_DTYPES)
        raise ValueError(f"{option}: {name!r} is no dtype here; give auto, {known}")
    return getattr(torch, name)


def resolve_dtype(
    dtype: str, device: torch.device, name: str, revision: str | None = None
) -> torch.dtype:
    """Return the dtype for target and draft.

    auto means float32 on a CPU and the target's stored dtype on a GPU. A GPU without native
    bfloat16 (before Ampere) uses float16 instead.
    """
    if dtype != "auto":
        return dtype_named(dtype, "dtype")
    stored = stored_dtype(name, revision)
    if device.type == "cpu" or stored not in (torch.bfloat16, torch.float16):
        return torch.float32
    return stored if stored == torch.float16 or has_native_bf16(device) else torch.float16


def place_draft(draft: Network, target: PreTrainedModel) -> Network:
    """Move a draft to the device of the target's embedding, in the target's dtype."""
    device = target.get_input_embeddings().weight.device
    return draft.to(device, target.dtype)  # type: ignore[arg-type]  # Module's weight is untyped
