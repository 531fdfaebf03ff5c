"""The needs of a run before any of it is started: parameters, memory, speed, disk.

    python -m pipedraft.train --plan configs/spd/qwen3_5_4b_n4.yaml

Parameters are counted on networks without storage. What a backward pass keeps is measured on two
narrow copies of target and draft with the real depth, and continued to the real width: all widths
shrink together, so bytes per token are linear and products quadratic in the width. Only the
target's config.json is read, and the data if it is on this machine.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from pipedraft.data_recipes.recipe import load_data
from pipedraft.models.layers import LayerConfig
from pipedraft.models.target import layer_kinds
from pipedraft.pretrained import load_tokenizer
from pipedraft.train.config import RunConfig
from pipedraft.train.feature_reader import decoder_config, needed_layers, weightless_draft
from pipedraft.train.feature_shards import bytes_per_token
from pipedraft.train.launch import resolve_dtype, resolve_precision
from pipedraft.train.log import flop_counter
from pipedraft.train.losses import CHUNK_ROWS
from pipedraft.train.objective import DraftObjective

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

NARROW_HEAD_SIZES = (8, 16)
NARROW_TOKENS = (64, 128)
NARROW_SEQUENCES = 8
"""FLOPs of so many are counted together: a head may treat each in a way that is drawn at random."""
ASSUMED_UTILIZATION = 0.35
"""Share of the peak; a run's own ``mfu`` replaces the assumption."""
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
    """Kept for the backward pass, on a process."""
    working_bytes: float
    """The target's largest tensors and the hidden states that the draft reads."""
    chunk_bytes: int
    """Logits of one chunk, whatever the batch."""
    flops: float


