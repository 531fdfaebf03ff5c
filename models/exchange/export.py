"""Export heads in serving engines' layouts. See docs/export.md for the launch commands.

``sglang`` is the authors' layout: `LlamaForCausalLMEagle3`, `LlamaForCausalLMEagle`,
`DFlashDraftModel` or `Qwen3DSparkModel`. vLLM loads the last two as well. ``speculators`` is vLLM's
own. An MTP layer is written in its target's layout, `mtp.*`. ``transformers`` is the layout of its
one DFlash class, Muse Glimmer's assistant, whose files name no target. ``openvino`` is AngelSlim's
EAGLE-3 layout, or the authors' DFlash layout: optimum-intel makes OpenVINO's IR of both.

Weights stay float32 as trained. The token embedding is the target's. SGLang takes it from the
target, and vLLM's layout gets a copy. (vLLM needs no copy, but without one the speculators package
reads uninitialized memory with transformers 5.23.)

Here and in vLLM, layer index i means the input of the target's layer i. SGLang adds one to the
numbers it reads, so its numbers are written one lower, and omitted where they equal its default.
"""

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ...files import file_sha256, make_readable, to_json, write_folder
from ..heads.configs import DSparkConfig
from ..heads.dflash import DFlash
from ..heads.draft import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    Description,
    Draft,
    TargetReference,
    copy_head,
    load_untied,
    read_description,
)
from ..heads.dspark import DSpark
from ..heads.eagle import Eagle
from ..heads.eagle3 import Eagle3
from ..heads.mtp import MTP, MTP_PREFIX
from ..transformer.fingerprint import TargetFiles, read_target
from .card import CARD, LAYOUTS, CardSource, Measured, render_card
from .chain import (
    CHAIN_LENGTH,
    chains_of,
    draft_tokens,
    simulated,
    sum_counts,
    validated_acceptance,
)

Layout = Literal["sglang", "speculators", "transformers", "openvino"]
Config = dict[str, object]
"""An export's config.json."""

ORIGIN_FILE = "pipedraft.json"
SIMULATORS_FILE = "acceptance.json"

VLLM_ONLY = ("norm_before_residual", "query_key_norm", "sliding_window")
"""EAGLE-3 settings that SGLang 0.5.23 does not read from the files."""
NUM_OPENVINO_LAYERS = 3
"""Fused layers of an EAGLE-3 head in OpenVINO."""
NORMS = ("fc_norm", "norm_before_fc", "norm_output")
"""Norms around the projection; both engines read them."""


SCALED = ("gemma",)
"""Families whose embedding module multiplies by a factor; transformers calls it for a block."""
GENERATE = (
    "from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer",
    "target = AutoModelForCausalLM.from_pretrained({target})",
    "tokenizer = AutoTokenizer.from_pretrained({target})",
    "draft = AutoModel.from_pretrained({draft}, dtype=target.dtype)",
    'ids = tokenizer("Hello!", return_tensors="pt")',
    'ids = target.generate(**ids, assistant_model=draft, speculation_type="dflash")',
    "print(tokenizer.decode(ids[0]))",
)
"""Statements of the command for transformers."""
ASSISTANT_NORM = "encoder.output_norm_enc.weight"


class HeadTarget:
    """A head's target, named as an engine loads it. Its files are read when first needed."""

    def __init__(self, reference: TargetReference, folder: Path, name: str | None = None) -> None:
        """
        Args:
            folder: the head's checkpoint.
            name: the target as the user gave it; None: as in the checkpoint.
        """
        self.name, self._reference, self._folder = name or reference.name, reference, folder
        self._is_given = name is not None

    @cached_property
    def files(self) -> TargetFiles:
        found = read_target(self.name, None) if self._is_given else self._read_own()
        self._reference.check_fingerprint(found.fingerprint)
        return found

    def _read_own(self) -> TargetFiles:
        try:
            return read_target(self.name, self._reference.revision)
        except ValueError as error:
            raise ValueError(
                f"--checkpoint: weights of its target {self.name!r} are needed, and the name in "
                f"{self._folder / CONFIG_FILE} leads to none ({str(error).partition(': ')[2]}); "
                "run the export where it does, or set target.name there to the target's folder"
            ) from error


