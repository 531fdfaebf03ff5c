"""Build a recipe's three commands, and estimate the time for each."""

import math
import shlex
from dataclasses import dataclass
from pathlib import Path

import torch

from ...files import packaged
from ..plan import ASSUMED_UTILIZATION, Plan, RunSizes
from .machine import Machine
from .options import NewOptions
from .recipe import Recipe, Size
from .rows import Lengths

LAUNCHES = {"ddp": "ddp", "fsdp2, zero3": "fsdp2"}
"""The plan's strategy -> file in configs/accelerate."""
EVALUATED_TOKENS = 128
"""Default of eval's --max-new-tokens."""
DECODINGS = 3
"""Decodings per prompt in eval: the baseline, the head, and transformers for comparison."""


@dataclass(frozen=True)
class Fit:
    """A recipe with a plan that fits the machine."""

    recipe: Recipe
    plan: Plan
    sizes: RunSizes
    strategy: str
    bytes: float
    """Planned memory per process, in bytes."""


@dataclass(frozen=True)
class Work:
    """Inputs for the three commands: options, sizes, data and machine."""

    options: NewOptions
    size: Size
    machine: Machine
    fit: Fit
    num_rows: int
    lengths: Lengths
    answer_dtype: str

    @property
    def recipe(self) -> Path:
        return self.options.recipe

    @property
    def num_prompts(self) -> int:
        """Prompts per benchmark in the evaluation."""
        return 20 if self.machine.num_gpus else 4

    # -- commands -------------------------------------------------------------------------------

    def answer(self) -> str:
        """Return the command for writing the target's on-policy answers."""
        words = ["pipedraft", "data", "regenerate", "--data", self.options.data]
        words += ["--target", self.options.target, "--max-tokens", str(self.size.max_answer)]
        words += ["--batch", str(self.size.answer_batch), "--dtype", self.answer_dtype]
        return shlex.join([*words, "--out", str(answers_of(self.recipe))])

    def train(self) -> str:
        """Return the training command, with accelerate for two or more GPUs."""
        words = ["--config", str(self.recipe)]
        if self.machine.num_gpus < 2:
            is_off = not self.machine.num_gpus and torch.cuda.is_available()
            return "ACCELERATE_USE_CPU=true " * is_off + shlex.join(["pipedraft", "train", *words])
        launch = packaged(f"configs/accelerate/{LAUNCHES[self.fit.strategy]}.yaml")
        start = ["accelerate", "launch", "--config_file", launch, "--num_processes"]
        return shlex.join([*start, str(self.machine.num_gpus), "-m", "pipedraft.train", *words])

    def evaluate(self) -> str:
        """Return the command for evaluating the trained head."""
        words = ["pipedraft", "eval", "--checkpoint", str(run_of(self.recipe))]
        words += ["--benchmarks", "mt_bench,gsm8k,humaneval", "--limit", str(self.num_prompts)]
        words += ["--dtype", "auto"] * bool(self.machine.num_gpus)
        results = self.recipe.with_name(f"{self.recipe.stem}_eval")
        return shlex.join([*words, "--out", str(results)])

    # -- seconds --------------------------------------------------------------------------------

    @property
    def token_flops(self) -> float:
        """FLOPs per token in the target."""
        config = self.fit.plan.config
        return self.fit.plan.decoder_flops() + 2.0 * config.hidden_size * config.vocab_size

    @property
    def answer_flops(self) -> float:
        """FLOP/s reached by a device in the answers' dtype."""
        is_single = self.answer_dtype == "float32"
        peak = self.machine.single_flops if is_single else self.machine.flops
        return peak * ASSUMED_UTILIZATION

    def pass_s(self, rows: int) -> float:
        """Return seconds per decoding pass, the slowest of products, weight reads and launches."""
        sizes = self.fit.sizes
        weights = sizes.target_layers + sizes.target_ends
        read = weights * getattr(torch, self.answer_dtype).itemsize / self.machine.bytes_per_s
        launches = self.fit.plan.config.num_hidden_layers * self.machine.layer_s
        return max(rows * self.token_flops / self.answer_flops, read, launches)

    def answer_s(self, *, longest: bool = False) -> float:
        """Return seconds for reading every prompt and writing every answer, on one device.

        Args:
            longest: every answer is as long as the command allows.
        """
        batch, lengths = self.size.answer_batch, self.lengths
        answers, most = lengths.answers, float(lengths.most_answers)
        if longest:
            answers = lengths.num_answers * self.size.max_answer
            most = lengths.most_turns * self.size.max_answer
        passes = self.num_rows * answers / batch
        # Each answer's prompt includes the turns before it, too.
        read = self.num_rows * max(0.0, lengths.row - lengths.answers) * lengths.num_answers
        # A conversation's answers follow one another, so the longest one ends alone.
        alone = max(0.0, most - passes) * self.pass_s(1)
        return passes * self.pass_s(batch) + alone + read * self.token_flops / self.answer_flops

    @property
    def num_steps(self) -> int:
        """Optimizer steps in the run."""
        run = self.fit.plan.run
        rows = self.num_rows * (1 - run.data.valid_fraction) * run.epochs
        step = run.batch_tokens * run.accumulation * self.machine.processes
        return max(1, math.ceil(rows * self.lengths.row / step))

    def train_s(self) -> float:
        """Return seconds for the run's steps, without evaluations."""
        run = self.fit.plan.run
        speed = self.machine.flops * ASSUMED_UTILIZATION
        products = run.batch_tokens * self.fit.sizes.flops / speed
        return self.num_steps * run.accumulation * max(products, self.machine.pass_s)

    def evaluate_s(self) -> float:
        """Return seconds for the evaluation on one device."""
        turns = 4 * self.num_prompts  # MT-Bench has two
        return turns * EVALUATED_TOKENS * DECODINGS * self.pass_s(1)


def run_of(recipe: Path) -> Path:
    """Return a recipe's run folder."""
    return recipe.with_suffix("")


def answers_of(recipe: Path) -> Path:
    """Return the path to the target's answers, a JSONL file."""
    return recipe.with_name(f"{recipe.stem}_answers.jsonl")


def duration(seconds: float) -> str:
    """Format seconds as minutes below one hour, else as hours."""
    minutes = math.ceil(seconds / 60)
    if minutes < 60:
        return f"{minutes} minute{'s' * (minutes > 1)}"
    return f"{seconds / 3600:,.1f} hours"
