"""Which target a draft belongs to, and which tokenizer: by contents and not by names."""

import hashlib
import json
from collections.abc import Sequence

import msgspec
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

HASH_ROWS = 4096  # weight rows cast to float32 at a time, so that hashing needs no second copy


def target_fingerprint(model: PreTrainedModel) -> dict[str, int | str]:
    """Identify the weights a draft shares with its target.

    ``hash`` is SHA-256 over the float32 bytes of embedding, final norm and LM head (a tied head
    once). It is the same for a bf16 checkpoint loaded in bf16 or fp32, not for an fp32 one.
    """
    decoder = model.get_decoder()
    weights = [decoder.embed_tokens.weight, decoder.norm.weight]
    if model.lm_head.weight is not decoder.embed_tokens.weight:
        weights.append(model.lm_head.weight)
    return {
        "hidden_size": decoder.config.hidden_size,
        "vocab_size": decoder.config.vocab_size,
        "num_layers": decoder.config.num_hidden_layers,
        "hash": weights_hash(weights),
    }


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
