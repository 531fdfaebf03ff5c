"""Files of heads that others trained, and of targets: their configuration and their tensors.

Pickled files are opened with ``weights_only=True``: tensors and plain values, no code.
"""

import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipedraft.models.fingerprint import DECODERS, weights_hash
from pipedraft.pretrained import hub_link, open_weights, read_config, weight_files

MAX_BYTES = 2**36
"""Of one file of weights; larger ones are no draft."""
PICKLED = (".bin", ".pt", ".pth")

MTP_PREFIX = "mtp."
"""Of the names of the MTP layer in a target's files, as Qwen3.5 has them."""
NEXT_LAYER = re.compile(r"(model\.layers\.\d+\.)eh_proj\.weight")
"""DeepSeek-V3 and GLM-4.5 have it as one more layer of the decoder, of these names."""
NEXT_NAMES = {
    "enorm.weight": "pre_fc_norm_embedding.weight",
    "hnorm.weight": "pre_fc_norm_hidden.weight",
    "eh_proj.weight": "fc.weight",
    "shared_head.norm.weight": "norm.weight",
    "shared_head.head.weight": "lm_head.weight",
    "embed_tokens.weight": "embed_tokens.weight",
}

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
            weights[_mtp_name(str(key), prefix)] = value
    if (folder / "config.json").is_file() and not config:
        config = read_config(str(folder), None, field="--from", drops_code=True)
    return config, weights


def _prefix(name: str, files: list[Path]) -> str:
    """Prefix of the names of the wanted tensors.

    Raises:
        ValueError: several MTP layers.
    """
    keys = {key for file in files if file.suffix not in PICKLED for key in _names(file)}
    found = {match[1] for key in keys if (match := NEXT_LAYER.fullmatch(key))}
    found |= {MTP_PREFIX for key in keys if key.startswith(MTP_PREFIX)}
    if len(found) > 1:
        listed = ", ".join(prefix + "*" for prefix in sorted(found))
        raise ValueError(f"--from: {name!r} has several MTP layers ({listed}); one can be run here")
    return found.pop() if found else ""


def _mtp_name(key: str, prefix: str) -> str:
    """Qwen3.5's name of a tensor of an MTP layer."""
    if prefix in ("", MTP_PREFIX):
        return key
    key = key.removeprefix(prefix)
    return MTP_PREFIX + NEXT_NAMES.get(key, f"layers.0.{key}")


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


# -- the target, without loading it ---------------------------------------------------------


@dataclass(frozen=True)
class TargetFiles:
    """Files of a target's folder that an export or an import needs."""

    config: dict[str, Any]
    """config.json."""
    weights: dict[str, Tensor]
    """By the target's names: embedding, final norm, and an LM head that is not tied."""
    fingerprint: dict[str, int | str]

    @property
    def embedding_VH(self) -> Tensor:
        return [*self.weights.values()][0]

    @property
    def norm_H(self) -> Tensor:
        return [*self.weights.values()][1]

    @property
    def head_VH(self) -> Tensor:
        """A tied one is the embedding."""
        return [*self.weights.values(), self.embedding_VH][2]


def read_target(name: str, revision: str | None) -> TargetFiles:
    """Read the configuration and the three weights that the fingerprint covers.

    Raises:
        ValueError: no such target, or no safetensors weights.
    """
    config = read_config(name, revision)
    sizes = config.get("text_config", config)
    files = weight_files(name, revision)
    prefix = next((p for p in DECODERS if p + "embed_tokens.weight" in files), None)
    if prefix is None:
        raise ValueError(
            f"target: {name!r} names its embedding in none of the ways known, "
            f"{' and '.join(p + 'embed_tokens.weight' for p in DECODERS)}; give another --target"
        )
    keys = [prefix + "embed_tokens.weight", prefix + "norm.weight"]
    is_tied = sizes.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    if "lm_head.weight" in files and not is_tied:
        keys.append("lm_head.weight")
    weights = []
    for key in keys:
        with open_weights(name, revision, files[key]) as file:
            weights.append(file.get_tensor(key))
    fingerprint = {
        "hidden_size": sizes["hidden_size"],
        "vocab_size": sizes["vocab_size"],
        "num_layers": sizes["num_hidden_layers"],
        "hash": weights_hash(weights),
    }
    return TargetFiles(config, dict(zip(keys, weights, strict=True)), fingerprint)