def export(
    folder: Path,
    layout: Layout,
    out: Path,
    *,
    target: str | None = None,
    results: Path | None = None,
) -> list[Path]:
    """Write a head's checkpoint in a serving engine's layout.

    Args:
        folder: checkpoint folder.
        out: new or empty folder, created by one rename when every file is written.
        target: name by which the engine loads the target, if different from training.
        results: results.json from an evaluation with a chain. It sets the chain length, and its
            acceptance is written for the engines' simulators.

    Returns:
        The files.

    Raises:
        ValueError: another kind of draft, a head the layout cannot describe, another target, or a
            folder in use.
    """
    kinds = [kind for kind, layouts in LAYOUTS.items() if layout in layouts]
    head, description = load_head(folder, layout, kinds)
    engines = HeadTarget(head.reference, folder, target)
    if target is not None or head.shares_head:
        prepare(head, engines.files)
    else:
        prepare(head)
    digest = file_sha256(folder / WEIGHTS_FILE)
    acceptance, simulators = validated_acceptance(description), None
    if results is not None:
        chains = chains_of(Measured.read(results, digest).runs)
        acceptance = sum_counts(chains[min(chains)])  # the greedy chains, if there are any
        simulators = to_json(simulated(chains))
    num_tokens = draft_tokens(head, acceptance)
    # After the conversion: the configuration lists the layers in the order of fc's columns.
    config, weights = _parts(head, layout, engines, num_tokens)

    if target is not None:
        description["target"] |= {"name": target, "revision": None}
    origin = Origin(
        layout=layout, weights_sha256=digest, description=description, num_tokens=num_tokens
    )
    card = render_card(origin.card_source())

    def fill(temporary: Path) -> None:
        (temporary / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
        save_file(weights, temporary / WEIGHTS_FILE, metadata={"format": "pt"})
        make_readable(temporary / WEIGHTS_FILE)
        (temporary / ORIGIN_FILE).write_bytes(to_json(origin))
        (temporary / CARD).write_text(card)
        if simulators is not None:
            (temporary / SIMULATORS_FILE).write_bytes(simulators)

    return write_folder(out, fill, inputs=[folder], replaces=ORIGIN_FILE)


def load_head(folder: Path, layout: str, kinds: Sequence[str]) -> tuple[Draft, Description]:
    """Load a checkpoint, if the layout supports its head type.

    Raises:
        ValueError: the head's type is not in ``kinds``.
    """
    description = read_description(folder)
    kind = description["draft_type"]
    if kind not in kinds:
        known = " and ".join(", ".join(kinds).rsplit(", ", 1))
        raise ValueError(
            f"--checkpoint: {folder} holds a draft of type {kind!r}; the layout {layout}"
            f"{' (vLLM)' * (layout == 'speculators')} is for {known} heads; give such a head's "
            "checkpoint"
        )
    return load_untied(folder), description


def prepare(head: Draft, target: TargetFiles | None = None) -> None:
    """Convert a loaded head to the form that engines assume, with an LM head of its own."""
    if head.shares_head:  # engines load an LM head with every draft
        assert target is not None
        copy_head(head, target.head_VH)
    if isinstance(head, Eagle3 | DFlash):
        convert(head)


def _parts(
    head: Draft, layout: Layout, target: HeadTarget, num_tokens: int
) -> tuple[Config, dict[str, Tensor]]:
    """Return config.json and weights, including target weights that the layout repeats."""
    if isinstance(head, MTP):
        return mtp_parts(head, target.files)
    if isinstance(head, Eagle):
        return eagle_config(head), eagle_weights(head)
    if isinstance(head, Eagle3):
        if layout == "sglang":
            return sglang_config(head), sglang_weights(head)
        if layout == "openvino":
            weights = openvino_weights(head, target.files.embedding_VH)
            return openvino_config(head, target.files.config), weights
        weights = speculators_weights(head, target.files.embedding_VH)
        return speculators_config(head, target, num_tokens), weights
    assert isinstance(head, DFlash)
    if layout == "transformers":
        return assistant_config(head, target.files), assistant_weights(head)
    if layout == "speculators":
        weights = block_speculators_weights(head, target.files.head_VH)
        return block_speculators_config(head, target), weights
    if not isinstance(head, DSpark):
        return dflash_config(head, layout), head.state_dict()
    ends = (("embed_tokens", target.files.embedding_VH), ("lm_head", target.files.head_VH))
    return dspark_config(head), head.state_dict() | {f"{k}.weight": x.clone() for k, x in ends}


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Origin of an export, stored in its folder for the card. Engines ignore it."""

    layout: Layout
    weights_sha256: str
    """SHA-256 over the checkpoint's weights; identifies them in evaluations."""
    description: Description
    """The checkpoint's config.json, with the name by which the engine loads the target."""
    num_tokens: int = CHAIN_LENGTH
    """Draft tokens per round."""

    @classmethod
    def read(cls, folder: Path) -> "Origin":
        try:
            return msgspec.json.decode((folder / ORIGIN_FILE).read_bytes(), type=cls)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"checkpoint: {folder / ORIGIN_FILE} is damaged ({error}); export it again"
            ) from error

    def card_source(self, place: str = CardSource.place) -> CardSource:
        return CardSource(
            description=self.description,
            place=place,
            layout=self.layout,
            launch=self.launch_line(place),
        )

    def launch_line(self, place: Path | str) -> str:
        """Return the shell command that serves the target with the exported head at ``place``."""
        if self.layout == "openvino":
            return f"python -m pipedraft.models.exchange.openvino_ir {shlex.quote(str(place))}"
        if self.layout == "transformers":
            names = {"target": self.description["target"]["name"], "draft": str(place)}
            quoted = {key: json.dumps(name) for key, name in names.items()}
            code = "; ".join(line.format(**quoted) for line in GENERATE)
            return f"python -c {shlex.quote(code)}"
        kind, out = self.description["draft_type"], shlex.quote(str(place))
        target = shlex.quote(self.description["target"]["name"])
        is_block = kind in (DFlash.draft_type, DSpark.draft_type)
        if self.layout == "speculators":
            if is_block:  # its files contain all other settings, the target too
                return f"vllm serve {out} --dtype bfloat16"
            count = self.num_tokens
            options = {"method": "eagle3", "model": str(place), "num_speculative_tokens": count}
            settings = shlex.quote(json.dumps(options))
            return f"vllm serve {target} --dtype bfloat16 --speculative-config {settings}"
        algorithm = "NEXTN" if kind == MTP.draft_type else kind.upper()
        line = (
            f"python -m sglang.launch_server --model-path {target} --dtype bfloat16 "
            f"--speculative-algorithm {algorithm} --speculative-draft-model-path {out}"
        )
        if not is_block:
            line += f" --speculative-num-steps {self.num_tokens} --speculative-eagle-topk 1"
        elif self.description["architecture"].get("sample_from_anchor") is not False:
            return line  # its configuration sets the length
        # A chain's pass also has the target's own token. SGLang overestimates a block's length by
        # one if its anchor gives no draft token.
        return f"{line} --speculative-num-draft-tokens {self.num_tokens + 1}"


