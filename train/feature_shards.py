"""Hidden states of a target on disk: how they are stored, and what a dump says about itself.

A dump is a folder of shards and index.json. A shard is a safetensors file that holds whole rows of
the data set, one after another, without padding:

    rows            int64 [R]       places in the data set, validation rows after training rows
    layer.I         [M, H]          after layer I, raw; index L is before the final norm
    layer.I.scale   float32 [M]     int8 alone: values are integers times their position's scale
    layer.I.digest  int64 [R]       of each row's part of the two

The embeddings (layer 0) are not stored: they follow from the token ids.
"""

# M positions of sequences, H hidden

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import torch
from datasets import Dataset
from msgspec import Struct, field
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from pipedraft.data_recipes.recipe import TokenizedData
from pipedraft.files import file_damage, publish
from pipedraft.models.fingerprint import template_hash
from pipedraft.models.target_part import weights_identity
from pipedraft.train.config import RunConfig

INDEX = "index.json"
FORMAT = 2
"""Part of every identity: raise it when a stored tensor changes its meaning."""
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.int8,
}


# -- one layer ------------------------------------------------------------------------------


def encode(hidden_MH: Tensor, dtype: str, layer: int) -> dict[str, Tensor]:
    """Tensors of a shard by name.

    int8: x = round(127 x / max|x|) max|x| / 127, with the maximum of each position.

    Raises:
        ValueError: a state is too large for float16.
    """
    name = f"layer.{layer}"
    if dtype == "int8":
        scale_M = hidden_MH.float().abs().amax(-1) / 127
        divisor_M1 = scale_M.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
        return {name: (hidden_MH / divisor_M1).round().to(torch.int8), f"{name}.scale": scale_M}
    if dtype == "fp16" and (largest := float(hidden_MH.abs().max())) > torch.finfo(torch.half).max:
        raise ValueError(
            f"dtype: fp16 ends at 65504, a state after layer {layer} has {largest:.3g}; give bf16"
        )
    return {name: hidden_MH.to(DTYPES[dtype])}


