"""Print a training run's settings, a table row for each log record, and its result."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from accelerate import Accelerator
from tqdm import tqdm

from ..version import __version__
from .checkpoint import Progress
from .config import RunConfig
from .decoding import DECODED_LENGTH, DECODED_TAU
from .launch import GO_ON, Stop
from .launcher_settings import strategy_of

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


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Run as the screen shows it."""

    config: RunConfig
    accelerator: Accelerator
    num_trainable: int
    num_steps: int
    """The last step's number."""
    num_valid: int
    """Validation rows in the data."""
    num_prompts: int
    """Prompts decoded in every evaluation."""
    notes: Sequence[str]
    """Lines that explain the table."""

    @property
    def evaluations(self) -> str:
        evaluation = self.config.evaluation
        when = evaluation.when(self.num_steps)
        decoded = f", {self.num_prompts} prompts decoded" * bool(self.num_prompts)
        rows = min(evaluation.max_rows, self.num_valid)
        held_out = f"{rows} held-out rows" if rows else "no held-out rows"
        return f"evaluated {when}: {held_out}{decoded}"


class Screen:
    """Writer to stderr in the main process. metrics.jsonl contains every figure."""

    def __init__(self, *, is_shown: bool) -> None:
        self.is_shown = is_shown
        self.num_steps = 0
        self._has_head = False
        self._timed_from, self._timed_at = 0, time.monotonic()

    def say(self, text: str) -> None:
        if self.is_shown:
            print(text, file=sys.stderr, flush=True)

    def begin(self, run: RunFacts, step: int) -> None:
        """Print the run's settings, and start its clock after ``step``."""
        config, accelerator = run.config, run.accelerator
        precision = accelerator.mixed_precision.replace("no", "fp32")
        tokens = config.batch_tokens * config.accumulation * accelerator.num_processes
        self.say(
            f"train {config.method} (pipedraft {__version__}): {run.num_trainable / 1e6:.2f} M "
            f"parameters, for {config.target or 'no target'} on {accelerator.device.type} x "
            f"{accelerator.num_processes}, {strategy_of(accelerator)}, {precision}\n"
            f"{run.num_steps} steps of {tokens} tokens (accumulation {config.accumulation}), "
            f"{config.optim.name}, lr {config.optim.lr:g}; {run.evaluations}\n"
            f"into {config.output_dir}: metrics.jsonl, best/, checkpoints/"
        )
        for note in run.notes:
            self.say(note)
        self.num_steps = run.num_steps
        self._timed_from, self._timed_at = step, time.monotonic()

    def step(self, step: int) -> None:
        """Count a step. After the first timed steps, print the estimated time left."""
        done = step - self._timed_from
        if done == 1 and not self._has_head:
            self._timed_from, self._timed_at = step, time.monotonic()
        elif done == TIMED_STEPS - 1 and not self._has_head:
            self._head(step)

    def _seconds_left(self, step: int) -> float | None:
        done = step - self._timed_from
        if step == self.num_steps:
            return 0.0
        if not done:
            return None
        rate = (time.monotonic() - self._timed_at) / done
        return rate * (self.num_steps - step)

    def _head(self, step: int) -> None:
        self._has_head = True
        left = self._seconds_left(step)
        if left:
            self.say(f"about {tqdm.format_interval(left)} to go, by the first steps")
        self.say("".join(f"{name:>{width}}" for name, width in WIDTHS.items()))

    def row(self, step: int, means: dict[str, float], rate: float) -> None:
        """Write a table row. ``rate`` is in supervised tokens per second since the last row."""
        if not self._has_head:
            self._head(step)
        accepted = means.get("acceptance", means.get("acceptance_1"))
        left = self._seconds_left(step)
        cells = {
            "step": str(step),
            "loss": f"{means['loss']:.4f}",
            "accepted": "-" if accepted is None else f"{accepted:.3f}",
            "lr": f"{means.get('lr', 0):.1e}",
            "tokens/s": f"{rate:.0f}",
            "left": "-" if left is None else tqdm.format_interval(left),
        }
        self.say("".join(f"{cells[name]:>{width}}" for name, width in WIDTHS.items()))

    def evaluated(self, step: int, metrics: dict[str, float], *, is_best: bool) -> None:
        """Write an evaluation's line."""
        best = "; best so far" if is_best else ""
        self.say(f"{step:>8}  held out: {figures(metrics)}{best}")

    def end(self, folder: Path, progress: Progress, stop: Stop | None) -> None:
        """Print the reason for the end, the best figures, their folder, and the next commands."""
        if stop is not None:
            self.say(f"stopped at step {progress.step} of {self.num_steps}: {stop.reason}")
        if progress.best_step:
            found = figures(progress.best_metrics) or "no held-out rows to choose by"
            chosen = f" by {progress.best_by}" * bool(progress.best_by)
            self.say(f"best: step {progress.best_step}{chosen}, {found}: {folder / 'best'}")
        # An interrupted run is not ready for the next commands.
        if stop is not None and GO_ON in stop.reason:
            return
        self.say(
            f"next: pipedraft eval --checkpoint {folder} --benchmarks mt_bench,gsm8k,humaneval "
            f"--limit 4 --out {folder}_eval\n"
            f'      pipedraft inference --checkpoint {folder} --prompt "What is 12 + 30?"'
        )
