"""Judge one program under limits: `python -I sandbox_child.py`, the job as JSON on standard input.

A script of its own, with the standard library alone: nothing of the evaluation is in the process.
It starts the program in another, fresh interpreter, which knows neither the tests nor where the
verdict goes: the tests run here and call the program's function through a pipe. All that comes
back are numbers, texts and containers of them, so a program cannot change what the tests compare.
"""

import ctypes
import json
import numbers
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

# From linux/prctl.h, linux/mount.h and asm/unistd.h.
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
MS_NOSUID_NODEV, MS_BIND_REC = 2 | 4, 4096 | 16384
MOUNT_ATTR_RDONLY, AT_FDCWD, AT_RECURSIVE, SYS_MOUNT_SETATTR = 1, -100, 0x8000, 442
MAX_REPLY_BYTES = 2**20
Values = dict[str, Any]

LIBC = ctypes.CDLL(None, use_errno=True)


# -- what the program can reach -----------------------------------------------------------------


def mount(source: str, place: str, kind: str | None, flags: int, options: str = "") -> None:
    words = (source.encode(), place.encode(), kind.encode() if kind else None)
    if LIBC.mount(*words, flags, options.encode()):
        raise OSError(ctypes.get_errno(), f"mount {place}")


def hide(place: str, kept: list[str]) -> None:
    """Cover a folder with an empty one, in which only the folders ``kept`` appear again."""
    handles = {path: os.open(path, os.O_PATH) for path in kept}
    mount("tmpfs", place, "tmpfs", MS_NOSUID_NODEV, "size=1m,mode=755")
    for path, handle in handles.items():
        os.makedirs(path, exist_ok=True)
        mount(f"/proc/self/fd/{handle}", path, None, MS_BIND_REC)
        os.close(handle)


def isolate(homes: list[str], work: str, disk_bytes: int) -> None:
    """Everything is read-only but an empty working folder in memory; homes and /proc are hidden.

    The namespaces of mounts, processes and networks are this process's own already.
    """
    folders = {os.path.realpath(path) for path in (sys.prefix, sys.base_prefix, *sys.path)}
    kept = sorted(path for path in folders if os.path.isdir(path))
    for home in homes:
        below = [path for path in kept if path.startswith(f"{home}/")]
        if home != "/" and os.path.isdir(home) and home not in kept:
            inner = [p for p in below if not any(p.startswith(f"{other}/") for other in below)]
            hide(home, inner)
    os.makedirs(work, exist_ok=True)  # it may have been in a home
    mount("tmpfs", "/proc", "tmpfs", MS_NOSUID_NODEV, "size=4k,mode=755")
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY, 0, 0, 0)
    if LIBC.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, attributes, 32):
        raise OSError(ctypes.get_errno(), "mount_setattr")
    mount("tmpfs", work, "tmpfs", MS_NOSUID_NODEV, f"size={disk_bytes},mode=777")
    os.chdir(work)


def give_up_root(user: int) -> None:
    """Become an ordinary user without capabilities: the limit on processes does not bind root."""
    os.chown(".", user, user)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def confine(limits: Values) -> None:
    # Dies with its parent. Set here, since a change of user clears it.
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # SIGXCPU at the soft limit names the cause; a program that catches it ends at the hard one.
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_s"], limits["cpu_s"] + 1))
    for kind, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 1),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["files"]),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
    ):
        resource.setrlimit(kind, (value, value))


# -- values on the pipe: plain data alone ---------------------------------------------------------

CONTAINERS: dict[str, Callable[..., object]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "dict": lambda pairs: {key: value for key, value in pairs},  # of lists
}


