"""Load some layers, the embedding or the LM head of a target into one process."""

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
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

from ..gguf_files import local_name
from ..model_kinds import check_numbers, check_tensors
from ..pretrained import (
    auto_class,
    check_whole,
    explained,
    load_config,
    load_generation_config,
    read_config,
    without_cache_scales,
)
from ..weights import check_finite, open_weights, plain_files, same_tensors, weight_files
from .families import check_target
from .speed.rounded import round_target, rounds
from .transformer.decoder import choose_attention, is_tied, materialize, untie
from .transformer.fingerprint import HEAD

SAMPLE_BYTES = 4096  # three samples per tensor: enough to see a training step


def load_target_part(
    name_or_path: str,
    *,
    layers: Collection[int],
    has_embedding: bool,
    has_head: bool,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    may_round: bool = True,
) -> PreTrainedModel:
    """Load parts of a target, and leave everything else on the meta device.

    The revision is kept as ``config.loaded_revision``, for reading more layers later. Only this
    part's tensors are read, one after another, each straight to its device. Only their files are
    fetched from the Hub.

    Args:
        layers: decoder layer indices.
        has_embedding: also load the token embedding.
        has_head: also load the final norm and the LM head.
        dtype, may_round: as ``load_target``.

    Raises:
        ValueError: as ``load_target``.
    """
    stored = read_config(name_or_path, revision)
    check_whole(stored, name_or_path, revision)
    config = load_config(name_or_path, revision)
    check_target(config, name_or_path)
    files = plain_files(name_or_path, revision)
    is_rounded = may_round and rounds(dtype, config, device)
    with torch.device("meta"), explained("target", name_or_path):
        model = auto_class(config).from_config(
            config,
            dtype=torch.float32 if is_rounded else dtype,
            attn_implementation=choose_attention(config),
            trust_remote_code=False,
        )
    model.config.loaded_revision = revision
    # The text part of a larger model has no name of its own.
    model.name_or_path = model.config.name_or_path = str(name_or_path)
    model.eval().requires_grad_(False)
    _untie_another_head(model, files)
    _read(model, files, _wanted(model, layers, has_embedding, has_head), device)
    model.tie_weights()  # after reading: a tied LM head has no tensor of its own
    materialize(model, device)
    if is_rounded:
        round_target(model, dtype)
    model.generation_config = load_generation_config(name_or_path, revision, config)
    return model


def load_more_layers(
    model: PreTrainedModel, layers: Collection[int], device: torch.device | str
) -> None:
    """Read decoder layers left on the meta device by ``load_target_part``.

    If a layer is sharded (FSDP2), each process reads only its own part.
    """
    files = weight_files(str(model.name_or_path), model.config.loaded_revision)
    _read(model, files, _wanted(model, layers, has_embedding=False, has_head=False), device)


def _untie_another_head(model: PreTrainedModel, files: Mapping[str, str]) -> None:
    """Untie the LM head as transformers does, if the files hold one unlike the embedding."""
    if not is_tied(model):
        return
    sources = _sources(model, files, get_model_conversion_mapping(model))
    pair = [sources[key] for key in (HEAD, _embedding_name(model))]
    if not all(len(tensors) == 1 for tensors in pair):  # one of them stands for both
        return
    name, revision = str(model.name_or_path), model.config.loaded_revision
    if not same_tensors(name, revision, files, *(next(iter(tensors)) for tensors in pair)):
        untie(model)


def _embedding_name(model: PreTrainedModel) -> str:
    embedding = model.get_decoder().embed_tokens
    return next(f"{name}.weight" for name, x in model.named_modules() if x is embedding)


def _wanted(
    model: PreTrainedModel, layers: Collection[int], has_embedding: bool, has_head: bool
) -> set[str]:
    """Return this part's names in the state dict, the embedding's for a tied LM head."""
    decoder = model.get_decoder()
    modules: list[nn.Module] = [decoder.layers[index] for index in layers]
    if has_embedding or (has_head and is_tied(model)):
        modules.append(decoder.embed_tokens)
    if has_head:
        modules += [decoder.norm] if is_tied(model) else [decoder.norm, model.lm_head]
    names = {module: name for name, module in model.named_modules()}
    return {f"{names[m]}.{name}" for m in modules for name in m.state_dict()}


