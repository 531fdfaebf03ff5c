"""Shared functions to import heads from other projects: files, settings, vocabulary, tensors.

Pickled files are opened with ``weights_only=True``: tensors and plain values, no code. A setting or
tensor that this package cannot express is refused by its name and value.
"""

# H hidden, V target vocabulary, U draft vocabulary

import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, LlamaConfig

from pipedraft.files import Values
from pipedraft.models.draft import Draft, TargetReference
from pipedraft.models.fingerprint import TargetFiles
from pipedraft.models.layers import LayerConfig
from pipedraft.models.mtp import MTP_PREFIX
from pipedraft.pretrained import explained, first_line, hub_link, read_config

MAX_BYTES = 2**36
"""Maximum size of a weight file; larger files are no drafts."""
PICKLED = (".bin", ".pt", ".pth")

NEXT_LAYER = re.compile(r"(model\.layers\.\d+\.)eh_proj\.weight")
"""Names in DeepSeek-V3 and GLM-4.5, which store the MTP layer as an extra decoder layer."""
NEXT_NAMES = {
    "enorm.weight": "pre_fc_norm_embedding.weight",
    "hnorm.weight": "pre_fc_norm_hidden.weight",
    "eh_proj.weight": "fc.weight",
    "shared_head.norm.weight": "norm.weight",
    "shared_head.head.weight": "lm_head.weight",
    "embed_tokens.weight": "embed_tokens.weight",
}

FAMILIES = ("llama", "qwen2", "qwen3")
"""model_type values for a head's decoder layer."""
ROPE_TYPES = ("default", "linear", "yarn", "llama3")
UNREAD = ("verifier_norm.", "verifier_lm_head.", "rotary_emb.", "layers.0.self_attn.rotary_emb.")
"""Tensors that belong to the target, or are recomputed from the configuration."""
EMBEDDING = "embed_tokens.weight"

Weights = dict[str, Tensor]
Head = TypeVar("Head", bound=Draft)
Fields = TypeVar("Fields", bound=msgspec.Struct)


def place_of(name: str, revision: str | None) -> Path:
    """Return the local folder or file, downloaded if needed."""
    place = Path(name)
    if place.exists():
        return place
    if name.count("/") != 1 or name.startswith((".", "/")):
        raise ValueError(f"--from: no folder or file {name!r}; give one, or user/name on the Hub")
    patterns = ["*.json", "*.safetensors", *("*" + ending for ending in PICKLED)]
    with hub_link(f"--from: {name!r}"):
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))


def read_head(name: str, place: Path) -> tuple[Values, Weights]:
    """Read configuration and weights from a folder or a file; from a target only its MTP layer."""
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
    config: Values = {}
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
    """Return the name prefix for the wanted tensors.

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
    """Return Qwen3.5's name for an MTP layer's tensor."""
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


def _unpickle(file: Path) -> Values:
    """Read tensors and plain values from a torch.save file; refuse all else without running it."""
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
        raise ValueError(
            f"--from: {str(file)!r} is damaged or holds more than tensors ({first_line(error)}); "
            "give the file as its trainer saved it"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"--from: {str(file)!r} holds a {type(content).__name__}, no state_dict")
    return content


# -- their parts ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Peer:
    """A head as its trainer wrote it."""

    name: str
    """The name as the user gave it."""
    config: Values
    weights: Weights
    revision: str | None = None

    def refuse(self, key: str, value: object, fix: str) -> ValueError:
        return ValueError(f"--from: {self.name!r} has {key} {value!r}; {fix}")


def size_of(reference: TargetReference) -> int:
    return int(reference.fingerprint["vocab_size"])


def check(peer: Peer, key: str, value: object, wanted: object) -> None:
    if value != wanted:
        raise peer.refuse(key, value, f"only {wanted!r} can be expressed here")


def convert(peer: Peer, settings: Values, kind: type[Fields]) -> Fields:
    try:
        return msgspec.convert(settings, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"--from: {peer.name!r}, config.json: {error}; copy it again") from error


def layer_of(peer: Peer, settings: Values, reference: TargetReference) -> LayerConfig:
    """Return the decoder layer's shape: from the tensors if possible, else from config.json."""
    own, name = peer.weights, peer.name
    kind = settings.get("model_type")
    known = {key: value for key, value in settings.items() if key != "architectures"}
    with explained("--from", name):
        if kind in FAMILIES:
            config = AutoConfig.for_model(**known)
        else:
            known.pop("model_type", None)  # heads of unknown families are read as Llama layers
            config = LlamaConfig(**known)
        layer = LayerConfig.from_target(config)
    check(peer, "hidden_size", layer.hidden_size, reference.fingerprint["hidden_size"])
    check(peer, "vocab_size", config.vocab_size, size_of(reference))
    rope = config.rope_parameters
    if rope["rope_type"] not in ROPE_TYPES or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise peer.refuse("rope_parameters", dict(rope), f"known types: {', '.join(ROPE_TYPES)}")
    gate = next((x for key, x in own.items() if key.endswith("mlp.gate_proj.weight")), None)
    # A size not backed by the file would waste memory.
    if gate is not None:
        check(peer, "intermediate_size", layer.intermediate_size, gate.shape[0])
    return replace(
        layer,
        has_query_key_norm=any("q_norm." in key for key in own),
        has_attention_bias=any(key.endswith("q_proj.bias") for key in own),
    )


