"""Import heads from other projects as checkpoints.

Tensors and config.json identify a folder's layout:

    EAGLE-1              SafeAILab's, also as SGLang and vLLM load it: fc [H, 2 H], layers.0.*
    EAGLE-3              SafeAILab's and SGLang's (SpecForge writes it): midlayer.*
    EAGLE-3              vLLM's, from the speculators package: layers.0.*, speculators_model_type
    DFlash               the authors': DFlashDraftModel, block settings in dflash_config
    DSpark               the authors' (DeepSpec): Qwen3DSparkModel, all settings on one level
    DSpark               SpecForge's: DSparkDraftModel, block settings in dflash_config
    DFlash and DSpark    vLLM's, from the speculators package: speculators_model_type
    MTP                  Qwen3.5's own: mtp.*
    SPD                  the authors' .pt files, versions 10 and 11

Every setting and tensor is either converted or refused by its name and value. The token embedding
comes from the target, and an embedding in the file must equal the target's. Pickled files are
opened with ``weights_only=True``. This loads tensors and plain values but no code.
"""

# H hidden, V target vocabulary, U draft vocabulary

import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from ...files import Values, write_folder
from ...pretrained import load_config
from ..heads.configs import EagleConfig, SPDConfig
from ..heads.dflash import DFlash
from ..heads.draft import Draft, TargetReference, read_description
from ..heads.dspark import DSpark
from ..heads.eagle import Eagle
from ..heads.mtp import MTP, MTP_PREFIX, native_parts
from ..heads.spd import SPD
from ..transformer.decoder import norm_factor
from ..transformer.fingerprint import read_target
from ..transformer.layers import LayerConfig
from .card import CARD, model_card
from .peer_eagle3 import ONE_LAYER, read_eagle3
from .peer_files import HEAD, Peer, place_of, read_head
from .peer_settings import (
    LAYER_SETTINGS,
    NEUTRAL,
    OUTER_SETTINGS,
    check_agreement,
    check_settings,
)
from .peer_trainers import otherwise_trained


def import_head(
    name: str,
    target: str,
    out: Path,
    *,
    revision: str | None = None,
    warn: Callable[[str], None] = warnings.warn,
) -> tuple[Draft, list[Path]]:
    """Write a published head as a checkpoint.

    Args:
        name: folder, weight file or Hub repository.
        target: folder or Hub id of the head's target.
        out: created by one rename when every file is written.
        revision: for the repository.
        warn: called with one line for each way in which the head's trainer computed it otherwise
            than its files say.

    Returns:
        The draft, and the files.

    Raises:
        ValueError: an unknown layout, another target, or a setting or tensor that cannot be
            expressed here.
    """
    place = place_of(name, revision)
    config, weights = read_head(name, place)
    found = read_target(target, None)
    peer = Peer(
        name=name,
        revision=revision,
        config=config,
        weights=weights,
        target=found,
        reference=TargetReference(name=target, fingerprint=found.fingerprint),
    )
    read = (read for start, read in READERS.items() if any(re.match(start, x) for x in weights))
    if (reader := next(read, None)) is None:
        raise ValueError(
            f"--from: {name!r} holds no head that is known (no fc.weight, no spec_layers, "
            "no mtp.*); known: EAGLE-1, EAGLE-3 of SafeAILab, SGLang and speculators, "
            "DFlash, DSpark, SPD's .pt, the MTP layer of a target"
        )
    draft = reader(peer)
    for line in otherwise_trained(peer):
        warn(line)
    note = {"imported": {"from": name, "revision": revision}}

    def fill(temporary: Path) -> None:
        draft.save(temporary, training=note)
        (temporary / CARD).write_text(model_card(read_description(temporary)))

    return draft, write_folder(out, fill, inputs=[place] if place.is_dir() else [])


# -- EAGLE-1 --------------------------------------------------------------------------------


def _eagle(peer: Peer) -> Eagle:
    biases = {"bias", "qkv_bias"}  # the tensors say which there are
    check_settings(peer, peer.config, {*LAYER_SETTINGS, *biases})
    peer.check_all(peer.config, **ONE_LAYER, num_hidden_layers=1)
    layer = peer.layer(peer.config)
    # Exports contain zero biases, because engines would otherwise read uninitialized memory.
    weights = {
        key.replace("layers.0.", "layer."): value
        for key, value in peer.weights.items()
        if key not in ("fc.bias", "layers.0.self_attn.o_proj.bias") or bool(value.any())
    }
    config = EagleConfig(
        num_target_layers=peer.num_layers,
        fc_bias="fc.bias" in weights,  # dropped above if all zero
        attention_bias=layer.has_attention_bias,
    )
    return peer.fill(Eagle(config, layer, peer.reference), weights)


