"""Record a run's metrics in metrics.jsonl and trackers, its speed, and its failed batches."""

import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict
from math import prod
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)
from transformers.utils.generic import flatten_dict

from ..files import publish
from .batch import Batch
from .checkpoint import Progress
from .config import RunConfig
from .forecast import RunForecast, told
from .screen import Screen

HELD_PROCESS_GROUPS: list[object] = []
"""Keeps gloo's group alive at exit: freeing it with the model can deadlock (torch 2.13)."""

Shape = Sequence[int]


class MetricsLog:
    """Writer for metrics.jsonl, with means over ``log_every_steps`` steps and each evaluation.

    ``tokens_per_s`` counts supervised tokens in all processes per second since the last means. This
    time includes evaluations and checkpoints. For the other clock metrics see ``StepPace.report``.
    """

    def __init__(
        self,
        config: RunConfig,
        accelerator: Accelerator,
        *,
        progress: Progress,
        pace: "StepPace",
        forecast: RunForecast,
    ) -> None:
        """
        Args:
            progress, pace: the run's own, which change with every step.
            forecast: for this run, which also knows its last step's number.
        """
        self.config, self.accelerator = config, accelerator
        self.progress, self.pace, self.forecast = progress, pace, forecast
        self.logged_step = progress.step - len(progress.unlogged)
        self.path = config.output_dir / "metrics.jsonl"
        self.started, self.tokens = time.perf_counter(), progress.tokens
        if config.trackers:
            self._start_trackers()

    def _start_trackers(self) -> None:
        """Start the trackers. All launches continue one wandb run, with the id in ``progress``."""
        config, progress = self.config, self.progress
        progress.tracker_id = progress.tracker_id or uuid.uuid4().hex
        folder = config.output_dir / "logs"
        folder.mkdir(exist_ok=True)  # wandb would write to /tmp instead
        wandb = {"dir": str(folder), "name": config.output_dir.name}
        wandb |= {"id": progress.tracker_id, "resume": "allow"}
        settings = flatten_dict(asdict(config))
        # TensorBoard takes no lists, paths or nulls.
        plain = {k: x if isinstance(x, bool | int | float) else str(x) for k, x in settings.items()}
        self.accelerator.init_trackers("pipedraft", plain, init_kwargs={"wandb": wandb})

    def add(self, values: dict[str, float], screen: Screen) -> None:
        progress, config = self.progress, self.config
        window = progress.unlogged
        window.append(values)
        screen.step(progress.step)
        step, before = progress.step, self.logged_step
        if step % config.log_every_steps and step != self.forecast.num_steps:
            return
        now = time.perf_counter()
        rate = (progress.tokens - self.tokens) / max(now - self.started, 1e-9)
        self.started, self.tokens = now, progress.tokens
        # Entries from a launch with other options may lack a key.
        known = {key: [entry[key] for entry in window if key in entry] for key in window[-1]}
        means = {key: sum(values) / len(values) for key, values in known.items()}
        window.clear()
        pace = self.pace.report(
            peak_tflops=config.peak_tflops, num_processes=self.accelerator.num_processes
        )
        is_due = self.forecast.is_due(before, step)
        forecast = self.figures(means) if is_due else {}
        self.write({**means, "tokens_per_s": rate, **pace, **forecast})
        self.logged_step = step
        screen.row(step, means, rate)
        if forecast:
            screen.say(told(forecast, self.forecast.kind))

    def figures(self, values: dict[str, float]) -> dict[str, float]:
        """Return the forecasts for a record with ``values``, which the main process writes next."""
        if not self.accelerator.is_main_process:
            return {}
        written = self.path.read_text().splitlines() if self.path.exists() else []
        return self.forecast.figures([*map(json.loads, written), self._record(values)])

    def _record(self, values: dict[str, float]) -> dict[str, float]:
        return {"step": self.progress.step, "tokens": self.progress.tokens, **values}

    def write(self, values: dict[str, float]) -> None:
        if not self.accelerator.is_main_process:
            return
        # Opened for each record, so a kill loses no complete one.
        with self.path.open("a") as file:
            file.write(json.dumps(self._record(values)) + "\n")
        if self.config.trackers:
            grouped = {x if "/" in x else f"train/{x}": value for x, value in values.items()}
            self.accelerator.log(grouped, step=self.progress.step)

    def close(self) -> None:
        """Upload the head to wandb if configured, then end the trackers' runs."""
        config = self.config
        if config.wandb_artifact and self.accelerator.is_main_process:
            run = self.accelerator.get_tracker("wandb", unwrap=True)
            kind = {"type": "model", "name": f"{config.output_dir.name}-{config.method}"}
            run.log_artifact(str(config.output_dir / "best"), **kind)
        if torch.distributed.is_initialized():
            # Before end_training: afterwards the group cannot be found.
            HELD_PROCESS_GROUPS.append(torch.distributed.group.WORLD)
        self.accelerator.end_training()