def vocabulary_of(
    peer: Peer, weights: Weights, size: int | None, reference: TargetReference
) -> tuple[Weights, Tensor]:
    """Return the weights without the vocabulary maps, and every draft token's target id."""
    weights = dict(weights)
    d2t, t2d = weights.pop("d2t", None), weights.pop("t2d", None)
    num_tokens, head = size_of(reference), weights.get("lm_head.weight")
    num_rows = num_tokens if head is None else len(head)
    check(peer, "draft_vocab_size", size or num_rows, num_rows)
    if d2t is None:  # a whole vocabulary needs no map
        if num_rows != num_tokens:
            raise ValueError(f"--from: {peer.name!r} lacks d2t for {num_rows} of {num_tokens} ids")
        return weights, torch.arange(num_tokens)
    if d2t.shape != (num_rows,) or d2t.is_floating_point():
        raise peer.refuse("d2t", tuple(d2t.shape), f"{num_rows} integers belong to its LM head")
    ids = torch.arange(num_rows) + d2t.long()  # d2t holds offsets, not ids
    check_ids(peer, "d2t", ids, num_tokens)
    if t2d is not None and not torch.equal(t2d.bool().nonzero()[:, 0], ids.sort().values):
        raise peer.refuse("t2d", int(t2d.sum()), "it names other tokens than d2t")
    return weights, ids


def check_ids(peer: Peer, key: str, ids: Tensor, num_tokens: int) -> None:
    """Refuse draft tokens outside the target's vocabulary, or duplicates."""
    if len(ids.unique()) != len(ids) or not bool(((ids >= 0) & (ids < num_tokens)).all()):
        found = f"{int(ids.min())}..{int(ids.max())}"
        raise peer.refuse(key, found, f"ids of 0..{num_tokens - 1}, each once")


def fill(peer: Peer, head: Head, weights: Weights, found: TargetFiles) -> Head:
    """Load these weights into the head, in float32; names must match exactly."""
    embedding = weights.pop(EMBEDDING, None)
    if embedding is not None:
        check_shared(peer, EMBEDDING, embedding, found.embedding_VH)
    weights = {key: x for key, x in weights.items() if not key.startswith(UNREAD)}
    expected = head.state_dict()
    for key in sorted(weights.keys() ^ expected.keys()):
        if key in expected:
            raise ValueError(f"--from: {peer.name!r} lacks {key}; copy the head again")
        raise peer.refuse("tensor", key, "such a head cannot be expressed here")
    for key, value in weights.items():
        if value.shape != expected[key].shape:
            raise peer.refuse(
                key, tuple(value.shape), f"its configuration says {tuple(expected[key].shape)}"
            )
        if value.is_floating_point() and not value.isfinite().all():
            raise peer.refuse(key, "NaN or infinite", "use another copy")
    head.load_state_dict(weights)
    return head.eval().requires_grad_(False)


def check_shared(peer: Peer, key: str, theirs: Tensor, targets: Tensor) -> None:
    ours = targets.to(theirs.dtype)
    if theirs.shape != ours.shape or not torch.equal(theirs, ours):
        raise peer.refuse(key, tuple(theirs.shape), "it is not the target's; give its own --target")
