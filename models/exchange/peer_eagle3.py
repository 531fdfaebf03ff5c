"""Read an EAGLE-3 head from SafeAILab, SpecForge, AngelSlim, SGLang, NeMo, modelopt or speculators.

Three layouts name the same tensors, and the names decide what a setting means:

    midlayer.*    SafeAILab, SpecForge, AngelSlim, modelopt's Megatron trainer
    layers.0.*    NeMo AutoModel (also as model.layers.0.*), modelopt's Hugging Face trainer
    layers.0.*    speculators and its converter, with speculators_model_type
"""

from typing import Any

import msgspec

from ...files import Values
from ..heads.configs import Eagle3Config, three_feature_layers
from ..heads.eagle3 import Eagle3
from .peer_files import FAMILIES, HEAD, Peer
from .peer_settings import (
    LAYER_SETTINGS,
    OUTER_SETTINGS,
    check_agreement,
    check_settings,
)

ONE_LAYER = {"hidden_act": "silu", "mlp_bias": False}
"""Settings of every EAGLE head here."""
WRAPPER, MIDLAYER, FIRST = "model.", "midlayer.", "layers.0."
NORMS = ("fc_norm", "norm_before_fc", "norm_before_residual")
OWN = (
    *("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "eagle_config", "norm_output"),
    *("num_aux_hidden_states", "transformer_layer_config", "speculators_model_type", *NORMS),
)
ENGINE_NEUTRAL = {
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}
"""``eagle_config`` setting -> the only value that is known here."""


class _EngineSettings(msgspec.Struct):
    """SGLang's ``eagle_config``, with layer ids that number outputs instead of inputs."""

    use_aux_hidden_state: bool = True
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    return_hidden_post_norm: bool = False
    norm_before_fc: bool | None = None
    parallel_draft_heads_num_layers: int | None = None


class _Eagle3Settings(msgspec.Struct):
    """Settings whose form differs from ours."""

    num_hidden_layers: int = 1
    draft_vocab_size: int | None = None
    norm_output: bool | None = None
    norm_before_residual: bool | None = None
    num_aux_hidden_states: int | None = None
    eagle_config: _EngineSettings | None = None
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    sliding_window: int | None = None
    layer_types: list[str] | None = None
    use_sliding_window: bool | None = None
    tie_word_embeddings: bool | None = None

    @property
    def engine(self) -> _EngineSettings:
        return self.eagle_config or _EngineSettings()


def read_eagle3(peer: Peer) -> Eagle3:
    """Return the head, with each setting as the trainer of its layout means it."""
    is_speculators = "speculators_model_type" in peer.config
    inner = _inner(peer) if is_speculators else {}
    settings = peer.config | inner
    given = _settings(peer, settings)
    layer = peer.layer(inner or settings, "sliding_attention" if is_speculators else None)
    peer.check_all(settings, **ONE_LAYER, target_hidden_size=layer.hidden_size)
    weights = _weights(peer)
    _check_depth(peer, given)
    normed = _feeds_back_normed(peer, given, is_speculators=is_speculators)
    if not is_speculators:  # SGLang, NeMo and SpecForge read neither, vLLM reads both
        peer.check("norm_before_residual", given.norm_before_residual, False)
        if (given.layer_types or ["full_attention"])[0] != "full_attention":
            fix = "of its readers only vLLM slides such a layer; only full_attention is known here"
            raise peer.refuse("layer_types", given.layer_types, fix)
    weights, draft_ids = peer.vocabulary(weights, given.draft_vocab_size)
    is_whole = len(draft_ids) == peer.vocab_size
    if HEAD not in weights and given.tie_word_embeddings:
        peer.check_tied()
    if is_whole:  # a head without an LM head uses the target's
        weights.setdefault(HEAD, peer.target.head_VH)
    weights["draft_ids"] = draft_ids
    own = {name: settings[name] for name in NORMS if settings.get(name) is not None} | {
        "feature_layers": _feature_layers(peer, given),
        "num_target_layers": peer.num_layers,
        "draft_vocab_size": None if is_whole else len(draft_ids),
        "norm_output": normed,
        "query_key_norm": layer.has_query_key_norm,
        "attention_bias": layer.has_attention_bias,
        "sliding_window": _window(peer, given) if is_speculators else None,
    }
    if given.engine.norm_before_fc is not None:
        own["norm_before_fc"] = given.engine.norm_before_fc
    if own.get("fc_norm") and own.get("norm_before_fc"):
        raise peer.refuse("norm_before_fc", True, "with fc_norm True; a head here has one of them")
    return peer.fill(Eagle3(peer.convert(own, Eagle3Config), layer, peer.reference), weights)


def _inner(peer: Peer) -> Values:
    inner = peer.config.get("transformer_layer_config", {})
    if not (isinstance(inner, dict) and inner.get("model_type") in FAMILIES):
        known = ", ".join(FAMILIES)
        raise peer.refuse("transformer_layer_config", inner, f"its model_type is to be of {known}")
    kind = peer.config["speculators_model_type"]
    if kind != "eagle3":
        raise peer.refuse("speculators_model_type", kind, "with EAGLE-3's tensors it is eagle3")
    return inner


def _settings(peer: Peer, settings: Values) -> _Eagle3Settings:
    """Check every setting, and return those whose form differs from ours."""
    if "speculators_model_type" in peer.config:
        check_settings(peer, peer.config, {*OUTER_SETTINGS, *OWN})
    check_settings(peer, settings, {*LAYER_SETTINGS, *OWN})
    engine: Any = settings.get("eagle_config")
    if isinstance(engine, dict):
        read = _EngineSettings.__struct_fields__
        check_settings(peer, engine, read, neutral=ENGINE_NEUTRAL, place="eagle_config.")
        shared = {key: engine[key] for key in engine.keys() & {"norm_before_fc"}}
        check_agreement(peer, settings, shared, "eagle_config")
    return peer.convert(settings, _Eagle3Settings)


def _weights(peer: Peer) -> Values:
    """Return the tensors under our names. NeMo's trainer puts its model's name before them."""
    weights = {}
    for key, value in peer.weights.items():
        name = key.removeprefix(WRAPPER)
        if name.startswith(FIRST):
            name = MIDLAYER + name.removeprefix(FIRST)
        if name in weights:
            raise peer.refuse("tensor", key, f"another one is {name}, too")
        weights[name] = value
    return weights


def _check_depth(peer: Peer, given: _Eagle3Settings) -> None:
    """Refuse more than one layer.

    NeMo writes its target's number, whatever the head has; so the tensors decide.
    """
    others = [key for key in peer.weights if "layers." in key and FIRST not in key]
    if others:
        raise peer.refuse("tensor", others[0], "only heads with one layer can be expressed here")
    if given.num_hidden_layers not in (1, peer.num_layers):
        fix = f"its tensors are one layer's, and the target has {peer.num_layers}; copy it again"
        raise peer.refuse("num_hidden_layers", given.num_hidden_layers, fix)


def _feeds_back_normed(peer: Peer, given: _Eagle3Settings, *, is_speculators: bool) -> bool:
    """Return whether the head continues with normed states.

    In SpecForge's layout ``norm_output`` is about the LM head, in the others about this.
    """
    normed, post = given.norm_output, given.engine.return_hidden_post_norm
    if is_speculators or not any(key.startswith(MIDLAYER) for key in peer.weights):
        if post and normed is False:
            fix = "eagle_config.return_hidden_post_norm is True; the two contradict each other"
            raise peer.refuse("norm_output", False, fix)
        return bool(normed or post)
    if normed is False:
        fix = f"with {MIDLAYER}* the LM head then reads states before the final norm (SpecForge)"
        raise peer.refuse("norm_output", False, f"{fix}, which cannot be expressed here")
    return post


def _feature_layers(peer: Peer, given: _Eagle3Settings) -> tuple[int, ...]:
    """Return the fused layers, where index i means the input of the target's layer i."""
    key, uses = "eagle_aux_hidden_state_layer_ids", given.engine.use_aux_hidden_state
    peer.check("eagle_config.use_aux_hidden_state", uses, True)
    inputs: list[int] | None = getattr(given, key)
    outputs: list[int] | None = getattr(given.engine, key)
    numbers, shift = (outputs, 1) if inputs is None else (inputs, 0)
    if numbers is None:
        layers = three_feature_layers(peer.num_layers)
    elif numbers and all(0 <= number + shift <= peer.num_layers for number in numbers):
        layers = tuple(number + shift for number in numbers)
    else:
        raise peer.refuse(key, numbers, f"the target has {peer.num_layers} layers")
    peer.check_fused(key, numbers, len(layers))
    if inputs is not None and outputs is not None and [x + 1 for x in outputs] != inputs:
        fix = f"eagle_config names {outputs}, which are outputs and differ from these inputs"
        raise peer.refuse(key, inputs, fix)
    if given.num_aux_hidden_states not in (None, len(layers)):
        fix = f"{key} and its default make it {len(layers)}"
        raise peer.refuse("num_aux_hidden_states", given.num_aux_hidden_states, fix)
    return layers


def _window(peer: Peer, given: _Eagle3Settings) -> int | None:
    """Return the layer's sliding window, if ``layer_types`` says that it slides."""
    if given.layer_types is None and given.use_sliding_window and given.sliding_window:
        raise peer.refuse("use_sliding_window", True, "layer_types is missing; add it")
    kinds = given.layer_types or ["full_attention"]
    if kinds[0] == "full_attention":
        return None
    if kinds[0] != "sliding_attention" or given.sliding_window is None:
        raise peer.refuse("layer_types", kinds, "known: full, and sliding with a sliding_window")
    return given.sliding_window
