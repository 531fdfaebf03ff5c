"""A target of which one process holds a part: some layers, the embedding, the LM head."""

import hashlib
import json
import re
from collections.abc import Collection, Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import cached_file, extract_commit_hash

from pipedraft.models.layers import LayerConfig
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
    """Commit of a Hub repository in the cache of downloads: .../snapshots/COMMIT/config.json."""
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


# -- what a fine-tuned target has changed -----------------------------------------------------

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
COPIED_SETTINGS = ("rms_norm_eps", "rope_parameters")
"""Settings of ``LayerConfig`` that the last block computes with; weights show the shapes."""


def out_of_scope(base: str, evolved: str) -> list[str]:
    """Names of the modules outside layers 1 .. L-1 that differ from the base or are adapted.

    A setting that the last block computes with is named as config.SETTING.

    Args:
        base: folder or Hub id of a target.
        evolved: folder or Hub id of another one, or the folder of an adapter.

    Raises:
        ValueError: one of them cannot be read, or they are no versions of one target.
    """
    folder = Path(evolved)
    if (folder / ADAPTER_CONFIG).is_file():
        return targeted_modules(_copied_part(base, is_weightless=True), folder)
    return changed_modules(_copied_part(base), _copied_part(evolved))


def _copied_part(name: str, *, is_weightless: bool = False) -> PreTrainedModel:
    """A target with only what drafts copy in memory; weightless: only names."""
    part = load_target_part(name, layers=(), has_embedding=False, has_head=False)
    if is_weightless:
        return part
    last = part.get_decoder().config.num_hidden_layers - 1
    return load_target_part(name, layers=(last,), has_embedding=True, has_head=True)


def copied_modules(target: PreTrainedModel) -> dict[str, nn.Module]:
    """Modules with weights of embedding, last block, final norm and LM head, in this order."""
    decoder = target.get_decoder()
    parts = (decoder.embed_tokens, decoder.layers[-1], decoder.norm, target.get_output_embeddings())
    names = {module: name for name, module in target.named_modules()}
    leaves = [module for part in parts for module in part.modules() if module._parameters]
    return {names[module]: module for module in leaves}


def changed_modules(base: PreTrainedModel, evolved: PreTrainedModel) -> list[str]:
    """Copied modules whose weights differ by a bit, as float32 numbers.

    Raises:
        ValueError: the numbers of layers differ.
    """
    depths = [len(target.get_decoder().layers) for target in (base, evolved)]
    if depths[0] != depths[1]:
        raise ValueError(
            f"target: {evolved.name_or_path!r} has {depths[1]} layers, the base {depths[0]}; give "
            "two versions of one target"
        )
    modules, others = copied_modules(base), copied_modules(evolved)
    names = [name for name in modules if not _is_same(modules[name], others.get(name))]
    names += [name for name in others if name not in modules]
    layers = [LayerConfig.from_target(x.get_decoder().config).to_dict() for x in (base, evolved)]
    settings = [name for name in COPIED_SETTINGS if layers[0][name] != layers[1][name]]
    return names + [f"config.{name}" for name in settings]


def _is_same(module: nn.Module, other: nn.Module | None) -> bool:
    if other is None:
        return False
    weights, others = (dict(m.named_parameters(recurse=False)) for m in (module, other))
    return weights.keys() == others.keys() and all(
        torch.equal(weight.float(), others[name].float()) for name, weight in weights.items()
    )


def targeted_modules(base: PreTrainedModel, folder: Path) -> list[str]:
    """Copied modules that an adapter of peft holds weights for, whatever their values.

    Args:
        base: the model of the adapter; its weights are not read.

    Raises:
        ValueError: no safetensors weights, or weights that belong to no module of the base.
    """
    try:
        with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as file:
            tensors = list(file.keys())
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"target: the adapter in {str(folder)!r} has no loadable {ADAPTER_WEIGHTS} "
            f"({error}); save it again with safe_serialization"
        ) from error
    known = {name for name, _ in base.named_modules() if name}
    adapted = {_module_of(tensor, known, folder) for tensor in tensors}
    return [name for name in copied_modules(base) if adapted & _with_parents(name)]


def _module_of(tensor: str, known: Iterable[str], folder: Path) -> str:
    """The innermost module of the base in the name of an adapter's tensor."""
    candidates = _with_parents(tensor.removeprefix(PEFT_PREFIX)).intersection(known)
    if not candidates:
        kind = json.loads((folder / ADAPTER_CONFIG).read_text()).get("peft_type")
        raise ValueError(
            f"target: {tensor!r} of the adapter in {str(folder)!r} (peft_type {kind}) belongs to "
            "no module of the base; give an adapter of modules, such as LoRA, or a merged target"
        )
    return max(candidates, key=len)


def _with_parents(name: str) -> set[str]:
    """ "a.b" is {"a", "a.b"}."""
    parts = name.split(".")
    return {".".join(parts[:size]) for size in range(1, len(parts) + 1)}
