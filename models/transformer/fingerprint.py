"""Identify a draft's target and a tokenizer by contents instead of names."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...files import Values
from ...pretrained import load_config, read_config
from ...weights import open_weights, same_tensors, weight_files

HASH_ROWS = 4096  # rows cast to float32 at a time, so hashing needs no second copy
DECODERS = ("model.", "model.language_model.", "language_model.model.", "model.text_model.")
"""Prefixes of decoder tensor names in weight files."""
HEAD = "lm_head.weight"
HEADS = (HEAD, "language_model.lm_head.weight")
"""Names of the LM head in weight files."""
NARROW = {torch.bfloat16: "BF16", torch.float16: "F16"}
"""16-bit types, and their names in safetensors."""


def target_fingerprint(model: PreTrainedModel) -> dict[str, int | str]:
    """Identify the weights a draft shares with its target.

    ``hash`` is SHA-256 over embedding, final norm and LM head (a tied head once), as float32 bytes.
    So it does not depend on the loading dtype.
    """
    decoder = model.get_decoder()
    weights = {
        "model.embed_tokens.weight": decoder.embed_tokens.weight,
        "model.norm.weight": decoder.norm.weight,
    }
    if model.lm_head.weight is not decoder.embed_tokens.weight:
        weights["lm_head.weight"] = model.lm_head.weight
    return {
        "hidden_size": decoder.config.hidden_size,
        "vocab_size": decoder.config.vocab_size,
        "num_layers": decoder.config.num_hidden_layers,
        "hash": weights_hash(as_stored(model, weights)),
    }


def as_stored(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the weights, with the files' precision where loading rounded them to 16 bits.

    Args:
        weights: keyed by their names in a decoder-only file.
    """
    is_narrow = any(weight.dtype in NARROW for weight in weights.values())
    if not is_narrow or not model.name_or_path:
        return [*weights.values()]
    name, revision = str(model.name_or_path), getattr(model.config, "_commit_hash", None)
    try:
        files = weight_files(name, revision)
    except ValueError:  # made in code, or its folder is gone
        return [*weights.values()]
    found = []
    for own, weight in weights.items():
        keys = (own.replace(DECODERS[0], prefix, 1) for prefix in DECODERS)
        key = next((key for key in keys if key in files), None)
        if key is not None and weight.dtype in NARROW:
            with open_weights(name, revision, files[key]) as file:
                is_rounded = file.get_slice(key).get_dtype() != NARROW[weight.dtype]
                stored = file.get_tensor(key) if is_rounded else weight
            # Use the stored weight only if the loaded one is its rounding: the model may be tuned.
            if is_rounded and torch.equal(stored.to(weight.dtype), weight.detach().cpu()):
                weight = stored
        found.append(weight)
    return found


def weights_hash(weights: Sequence[Tensor]) -> str:
    """Return SHA-256 over the weights' float32 bytes, in order."""
    digest = hashlib.sha256()
    for weight in weights:
        for rows in weight.detach().split(HASH_ROWS):
            # float32 holds every 16-bit value, so narrow and wide copies hash alike.
            digest.update(rows.float().cpu().contiguous().view(-1).numpy())
    return digest.hexdigest()


def fingerprint_mismatch(a: dict[str, int | str], b: dict[str, int | str]) -> str | None:
    """Return the first differing field of ``b``, with both values."""
    for name, value in b.items():  # fields missing in b are not compared: evolved targets
        if a.get(name) != value:
            return f"{name}: {a.get(name)} != {value}"
    return None


@dataclass(frozen=True)
class TargetFiles:
    """Target files needed by an export or an import."""

    config: Values
    """config.json."""
    weights: dict[str, Tensor]
    """Embedding, final norm and an untied LM head, by the target's names."""
    fingerprint: dict[str, int | str]

    @property
    def embedding_VH(self) -> Tensor:
        return [*self.weights.values()][0]

    @property
    def norm_H(self) -> Tensor:
        return [*self.weights.values()][1]

    @property
    def head_VH(self) -> Tensor:
        """Return the LM head, which is the embedding if tied."""
        return [*self.weights.values(), self.embedding_VH][2]


def read_target(name: str, revision: str | None) -> TargetFiles:
    """Read the configuration and the three weights covered by the fingerprint.

    Raises:
        ValueError: target not found, or no safetensors weights.
    """
    config = read_config(name, revision)
    sizes = config.get("text_config", config)
    text = load_config(name, revision).get_text_config()  # the file may leave defaults out
    files = weight_files(name, revision)
    prefix = next((p for p in DECODERS if p + "embed_tokens.weight" in files), None)
    if prefix is None:
        raise ValueError(
            f"target: {name!r} names its embedding in none of the ways known, "
            f"{', '.join(p + 'embed_tokens.weight' for p in DECODERS)}; give another --target"
        )
    keys = [prefix + "embed_tokens.weight", prefix + "norm.weight"]
    is_tied = sizes.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    head = next((name for name in HEADS if name in files), None)
    # A tied LM head may be repeated, but another one is the model's own.
    if head is not None and not (is_tied and same_tensors(name, revision, files, keys[0], head)):
        keys.append(head)
    weights = []
    for key in keys:
        with open_weights(name, revision, files[key]) as file:
            weights.append(file.get_tensor(key))
    fingerprint = {
        "hidden_size": text.hidden_size,
        "vocab_size": text.vocab_size,
        "num_layers": text.num_hidden_layers,
        "hash": weights_hash(weights),
    }
    return TargetFiles(config, dict(zip(keys, weights, strict=True)), fingerprint)


# Three tokenizer hashes. Each is stored or sent, so its value is a contract.


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash the tokenizer for manifests, or only its vocabulary if the tokenizer is slow."""
    if tokenizer.is_fast:
        text = tokenizer.backend_tokenizer.to_str()
    else:
        # Sorted, because the order of a vocabulary is no part of its meaning.
        text = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(text.encode()).hexdigest()


def template_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash the tokens and the chat template (for stored hidden states)."""
    parts = [sorted(tokenizer.get_vocab().items()), tokenizer.chat_template]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def vocabulary_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash the token for every id (for server sessions)."""
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return hashlib.sha256(msgspec.msgpack.encode(tokens)).hexdigest()
