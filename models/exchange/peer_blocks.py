"""Import DFlash and DSpark heads from other projects, in their four published layouts.

    DFlash               the authors': DFlashDraftModel, block settings in dflash_config
    DSpark               the authors' (DeepSpec): Qwen3DSparkModel, all settings on one level
    DSpark               SpecForge's: DSparkDraftModel, block settings in dflash_config
    DFlash and DSpark    vLLM's, from the speculators package: speculators_model_type

Tensor names are the same in all. An embedding or LM head in the files is the target's.
"""

from typing import Any

import msgspec
import torch

from pipedraft.files import Values
from pipedraft.models.dflash import DFlash
from pipedraft.models.dspark import DSpark
from pipedraft.models.exchange.peer_files import HEAD, Peer

KINDS: dict[str, dict[str, type[DFlash]]] = {
    "speculators_model_type": {"dflash": DFlash, "dspark": DSpark},
    "architectures": {
        "DFlashDraftModel": DFlash,
        "Qwen3DSparkModel": DSpark,
        "DSparkDraftModel": DSpark,
    },
}
"""Key in config.json -> its values."""
BLOCK_SETTINGS = {
    *("mask_token_id", "target_layer_ids", "block_size", "causal", "pure_draft_prefix_len"),
    *("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),
    *("projector_type", "confidence_head_alpha", "attention_mode", "shift_label"),
}
"""Known keys in ``dflash_config``; those in the last line change nothing in decoding."""
PAIRS, CONFIDENCE = "markov_head.markov_w1.weight", "confidence_head.proj.weight"


class _Given(msgspec.Struct):
    """Settings that the head's configuration here takes over."""

    num_hidden_layers: int
    mask_token_id: int
    target_layer_ids: list[int] | None = None
    aux_hidden_state_layer_ids: list[int] | None = None
    block_size: int | None = None
    draft_vocab_size: int | None = None
    sample_from_anchor: bool | None = None
    layer_types: list[str] | None = None


def block_head(peer: Peer) -> DFlash:
    """Return the head; a DFlash whose anchor gives a draft token becomes a DSpark without a table.

    Raises:
        ValueError: this package cannot express a setting or tensor.
    """
    kind, settings = _kind(peer), _settings(peer)
    given = peer.convert(settings, _Given)
    layers = {key.split(".")[1] for key in peer.weights if key.startswith("layers.")}
    plain = {"hidden_act": "silu", "causal": False, "pure_draft_prefix_len": 0}
    peer.require(settings, num_hidden_layers=len(layers), **plain)
    if set(given.layer_types or ()) - {"full_attention"}:
        raise peer.refuse("layer_types", given.layer_types, "only full_attention is known")
    layer = peer.layer(peer.config.get("transformer_layer_config", settings))
    peer.require(settings, target_hidden_size=layer.hidden_size)
    weights, draft_ids = peer.vocabulary(peer.weights, given.draft_vocab_size)
    if (head_UH := weights.pop(HEAD, None)) is not None:
        peer.check_shared(HEAD, head_UH, peer.target.head_VH[draft_ids])
    if not 0 <= given.mask_token_id < peer.vocab_size:
        known = f"the target's are 0..{peer.vocab_size - 1}"
        raise peer.refuse("mask_token_id", given.mask_token_id, known)
    own: Values = {} if given.block_size is None else {"block_size": given.block_size}
    own["num_layers"], own["mask_token_id"] = given.num_hidden_layers, given.mask_token_id
    own["feature_layers"] = _feature_layers(peer, given, lowest=0 if kind is DFlash else -1)
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


def _kind(peer: Peer) -> type[DFlash]:
    key = "speculators_model_type"
    names = peer.config.get(key)
    if names is None:
        key, names = "architectures", peer.config.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    if not isinstance(name, str) or name not in KINDS[key]:
        raise peer.refuse(key, names, f"known: {', '.join(KINDS[key])}")
    return KINDS[key][name]


def _settings(peer: Peer) -> Values:
    """Return all settings on one level, from any part of the configuration."""
    block = peer.config.get("dflash_config", {})
    layers = peer.config.get("transformer_layer_config", {})
    if not isinstance(block, dict) or (unknown := block.keys() - BLOCK_SETTINGS):
        found = sorted(unknown) if isinstance(block, dict) else block
        raise peer.refuse("dflash_config", found, "such a head cannot be expressed here")
    if not isinstance(layers, dict) or (layers and layers.get("model_type") != "qwen3"):
        raise peer.refuse("transformer_layer_config", layers, "its model_type is to be qwen3")
    # Readers of the authors' layout prefer settings outside dflash_config.
    return block | peer.config | layers


def _pairs(peer: Peer, settings: Values, hidden: int) -> Values:
    """Read DSpark's table and confidence settings from the tensors; config.json must agree."""
    rank = peer.weights[PAIRS].shape[-1] if PAIRS in peer.weights else 0
    proj, confidence = peer.weights.get(CONFIDENCE), "none"
    peer.require(settings, markov_rank=rank, markov_head_type="vanilla")
    peer.require(settings, enable_confidence_head=proj is not None)
    if proj is not None:
        reads_pair = proj.shape[-1] != hidden  # else it reads states alone
        peer.require(settings, confidence_head_with_markov=reads_pair)
        confidence = "pair" if reads_pair else "state"
    return {"markov_rank": rank, "confidence": confidence}


def _feature_layers(peer: Peer, given: _Given, lowest: int) -> list[int]:
    """Return the fused layers by input, as speculators counts them; other layouts count outputs.

    Args:
        lowest: smallest output; -1: the embedding.
    """
    key, numbers = "aux_hidden_state_layer_ids", given.aux_hidden_state_layer_ids
    least, most, shift = 0, peer.num_layers, 0
    if numbers is None:
        key, numbers = "target_layer_ids", given.target_layer_ids
        least, most, shift = lowest, peer.num_layers - 2, 1
    if not numbers or not all(least <= number <= most for number in numbers):
        raise peer.refuse(key, numbers, f"give {least}..{most}")
    return [number + shift for number in numbers]
