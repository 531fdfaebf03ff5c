"""Store hidden states in a folder with shards and index.json, which is written first.

A shard is a safetensors file, complete or absent. It contains whole rows from the data set, one
after another, without padding:

    rows            int64 [R]       indices in the data set, validation rows after training rows
    layer.I         [M, H]          raw states after layer I; layer L is before the final norm
    layer.I.scale   float32 [M]     int8 only: factor for the stored integers at each position

The embeddings (layer 0) are not stored, because they follow from the token ids.
"""

# M positions in sequences, H hidden

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import torch
from msgspec import Struct
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ...data_recipes.recipe import TokenizedData
from ...data_recipes.table import Rows
from ...files import Values
from ...models.target_part import weights_identity
from ...models.transformer.fingerprint import template_hash
from ..config import RunConfig

INDEX = "index.json"
FORMAT = 3
"""Part of every identity: increase it when a stored tensor changes its meaning."""
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
}


# -- one layer ------------------------------------------------------------------------------


def encode(hidden_MH: Tensor, dtype: str, layer: int) -> dict[str, Tensor]:
    """Return a shard's tensors for one layer, by name.

    int8 stores round(127 x / max|x|) and the scale max|x| / 127, with the maximum at each position.
    """
    name = f"layer.{layer}"
    if dtype == "int8":
        scale_M = hidden_MH.float().abs().amax(-1) / 127
        # A state of zeros has scale 0 and must not become NaN.
        divisor_M1 = scale_M.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
        return {name: (hidden_MH / divisor_M1).round().to(torch.int8), f"{name}.scale": scale_M}
    return {name: hidden_MH.to(DTYPES[dtype])}


def decode(stored_MH: Tensor, scale_M: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return hidden states stored by ``encode``."""
    if scale_M is None:
        return stored_MH.to(dtype)
    # Multiplied in float32 and rounded once.
    return (stored_MH * scale_M[..., None]).to(dtype)


def bytes_per_token(num_layers: int, hidden_size: int, dtype: str) -> int:
    return num_layers * (hidden_size * DTYPES[dtype].itemsize + 4 * (dtype == "int8"))


# -- identity -------------------------------------------------------------------------------


def data_identity(split: str, dataset: Rows, *, masks: bool = False) -> dict[str, int | str]:
    """Return a split's row and token counts, and a hash of its ids.

    Args:
        masks: also hash the loss masks, which hidden states do not depend on.
    """
    digest, num_tokens = hashlib.sha256(), 0
    for lengths, flat in dataset.pieces("input_ids"):
        # Lengths count, too: the same ids may be cut into other rows.
        digest.update(lengths.astype(np.int32).tobytes())
        digest.update(flat.astype(np.int32).tobytes())
        num_tokens += len(flat)
    tokens = {f"{split}_rows": len(dataset), f"{split}_tokens": num_tokens}
    found: dict[str, int | str] = {**tokens, f"{split}_ids": digest.hexdigest()}
    if masks:
        digest = hashlib.sha256()
        for _, flat in dataset.pieces("loss_mask"):
            digest.update(flat.astype(np.int8).tobytes())
        found[f"{split}_masks"] = digest.hexdigest()
    return found


def identity_of(
    run: RunConfig,
    target_config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    data: TokenizedData,
) -> dict[str, int | str]:
    """Return the identity of a run's hidden states. A dump for the run must have the same one.

    Args:
        target_config: configuration of the target's decoder.
    """
    assert run.target is not None
    return {
        "format": FORMAT,
        "target_weights": weights_identity(run.target, run.target_revision),
        "num_layers": target_config.num_hidden_layers,
        "hidden_size": target_config.hidden_size,
        "tokenizer": template_hash(tokenizer),
        **data_identity("train", data.train),
        **data_identity("valid", data.valid),
    }


WHAT_DIFFERS = {"format": "another version of pipedraft", "tokenizer": "another tokenizer"}


def difference(found: Mapping[str, object], wanted: Mapping[str, object]) -> str | None:
    """Describe the first field in which two identities differ. Return None if they are equal."""
    for name, value in wanted.items():
        if found.get(name) != value:
            side = "other data" if name.startswith(("train_", "valid_")) else "another target"
            what = WHAT_DIFFERS.get(name, side)
            return f"{what} ({name}: {_short(found.get(name))} != {_short(value)})"
    return None


def _short(value: object) -> object:
    return f"{value[:18]}..." if isinstance(value, str) and len(value) > 24 else value


# -- what a dump says about itself --------------------------------------------------------------


class ReadSettings(Struct):
    """Settings that readers need."""

    layers: list[int]
    dtype: Literal["fp32", "bf16", "int8"]


class Index(Struct):
    """Contents of index.json. ``shard_tokens`` counts each shard's tokens once it is complete."""

    identity: dict[str, int | str]
    settings: Values
    """Settings used to compute hidden states, store them and cut them into shards."""
    bytes_per_token: int
    shard_tokens: list[int]


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def read_index(folder: Path) -> Index:
    """Read a dump's index. Shards may still be missing."""
    path = folder / INDEX
    if not path.is_file():
        what = f"{folder} has no {INDEX}" if folder.is_dir() else f"no folder {folder}"
        raise ValueError(f"features: {what}; make it with pipedraft train features")
    try:
        index = msgspec.json.decode(path.read_bytes(), type=Index)
        msgspec.convert(index.settings, ReadSettings)
        return index
    except ValueError as error:
        raise ValueError(
            f"features: {path} is damaged ({error}); copy it again, or remove it and run "
            "pipedraft train features again"
        ) from error


def open_shard(path: Path) -> safe_open:
    """Open a shard, memory-mapped.

    Raises:
        ValueError: the shard is missing, or its size does not match its header.
    """
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        reason = f"is damaged ({error})" if path.exists() else "is missing"
        raise ValueError(
            f"features: {path} {reason}; run pipedraft train features again, which makes "
            "this shard anew"
        ) from error