def truncate_log(path: Path, *, step: int, is_evaluated: bool) -> None:
    """Drop an incomplete last line and the records that the resumed run will log again.

    Args:
        step: the checkpoint's step.
        is_evaluated: False if this step's evaluation must be repeated, too.
    """
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines(keepends=True):
        if not line.endswith("}\n"):
            continue
        record = json.loads(line)
        is_evaluation = any(key.startswith("valid/") for key in record)
        # Keep the last step itself, but not an evaluation to be repeated.
        if record["step"] < step + (is_evaluated or not is_evaluation):
            kept.append(line)
    publish(path, lambda place: place.write_text("".join(kept)))


# -- speed ------------------------------------------------------------------------------------


def flop_counter() -> FlopCounterMode:
    """Return a context manager that counts FLOPs. Read them with ``get_total_flops()``."""

    def add_product(total: Shape, left: Shape, right: Shape, *rest: object, **more: object) -> int:
        return 2 * prod(left) * right[-1]

    def attention(query: Shape, key: Shape, value: Shape, *rest: object, **more: object) -> int:
        return sdpa_flop_count(query, key, value)

    def backward(
        grad: Shape, query: Shape, key: Shape, value: Shape, *rest: object, **more: object
    ) -> int:
        return sdpa_backward_flop_count(grad, query, key, value)

    aten = torch.ops.aten  # torch lacks formulas for CPU-only kernels, out_dtype and addmm_
    formulas: dict[object, Callable[..., int]] = {
        aten.addmm: add_product,
        aten.addmm_: add_product,
        aten._scaled_dot_product_flash_attention_for_cpu: attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }
    return FlopCounterMode(display=False, custom_mapping=formulas)


class StepPace:
    """Sums over the steps since the last report.

    ``waited_s`` is the time spent waiting for batches, ``total_s`` the whole time in seconds, and
    ``flops`` the FLOPs in all processes.
    """

    def __init__(self) -> None:
        self.waited_s = self.total_s = self.flops = self.flops_per_token = 0.0

    def flops_of(self, num_tokens: int, counter: FlopCounterMode | None) -> float:
        """Return this process's FLOPs in a step, counted now or derived from an earlier step.

        Args:
            num_tokens: tokens in the step, padding included.
        """
        if counter is not None:
            self.flops_per_token = counter.get_total_flops() / num_tokens
        return num_tokens * self.flops_per_token

    def report(self, *, peak_tflops: float | None, num_processes: int) -> dict[str, float]:
        """Return ``data_share``, and ``mfu`` if the peak is known. Then reset the sums."""
        seconds = max(self.total_s, 1e-9)
        figures = {"data_share": self.waited_s / seconds}
        if peak_tflops is not None:
            figures["mfu"] = self.flops / (seconds * num_processes * peak_tflops * 1e12)
        self.waited_s = self.total_s = self.flops = 0.0
        return figures


# -- batches with a non-finite loss -----------------------------------------------------------


def save_bad_batches(
    output_dir: Path,
    step: int,
    rank: int,
    losses: dict[int, float],
    batches: dict[int, Batch],
) -> Path:
    """Write bad_batch-step-S-rank-R.safetensors by one rename.

    To repeat the failed forward pass, call
    ``trainer.module(batch, trainer.generator(step, place))`` with that step's network.

    Args:
        losses: place in the step's window over all processes -> loss, summed over supervised
            tokens. All losses are finite if only the gradient was not.
        batches: by place in the window. In the file, batch I has the entries I.input_ids,
            I.loss_mask, I.lengths and I.rows.
    """
    path = output_dir / f"bad_batch-step-{step:07d}-rank-{rank}.safetensors"
    tensors: dict[str, Tensor] = {}
    for index, batch in batches.items():
        tensors |= {
            f"{index}.input_ids": batch.ids_BT.cpu().contiguous(),
            f"{index}.loss_mask": batch.mask_BT.contiguous(),
            f"{index}.lengths": torch.tensor(batch.lengths),
            f"{index}.rows": torch.tensor(batch.rows),
        }
    # As text, because JSON has no NaN or infinity.
    told = json.dumps({str(index): str(loss) for index, loss in losses.items()})
    metadata = {"step": str(step), "rank": str(rank), "losses": told}
    publish(path, lambda place: save_file(tensors, place, metadata=metadata))
    return path
