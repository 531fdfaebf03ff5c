"""Read the safetensors files of a model, from a folder or the Hub."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor
from transformers.utils import cached_file

from .errors import first_line
from .files import read_json
from .gguf_files import local_name
from .model_kinds import check_plain

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
CHECKED_BYTES = 2**32
"""Weights up to this size are checked for NaN and infinity: less than a second."""
BLOCK_ROWS = 4096
"""Rows of two tensors that are compared at a time."""


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def check_finite(model: torch.nn.Module, field: str, name: str) -> None:
    """Raise ValueError if a weight is NaN or infinite. Skip models above ``CHECKED_BYTES``."""
    state = model.state_dict().items()
    own = [(key, x.to_local() if isinstance(x, DTensor) else x) for key, x in state]
    floats = [(key, x) for key, x in own if x.is_floating_point() and x.itemsize > 1]
    floats = [(key, x) for key, x in floats if x.numel() and not x.is_meta]
    if sum(x.nbytes for _, x in floats) > CHECKED_BYTES:
        return
    for key, weight in floats:
        if not torch.stack(torch.aminmax(weight)).isfinite().all():
            raise ValueError(
                f"{field}: {str(name)!r} holds NaN or infinite weights ({key}); use another copy "
                "or an earlier checkpoint"
            )


def model_file(name: str, revision: str | None, file: str) -> str | None:
    """Download a model's file if needed. Return its local path, or None if it does not exist."""
    name = local_name(name)
    return cached_file(name, file, revision=revision, _raise_exceptions_for_missing_entries=False)


def stored_dtypes(name: str, revision: str | None, files: Mapping[str, str]) -> dict[str, str]:
    """Return safetensors' name of each tensor's type."""
    found = {}
    for file in sorted(set(files.values())):
        opened = open_weights(name, revision, file)
        for tensor in opened.keys():  # noqa: SIM118  # no mapping
            found[tensor] = opened.get_slice(tensor).get_dtype()
    return found


def plain_files(
    name_or_path: str, revision: str | None, *, field: str = "target"
) -> dict[str, str]:
    """Return ``weight_files``, or raise ValueError for names of quantized weights."""
    files = weight_files(name_or_path, revision, field=field)
    check_plain(files, str(name_or_path), partial(model_file, name_or_path, revision), field)
    return files


def weight_files(
    name_or_path: str, revision: str | None, *, field: str = "target"
) -> dict[str, str]:
    """Return the name of the safetensors file for each tensor name.

    Raises:
        ValueError: no such file, or a shard in another format.
    """
    index = model_file(name_or_path, revision, INDEX)
    if index is None:
        with open_weights(name_or_path, revision, WEIGHTS, field=field) as file:
            return dict.fromkeys(file.keys(), WEIGHTS)
    try:
        files = read_json(Path(index), INDEX, _Index).weight_map
        wrong = [x for x in files.values() if Path(x).name != x or not x.endswith(".safetensors")]
        if wrong:
            raise ValueError(f"{INDEX}: it names {wrong[0]!r}")
    except ValueError as error:
        raise ValueError(no_weights(field, name_or_path, str(error))) from error
    return files


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return tensor shapes from a safetensors file, by its header alone.

    Raises:
        OSError, SafetensorError: a missing or damaged file.
    """
    if not path.is_file():
        raise FileNotFoundError("no such file")
    with safe_open(path, framework="pt") as file:
        names: list[str] = file.keys()
        return {name: tuple(file.get_slice(name).get_shape()) for name in names}


def open_weights(
    name_or_path: str, revision: str | None, file: str, *, field: str = "target"
) -> safe_open:
    """Open a file from ``weight_files``.

    Raises:
        ValueError: the file is missing or damaged.
    """
    try:
        folder = local_name(name_or_path, field=field)
        return safe_open(cached_file(folder, file, revision=revision), framework="pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(no_weights(field, name_or_path, first_line(error))) from error


def same_tensors(
    name_or_path: str, revision: str | None, files: Mapping[str, str], *pair: str
) -> bool:
    """Return True if two tensors have equal values, read in blocks of rows."""
    first, second = (
        open_weights(name_or_path, revision, files[tensor]).get_slice(tensor) for tensor in pair
    )
    shape = first.get_shape()
    if shape != second.get_shape():
        return False
    blocks = (slice(row, row + BLOCK_ROWS) for row in range(0, shape[0], BLOCK_ROWS))
    return all(torch.equal(first[rows], second[rows]) for rows in blocks)


def no_weights(field: str, name: str, reason: str) -> str:
    return (
        f"{field}: {str(name)!r} has no loadable safetensors weights ({reason}); pickled weights "
        "are never opened, convert them with model.save_pretrained(folder)"
    )