# U draft vocabulary, V target vocabulary, H hidden

# -- layouts --------------------------------------------------------------------------------


def sglang_config(head: Eagle3) -> Config:
    """Return config.json in the authors' layout."""
    layers, last = head.config.feature_layers, head.config.num_target_layers
    for name in VLLM_ONLY:
        if value := getattr(head.config, name):
            raise no_place("sglang", name, value)
    _check_layers(head, lowest=1)
    norms = {name: True for name in NORMS if getattr(head.config, name)}
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layer_config(head),
        **norms,
        "num_aux_hidden_states": len(layers),
        "draft_vocab_size": len(head.draft_ids),
        "torch_dtype": "float32",
    }
    # SpecForge's norm_output has another meaning, so ours is written under TensorRT-LLM's name.
    post = {"return_hidden_post_norm": True} if head.config.norm_output else {}
    if post or layers != (2, last // 2, last - 3):
        config["eagle_config"] = {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers],
            **post,
        }
    return config


def sglang_weights(head: Eagle3) -> dict[str, Tensor]:
    weights = {name: value for name, value in head.state_dict().items() if name != "draft_ids"}
    return weights | vocabulary_maps(head)


def openvino_config(head: Eagle3, target: Config) -> Config:
    """Return config.json as optimum-intel reads an EAGLE-3 head, AngelSlim's form.

    OpenVINO moves ``fc`` into the target, where norms before it have no place, and feeds the
    layer's raw output back.
    """
    for name in (*VLLM_ONLY, *NORMS):
        if value := getattr(head.config, name):
            raise no_place("openvino", name, value)
    _check_layers(head, 1, "openvino")
    if len(head.config.feature_layers) != NUM_OPENVINO_LAYERS:
        layers = list(head.config.feature_layers)
        raise no_place("openvino", "feature_layers", layers, ", only for three")
    stops = target.get("eos_token_id")
    stop = stops[0] if isinstance(stops, list) else stops
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layer_config(head),
        "draft_vocab_size": len(head.draft_ids),
        "hidden_layers_list": [layer - 1 for layer in head.config.feature_layers],  # outputs
        **({} if stop is None else {"eos_token_id": stop}),  # else OpenVINO stops at token -1
        "torch_dtype": "float32",
    }


