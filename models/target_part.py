"""A target of which one process holds a part: some layers, the embedding, the LM head."""

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import cached_file, extract_commit_hash

from pipedraft.models.families import check_target, choose_attention, materialize
from pipedraft.models.layers import LayerConfig
from pipedraft.pretrained import (
    check_finite,
    check_tensors,
    check_unquantized,
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

    The revision is kept as ``config.loaded_revision``: more layers may be read later. Only the
    tensors of the part are read from the safetensors files (and only their files are fetched from
    the Hub), one after another, each straight to its device.

    Args:
        layers: indices of decoder layers.
        has_embedding: also the token embedding.
        has_head: also the final norm and the LM head.

    Raises:
        ValueError: as ``load_target``.
    """
    stored = read_config(name_or_path, revision)
    check_unquantized(stored, name_or_path)
    config = load_config(name_or_path, revision)
    check_target(config, name_or_path)
    files = weight_files(name_or_path, revision)
    with torch.device("meta"), explained("target", name_or_path):
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=dtype,
            attn_implementation=choose_attention(config),
            trust_remote_code=False,
        )
    model.config.loaded_revision = revision
    model.eval().requires_grad_(False)
    _read(model, files, _wanted(model, layers, has_embedding, has_head), device)
    model.tie_weights()
    materialize(model, device)
    model.generation_config = load_generation_config(name_or_path, revision, config)
    return model


def load_more_layers(
    model: PreTrainedModel, layers: Collection[int], device: torch.device | str
) -> None:
    """Read decoder layers that ``load_target_part`` left on the meta device.

    Of a layer that is sharded there (FSDP2) each process reads its own part alone.
    """
    files = weight_files(str(model.name_or_path), model.config.loaded_revision)
    _read(model, files, _wanted(model, layers, has_embedding=False, has_head=False), device)


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


def _read(
    model: PreTrainedModel, files: Mapping[str, str], wanted: set[str], device: torch.device | str
) -> None:
    """Fill weights from the files by transformers' own rules, which fuse and rename tensors.

    Raises:
        ValueError: weights that are missing, unknown, of another shape or no numbers.
    """
    name, revision = str(model.name_or_path), model.config.loaded_revision
    rules = get_model_conversion_mapping(model)
    sources = _sources(model, files, rules)
    state = model.state_dict()
    own = set(state)
    if model.config.get_text_config().tie_word_embeddings:
        own.discard("lm_head.weight")
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    further = {x for x in sources.keys() - own if not any(re.search(y, x) for y in ignored)}
    further.discard("lm_head.weight")
    check_tensors({"missing": own - sources.keys(), "unexpected": further}, "target", name)
    # Processes may outnumber experts: transformers cannot stack none of them.
    nothing = {key for key in wanted if isinstance(x := state[key], DTensor) and not _size(x)}
    for key in nothing:
        place, _, attribute = key.rpartition(".")
        empty = nn.Parameter(torch.empty_like(state[key], device=device), requires_grad=False)
        setattr(model.get_submodule(place), attribute, empty)
    chosen = {tensor for key in wanted - nothing for tensor in sources[key]}
    opened = {
        file: open_weights(name, revision, file)
        for file in sorted({files[tensor] for tensor in chosen})
    }
    # Slices, of which a sharded weight reads its part and nothing reads all at once.
    slices = {tensor: opened[files[tensor]].get_slice(tensor) for tensor in chosen}
    options = LoadStateDictConfig(
        device_map={"": device},
        dtype=model.dtype,
        weight_mapping=rules,  # type: ignore[arg-type]  # of their base class, by its maker
    )
    with explained("target", name):
        found, _ = convert_and_load_state_dict_in_model(model, slices, options)
    reshaped = {key for key, *_ in found.mismatched_keys}
    check_tensors({"of another shape": reshaped | found.conversion_errors.keys()}, "target", name)
    model.requires_grad_(False)
    check_finite(model, "target", name)


def _size(weight: DTensor) -> int:
    """Numbers of a tensor that this process holds."""
    return weight.to_local().numel()


def _sources(
    model: PreTrainedModel, tensors: Iterable[str], rules: Iterable[WeightTransform]
) -> dict[str, set[str]]:
    """Weight of the model -> the tensors in its files that it is made of."""
    own, prefix = model.state_dict(), model.base_model_prefix
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    sources = defaultdict(set)
    for tensor in tensors:
        key, _ = rename_source_key(tensor, renamings, converters, prefix, own)
        sources[key].add(tensor)
    return sources


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
    is_adapter = (folder / ADAPTER_CONFIG).is_file()
    try:
        part = _copied_part(base, is_weightless=is_adapter)
    except ValueError as error:  # its field is the target's
        raise ValueError(f"--base{str(error).removeprefix('target')}") from error
    if is_adapter:
        return targeted_modules(part, folder)
    return changed_modules(part, _copied_part(evolved))


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
