"""Estimate a run's parameters, memory and speed before it starts.

    python -m pipedraft.train --plan configs/spd/qwen3_5_4b_n4.yaml

Parameters are counted in networks on the meta device. The draft runs one training step and one
evaluation on fake tensors with the run's shapes, so bytes and FLOPs equal the real ones. The
target's kernels differ by family, so its forward's memory is estimated as one layer's largest
tensors. Only the target's config.json is read.
"""

import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any, Self

import pyarrow
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..data_recipes.table import Rows
from ..files import Values
from ..models.speed.cpu import planned_accelerator
from ..models.transformer.decoder import layer_kinds
from ..models.transformer.layers import LayerConfig
from .batch import Batch
from .config import RunConfig
from .features.partial_target import decoder_config, weightless_draft
from .launch import resolve_dtype, resolve_precision
from .log import flop_counter
from .loop import EVALUATED_ROWS
from .methods import StartConfig
from .objective import DraftObjective
from .reuse import WINDOW


class LiveBytes(TorchDispatchMode):
    """Counter for the bytes of storages that are allocated inside ``with LiveBytes() as memory:``.

    Networks from ``without_numbers`` run inside this block. Ids, masks and lengths stay real,
    because they decide shapes. So all later tensors have the same shapes as in a run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        """Bytes in storages now."""
        self.peak = 0
        """Maximum of ``live`` so far."""
        # Real ids and masks meet fake tensors in one operation.
        self._shapes_alone = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: set[int] = set()

    def without_numbers(self, network: nn.Module) -> None:
        """Give a network on the meta device fake CPU tensors, so it can run in the block."""
        with self._shapes_alone:
            network.to_empty(device="cpu")

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return a fake tensor and count its bytes."""
        with self._shapes_alone:
            made = torch.empty(shape, dtype=dtype)
        self._note(made, made.untyped_storage().nbytes())
        return made

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Values | None = None,
    ) -> object:
        given = (args, kwargs or {})
        tensors = [x for x in tree_leaves(given) if isinstance(x, Tensor)]
        for tensor in tensors:  # inputs from before do not count, nor do their views
            self._note(tensor, 0)
        if any(isinstance(x, FakeTensor) for x in tensors):
            with self._shapes_alone:
                made = func(*given[0], **given[1])
        else:
            made = func(*args, **given[1])
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._note(tensor, tensor.untyped_storage().nbytes())
        return made

    def _note(self, tensor: Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self.live += size
            self.peak = max(self.peak, self.live)
            # Weak, because a storage must be freed when a run would free it.
            weakref.finalize(storage, self._free, storage._cdata, size)

    def _free(self, key: int, size: int) -> None:
        # A later storage may get the same address.
        self._known.discard(key)
        self.live -= size


ASSUMED_UTILIZATION = 0.35
"""Assumed fraction of the device's peak FLOPS; compare with ``mfu`` in a real run's log."""
STRATEGIES = ("ddp", "zero2", "fsdp2, zero3")
BITS = {None: 0, "8bit": 8, "4bit": 4}


@dataclass(frozen=True)
class Parameters:
    """Parameter counts of the target's layers, of its other parts, and of the draft."""

    target_layers: int
    target_ends: int
    trained: int
    draft: int


@dataclass(frozen=True)
class RunSizes(Parameters):
    """Parameter counts, peak bytes per pass without weights and optimizer, and FLOPs per token."""

    step_bytes: float
    """Peak bytes in a training step with one pass over ``batch_tokens``, gradients included."""
    evaluation_bytes: float
    flops: float


class Plan:
    """Estimator that measures a run's sizes and writes the report.

    Raises:
        ValueError: the target has no config.json.
    """

    def __init__(
        self, run: RunConfig, model: StartConfig, objective_class: type[DraftObjective]
    ) -> None:
        self.run, self.model, self.objective_class = run, model, objective_class
        self.config = decoder_config(run)
        self.layer = LayerConfig.from_target(self.config)
        self.draft = weightless_draft(objective_class, model, self.config)
        self.precision = resolve_precision(run.precision)
        self.dtype = resolve_dtype(run, self.precision)
        with torch.device("meta"):
            target = AutoModelForCausalLM.from_config(self.config, dtype=self.dtype)
        self.target = target.requires_grad_(False)
        self.tokens = min(run.data.max_length, run.batch_tokens)
        """Sequence length for the FLOPs per token."""

    # -- counting ---------------------------------------------------------------------------

    def count(self) -> Parameters:
        """Count parameters alone, which takes a moment."""
        layers = sum(p.numel() for p in self.target.get_decoder().layers.parameters())
        beside = self.objective_class.num_auxiliary(self.model, self.layer)
        return Parameters(
            target_layers=layers,
            target_ends=sum(p.numel() for p in self.target.parameters()) - layers,
            trained=beside + sum(p.numel() for p in self.draft.parameters() if p.requires_grad),
            draft=beside + sum(p.numel() for p in self.draft.parameters()),
        )

    def measure(self) -> RunSizes:
        parameters, memory = self.count(), LiveBytes()
        objective = self.make_objective(self.target, memory)
        rows = max(1, self.run.batch_tokens // self.tokens)
        with flop_counter() as counter:
            step_bytes = self._peak(objective, memory, rows)
        flops = counter.get_total_flops() / (rows * self.tokens)
        return RunSizes(
            **asdict(parameters),
            step_bytes=step_bytes,
            evaluation_bytes=self._peak(
                objective.eval(), memory, min(EVALUATED_ROWS, rows), trains=False
            ),
            flops=flops + self.decoder_flops() / self.run.reuse,
        )

    def make_objective(self, target: PreTrainedModel, memory: LiveBytes) -> DraftObjective:
        """Build the run's objective on fake tensors, with empty tensors as hidden states."""
        config, vocab_size = self.config, self.config.vocab_size
        # Every token once, so a draft vocabulary can be chosen at any size.
        rows = pyarrow.RecordBatch.from_pydict(
            {"input_ids": [list(range(vocab_size))], "loss_mask": [[1] * vocab_size]}
        )
        report = SimpleNamespace(to_dict=dict)
        data: Any = SimpleNamespace(train=Rows([rows]), report=report)
        with torch.device("meta"):
            objective = self.objective_class(
                self.model,
                target,
                target_name="",
                revision=None,
                data=data,
                fingerprint=self.draft.reference.fingerprint,
            )
        if self.run.checkpointing:
            objective.use_checkpointing()
        memory.without_numbers(objective)
        memory.without_numbers(target)
        # New storage may have untied the weights.
        target.tie_weights()
        layers = {*objective.draft.taps, config.num_hidden_layers}

        def hidden(batch: Batch) -> dict[int, Tensor]:
            shape = (*batch.ids_BT.shape, config.hidden_size)
            return {layer: memory.empty(*shape, dtype=self.dtype) for layer in layers}

        objective.hidden = hidden  # type: ignore[method-assign]
        return objective

    def _peak(
        self, objective: DraftObjective, memory: LiveBytes, rows: int, *, trains: bool = True
    ) -> float:
        """Return peak bytes for a pass over sequences with every token supervised."""
        batch = all_counted(self.tokens, rows)
        memory.peak = memory.live
        generator = torch.Generator().manual_seed(self.run.seed)
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=self.precision == "bf16")
        with planned_accelerator(), memory, autocast, torch.set_grad_enabled(trains):
            if trains:
                objective(batch, generator).loss.backward()
            else:
                objective(batch, generator, **objective.evaluation_options())
        objective.zero_grad()
        return max(memory.peak, self._target_bytes(rows * self.tokens, objective.draft.taps))

    def _target_bytes(self, tokens: int, taps: Collection[int]) -> float:
        """Return peak bytes in the target's forward, for the hidden states kept and one layer.

        An MLP holds three tensors with the intermediate size and three with the hidden size at
        once. A norm works on a float32 copy.
        """
        hidden = self.config.hidden_size
        wide = self.layer.intermediate_size
        if (chosen := vars(self.config).get("num_experts_per_tok")) is not None:
            # Rows exist once per expert, and once more in the stack before the sum.
            size = vars(self.config).get("moe_intermediate_size") or wide
            wide = chosen * (size + 2 * hidden / 3)
        kept = len({*taps, self.config.num_hidden_layers}) * hidden
        mlp, norm = 3 * (wide + hidden), 2 * hidden + 8 / self.dtype.itemsize * hidden
        return tokens * (kept + max(mlp, norm)) * self.dtype.itemsize

    def decoder_flops(self) -> float:
        """Return FLOPs per token in the frozen decoder's layers, counted as torch does.

        Of the experts' weights, only the fraction that a token is routed to counts. Recurrent
        layers count by their weights alone.
        """
        weights = 0.0
        for name, parameter in self.target.get_decoder().layers.named_parameters():
            is_experts = ".experts." in name
            share = self.config.num_experts_per_tok / len(parameter) if is_experts else 1.0
            # Vectors, such as norms and biases, take no matrix product.
            weights += share * parameter.numel() * (parameter.ndim >= 2)
        num_attentions = sum("linear" not in kind for kind in layer_kinds(self.config))
        width = self.layer.num_heads * self.layer.head_size
        # Scores and weighted values: two products with every key, hidden ones too, as torch counts.
        return 2 * weights + 4 * num_attentions * width * self.tokens

    # -- the report -------------------------------------------------------------------------

    def memory_bytes(self, sizes: RunSizes, *, processes: int, strategy: str) -> dict[str, float]:
        """Return one process's bytes by part.

        AdamW keeps two float32 values per trained weight. Each process first computes all
        gradients, even if a strategy shards them later.
        """
        run = self.run
        apart = processes if strategy != "ddp" else 1
        whole_apart = processes if strategy == "fsdp2, zero3" else 1
        # DDP copies gradients into buckets before sending them.
        buckets = 1 if strategy == "ddp" and processes > 1 else 0
        bits = BITS[run.target_quantization] or 8 * self.dtype.itemsize
        layers = sizes.target_layers * bits / 8 / (processes if run.shard_target else 1)
        gradients = 4.0 * sizes.trained / apart
        kept = gradients if run.accumulation > 1 else 0.0
        states = 0.0
        if run.reuse > 1:
            num_layers = len({*self.draft.taps, self.config.num_hidden_layers})
            row_bytes = num_layers * self.config.hidden_size * self.dtype.itemsize
            states = WINDOW * run.batch_tokens * row_bytes
        return {
            "target": layers + sizes.target_ends * self.dtype.itemsize,
            "draft": 4.0 * sizes.draft / whole_apart,
            "gradients": gradients * (1 + buckets),
            "optimizer": 8.0 * sizes.trained / apart,
            # A step's bytes include the gradients, which have their own part above.
            "batch": max(sizes.step_bytes + kept, sizes.evaluation_bytes) - gradients + states,
        }

    def lines(self) -> Iterator[str]:
        """Yield the lines for ``--plan`` as they are known: parameters, memory and speed."""
        run, counts = self.run, self.count()
        yield (
            f"target {run.target}: {counts.target_layers + counts.target_ends:,} parameters, "
            f"frozen, {run.target_quantization or str(self.dtype).removeprefix('torch.')}"
        )
        yield (
            f"{run.method} draft: {counts.draft:,} parameters, {counts.trained:,} of them "
            "trained, fp32"
        )
        sizes = self.measure()
        yield (
            f"batch: {run.batch_tokens:,} padded tokens in a forward pass of a process, times "
            f"{run.accumulation}; at most {sizes.step_bytes / 2**30:.3f} GiB in a training step, "
            f"{sizes.evaluation_bytes / 2**30:.3f} in an evaluation"
        )
        yield from ("", "GiB on one process")
        parts = ["target", "draft", "gradients", "optimizer", "batch"]
        words = ("processes", "strategy", *parts, "together")
        yield "".join(f"{word:>13}" for word in words)
        for processes in (1, 2, 4, 8, 16):
            for strategy in STRATEGIES if processes > 1 else STRATEGIES[:1]:
                found = self.memory_bytes(sizes, processes=processes, strategy=strategy)
                cells = [found[part] / 2**30 for part in parts]
                shown = "".join(f"{cell:>13.3f}" for cell in (*cells, sum(cells)))
                yield f"{processes:>13}{strategy:>13}{shown}"
        yield from ("", *self._speed(sizes))

    def _speed(self, sizes: RunSizes) -> list[str]:
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


def all_counted(num_tokens: int, num_sequences: int = 1) -> Batch:
    """Make a batch with every token supervised."""
    return Batch(
        ids_BT=torch.zeros(num_sequences, num_tokens, dtype=torch.int64),
        mask_BT=torch.ones(num_sequences, num_tokens, dtype=torch.bool),
        lengths=[num_tokens] * num_sequences,
    )
