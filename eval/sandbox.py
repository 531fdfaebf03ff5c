"""Programs that a language model wrote, run in a process that is short of everything.

Limits against accidents (endless loops, memory, forks, large files), and where the system permits
namespaces a file system of its own: read-only, without homes, /proc, network and other processes.
The kernel is the same, so this is no defence against a program that has a fault of it at hand.
Without namespaces a program may read and write whatever its user may. Linux only.
"""

import ctypes
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import IO

CHILD = Path(__file__).with_name("sandbox_child.py")
PR_SET_DUMPABLE = 4
NOBODY = 65534
"""User that a program of root's runs as; no account of that number has to exist."""
PASSED = "passed"
TIME_LIMIT = "time limit"
CPU_LIMIT = "ended by SIGXCPU"

IMPORTS = (
    "import collections, datetime, decimal, hashlib, heapq, itertools, math, random, re, typing"
)
FORK = "import os\nif os.fork() == 0:\n    os._exit(0)"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one program."""

    cpu_s: int = 3
    """The official harness allows 3 s of wall time; time on the CPU does not depend on the load."""
    wall_s: float = 30.0
    memory_bytes: int = 2**30
    """Address space."""
    file_bytes: int = 2**20
    """Largest file that it may write."""
    files: int = 64
    """Open at once."""
    disk_bytes: int = 2**24
    """All that it writes, where it is isolated."""


@cache
def isolation() -> tuple[str, ...]:
    """Command that starts another one with its own processes, network and mounts.

    Empty where the system forbids namespaces: the limits hold there too, but a program could use
    the network, read and write files, and reach into what its user runs.
    """
    unshare = shutil.which("unshare")
    if unshare is None:
        return ()
    # Root makes namespaces of its own. Anybody else needs to be root of a user namespace for that;
    # not so root, whom the limit on processes would not bind in there.
    rights = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    command = (unshare, *rights, "--net", "--pid", "--mount", "--fork")
    tried = subprocess.run([*command, "true"], capture_output=True)
    return command if tried.returncode == 0 else ()


def _outcome(report: IO[bytes], token: str) -> str:
    """The last word of the script: a program may be ended after it has passed."""
    report.seek(0)
    for line in reversed(report.read().splitlines()):
        try:
            content = json.loads(line)
        except ValueError:
            continue
        if isinstance(content, dict) and content.get("token") == token:
            return TIME_LIMIT if content["outcome"] == CPU_LIMIT else content["outcome"]
    return "ended early"


def run_program(
    sources: Sequence[str],
    limits: Limits | None = None,
    *,
    tests: Sequence[str] = (),
    entry_point: str = "",
) -> str:
    """Run source texts one after the other in one namespace, and then the tests in another process.

    The process has a session, and so a process group, of its own, an empty temporary folder, and
    of the environment PATH alone. It may start neither process nor thread. The group is killed at
    the end, whatever the end is.

    Args:
        tests: source texts, which define ``check(function)``; none: running is all.
        entry_point: name of the function in ``sources``; plain data goes in and comes out.

    Returns:
        "passed" if every text ran to its end and the tests passed; else "raises" and the name of
        the exception, "time limit", or how the process ended.
    """
    limits = limits or Limits()
    token = secrets.token_hex(16)
    job = {
        "sources": list(sources),
        "limits": asdict(limits),
        "tests": list(tests),
        "entry_point": entry_point,
        "user": NOBODY if os.geteuid() == 0 else None,
        "homes": sorted({str(Path.home().resolve()), "/root", "/home"}) if isolation() else None,
        "token": token,
    }
    with (
        tempfile.TemporaryDirectory(prefix="pipedraft-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as order,
        tempfile.TemporaryFile() as report,
    ):
        order.write(json.dumps(job).encode())
        order.seek(0)
        process = subprocess.Popen(
            [*isolation(), sys.executable, "-I", "-B", str(CHILD)],
            stdin=order,
            stdout=report,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            # OpenBLAS starts threads at its import, and gives up if it may not.
            env={"PATH": os.environ.get("PATH", os.defpath), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            in_time = _wait(process.pid, limits.wall_s)
        finally:
            # The leader is not reaped yet, so its number still stands for this group.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return _outcome(report, token) if in_time else TIME_LIMIT


def _wait(pid: int, timeout_s: float) -> bool:
    """True as soon as the process ended, without reaping it."""
    descriptor = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))
    finally:
        os.close(descriptor)


def check_sandbox(*, allow_unisolated: bool) -> None:
    """Raise ValueError unless programs can be run here, and be kept from starting others.

    Args:
        allow_unisolated: also where they could use the network and the user's files.
    """
    if sys.platform != "linux":
        raise ValueError(
            f"--allow-code-execution: the sandbox needs Linux, not {sys.platform}; "
            "leave it out, or run the evaluation in a Linux container"
        )
    if not isolation() and not allow_unisolated:
        raise ValueError(
            "--allow-code-execution: the system does not permit `unshare --net --pid --mount`, so "
            "programs of the model could use the network and read and change your files; evaluate "
            "where it does, or accept that by --allow-unisolated-code"
        )
    if not isolation():
        # Other processes of this user, so the programs, may then not look into this one's memory.
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    outcome = run_program([IMPORTS])
    if outcome != PASSED:
        raise ValueError(
            f"--allow-code-execution: {sys.executable} cannot run in the sandbox ({outcome}); "
            "as root without namespaces, install Python where every user may read it, or evaluate "
            "as another user"
        )
    if run_program([FORK]) != "raises BlockingIOError":
        raise ValueError(
            f"--allow-code-execution: the limit on processes does not bind user {os.geteuid()}; "
            "evaluate as another user"
        )
