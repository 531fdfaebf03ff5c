"""A target of which one process holds a part: some layers, the embedding, the LM head."""

import hashlib
import json
from collections.abc import Collection, Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.utils import cached_file, extract_commit_hash

from pipedraft.models.target import check_family, load_target, read_config

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
SAMPLE_BYTES = 4096


def load_target_part(
    name_or_path: str,
    *,
    layers: Collection[int],
    has_embedding: bool,
    has_head: bool,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> PreTrainedModel:
    """Load some decoder layers of a model; everything else stays on the meta device.

    The revision is kept as ``config.loaded_revision``: more layers may be read later.

    Only the tensors of the part are read from the safetensors files (and only their files are
    fetched from the Hub). A family whose checkpoint names differ from its modules' (mixtral's
    experts) is loaded whole, and what is not wanted is dropped.

    Args:
        layers: indices of decoder layers.
        has_embedding: also the token embedding.
        has_head: also the final norm and the LM head.

    Raises:
        ValueError: as ``load_target``.
    """
    check_family(read_config(name_or_path, revision).get("model_type"), name_or_path)
    config = AutoConfig.from_pretrained(name_or_path, revision=revision)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    wanted = _wanted(model, layers, has_embedding, has_head)
    files = _files(name_or_path, revision)
    if not wanted <= files.keys():
        model = load_target(name_or_path, revision=revision, dtype=dtype, device=device)
        _drop(model, wanted)
        model.config.loaded_revision = revision
        return model
    tensors = _read(name_or_path, revision, {name: files[name] for name in wanted})
    missing = model.load_state_dict(
        {name: tensor.to(device, dtype) for name, tensor in tensors.items()},
        strict=False,
        assign=True,
    )
    assert not missing.unexpected_keys, missing.unexpected_keys
    model.tie_weights()
    decoder = model.get_decoder()
    decoder.rotary_emb = type(decoder.rotary_emb)(config=decoder.config).to(device)
    model.generation_config = _generation_config(name_or_path, revision, model)
    model.config.loaded_revision = revision
    return model.eval().requires_grad_(False)


def _wanted(
    model: PreTrainedModel, layers: Collection[int], has_embedding: bool, has_head: bool
) -> set[str]:
    """Names in the state dict of what this part holds; a tied LM head is the embedding."""
    decoder = model.get_decoder()
    is_tied = model.config.get_text_config().tie_word_embeddings
    modules: list[nn.Module] = [decoder.layers[index] for index in layers]
    if has_embedding or (has_head and is_tied):
        modules.append(decoder.embed_tokens)
    if has_head:
        modules += [decoder.norm] if is_tied else [decoder.norm, model.lm_head]
    names = {module: name for name, module in model.named_modules()}
    return {f"{names[m]}.{name}" for m in modules for name in m.state_dict()}


def _files(name: str, revision: str | None) -> dict[str, str]:
    """Tensor name -> file that holds it."""
    index = cached_file(name, INDEX, revision=revision, _raise_exceptions_for_missing_entries=False)
    if index is not None:
        return json.loads(Path(index).read_text())["weight_map"]
    with _open(name, revision, WEIGHTS) as file:
        return dict.fromkeys(file.keys(), WEIGHTS)


def _open(name: str, revision: str | None, file: str) -> safe_open:
    try:
        return safe_open(cached_file(name, file, revision=revision), framework="pt")
    except (OSError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ValueError(
            f"target: {name!r} has no loadable safetensors weights ({reason}); pickled weights "
            "are never opened, convert them with model.save_pretrained(folder)"
        ) from error


def _read(name: str, revision: str | None, files: dict[str, str]) -> dict[str, torch.Tensor]:
    tensors = {}
    for file_name in sorted(set(files.values())):
        with _open(name, revision, file_name) as file:
            here = [tensor for tensor, place in files.items() if place == file_name]
            tensors.update({tensor: file.get_tensor(tensor) for tensor in here})
    return tensors


def _drop(model: PreTrainedModel, wanted: Iterable[str]) -> None:
    """Free every parameter that is not wanted."""
    keep = set(wanted)
    tied = model.lm_head.weight is model.get_decoder().embed_tokens.weight
    for prefix, module in model.named_modules():
        for name, parameter in list(module.named_parameters(prefix, recurse=False)):
            if name not in keep and not (tied and module is model.lm_head):
                empty = nn.Parameter(parameter.to("meta"), requires_grad=False)
                setattr(module, name.rpartition(".")[2], empty)
    model.tie_weights()


def _generation_config(name: str, revision: str | None, model: PreTrainedModel) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(name, revision=revision or "main")
    except OSError:  # no such file
        return GenerationConfig.from_model_config(model.config)


def weights_identity(name: str, revision: str | None = None) -> str:
    """Which weights a target has in all of its layers, without reading them all.

    A folder: a hash over the name, type, shape and some bytes of every tensor, which training a
    matrix changes everywhere. A repository of the Hub: its commit.

    Raises:
        ValueError: no safetensors weights there.
    """
    folder = Path(name)
    if not folder.is_dir():
        return f"commit:{_commit(name, revision)}"
    digest = hashlib.sha256()
    for tensor, file in sorted(_files(name, revision).items()):
        digest.update(_sample(folder / file, tensor))
    return f"sampled:{digest.hexdigest()}"


def _commit(name: str, revision: str | None) -> str:
    """Of a Hub repository, as it is in the cache of downloads: .../snapshots/COMMIT/config.json."""
    read_config(name, revision)
    file = cached_file(name, "config.json", revision=revision)
    commit = extract_commit_hash(file, None)
    assert commit is not None, f"{file} is not in a snapshot"
    return commit


def _sample(path: Path, tensor: str) -> bytes:
    """A tensor's entry in its file's header, and bytes from its start, middle and end."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(header_bytes))[tensor]
        start, stop = entry.pop("data_offsets")
        size, kept = stop - start, b""
        for place in (0, size // 2, max(size - SAMPLE_BYTES, 0)):
            file.seek(8 + header_bytes + start + place)
            kept += file.read(min(size - place, SAMPLE_BYTES))
    return json.dumps([tensor, entry], sort_keys=True).encode() + kept
