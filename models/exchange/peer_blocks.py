"""Import DFlash and DSpark heads from other projects, in their four published layouts.

    DFlash               the authors': DFlashDraftModel, block settings in dflash_config
    DSpark               the authors' (DeepSpec): Qwen3DSparkModel, all settings on one level
    DSpark               SpecForge's: DSparkDraftModel, block settings in dflash_config
    DFlash and DSpark    vLLM's, from the speculators package: speculators_model_type

Tensor names are the same in all. An embedding or LM head in the files is the target's.
"""

# H hidden, V target vocabulary, r rank of the token-pair table

import msgspec
import torch

from pipedraft.files import Values
from pipedraft.models.dflash import DFlash
from pipedraft.models.draft import TargetReference
from pipedraft.models.dspark import DSpark
from pipedraft.models.exchange.peer_files import (
    Peer,
    check,
    convert,
    fill,
    layer_of,
    size_of,
    vocabulary_of,
)
from pipedraft.models.fingerprint import TargetFiles

ARCHITECTURES: dict[str, type[DFlash]] = {
    "DFlashDraftModel": DFlash,
    "Qwen3DSparkModel": DSpark,
    "DSparkDraftModel": DSpark,
}
SPECULATORS: dict[str, type[DFlash]] = {"dflash": DFlash, "dspark": DSpark}
PAIRS, CONFIDENCE = "markov_head.markov_w1.weight", "confidence_head.proj.weight"


class _Block(msgspec.Struct, forbid_unknown_fields=True):
    """``dflash_config``: settings that may also lie outside it, and settings without effect."""

    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    block_size: int | None = None
    causal: bool = False
    projector_type: str | None = None
    markov_rank: int | None = None
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool | None = None
    confidence_head_with_markov: bool | None = None
    confidence_head_alpha: float | None = None
    attention_mode: str | None = None
    shift_label: bool | None = None
    pure_draft_prefix_len: int = 0


class _Given(msgspec.Struct):
    """A head's settings, except its decoder layers' settings."""

    num_hidden_layers: int
    mask_token_id: int
    target_layer_ids: list[int] | None = None
    aux_hidden_state_layer_ids: list[int] | None = None
    block_size: int | None = None
    architectures: list[str] = []
    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None
    sample_from_anchor: bool | None = None
    markov_rank: int | None = None
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool | None = None
    confidence_head_with_markov: bool | None = None
    layer_types: list[str] | None = None
    hidden_act: str = "silu"


def block_head(peer: Peer, found: TargetFiles, reference: TargetReference) -> DFlash:
    """Return the head; a DFlash whose anchor gives a draft token becomes a DSpark without a table.

    Raises:
        ValueError: this package cannot express a setting or tensor.
    """
    kind, settings = _kind(peer), _settings(peer)
    given = convert(peer, settings, _Given)
    layers = {key.split(".")[1] for key in peer.weights if key.startswith("layers.")}
    check(peer, "num_hidden_layers", given.num_hidden_layers, len(layers))
    check(peer, "hidden_act", given.hidden_act, "silu")
    kinds = sorted(set(given.layer_types or ["full_attention"]))
    check(peer, "layer_types", kinds, ["full_attention"])
    layer = layer_of(peer, peer.config.get("transformer_layer_config", settings), reference)
    width = given.target_hidden_size or layer.hidden_size
    check(peer, "target_hidden_size", width, layer.hidden_size)
    weights, draft_ids = vocabulary_of(peer, peer.weights, given.draft_vocab_size, reference)
    if (head_UH := weights.pop("lm_head.weight", None)) is not None:
        wanted_UH = found.head_VH[draft_ids].to(head_UH.dtype)
        if head_UH.shape != wanted_UH.shape or not torch.equal(head_UH, wanted_UH):
            raise peer.refuse("lm_head.weight", tuple(head_UH.shape), "it is not the target's")
    own: Values = {} if given.block_size is None else {"block_size": given.block_size}
    if not torch.equal(draft_ids, torch.arange(size_of(reference))):
        own |= {"draft_vocab_size": len(draft_ids)}
        weights |= {"draft_ids": draft_ids}
    if kind is DFlash and given.sample_from_anchor:  # our DFlash drafts from masks only
        kind = DSpark
    if kind is DSpark:
        own |= _pairs(peer, given, layer.hidden_size)
    depth = int(reference.fingerprint["num_layers"])
    try:
        config = kind.config_class(
            num_layers=given.num_hidden_layers,
            feature_layers=_feature_layers(peer, given, depth),
            mask_token_id=given.mask_token_id,
            **own,
        ).for_target(depth, size_of(reference))
    except ValueError as error:
        raise ValueError(f"--from: {peer.name!r}: {error}") from error
    return fill(peer, kind(config, layer, reference), weights, found)


