"""Export EAGLE-3, DFlash and DSpark heads as GGUF files, as llama.cpp's converter writes them.

    llama-server -m TARGET.gguf -md OUT/draft.gguf --spec-type draft-eagle3 --spec-draft-n-max 3

llama.cpp reads the embedding and, for a whole vocabulary, the LM head of DFlash and DSpark from the
target. The tokenizer is copied from the target's GGUF file, because llama.cpp compares the draft's
with the target's. Names and keys follow ``conversion/llama.py`` and ``conversion/qwen.py`` of
llama.cpp 0.5.0. DSpark has DFlash's architecture and a token-pair table there.
"""

# N query or key heads, D head size

import re
import shlex
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import requirement
from ...files import write_folder
from ..heads.dflash import DFlash
from ..heads.dspark import DSpark
from ..heads.eagle3 import Eagle3
from .chain import draft_tokens, validated_acceptance
from .export import HeadTarget, load_head, no_place, prepare

FILE = "draft.gguf"
UNREAD = ("fc_norm", "norm_output", "query_key_norm", "sliding_window")
"""EAGLE-3 settings ignored by llama.cpp."""
NUM_EAGLE_LAYERS = 3
HEADS = (Eagle3, DFlash, DSpark)
AROUND = {
    "norm": "output_norm",
    "lm_head": "output",
    "fc": "fc",
    "hidden_norm": "enc.output_norm",
    "input_norm": "enc.output_norm",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
}
BLOCK = {
    "hidden_norm": "attn_norm_2",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Decoder layer modules, and their names in a GGUF file."""


def export_gguf(folder: Path, out: Path, *, target: str | None) -> tuple[list[Path], str]:
    """Write a head's checkpoint as ``out``/draft.gguf.

    Args:
        folder: checkpoint folder.
        target: the target's GGUF file, in any quantization.

    Returns:
        The files, and a shell command to serve the target with the head.

    Raises:
        ValueError: llama.cpp has no form for the head, or the GGUF file is another target's.
    """
    if target is None or not target.endswith(".gguf") or not Path(target).is_file():
        raise ValueError(
            f"--target: {target!r} is no GGUF file; --format gguf copies the tokenizer of the "
            "target's, give the file that llama-server -m loads"
        )
    head, description = load_head(folder, "gguf", [one.draft_type for one in HEADS])
    assert isinstance(head, Eagle3 | DFlash)
    own_target = HeadTarget(head.reference, folder)
    prepare(head, own_target.files if head.shares_head else None)
    check_head(head)
    tokenizer = read_tokenizer(Path(target), head)
    tensors = tensors_of(head, own_target)
    num_tokens = draft_tokens(head, validated_acceptance(description))

    def fill(temporary: Path) -> None:
        write_file(temporary / FILE, head, tensors, tokenizer)

    files = write_folder(out, fill, inputs=[folder])
    line = (
        f"llama-server -m {shlex.quote(target)} -md {shlex.quote(str(out / FILE))} "
        f"--spec-type draft-{head.draft_type} --spec-draft-n-max {num_tokens}"
    )
    return files, line


def check_head(head: Eagle3 | DFlash) -> None:
    """Refuse a setting that llama.cpp does not support, and name it."""
    config, rope = head.config, head.layer_config.rope_parameters
    found: dict[str, Any] = {}
    if isinstance(head, Eagle3):
        found = {name: getattr(config, name) for name in UNREAD if getattr(config, name)}
        if len(config.feature_layers) != NUM_EAGLE_LAYERS:
            found["feature_layers"] = list(config.feature_layers)
    if isinstance(head, DSpark) and not head.config.markov_rank:  # would load as a DFlash head
        found["markov_rank"] = 0
    if rope["rope_type"] != "default":  # the writer below stores a base, no scaling
        found["rope_type"] = rope["rope_type"]
    for name, value in found.items():
        raise no_place("gguf", name, value)


def tensors_of(head: Eagle3 | DFlash, target: HeadTarget) -> dict[str, Tensor]:
    """Return tensors by GGUF name.

    EAGLE-3's query and key rows are permuted, because llama.cpp rotates neighboring rows there. In
    DFlash it rotates halves, as this package does.
    """
    layer = head.layer_config
    tensors: dict[str, Tensor] = {}
    heads = {"attn_q": layer.num_heads, "attn_k": layer.num_key_value_heads}
    weights = head.state_dict()
    weights.pop("draft_ids", None)  # written as d2t below
    if isinstance(head, DSpark) and head.config.confidence != "pair":
        # llama.cpp knows no other confidence head. Without one it drafts the same tokens.
        weights = {name: x for name, x in weights.items() if "confidence_head" not in name}
    for name, value in weights.items():
        stem, _, part = name.rpartition(".")
        match = re.fullmatch(r"(?:midlayer|layers\.(\d+))\.(.+)", stem)
        if match is None:
            tensors[f"{AROUND[stem]}.{part}"] = value
            continue
        inner = BLOCK[match[2]]
        if isinstance(head, Eagle3) and inner in heads:
            # Interleave the halves: rows i and i + D / 2 become neighbors 2 i and 2 i + 1.
            halves = value.unflatten(0, (heads[inner], 2, -1))
            value = halves.transpose(1, 2).flatten(0, 2)
        tensors[f"blk.{match[1] or 0}.{inner}.weight"] = value
    if len(head.draft_ids) < head.target_vocab_size:
        tensors["d2t"] = head.draft_ids
        if isinstance(head, DFlash):  # an EAGLE-3 head has its own LM head
            tensors["output.weight"] = target.files.head_VH[head.draft_ids]
    return tensors


def read_tokenizer(file: Path, head: Eagle3 | DFlash) -> dict[str, Any]:
    """Return the tokenizer fields from the target's GGUF file.

    Raises:
        ValueError: the file belongs to another target.
    """
    gguf = _library()
    try:
        fields = gguf.GGUFReader(file).fields
        architecture = fields["general.architecture"].contents()
        own = {
            "hidden_size": fields[f"{architecture}.embedding_length"].contents(),
            "num_layers": fields[f"{architecture}.block_count"].contents(),
            "vocab_size": len(fields["tokenizer.ggml.tokens"].data),
        }
    except (KeyError, ValueError, OSError) as error:
        raise ValueError(f"--target: {str(file)!r} is no GGUF model ({error!r})") from error
    for name, value in own.items():
        if head.reference.fingerprint[name] != value:
            raise ValueError(
                f"--target: {str(file)!r} is another target: {name}: "
                f"{head.reference.fingerprint[name]} != {value}; give the head's own as GGUF"
            )
    return {name: x for name, x in fields.items() if name.startswith("tokenizer.")}


def write_file(
    path: Path, head: Eagle3 | DFlash, tensors: dict[str, Tensor], tokenizer: dict[str, Any]
) -> None:
    gguf = _library()
    layer, config = head.layer_config, head.config
    kind = "eagle3" if isinstance(head, Eagle3) else "dflash"
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(layer.max_positions)
    writer.add_embedding_length(layer.hidden_size)
    writer.add_feed_forward_length(layer.intermediate_size)
    writer.add_head_count(layer.num_heads)
    writer.add_head_count_kv(layer.num_key_value_heads)
    writer.add_key_length(layer.head_size)
    writer.add_value_length(layer.head_size)
    writer.add_layer_norm_rms_eps(layer.rms_norm_eps)
    writer.add_rope_freq_base(float(layer.rope_parameters["rope_theta"]))
    writer.add_rope_dimension_count(layer.head_size)
    writer.add_vocab_size(head.target_vocab_size)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_array(f"{kind}.target_layers", list(config.feature_layers))
    if isinstance(head, Eagle3):
        writer.add_uint32(f"{kind}.target_hidden_size", layer.hidden_size)
        writer.add_bool(f"{kind}.norm_before_residual", head.config.norm_before_residual)
        writer.add_bool(f"{kind}.norm_before_fc", head.config.norm_before_fc)
    else:
        writer.add_uint32(f"{kind}.block_size", head.config.block_size)
        if isinstance(head, DSpark):
            writer.add_bool(f"{kind}.sample_from_anchor", head.config.sample_from_anchor)
            has_confidence = "conf_proj.weight" in tensors
            writer.add_bool(f"{kind}.has_confidence_head", has_confidence)
        # The head's own mask token replaces the one in the target's file.
        tokenizer = {name: x for name, x in tokenizer.items() if "mask_token_id" not in name}
        assert head.config.mask_token_id is not None, "refused by DFlash"
        writer.add_uint32("tokenizer.ggml.mask_token_id", head.config.mask_token_id)
    for name, field in tokenizer.items():
        is_array = field.types[0] == gguf.GGUFValueType.ARRAY
        inner = field.types[-1] if is_array else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    for name, value in tensors.items():
        # Token ids must stay integers.
        whole = torch.int64 if name == "d2t" else torch.float32
        writer.add_tensor(name, value.detach().to(whole).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _library() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ValueError(
            f"--format: 'gguf' needs the package gguf; pip install {requirement('gguf')}"
        ) from error
    return gguf
