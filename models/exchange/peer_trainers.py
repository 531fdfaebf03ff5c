"""Say where a trainer computed its head otherwise than the head's files say.

Engines compute what the files say, and so does an imported head. Such a head drafts worse than it
did in its own trainer's evaluation. Each line was checked in the source of the named version.
"""

from collections.abc import Iterator

from ...files import Values
from .peer_files import Peer

MODELOPT_KEY = "use_input_layernorm_in_first_layer"
"""Setting in ``eagle_config`` that only modelopt writes."""
PLAIN_BASE = 10000.0


def otherwise_trained(peer: Peer) -> Iterator[str]:
    """Return one line for each known difference, for EAGLE-3, DFlash and DSpark."""
    config = peer.config
    names = config.get("architectures")
    engine = config.get("eagle_config")
    block = config.get("dflash_config")
    if isinstance(engine, dict) and MODELOPT_KEY in engine:
        yield from _modelopt_eagle3(peer, engine)
    elif names == ["Eagle3LlamaForCausalLM"] and "midlayer.hidden_norm.weight" in peer.weights:
        yield from _angelslim(peer)
    elif isinstance(block, dict) and {"causal"} <= block.keys() and "block_size" not in block:
        yield from _modelopt_block(peer)
    if "midlayer.hidden_norm.weight" in peer.weights and config.get("norm_output") is True:
        post = isinstance(engine, dict) and engine.get("return_hidden_post_norm")
        if not post:
            yield (
                "norm_output True: with midlayer.* it is SpecForge's, whose LM head reads normed "
                "states; SGLang 0.5.23 and vLLM 0.32 read it as feeding normed states back, and so "
                "draft otherwise from the second draft token on"
            )
    if "speculators_model_type" in config:
        yield from _speculators(peer)
    layers = config.get("num_hidden_layers")
    if layers not in (None, 1) and any("layers.0.hidden_norm." in key for key in peer.weights):
        yield (
            f"num_hidden_layers {layers}: NeMo AutoModel 0.7 writes its target's number; the file "
            f"has one layer, and vLLM and SGLang would build {layers}; write 1"
        )


def _rope(peer: Peer) -> tuple[float, str]:
    """Return the base and the type in the file."""
    found: dict[str, object] = {"rope_theta": peer.config.get("rope_theta")}
    for key in ("rope_scaling", "rope_parameters"):
        form = peer.config.get(key)
        if isinstance(form, dict):
            found |= {k: v for k, v in form.items() if v is not None}
    base = found.get("rope_theta")
    kind = found.get("rope_type") or found.get("type") or "default"
    return PLAIN_BASE if base is None else float(base), str(kind)  # type: ignore[arg-type]


def _modelopt_eagle3(peer: Peer, engine: dict[str, object]) -> Iterator[str]:
    first = peer.weights.get("layers.0.input_layernorm.weight")
    # A constant factor before a norm changes nothing.
    if first is not None and not bool((first == first[0]).all()):
        yield (
            "layers.0.input_layernorm: modelopt 0.47 (Hugging Face trainer) norms the fused states "
            "with it before hidden_norm norms them, too; engines and pipedraft norm them with "
            "hidden_norm alone, and so draft otherwise than it was trained"
        )
    base, kind = _rope(peer)
    if kind == "yarn":
        yield (
            "rope_scaling yarn: modelopt 0.47 trains with plain positions (rope_type default) and "
            "adds its eagle_export_rope_scaling to the files, so every position rotates otherwise "
            f"than in training; to decode as trained, write rope_scaling null (base {base:g})"
        )
    numbers = engine.get("eagle_aux_hidden_state_layer_ids")
    if isinstance(numbers, list) and "eagle_aux_hidden_state_layer_ids" not in peer.config:
        yield (
            f"eagle_config.eagle_aux_hidden_state_layer_ids {numbers}: modelopt, SGLang and "
            "pipedraft read outputs of layers; vLLM 0.32 (V1 model runner) reads inputs, one layer "
            "lower"
        )


def _angelslim(peer: Peer) -> Iterator[str]:
    base, kind = _rope(peer)
    if base != PLAIN_BASE and kind in ("default", "linear"):
        yield (
            f"rope_theta {base:g}: AngelSlim 0.5 trains EAGLE-3 heads with base 10000, whatever "
            "config.json says; engines and pipedraft read config.json; to decode as trained, "
            "write rope_theta 10000"
        )


def _modelopt_block(peer: Peer) -> Iterator[str]:
    base, kind = _rope(peer)
    if base != PLAIN_BASE:
        yield (
            f"rope_theta {base:g}: modelopt 0.47 on transformers 5 trains DFlash heads with base "
            "10000 and writes the target's; engines and pipedraft read the file; to decode as "
            "trained, write rope_theta 10000"
        )
    if kind != "default":
        yield (
            f"rope_scaling {kind}: modelopt 0.47 trains DFlash heads with plain positions and adds "
            "its dflash_export_rope_scaling to the files; to decode as trained, write rope_scaling "
            "null"
        )


def _speculators(peer: Peer) -> Iterator[str]:
    config = peer.config
    if config["speculators_model_type"] == "eagle3" and "norm_before_residual" not in config:
        yield (
            "norm_before_residual is missing: speculators reads false, vLLM 0.32 true; pipedraft "
            "reads false"
        )
    if config["speculators_model_type"] != "eagle3" and not config.get(
        "sliding_window_non_causal", True
    ):
        yield (
            "sliding_window_non_causal False: in layers with full attention speculators 0.9 and "
            "pipedraft let a block's rows see each other; vLLM 0.32 makes every layer causal; for "
            "vLLM write true"
        )
    inner = config.get("transformer_layer_config")
    rope = inner.get("rope_parameters") if isinstance(inner, dict) else None
    if config.get("architectures") == ["Eagle3Speculator"]:
        yield from _converted(peer, rope)
    if isinstance(rope, dict) and "sliding_attention" in rope:
        base = 1000000 if inner.get("model_type") == "qwen3" else 10000  # type: ignore[union-attr]
        yield (
            "rope_parameters per layer type: speculators 0.9 and pipedraft read sliding_attention; "
            f"vLLM 0.32 reads no entry and rotates with base {base}"
        )


def _converted(peer: Peer, rope: object) -> Iterator[str]:
    """Yield what speculators' converter drops, or copies without regard to the layout."""
    if peer.config.get("norm_output"):
        yield (
            "norm_output True: speculators 0.9's converter copies it from any EAGLE-3 head, and "
            "here it feeds normed states back; if the converted head was SpecForge's, it was "
            "trained without this: write false"
        )
    base = rope.get("rope_theta", PLAIN_BASE) if isinstance(rope, dict) else PLAIN_BASE
    theirs = _base_of(peer.target.config)
    if base == PLAIN_BASE and theirs != PLAIN_BASE:
        yield (
            f"rope_theta 10000, and the target's is {theirs:g}: speculators 0.9's converter reads "
            "no rope_parameters, and writes 10000 for a head whose config.json has no rope_theta "
            "outside of it; compare with the converted head"
        )


def _base_of(config: Values) -> float:
    text = config.get("text_config") or config
    rope = text.get("rope_parameters") or {}
    return float(rope.get("rope_theta") or text.get("rope_theta") or PLAIN_BASE)
