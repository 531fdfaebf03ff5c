"""Print a training run's settings, a table row for each log record, and its result."""

import sys
import time
from typing import TYPE_CHECKING

from tqdm import tqdm

from ..version import __version__
from .decoding import DECODED_LENGTH, DECODED_TAU
from .launch import GO_ON
from .launcher_settings import strategy_of

if TYPE_CHECKING:
    from .loop import Trainer

WIDTHS = {"step": 8, "loss": 10, "accepted": 10, "lr": 10, "tokens/s": 10, "left": 10}
"""Table column -> width. accepted: share of draft tokens accepted at temperature 1; in chains
only the first draft token counts."""
TIMED_STEPS = 4
"""Steps before the first estimate; the first step warms up and is not timed."""
EXPECTED = ("equivalent_acceptance_length_T0", "acceptance_length_T0")
"""Names for the teacher-forced acceptance length, by method."""


def figures(metrics: dict[str, float]) -> str:
    """Format an evaluation's main figures for one line."""
    shown = [f"loss {metrics['loss']:.4f}"] if "loss" in metrics else []
    expected = next((metrics[name] for name in EXPECTED if name in metrics), None)
    if expected is not None:
        shown.append(f"expected L' {expected:.2f} (teacher-forced)")
    if DECODED_LENGTH in metrics:
        shown.append(f"decoded L' {metrics[DECODED_LENGTH]:.2f}, tau {metrics[DECODED_TAU]:.2f}")
    return ", ".join(shown)


class Screen:
    """Writer to stderr in the main process. metrics.jsonl contains every figure."""

    def __init__(self, trainer: "Trainer") -> None:
        self.trainer = trainer
        self.is_shown = trainer.accelerator.is_main_process
        self._has_head = False
        self._timed_from, self._timed_at = trainer.progress.step, time.monotonic()

    def say(self, text: str) -> None:
        if self.is_shown:
            print(text, file=sys.stderr, flush=True)

    def begin(self) -> None:
        """Print the run's settings, and start its clock."""
        trainer = self.trainer
        config, accelerator, evaluation = trainer.config, trainer.accelerator, trainer.evaluates
        precision = accelerator.mixed_precision.replace("no", "fp32")
        tokens = config.batch_tokens * config.accumulation * accelerator.num_processes
        self.say(
            f"train {config.method} (pipedraft {__version__}): {trainer.num_trainable / 1e6:.2f} M "
            f"parameters, for {config.target or 'no target'} on {accelerator.device.type} x "
            f"{accelerator.num_processes}, {strategy_of(accelerator)}, {precision}\n"
            f"{trainer.num_steps} steps of {tokens} tokens (accumulation {config.accumulation}), "
            f"{config.optim.name}, lr {config.optim.lr:g}; {evaluation}\n"
            f"into {config.output_dir}: metrics.jsonl, best/, checkpoints/"
        )
        self._timed_from, self._timed_at = trainer.progress.step, time.monotonic()

    def step(self) -> None:
        """Count a step. After the first timed steps, print the estimated time left."""
        progress = self.trainer.progress
        done = progress.step - self._timed_from
        if done == 1 and not self._has_head:
            self._timed_from, self._timed_at = progress.step, time.monotonic()
        elif done == TIMED_STEPS - 1 and not self._has_head:
            self._head()

    def _seconds_left(self) -> float | None:
        progress = self.trainer.progress
        done = progress.step - self._timed_from
        if progress.step == self.trainer.num_steps:
            return 0.0
        if not done:
            return None
        rate = (time.monotonic() - self._timed_at) / done
        return rate * (self.trainer.num_steps - progress.step)

    def _head(self) -> None:
        self._has_head = True
        left = self._seconds_left()
        if left:
            self.say(f"about {tqdm.format_interval(left)} to go, by the first steps")
        self.say("".join(f"{name:>{width}}" for name, width in WIDTHS.items()))

    def row(self, means: dict[str, float], rate: float) -> None:
        """Write a table row. ``rate`` is in supervised tokens per second since the last row."""
        if not self._has_head:
            self._head()
        accepted = means.get("acceptance", means.get("acceptance_1"))
        left = self._seconds_left()
        cells = {
            "step": str(self.trainer.progress.step),
            "loss": f"{means['loss']:.4f}",
            "accepted": "-" if accepted is None else f"{accepted:.3f}",
            "lr": f"{means.get('lr', 0):.1e}",
            "tokens/s": f"{rate:.0f}",
            "left": "-" if left is None else tqdm.format_interval(left),
        }
        self.say("".join(f"{cells[name]:>{width}}" for name, width in WIDTHS.items()))

    def evaluated(self, metrics: dict[str, float], *, is_best: bool) -> None:
        """Write an evaluation's line."""
        best = "; best so far" if is_best else ""
        self.say(f"{self.trainer.progress.step:>8}  held out: {figures(metrics)}{best}")

    def end(self) -> None:
        """Print the reason for the end, the best figures, their folder, and the next commands."""
        trainer, folder = self.trainer, self.trainer.config.output_dir
        progress, stop = trainer.progress, trainer.stop
        if stop is not None:
            self.say(f"stopped at step {progress.step} of {trainer.num_steps}: {stop.reason}")
        if progress.best_step:
            found = figures(progress.best_metrics) or "no held-out rows to choose by"
            self.say(f"best: step {progress.best_step}, {found}: {folder / 'best'}")
        # An interrupted run is not ready for the next commands.
        if stop is not None and GO_ON in stop.reason:
            return
        self.say(
            f"next: pipedraft eval --checkpoint {folder} --benchmarks mt_bench,gsm8k,humaneval "
            f"--limit 4 --out {folder}_eval\n"
            f'      pipedraft inference --checkpoint {folder} --prompt "What is 12 + 30?"'
        )
