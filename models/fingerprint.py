"""Which target a draft belongs to, and which tokenizer: by contents and not by names."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pipedraft.files import Values
from pipedraft.pretrained import open_weights, read_config, weight_files

HASH_ROWS = 4096  # weight rows cast to float32 at a time, so that hashing needs no second copy
DECODERS = ("model.", "model.language_model.")
"""Prefixes of a decoder's tensors in its files."""
NARROW = {torch.bfloat16: "BF16", torch.float16: "F16"}
"""As safetensors calls them."""


def target_fingerprint(model: PreTrainedModel) -> dict[str, int | str]:
    """Identify the weights a draft shares with its target.

    ``hash`` is SHA-256 over the float32 bytes of embedding, final norm and LM head (a tied head
    once), the same in whichever dtype they are loaded.
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
    """Weights of a model as its files have them, where loading has rounded those to 16 bits.

    Args:
        weights: by the names that they have in a file of the decoder alone.
    """
    is_narrow = any(weight.dtype in NARROW for weight in weights.values())
    if not is_narrow or not model.name_or_path:
        return [*weights.values()]
    name, revision = str(model.name_or_path), getattr(model.config, "_commit_hash", None)
    try:
        files = weight_files(name, revision)
    except ValueError:  # it was made in code, or its folder is gone
        return [*weights.values()]
    found = []
    for own, weight in weights.items():
        keys = (own.replace(DECODERS[0], prefix, 1) for prefix in DECODERS)
        key = next((key for key in keys if key in files), None)
        if key is not None and weight.dtype in NARROW:
            with open_weights(name, revision, files[key]) as file:
                is_rounded = file.get_slice(key).get_dtype() != NARROW[weight.dtype]
                stored = file.get_tensor(key) if is_rounded else weight
            # A model may have been tuned since.
            if is_rounded and torch.equal(stored.to(weight.dtype), weight.detach().cpu()):
                weight = stored
        found.append(weight)
    return found


def weights_hash(weights: Sequence[Tensor]) -> str:
    """SHA-256 over the float32 bytes of weights, in order."""
    digest = hashlib.sha256()
    for weight in weights:
        for rows in weight.detach().split(HASH_ROWS):
            digest.update(rows.float().cpu().contiguous().view(-1).numpy())
    return digest.hexdigest()


def fingerprint_mismatch(a: dict[str, int | str], b: dict[str, int | str]) -> str | None:
    """Name the first field of ``b`` in which two fingerprints differ, with both values."""
    for name, value in b.items():
        if a.get(name) != value:
            return f"{name}: {a.get(name)} != {value}"
    return None


@dataclass(frozen=True)
class TargetFiles:
    """Files of a target's folder that an export or an import needs."""

    config: Values
    """config.json."""
    weights: dict[str, Tensor]
    """By the target's names: embedding, final norm, and an LM head that is not tied."""
    fingerprint: dict[str, int | str]

    @property
    def embedding_VH(self) -> Tensor:
        return [*self.weights.values()][0]

    @property
    def norm_H(self) -> Tensor:
        return [*self.weights.values()][1]

    @property
    def head_VH(self) -> Tensor:
        """A tied one is the embedding."""
        return [*self.weights.values(), self.embedding_VH][2]


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
    return TargetFiles(config, dict(zip(keys, weights, strict=True)), fingerprint)


# Three hashes of a tokenizer, each stored or sent somewhere: its value is a contract.


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of the whole tokenizer, of its vocabulary where it has no serial form (manifest)."""
    if tokenizer.is_fast:
        text = tokenizer.backend_tokenizer.to_str()
    else:
        text = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(text.encode()).hexdigest()


def template_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of the tokens and the chat template (stored hidden states)."""
    parts = [sorted(tokenizer.get_vocab().items()), tokenizer.chat_template]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def vocabulary_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of which token every id is (sessions with a server)."""
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return hashlib.sha256(msgspec.msgpack.encode(tokens)).hexdigest()
