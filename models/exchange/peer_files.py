"""Read the files, settings, vocabulary and tensors of heads from other projects.

Pickled files are opened with ``weights_only=True``, which loads tensors and plain values but no
code. A setting or tensor is refused by its name and value if this package cannot express it.
"""

# H hidden, V target vocabulary, U draft vocabulary

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, LlamaConfig

from ...files import Values
from ...hub_link import hub_link
from ...model_kinds import check_adapter, check_plain, check_scheme, find_in
from ...pretrained import explained, first_line, read_config, tensor_shapes
from ..draft import Draft, TargetReference
from ..fingerprint import TargetFiles
from ..layers import LayerConfig
from ..mtp import MTP_PREFIX

MAX_BYTES = 2**36
"""Maximum size of a weight file; larger files are no drafts."""
PICKLED = (".bin", ".pt", ".pth")
FAMILIES = ("llama", "qwen2", "qwen3")
"""model_type values for a head's decoder layer."""
ROPE_TYPES = ("default", "linear", "yarn", "llama3")
UNREAD = ("verifier_norm.", "verifier_lm_head.", "rotary_emb.", "layers.0.self_attn.rotary_emb.")
"""Tensors that belong to the target, or are recomputed from the configuration."""
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"

Weights = dict[str, Tensor]
Head = TypeVar("Head", bound=Draft)
Fields = TypeVar("Fields")


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
    """Read a head's configuration and weights, or a target's MTP layer, from a folder or file."""
    folder, files = place.parent, [place]
    if place.is_dir():
        check_adapter(name, find_in(place), "--from")
        folder, files = place, sorted(place.glob("*.safetensors"))
        files = files or sorted(x for ending in PICKLED for x in place.glob("*" + ending))
    if not files or (len(files) > 1 and files[0].suffix in PICKLED):
        found = f"{len(files)} files ({', '.join(map(str, files))})" if files else "no weights"
        raise ValueError(
            f"--from: {name!r} has {found}; give one file of them, or a folder with "
            "model.safetensors"
        )
    for file in files:
        if file.stat().st_size > MAX_BYTES:
            raise ValueError(f"--from: {str(file)!r} has more than {MAX_BYTES} bytes; no head does")
    if files[0].suffix in PICKLED:
        config, weights = _unpickle(files[0])
    else:
        config, weights = {}, _read_tensors(files)
    if (folder / "config.json").is_file() and not config:
        config = read_config(str(folder), None, field="--from", drops_code=True)
    check_scheme(config, name, "--from")
    check_plain(weights, name, find_in(folder), "--from")
    return config, weights


def _read_tensors(files: list[Path]) -> Weights:
    weights: Weights = {}
    names: list[str] = []
    try:
        for file in files:
            names += tensor_shapes(file)
        prefix = MTP_PREFIX if any(name.startswith(MTP_PREFIX) for name in names) else ""
        for file in files:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  # no mapping
                    if name.startswith(prefix):
                        weights[name] = tensors.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"--from: {str(file)!r} is damaged ({error}); copy it again") from error
    return weights


def _unpickle(file: Path) -> tuple[Values, Weights]:
    """Read tensors and plain values from a torch.save file, and refuse code without running it."""
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
        raise ValueError(
            f"--from: {str(file)!r} is damaged or holds more than tensors ({first_line(error)}); "
            "give the file as its trainer saved it"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"--from: {str(file)!r} holds a {type(content).__name__}, no state_dict")
    state = content.get("state_dict", content)
    config = {} if state is content else content.get("config", {})
    if not isinstance(state, Mapping) or not isinstance(config, dict):
        raise ValueError(f"--from: {str(file)!r} holds no named tensors; give a head's weights")
    for name, value in state.items():
        if not isinstance(value, Tensor) or not value.is_contiguous():
            raise ValueError(f"--from: {str(file)!r} has {name!r}, which is no plain tensor")
    return config, {str(name): value for name, value in state.items()}


