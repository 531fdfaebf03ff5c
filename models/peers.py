"""Heads that others trained, made checkpoints of this project.

What a folder holds is told by its tensors and its config.json:

    EAGLE-1              SafeAILab's, also as SGLang and vLLM load it: fc [H, 2 H], layers.0.*
    EAGLE-3              SafeAILab's and SGLang's (SpecForge writes it): midlayer.*
    EAGLE-3              vLLM's, of the package speculators: layers.0.*, speculators_model_type
    DFlash               the authors', also as SGLang and vLLM load it: hidden_norm, layers.*
    MTP                  of a target itself, Qwen3.5: mtp.*
    SPD                  the authors' .pt files, versions 10 and 11

Every setting is either expressed in ours or refused by its name and value; so is every tensor. The
embedding of tokens is taken from the target, and one in the file has to be the same. Pickled files
are opened with ``weights_only=True``: tensors and plain values, no code.
"""

# H hidden, V target vocabulary, U draft vocabulary

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from torch import Tensor
from transformers import AutoConfig, LlamaConfig

from pipedraft.files import write_folder
from pipedraft.models.card import CARD
from pipedraft.models.dflash import DFlash, DFlashConfig
from pipedraft.models.draft import Draft, TargetReference, norm_factor, read_description
from pipedraft.models.eagle import Eagle, EagleConfig
from pipedraft.models.eagle3 import Eagle3, Eagle3Config, default_feature_layers
from pipedraft.models.export import TargetFiles, read_target
from pipedraft.models.hub import model_card
from pipedraft.models.layers import LayerConfig
from pipedraft.models.mtp import MTP, native_parts
from pipedraft.models.peer_files import MTP_PREFIX, Settings, Weights, place_of, read_head
from pipedraft.models.spd import SPD, SPDConfig
from pipedraft.pretrained import explained, load_config

FAMILIES = ("llama", "qwen2", "qwen3")
"""model_type of a head's decoder layer."""
ROPE_TYPES = ("default", "linear", "yarn", "llama3")
UNREAD = ("verifier_norm.", "verifier_lm_head.", "rotary_emb.", "layers.0.self_attn.rotary_emb.")
"""Tensors that are the target's, or made anew from the configuration."""
EMBEDDING = "embed_tokens.weight"

Head = TypeVar("Head", bound=Draft)
Fields = TypeVar("Fields", bound=msgspec.Struct)


@dataclass(frozen=True)
class Peer:
    """A head as its trainer wrote it."""

    name: str
    """What the user gave."""
    config: Settings
    weights: Weights
    revision: str | None = None

    def refuse(self, key: str, value: object, fix: str) -> ValueError:
        return ValueError(f"--from: {self.name!r} has {key} {value!r}; {fix}")


class _Fields(msgspec.Struct):
    """Settings of a head beside those of its decoder layer."""

    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None
    num_hidden_layers: int = 1
    norm_output: bool | None = None
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    eagle_config: Settings = {}
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    sliding_window: int | None = None
    use_sliding_window: bool | None = None
    layer_types: list[str] | None = None


