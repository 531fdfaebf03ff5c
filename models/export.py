"""EAGLE-3 heads in the layouts that serving engines load.

``sglang`` is the layout of the authors (`LlamaForCausalLMEagle3`):

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
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor

from pipedraft.files import file_sha256, to_json, write_folder
from pipedraft.models.card import CARD, CardSource, license_of, render_card
from pipedraft.models.draft import CONFIG_FILE, WEIGHTS_FILE, Description, read_description
from pipedraft.models.eagle3 import Eagle3
from pipedraft.models.fingerprint import weights_hash
from pipedraft.pretrained import open_weights, read_config, weight_files

Layout = Literal["sglang", "speculators"]
Config = dict[str, object]
"""config.json of an export."""

CHAIN_LENGTH = 5
"""Draft tokens in a row that the launch lines and vLLM's configuration ask for."""

ORIGIN_FILE = "pipedraft.json"

DECODERS = ("model.", "model.language_model.")
"""What the names of the decoder's weights start with; the second in models that also see."""


def export(folder: Path, layout: Layout, out: Path, *, target: str | None = None) -> list[Path]:
    """Write a checkpoint of an EAGLE-3 head in the layout of a serving engine.

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
    if description["draft_type"] != Eagle3.draft_type:
        raise ValueError(
            f"--checkpoint: {folder} holds a draft of type {description['draft_type']!r}; the "
            f"layouts are for {Eagle3.draft_type} heads, give a checkpoint of one"
        )
    head = Eagle3.load(folder, description)
    assert isinstance(head, Eagle3)
    if layout == "sglang":
        config, weights = sglang_config(head), sglang_weights(head)
        if target is not None:
            head.reference.check_fingerprint(read_target(target, None).fingerprint)
    else:
        name, revision = (
            (target, None) if target else (head.reference.name, head.reference.revision)
        )
        found = read_target(name, revision)
        head.reference.check_fingerprint(found.fingerprint)
        config = speculators_config(head, name, found.architectures)
        weights = speculators_weights(head, found.embedding_VH)

    if target is not None:
        description["target"] |= {"name": target, "revision": None}
    digest = file_sha256(folder / WEIGHTS_FILE)
    origin = Origin(layout=layout, weights_sha256=digest, description=description)
    card = render_card(origin.card_source())

    def fill(temporary: Path) -> None:
        (temporary / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
        save_file(weights, temporary / WEIGHTS_FILE, metadata={"format": "pt"})
        (temporary / ORIGIN_FILE).write_bytes(to_json(origin))
        (temporary / CARD).write_text(card)

    return write_folder(out, fill, inputs=[folder])


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """What an exported folder was made of: kept beside it for its card, unread by the engines."""

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

    def card_source(self) -> CardSource:
        reference = self.description["target"]
        return CardSource(
            description=self.description,
            layout=self.layout,
            launch=launch_line(self.layout, reference["name"], CardSource.place),
            license=license_of(reference["name"], reference.get("revision"), asks_hub=False),
        )


def launch_line(layout: Layout, target: str, out: Path | str) -> str:
    """Shell command that serves ``target`` with the exported head."""
    if layout == "speculators":
        options = {"method": "eagle3", "model": str(out), "num_speculative_tokens": CHAIN_LENGTH}
        return f"vllm serve {target} --dtype bfloat16 --speculative-config '{json.dumps(options)}'"
    return (
        f"python -m sglang.launch_server --model-path {target} --dtype bfloat16 "
        f"--speculative-algorithm EAGLE3 --speculative-draft-model-path {out} "
        f"--speculative-num-steps {CHAIN_LENGTH} --speculative-eagle-topk 8 "
        "--speculative-num-draft-tokens 32"
    )


def target_name(folder: Path) -> str:
    return read_description(folder)["target"]["name"]


# U draft vocabulary, V target vocabulary, H hidden

# -- layouts --------------------------------------------------------------------------------


def sglang_config(head: Eagle3) -> Config:
    """config.json of the authors' layout."""
    layers, last = head.config.feature_layers, head.config.num_target_layers
    if head.config.fc_norm or head.config.norm_output:
        raise ValueError(
            "--format: 'sglang' has no place for model.fc_norm and model.norm_output, which this "
            "head was trained with; give --format speculators"
        )
    if len(layers) != 3 or not all(0 < layer < last for layer in layers):
        raise ValueError(
            f"--format: 'sglang' fuses three layers in 1..{last - 1}, this head was trained with "
            f"model.feature_layers {list(layers)}; give --format speculators"
        )
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layer_config(head),
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


