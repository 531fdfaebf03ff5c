"""Start a command's ranks on this machine without a launcher.

This process loads no library. On Ctrl-C, it can therefore end the ranks at any moment and report
the reason in one line.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from . import LAUNCHER_VARIABLE, SIGNALS, STORE_VARIABLE, TOKEN_VARIABLE

LEAVE_S = 10.0
"""Seconds for the other ranks to exit after a failure: they detect it themselves and report why."""


def run_ranks(
    num_ranks: int, command: Sequence[str] = (), *, passes_signals: bool = False
) -> NoReturn:
    """Run a command as ``num_ranks`` ranks. Exit with the first failing rank's status, or 0.

    Args:
        command: the command to run, by default this process's own command.
        passes_signals: True to pass the first two SIGTERM or Ctrl-C signals to the ranks, which
            may then finish their work.
    """
    # Rank 0's store inherits the bound socket, so no other process can take the port in between.
    listener = socket.create_server(("127.0.0.1", 0))
    world = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}
    world |= {STORE_VARIABLE: str(listener.fileno()), TOKEN_VARIABLE: os.urandom(32).hex()}
    world |= {LAUNCHER_VARIABLE: str(os.getpid())}
    # By default each rank starts a thread per core, and they slow each other down.
    num_threads = max(1, (os.cpu_count() or 1) // num_ranks)
    # Without a level, torch's store adds a C++ stack to what the ranks say of a failure.
    usual = {"OMP_NUM_THREADS": str(num_threads), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    shared = usual | os.environ | world
    started: list[subprocess.Popen] = []
    to_pass = 2 if passes_signals else 0
    killed = ""

    def kill() -> None:
        nonlocal killed
        if killed:
            os.write(2, f"error: {killed}\n".encode())
        killed = ""
        for process in started:
            process.kill()

    def end(number: int, frame: FrameType | None = None) -> None:
        nonlocal to_pass
        if to_pass and number != signal.SIGHUP:
            to_pass -= 1
            for process in started:
                process.send_signal(number)
            return
        kill()
        is_typed = number == signal.SIGINT
        said = "interrupted" if is_typed else f"ended by {signal.Signals(number).name}"
        os.write(2, f"error: {said}\n".encode())
        os._exit(128 + number)

    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # child processes inherit it
    for rank in range(num_ranks):
        environment = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        files = [] if rank else [listener.fileno()]
        # Only one reader, or ranks would take parts of the user's input from each other.
        stdin = subprocess.DEVNULL if rank else None
        words = command or [sys.executable, *sys.orig_argv[1:]]
        started.append(subprocess.Popen(words, env=environment, stdin=stdin, pass_fds=files))
    listener.close()
    for number in SIGNALS:
        signal.signal(number, end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    running, status = {process.pid for process in started}, 0
    while running:
        pid, ended = os.wait()
        running.discard(pid)
        code = os.waitstatus_to_exitcode(ended)
        if code > 0:
            killed = ""  # this rank has told the reason
        if code and not status:
            status = max(code, 1)
            if code < 0:
                killed = (
                    f"rank {[process.pid for process in started].index(pid)} was ended by "
                    f"{signal.Signals(-code).name} from outside; a system that runs out of memory "
                    "does this: give fewer --processes, or a smaller --dtype"
                )
            # The failed rank's peers report the cause themselves; kill only hanging ones.
            late = threading.Timer(LEAVE_S, kill)
            late.daemon = True
            late.start()
    kill()
    os._exit(status)