def pack(value: object) -> object:
    """Turn plain data into what JSON can hold, each container with the name of its type.

    Raises:
        TypeError: it is something else.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, dict):
        return ["dict", *(["tuple", pack(k), pack(v)] for k, v in value.items())]
    if isinstance(value, list | tuple | set | frozenset):
        kind = next(k for k in (list, tuple, frozenset, set) if isinstance(value, k))
        return [kind.__name__, *map(pack, value)]
    raise TypeError(type(value).__name__)


def unpack(value: object) -> Any:
    if not isinstance(value, list):
        return value
    name, *parts = value
    if name == "complex":
        return complex(*parts)
    return CONTAINERS[name](unpack(part) for part in parts)


# -- the program's interpreter --------------------------------------------------------------------


def run_program(requests: IO[str], replies: IO[str]) -> None:
    """Run the program, say how that went, and then answer calls of its function."""
    job = json.loads(requests.readline())
    namespace: Values = {"__name__": "answer"}

    def attempt(action: Callable[[], object]) -> None:
        try:
            reply = {"value": pack(action())}
        except BaseException as error:  # an answer may raise anything, SystemExit included
            reply = {"raises": type(error).__name__}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    def run_all() -> None:
        for source in job["sources"]:
            exec(compile(source, "<answer>", "exec"), namespace)

    attempt(run_all)
    for line in requests:
        args, kwargs = unpack(json.loads(line))
        attempt(lambda: namespace[job["entry_point"]](*args, **kwargs))  # noqa: B023  # at once
    os._exit(0)  # what the program left for the end of the interpreter is not run


def start(limits: Values, script: str) -> tuple[int, IO[str], IO[str]]:
    """Start the program's interpreter; its process, and the ends of its pipes.

    Args:
        script: text of this file, which may be out of reach by now.
    """
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    process = os.fork()
    if process:
        os.close(theirs_in)
        os.close(theirs_out)
        return process, os.fdopen(ours_in), os.fdopen(ours_out, "w")
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    # Above the standard streams, which a program's prints and reads must not find.
    os.dup2(theirs_in, 10, inheritable=True)
    os.dup2(theirs_out, 11, inheritable=True)
    confine(limits)
    os.execv(sys.executable, [sys.executable, "-I", "-B", "-c", script, "program"])


# -- the tests ------------------------------------------------------------------------------------


class Ended(Exception):
    """The program's interpreter is gone."""


def judge(job: Values, replies: IO[str], requests: IO[str]) -> str:
    """PASSED, or "raises" and the name of the exception.

    Raises:
        Ended: before the verdict.
    """

    def ask(message: object) -> Any:
        try:
            requests.write(json.dumps(message) + "\n")
            requests.flush()
            line = replies.readline(MAX_REPLY_BYTES)
        except BrokenPipeError as error:
            raise Ended from error
        if len(line) == MAX_REPLY_BYTES:
            raise ValueError("a value of more than 1 MiB")
        if not line.endswith("\n"):
            raise Ended
        reply = json.loads(line)
        if "raises" in reply:
            raise type(str(reply["raises"]), (Exception,), {})
        return unpack(reply["value"])

    try:
        ask({"sources": job["sources"], "entry_point": job["entry_point"]})
        if job["tests"]:
            namespace: Values = {"__name__": "tests"}
            for source in job["tests"]:
                exec(compile(source, "<tests>", "exec"), namespace)
            namespace["check"](lambda *args, **kwargs: ask(pack((args, kwargs))))
    except Ended:
        raise
    except BaseException as error:
        return f"raises {type(error).__name__}"
    return "passed"


def main() -> None:
    """Judge a job; in a process namespace the end of this process is the end of all."""
    job, script = json.load(sys.stdin), Path(__file__).read_text()
    report = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)

    def say(outcome: str) -> None:
        os.write(report, json.dumps({"token": job["token"], "outcome": outcome}).encode() + b"\n")

    # The evaluation ends this process in time, if it lives. Number 1 needs a handler for signals.
    signal.signal(signal.SIGALRM, lambda *_: os._exit(1))
    signal.alarm(int(job["limits"]["wall_s"]) + 2)
    if job["homes"] is not None:
        isolate(job["homes"], os.getcwd(), job["limits"]["disk_bytes"])
    if job["user"] is not None:
        give_up_root(job["user"])
    # No process of the same user may look into this one's memory.
    LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    process, replies, requests = start(job["limits"], script)
    try:
        say(judge(job, replies, requests))
        return
    except Ended:
        _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status):
        say(f"ended by {signal.Signals(os.WTERMSIG(status)).name}")


if __name__ == "__main__":
    if sys.argv[1:] == ["program"]:
        with os.fdopen(10) as requests, os.fdopen(11, "w") as replies:
            run_program(requests, replies)
    else:
        main()
