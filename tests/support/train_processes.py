"""Training runs for tests: real processes, forked from one with all imports done.

A job for the fork server is one run: its arguments and planned faults.
"""

import json
import os
import resource
import signal
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import accelerate.tracking  # noqa: F401
import datasets  # noqa: F401
import safetensors.torch
import torch
import transformers
import transformers.models.llama.modeling_llama
from accelerate.utils import dataclasses
from fork_server import answer, write_to
from torch.distributed import distributed_c10d

from pipedraft.endings import run_command
from pipedraft.models.exchange.card import card_template
from pipedraft.train import __main__ as command
from pipedraft.train import launch, loop
from pipedraft.train import run as parts
from pipedraft.train.config import parser_of
from pipedraft.train.methods import methods

FILE_EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate")


class Moments:
    """Counts a run's events: file operations in its folder and the parts of every step."""

    def __init__(self, folder: str, kill_at: int) -> None:
        self.folder, self.kill_at, self.count = folder, kill_at, 0
        sys.addaudithook(self._audit)
        before_calls(loop.Trainer, "optimize", self.tick)
        before_calls(loop.Accelerator, "backward", self.tick)
        before_calls(loop.Trainer, "reduce", self.tick)
        before_calls(torch.optim.AdamW, "step", self.tick)

    def _audit(self, event: str, arguments: tuple) -> None:
        if event in FILE_EVENTS and str(arguments[0]).startswith(self.folder):
            self.tick()

    def tick(self) -> None:
        self.count += 1
        if self.count == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


class FullDisk:
    """Counts files written in a run's folder, and lets the disk be full from a given file on."""

    def __init__(self, folder: str, full_at: int) -> None:
        self.folder, self.full_at, self.count = folder, full_at, 0
        self.said: int | None = None
        sys.addaudithook(self._audit)
        # Rust writes it, so no Python hook sees the write.
        before_calls(safetensors.torch, "serialize_file", self.tick)
        before_calls(transformers.PreTrainedTokenizerFast, "_save_pretrained", self.tick)

    def _audit(self, event: str, arguments: tuple) -> None:
        is_here = event == "open" and str(arguments[0]).startswith(self.folder)
        if is_here and arguments[2] & os.O_ACCMODE != os.O_RDONLY:
            self.tick()

    def tick(self) -> None:
        self.count += 1
        if self.count == self.full_at:
            self.said, pipe = os.pipe()  # the log is a file, and could not grow either
            os.dup2(pipe, 2)
            limit_file_size(0)

    def end(self) -> None:
        """Make room again, and move the run's messages into its log."""
        if self.said is not None:
            limit_file_size(None)
            os.set_blocking(self.said, False)
            os.write(1, os.read(self.said, 2**16))
            os.dup2(1, 2)


def limit_file_size(size: int | None) -> None:
    """Limit the size of files: writing fails as on a full disk; None: no limit."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if size is None else size, hard))


def before_calls(owner: Any, name: str, act: Callable[[], None]) -> None:
    function = getattr(owner, name)

    def called(*arguments: Any, **options: Any) -> Any:
        act()
        return function(*arguments, **options)

    setattr(owner, name, called)


def send_in_step(step: int, numbers: list[int]) -> None:
    """Send these signals to the process while it computes the step after ``step``."""
    backward = loop.Accelerator.backward

    def signalled(self: Any, loss: Any) -> None:
        if signalled.trainer.progress.step == step:
            for number in numbers:
                os.kill(os.getpid(), number)
        backward(self, loss)

    optimize = loop.Trainer.optimize

    def remember(self: Any, window: Any) -> Any:
        signalled.trainer = self
        return optimize(self, window)

    loop.Accelerator.backward, loop.Trainer.optimize = signalled, remember


def note_dtypes(path: str) -> None:
    """Write a step's dtypes for computing, sending and keeping: {purpose: dtypes}."""
    found: dict[str, set[str]] = defaultdict(set)
    in_backward: list[bool] = []
    add_sums, optimize, backward = loop.add_sums, loop.Trainer.optimize, loop.Accelerator.backward

    def note(what: str, values: Iterable[Any]) -> None:
        tensors = [x for x in values if torch.is_tensor(x) and x.is_floating_point()]
        found[what] |= {str(x.dtype) for x in tensors if what != "gradients" or x.numel() > 1}

    def noted_sums(sums: Any, output: Any, **options: Any) -> None:
        note("loss and metrics", (output.loss, *output.sums.values()))
        add_sums(sums, output, **options)

    def sent(reduce: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **options: Any) -> Any:
            if in_backward:
                note("gradients", (*arguments, *options.values()))
            return reduce(*arguments, **options)

        return noted

    def noted_backward(self: Any, loss: Any) -> None:
        in_backward.append(True)
        backward(self, loss)
        in_backward.clear()
        for module in self._models:  # DDP and FSDP send theirs in C++, as they are in the end
            note("gradients", (x.grad for x in module.parameters()))

    def noted_step(self: Any, window: Any) -> Any:
        values = optimize(self, window)
        for optimizer in self.optimizers:
            own = getattr(optimizer.optimizer, "optimizer", optimizer)  # DeepSpeed wraps it
            note("optimizer", (x for group in own.param_groups for x in group["params"]))
            note("optimizer", (x for state in own.state.values() for x in state.values()))
        note("weights", self.module.parameters())
        Path(path).write_text(json.dumps({what: sorted(x) for what, x in found.items()}))
        return values

    for name in ("all_reduce", "reduce_scatter_tensor"):
        setattr(torch.distributed, name, sent(getattr(torch.distributed, name)))
    loop.add_sums, loop.Accelerator.backward = noted_sums, noted_backward
    loop.Trainer.optimize = noted_step


def shorten_usual_timeout(seconds: float) -> None:
    """Shorten the default time limit for collective calls: else minutes."""
    usual = timedelta(seconds=seconds)
    dataclasses.InitProcessGroupKwargs.__post_init__ = lambda own: setattr(
        own, "timeout", own.timeout or usual
    )
    distributed_c10d.default_pg_timeout = usual


def run(job: dict[str, Any]) -> NoReturn:
    """Run a job like `python -m pipedraft.train`, then exit the process."""
    write_to(job["log"])
    os.environ.update(job.get("environment", {}))
    sys.argv = ["train", *job["arguments"]]
    moments = Moments(job["folder"], job.get("kill_at", 0))
    disk = FullDisk(job["folder"], job["full_at"]) if "full_at" in job else None
    if "signals" in job:
        send_in_step(job["step"], job["signals"])
    if "usual_timeout_s" in job:
        shorten_usual_timeout(job["usual_timeout_s"])
    if "wait_s" in job:
        launch.WAIT_FOR_OTHERS = timedelta(seconds=job["wait_s"])
    for name, seconds in job.get("sleeps", {}).items():
        before_calls(parts, name, partial(time.sleep, seconds))
    if "dtypes" in job:
        note_dtypes(job["dtypes"])
    status = 1
    try:
        run_command(command.main)
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    if disk is not None:
        disk.end()
    print(f"\nmoments: {moments.count}", file=sys.stderr, flush=True)
    os._exit(status)


def main() -> None:
    torch.set_num_threads(1)
    card_template()
    for method in methods():
        parser_of(method, tuple(methods().items()), command.EXAMPLE)
    answer(run, *sys.argv[1:])


if __name__ == "__main__":
    main()
