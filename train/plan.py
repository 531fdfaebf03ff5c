"""What a run will take before any of it is started: parameters, memory, speed, disk.

    python -m pipedraft.train --plan configs/spd/qwen3_5_4b_n4.yaml

Parameters are counted on networks without storage. What a backward pass keeps is measured on two
narrow copies of target and draft with the real depth, and continued to the real width: all widths
shrink together, so bytes per token are linear and products quadratic in the width. Only the
target's config.json is read, and the data if it is on this machine.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from pipedraft.models.layers import LayerConfig
from pipedraft.models.target import layer_kinds
from pipedraft.train.feature_reader import decoder_config, needed_layers, weightless_draft
from pipedraft.train.feature_shards import bytes_per_token
from pipedraft.train.launch import resolve_dtype, resolve_precision
from pipedraft.train.log import flop_counter
from pipedraft.train.losses import CHUNK_ROWS

NARROW_HEAD_SIZES = (8, 16)
NARROW_TOKENS = (64, 128)
NARROW_TEXTS = 8
"""Whose FLOPs are counted together: a head may treat each in a way that is drawn at random."""
ASSUMED_UTILIZATION = 0.35
"""Of the peak; a run's own ``mfu`` replaces the assumption."""
STRATEGIES = ("ddp", "zero2", "fsdp2, zero3")
BITS = {None: 0, "8bit": 8, "4bit": 4}


@dataclass(frozen=True)
class Sizes:
    """Parameters; bytes and FLOPs per padded token of one forward and backward pass."""

    target_layers: int
    target_ends: int
    trained: int
    draft: int
    kept_bytes: float
    """What the backward pass keeps, on a process."""
    working_bytes: float
    """The target's largest tensors and the states that the draft reads."""
    chunk_bytes: int
    """Logits of one chunk, whatever the batch."""
    flops: float


def memory_bytes(
    sizes: Sizes, *, processes: int, strategy: str, run: Any, dtype: torch.dtype
) -> dict[str, float]:
    """Bytes on one process by part; AdamW keeps two float32 numbers for each trained one."""
    apart = processes if strategy != "ddp" else 1
    whole_apart = processes if strategy == "fsdp2, zero3" else 1
    bits = BITS[run.target_quantization] or 8 * dtype.itemsize
    layers = sizes.target_layers * bits / 8 / (processes if run.shard_target else 1)
    return {
        "target": layers + sizes.target_ends * dtype.itemsize,
        "draft": 4.0 * sizes.draft / whole_apart,
        "gradients": 4.0 * sizes.trained / apart,
        "optimizer": 8.0 * sizes.trained / apart,
        "batch": (sizes.kept_bytes + sizes.working_bytes) * run.batch_tokens + sizes.chunk_bytes,
    }


# -- counting -------------------------------------------------------------------------------


def measure(run: Any, model: Any, objective_class: Any) -> Sizes:
    """Sizes of a draft's run.

    Raises:
        ValueError: no config.json of the target.
    """
    config = decoder_config(run)
    draft, layer = weightless_draft(objective_class, model, config), LayerConfig.from_target(config)
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(config)
    decoder = target.get_decoder()
    layers = sum(p.numel() for p in decoder.layers.parameters())
    dtype = resolve_dtype(run, resolve_precision(run.precision))
    narrow = [
        measure_narrow(run, model, objective_class, config, size) for size in NARROW_HEAD_SIZES
    ]
    (small, kept_small, flops_small), (large, kept_large, flops_large) = narrow
    slope = (kept_large - kept_small) / (large - small)
    # flops = a s^2 + b s in the share s of the width
    square = (flops_large / large - flops_small / small) / (large - small)
    linear = flops_small / small - square * small
    tokens = min(run.data.max_length, run.batch_tokens)
    beside = objective_class.num_auxiliary(model, layer)
    width = 2 * layer.intermediate_size + 6 * layer.hidden_size
    taps = len({*draft.taps, config.num_hidden_layers}) * layer.hidden_size
    return Sizes(
        target_layers=layers,
        target_ends=sum(p.numel() for p in target.parameters()) - layers,
        trained=beside + sum(p.numel() for p in draft.parameters() if p.requires_grad),
        draft=beside + sum(p.numel() for p in draft.parameters()),
        kept_bytes=kept_small + slope * (1 - small),
        working_bytes=(width + taps) * dtype.itemsize,
        chunk_bytes=4 * 4 * CHUNK_ROWS * config.vocab_size,
        flops=decoder_flops(decoder, tokens) + square + linear,
    )


