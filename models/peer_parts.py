"""What every layout of a head that others trained is read by: settings, vocabulary, tensors.

A setting or a tensor that cannot be expressed in ours is refused by its name and value.
"""

# H hidden, V target vocabulary, U draft vocabulary

from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec
import torch
from torch import Tensor
from transformers import AutoConfig, LlamaConfig

from pipedraft.models.draft import Draft, TargetReference
from pipedraft.models.layers import LayerConfig
from pipedraft.models.peer_files import Settings, TargetFiles, Weights
from pipedraft.pretrained import explained

FAMILIES = ("llama", "qwen2", "qwen3")
"""model_type of a head's decoder layer."""
ROPE_TYPES = ("default", "linear", "yarn", "llama3")
UNREAD = ("verifier_norm.", "verifier_lm_head.", "rotary_emb.", "layers.0.self_attn.rotary_emb.")
"""Tensors that are the target's, or made anew from the configuration."""
EMBEDDING = "embed_tokens.weight"

Head = TypeVar("Head", bound=Draft)
Fields = TypeVar("Fields", bound=msgspec.Struct)


@dataclass(frozen=True)
class Peer:
    """A head as its trainer wrote it."""

    name: str
    """What the user gave."""
    config: Settings
    weights: Weights
    revision: str | None = None

    def refuse(self, key: str, value: object, fix: str) -> ValueError:
        return ValueError(f"--from: {self.name!r} has {key} {value!r}; {fix}")


def size_of(reference: TargetReference) -> int:
    return int(reference.fingerprint["vocab_size"])


def check(peer: Peer, key: str, value: object, wanted: object) -> None:
    if value != wanted:
        raise peer.refuse(key, value, f"only {wanted!r} can be expressed here")


def convert(peer: Peer, settings: Settings, kind: type[Fields]) -> Fields:
    try:
        return msgspec.convert(settings, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"--from: {peer.name!r}, config.json: {error}; copy it again") from error


def layer_of(peer: Peer, settings: Settings, reference: TargetReference) -> LayerConfig:
    """Shape of the decoder layer; what the tensors say is not asked of the configuration."""
    own, name = peer.weights, peer.name
    kind = settings.get("model_type")
    known = {key: value for key, value in settings.items() if key != "architectures"}
    with explained("--from", name):
        if kind in FAMILIES:
            config = AutoConfig.for_model(**known)
        else:
            known.pop("model_type", None)
            config = LlamaConfig(**known)
        layer = LayerConfig.from_target(config)
    check(peer, "hidden_size", layer.hidden_size, reference.fingerprint["hidden_size"])
    check(peer, "vocab_size", config.vocab_size, size_of(reference))
    rope = config.rope_parameters
    if rope["rope_type"] not in ROPE_TYPES or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise peer.refuse("rope_parameters", dict(rope), f"known types: {', '.join(ROPE_TYPES)}")
    gate = next((x for key, x in own.items() if key.endswith("mlp.gate_proj.weight")), None)
    # A size that the file does not hold would be memory for nothing.
    if gate is not None:
        check(peer, "intermediate_size", layer.intermediate_size, gate.shape[0])
    return replace(
        layer,
        has_query_key_norm=any("q_norm." in key for key in own),
        has_attention_bias=any(key.endswith("q_proj.bias") for key in own),
    )


def vocabulary_of(
    peer: Peer, weights: Weights, size: int | None, reference: TargetReference
) -> tuple[Weights, Tensor]:
    """The weights without the maps, and the target id of every draft token."""
    weights = dict(weights)
    d2t, t2d = weights.pop("d2t", None), weights.pop("t2d", None)
    num_tokens, head = size_of(reference), weights.get("lm_head.weight")
    num_rows = num_tokens if head is None else len(head)
    check(peer, "draft_vocab_size", size or num_rows, num_rows)
    if d2t is None:
        if num_rows != num_tokens:
            raise ValueError(f"--from: {peer.name!r} lacks d2t for {num_rows} of {num_tokens} ids")
        return weights, torch.arange(num_tokens)
    if d2t.shape != (num_rows,) or d2t.is_floating_point():
        raise peer.refuse("d2t", tuple(d2t.shape), f"{num_rows} integers belong to its LM head")
    ids = torch.arange(num_rows) + d2t.long()
    check_ids(peer, "d2t", ids, num_tokens)
    if t2d is not None and not torch.equal(t2d.bool().nonzero()[:, 0], ids.sort().values):
        raise peer.refuse("t2d", int(t2d.sum()), "it names other tokens than d2t")
    return weights, ids


def check_ids(peer: Peer, key: str, ids: Tensor, num_tokens: int) -> None:
    """Refuse draft tokens that are none of the target's, or twice the same."""
    if len(ids.unique()) != len(ids) or not bool(((ids >= 0) & (ids < num_tokens)).all()):
        found = f"{int(ids.min())}..{int(ids.max())}"
        raise peer.refuse(key, found, f"ids of 0..{num_tokens - 1}, each once")


def fill(peer: Peer, head: Head, weights: Weights, found: TargetFiles) -> Head:
    """The head with these weights, in float32, each of which it must have and no other."""
    embedding = weights.pop(EMBEDDING, None)
    if embedding is not None:
        check_shared(peer, EMBEDDING, embedding, found.embedding_VH)
    weights = {key: x for key, x in weights.items() if not key.startswith(UNREAD)}
    expected = head.state_dict()
    for key in sorted(weights.keys() ^ expected.keys()):
        if key in expected:
            raise ValueError(f"--from: {peer.name!r} lacks {key}; copy the head again")
        raise peer.refuse("tensor", key, "such a head cannot be expressed here")
    for key, value in weights.items():
        if value.shape != expected[key].shape:
            raise peer.refuse(
                key, tuple(value.shape), f"its configuration says {tuple(expected[key].shape)}"
            )
        if value.is_floating_point() and not value.isfinite().all():
            raise peer.refuse(key, "NaN or infinite", "use another copy")
    head.load_state_dict(weights)
    return head.eval().requires_grad_(False)


def check_shared(peer: Peer, key: str, theirs: Tensor, targets: Tensor) -> None:
    ours = targets.to(theirs.dtype)
    if theirs.shape != ours.shape or not torch.equal(theirs, ours):
        raise peer.refuse(key, tuple(theirs.shape), "it is not the target's; give its own --target")
