"""Import heads from other projects as checkpoints.

Tensors and config.json identify a folder's layout:

    EAGLE-1              SafeAILab's, also as SGLang and vLLM load it: fc [H, 2 H], layers.0.*
    EAGLE-3              SafeAILab's and SGLang's (SpecForge writes it): midlayer.*
    EAGLE-3              vLLM's, from the speculators package: layers.0.*, speculators_model_type
    DFlash, DSpark       their authors', SpecForge's, and vLLM's speculators: hidden_norm
    MTP                  a target's own: mtp.* (Qwen3.5), or an extra decoder layer
                         (DeepSeek-V3, GLM-4.5), if it is a Llama's or a Qwen's
    SPD                  the authors' .pt files, versions 10 and 11

Every setting and tensor is either converted or refused by its name and value. The token embedding
comes from the target; one in the file must equal it. Pickled files are opened with
``weights_only=True``: tensors and plain values, no code.
"""

# H hidden, V target vocabulary, U draft vocabulary

import re
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from pipedraft.files import Values, write_folder
from pipedraft.models.draft import Draft, TargetReference, read_description
from pipedraft.models.eagle import Eagle, EagleConfig
from pipedraft.models.eagle3 import Eagle3, Eagle3Config, default_feature_layers
from pipedraft.models.exchange.card import CARD
from pipedraft.models.exchange.hub import model_card
from pipedraft.models.exchange.peer_blocks import block_head
from pipedraft.models.exchange.peer_files import (
    EMBEDDING,
    FAMILIES,
    Peer,
    check,
    check_ids,
    check_shared,
    convert,
    fill,
    layer_of,
    place_of,
    read_head,
    size_of,
    vocabulary_of,
)
from pipedraft.models.families import norm_factor
from pipedraft.models.fingerprint import TargetFiles, read_target
from pipedraft.models.layers import LayerConfig
from pipedraft.models.mtp import MTP, MTP_PREFIX, MTPConfig, native_parts
from pipedraft.models.spd import SPD, SPDConfig
from pipedraft.pretrained import load_config

UNKNOWN_LAYER = re.compile(r"experts?\.|mlp\.gate\.|_a_proj|kv_b_proj")
"""MTP layer tensors for experts, and for DeepSeek's latent attention."""


class _Fields(msgspec.Struct):
    """A head's settings, except those for its decoder layer."""

    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None
    num_hidden_layers: int = 1
    norm_output: bool | None = None
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    eagle_config: Values = {}
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    sliding_window: int | None = None
    use_sliding_window: bool | None = None
    layer_types: list[str] | None = None


def import_head(
    name: str, target: str, out: Path, *, revision: str | None = None
) -> tuple[Draft, list[Path]]:
    """Write a published head as a checkpoint.

    Args:
        name: folder, weight file or Hub repository.
        target: folder or Hub id of the head's target.
        out: created by one rename when every file is written.
        revision: for the repository.

    Returns:
        The draft, and the files.

    Raises:
        ValueError: an unknown layout, another target, or a setting or tensor that cannot be
            expressed here.
    """
    place = place_of(name, revision)
    peer = Peer(name, *read_head(name, place), revision)
    found = read_target(target, None)
    reference = TargetReference(name=target, fingerprint=found.fingerprint)
    if any(key.startswith("spec_layers.") for key in peer.weights):
        draft: Draft = _spd(peer, found, reference)
    elif any(key.startswith(MTP_PREFIX) for key in peer.weights):
        draft = _mtp(peer, found, reference)
    elif "fc.weight" not in peer.weights:
        raise ValueError(
            f"--from: {name!r} holds no head that is known (no fc.weight, no spec_layers, "
            "no mtp.*, no eh_proj); known: EAGLE-1, EAGLE-3 of SafeAILab, SGLang and speculators, "
            "DFlash, DSpark, SPD's .pt, the MTP layer of a target"
        )
    elif "hidden_norm.weight" in peer.weights:
        draft = block_head(peer, found, reference)
    elif any("hidden_norm." in key for key in peer.weights):
        draft = _eagle3(peer, found, reference)
    else:
        draft = _eagle(peer, found, reference)
    note = {"imported": {"from": name, "revision": revision}}

    def fill(temporary: Path) -> None:
        draft.save(temporary, training=note)
        (temporary / CARD).write_text(model_card(read_description(temporary)))

    return draft, write_folder(out, fill, inputs=[place] if place.is_dir() else [])


