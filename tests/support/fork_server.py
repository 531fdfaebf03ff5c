"""Processes forked from one with all imports done: imports dominate a short run's time.

A line of JSON on the parent's stdin starts a process or waits for one. Starting returns its id,
waiting its exit status (negative for a signal).
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers.conversion_mapping import get_checkpoint_conversion_mapping


def answer(run: Callable[[dict[str, Any]], NoReturn], *modules: str) -> None:
    """Serve as the parent until stdin ends: call ``run`` in each forked process, and it must exit.

    Args:
        modules: imported once for all processes; accelerate imports DeepSpeed to save a model.
    """
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for answers
        for module in ("deepspeed", *modules):
            importlib.import_module(module)
    get_checkpoint_conversion_mapping("llama")  # the mapping is built once
    gc.freeze()  # no process collects garbage among inherited objects
    for line in sys.stdin:
        job = json.loads(line)
        if "wait" in job:
            _, status = os.waitpid(job["wait"], 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            renew_thread_pool()
            run(job)
        print(pid, flush=True)


def renew_thread_pool() -> None:
    """Renew torch's thread pool in a fork. The first user renews it anyway, and threads arriving at
    the same time (a loader's) find none: "Invalid thread pool!"."""
    torch.set_num_threads(torch.get_num_threads())


def write_to(path: str, *numbers: int) -> None:
    """Append all further output of this process to a file.

    Args:
        numbers: stream numbers, by default stdout and stderr.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in numbers or (1, 2):
        os.dup2(file, number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@dataclass
class ForkServer:
    """Client for the parent process; use it in a ``with`` statement."""

    process: subprocess.Popen
    running: set[int] = field(default_factory=set)

    @classmethod
    def start(cls, script: str, *arguments: str, **options: Any) -> "ForkServer":
        """Start the parent; ``script`` is a file in this folder that calls ``answer``."""
        command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
        pipe = subprocess.PIPE
        return cls(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, **options))

    def __enter__(self) -> "ForkServer":
        return self

    def __exit__(self, *exception: Any) -> None:
        for pid in self.running:  # nobody waits for them: a test has failed
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.__exit__(*exception)

    def ask(self, **job: Any) -> int:
        """Start a process and return its id."""
        pid = self._answer(job)
        self.running.add(pid)
        return pid

    def wait(self, pid: int) -> int:
        """Wait and return the exit status, negative for a signal."""
        status = self._answer({"wait": pid})
        self.running.discard(pid)
        return status

    def _answer(self, job: dict[str, Any]) -> int:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(job), file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())


def forked(work: Callable[[], None]) -> int:
    """Fork and return the process id; the child exits with 0 after ``work``, with 1 on failure."""
    pid = os.fork()
    if pid == 0:
        try:
            gc.freeze()
            renew_thread_pool()
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


def status_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def rank_environments(num_processes: int, port: int) -> list[dict[str, str]]:
    """Return a launcher's environment for each process in a local group.

    Args:
        port: port for the rendezvous store; the caller keeps the store open.
    """
    world = {"WORLD_SIZE": str(num_processes), "LOCAL_WORLD_SIZE": str(num_processes)}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    world["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    return [world | {"RANK": str(i), "LOCAL_RANK": str(i)} for i in range(num_processes)]
