"""Read the files, settings, vocabulary and tensors of heads from other projects.

Pickled files are opened with ``weights_only=True``, which loads tensors and plain values but no
code. A setting or tensor is refused by its name and value if this package cannot express it.
"""

# H hidden, V target vocabulary, U draft vocabulary

import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, LlamaConfig

from ...errors import first_line
from ...files import Values
from ...hub_link import hub_link
from ...model_kinds import check_adapter, check_plain, check_scheme, find_in
from ...pretrained import explained, read_config
from ...weights import tensor_shapes
from ..heads.draft import Draft, TargetReference
from ..heads.mtp import MTP_PREFIX
from ..transformer.fingerprint import TargetFiles
from ..transformer.layers import LayerConfig
from .peer_settings import with_one_rope

MAX_BYTES = 2**36
"""Maximum size of a weight file; larger files are no drafts."""
PICKLED = (".bin", ".pt", ".pth")
FAMILIES = ("llama", "qwen2", "qwen3")
"""model_type values for a head's decoder layer."""
UNREAD = ("verifier_norm.", "verifier_lm_head.", "rotary_emb.", "layers.0.self_attn.rotary_emb.")
"""Tensors that belong to the target, or are recomputed from the configuration."""
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"

SIZES = frozenset(
    (
        *("head_dim", "hidden_size", "intermediate_size", "max_position_embeddings"),
        *("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "rope_parameters"),
        "vocab_size",
    )
)
"""Settings that make the shape of a decoder layer."""
NULLS = ("head_dim", "num_key_value_heads")
"""Null gives these another value than leaving them out."""

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

Size = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]


class _Sizes(msgspec.Struct):
    """Bounds of the settings in ``SIZES``; null means transformers' default."""

    hidden_size: Size | None = None
    intermediate_size: Size | None = None
    num_attention_heads: Size | None = None
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    vocab_size: Size | None = None
    max_position_embeddings: Size | None = None
    num_hidden_layers: Size | None = None
    rms_norm_eps: Annotated[float, msgspec.Meta(ge=0)] | None = None
    model_type: str | None = None


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
            said = f"config.json: {error}"
            if found := re.search(r" - at `\$\.(\w+)", said):
                value = settings[found[1]]
                raise self.refuse(found[1], value, said[: found.start()]) from error
            raise ValueError(f"--from: {self.name!r}, {said}; copy it again") from error

    def layer(self, settings: Values, entry: str | None = None) -> LayerConfig:
        """Return the decoder layer's shape, from the tensors if possible, else from config.json.

        Args:
            entry: as in ``with_one_rope``.
        """
        self.convert(settings, _Sizes)
        known = with_one_rope(self, settings, entry)
        family = known.pop("model_type", None)
        given = {key for key, value in known.items() if key in NULLS or value is not None}
        known = {key: known[key] for key in SIZES & given}
        sizes = {"hidden_size": int(self.reference.fingerprint["hidden_size"])}
        sizes["vocab_size"] = self.vocab_size
        for key, weight in self.weights.items():
            if key.endswith("mlp.gate_proj.weight"):  # a size not backed by the file wastes memory
                sizes["intermediate_size"] = len(weight)
        self.check_all(known, **sizes)
        heads = known.get("num_attention_heads")
        is_free = family == "qwen3" and known.get("head_dim") is not None
        if heads and sizes["hidden_size"] % heads and not is_free:
            fix = f"it is to divide hidden_size {sizes['hidden_size']}"
            raise self.refuse("num_attention_heads", heads, fix)
        with explained("--from", self.name):
            if family in FAMILIES:
                config = AutoConfig.for_model(family, **known)
            else:  # heads of unknown families are read as Llama layers
                config = LlamaConfig(**known)
            layer = LayerConfig.from_target(config)
        for key, size in sizes.items():
            if getattr(config, key) != size:
                said = f"which transformers reads as {getattr(config, key)}"
                raise self.refuse(key, settings.get(key), f"{said}, and it is to be {size}")
        self._check_heads(layer, settings)
        return replace(
            layer,
            has_query_key_norm=any("q_norm." in key for key in self.weights),
            has_attention_bias=any(key.endswith("q_proj.bias") for key in self.weights),
        )

    def _check_heads(self, layer: LayerConfig, settings: Values) -> None:
        """Compare the numbers and the size of heads with the tensors."""
        size = layer.head_size
        numbers = {"q_norm": ("head_dim", 1), "q_proj": ("num_attention_heads", layer.num_heads)}
        numbers["k_proj"] = ("num_key_value_heads", layer.num_key_value_heads)
        for name, (key, number) in numbers.items():
            for tensor, weight in self.weights.items():
                if tensor.endswith(f"self_attn.{name}.weight") and len(weight) != number * size:
                    fix = f"with heads of {size} it makes {number * size} rows of {tensor}, which"
                    raise self.refuse(key, settings.get(key), f"{fix} has {len(weight)}")
        if layer.num_heads % layer.num_key_value_heads:
            whole = f"it is to divide the {layer.num_heads} query heads"
            raise self.refuse("num_key_value_heads", layer.num_key_value_heads, whole)
        if size % 2:
            raise self.refuse("head_dim", size, "rotary positions need an even one")

    def check_fused(self, key: str, numbers: object, count: int) -> None:
        """Refuse a list of fused layers that ``fc`` does not read."""
        hidden = int(self.reference.fingerprint["hidden_size"])
        columns = next((w.shape[-1] for k, w in self.weights.items() if k.endswith("fc.weight")), 0)
        if columns != count * hidden:
            fix = f"fc reads {columns} numbers, and {count} layers have {count * hidden}"
            raise self.refuse(key, numbers, fix)

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
            fix = "it names other tokens than d2t, which holds offsets (target id minus draft id)"
            raise self.refuse("t2d", int(t2d.sum()), fix)
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

    def check_tied(self) -> None:
        """Refuse a head that is tied to its embedding if the target's LM head is another one."""
        if not torch.equal(self.target.head_VH, self.target.embedding_VH):
            fix = "it has no LM head, and the target's embedding and LM head differ: SGLang would "
            raise self.refuse("tie_word_embeddings", True, fix + "use the one, vLLM the other")

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