def measure_narrow(
    run: Any, model: Any, objective_class: Any, config: Any, head_size: int
) -> tuple[float, float, float]:
    """A copy with one key head and heads of ``head_size``.

    Returns:
        Share of the width, and per token: bytes that backward keeps, FLOPs of the draft.
    """
    layer = LayerConfig.from_target(config)
    share = head_size / layer.head_size / layer.num_key_value_heads
    vocab_size = max(8, round(config.vocab_size * share))
    with torch.random.fork_rng():
        target = narrow_target(layer, config, share, head_size, vocab_size)
        options = {}
        if getattr(model, "draft_vocab_size", None) is not None:
            options["draft_vocab_size"] = max(4, round(model.draft_vocab_size * share))
        rows = {"input_ids": [list(range(vocab_size))], "loss_mask": [[1] * vocab_size]}
        data: Any = SimpleNamespace(train=Dataset.from_dict(rows), report=NoReport())
        objective = objective_class(
            replace(model, **options), target, target_name="narrow", revision=None, data=data
        )
        if run.checkpointing:
            objective.use_checkpointing()
        precision = resolve_precision(run.precision)
        kept = [kept_bytes(objective, all_counted(tokens), precision) for tokens in NARROW_TOKENS]
        few, more = (draft_flops(objective, tokens) for tokens in NARROW_TOKENS)
    longer = NARROW_TOKENS[1] - NARROW_TOKENS[0]
    # Per token they are a + b T: products, and attention to T tokens.
    tokens = min(run.data.max_length, run.batch_tokens)
    flops = few + (more - few) / longer * (tokens - NARROW_TOKENS[0])
    return share, (kept[1] - kept[0]) / longer, flops


def draft_flops(objective: Any, num_tokens: int) -> float:
    """FLOPs per token of texts of this many, forward and backward, without the target's layers."""
    batch = all_counted(num_tokens, NARROW_TEXTS)
    with flop_counter() as whole:
        objective(batch, torch.Generator().manual_seed(0)).loss.backward()
    with flop_counter() as target:
        objective.hidden(batch)
    return (whole.get_total_flops() - target.get_total_flops()) / batch["input_ids"].numel()


def decoder_flops(decoder: Any, num_tokens: int) -> float:
    """FLOPs per token of a frozen decoder's layers on a text of this many, as torch counts them.

    Of experts the share that a token is sent to; attention of linear layers is left out.
    """
    config, layer, weights = decoder.config, LayerConfig.from_target(decoder.config), 0.0
    for name, parameter in decoder.layers.named_parameters():
        is_experts = ".experts." in name
        share = config.num_experts_per_tok / len(parameter) if is_experts else 1.0
        weights += share * parameter.numel() * (parameter.ndim >= 2)
    num_attentions = sum("linear" not in kind for kind in layer_kinds(config))
    return 2 * weights + 4 * num_attentions * layer.num_heads * layer.head_size * num_tokens


class NoReport:
    def to_dict(self) -> dict[str, Any]:
        return {}


def narrow_target(
    layer: LayerConfig, config: Any, share: float, head_size: int, vocab_size: int
) -> Any:
    """Random weights, as deep as the target, of a family that makes a draft with the same parts."""
    family: Any = LlamaConfig
    if layer.has_query_key_norm:
        family = Qwen3Config
    elif layer.has_attention_bias:
        family = Qwen2Config
    shape = family(
        vocab_size=vocab_size,
        hidden_size=max(8, round(layer.hidden_size * share)),
        intermediate_size=max(8, round(layer.intermediate_size * share)),
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=layer.num_heads // layer.num_key_value_heads,
        num_key_value_heads=1,
        head_dim=head_size,
        tie_word_embeddings=config.tie_word_embeddings,
    )
    return AutoModelForCausalLM.from_config(shape).eval().requires_grad_(False)


def all_counted(num_tokens: int, num_texts: int = 1) -> dict[str, Tensor]:
    """Texts whose tokens are all the assistant's."""
    return {
        "input_ids": torch.zeros(num_texts, num_tokens, dtype=torch.int64),
        "loss_mask": torch.ones(num_texts, num_tokens, dtype=torch.bool),
        "lengths": torch.full((num_texts,), num_tokens),
    }


