"""Hidden states of a target on disk: how they are stored, and what a dump says about itself.

A dump is a folder of shards and index.json. A shard is a safetensors file that holds whole rows of
the data set, one after another, without padding:

    rows            int64 [R]       places in the data set, validation rows after training rows
    layer.I         [M, H]          states after layer I, raw; index L is before the final norm
    layer.I.scale   float32 [M]     int8 alone: states are integers times their position's scale

The embeddings (layer 0) are not stored: they follow from the token ids.
"""

# M positions of texts, H hidden

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pipedraft.data_recipes.recipe import TokenizedData
from pipedraft.files import file_damage, publish
from pipedraft.models.fingerprint import template_hash
from pipedraft.models.target_part import weights_identity

INDEX = "index.json"
FORMAT = 1
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
    """What ``encode`` kept of the states."""
    if scale_M is None:
        return stored_MH.to(dtype)
    return (stored_MH * scale_M[..., None]).to(dtype)


def bytes_per_token(num_layers: int, hidden_size: int, dtype: str) -> int:
    return num_layers * (hidden_size * DTYPES[dtype].itemsize + 4 * (dtype == "int8"))


# -- identity -------------------------------------------------------------------------------


def _ids(dataset: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Lengths and ids of rows, piece by piece."""
    columns = dataset.select_columns(["input_ids"]).with_format("arrow")
    for start in range(0, len(dataset), 10_000):
        ids = columns[start : start + 10_000]["input_ids"].combine_chunks()
        yield ids.value_lengths().to_numpy(), ids.flatten().to_numpy()


def row_lengths(dataset: Any) -> list[int]:
    return [int(length) for lengths, _ in _ids(dataset) for length in lengths]


def data_identity(split: str, dataset: Any) -> dict[str, int | str]:
    """Rows, tokens and a hash of the ids of one side of the data, whatever its masks."""
    digest, num_tokens = hashlib.sha256(), 0
    for lengths, flat in _ids(dataset):
        digest.update(lengths.astype(np.int32).tobytes())
        digest.update(flat.astype(np.int32).tobytes())
        num_tokens += len(flat)
    tokens = {f"{split}_rows": len(dataset), f"{split}_tokens": num_tokens}
    return {**tokens, f"{split}_ids": digest.hexdigest()}


def target_identity(run: Any, target_config: Any) -> dict[str, Any]:
    """Which target a run has.

    Args:
        target_config: of the decoder.
    """
    return {
        "format": FORMAT,
        "target_weights": weights_identity(run.target, run.target_revision),
        "num_layers": target_config.num_hidden_layers,
        "hidden_size": target_config.hidden_size,
    }


def identity_of(
    run: Any, target_config: Any, tokenizer: Any, data: TokenizedData
) -> dict[str, Any]:
    """What the states of a run depend on: a dump with another identity cannot replace its target.

    Args:
        target_config: of the decoder.
    """
    return {
        **target_identity(run, target_config),
        "tokenizer": template_hash(tokenizer),
        **data_identity("train", data.train),
        **data_identity("valid", data.valid),
    }


WHAT_DIFFERS = {"format": "another version of pipedraft", "tokenizer": "another tokenizer"}


def difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """The first field in which two identities differ, with both values; None if they agree."""
    for name, value in wanted.items():
        if found.get(name) != value:
            side = "other data" if name.startswith(("train_", "valid_")) else "another target"
            what = WHAT_DIFFERS.get(name, side)
            return f"{what} ({name}: {_short(found.get(name))} != {_short(value)})"
    return None


def _short(value: Any) -> Any:
    return f"{value[:18]}..." if isinstance(value, str) and len(value) > 24 else value


# -- errors ---------------------------------------------------------------------------------


@dataclass
class LayerError:
    """Sums over the states of one layer, so that shards add up."""

    max_abs: float = 0.0
    squared_error: float = 0.0
    squared: float = 0.0

    def add(self, hidden_MH: Tensor, decoded_MH: Tensor) -> None:
        error_MH = decoded_MH.float() - hidden_MH.float()
        if error_MH.numel():
            self.max_abs = max(self.max_abs, float(error_MH.abs().max()))
        self.squared_error += float(error_MH.square().sum(dtype=torch.float64))
        self.squared += float(hidden_MH.float().square().sum(dtype=torch.float64))

    def merge(self, other: "LayerError") -> None:
        self.max_abs = max(self.max_abs, other.max_abs)
        self.squared_error += other.squared_error
        self.squared += other.squared

    def figures(self) -> dict[str, float]:
        relative = (self.squared_error / max(self.squared, 1e-300)) ** 0.5
        return {"max_abs": self.max_abs, "relative_rms": relative}


@dataclass
class TeacherError:
    """KL(teacher of the states || teacher of the stored ones), over some positions of a shard."""

    positions: int = 0
    sum: float = 0.0
    max: float = 0.0

    def merge(self, other: "TeacherError") -> None:
        self.positions += other.positions
        self.sum += other.sum
        self.max = max(self.max, other.max)

    def figures(self) -> dict[str, float]:
        mean = self.sum / max(self.positions, 1)
        return {"kl_mean": mean, "kl_max": self.max, "positions": self.positions}


# -- shards and the index -------------------------------------------------------------------


@dataclass
class ShardRecord:
    """What is known of a complete shard."""

    file: str
    sha256: str
    bytes: int
    tokens: int
    layers: dict[str, LayerError] = field(default_factory=dict)
    teacher: TeacherError = field(default_factory=TeacherError)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ShardRecord":
        layers = {name: LayerError(**sums) for name, sums in values["layers"].items()}
        return cls(**{**values, "layers": layers, "teacher": TeacherError(**values["teacher"])})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def shard_damage(folder: Path, record: ShardRecord, *, deep: bool) -> str | None:
    """How a shard differs from what was written, None if it does not.

    Args:
        deep: also read it all.
    """
    found = file_damage(folder / record.file, record.bytes, record.sha256 if deep else None)
    return None if found is None else f"it {found}"


def publish_json(path: Path, values: dict[str, Any]) -> None:
    publish(path, lambda place: place.write_text(json.dumps(values, indent=1) + "\n"))


def publish_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    publish(path, lambda place: save_file(tensors, place))


def open_shard(path: Path) -> Any:
    """Memory-mapped.

    Raises:
        ValueError: it is not safetensors.
    """
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"features: {path} cannot be read ({error}); dump it again") from error


def read_index(folder: Path) -> dict[str, Any]:
    """
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
        index = json.loads(path.read_text())
        index["shards"] = [ShardRecord.from_dict(values) for values in index["shards"]]
        index["identity"]["format"], index["settings"]["layers"], index["settings"]["dtype"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"features: {path} is damaged ({type(error).__name__}: {error}); copy it again, or "
            "remove it and run python -m pipedraft.train.features again"
        ) from error
    return index
