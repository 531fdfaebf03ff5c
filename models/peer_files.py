"""Files of heads that others trained: where they are, their configuration and their tensors.

Pickled files are opened with ``weights_only=True``: tensors and plain values, no code.
"""

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipedraft.pretrained import hub_link, read_config

MAX_BYTES = 2**36
"""Of one file of weights; larger ones are no draft."""
PICKLED = (".bin", ".pt", ".pth")

MTP_PREFIX = "mtp."
"""Of the names of the MTP layer in a target's files."""

Weights = dict[str, Tensor]
Settings = dict[str, Any]
"""Keys of a configuration, before they are checked."""


def place_of(name: str, revision: str | None) -> Path:
    """Folder or file on this machine, downloaded if need be."""
    place = Path(name)
    if place.exists():
        return place
    if name.count("/") != 1 or name.startswith((".", "/")):
        raise ValueError(f"--from: no folder or file {name!r}; give one, or user/name on the Hub")
    patterns = ["*.json", "*.safetensors", *("*" + ending for ending in PICKLED)]
    with hub_link(f"--from: {name!r}"):
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))


def read_head(name: str, place: Path) -> tuple[Settings, Weights]:
    """Configuration and weights of a folder or a file; of a target its MTP layer alone."""
    folder = place if place.is_dir() else place.parent
    files = [place]
    if place.is_dir():
        files = sorted(folder.glob("*.safetensors"))
        files = files or sorted(x for ending in PICKLED for x in folder.glob("*" + ending))
    if not files or (len(files) > 1 and files[0].suffix in PICKLED):
        found = f"weights in {len(files)} files" if files else "no weights"
        listed = f" ({', '.join(map(str, files))})" if files else ""
        raise ValueError(
            f"--from: {name!r} has {found}{listed}; give one file of them, or a folder with "
            "model.safetensors"
        )
    config: Settings = {}
    weights: Weights = {}
    prefix = _prefix(name, files)
    for file in files:
        if file.stat().st_size > MAX_BYTES:
            raise ValueError(f"--from: {str(file)!r} has more than {MAX_BYTES} bytes; no head does")
        if file.suffix in PICKLED:
            content = _unpickle(file)
            state = content.get("state_dict", content)
            config = content.get("config", {}) if state is not content else {}
        else:
            state = _open(file, prefix)
        if not isinstance(state, Mapping) or not isinstance(config, dict):
            raise ValueError(f"--from: {str(file)!r} holds no named tensors; give a head's weights")
        for key, value in state.items():
            if not isinstance(value, Tensor) or not value.is_contiguous():
                raise ValueError(f"--from: {str(file)!r} has {key!r}, which is no plain tensor")
            weights[str(key)] = value
    if (folder / "config.json").is_file() and not config:
        config = read_config(str(folder), None, field="--from", drops_code=True)
    return config, weights


def _prefix(name: str, files: list[Path]) -> str:
    """What the names of the wanted tensors begin with.

    Raises:
        ValueError: MTP layers in the names of DeepSeek and GLM.
    """
    keys = {key for file in files if file.suffix not in PICKLED for key in _names(file)}
    foreign = sorted(key for key in keys if key.endswith(".eh_proj.weight"))
    if foreign:
        raise ValueError(
            f"--from: {name!r} has {foreign[0]}, an MTP layer as DeepSeek's and GLM's, with "
            "experts; only dense ones of Qwen3.5 (mtp.*) can be expressed here"
        )
    return MTP_PREFIX if any(key.startswith(MTP_PREFIX) for key in keys) else ""


def _names(file: Path) -> list[str]:
    with _opened(file) as tensors:
        return list(tensors.keys())


def _open(file: Path, prefix: str) -> Weights:
    with _opened(file) as tensors:
        keys = [key for key in tensors.keys() if key.startswith(prefix)]  # noqa: SIM118
        return {key: tensors.get_tensor(key) for key in keys}


@contextmanager
def _opened(file: Path) -> Iterator[safe_open]:
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (OSError, SafetensorError) as error:
        raise ValueError(f"--from: {str(file)!r} is damaged ({error}); copy it again") from error


def _unpickle(file: Path) -> Settings:
    """Tensors and plain values of a file of torch.save; anything else is refused unexecuted."""
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ValueError(
            f"--from: {str(file)!r} is damaged or holds more than tensors ({reason}); give the "
            "file as its trainer saved it"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"--from: {str(file)!r} holds a {type(content).__name__}, no state_dict")
    return content