def _read(
    model: PreTrainedModel, files: Mapping[str, str], wanted: set[str], device: torch.device | str
) -> None:
    """Fill weights from the files, fusing and renaming tensors by transformers' own rules.

    Raises:
        ValueError: weights missing, unknown, differently shaped or not finite.
    """
    name, revision = str(model.name_or_path), model.config.loaded_revision
    rules = get_model_conversion_mapping(model)
    sources = _sources(model, files, rules)
    state = model.state_dict()
    own, embedding = set(state), _embedding_name(model)
    stands_in = is_tied(model) and embedding not in sources
    if is_tied(model):  # one tensor is enough for both, and some files repeat it
        own.discard(embedding if stands_in else HEAD)
    if stands_in and embedding in wanted:
        wanted = wanted - {embedding} | {HEAD}
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    further = {x for x in sources.keys() - own if not any(re.search(y, x) for y in ignored)}
    if is_tied(model):
        further.discard(HEAD)
    further = without_cache_scales(model, further)
    check_tensors({"missing": own - sources.keys(), "unexpected": further}, "target", name)
    # Processes may outnumber experts: transformers cannot stack none of them.
    nothing = {
        key for key in wanted if isinstance(x := state[key], DTensor) and not x.to_local().numel()
    }
    for key in nothing:
        place, _, attribute = key.rpartition(".")
        empty = nn.Parameter(torch.empty_like(state[key], device=device), requires_grad=False)
        setattr(model.get_submodule(place), attribute, empty)
    chosen = {tensor for key in wanted - nothing for tensor in sources[key]}
    opened = {
        file: open_weights(name, revision, file)
        for file in sorted({files[tensor] for tensor in chosen})
    }
    # Slices: a sharded weight reads only its part, and nothing reads a whole file.
    slices = {tensor: opened[files[tensor]].get_slice(tensor) for tensor in chosen}
    check_numbers({x: part.get_dtype() for x, part in slices.items()}, name, "target")
    options = LoadStateDictConfig(
        device_map={"": device},
        dtype=model.dtype,
        weight_mapping=rules,  # type: ignore[arg-type]  # annotated as their base class
    )
    with explained("target", name):
        found, _ = convert_and_load_state_dict_in_model(model, slices, options)
    reshaped = {key for key, *_ in found.mismatched_keys}
    check_tensors({"of another shape": reshaped | found.conversion_errors.keys()}, "target", name)
    if stands_in and HEAD in wanted:
        model.get_decoder().embed_tokens.weight = model.lm_head.weight
    model.requires_grad_(False)
    check_finite(model, "target", name)


def _sources(
    model: PreTrainedModel, tensors: Iterable[str], rules: Iterable[WeightTransform]
) -> dict[str, set[str]]:
    """Return, by weight name, the names of the file tensors that make up the weight."""
    own, prefix = model.state_dict(), model.base_model_prefix
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    sources = defaultdict(set)
    for tensor in tensors:
        key, _ = rename_source_key(tensor, renamings, converters, prefix, own)
        sources[key].add(tensor)
    return sources


def weights_identity(name: str, revision: str | None = None) -> str:
    """Identify a target's weights without reading them all.

    For a folder, hash each tensor's name, type, shape and some bytes. Training changes a whole
    matrix, so it changes these bytes, too. For a Hub repository, return its commit.

    Raises:
        ValueError: no safetensors weights there.
    """
    name = local_name(name)
    folder = Path(name)
    if not folder.is_dir():
        read_config(name, revision)  # into the cache: .../snapshots/COMMIT/config.json
        file = cached_file(name, "config.json", revision=revision)
        return f"commit:{extract_commit_hash(file, None)}"
    digest = hashlib.sha256()
    for tensor, file in sorted(weight_files(name, revision).items()):
        digest.update(_sample(folder / file, tensor))
    return f"sampled:{digest.hexdigest()}"


def _sample(path: Path, tensor: str) -> bytes:
    """Return a tensor's header entry, and bytes from its start, middle and end."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(header_bytes))[tensor]
        start, stop = entry.pop("data_offsets")
        size, kept = stop - start, b""
        for place in (0, size // 2, max(size - SAMPLE_BYTES, 0)):
            file.seek(8 + header_bytes + start + place)
            kept += file.read(min(size - place, SAMPLE_BYTES))
    return json.dumps([tensor, entry], sort_keys=True).encode() + kept
