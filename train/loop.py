"""The one training loop: every method is an ``Objective``, every launcher is accelerate."""

import contextlib
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import InitProcessGroupKwargs, ProjectConfiguration, set_seed
from torch import Tensor, nn
from tqdm import tqdm

from pipedraft.data_recipes.batch import collate, length_bucketed_batches
from pipedraft.data_recipes.recipe import TokenizedData
from pipedraft.train import checkpoint
from pipedraft.train.config import OptimConfig, RunConfig

HELD_PROCESS_GROUPS: list[Any] = []
"""Keeps gloo's group alive at exit: freeing it with the model can deadlock (torch 2.13)."""


@dataclass
class LossOutput:
    loss: Tensor
    """SUM over the counted tokens of this forward pass, differentiable."""
    count: Tensor
    """Counted tokens of this forward pass, int64 scalar."""
    sums: dict[str, Tensor]
    """Detached sums for the metrics; ratios are computed after summing over processes."""


class Objective(Protocol):
    """What a method brings: a module whose forward is its loss, and how to read its sums.

    It is an ``nn.Module``; only trainable networks are its submodules, so a frozen target inside
    gets no optimizer state, is never saved and never broadcast.
    """

    def __call__(self, batch: dict[str, Tensor], generator: torch.Generator) -> LossOutput: ...

    def num_counted(self, batch: dict[str, Tensor]) -> int:
        """Tokens that ``forward`` will count, known without running it."""

    def evaluation_passes(self) -> list[dict[str, Any]]:
        """Keyword arguments of one validation pass each; their sums are prefixed by ``name``."""

    def summarize(self, sums: dict[str, float]) -> dict[str, float]:
        """Metrics from summed sums; the key ``score`` (higher is better) selects the best."""

    def save(self, folder: Path, metrics: dict[str, float]) -> None:
        """Write the network in the checkpoint format of its method."""


@dataclass
class Progress:
    """Where a run stands; saved and restored with it."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    """Batches of this epoch already used by each process."""
    tokens: int = 0
    """Counted tokens so far, all processes."""
    best_score: float = -math.inf

    def state_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def resolve_precision(precision: str) -> str:
    """accelerate's name of the autocast dtype."""
    if precision != "auto":
        return "no" if precision == "fp32" else "bf16"
    if torch.cuda.is_available():
        return "bf16" if torch.cuda.is_bf16_supported() else "no"
    return "bf16" if torch.cpu._is_avx512_bf16_supported() else "no"


def make_accelerator(config: RunConfig) -> Accelerator:
    """The accelerator of this process, after checking that the launcher's world is the real one.

    Some launcher configurations start independent replicas or silently drop to one process; that
    is refused here instead of training something else than asked.
    """
    distributed = "RANK" in os.environ
    handlers = (
        [InitProcessGroupKwargs(backend="gloo")]
        if distributed and not torch.accelerator.is_available()
        else []
    )
    accelerator = Accelerator(
        mixed_precision=resolve_precision(config.precision),
        kwargs_handlers=handlers,
        log_with=list(config.trackers) or None,
        project_config=ProjectConfiguration(
            project_dir=str(config.output_dir), logging_dir=str(config.output_dir / "logs")
        ),
    )
    world = int(os.environ.get("WORLD_SIZE", 1))
    is_replica = world > 1 and accelerator.distributed_type == DistributedType.NO
    if accelerator.num_processes != world or is_replica:
        raise ValueError(
            f"num_processes: the launcher started {world} processes but they would train "
            f"independent replicas; on CPUs launch with ACCELERATE_USE_CPU=true and --multi_gpu"
        )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        _prepare_deepspeed(accelerator, config)
    return accelerator


def _prepare_deepspeed(accelerator: Accelerator, config: RunConfig) -> None:
    """DeepSpeed sees no data loader and steps by itself: tell it the batch, refuse the rest."""
    if config.optim.name != "adamw":
        raise ValueError(
            f"optim.name: {config.optim.name!r} uses two optimizers, DeepSpeed takes one; "
            "give --optim.name adamw"
        )
    if config.accumulation > 1:
        raise ValueError(
            f"accumulation: {config.accumulation} with DeepSpeed, which would step after every "
            "batch; give --accumulation 1 and a larger --batch_tokens"
        )
    plugin = accelerator.state.deepspeed_plugin
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
    plugin.deepspeed_config["gradient_clipping"] = config.optim.clip_norm