def openvino_weights(head: Eagle3, embedding_VH: Tensor) -> dict[str, Tensor]:
    """Return weights and maps; optimum-intel would draw a missing embedding at random."""
    return sglang_weights(head) | {"embed_tokens.weight": embedding_VH}


def _speculators(kind: str, num_tokens: int, target: HeadTarget) -> Config:
    """Return the common config.json entries of vLLM's layout (speculators package, version 0.9)."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": num_tokens,
        "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }
    return {
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": target.name,
                "architectures": target.files.config.get("architectures", []),
            },
        },
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def speculators_config(head: Eagle3, target: HeadTarget, num_tokens: int) -> Config:
    """Return config.json in vLLM's EAGLE-3 layout."""
    layer = _layer_config(head)
    if head.config.sliding_window is not None:
        layer["layer_types"] = ["sliding_attention"]
        layer |= {"sliding_window": head.config.sliding_window, "use_sliding_window": True}
    # vLLM sizes fc by this number, not by the list below.
    layer["num_aux_hidden_states"] = len(head.config.feature_layers)
    return _speculators("eagle3", num_tokens, target) | {
        "architectures": ["Eagle3DraftModel"],
        "transformer_layer_config": layer,
        "draft_vocab_size": len(head.draft_ids),
        "eagle_aux_hidden_state_layer_ids": list(head.config.feature_layers),
        # vLLM's default is true.
        "norm_before_residual": head.config.norm_before_residual,
        "norm_before_fc": head.config.norm_before_fc,
        "fc_norm": head.config.fc_norm,
        "norm_output": head.config.norm_output,
    }


def speculators_weights(head: Eagle3, embedding_VH: Tensor) -> dict[str, Tensor]:
    """Return the weights, but no maps of a whole vocabulary, for which vLLM has no parameters."""
    renamed = {
        name.replace("midlayer.", "layers.0."): value
        for name, value in sglang_weights(head).items()
    }
    if len(head.draft_ids) == head.target_vocab_size:
        del renamed["d2t"], renamed["t2d"]
    return renamed | {"embed_tokens.weight": embedding_VH}


def vocabulary_maps(head: Eagle3 | DFlash) -> dict[str, Tensor]:
    """Return d2t int64 [U] (target id minus draft id) and t2d bool [V] (in the draft vocabulary).

    For the full vocabulary these are zeros and all True. Without them SpecForge's maps would stay
    uninitialized.
    """
    t2d = torch.zeros(head.target_vocab_size, dtype=torch.bool)
    t2d[head.draft_ids] = True
    return {"d2t": head.draft_ids - torch.arange(len(head.draft_ids)), "t2d": t2d}


def eagle_config(head: Eagle) -> Config:
    """Return config.json in the authors' EAGLE-1 layout.

    vLLM silently drops a bias in ``fc``, and then drafts other tokens. So only a head without this
    bias gets the name ``EagleLlamaForCausalLM``, under which vLLM loads it. ``bias`` is not
    written, because SGLang would apply it to the attention.
    """
    names = ["LlamaForCausalLMEagle"] + ["EagleLlamaForCausalLM"] * (not head.config.fc_bias)
    biases = {"attention_bias": True, "qkv_bias": True} if head.config.attention_bias else {}
    return {"architectures": names, **_layer_config(head), **biases, "torch_dtype": "float32"}


def eagle_weights(head: Eagle) -> dict[str, Tensor]:
    """Return weights without embedding and LM head, because engines use the target's.

    SGLang allocates a bias for ``fc`` in every head, and for ``o_proj`` where queries have one. If
    the file lacked these biases, they would stay uninitialized.
    """
    weights = {
        name.replace("layer.", "layers.0.", 1) if name.startswith("layer.") else name: value
        for name, value in head.state_dict().items()
    }
    weights.setdefault("fc.bias", torch.zeros(head.layer_config.hidden_size))
    if head.config.attention_bias:
        zeros_H = torch.zeros(head.layer_config.hidden_size)
        weights["layers.0.self_attn.o_proj.bias"] = zeros_H
    return weights


