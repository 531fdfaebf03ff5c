"""Heads in the layouts that serving engines load.

``sglang`` is the layout of the authors (`LlamaForCausalLMEagle3`, `LlamaForCausalLMEagle`, and
`DFlashDraftModel` and `Qwen3DSparkModel`, which vLLM loads as well; of an MTP layer the target's
own, `mtp.*`):

    python -m sglang.launch_server --model-path TARGET --dtype bfloat16 \\
      --speculative-algorithm EAGLE3 --speculative-draft-model-path OUT \\
      --speculative-num-steps 5 --speculative-eagle-topk 8 --speculative-num-draft-tokens 32

``speculators`` is vLLM's:

    vllm serve TARGET --dtype bfloat16 \\
      --speculative-config '{"method": "eagle3", "model": "OUT", "num_speculative_tokens": 5}'

Weights stay float32 as trained; ``--dtype`` is what the engine then computes in. The embedding of
tokens is the target's: SGLang takes it from there, vLLM's layout gets a copy. (vLLM needs none, but
the package speculators then reads uninitialized memory with transformers 5.23.)

Layer numbers: here and in vLLM index i is the input of the target's layer i. SGLang adds one to the
numbers it reads, so they are written one lower for it, and left out where its default is meant.
"""

import json
import shlex
from pathlib import Path
from typing import Literal

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor

from pipedraft.files import file_sha256, make_readable, to_json, write_folder
from pipedraft.models.dflash import DFlash
from pipedraft.models.draft import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    Description,
    Draft,
    copy_head,
    read_description,
)
from pipedraft.models.dspark import DSpark, DSparkConfig
from pipedraft.models.eagle import Eagle
from pipedraft.models.eagle3 import Eagle3
from pipedraft.models.exchange.card import CARD, LAYOUTS, CardSource, render_card
from pipedraft.models.fingerprint import TargetFiles, read_target
from pipedraft.models.mtp import MTP, MTP_PREFIX

Layout = Literal["sglang", "speculators"]
Config = dict[str, object]
"""config.json of an export."""

CHAIN_LENGTH = 5
"""Draft tokens in a row that the launch lines and vLLM's configuration ask for."""

HEADS: dict[str, type[Draft]] = {
    "eagle": Eagle,
    "eagle3": Eagle3,
    "mtp": MTP,
    "dflash": DFlash,
    "dspark": DSpark,
}

ORIGIN_FILE = "pipedraft.json"

VLLM_ONLY = (
    "fc_norm",
    "norm_output",
    "norm_before_fc",
    "norm_before_residual",
    "query_key_norm",
    "sliding_window",
)
"""Settings of EAGLE-3 heads that SGLang does not read."""