def speculators_config(head: Eagle3, target: str, architectures: list[str]) -> Config:
    """config.json of vLLM's layout, version 0.9 of the package speculators."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": CHAIN_LENGTH,
        "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target, "architectures": architectures},
        },
        "transformer_layer_config": _layer_config(head),
        "draft_vocab_size": len(head.draft_ids),
        "eagle_aux_hidden_state_layer_ids": list(head.config.feature_layers),
        "norm_before_residual": False,  # vLLM takes a missing one for true
        "fc_norm": head.config.fc_norm,
        "norm_output": head.config.norm_output,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def speculators_weights(head: Eagle3, embedding_VH: Tensor) -> dict[str, Tensor]:
    renamed = {
        name.replace("midlayer.", "layers.0."): value
        for name, value in sglang_weights(head).items()
    }
    return renamed | {"embed_tokens.weight": embedding_VH}


def vocabulary_maps(head: Eagle3) -> dict[str, Tensor]:
    """d2t int64 [U]: target id minus draft id. t2d bool [V]: is in the draft vocabulary.

    None of both where the draft vocabulary is the target's.
    """
    num_tokens, ids = head.reference.fingerprint["vocab_size"], head.draft_ids
    if len(ids) == num_tokens:
        return {}
    t2d = torch.zeros(num_tokens, dtype=torch.bool)
    t2d[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": t2d}


def _layer_config(head: Eagle3) -> Config:
    """The head's decoder layer as a configuration of a Llama with one layer.

    Rotary positions are given twice: readers before transformers 5 know only the first form.
    """
    layer = head.layer_config
    rope = dict(layer.rope_parameters)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "model_type": "llama",
        "vocab_size": head.reference.fingerprint["vocab_size"],
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": 1,
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


# -- the target, without loading it ---------------------------------------------------------


@dataclass(frozen=True)
class TargetFiles:
    """What an export needs of a target's folder."""

    architectures: list[str]
    embedding_VH: Tensor
    fingerprint: dict[str, int | str]


def read_target(name: str, revision: str | None) -> TargetFiles:
    """Read the configuration and the three weights that the fingerprint covers.

    Raises:
        ValueError: no such target, or no safetensors weights.
    """
    config = read_config(name, revision)
    sizes = config.get("text_config", config)
    files = weight_files(name, revision)
    prefix = next((p for p in DECODERS if p + "embed_tokens.weight" in files), None)
    if prefix is None:
        raise ValueError(
            f"target: {name!r} names its embedding in none of the ways known, "
            f"{' and '.join(p + 'embed_tokens.weight' for p in DECODERS)}; give another --target"
        )
    keys = [prefix + "embed_tokens.weight", prefix + "norm.weight"]
    is_tied = sizes.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    if "lm_head.weight" in files and not is_tied:
        keys.append("lm_head.weight")
    weights = []
    for key in keys:
        with open_weights(name, revision, files[key]) as file:
            weights.append(file.get_tensor(key))
    fingerprint = {
        "hidden_size": sizes["hidden_size"],
        "vocab_size": sizes["vocab_size"],
        "num_layers": sizes["num_hidden_layers"],
        "hash": weights_hash(weights),
    }
    return TargetFiles(config.get("architectures", []), weights[0], fingerprint)