def mtp_parts(head: MTP, found: TargetFiles) -> tuple[Config, dict[str, Tensor]]:
    """Return the target's config.json, its embedding and LM head, and the layer in its own form.

    An engine finds the MTP layer in this folder as it finds it in the target's own folder.
    """
    if not head.config.native:
        raise ValueError(
            "--format: 'sglang' has no place for an MTP layer that is not the target's own; "
            "give a checkpoint that began with pipedraft models import --from TARGET"
        )
    layers: Config = {"mtp_num_hidden_layers": 1}
    text = found.config.get("text_config")  # for vision-language models
    config = found.config | (layers if text is None else {"text_config": text | layers})
    own = {MTP_PREFIX + name: value for name, value in head.state_dict().items()}
    return config, own | found.weights


def dflash_config(head: DFlash, layout: Layout) -> Config:
    """Return config.json in the authors' DFlash layout."""
    return {
        "architectures": ["DFlashDraftModel"],
        **_block_config(head, layout, lowest=1),
        "dflash_config": {
            "mask_token_id": head.config.mask_token_id,
            "target_layer_ids": [layer - 1 for layer in head.config.feature_layers],
        },
    }


def assistant_config(head: DFlash, target: TargetFiles) -> Config:
    """Return config.json as transformers 5.23 reads a DFlash assistant, of any target."""
    family = str((target.config.get("text_config") or target.config).get("model_type"))
    if family.startswith(SCALED):
        raise ValueError(
            f"--format: 'transformers' scales the embedding of a block's rows for {family}, which "
            "no trainer of DFlash does, so it would draft other tokens; give another --format"
        )
    kept = _block_config(head, "transformers", lowest=1)
    unread = ("rope_theta", "rope_scaling", "vocab_size", "num_target_layers", "mlp_bias")
    return {name: value for name, value in kept.items() if name not in unread} | {
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": "muse_glimmer_assistant",
        "mask_token_id": head.config.mask_token_id,
        "target_layer_ids": [layer - 1 for layer in head.config.feature_layers],
        # The class has token ids of its own family as defaults.
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }


def assistant_weights(head: DFlash) -> dict[str, Tensor]:
    renamed = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": ASSISTANT_NORM}
    return {renamed.get(name, name): value for name, value in head.state_dict().items()}


def dspark_config(head: DSpark) -> Config:
    """Return config.json in the authors' DSpark layout, DeepSpec's."""
    config = head.config
    if not config.markov_rank:  # SGLang refuses a DSpark without a table
        raise no_place("sglang", "markov_rank", 0)
    read = {"confidence_head_with_markov": config.confidence == "pair"}
    return {
        "architectures": ["Qwen3DSparkModel"],
        **_block_config(head, "sglang", lowest=0),
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": [layer - 1 for layer in config.feature_layers],
        "num_anchors": 512,  # required by its reader, unused in decoding
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla",
        "sample_from_anchor": config.sample_from_anchor,
        "enable_confidence_head": config.confidence != "none",
        **(read if config.confidence != "none" else {}),
    }


def _block_config(head: DFlash, layout: Layout, lowest: int) -> Config:
    """Return config.json entries for DFlash and DSpark.

    Layer number i means the output of layer i, and -1 means the embedding.
    """
    _check_layers(head, lowest, layout)
    if (size := head.config.draft_vocab_size) is not None:
        raise no_place(layout, "draft_vocab_size", size)
    return {
        **_layer_config(head),
        "layer_types": ["full_attention"] * head.config.num_layers,
        "num_target_layers": head.config.num_target_layers,
        "block_size": head.config.block_size,
        "torch_dtype": "float32",
    }


def _check_layers(head: Eagle3 | DFlash, lowest: int, layout: Layout = "sglang") -> None:
    """Refuse fused layers that the layout cannot number."""
    layers, most = list(head.config.feature_layers), head.config.num_target_layers - 1
    if not all(lowest <= layer <= most for layer in layers):
        raise no_place(layout, "feature_layers", layers, f", only for layers in {lowest}..{most}")


def block_speculators_config(head: DFlash, target: HeadTarget) -> Config:
    """Return config.json in vLLM's layout for DFlash and DSpark."""
    config, own = head.config, {}
    if isinstance(config, DSparkConfig):
        own = {
            "markov_rank": config.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": config.confidence != "none",
            "confidence_head_with_markov": config.confidence == "pair",
        }
    kinds = {"layer_types": ["full_attention"] * config.num_layers}
    return _speculators(head.draft_type, config.num_tokens, target) | {
        "architectures": ["DSparkDraftModel" if own else "DFlashDraftModel"],
        "transformer_layer_config": _layer_config(head) | kinds,
        "draft_vocab_size": len(head.draft_ids),
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": list(config.feature_layers),
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.first_row == 0,
        # The layers have no windows, yet vLLM would read false as a causal block.
        "sliding_window_non_causal": True,
        **own,
    }