def export(folder: Path, layout: Layout, out: Path, *, target: str | None = None) -> list[Path]:
    """Write a checkpoint of a head in the layout of a serving engine.

    Args:
        folder: checkpoint folder.
        out: made by one rename when every file is written; must not hold anything yet.
        target: name of the target for the engine, where it is not the one of the training.

    Returns:
        The files.

    Raises:
        ValueError: another kind of draft, a head the layout cannot describe, another target, or a
            folder that is in use.
    """
    description = read_description(folder)
    kind = description["draft_type"]
    if layout not in LAYOUTS.get(kind, ()):
        *known, last = (name for name, layouts in LAYOUTS.items() if layout in layouts)
        raise ValueError(
            f"--checkpoint: {folder} holds a draft of type {kind!r}; the layout {layout} is for "
            f"{', '.join(known)} and {last} heads, give a checkpoint of one"
        )
    head = HEADS[kind].load(folder, description)
    assert isinstance(head, Eagle | Eagle3 | MTP | DFlash)
    if layout == "sglang" and target is not None:
        head.reference.check_fingerprint(read_target(target, None).fingerprint)
    name, revision = (target, None) if target else (head.reference.name, head.reference.revision)
    if head.shares_head:  # engines load an LM head with every draft
        found = read_target(name, revision)
        head.reference.check_fingerprint(found.fingerprint)
        copy_head(head, found.head_VH)
    if isinstance(head, MTP):
        config, weights = mtp_parts(head, read_target(name, revision))
    elif isinstance(head, Eagle):
        config, weights = eagle_config(head), eagle_weights(head)
    elif layout == "sglang" and not isinstance(head, DSpark):
        if isinstance(head, DFlash):
            config, weights = dflash_config(head), head.state_dict()
        else:
            config, weights = sglang_config(head), sglang_weights(head)
    else:
        found = read_target(name, revision)
        head.reference.check_fingerprint(found.fingerprint)
        architectures = found.config.get("architectures", [])
        if isinstance(head, Eagle3):
            config = speculators_config(head, name, architectures)
            weights = speculators_weights(head, found.embedding_VH)
        elif layout == "speculators" or not isinstance(head, DSpark):
            config = block_speculators_config(head, name, architectures)
            weights = block_speculators_weights(head, found.head_VH)
        else:
            config = dspark_config(head)
            own = {"embed_tokens.weight": found.embedding_VH, "lm_head.weight": found.head_VH}
            weights = head.state_dict() | {key: x.clone() for key, x in own.items()}

    if target is not None:
        description["target"] |= {"name": target, "revision": None}
    digest = file_sha256(folder / WEIGHTS_FILE)
    origin = Origin(layout=layout, weights_sha256=digest, description=description)
    card = render_card(origin.card_source().licensed(asks_hub=False))

    def fill(temporary: Path) -> None:
        (temporary / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
        save_file(weights, temporary / WEIGHTS_FILE, metadata={"format": "pt"})
        make_readable(temporary / WEIGHTS_FILE)
        (temporary / ORIGIN_FILE).write_bytes(to_json(origin))
        (temporary / CARD).write_text(card)

    return write_folder(out, fill, inputs=[folder])


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Origin of an exported folder: kept beside it for its card, unread by the engines."""

    layout: Layout
    weights_sha256: str
    """SHA-256 of the checkpoint's weights, by which an evaluation names them."""
    description: Description
    """config.json of the checkpoint, with the target's name for the engine."""

    @classmethod
    def read(cls, folder: Path) -> "Origin":
        try:
            return msgspec.json.decode((folder / ORIGIN_FILE).read_bytes(), type=cls)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"checkpoint: {folder / ORIGIN_FILE} is damaged ({error}); export it again"
            ) from error

    def card_source(self, place: str = CardSource.place) -> CardSource:
        target, kind = self.description["target"]["name"], self.description["draft_type"]
        launch = launch_line(self.layout, target, place, kind)
        return CardSource(
            description=self.description, place=place, layout=self.layout, launch=launch
        )


def launch_line(layout: Layout, target: str, out: Path | str, kind: str = "eagle3") -> str:
    """Shell command that serves ``target`` with the exported head."""
    place, target = shlex.quote(str(out)), shlex.quote(target)
    is_block = kind in (DFlash.draft_type, DSpark.draft_type)
    if layout == "speculators" and is_block:  # its files say the rest, the target too
        return f"vllm serve {place} --dtype bfloat16"
    if layout == "speculators":
        options = {"method": "eagle3", "model": str(out), "num_speculative_tokens": CHAIN_LENGTH}
        settings = shlex.quote(json.dumps(options))
        return f"vllm serve {target} --dtype bfloat16 --speculative-config {settings}"
    line = (
        f"python -m sglang.launch_server --model-path {target} --dtype bfloat16 "
        f"--speculative-algorithm {kind.upper()} --speculative-draft-model-path {place}"
    )
    if is_block:  # which is as long as its configuration says
        return line
    if kind == MTP.draft_type:  # a chain: the target's recurrent layers take no tree there
        line = line.replace(f" {kind.upper()} ", " NEXTN ")
        return (
            f"{line} --speculative-num-steps {CHAIN_LENGTH} --speculative-eagle-topk 1 "
            f"--speculative-num-draft-tokens {CHAIN_LENGTH + 1}"
        )
    return (
        f"{line} --speculative-num-steps {CHAIN_LENGTH} --speculative-eagle-topk 8 "
        "--speculative-num-draft-tokens 32"
    )


def target_and_kind(folder: Path) -> tuple[str, str]:
    """Name of the target, and draft_type, of a checkpoint."""
    description = read_description(folder)
    return description["target"]["name"], description["draft_type"]


# U draft vocabulary, V target vocabulary, H hidden

# -- layouts --------------------------------------------------------------------------------


