"""The ranks of a command on this machine, without a launcher: they meet at 127.0.0.1, end together.

This process loads no library and is alone to see Ctrl-C, so that it ends them at any moment, with
one line. ``python -m ... DESCRIPTOR`` is the store of a launch on a socket that is given, until
stdin ends.
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

from pipedraft.inference.ranks import SIGNALS

LEAVE_S = 10.0
"""For the other ranks once one has failed: they find out by themselves, and say why."""


def run_ranks(
    num_ranks: int, command: Sequence[str] = (), *, passes_signals: bool = False
) -> NoReturn:
    """Run a command as so many ranks; leave as the first one that fails, or with 0.

    Args:
        command: default: this process's.
        passes_signals: two SIGTERM or Ctrl-C go to the ranks, which end when they are done.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    address, port = listener.getsockname()
    world = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    world |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    world |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    num_threads = max(1, (os.cpu_count() or 1) // num_ranks)
    shared = {"OMP_NUM_THREADS": str(num_threads)} | os.environ | world
    started: list[subprocess.Popen] = []
    to_pass = 2 if passes_signals else 0

    def kill() -> None:
        for process in started:
            process.kill()

    def end(number: int, frame: FrameType | None = None) -> None:
        nonlocal to_pass
        if to_pass and number != signal.SIGHUP:
            to_pass -= 1
            for process in started[1:]:
                process.send_signal(number)
            return
        kill()
        is_typed = number == signal.SIGINT
        said = "interrupted" if is_typed else f"ended by {signal.Signals(number).name}"
        os.write(2, f"error: {said}\n".encode())
        os._exit(128 + number)

    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # the others inherit it
    store = [sys.executable, "-m", __name__, str(listener.fileno())]
    started.append(subprocess.Popen(store, stdin=subprocess.PIPE, pass_fds=[listener.fileno()]))
    for rank in range(num_ranks):
        environment = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        stdin = subprocess.DEVNULL if rank else None
        words = command or [sys.executable, *sys.orig_argv[1:]]
        started.append(subprocess.Popen(words, env=environment, stdin=stdin))
    for number in SIGNALS:
        signal.signal(number, end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    running, status = {process.pid for process in started[1:]}, 0
    while running:
        pid, ended = os.wait()
        running.discard(pid)
        code = os.waitstatus_to_exitcode(ended)
        if code and not status:
            status = max(code, 1)
            late = threading.Timer(LEAVE_S, kill)
            late.daemon = True
            late.start()
    started[0].kill()
    os._exit(status)


if __name__ == "__main__":
    import torch.distributed as dist

    meeting = socket.socket(fileno=int(sys.argv[1]))
    host, number = meeting.getsockname()
    kept = dist.TCPStore(
        host, number, is_master=True, wait_for_workers=False, master_listen_fd=meeting.detach()
    )
    sys.stdin.read()
