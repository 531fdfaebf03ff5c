"""Rank program for test_process_failures.py: decode a long output, and fail in one rank."""

import ctypes
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.engine import Engine
from pipedraft.inference.ranks.cluster import Cluster
from pipedraft.inference.ranks.mail import Mail

NUM_STAGES, NUM_RANKS = 2, 3
SO_ATTACH_FILTER, BPF_RETURN = 26, 0x06  # Linux constants; Python's socket module lacks them

PIECE_BYTES = 1 << 16
MAPPED = "0000000000000000FFFF0000"
"""An IPv4 address in an IPv6 socket begins like this, in the kernel's notation."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    folder: Path
    """Folder with the target in ``t``; every rank adds its files."""
    num_prompt: int = 2
    num_new: int = 90_000
    """New tokens to decode; the default takes minutes."""
    failing_rank: int = -1
    dies_at: str = ""
    """Method of ``Mail`` that kills the failing rank: "bind" or "dial"."""
    connect_s: float = 60
    """Longest wait for the other ranks."""
    spans_machines: bool = False
    """Start each rank as the only one on its machine: they use TCP."""
    failure: Callable[[Path], None] | None = None
    """Called with ``folder`` in the failing rank soon after its first steps."""


class PlainTokenizer:
    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, ids))


def run_rank(plan: Plan) -> None:
    if plan.dies_at and int(os.environ["RANK"]) == plan.failing_rank:
        setattr(Mail, plan.dies_at, lambda *_: end_now(plan.folder))
    with Cluster(connect_s=plan.connect_s) as cluster:
        (plan.folder / f"rank{cluster.rank}.pid").write_text(str(os.getpid()))
        if cluster.rank == plan.failing_rank and plan.failure is not None:
            signal.signal(signal.SIGUSR2, hold_memory)
            threading.Thread(target=fail_soon, args=(plan, cluster), daemon=True).start()
        if not cluster.is_controller:
            cluster.serve()
            return
        part = cluster.load_target(str(plan.folder / "t"), revision=None, num_stages=NUM_STAGES)
        config = DecodeConfig.of(
            schedule="autoregressive", num_stages=NUM_STAGES, max_new_tokens=plan.num_new
        )
        engine = Engine(part, PlainTokenizer(), config, connect=cluster.connect)
        engine.decode([index % 16 for index in range(plan.num_prompt)])


def run_forked_rank(rank: int, port: int, plan: Plan) -> None:
    """Run ``run_rank`` in torchrun's environment; its stderr goes to a file."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(NUM_RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "LOCAL_WORLD_SIZE": str(1 if plan.spans_machines else NUM_RANKS),
    }
    os.dup2(os.open(plan.folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    run_rank(plan)


def fail_soon(plan: Plan, cluster: Cluster) -> None:
    while cluster.timeline.counts["wait"] < 10:
        time.sleep(0.01)
    ranks = [rank_id(plan.folder, rank) for rank in range(NUM_RANKS)]
    (plan.folder / "listening").write_text(" ".join(listening(ranks)))
    tell_time(plan.folder)
    assert plan.failure is not None
    plan.failure(plan.folder)


def tell_time(folder: Path) -> None:
    (folder / "failed_at").write_text(str(time.monotonic()))


def end_now(folder: Path) -> None:
    tell_time(folder)
    os.kill(os.getpid(), signal.SIGKILL)


# -- failures ---------------------------------------------------------------------------------


def receive_signal(folder: Path, *, number: int) -> None:
    os.kill(os.getpid(), number)


def be_suspended(folder: Path, *, times_s: Sequence[float] = (0.4,) * 4, all_of_them: bool) -> None:
    """Suspend this process, or all ranks, as Ctrl-Z and fg do."""
    numbers = range(NUM_RANKS) if all_of_them else [NUM_RANKS - 1]
    ids = [rank_id(folder, number) for number in numbers]
    if os.fork() == 0:
        with suppress(ProcessLookupError):
            for time_s in times_s:
                for own in ids:
                    os.kill(own, signal.SIGSTOP)
                time.sleep(time_s)
                for own in ids:
                    os.kill(own, signal.SIGCONT)
                time.sleep(0.2)
        os._exit(0)


def exhaust_memory(folder: Path) -> None:
    """Make the next allocation with at least ``PIECE_BYTES`` fail, whoever makes it."""
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = num_pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    hold_memory()
    os.kill(os.getpid(), signal.SIGUSR2)  # the main thread has its own heap


HELD: list[torch.Tensor] = []


def hold_memory(*_: object) -> None:
    """Hold all free memory inside the limit."""
    with suppress(RuntimeError):
        while True:
            HELD.append(torch.empty(PIECE_BYTES, dtype=torch.uint8))


def silence_links(folder: Path, *, peer: int | None = None) -> None:
    """Drop every incoming packet: from one rank, or from all."""
    for connection in connections(None if peer is None else rank_id(folder, peer)):
        drop_packets(connection)


def cut_links(folder: Path, *, peer: int) -> None:
    """End the connections with one rank, as a router that has restarted does."""
    for connection in connections(rank_id(folder, peer)):
        connection.shutdown(socket.SHUT_RDWR)


def drop_packets(connection: socket.socket) -> None:
    """Attach a filter with one instruction, "return 0": like a pulled cable."""

    class Program(ctypes.Structure):
        _fields_ = [("num_instructions", ctypes.c_ushort), ("first", ctypes.c_char_p)]

    instruction = BPF_RETURN.to_bytes(2, sys.byteorder) + bytes(6)
    program = Program(1, instruction)
    connection.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, bytes(program))


def rank_id(folder: Path, rank: int) -> int:
    return int((folder / f"rank{rank}.pid").read_text())


def connections(peer_id: int | None) -> list[socket.socket]:
    """Return this process's TCP connections: to another process, or all."""
    descriptors = {inode: descriptor for descriptor, inode in socket_inodes(os.getpid())}
    peer_inodes = None if peer_id is None else {inode for _, inode in socket_inodes(peer_id)}
    ports = {}  # local and remote port -> inode
    for table in Path("/proc/net").glob("tcp*"):  # IPv4 and, if there is one, IPv6
        for line in table.read_text().splitlines()[1:]:
            fields = line.split()
            local, remote = (int(field.rpartition(":")[2], 16) for field in fields[1:3])
            if remote:  # no listener
                ports[local, remote] = fields[9]
    return [
        socket.socket(fileno=os.dup(descriptors[inode]))
        for (local, remote), inode in ports.items()
        if inode in descriptors
        and (peer_inodes is None or ports.get((remote, local)) in peer_inodes)
    ]


def listening(process_ids: Iterable[int]) -> set[str]:
    """Return the processes' listening addresses, in the kernel's hexadecimal."""
    inodes = {inode for process in process_ids for _, inode in socket_inodes(process)}
    lines = [
        line.split()
        for table in Path("/proc/net").glob("tcp*")
        for line in table.read_text().splitlines()
    ]
    return {
        words[1].partition(":")[0].removeprefix(MAPPED)
        for words in lines
        if words[9] in inodes and words[3] == "0A"
    }


def socket_inodes(process_id: int) -> Iterator[tuple[int, str]]:
    """Map socket inodes to descriptors; an ended process has none."""
    with suppress(OSError):
        for entry in Path(f"/proc/{process_id}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed since
                kind, _, inode = os.readlink(entry).partition(":")
                if kind == "socket":
                    yield int(entry.name), inode.strip("[]")