class Plan:
    """A run of a draft that is not started.

    Raises:
        ValueError: no config.json of the target.
    """

    def __init__(
        self, run: RunConfig, model: "DataclassInstance", objective_class: type[DraftObjective]
    ) -> None:
        self.run, self.model, self.objective_class = run, model, objective_class
        self.config = decoder_config(run)
        self.layer = LayerConfig.from_target(self.config)
        self.draft = weightless_draft(objective_class, model, self.config)
        self.precision = resolve_precision(run.precision)
        self.dtype = resolve_dtype(run, self.precision)
        self.tokens = min(run.data.max_length, run.batch_tokens)
        """Length of the sequences whose FLOPs are told."""

    # -- counting ---------------------------------------------------------------------------

    def measure(self) -> Sizes:
        config, layer = self.config, self.layer
        with torch.device("meta"):
            target = AutoModelForCausalLM.from_config(config)
        decoder = target.get_decoder()
        target_layers = sum(p.numel() for p in decoder.layers.parameters())
        (small, kept_small, flops_small), (large, kept_large, flops_large) = map(
            self.measure_narrow, NARROW_HEAD_SIZES
        )
        slope = (kept_large - kept_small) / (large - small)
        # flops = a s^2 + b s in the share s of the width
        square = (flops_large / large - flops_small / small) / (large - small)
        linear = flops_small / small - square * small
        beside = self.objective_class.num_auxiliary(self.model, layer)
        width = 2 * layer.intermediate_size + 6 * layer.hidden_size
        taps = len({*self.draft.taps, config.num_hidden_layers}) * layer.hidden_size
        return Sizes(
            target_layers=target_layers,
            target_ends=sum(p.numel() for p in target.parameters()) - target_layers,
            trained=beside + sum(p.numel() for p in self.draft.parameters() if p.requires_grad),
            draft=beside + sum(p.numel() for p in self.draft.parameters()),
            kept_bytes=kept_small + slope * (1 - small),
            working_bytes=(width + taps) * self.dtype.itemsize,
            chunk_bytes=4 * 4 * CHUNK_ROWS * config.vocab_size,
            flops=self._decoder_flops(decoder.layers) + square + linear,
        )

    def measure_narrow(self, head_size: int) -> tuple[float, float, float]:
        """A copy with one key head and heads of ``head_size``.

        Returns:
            Share of the width, and per token: bytes that backward keeps, FLOPs of the draft.
        """
        share = head_size / self.layer.head_size / self.layer.num_key_value_heads
        vocab_size = max(8, round(self.config.vocab_size * share))
        options = {}
        if (size := vars(self.model).get("draft_vocab_size")) is not None:
            options["draft_vocab_size"] = max(4, round(size * share))
        rows = {"input_ids": [list(range(vocab_size))], "loss_mask": [[1] * vocab_size]}
        report = SimpleNamespace(to_dict=dict)
        data: Any = SimpleNamespace(train=Dataset.from_dict(rows), report=report)
        with torch.random.fork_rng():
            objective = self.objective_class(
                replace(self.model, **options),
                self._narrow_target(share, head_size, vocab_size),
                target_name="narrow",
                revision=None,
                data=data,
            )
            if self.run.checkpointing:
                objective.use_checkpointing()
            kept = [kept_bytes(objective, all_counted(n), self.precision) for n in NARROW_TOKENS]
            few, more = (draft_flops(objective, tokens) for tokens in NARROW_TOKENS)
        longer = NARROW_TOKENS[1] - NARROW_TOKENS[0]
        # Per token they are a + b T: products, and attention to T tokens.
        flops = few + (more - few) / longer * (self.tokens - NARROW_TOKENS[0])
        return share, (kept[1] - kept[0]) / longer, flops

    def _narrow_target(self, share: float, head_size: int, vocab_size: int) -> PreTrainedModel:
        """Random weights, as deep as the target, of a family that gives a draft the same parts."""
        layer = self.layer
        family: Any = LlamaConfig
        if layer.has_query_key_norm:
            family = Qwen3Config
        elif layer.has_attention_bias:
            family = Qwen2Config
        shape = family(
            vocab_size=vocab_size,
            hidden_size=max(8, round(layer.hidden_size * share)),
            intermediate_size=max(8, round(layer.intermediate_size * share)),
            num_hidden_layers=self.config.num_hidden_layers,
            num_attention_heads=layer.num_heads // layer.num_key_value_heads,
            num_key_value_heads=1,
            head_dim=head_size,
            tie_word_embeddings=self.config.tie_word_embeddings,
        )
        return AutoModelForCausalLM.from_config(shape).eval().requires_grad_(False)

    def _decoder_flops(self, layers: nn.Module) -> float:
        """FLOPs per token of the frozen decoder's layers, as torch counts them.

        Of experts the share that a token is sent to; attention of linear layers is left out.
        """
        weights = 0.0
        for name, parameter in layers.named_parameters():
            is_experts = ".experts." in name
            share = self.config.num_experts_per_tok / len(parameter) if is_experts else 1.0
            weights += share * parameter.numel() * (parameter.ndim >= 2)
        num_attentions = sum("linear" not in kind for kind in layer_kinds(self.config))
        width = self.layer.num_heads * self.layer.head_size
        return 2 * weights + 4 * num_attentions * width * self.tokens

    # -- the report -------------------------------------------------------------------------

    def memory_bytes(self, sizes: Sizes, *, processes: int, strategy: str) -> dict[str, float]:
        """Bytes on one process by part; AdamW keeps two float32 numbers for each trained one."""
        run = self.run
        apart = processes if strategy != "ddp" else 1
        whole_apart = processes if strategy == "fsdp2, zero3" else 1
        bits = BITS[run.target_quantization] or 8 * self.dtype.itemsize
        layers = sizes.target_layers * bits / 8 / (processes if run.shard_target else 1)
        batch = (sizes.kept_bytes + sizes.working_bytes) * run.batch_tokens
        return {
            "target": layers + sizes.target_ends * self.dtype.itemsize,
            "draft": 4.0 * sizes.draft / whole_apart,
            "gradients": 4.0 * sizes.trained / apart,
            "optimizer": 8.0 * sizes.trained / apart,
            "batch": batch + sizes.chunk_bytes,
        }

    def report(self) -> str:
        """The lines of ``--plan``: parameters, memory, speed, disk."""
        run, sizes = self.run, self.measure()
        lines = [
            f"target {run.target}: {sizes.target_layers + sizes.target_ends:,} parameters, frozen, "
            f"{run.target_quantization or str(self.dtype).removeprefix('torch.')}",
            f"{run.method} draft: {sizes.draft:,} parameters, {sizes.trained:,} of them trained, "
            "fp32",
            f"batch: {run.batch_tokens:,} padded tokens in a forward pass of a process, times "
            f"{run.accumulation}",
            "",
            "GiB on one process",
        ]
        parts = ["target", "draft", "gradients", "optimizer", "batch"]
        words = ("processes", "strategy", *parts, "together")
        lines.append("".join(f"{word:>13}" for word in words))
        for processes in (1, 2, 4, 8, 16):
            for strategy in STRATEGIES if processes > 1 else STRATEGIES[:1]:
                found = self.memory_bytes(sizes, processes=processes, strategy=strategy)
                cells = [found[part] / 2**30 for part in parts]
                shown = "".join(f"{cell:>13.3f}" for cell in (*cells, sum(cells)))
                lines.append(f"{processes:>13}{strategy:>13}{shown}")
        return "\n".join([*lines, "", *self._speed(sizes), "", *self._disk()])

    def _speed(self, sizes: Sizes) -> list[str]:
        run = self.run
        lines = [f"{sizes.flops / 1e9:.3f} GFLOP a token, in sequences of {self.tokens:,} tokens"]
        if run.peak_tflops is None:
            return [*lines, "give peak_tflops of a device for tokens per second"]
        rate = run.peak_tflops * 1e12 * ASSUMED_UTILIZATION / sizes.flops
        share = f"{ASSUMED_UTILIZATION:.0%}"
        lines.append(f"{rate:,.0f} tokens/s on each device if {share} of its peak is reached")
        if run.max_steps is not None:
            hours = run.max_steps * run.accumulation * run.batch_tokens / rate / 3600
            lines.append(f"{run.max_steps:,} steps: {hours:.1f} hours, evaluations not counted")
        return lines

    def _disk(self) -> list[str]:
        """Bytes of a dump of hidden states; of the whole data if its files are here."""
        run, config = self.run, self.config
        layers = needed_layers(self.draft, config.num_hidden_layers)
        each = {d: bytes_per_token(len(layers), config.hidden_size, d) for d in ("bf16", "int8")}
        shown = ", ".join(f"{dtype} {size:,}" for dtype, size in each.items())
        lines = [f"hidden states of layers {list(layers)}, bytes a token: {shown}"]
        if not all(Path(source.path).exists() for source in run.data.sources):
            return [*lines, "data: not on this machine, so rows, epochs and disk are not counted"]
        assert run.target is not None
        tokenizer = load_tokenizer(run.target, revision=run.target_revision)
        report = load_data(run.data, tokenizer).report
        total = ", ".join(f"{d} {size * report.tokens / 2**30:.3f}" for d, size in each.items())
        epoch = report.tokens / (run.batch_tokens * run.accumulation)
        return [
            *lines,
            f"data: {report.train_rows:,} training rows, {report.tokens:,} tokens; on disk "
            f"{total} GiB",
            f"an epoch is at least {epoch:,.0f} steps of one process",
        ]