def _kind(peer: Peer) -> type[DFlash]:
    name = peer.config.get("speculators_model_type")
    if name is not None:
        if name not in SPECULATORS:
            raise peer.refuse("speculators_model_type", name, f"known: {', '.join(SPECULATORS)}")
        return SPECULATORS[name]
    names = peer.config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        raise peer.refuse("architectures", names, f"known: {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[names[0]]


def _settings(peer: Peer) -> Values:
    """Return all settings on one level, from any part of the configuration."""
    block = convert(peer, {"dflash_config": peer.config.get("dflash_config", {})}, _Nested)
    inner = block.dflash_config
    check(peer, "dflash_config.causal", inner.causal, False)
    check(peer, "dflash_config.pure_draft_prefix_len", inner.pure_draft_prefix_len, 0)
    given = {name: x for name, x in msgspec.structs.asdict(inner).items() if x is not None}
    layers = peer.config.get("transformer_layer_config", {})
    if not isinstance(layers, dict) or (layers and layers.get("model_type") != "qwen3"):
        raise peer.refuse("transformer_layer_config", layers, "its model_type is to be qwen3")
    # Readers of the authors' layout prefer settings outside dflash_config.
    return given | peer.config | layers


class _Nested(msgspec.Struct):
    dflash_config: _Block


def _pairs(peer: Peer, given: _Given, hidden: int) -> Values:
    """Read DSpark's table and confidence settings from the tensors; config.json must agree."""
    rank = peer.weights[PAIRS].shape[-1] if PAIRS in peer.weights else 0
    proj = peer.weights.get(CONFIDENCE)
    reads_pair = proj is not None and proj.shape[-1] != hidden  # else it reads states alone
    for name, value in (
        ("markov_rank", rank),
        ("enable_confidence_head", proj is not None),
        ("confidence_head_with_markov", reads_pair),
    ):
        said = getattr(given, name)
        if said is not None and not (name == "confidence_head_with_markov" and proj is None):
            check(peer, name, said, value)
    check(peer, "markov_head_type", given.markov_head_type, "vanilla")
    confidence = "none" if proj is None else "pair" if reads_pair else "state"
    from_anchor = given.sample_from_anchor
    return {
        "markov_rank": rank,
        "confidence": confidence,
        "sample_from_anchor": True if from_anchor is None else from_anchor,
    }


def _feature_layers(peer: Peer, given: _Given, depth: int) -> tuple[int, ...]:
    """Return the fused layers by input, as speculators counts them; other layouts count outputs."""
    if given.aux_hidden_state_layer_ids is not None:
        key, numbers, shift = "aux_hidden_state_layer_ids", given.aux_hidden_state_layer_ids, 0
    elif given.target_layer_ids is not None:
        key, numbers, shift = "target_layer_ids", given.target_layer_ids, 1
    else:
        raise ValueError(
            f"--from: {peer.name!r}, config.json lacks target_layer_ids; copy it again"
        )
    lowest = 0 if given.target_layer_ids is not None and _kind(peer) is DFlash else -shift
    most = depth - 2 if shift else depth
    if not numbers or not all(lowest <= number <= most for number in numbers):
        raise peer.refuse(key, numbers, f"give {lowest}..{most}")
    return tuple(number + shift for number in numbers)
