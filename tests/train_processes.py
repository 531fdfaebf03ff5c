"""Training runs of the tests: real processes, forked from one that imported it all.

A job of the fork server is a run: its arguments, and what is to happen to it.
"""

import contextlib
import importlib
import os
import signal
import sys
import traceback
from typing import Any, NoReturn

import accelerate.tracking  # noqa: F401
import datasets  # noqa: F401
import torch
import transformers.models.llama.modeling_llama  # noqa: F401
from fork_server import answer, write_to

from pipedraft.errors import run_command
from pipedraft.train import __main__ as command
from pipedraft.train import checkpoint, loop

FILE_EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate")


class Moments:
    """Counts what a run does: file operations in its folder and the parts of every step."""

    def __init__(self, folder: str, kill_at: int) -> None:
        self.folder, self.kill_at, self.count = folder, kill_at, 0
        sys.addaudithook(self._audit)
        self._count_calls(loop.Trainer, "optimize")
        self._count_calls(loop.Accelerator, "backward")
        self._count_calls(loop.Trainer, "reduce")
        self._count_calls(torch.optim.AdamW, "step")

    def _audit(self, event: str, arguments: tuple) -> None:
        if event in FILE_EVENTS and str(arguments[0]).startswith(self.folder):
            self.tick()

    def _count_calls(self, owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            self.tick()
            return function(*arguments, **options)

        setattr(owner, name, counted)

    def tick(self) -> None:
        self.count += 1
        if self.count == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def send_in_step(step: int, numbers: list[int]) -> None:
    """The process gets these signals while it computes the step after ``step``."""
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


def run(job: dict[str, Any]) -> NoReturn:
    """What `python -m pipedraft.train` does, in a process that is to end."""
    write_to(job["log"])
    os.environ.update(job.get("environment", {}))
    sys.argv = ["train", *job["arguments"]]
    moments = Moments(job["folder"], job.get("kill_at", 0))
    if "signals" in job:
        send_in_step(job["step"], job["signals"])
    if job.get("without_checksums"):
        checkpoint.damage = lambda folder: None
    status = 1
    try:
        run_command(command.main)
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    print(f"\nmoments: {moments.count}", file=sys.stderr, flush=True)
    os._exit(status)


def main() -> None:
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for answers
        for module in sys.argv[1:]:
            importlib.import_module(module)
    answer(run)


if __name__ == "__main__":
    main()
