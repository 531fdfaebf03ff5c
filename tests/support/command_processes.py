"""Run commands as real processes, forked from one process with nearly everything imported.

A job for the fork server is one command: module, arguments, folder, environment, and output files.
Each job imports gRPC itself, because gRPC does not survive a fork.
"""

import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn

from doc_commands import main_of, run_module
from fork_server import ForkServer, answer, rank_environments, write_to

from pipedraft.endings import run_command
from pipedraft.wings import find_wings

LIMIT_S = 300
"""Time limit for expected output; the machine may be busy."""
LIFE_S = 900
"""Lifetime limit: an alarm kills a hanging process."""
MODULES = ("inference", "eval", "train", "train.features")


def run(job: dict[str, Any]) -> NoReturn:
    """Run a job like `python -m MODULE`, then exit the process."""
    write_to(job["out"])
    write_to(job["err"], 2)
    signal.alarm(LIFE_S)
    os.chdir(job["folder"])
    os.environ.update(job["environment"])
    status = 1
    try:
        run_command(lambda: run_module(job["module"], job["arguments"]))
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@dataclass
class Process:
    parent: ForkServer
    pid: int
    out: Path
    err: Path
    status: int | None = None

    @classmethod
    def start(
        cls,
        parent: ForkServer,
        folder: Path,
        *arguments: str,
        module: str = "pipedraft.inference",
        environment: dict[str, str] | None = None,
    ) -> "Process":
        """Start a command in ``folder`` with a new pair of output files there."""
        name = f"process_{len(list(folder.glob('process_*.out')))}"
        out, err = folder / f"{name}.out", folder / f"{name}.err"
        out.touch()
        err.touch()
        files = {"folder": str(folder), "out": str(out), "err": str(err)}
        environment = environment or {}
        pid = parent.ask(module=module, arguments=arguments, environment=environment, **files)
        return cls(parent, pid, out, err)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait until the command has printed a match for ``pattern``."""
        deadline_s = time.monotonic() + LIMIT_S
        while not (found := re.search(pattern, self.out.read_text())):
            said = self.err.read_text()
            assert not said and time.monotonic() < deadline_s, self.out.read_text() + said
            time.sleep(0.01)
        return found

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def finish(self) -> tuple[int, str, str]:
        """Return the exit status (negative for a signal), stdout and stderr."""
        if self.status is None:
            self.status = self.parent.wait(self.pid)
        return self.status, self.out.read_text(), self.err.read_text()


def make_certificate(folder: Path) -> tuple[str, str]:
    """Make a certificate for 127.0.0.1 and return the paths: certificate, key."""
    words = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        "-subj /CN=localhost -addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out cert.pem"
    )
    subprocess.run(words.split(), cwd=folder, check=True, capture_output=True)
    return str(folder / "cert.pem"), str(folder / "key.pem")


def run_ranks(parent: ForkServer, script: str, words: Sequence[str], num_processes: int) -> str:
    """Run a script's ranks and return their output; ``words`` are its arguments, a folder first."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        Process.start(parent, Path(words[0]), *words, module=script, environment=rank)
        for rank in rank_environments(num_processes, store.port)
    ]
    ends = [rank.finish() for rank in ranks]
    assert not any(status for status, _, _ in ends), [error[-1000:] for _, _, error in ends]
    return "".join(output for _, output, _ in ends)


def main() -> None:
    import datasets  # noqa: F401
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    import pipedraft.inference.command
    import pipedraft.inference.schedules
    import pipedraft.models.target  # noqa: F401

    for wing in find_wings("pipedraft.inference"):
        for name in (*wing.decodes.values(), *(one.run for one in wing.commands.values())):
            resolve_name(name)
    torch.set_num_threads(1)
    for name in MODULES:
        main_of(f"pipedraft.{name}")
    assert "grpc" not in sys.modules
    answer(run)


if __name__ == "__main__":
    main()