def block_speculators_weights(head: DFlash, head_VH: Tensor) -> dict[str, Tensor]:
    """Return the weights to write.

    The engine takes embedding and LM head from the target. For a draft vocabulary, however, the LM
    head's rows are written.
    """
    weights = head.state_dict()
    if weights.pop("draft_ids", None) is None:
        return weights
    return weights | vocabulary_maps(head) | {"lm_head.weight": head_VH[head.draft_ids]}


def _layer_config(head: Draft) -> Config:
    """Return the head's decoder layers as a Llama or Qwen3 configuration.

    Rotary settings are given twice: readers before transformers 5 know only ``rope_theta`` and
    ``rope_scaling``.
    """
    layer = head.layer_config
    rope = dict(layer.rope_parameters)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "model_type": "qwen3" if layer.has_query_key_norm else "llama",
        "vocab_size": head.target_vocab_size,
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": head.config.num_layers,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_key_value_heads,
        "head_dim": layer.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": layer.rms_norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": layer.max_positions,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "rope_parameters": rope,
        "tie_word_embeddings": False,
    }


# -- the form that engines assume -------------------------------------------------------------

# Most engines load other forms without a message, and then accept fewer draft tokens. So every
# difference is either converted without changing the draft tokens, or refused by name.


def no_place(layout: str, name: str, value: object, why: str = "") -> ValueError:
    """Return the error for a setting that a layout cannot describe."""
    fix = "--format speculators" if layout == "sglang" else "another --format"
    return ValueError(
        f"--format: {layout!r} has no place for model.{name} {value!r}{why}; this head was trained "
        f"with it, so give {fix}"
    )


def convert(head: Eagle3 | DFlash) -> None:
    """Sort a loaded head's fused layers and, for a whole vocabulary, its draft tokens.

    Raises:
        ValueError: a setting ignored by every engine.
    """
    if isinstance(head, Eagle3) and head.config.attention_bias:
        raise ValueError(
            "--checkpoint: model.attention_bias is true, and neither SGLang nor vLLM has biases in "
            "the attention of an EAGLE-3 head: they would drop them in silence; train one without"
        )
    sort_layers(head)
    if len(head.draft_ids) == head.target_vocab_size:
        sort_vocabulary(head)


@torch.no_grad()
def sort_layers(head: Eagle3 | DFlash) -> None:
    """Sort the columns in ``fc`` by layer, because engines collect hidden states in this order."""
    layers = head.config.feature_layers
    if len(set(layers)) < len(layers):
        raise ValueError(
            f"--checkpoint: model.feature_layers {list(layers)} names a layer twice; engines "
            "collect each layer once, train a head with different ones"
        )
    order = sorted(range(len(layers)), key=layers.__getitem__)
    head.config = replace(head.config, feature_layers=tuple(layers[i] for i in order))  # type: ignore[arg-type]
    # fc's columns follow the order of the fused layers; move both together.
    parts = head.fc.weight.chunk(len(layers), 1)  # k of [H, H]
    head.fc.weight.copy_(torch.cat([parts[i] for i in order], 1))
    if not isinstance(head, Eagle3):  # block heads have no norms before fc
        return
    if head.config.fc_norm:
        head.fc_norm = nn.ModuleList(head.fc_norm[i] for i in order)
    if head.config.norm_before_fc:
        norms = head.input_norm.weight.chunk(len(layers))
        head.input_norm.weight.copy_(torch.cat([norms[i] for i in order]))


@torch.no_grad()
def sort_vocabulary(head: Eagle3 | DFlash) -> None:
    """Sort the LM head's rows by token, because engines read no map of a whole vocabulary."""
    order_V = head.draft_ids.argsort()
    if isinstance(head, Eagle3):  # block heads use the target's LM head
        head.lm_head.weight.copy_(head.lm_head.weight[order_V])
    if isinstance(head, DSpark) and head.pair_UR is not None:
        head.pair_UR.copy_(head.pair_UR[order_V])
    persistent = isinstance(head, Eagle3)
    head.register_buffer("draft_ids", torch.arange(len(order_V)), persistent=persistent)
    head.config = replace(head.config, draft_vocab_size=None)  # type: ignore[arg-type]