def import_head(
    name: str, target: str, out: Path, *, revision: str | None = None
) -> tuple[Draft, list[Path]]:
    """Write a published head as a checkpoint.

    Args:
        name: folder, file of weights or repository on the Hub.
        target: folder or Hub id of the target that the head was trained for.
        out: made by one rename when every file is written.
        revision: of the repository.

    Returns:
        The draft, and the files.

    Raises:
        ValueError: an unknown layout, a setting or tensor that cannot be expressed, another target.
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
            "no mtp.*); known: EAGLE-1, EAGLE-3 of SafeAILab, SGLang and speculators, DFlash, "
            "SPD's .pt, the MTP layer of a Qwen3.5"
        )
    elif "hidden_norm.weight" in peer.weights:
        draft = _dflash(peer, found, reference)
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
    layer = _layer(peer, settings if not is_vllm else inner, reference)
    width = given.target_hidden_size or layer.hidden_size
    _check(peer, "target_hidden_size", width, layer.hidden_size)
    if not is_vllm:
        # SpecForge's norm_output is another one: whether the LM head reads normed states.
        _check(peer, "norm_output", given.norm_output in (None, True), True)
    num_layers = int(reference.fingerprint["num_layers"])
    weights = {key.replace("layers.0.", "midlayer."): value for key, value in peer.weights.items()}
    weights, draft_ids = _vocabulary(peer, weights, given.draft_vocab_size, reference)
    if len(draft_ids) == _size(reference):
        # A head without one reads the target's.
        weights.setdefault("lm_head.weight", found.head_VH)
    config = Eagle3Config(
        feature_layers=_feature_layers(peer, given, num_layers),
        num_target_layers=num_layers,
        draft_vocab_size=None if len(draft_ids) == _size(reference) else len(draft_ids),
        norm_output=is_vllm and bool(given.norm_output),
        fc_norm=given.fc_norm,
        norm_before_fc=given.norm_before_fc,
        norm_before_residual=given.norm_before_residual,
        query_key_norm=layer.has_query_key_norm,
        attention_bias=layer.has_attention_bias,
        sliding_window=_window(peer, given),
    )
    head = Eagle3(config, layer, reference)
    return _fill(peer, head, weights | {"draft_ids": draft_ids}, found)


def _eagle(peer: Peer, found: TargetFiles, reference: TargetReference) -> Eagle:
    _fields(peer, peer.config)
    layer = _layer(peer, peer.config, reference)
    config = EagleConfig(
        num_target_layers=int(reference.fingerprint["num_layers"]),
        fc_bias="fc.bias" in peer.weights,
        attention_bias=layer.has_attention_bias,
    )
    weights = {key.replace("layers.0.", "layer."): value for key, value in peer.weights.items()}
    return _fill(peer, Eagle(config, layer, reference), weights, found)


def _mtp(peer: Peer, found: TargetFiles, reference: TargetReference) -> MTP:
    """Beside its MTP layer a target has all its other weights, and an export has some of them."""
    settings = load_config(reference.name, None).get_text_config()
    if settings.model_type != "qwen3_5_text":
        raise ValueError(
            f"--target: {reference.name!r} is a {settings.model_type}; MTP layers are known of "
            "qwen3_5 alone, dense ones; train another head for it"
        )
    if peer.name != reference.name:
        reference.check_fingerprint(read_target(peer.name, peer.revision).fingerprint)
    weights = {key.removeprefix(MTP_PREFIX): value for key, value in peer.weights.items()}
    return _fill(peer, MTP(*native_parts(settings), reference), weights, found)


class _Blocks(msgspec.Struct, forbid_unknown_fields=True):
    """``dflash_config``."""

    mask_token_id: int
    target_layer_ids: list[int]
    block_size: int | None = None
    causal: bool = False


class _BlockFields(msgspec.Struct):
    """Settings of a DFlash head beside those of its decoder layers."""

    architectures: list[str]
    num_hidden_layers: int
    dflash_config: _Blocks
    block_size: int | None = None
    layer_types: list[str] | None = None
    hidden_act: str = "silu"


def _dflash(peer: Peer, found: TargetFiles, reference: TargetReference) -> DFlash:
    """A layer number of theirs is of its output, which is one more here."""
    given = _convert(peer, peer.config, _BlockFields)
    blocks, depth = given.dflash_config, int(reference.fingerprint["num_layers"])
    found_layers = {key.split(".")[1] for key in peer.weights if key.startswith("layers.")}
    _check(peer, "architectures", given.architectures, ["DFlashDraftModel"])
    _check(peer, "num_hidden_layers", given.num_hidden_layers, len(found_layers))
    _check(peer, "hidden_act", given.hidden_act, "silu")
    _check(peer, "dflash_config.causal", blocks.causal, False)
    kinds = sorted(set(given.layer_types or ["full_attention"]))
    _check(peer, "layer_types", kinds, ["full_attention"])
    if not all(0 <= layer < depth - 1 for layer in blocks.target_layer_ids):
        raise peer.refuse("target_layer_ids", blocks.target_layer_ids, f"give 0..{depth - 2}")
    sizes = [size for size in (given.block_size, blocks.block_size) if size is not None]
    try:
        config = DFlashConfig(
            num_layers=given.num_hidden_layers,
            block_size=(sizes or [DFlashConfig.block_size])[0],
            feature_layers=tuple(layer + 1 for layer in blocks.target_layer_ids),
            mask_token_id=blocks.mask_token_id,
        ).for_target(depth, _size(reference))
    except ValueError as error:
        raise ValueError(f"--from: {peer.name!r}: {error}") from error
    layer = _layer(peer, peer.config, reference)
    return _fill(peer, DFlash(config, layer, reference), dict(peer.weights), found)


def _fill(peer: Peer, head: Head, weights: Weights, found: TargetFiles) -> Head:
    """The head with these weights, in float32, each of which it must have and no other."""
    embedding = weights.pop(EMBEDDING, None)
    if embedding is not None:
        ours = found.embedding_VH.to(embedding.dtype)
        if embedding.shape != ours.shape or not torch.equal(embedding, ours):
            raise peer.refuse(
                EMBEDDING, tuple(embedding.shape), "it is not the target's; give its own --target"
            )
    weights = {key: x for key, x in weights.items() if not key.startswith(UNREAD)}
    expected = head.state_dict()
    for key in sorted(weights.keys() ^ expected.keys()):
        if key in expected:
            raise ValueError(f"--from: {peer.name!r} lacks {key}; copy the head again")
        raise peer.refuse("tensor", key, "such a head cannot be expressed here")
    for key, value in weights.items():
        if value.shape != expected[key].shape:
            raise peer.refuse(
                key, tuple(value.shape), f"its configuration says {tuple(expected[key].shape)}"
            )
        if value.is_floating_point() and not value.isfinite().all():
            raise peer.refuse(key, "NaN or infinite", "use another copy")
    head.load_state_dict(weights)
    return head.eval().requires_grad_(False)


# -- settings -------------------------------------------------------------------------------


def _size(reference: TargetReference) -> int:
    return int(reference.fingerprint["vocab_size"])


def _check(peer: Peer, key: str, value: object, wanted: object) -> None:
    if value != wanted:
        raise peer.refuse(key, value, f"only {wanted!r} can be expressed here")


def _convert(peer: Peer, settings: Settings, kind: type[Fields]) -> Fields:
    try:
        return msgspec.convert(settings, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"--from: {peer.name!r}, config.json: {error}; copy it again") from error


def _fields(peer: Peer, settings: Settings) -> _Fields:
    given = _convert(peer, settings, _Fields)
    _check(peer, "num_hidden_layers", given.num_hidden_layers, 1)
    _check(peer, "hidden_act", given.hidden_act, "silu")
    _check(peer, "mlp_bias", given.mlp_bias, False)
    return given


def _layer(peer: Peer, settings: Settings, reference: TargetReference) -> LayerConfig:
    """Shape of the decoder layer; what the tensors say is not asked of the configuration."""
    own, name = peer.weights, peer.name
    kind = settings.get("model_type")
    known = {key: value for key, value in settings.items() if key != "architectures"}
    with explained("--from", name):
        if kind in FAMILIES:
            config = AutoConfig.for_model(**known)
        else:
            known.pop("model_type", None)
            config = LlamaConfig(**known)
        layer = LayerConfig.from_target(config)
    _check(peer, "hidden_size", layer.hidden_size, reference.fingerprint["hidden_size"])
    _check(peer, "vocab_size", config.vocab_size, _size(reference))
    rope = config.rope_parameters
    if rope["rope_type"] not in ROPE_TYPES or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise peer.refuse("rope_parameters", dict(rope), f"known types: {', '.join(ROPE_TYPES)}")
    gate = next((x for key, x in own.items() if key.endswith("mlp.gate_proj.weight")), None)
    # A size that the file does not hold would be memory for nothing.
    if gate is not None:
        _check(peer, "intermediate_size", layer.intermediate_size, gate.shape[0])
    return replace(
        layer,
        has_query_key_norm=any("q_norm." in key for key in own),
        has_attention_bias=any(key.endswith("q_proj.bias") for key in own),
    )


def _feature_layers(peer: Peer, given: _Fields, num_layers: int) -> tuple[int, ...]:
    """Index i is the input of the target's layer i; SGLang's eagle_config counts outputs."""
    key = "eagle_aux_hidden_state_layer_ids"
    _check(peer, "use_aux_hidden_state", given.eagle_config.get("use_aux_hidden_state", True), True)
    numbers, shift = given.eagle_aux_hidden_state_layer_ids, 0
    if numbers is None:
        numbers, shift = given.eagle_config.get(key), 1
    if numbers is None:
        return default_feature_layers(num_layers)
    is_known = isinstance(numbers, list) and all(isinstance(x, int) for x in numbers)
    if not is_known or not all(0 <= x + shift <= num_layers for x in numbers):
        raise peer.refuse(key, numbers, f"the target has {num_layers} layers")
    return tuple(x + shift for x in numbers)


def _window(peer: Peer, given: _Fields) -> int | None:
    """Of the one layer, where it slides; ``layer_types`` says whether."""
    kind = (given.layer_types or ["full_attention"])[0]
    if kind not in ("full_attention", "sliding_attention"):
        raise peer.refuse("layer_types", given.layer_types, "known: full and sliding attention")
    if kind == "full_attention":
        return None
    if given.sliding_window is None:
        raise peer.refuse("sliding_window", None, "its layer_types says sliding_attention")
    return given.sliding_window


def _vocabulary(
    peer: Peer, weights: Weights, size: int | None, reference: TargetReference
) -> tuple[Weights, Tensor]:
    """The weights without the maps, and the target id of every draft token."""
    weights = dict(weights)
    d2t, t2d = weights.pop("d2t", None), weights.pop("t2d", None)
    num_tokens, head = _size(reference), weights.get("lm_head.weight")
    num_rows = num_tokens if head is None else len(head)
    _check(peer, "draft_vocab_size", size or num_rows, num_rows)
    if d2t is None:
        if num_rows != num_tokens:
            raise ValueError(f"--from: {peer.name!r} lacks d2t for {num_rows} of {num_tokens} ids")
        return weights, torch.arange(num_tokens)
    if d2t.shape != (num_rows,) or d2t.is_floating_point():
        raise peer.refuse("d2t", tuple(d2t.shape), f"{num_rows} integers belong to its LM head")
    ids = torch.arange(num_rows) + d2t.long()
    if len(ids.unique()) != num_rows or not bool(((ids >= 0) & (ids < num_tokens)).all()):
        raise peer.refuse(
            "d2t", f"{int(ids.min())}..{int(ids.max())}", f"ids of 0..{num_tokens - 1}, each once"
        )
    if t2d is not None and not torch.equal(t2d.bool().nonzero()[:, 0], ids.sort().values):
        raise peer.refuse("t2d", int(t2d.sum()), "it names other tokens than d2t")
    return weights, ids


# -- SPD ------------------------------------------------------------------------------------


class _Module(msgspec.Struct):
    """``config`` in the authors' file."""

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
    """The module of version 10 (a list of layers for each depth) or 11 (anchors).

    Committed rows are read at depth n, whatever trained_with_use_deepest says: their states are
    known to the last layer.
    """
    given = _convert(peer, peer.config, _Module)
    if given.version not in (10, 11) or given.stage_layers is not None:
        key = "version" if given.version not in (10, 11) else "stage_layers"
        raise peer.refuse(key, getattr(given, key), "known: versions 10 and 11 with even stages")
    _check(peer, "hidden_size", given.hidden_size, reference.fingerprint["hidden_size"])
    _check(peer, "vocab_size", given.vocab_size, _size(reference))
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
    # The modules are Qwen3's decoder layers of the target's sizes, whatever its family.
    settings = load_config(reference.name, None).get_text_config()
    layer = LayerConfig.of_target_layer(settings)
    layer = replace(layer, has_query_key_norm=True, has_attention_bias=False)
    weights = {}
    for key, value in peer.weights.items():
        stem, _, last = key.rpartition(".")
        name = places.get(stem, stem.replace("spec_layers.", "layers.", 1))
        if name:
            weights[f"{name}.{last}"] = value
    ids = torch.arange(_size(reference))
    if given.draft_token_ids is not None:
        ids = torch.tensor(given.draft_token_ids)
    weights["norm.weight"] = norm_factor(settings, found.norm_H)
    return _fill(peer, SPD(config, layer, reference), weights | {"draft_ids": ids}, found)


def _features(peer: Peer, given: _Module, num_layers: int) -> tuple[Settings, dict[str, str]]:
    """Settings of SPDConfig, and the names of the projections: theirs -> ours, "" for unused ones.

    Index L of theirs is the state after the target's final norm.
    """
    n, key = given.num_stages, "aggr_feature_bound"
    if given.version == 11:
        lps = num_layers // n
        bounds = given.aggr_feature_bound or []
        is_sound = len(bounds) > 1 and bounds[0] == 0 and bounds == sorted(set(bounds))
        if not is_sound or bounds[-1] > num_layers:
            raise peer.refuse(key, bounds, f"0 and more of 1..{num_layers}, ascending")
        own: Settings = {"features": "anchors", "anchors": tuple(bounds[1:])}
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