def decode(stored_MH: Tensor, scale_M: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Hidden states as ``encode`` kept them."""
    if scale_M is None:
        return stored_MH.to(dtype)
    return (stored_MH * scale_M[..., None]).to(dtype)


def digest(row: int, parts: Iterable[Tensor]) -> int:
    """First 8 bytes of the SHA-256 of a row's number and of its part of a layer's tensors."""
    found = hashlib.sha256(row.to_bytes(8, "little"))
    for part in parts:
        found.update(part.contiguous().view(torch.uint8).numpy().data)
    return int.from_bytes(found.digest()[:8], "little", signed=True)


def bytes_per_token(num_layers: int, hidden_size: int, dtype: str) -> int:
    return num_layers * (hidden_size * DTYPES[dtype].itemsize + 4 * (dtype == "int8"))


# -- identity -------------------------------------------------------------------------------


def _ids(dataset: Dataset) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Lengths and ids of rows, piece by piece."""
    columns = dataset.select_columns(["input_ids"]).with_format("arrow")
    for start in range(0, len(dataset), 10_000):
        ids = columns[start : start + 10_000]["input_ids"].combine_chunks()
        yield ids.value_lengths().to_numpy(), ids.flatten().to_numpy()


def row_lengths(dataset: Dataset) -> list[int]:
    return [int(length) for lengths, _ in _ids(dataset) for length in lengths]


def data_identity(split: str, dataset: Dataset) -> dict[str, int | str]:
    """Rows, tokens and a hash of the ids of one side of the data, whatever its masks."""
    digest, num_tokens = hashlib.sha256(), 0
    for lengths, flat in _ids(dataset):
        digest.update(lengths.astype(np.int32).tobytes())
        digest.update(flat.astype(np.int32).tobytes())
        num_tokens += len(flat)
    tokens = {f"{split}_rows": len(dataset), f"{split}_tokens": num_tokens}
    return {**tokens, f"{split}_ids": digest.hexdigest()}


def target_identity(run: RunConfig, target_config: PreTrainedConfig) -> dict[str, int | str]:
    """Weights and shape of a run's target.

    Args:
        target_config: of the decoder.
    """
    assert run.target is not None
    return {
        "format": FORMAT,
        "target_weights": weights_identity(run.target, run.target_revision),
        "num_layers": target_config.num_hidden_layers,
        "hidden_size": target_config.hidden_size,
    }


def identity_of(
    run: RunConfig,
    target_config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    data: TokenizedData,
) -> dict[str, int | str]:
    """Identity of hidden states: a dump with another one cannot replace a run's target."""
    return {
        **target_identity(run, target_config),
        "tokenizer": template_hash(tokenizer),
        **data_identity("train", data.train),
        **data_identity("valid", data.valid),
    }


WHAT_DIFFERS = {"format": "another version of pipedraft", "tokenizer": "another tokenizer"}


def difference(found: Mapping[str, object], wanted: Mapping[str, object]) -> str | None:
    """The first field in which two identities differ, with both values; None if they agree."""
    for name, value in wanted.items():
        if found.get(name) != value:
            side = "other data" if name.startswith(("train_", "valid_")) else "another target"
            what = WHAT_DIFFERS.get(name, side)
            return f"{what} ({name}: {_short(found.get(name))} != {_short(value)})"
    return None


def _short(value: object) -> object:
    return f"{value[:18]}..." if isinstance(value, str) and len(value) > 24 else value


# -- what a dump says about itself --------------------------------------------------------------


class LayerError(Struct):
    """Sums over the hidden states of one layer, so that shards add up."""

    max_abs: float = 0.0
    squared_error: float = 0.0
    squared: float = 0.0

    def add(self, hidden_MH: Tensor, decoded_MH: Tensor) -> None:
        error_MH = decoded_MH.float() - hidden_MH.float()
        if error_MH.numel():
            self.max_abs = max(self.max_abs, float(error_MH.abs().max()))
        self.squared_error += float(error_MH.square().sum(dtype=torch.float64))
        self.squared += float(hidden_MH.float().square().sum(dtype=torch.float64))

    @staticmethod
    def figures(errors: Sequence["LayerError"]) -> dict[str, float]:
        squared_error, squared = (
            sum(getattr(error, name) for error in errors) for name in ("squared_error", "squared")
        )
        relative = (squared_error / max(squared, 1e-300)) ** 0.5
        return {"max_abs": max(error.max_abs for error in errors), "relative_rms": relative}


class TeacherError(Struct):
    """KL(teacher of the hidden states || teacher of the stored ones), over some positions."""

    positions: int = 0
    sum: float = 0.0
    max: float = 0.0

    def add(self, kl_M: Tensor) -> None:
        self.positions += len(kl_M)
        self.sum += float(kl_M.double().sum())
        self.max = max(self.max, float(kl_M.max()))

    @staticmethod
    def figures(errors: Sequence["TeacherError"]) -> dict[str, float]:
        positions = sum(error.positions for error in errors)
        mean = sum(error.sum for error in errors) / max(positions, 1)
        largest = max(error.max for error in errors)
        return {"kl_mean": mean, "kl_max": largest, "positions": positions}


class ShardRecord(Struct):
    """File, size, digest and errors of a complete shard."""

    file: str
    sha256: str
    bytes: int
    tokens: int
    layers: dict[str, LayerError] = field(default_factory=dict)
    teacher: TeacherError = field(default_factory=TeacherError)

    def damage(self, folder: Path, *, deep: bool) -> str | None:
        """Difference of the shard from what was written; None: it has none.

        Args:
            deep: also read it all.
        """
        found = file_damage(folder / self.file, self.bytes, self.sha256 if deep else None)
        return None if found is None else f"it {found}"


class DumpSettings(Struct):
    """How hidden states were computed, stored and cut into shards."""

    layers: list[int]
    dtype: Literal["fp32", "bf16", "fp16", "int8"]
    precision: str
    target_dtype: str
    target_quantization: str | None
    batch_tokens: int
    batch_group: int
    seed: int
    shard_mb: float


class Sidecar(Struct):
    """shard-N.json: a shard of a dump that has no index yet."""

    identity: dict[str, int | str]
    settings: DumpSettings
    shard: ShardRecord


class Index(Struct):
    """index.json: a complete dump."""

    identity: dict[str, int | str]
    settings: DumpSettings
    tokens: int
    bytes: int
    bytes_per_token: int
    seconds: float
    errors: dict[str, dict[str, float]]
    """By layer."""
    teacher: dict[str, float]
    shards: list[ShardRecord]


def publish_json(path: Path, content: Struct) -> None:
    text = json.dumps(msgspec.to_builtins(content), indent=1) + "\n"
    publish(path, lambda place: place.write_text(text))


def read_index(folder: Path) -> Index:
    """The index of a complete dump.

    Raises:
        ValueError: there is no complete dump.
    """
    path = folder / INDEX
    if not folder.is_dir():
        raise ValueError(
            f"features: no folder {folder}; make it with python -m pipedraft.train.features"
        )
    if not path.is_file():
        raise ValueError(
            f"features: {folder} has no {INDEX}, so that it is no dump or not complete; "
            "run python -m pipedraft.train.features again, which goes on with it"
        )
    try:
        return msgspec.json.decode(path.read_bytes(), type=Index)
    except ValueError as error:
        raise ValueError(
            f"features: {path} is damaged ({type(error).__name__}: {error}); copy it again, or "
            "remove it and run python -m pipedraft.train.features again"
        ) from error


def open_shard(path: Path) -> safe_open:
    """Open a shard, memory-mapped.

    Raises:
        ValueError: it is not safetensors.
    """
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"features: {path} cannot be read ({error}); dump it again") from error