def sglang_config(head: Eagle3) -> Config:
    """config.json of the authors' layout."""
    layers, last = head.config.feature_layers, head.config.num_target_layers
    used = [name for name in VLLM_ONLY if getattr(head.config, name)]
    if used:
        raise ValueError(
            f"--format: 'sglang' has no place for model.{used[0]}, which this head was trained "
            "with; give --format speculators"
        )
    if len(layers) != 3 or not all(0 < layer < last for layer in layers):
        raise ValueError(
            f"--format: 'sglang' fuses three layers in 1..{last - 1}, this head was trained with "
            f"model.feature_layers {list(layers)}; give --format speculators"
        )
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layer_config(head),
        **({"qkv_bias": True} if head.config.attention_bias else {}),
        "draft_vocab_size": len(head.draft_ids),
        "torch_dtype": "float32",
    }
    if layers != (2, last // 2, last - 3):
        numbers = [layer - 1 for layer in layers]
        config["eagle_config"] = {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": numbers,
        }
    return config


def sglang_weights(head: Eagle3) -> dict[str, Tensor]:
    weights = {name: value for name, value in head.state_dict().items() if name != "draft_ids"}
    return weights | vocabulary_maps(head)


def _speculators(kind: str, num_tokens: int, target: str, architectures: list[str]) -> Config:
    """Entries of every config.json in vLLM's layout, version 0.9 of the package speculators."""
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
            "verifier": {"name_or_path": target, "architectures": architectures},
        },
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def speculators_config(head: Eagle3, target: str, architectures: list[str]) -> Config:
    """config.json of vLLM's layout of EAGLE-3."""
    if head.config.attention_bias:
        raise ValueError(
            "--format: 'speculators' has no biases of queries, keys and values alone "
            "(model.attention_bias); give --format sglang"
        )
    window = {}
    if head.config.sliding_window is not None:
        window = {
            "layer_types": ["sliding_attention"],
            "sliding_window": head.config.sliding_window,
            "use_sliding_window": True,
        }
    return _speculators("eagle3", CHAIN_LENGTH, target, architectures) | {
        "architectures": ["Eagle3DraftModel"],
        "transformer_layer_config": _layer_config(head) | window,
        "draft_vocab_size": len(head.draft_ids),
        "eagle_aux_hidden_state_layer_ids": list(head.config.feature_layers),
        # vLLM takes a missing one for true.
        "norm_before_residual": head.config.norm_before_residual,
        "norm_before_fc": head.config.norm_before_fc,
        "fc_norm": head.config.fc_norm,
        "norm_output": head.config.norm_output,
    }


def speculators_weights(head: Eagle3, embedding_VH: Tensor) -> dict[str, Tensor]:
    renamed = {
        name.replace("midlayer.", "layers.0."): value
        for name, value in sglang_weights(head).items()
    }
    return renamed | {"embed_tokens.weight": embedding_VH}


def vocabulary_maps(head: Eagle3 | DFlash) -> dict[str, Tensor]:
    """d2t int64 [U]: target id minus draft id. t2d bool [V]: is in the draft vocabulary.

    Zeros and all true for the full vocabulary: SpecForge holds uninitialized maps without them.
    """
    t2d = torch.zeros(head.target_vocab_size, dtype=torch.bool)
    t2d[head.draft_ids] = True
    return {"d2t": head.draft_ids - torch.arange(len(head.draft_ids)), "t2d": t2d}


def eagle_config(head: Eagle) -> Config:
    """config.json of the authors' layout of EAGLE-1."""
    return {
        "architectures": ["LlamaForCausalLMEagle"],
        **_layer_config(head),
        "bias": head.config.fc_bias,
        "qkv_bias": head.config.attention_bias,
        "torch_dtype": "float32",
    }


def eagle_weights(head: Eagle) -> dict[str, Tensor]:
    """Weights without the embedding and the LM head, which engines take from the target."""
    return {
        name.replace("layer.", "layers.0.", 1) if name.startswith("layer.") else name: value
        for name, value in head.state_dict().items()
    }