# -- one forward and backward pass ----------------------------------------------------------


def draft_flops(objective: DraftObjective, num_tokens: int) -> float:
    """FLOPs per token of sequences of this length, without those of the target's layers."""
    batch = all_counted(num_tokens, NARROW_SEQUENCES)
    with flop_counter() as whole:
        objective(batch, torch.Generator().manual_seed(0)).loss.backward()
    with flop_counter() as target:
        objective.hidden(batch)
    return (whole.get_total_flops() - target.get_total_flops()) / batch["input_ids"].numel()


def all_counted(num_tokens: int, num_sequences: int = 1) -> dict[str, Tensor]:
    """Sequences whose tokens are all the assistant's."""
    return {
        "input_ids": torch.zeros(num_sequences, num_tokens, dtype=torch.int64),
        "loss_mask": torch.ones(num_sequences, num_tokens, dtype=torch.bool),
        "lengths": torch.full((num_sequences,), num_tokens),
    }


def kept_bytes(objective: nn.Module, batch: dict[str, Tensor], precision: str) -> int:
    """Bytes of all tensors that autograd saves in one forward pass, parameters left out."""
    weights = {p.untyped_storage().data_ptr() for p in objective.parameters()}
    kept: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), autocast:
        objective(batch, torch.Generator().manual_seed(0))
    return sum(x.untyped_storage().nbytes() for at, x in kept.items() if at not in weights)
