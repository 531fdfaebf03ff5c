"""Run one program under limits: `python -I sandbox_child.py`, the job as JSON on standard input.

A script of its own, with the standard library alone: nothing of the evaluation is in the process.
The limits bind the process to itself, so the program starts only once they hold.
"""

import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any

# From linux/prctl.h and linux/capability.h.
PR_SET_PDEATHSIG = 1
PR_SET_KEEPCAPS = 8
PR_SET_NO_NEW_PRIVS = 38
CAPABILITY_VERSION_3 = 0x20080522
CAP_DAC_READ_SEARCH = 1 << 2

LIBC = ctypes.CDLL(None, use_errno=True)


def set_capabilities(mask: int) -> bool:
    """Keep these capabilities alone, permitted and effective; False if they are not to be had."""
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    # Effective, permitted, inheritable of capabilities 0 to 31, then of 32 to 63.
    words = (ctypes.c_uint32 * 6)(mask, mask, 0, 0, 0, 0)
    return LIBC.capset(header, words) == 0


def give_up_root(user: int) -> None:
    """Become an ordinary user: the limit on processes does not bind root.

    An interpreter below a folder of root's alone (/root/.pyenv) stays usable: reading is allowed
    everywhere where its folders would be closed to that user. Writing is not.
    """
    os.chown(".", user, user)
    folders = [path for path in sys.path if os.path.isdir(path)]
    LIBC.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    closed = not all(os.access(path, os.R_OK | os.X_OK) for path in folders)
    if not (closed and set_capabilities(CAP_DAC_READ_SEARCH)) and not set_capabilities(0):
        raise OSError(ctypes.get_errno(), "capset")


def confine(limits: dict[str, Any]) -> None:
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


def execute(sources: list[str]) -> str:
    """ "passed", or "raises" and the name of the exception."""
    namespace: dict[str, Any] = {"__name__": "answer"}
    try:
        for source in sources:
            exec(compile(source, "<answer>", "exec"), namespace)
    except BaseException as error:  # an answer may raise anything, SystemExit included
        return f"raises {type(error).__name__}"
    return "passed"


def run_confined(job: dict[str, Any]) -> str:
    if job["user"] is not None:
        give_up_root(job["user"])
    confine(job["limits"])
    return execute(job["sources"])


def main() -> None:
    """Two processes: the program's, and this one, which says how that ended.

    In a process namespace this one is number 1: the program gets every signal, as number 1 would
    not, and the end of number 1 is the end of all.
    """
    job = json.load(sys.stdin)
    report = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)

    def say(outcome: str) -> None:
        os.write(report, json.dumps({"token": job["token"], "outcome": outcome}).encode() + b"\n")

    # The evaluation ends this process in time, if it lives. Number 1 needs a handler for signals.
    signal.signal(signal.SIGALRM, lambda *_: os._exit(1))
    signal.alarm(int(job["limits"]["wall_s"]) + 2)
    program = os.fork()
    if program == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        say(run_confined(job))
        os._exit(0)  # what the program left for the end of the interpreter is not run
    _, status = os.waitpid(program, 0)
    if os.WIFSIGNALED(status):
        say(f"ended by {signal.Signals(os.WTERMSIG(status)).name}")


if __name__ == "__main__":
    main()