def kept_bytes(objective: nn.Module, batch: dict[str, Tensor], precision: str) -> int:
    """Of all tensors that autograd saves in one forward pass, parameters left out."""
    weights = {p.untyped_storage().data_ptr() for p in objective.parameters()}
    kept: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), autocast:
        objective(batch, torch.Generator().manual_seed(0))
    return sum(x.untyped_storage().nbytes() for at, x in kept.items() if at not in weights)


# -- the report -----------------------------------------------------------------------------


def plan(run: Any, model: Any, objective_class: Any) -> str:
    """Text for the terminal."""
    dtype = resolve_dtype(run, resolve_precision(run.precision))
    sizes = measure(run, model, objective_class)
    lines = [
        f"target {run.target}: {sizes.target_layers + sizes.target_ends:,} parameters, frozen, "
        f"{run.target_quantization or str(dtype).removeprefix('torch.')}",
        f"{run.method} draft: {sizes.draft:,} parameters, {sizes.trained:,} of them trained, fp32",
        f"batch: {run.batch_tokens:,} padded tokens in a forward pass of a process, times "
        f"{run.accumulation}",
        "",
        "GiB on one process",
    ]
    parts = ["target", "draft", "gradients", "optimizer", "batch"]
    lines.append("".join(f"{word:>13}" for word in ("processes", "strategy", *parts, "together")))
    for processes in (1, 2, 4, 8, 16):
        for strategy in STRATEGIES if processes > 1 else STRATEGIES[:1]:
            found = memory_bytes(
                sizes, processes=processes, strategy=strategy, run=run, dtype=dtype
            )
            cells = [found[part] / 2**30 for part in parts]
            shown = "".join(f"{cell:>13.3f}" for cell in (*cells, sum(cells)))
            lines.append(f"{processes:>13}{strategy:>13}{shown}")
    lines += ["", *speed(run, sizes), "", *disk(run, model, objective_class)]
    return "\n".join(lines)


def speed(run: Any, sizes: Sizes) -> list[str]:
    tokens = min(run.data.max_length, run.batch_tokens)
    lines = [f"{sizes.flops / 1e9:.3f} GFLOP a token, in texts of {tokens:,} tokens"]
    if run.peak_tflops is None:
        return [*lines, "give peak_tflops of a device for tokens per second"]
    rate = run.peak_tflops * 1e12 * ASSUMED_UTILIZATION / sizes.flops
    lines.append(
        f"{rate:,.0f} tokens/s on each device if {ASSUMED_UTILIZATION:.0%} of its peak is reached"
    )
    if run.max_steps is not None:
        hours = run.max_steps * run.accumulation * run.batch_tokens / rate / 3600
        lines.append(f"{run.max_steps:,} steps: {hours:.1f} hours, evaluations not counted")
    return lines


def disk(run: Any, model: Any, objective_class: Any) -> list[str]:
    """Of a dump of hidden states; of the whole data if its files are here."""
    config = decoder_config(run)
    draft = weightless_draft(objective_class, model, config)
    layers = needed_layers(draft, config.num_hidden_layers)
    each = {
        dtype: bytes_per_token(len(layers), config.hidden_size, dtype) for dtype in ("bf16", "int8")
    }
    shown = ", ".join(f"{dtype} {size:,}" for dtype, size in each.items())
    lines = [f"hidden states of layers {list(layers)}, bytes a token: {shown}"]
    if not all(Path(source.path).exists() for source in run.data.sources):
        return [*lines, "data: not on this machine, so rows, epochs and disk are not counted"]
    from pipedraft.data_recipes.recipe import load_data
    from pipedraft.models.target import load_tokenizer

    report = load_data(run.data, load_tokenizer(run.target, revision=run.target_revision)).report
    total = ", ".join(f"{d} {size * report.tokens / 2**30:.3f}" for d, size in each.items())
    epoch = report.tokens / (run.batch_tokens * run.accumulation)
    return [
        *lines,
        f"data: {report.train_rows:,} training rows, {report.tokens:,} tokens; on disk {total} GiB",
        f"an epoch is at least {epoch:,.0f} steps of one process",
    ]