# -- layouts --------------------------------------------------------------------------------


def _eagle3(peer: Peer, found: TargetFiles, reference: TargetReference) -> Eagle3:
    is_vllm = "speculators_model_type" in peer.config
    inner = peer.config.get("transformer_layer_config", {}) if is_vllm else {}
    if is_vllm and not (isinstance(inner, dict) and inner.get("model_type") in FAMILIES):
        known = ", ".join(FAMILIES)
        raise peer.refuse("transformer_layer_config", inner, f"its model_type is to be of {known}")
    settings = peer.config | inner
    given = _fields(peer, settings)
    layer = layer_of(peer, settings if not is_vllm else inner, reference)
    width = given.target_hidden_size or layer.hidden_size
    check(peer, "target_hidden_size", width, layer.hidden_size)
    norm_output = bool(given.norm_output)
    if not is_vllm:
        norm_output = bool(given.eagle_config.get("return_hidden_post_norm"))
        # SpecForge's norm_output differs: it says if the LM head reads normed states.
        check(peer, "norm_output", given.norm_output in (None, True), True)
    num_layers = int(reference.fingerprint["num_layers"])
    weights = {key.replace("layers.0.", "midlayer."): value for key, value in peer.weights.items()}
    weights, draft_ids = vocabulary_of(peer, weights, given.draft_vocab_size, reference)
    if len(draft_ids) == size_of(reference):
        # A head without an LM head uses the target's.
        weights.setdefault("lm_head.weight", found.head_VH)
    config = Eagle3Config(
        feature_layers=_feature_layers(peer, given, num_layers),
        num_target_layers=num_layers,
        draft_vocab_size=None if len(draft_ids) == size_of(reference) else len(draft_ids),
        norm_output=norm_output,
        fc_norm=given.fc_norm,
        norm_before_fc=given.norm_before_fc,
        norm_before_residual=given.norm_before_residual,
        query_key_norm=layer.has_query_key_norm,
        attention_bias=layer.has_attention_bias,
        sliding_window=_window(peer, given),
    )
    head = Eagle3(config, layer, reference)
    return fill(peer, head, weights | {"draft_ids": draft_ids}, found)


def _eagle(peer: Peer, found: TargetFiles, reference: TargetReference) -> Eagle:
    _fields(peer, peer.config)
    layer = layer_of(peer, peer.config, reference)
    # Exports contain zero biases, because engines would otherwise read uninitialized memory.
    weights = {
        key.replace("layers.0.", "layer."): value
        for key, value in peer.weights.items()
        if key not in ("fc.bias", "layers.0.self_attn.o_proj.bias") or bool(value.any())
    }
    config = EagleConfig(
        num_target_layers=int(reference.fingerprint["num_layers"]),
        fc_bias="fc.bias" in weights,  # dropped above if all zero
        attention_bias=layer.has_attention_bias,
    )
    return fill(peer, Eagle(config, layer, reference), weights, found)