def mtp_parts(head: MTP, found: TargetFiles) -> tuple[Config, dict[str, Tensor]]:
    """The target's config.json, its embedding and LM head, and the layer as it has it.

    Engines read the folder as they read the target's own when they look for its MTP layer.
    """
    if not head.config.native:
        raise ValueError(
            "--format: 'sglang' has no place for an MTP layer that is not the target's own; "
            "give a checkpoint that began with pipedraft models import --from TARGET"
        )
    head.reference.check_fingerprint(found.fingerprint)
    layers: Config = {"mtp_num_hidden_layers": 1}
    text = found.config.get("text_config")  # of models that also see
    config = found.config | (layers if text is None else {"text_config": text | layers})
    own = {MTP_PREFIX + name: value for name, value in head.state_dict().items()}
    return config, own | found.weights


def dflash_config(head: DFlash) -> Config:
    """config.json of the authors' layout of DFlash."""
    return {
        "architectures": ["DFlashDraftModel"],
        **_block_config(head, lowest=1),
        "dflash_config": {
            "mask_token_id": head.config.mask_token_id,
            "target_layer_ids": [layer - 1 for layer in head.config.feature_layers],
        },
    }


def dspark_config(head: DSpark) -> Config:
    """config.json of the authors' layout of DSpark, DeepSpec's."""
    config = head.config
    if not config.sample_from_anchor:
        raise ValueError(
            "--format: 'sglang' has no place for model.sample_from_anchor false, which this head "
            "was trained with; give --format speculators"
        )
    pairs = {"markov_head_type": "vanilla"} if config.markov_rank else {}
    read = {"confidence_head_with_markov": config.confidence == "pair"}
    return {
        "architectures": ["Qwen3DSparkModel"],
        **_block_config(head, lowest=0),
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": [layer - 1 for layer in config.feature_layers],
        "num_anchors": 512,  # its reader wants one, which decoding never reads
        "markov_rank": config.markov_rank,
        **pairs,
        "enable_confidence_head": config.confidence != "none",
        **(read if config.confidence != "none" else {}),
    }


def _block_config(head: DFlash, lowest: int) -> Config:
    """Entries of both block heads; a layer number is of a layer's output, -1 of the embedding."""
    layers, last = head.config.feature_layers, head.config.num_target_layers
    if not all(lowest <= layer < last for layer in layers):
        raise ValueError(
            f"--format: 'sglang' fuses layers in {lowest}..{last - 1}, this head was trained with "
            f"model.feature_layers {list(layers)}; give --format speculators"
        )
    if head.config.draft_vocab_size is not None:
        raise ValueError(
            "--format: 'sglang' has no place for model.draft_vocab_size "
            f"{head.config.draft_vocab_size}; give --format speculators"
        )
    return {
        **_layer_config(head),
        "layer_types": ["full_attention"] * head.config.num_layers,
        "num_target_layers": last,
        "block_size": head.config.block_size,
        "torch_dtype": "float32",
    }


def block_speculators_config(head: DFlash, target: str, architectures: list[str]) -> Config:
    """config.json of vLLM's layout of DFlash and DSpark."""
    config, own = head.config, {}
    if isinstance(config, DSparkConfig):
        own = {
            "markov_rank": config.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": config.confidence != "none",
            "confidence_head_with_markov": config.confidence == "pair",
        }
    kinds = {"layer_types": ["full_attention"] * config.num_layers}
    return _speculators(head.draft_type, config.num_tokens, target, architectures) | {
        "architectures": ["DSparkDraftModel" if own else "DFlashDraftModel"],
        "transformer_layer_config": _layer_config(head) | kinds,
        "draft_vocab_size": len(head.draft_ids),
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": list(config.feature_layers),
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.first_row == 0,
        # Of windows, which there are none of; vLLM takes false for a causal block all the same.
        "sliding_window_non_causal": True,
        **own,
    }


def block_speculators_weights(head: DFlash, head_VH: Tensor) -> dict[str, Tensor]:
    """Embedding and LM head are read off the target, but for the rows of a draft vocabulary."""
    weights = head.state_dict()
    if weights.pop("draft_ids", None) is None:
        return weights
    return weights | vocabulary_maps(head) | {"lm_head.weight": head_VH[head.draft_ids]}


def _layer_config(head: Draft) -> Config:
    """The head's decoder layers as a configuration of a Llama or Qwen3.

    Rotary positions are given twice: readers before transformers 5 know only the first form.
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