# -- a head's parts -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A head as its trainer wrote it, and its target."""

    name: str
    """The name as the user gave it."""
    revision: str | None
    config: Values
    weights: Weights
    target: TargetFiles
    reference: TargetReference

    @property
    def num_layers(self) -> int:
        """Number of the target's layers."""
        return int(self.reference.fingerprint["num_layers"])

    @property
    def vocab_size(self) -> int:
        """Size of the target's vocabulary."""
        return int(self.reference.fingerprint["vocab_size"])

    def refuse(self, key: str, value: object, fix: str) -> ValueError:
        return ValueError(f"--from: {self.name!r} has {key} {value!r}; {fix}")

    def check(self, key: str, value: object, wanted: object) -> None:
        """Refuse a setting that is present, not null, and not ``wanted``."""
        if value not in (None, wanted):
            raise self.refuse(key, value, f"only {wanted!r} can be expressed here")

    def check_all(self, settings: Values, **wanted: object) -> None:
        for key, value in wanted.items():
            self.check(key, settings.get(key), value)

    def convert(self, settings: Values, kind: type[Fields]) -> Fields:
        try:
            return msgspec.convert(settings, kind)
        except msgspec.ValidationError as error:
            raise ValueError(
                f"--from: {self.name!r}, config.json: {error}; copy it again"
            ) from error

    def layer(self, settings: Values) -> LayerConfig:
        """Return the decoder layer's shape, from the tensors if possible, else from config.json."""
        known = {key: value for key, value in settings.items() if key != "architectures"}
        with explained("--from", self.name):
            if settings.get("model_type") in FAMILIES:
                config = AutoConfig.for_model(**known)
            else:
                known.pop("model_type", None)  # heads of unknown families are read as Llama layers
                config = LlamaConfig(**known)
            layer = LayerConfig.from_target(config)
        self.check("hidden_size", layer.hidden_size, self.reference.fingerprint["hidden_size"])
        self.check("vocab_size", config.vocab_size, self.vocab_size)
        rope = config.rope_parameters
        if rope["rope_type"] not in ROPE_TYPES or rope.get("partial_rotary_factor", 1.0) != 1.0:
            known_types = f"known types: {', '.join(ROPE_TYPES)}"
            raise self.refuse("rope_parameters", dict(rope), known_types)
        for key, weight in self.weights.items():
            if key.endswith("mlp.gate_proj.weight"):  # a size not backed by the file wastes memory
                self.check("intermediate_size", layer.intermediate_size, len(weight))
        return replace(
            layer,
            has_query_key_norm=any("q_norm." in key for key in self.weights),
            has_attention_bias=any(key.endswith("q_proj.bias") for key in self.weights),
        )

    def vocabulary(self, weights: Weights, size: int | None) -> tuple[Weights, Tensor]:
        """Return the weights without the vocabulary maps, and every draft token's target id."""
        weights = dict(weights)
        d2t, t2d = weights.pop("d2t", None), weights.pop("t2d", None)
        num_rows = len(weights[HEAD]) if HEAD in weights else self.vocab_size
        self.check("draft_vocab_size", size, num_rows)
        if d2t is None:  # a whole vocabulary needs no map
            if num_rows != self.vocab_size:
                counts = f"{num_rows} of {self.vocab_size} ids"
                raise ValueError(f"--from: {self.name!r} lacks d2t for {counts}")
            return weights, torch.arange(self.vocab_size)
        if d2t.shape != (num_rows,) or d2t.is_floating_point():
            raise self.refuse("d2t", tuple(d2t.shape), f"{num_rows} integers belong to its LM head")
        ids = torch.arange(num_rows) + d2t.long()  # d2t holds offsets, not ids
        self.check_ids("d2t", ids)
        if t2d is not None and not torch.equal(t2d.bool().nonzero()[:, 0], ids.sort().values):
            raise self.refuse("t2d", int(t2d.sum()), "it names other tokens than d2t")
        return weights, ids

    def check_ids(self, key: str, ids: Tensor) -> None:
        """Refuse draft tokens outside the target's vocabulary, or duplicates."""
        if len(ids.unique()) != len(ids) or ids.min() < 0 or ids.max() >= self.vocab_size:
            found = f"{int(ids.min())}..{int(ids.max())}"
            raise self.refuse(key, found, f"ids of 0..{self.vocab_size - 1}, each once")

    def check_shared(self, key: str, theirs: Tensor, targets: Tensor) -> None:
        ours = targets.to(theirs.dtype)
        if theirs.shape != ours.shape or not torch.equal(theirs, ours):
            raise self.refuse(
                key, tuple(theirs.shape), "it is not the target's; give its own --target"
            )

    def fill(self, head: Head, weights: Weights) -> Head:
        """Load these weights, with exactly the head's names, into the head in float32."""
        if (embedding := weights.pop(EMBEDDING, None)) is not None:
            self.check_shared(EMBEDDING, embedding, self.target.embedding_VH)
        weights = {key: x for key, x in weights.items() if not key.startswith(UNREAD)}
        expected = head.state_dict()
        for key in sorted(weights.keys() ^ expected.keys()):
            if key in expected:
                raise ValueError(f"--from: {self.name!r} lacks {key}; copy the head again")
            raise self.refuse("tensor", key, "such a head cannot be expressed here")
        for key, value in weights.items():
            if value.shape != expected[key].shape:
                said = f"its configuration says {tuple(expected[key].shape)}"
                raise self.refuse(key, tuple(value.shape), said)
            if value.is_floating_point() and not value.isfinite().all():
                raise self.refuse(key, "NaN or infinite", "use another copy")
        head.load_state_dict(weights)
        return head.eval().requires_grad_(False)