def _mtp(peer: Peer, found: TargetFiles, reference: TargetReference) -> MTP:
    """Return an MTP layer from a target's weights, or from an export with only some of them.

    DeepSeek's and GLM's layers contain their own copies of the embedding and the LM head. Their
    states are fed back normed, as in SGLang; vLLM norms them only for the LM head.
    """
    settings = load_config(reference.name, None).get_text_config()
    if settings.model_type not in (*FAMILIES, "qwen3_5_text"):
        raise ValueError(
            f"--target: {reference.name!r} is a {settings.model_type}; MTP layers are run for "
            f"{', '.join(FAMILIES)} and qwen3_5, dense ones; train another head for it"
        )
    weights = {key.removeprefix(MTP_PREFIX): value for key, value in peer.weights.items()}
    foreign = next((key for key in sorted(weights) if UNKNOWN_LAYER.search(key)), None)
    if foreign is not None:
        raise peer.refuse("tensor", foreign, "experts and latent attention cannot be expressed")
    if peer.name != reference.name and EMBEDDING not in weights:  # none to compare
        reference.check_fingerprint(read_target(peer.name, peer.revision).fingerprint)
    head_VH = weights.pop("lm_head.weight", None)
    if head_VH is not None:
        check_shared(peer, "shared_head.head", head_VH, found.head_VH)
    config = MTPConfig(num_target_layers=settings.num_hidden_layers)
    parts = config, LayerConfig.of_target_layer(settings)
    if settings.model_type == "qwen3_5_text":
        parts = native_parts(settings)
    return fill(peer, MTP(*parts, reference), weights, found)


# -- settings -------------------------------------------------------------------------------


def _fields(peer: Peer, settings: Values) -> _Fields:
    given = convert(peer, settings, _Fields)
    check(peer, "num_hidden_layers", given.num_hidden_layers, 1)
    check(peer, "hidden_act", given.hidden_act, "silu")
    check(peer, "mlp_bias", given.mlp_bias, False)
    return given


def _feature_layers(peer: Peer, given: _Fields, num_layers: int) -> tuple[int, ...]:
    """Return the fused layers by input: index i is the input of the target's layer i.

    SGLang's eagle_config counts outputs.
    """
    key = "eagle_aux_hidden_state_layer_ids"
    check(peer, "use_aux_hidden_state", given.eagle_config.get("use_aux_hidden_state", True), True)
    numbers, shift = given.eagle_aux_hidden_state_layer_ids, 0
    if numbers is None:
        numbers, shift = given.eagle_config.get(key), 1  # SGLang counts outputs, we count inputs
    if numbers is None:
        return default_feature_layers(num_layers)
    is_known = isinstance(numbers, list) and all(isinstance(x, int) for x in numbers)
    if not is_known or not all(0 <= x + shift <= num_layers for x in numbers):
        raise peer.refuse(key, numbers, f"the target has {num_layers} layers")
    return tuple(x + shift for x in numbers)


def _window(peer: Peer, given: _Fields) -> int | None:
    """Return the layer's sliding window, if ``layer_types`` says that it slides."""
    kind = (given.layer_types or ["full_attention"])[0]
    if kind not in ("full_attention", "sliding_attention"):
        raise peer.refuse("layer_types", given.layer_types, "known: full and sliding attention")
    if kind == "full_attention":
        return None
    if given.sliding_window is None:
        raise peer.refuse("sliding_window", None, "its layer_types says sliding_attention")
    return given.sliding_window


# -- SPD ------------------------------------------------------------------------------------


class _Module(msgspec.Struct):
    """Contents of ``config`` in the authors' file."""

    num_stages: int
    num_spec_layers: int
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int | None = None
    version: int = 11
    draft_token_ids: list[int] | None = None
    aggr_feature_bound: list[int] | None = None
    shallow_hidden_layer_indices: list[list[int]] | None = None
    stage_layers: object = None


