"""What a fine-tuned target has changed of the parts that a FlexSpec draft copies of its target.

    python -m pipedraft.models scope --base assets/target --target out/tuned/best

In scope is what changes layers 1 .. L-1 alone: embedding, last block, final norm and LM head are
those of the base, and a draft made for the base loads on what came of it.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from pipedraft.models.layers import LayerConfig
from pipedraft.models.target_part import load_target_part

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
COPIED_SETTINGS = ("rms_norm_eps", "rope_parameters")
"""Of ``LayerConfig``: what the last block computes besides its weights; shapes show in these."""


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


def _copied_part(name: str, *, is_weightless: bool = False) -> Any:
    """A target with only what drafts copy in memory; weightless: only names."""
    part = load_target_part(name, layers=(), has_embedding=False, has_head=False)
    if is_weightless:
        return part
    last = part.get_decoder().config.num_hidden_layers - 1
    return load_target_part(name, layers=(last,), has_embedding=True, has_head=True)


def copied_modules(target: Any) -> dict[str, nn.Module]:
    """Modules with weights of embedding, last block, final norm and LM head, in this order."""
    decoder = target.get_decoder()
    parts = (decoder.embed_tokens, decoder.layers[-1], decoder.norm, target.get_output_embeddings())
    names = {module: name for name, module in target.named_modules()}
    leaves = [module for part in parts for module in part.modules() if module._parameters]
    return {names[module]: module for module in leaves}


def changed_modules(base: Any, evolved: Any) -> list[str]:
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


def targeted_modules(base: Any, folder: Path) -> list[str]:
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
