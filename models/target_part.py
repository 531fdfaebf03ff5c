"""A target of which one process holds a part: some layers, the embedding, the LM head."""

import hashlib
import json
import re
from collections.abc import Collection, Iterable
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import cached_file, extract_commit_hash

from pipedraft.models.target import check_family, load_target
from pipedraft.pretrained import (
    check_finite,
    check_layers,
    check_tensors,
    explained,
    load_config,
    load_generation_config,
    open_weights,
    read_config,
    weight_files,
)

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
    fetched from the Hub). Where the names in the files are not exactly those of the modules (as
    mixtral's experts, or weights that are missing) the model is loaded whole, with all checks of
    ``load_target``, and what is not wanted is dropped.

    Args:
        layers: indices of decoder layers.
        has_embedding: also the token embedding.
        has_head: also the final norm and the LM head.

    Raises:
        ValueError: as ``load_target``.
    """
    check_family(read_config(name_or_path, revision).get("model_type"), name_or_path)
    config = load_config(name_or_path, revision)
    files = weight_files(name_or_path, revision)
    check_layers(config.to_dict(), files, name_or_path)
    with torch.device("meta"), explained("target", name_or_path):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="sdpa", trust_remote_code=False
        )
    wanted = _wanted(model, layers, has_embedding, has_head)
    if not _names_agree(model, files):
        model = load_target(name_or_path, revision=revision, dtype=dtype, device=device)
        _drop(model, wanted)
        model.config.loaded_revision = revision
        return model
    tensors = _read(name_or_path, revision, {name: files[name] for name in wanted})
    own = model.state_dict()
    reshaped = {name for name, tensor in tensors.items() if tensor.shape != own[name].shape}
    check_tensors({"of another shape": reshaped}, "target", name_or_path)
    model.load_state_dict(
        {name: tensor.to(device, dtype) for name, tensor in tensors.items()},
        strict=False,
        assign=True,
    )
    check_finite(model, "target", name_or_path)
    model.tie_weights()
    decoder = model.get_decoder()
    decoder.rotary_emb = type(decoder.rotary_emb)(config=decoder.config).to(device)
    model.generation_config = load_generation_config(name_or_path, revision, config)
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


def _names_agree(model: PreTrainedModel, files: Collection[str]) -> bool:
    """The files hold the weights of the modules under their names, and nothing more that counts."""
    own, found = set(model.state_dict()), set(files)
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    further = {name for name in found - own if not any(re.search(x, name) for x in ignored)}
    if model.config.get_text_config().tie_word_embeddings:
        own.discard("lm_head.weight")
    return not further and own <= found


def _read(name: str, revision: str | None, files: dict[str, str]) -> dict[str, torch.Tensor]:
    tensors = {}
    for file_name in sorted(set(files.values())):
        with open_weights(name, revision, file_name) as file:
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
    for tensor, file in sorted(weight_files(name, revision).items()):
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