def make_optimizers(parameters: list[tuple[str, nn.Parameter]], optim: OptimConfig) -> list[Any]:
    """AdamW; or Muon for the matrices inside decoder layers and AdamW for the rest."""
    parameters = [(name, p) for name, p in parameters if p.requires_grad]
    is_hidden = {n: optim.name == "muon" and p.ndim == 2 and "layer" in n for n, p in parameters}
    hidden = [p for n, p in parameters if is_hidden[n]]
    matrices = [p for n, p in parameters if p.ndim >= 2 and not is_hidden[n]]
    vectors = [p for n, p in parameters if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": optim.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    optimizers: list[Any] = []
    if groups:
        optimizers.append(torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, fused=True))
    if hidden:
        muon = torch.optim.Muon(
            hidden, lr=optim.lr, weight_decay=optim.weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        optimizers.append(muon)
    return optimizers


def rate_factor(step: int, num_steps: int, optim: OptimConfig) -> float:
    """Learning rate of optimizer step ``step`` (0-based) as a share of the peak."""
    warmup = round(optim.warmup_fraction * num_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if optim.schedule == "constant":
        return 1.0
    done = (step - warmup) / max(num_steps - warmup, 1)
    shape = 1 - done if optim.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return optim.final_fraction + (1 - optim.final_fraction) * shape


class Trainer:
    """State of one run: prepared objective, optimizers, data position, trackers."""

    def __init__(
        self,
        config: RunConfig,
        objective: Any,
        data: TokenizedData,
        *,
        pad_id: int,
        accelerator: Accelerator,
    ) -> None:
        self.config, self.objective, self.data = config, objective, data
        self.accelerator, self.pad_id = accelerator, pad_id
        self.progress = Progress()
        optimizers = make_optimizers(list(objective.named_parameters()), config.optim)
        self.module, *self.optimizers = accelerator.prepare(objective, *optimizers)
        accelerator.register_for_checkpointing(self.progress)
        self.lengths = [len(ids) for ids in data.train["input_ids"]]
        self.num_steps = self._count_steps()
        self.last_metrics: dict[str, float] = {}

    # -- data -------------------------------------------------------------------------------

    def epoch_batches(self, epoch: int) -> list[list[int]]:
        return length_bucketed_batches(
            self.lengths,
            self.config.batch_tokens,
            seed=self.config.seed,
            epoch=epoch,
            rank=self.accelerator.process_index,
            world_size=self.accelerator.num_processes,
        )

    def _count_steps(self) -> int:
        per_epoch = math.ceil(len(self.epoch_batches(0)) / self.config.accumulation)
        if self.config.max_steps is not None:
            return self.config.max_steps
        return max(1, math.ceil(per_epoch * self.config.epochs))

    def windows(self) -> Iterator[list[dict[str, Tensor]]]:
        """The batches of one optimizer step after another, from the saved data position on."""
        while True:
            batches = self.epoch_batches(self.progress.epoch)
            while self.progress.batch < len(batches):
                stop = self.progress.batch + self.config.accumulation
                chosen = batches[self.progress.batch : stop]
                self.progress.batch = min(stop, len(batches))
                yield [self.load(self.data.train, rows) for rows in chosen]
            self.progress.epoch, self.progress.batch = self.progress.epoch + 1, 0

    def load(self, dataset: Any, rows: list[int]) -> dict[str, Tensor]:
        columns = dataset[rows]
        examples = [
            {"input_ids": ids, "loss_mask": mask}
            for ids, mask in zip(columns["input_ids"], columns["loss_mask"], strict=True)
        ]
        batch = collate(examples, self.pad_id)
        return {key: value.to(self.accelerator.device) for key, value in batch.items()}

    def generator(self, *key: int) -> torch.Generator:
        """Random numbers of one forward pass: a function of the key, so a resumed run repeats."""
        mixed = 0
        for part in (self.config.seed, self.accelerator.process_index, *key):
            mixed = (mixed * 1_000_003 + part + 1) % (2**63 - 1)
        return torch.Generator().manual_seed(mixed)

    # -- one optimizer step -----------------------------------------------------------------

    def optimize(self, window: list[dict[str, Tensor]]) -> dict[str, float]:
        """One optimizer step: the loss is the mean over all counted tokens of the whole window.

        Averaging per token over micro-batches and processes makes the step independent of how
        the window is cut; a mean of micro-batch means would not be.
        """
        accelerator, world = self.accelerator, self.accelerator.num_processes
        counts = torch.tensor([self.objective.num_counted(batch) for batch in window])
        total = accelerator.reduce(counts.sum().to(accelerator.device), "sum").clamp_min(1)
        sums: dict[str, Tensor] = {}
        for index, batch in enumerate(window):
            generator = self.generator(self.progress.step, index)
            last = index == len(window) - 1
            with accelerator.autocast(), _sync(accelerator, self.module, last):
                output = self.module(batch, generator)
                # DDP averages gradients over processes, so the sum is scaled back by their number.
                accelerator.backward(output.loss * (world / total))
            add_sums(sums, output, prefix="")
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        largest = self.config.optim.clip_norm or math.inf
        norm = float(accelerator.clip_grad_norm_(parameters, largest))
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"gradient norm is {norm} at step {self.progress.step}; lower optim.lr"
            )
        factor = rate_factor(self.progress.step, self.num_steps, self.config.optim)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.config.optim.lr * factor
            optimizer.step()
            optimizer.zero_grad()
        self.progress.step += 1
        self.progress.tokens += int(total)
        metrics = self.objective.summarize(self.reduce(sums))
        return {**metrics, "grad_norm": norm, "lr": self.config.optim.lr * factor}

    def reduce(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """Sums over processes. Every process must hold the same keys."""
        if not sums:
            return {}
        names = sorted(sums)
        stacked = torch.stack([sums[name].double() for name in names]).to(self.accelerator.device)
        totals = self.accelerator.reduce(stacked, "sum")
        return dict(zip(names, totals.tolist(), strict=True))

    # -- evaluation and checkpoints ---------------------------------------------------------

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Metrics of the objective on the first validation rows, shared among the processes.

        Without validation rows there are none.
        """
        rows = list(range(min(self.config.evaluation.max_rows, len(self.data.valid))))
        if not rows:
            return {}
        # A process left without rows takes all of them: every process must have sums to reduce,
        # and ratios of sums do not change when all rows are counted once more.
        mine = rows[self.accelerator.process_index :: self.accelerator.num_processes] or rows
        self.module.eval()
        sums: dict[str, Tensor] = {}
        for options in self.objective.evaluation_passes():
            for start in range(0, len(mine), 8):
                batch = self.load(self.data.valid, mine[start : start + 8])
                with self.accelerator.autocast():
                    output = self.objective(batch, self.generator(0, start), **options)
                add_sums(sums, output, prefix=options.get("name", ""))
        self.module.train()
        return self.objective.summarize(self.reduce(sums))

    def save(self, metrics: dict[str, float]) -> None:
        """Write a checkpoint that the run can resume from."""
        folder = checkpoint.step_folder(self.config.output_dir, self.progress.step)
        temporary = folder.with_name(f".{folder.name}.partial")
        if self.accelerator.is_main_process:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            self.objective.save(temporary, metrics)
        self.accelerator.wait_for_everyone()
        self.accelerator.save_state(str(temporary / "training_state"))
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            checkpoint.publish_folder(temporary, folder)
            checkpoint.rotate(self.config.output_dir, self.config.keep_checkpoints)
        self.accelerator.wait_for_everyone()

    def _save_best(self, metrics: dict[str, float]) -> None:
        """Replace best/ after a better score; without validation rows the newest is the best."""
        if metrics:
            if metrics["score"] <= self.progress.best_score:
                return
            self.progress.best_score = metrics["score"]
        if self.accelerator.is_main_process:
            checkpoint.write_folder(
                self.config.output_dir / "best", lambda folder: self.objective.save(folder, metrics)
            )

    def restore(self) -> None:
        """Go back to the newest complete checkpoint, if there is one.

        Raises:
            ValueError: it belongs to another network, or resuming is switched off.
        """
        folders = checkpoint.step_folders(self.config.output_dir)
        if folders and not self.config.resume:
            raise ValueError(
                f"resume: false, but {folders[-1]} is there; remove {self.config.output_dir}, or "
                "give --resume true or another --output_dir"
            )
        if self.accelerator.is_main_process:
            checkpoint.recover(self.config.output_dir / "best")
        if folders:
            try:
                self.accelerator.load_state(str(folders[-1] / "training_state"))
            except (RuntimeError, ValueError) as error:
                reason = str(error).strip().splitlines()[-1].strip()
                raise ValueError(
                    f"resume: {folders[-1]} was written with another configuration ({reason}); "
                    "give another --output_dir, or the settings in its config.yaml"
                ) from error
            self._say(f"resumed at step {self.progress.step} of {self.num_steps}")
        self._forget_later_metrics()

    def _forget_later_metrics(self) -> None:
        """Drop logged steps after the checkpoint: they will be run and logged again."""
        path = self.config.output_dir / "metrics.jsonl"
        if self.accelerator.is_main_process and path.exists():
            lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
            kept = [line for line in lines if json.loads(line)["step"] <= self.progress.step]
            checkpoint.replace_text(path, "".join(line + "\n" for line in kept))

    # -- the run ----------------------------------------------------------------------------

    def run(self) -> dict[str, float]:
        """Train from where ``restore`` left off to the last step; returns the last metrics."""
        config, progress = self.config, self.progress
        log = MetricsLog(self)
        bar = tqdm(
            total=self.num_steps,
            initial=progress.step,
            unit="step",
            disable=not self.accelerator.is_main_process,
            mininterval=1.0 if sys.stderr.isatty() else 30.0,
        )
        metrics: dict[str, float] = {}
        windows = self.windows()
        while progress.step < self.num_steps:
            values = self.optimize(next(windows))
            log.add(values, bar)
            done = progress.step == self.num_steps
            every = config.evaluation.every_steps
            if done or (every and progress.step % every == 0):
                metrics = self.evaluate()
                if metrics:
                    log.write({f"valid/{key}": value for key, value in metrics.items()})
                    shown = "  ".join(f"{key} {value:.4f}" for key, value in metrics.items())
                    self._say(f"step {progress.step}: {shown}")
                self._save_best(metrics)
            if done or progress.step % config.save_every_steps == 0:
                self.save(metrics)
        bar.close()
        log.close()
        return metrics

    def _say(self, text: str) -> None:
        if self.accelerator.is_main_process:
            tqdm.write(text, file=sys.stderr)


def _sync(accelerator: Accelerator, module: nn.Module, last: bool) -> Any:
    """Gradients travel between processes only in the last backward pass of a window."""
    return contextlib.nullcontext() if last else accelerator.no_sync(module)


def add_sums(sums: dict[str, Tensor], output: LossOutput, *, prefix: str) -> None:
    entries = {"loss": output.loss.detach(), "count": output.count, **output.sums}
    for key, value in entries.items():
        name = prefix + key
        sums[name] = sums[name] + value.double() if name in sums else value.double()


class MetricsLog:
    """metrics.jsonl, the optional trackers, and the figures on the progress bar."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.accelerator = trainer, trainer.accelerator
        self.path = trainer.config.output_dir / "metrics.jsonl"
        self.window: list[dict[str, float]] = []
        self.started, self.tokens = time.perf_counter(), trainer.progress.tokens
        if trainer.config.trackers:
            self.accelerator.init_trackers("pipedraft", config={"method": trainer.config.method})

    def add(self, values: dict[str, float], bar: tqdm) -> None:
        self.window.append(values)
        progress = self.trainer.progress
        bar.update(1)
        if progress.step % self.trainer.config.log_every_steps and progress.step != bar.total:
            return
        now = time.perf_counter()
        rate = (progress.tokens - self.tokens) / max(now - self.started, 1e-9)
        self.started, self.tokens = now, progress.tokens
        means = {
            key: sum(entry[key] for entry in self.window) / len(self.window)
            for key in self.window[-1]
        }
        self.window = []
        self.write({**means, "tokens_per_s": rate})
        bar.set_postfix_str(f"loss {means['loss']:.3f}, {rate:.0f} tokens/s")

    def write(self, values: dict[str, float]) -> None:
        if not self.accelerator.is_main_process:
            return
        progress = self.trainer.progress
        record = {"step": progress.step, "tokens": progress.tokens, **values}
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        if self.trainer.config.trackers:
            self.accelerator.log(values, step=progress.step)

    def close(self) -> None:
        if torch.distributed.is_initialized():
            HELD_PROCESS_GROUPS.append(torch.distributed.group.WORLD)
        self.accelerator.end_training()


def seed_everything(seed: int) -> None:
    set_seed(seed)