def _mtp(peer: Peer) -> MTP:
    """Return an MTP layer from a target's weights, or from an export with only some of them."""
    settings = load_config(peer.reference.name, None).get_text_config()
    if settings.model_type != "qwen3_5_text":
        raise ValueError(
            f"--target: {peer.reference.name!r} is a {settings.model_type}; only a dense qwen3_5 "
            "has an MTP layer that runs here; train another head for it"
        )
    if peer.name != peer.reference.name:
        theirs = read_target(peer.name, peer.revision)
        peer.reference.check_fingerprint(theirs.fingerprint)
    weights = {key.removeprefix(MTP_PREFIX): value for key, value in peer.weights.items()}
    return peer.fill(MTP(*native_parts(settings), peer.reference), weights)


# -- DFlash and DSpark ----------------------------------------------------------------------

# Tensor names are the same in all layouts. An embedding or LM head in the files is the target's.

KINDS: dict[str, dict[str, type[DFlash]]] = {
    "speculators_model_type": {"dflash": DFlash, "dspark": DSpark},
    "architectures": {
        "DFlashDraftModel": DFlash,
        "QwenDFlashDraftModel": DFlash,  # AngelSlim
        "Qwen3DFlashDraftModel": DFlash,  # NeMo, as its trainer saves it
        "Qwen3DSparkModel": DSpark,
        "DSparkDraftModel": DSpark,
    },
}
"""Key in config.json -> its value -> head class."""
BLOCK_SETTINGS = {
    *("mask_token_id", "target_layer_ids", "block_size", "num_target_layers", "projector_type"),
    *("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),
    *("sample_from_anchor", "aux_hidden_state_layer_ids", "sliding_window_non_causal"),
    *("speculators_model_type", "transformer_layer_config", "dflash_config"),
}
"""Settings that are read here, in ``dflash_config`` or outside of it."""
BLOCK_UNUSED = {"confidence_head_alpha", "attention_mode", "shift_label", "mask_token"}
BLOCK_UNUSED |= {"swa_window_size", "target_num_hidden_layers"}
BLOCK_NEUTRAL = NEUTRAL | {
    "add_swa_attention_sink_bias": False,
    "attention_value_scale": 1.0,
    "causal": False,
    "conv_group_size": 0,
    "conv_kernel_size": 0,
    "pure_draft_prefix_len": 0,
    "selector_rank": 0,
    "selector_top_k": 0,
    "use_aux_hidden_state": True,
    "use_swa": False,
}
PAIRS, CONFIDENCE = "markov_head.markov_w1.weight", "confidence_head.proj.weight"


class _BlockSettings(msgspec.Struct):
    """Settings that are copied to the head's configuration."""

    num_hidden_layers: int
    mask_token_id: int
    target_layer_ids: list[int] | None = None
    aux_hidden_state_layer_ids: list[int] | None = None
    block_size: int | None = None
    draft_vocab_size: int | None = None
    sample_from_anchor: bool | None = None
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    use_sliding_window: bool | None = None
    projector_type: str | None = None


def _block(peer: Peer) -> DFlash:
    """Return the head, as a DSpark without table if a DFlash's anchor gives a draft token."""
    kind, settings = _block_kind(peer), _block_settings(peer)
    given = peer.convert(settings, _BlockSettings)
    layers = {key.split(".")[1] for key in peer.weights if key.startswith("layers.")}
    peer.check_all(settings, num_hidden_layers=len(layers), hidden_act="silu", mlp_bias=False)
    peer.check("projector_type", given.projector_type, kind.draft_type)
    if set(given.layer_types or ()) - {"full_attention"}:
        raise peer.refuse("layer_types", given.layer_types, "only full_attention is known")
    if given.layer_types is None and given.use_sliding_window and given.sliding_window is not None:
        raise peer.refuse("use_sliding_window", True, "layer_types is missing; add it")
    is_speculators = "speculators_model_type" in peer.config
    entry = "sliding_attention" if is_speculators else None
    layer = peer.layer(peer.config.get("transformer_layer_config", settings), entry)
    peer.check_all(settings, target_hidden_size=layer.hidden_size)
    peer.check_all(settings, num_target_layers=peer.num_layers)
    weights, draft_ids = peer.vocabulary(peer.weights, given.draft_vocab_size)
    if (head_UH := weights.pop(HEAD, None)) is not None:
        peer.check_shared(HEAD, head_UH, peer.target.head_VH[draft_ids])
    if not 0 <= given.mask_token_id < peer.vocab_size:
        known = f"the target's are 0..{peer.vocab_size - 1}"
        raise peer.refuse("mask_token_id", given.mask_token_id, known)
    own: Values = {} if given.block_size is None else {"block_size": given.block_size}
    own["num_layers"], own["mask_token_id"] = given.num_hidden_layers, given.mask_token_id
    own["feature_layers"] = _block_layers(peer, given, lowest=0 if kind is DFlash else -1)
    own["num_target_layers"] = peer.num_layers
    if not torch.equal(draft_ids, torch.arange(peer.vocab_size)):
        own["draft_vocab_size"] = len(draft_ids)
        weights["draft_ids"] = draft_ids
    if kind is DFlash and given.sample_from_anchor:  # our DFlash drafts from masks only
        kind = DSpark
    if kind is DSpark:
        own["sample_from_anchor"] = given.sample_from_anchor is not False
        own |= _pairs(peer, settings, layer.hidden_size)
    config: Any = peer.convert(own, kind.config_class)
    return peer.fill(kind(config, layer, peer.reference), weights)


def _block_kind(peer: Peer) -> type[DFlash]:
    key = "speculators_model_type"
    names = peer.config.get(key)
    if names is None:
        key, names = "architectures", peer.config.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    if not isinstance(name, str) or name not in KINDS[key]:
        raise peer.refuse(key, names, f"known: {', '.join(KINDS[key])}")
    return KINDS[key][name]


def _block_settings(peer: Peer) -> Values:
    """Return all settings on one level, from any part of the configuration."""
    block = peer.config.get("dflash_config") or {}
    if not isinstance(block, dict):
        raise peer.refuse("dflash_config", block, "it is to be a table")
    is_speculators = "speculators_model_type" in peer.config
    layers = peer.config.get("transformer_layer_config", {})
    family = layers.get("model_type") if isinstance(layers, dict) else None
    if family != "qwen3" and (is_speculators or layers != {}):
        raise peer.refuse("transformer_layer_config", layers, "its model_type is to be qwen3")
    read = {*BLOCK_SETTINGS, *BLOCK_UNUSED}
    check_settings(peer, block, read, neutral=BLOCK_NEUTRAL, place="dflash_config.")
    check_agreement(peer, peer.config, block, "dflash_config")
    settings = block | peer.config | layers
    if is_speculators:
        check_settings(peer, peer.config, {*OUTER_SETTINGS, *read}, neutral=BLOCK_NEUTRAL)
    check_settings(peer, settings, {*LAYER_SETTINGS, *read}, neutral=BLOCK_NEUTRAL)
    return settings


def _pairs(peer: Peer, settings: Values, hidden: int) -> Values:
    """Read DSpark's table and confidence settings from the tensors, and check config.json."""
    rank = peer.weights[PAIRS].shape[-1] if PAIRS in peer.weights else 0
    proj, confidence = peer.weights.get(CONFIDENCE), "none"
    peer.check_all(settings, markov_rank=rank, markov_head_type="vanilla")
    peer.check_all(settings, enable_confidence_head=proj is not None)
    if proj is not None:
        reads_pair = proj.shape[-1] != hidden  # else it reads states alone
        peer.check_all(settings, confidence_head_with_markov=reads_pair)
        confidence = "pair" if reads_pair else "state"
    return {"markov_rank": rank, "confidence": confidence}


def _block_layers(peer: Peer, given: _BlockSettings, lowest: int) -> list[int]:
    """Return the fused layers by input, as speculators does. Other layouts count outputs.

    Args:
        lowest: smallest output number allowed, where -1 means the embedding.
    """
    key, numbers = "aux_hidden_state_layer_ids", given.aux_hidden_state_layer_ids
    least, most, shift = 0, peer.num_layers, 0
    if numbers is None and "speculators_model_type" not in peer.config:
        key, numbers = "target_layer_ids", given.target_layer_ids
        least, most, shift = lowest, peer.num_layers - 2, 1
    if not numbers or not all(least <= number <= most for number in numbers):
        raise peer.refuse(key, numbers, f"give {least}..{most}")
    peer.check_fused(key, numbers, len(numbers))
    return [number + shift for number in numbers]


# -- SPD ------------------------------------------------------------------------------------


class _Module(msgspec.Struct):
    """Contents of ``config`` in the authors' file."""

    num_stages: int
    num_spec_layers: int
    hidden_size: int
    vocab_size: int
    version: int = 11
    draft_token_ids: list[int] | None = None
    aggr_feature_bound: list[int] = []
    shallow_hidden_layer_indices: list[list[int]] = []
    stage_layers: object = None


def _spd(peer: Peer) -> SPD:
    """Return the head from a file in version 10 (a list of layers per depth) or 11 (anchors).

    Committed rows are read at depth n, whatever trained_with_use_deepest says, because their states
    are known up to the last layer.
    """
    given = peer.convert(peer.config, _Module)
    if given.version not in (10, 11) or given.stage_layers is not None:
        key = "version" if given.version not in (10, 11) else "stage_layers"
        raise peer.refuse(key, getattr(given, key), "known: versions 10 and 11 with even stages")
    fingerprint = peer.reference.fingerprint
    peer.check_all(peer.config, hidden_size=fingerprint["hidden_size"], vocab_size=peer.vocab_size)
    if not 0 < given.num_stages <= peer.num_layers or peer.num_layers % given.num_stages:
        raise peer.refuse(
            "num_stages", given.num_stages, f"the target has {peer.num_layers} layers"
        )
    own, places = _anchors(peer, given) if given.version == 11 else _listed(peer, given)
    config = SPDConfig(
        num_stages=given.num_stages,
        num_target_layers=peer.num_layers,
        num_layers=given.num_spec_layers,
        draft_vocab_size=None if given.draft_token_ids is None else len(given.draft_token_ids),
        normed_last=True,  # their index L is the state after the target's final norm
        **own,
    )
    # The modules are Qwen3 decoder layers with the target's sizes, for any target family.
    settings = load_config(peer.reference.name, None).get_text_config()
    layer = LayerConfig.of_target_layer(settings)  # rotates only the target's part of a head
    layer = replace(layer, has_query_key_norm=True, has_attention_bias=False)
    weights = {}
    for key, value in peer.weights.items():
        stem, _, last = key.rpartition(".")
        if name := places.get(stem, stem.replace("spec_layers.", "layers.", 1)):
            weights[f"{name}.{last}"] = value
    weights["draft_ids"] = torch.arange(peer.vocab_size)
    if given.draft_token_ids is not None:
        weights["draft_ids"] = torch.tensor(given.draft_token_ids, dtype=torch.long)
        peer.check_ids("draft_token_ids", weights["draft_ids"])
    # SPD never trains its final norm: it is the target's.
    weights["norm.weight"] = norm_factor(settings, peer.target.norm_H)
    return peer.fill(SPD(config, layer, peer.reference), weights)


def _anchors(peer: Peer, given: _Module) -> tuple[Values, dict[str, str]]:
    """Return version 11's SPDConfig settings, and our name for each projection ("" if unused)."""
    n, bounds = given.num_stages, given.aggr_feature_bound
    is_sound = len(bounds) > 1 and bounds[0] == 0 and bounds == sorted(set(bounds))
    if not is_sound or bounds[-1] > peer.num_layers:
        fix = f"0 and more of 1..{peer.num_layers}, ascending"
        raise peer.refuse("aggr_feature_bound", bounds, fix)
    ends = range(0, peer.num_layers + 1, peer.num_layers // n)
    reached = sorted({sum(bound <= end for bound in bounds) for end in ends})
    places = {f"aggr_projs.{i}": "" for i in range(len(bounds))}
    places |= {f"aggr_projs.{num - 1}": f"projections.{i}" for i, num in enumerate(reached)}
    return {"features": "anchors", "anchors": tuple(bounds[1:]), "query": "all"}, places


def _listed(peer: Peer, given: _Module) -> tuple[Values, dict[str, str]]:
    """Return version 10's SPDConfig settings, and our name for each projection."""
    n, lists = given.num_stages, given.shallow_hidden_layer_indices
    is_sound = all(row and row == sorted(set(row)) and row[0] >= 0 for row in lists)
    if len(lists) != n or not is_sound or any(row[-1] > peer.num_layers for row in lists):
        fix = f"{n} ascending lists of 0..{peer.num_layers}"
        raise peer.refuse("shallow_hidden_layer_indices", lists, fix)
    places = {"g0_proj": "projections.0"}
    for depth in range(1, n + 1):
        places[f"stage_projs.{n - depth}"] = f"projections.{depth}"
        for index in range(given.num_spec_layers):
            theirs = f"fixed_stage_per_layer_projs.{index}.{n - depth}"
            places[theirs] = f"layer_projections.{index}.{depth - 1}"
    depth_layers = tuple(tuple(row) for row in reversed(lists))
    return {"features": "listed", "depth_layers": depth_layers, "layer_projections": True}, places


READERS: dict[str, Callable[[Peer], Draft]] = {
    r"spec_layers\.": _spd,
    re.escape(MTP_PREFIX): _mtp,
    r"hidden_norm\.": _block,
    r".*\.hidden_norm\.": read_eagle3,
    r"fc\.weight": _eagle,
}
"""Tensor name prefix -> its layout's reader; the first match counts."""