def _spd(peer: Peer, found: TargetFiles, reference: TargetReference) -> SPD:
    """Return the head from a file of version 10 (a list of layers per depth) or 11 (anchors).

    Committed rows are read at depth n, whatever trained_with_use_deepest says, because their states
    are known up to the last layer.
    """
    given = convert(peer, peer.config, _Module)
    if given.version not in (10, 11) or given.stage_layers is not None:
        key = "version" if given.version not in (10, 11) else "stage_layers"
        raise peer.refuse(key, getattr(given, key), "known: versions 10 and 11 with even stages")
    check(peer, "hidden_size", given.hidden_size, reference.fingerprint["hidden_size"])
    check(peer, "vocab_size", given.vocab_size, size_of(reference))
    n, num_layers = given.num_stages, int(reference.fingerprint["num_layers"])
    if not 0 < n <= num_layers or num_layers % n:
        raise peer.refuse("num_stages", n, f"the target has {num_layers} layers")
    own, places = _features(peer, given, num_layers)
    config = SPDConfig(
        num_stages=n,
        num_target_layers=num_layers,
        num_layers=given.num_spec_layers,
        draft_vocab_size=None if given.draft_token_ids is None else len(given.draft_token_ids),
        **own,
    )
    # The modules are Qwen3 decoder layers with the target's sizes, for any target family.
    settings = load_config(reference.name, None).get_text_config()
    layer = LayerConfig.of_target_layer(settings)  # rotates only the target's part of a head
    layer = replace(layer, has_query_key_norm=True, has_attention_bias=False)
    weights = {}
    for key, value in peer.weights.items():
        stem, _, last = key.rpartition(".")
        name = places.get(stem, stem.replace("spec_layers.", "layers.", 1))
        if name:
            weights[f"{name}.{last}"] = value
    ids = torch.arange(size_of(reference))
    if given.draft_token_ids is not None:
        ids = torch.tensor(given.draft_token_ids, dtype=torch.long)
        check_ids(peer, "draft_token_ids", ids, size_of(reference))
    # SPD never trains its final norm: it is the target's.
    weights["norm.weight"] = norm_factor(settings, found.norm_H)
    return fill(peer, SPD(config, layer, reference), weights | {"draft_ids": ids}, found)


def _features(peer: Peer, given: _Module, num_layers: int) -> tuple[Values, dict[str, str]]:
    """Return SPDConfig settings, and projection names: theirs -> ours, "" for unused ones.

    Their index L is the state after the target's final norm.
    """
    n, key = given.num_stages, "aggr_feature_bound"
    if given.version == 11:
        lps = num_layers // n
        bounds = given.aggr_feature_bound or []
        is_sound = len(bounds) > 1 and bounds[0] == 0 and bounds == sorted(set(bounds))
        if not is_sound or bounds[-1] > num_layers:
            raise peer.refuse(key, bounds, f"0 and more of 1..{num_layers}, ascending")
        own: Values = {"features": "anchors", "anchors": tuple(bounds[1:])}
        reached = sorted({sum(bound <= depth * lps for bound in bounds) for depth in range(n + 1)})
        places = {f"aggr_projs.{i}": "" for i in range(len(bounds))}
        places |= {f"aggr_projs.{num - 1}": f"projections.{i}" for i, num in enumerate(reached)}
        return own | {"query": "all", "normed_last": True}, places
    lists, key = given.shallow_hidden_layer_indices or [], "shallow_hidden_layer_indices"
    is_sound = all(row == sorted(set(row)) and row and row[0] >= 0 for row in lists)
    if len(lists) != n or not is_sound or any(row[-1] > num_layers for row in lists):
        raise peer.refuse(key, lists, f"{n} ascending lists of 0..{num_layers}")
    places = {"g0_proj": "projections.0"}
    for depth in range(1, n + 1):
        places[f"stage_projs.{n - depth}"] = f"projections.{depth}"
        for index in range(given.num_spec_layers):
            theirs = f"fixed_stage_per_layer_projs.{index}.{n - depth}"
            places[theirs] = f"layer_projections.{index}.{depth - 1}"
    depth_layers = tuple(tuple(row) for row in reversed(lists))
    own = {"features": "listed", "depth_layers": depth_layers}
    return own | {"layer_projections": True, "normed_last": True}, places
