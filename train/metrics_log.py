"""What a run tells: metrics.jsonl, the optional trackers, and the figures on the progress bar."""

import json
import time
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from pipedraft.files import publish

if TYPE_CHECKING:
    from pipedraft.train.loop import Trainer

HELD_PROCESS_GROUPS: list[Any] = []
"""Keeps gloo's group alive at exit: freeing it with the model can deadlock (torch 2.13)."""

CLOCK_METRICS = ("tokens_per_s", "data_share", "mfu")
"""The only ones that differ when a run is repeated."""


class MetricsLog:
    """One record every ``log_every_steps`` steps, with means over these, and one per evaluation.

    ``tokens_per_s`` are counted tokens of all processes over all time since the last record,
    evaluations and checkpoints included; for the others see ``throughput``.
    """

    def __init__(self, trainer: "Trainer") -> None:
        self.trainer, self.accelerator = trainer, trainer.accelerator
        self.path = trainer.config.output_dir / "metrics.jsonl"
        self.started, self.tokens = time.perf_counter(), trainer.progress.tokens
        if trainer.config.trackers:
            self._start_trackers()

    def _start_trackers(self) -> None:
        """Every launch of one run goes on in one wandb run: its id is saved with the progress."""
        config, progress = self.trainer.config, self.trainer.progress
        progress.tracker_id = progress.tracker_id or uuid.uuid4().hex
        folder = config.output_dir / "logs"
        folder.mkdir(exist_ok=True)  # wandb would write to /tmp instead
        wandb = {"dir": str(folder), "name": config.output_dir.name}
        wandb |= {"id": progress.tracker_id, "resume": "allow"}
        settings = flatten(asdict(config))
        self.accelerator.init_trackers("pipedraft", settings, init_kwargs={"wandb": wandb})

    def add(self, values: dict[str, float], bar: tqdm) -> None:
        progress, config = self.trainer.progress, self.trainer.config
        window = progress.unlogged
        window.append(values)
        bar.update(1)
        if progress.step % config.log_every_steps and progress.step != bar.total:
            return
        now = time.perf_counter()
        rate = (progress.tokens - self.tokens) / max(now - self.started, 1e-9)
        self.started, self.tokens = now, progress.tokens
        means = {key: sum(entry[key] for entry in window) / len(window) for key in window[-1]}
        window.clear()
        pace = self.trainer.pace.report(
            peak_tflops=config.peak_tflops, num_processes=self.accelerator.num_processes
        )
        self.write({**means, "tokens_per_s": rate, **pace})
        shown = f"loss {means['loss']:.3f}, {rate:.0f} tokens/s"
        bar.set_postfix_str(shown + (f", MFU {pace['mfu']:.3f}" if "mfu" in pace else ""))

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


def flatten(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted names -> values of the types that every tracker takes."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            plain = isinstance(value, bool | int | float | str)
            flat[prefix + key] = value if plain else str(value)
    return flat


def truncate_log(path: Path, *, step: int, is_evaluated: bool) -> None:
    """Drop what was logged after a checkpoint, and half a last line: it will be logged again.

    Args:
        step: of the checkpoint.
        is_evaluated: False if the evaluation at this very step is to be made again too.
    """
    if not path.exists():
        return
    lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
    kept = []
    for line in lines:
        record = json.loads(line)
        is_evaluation = any(key.startswith("valid/") for key in record)
        if record["step"] < step or (
            record["step"] == step and (is_evaluated or not is_evaluation)
        ):
            kept.append(line + "\n")
    publish(path, lambda place: place.write_text("".join(kept)))
