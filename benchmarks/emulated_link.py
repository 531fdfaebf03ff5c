"""Join two network namespaces by an emulated link (Linux, root, /dev/net/tun, iproute2).

    python benchmarks/emulated_link.py --rtt 60 --up 10 --down 50 --loss 0.005
    ip netns exec pdlink_a ping 10.88.0.2              # in another terminal: 60 ms

This process carries every packet between the namespaces, and delays, limits or drops it. Packets
stay in order. Each JSON line on standard input changes the link. The process ends on SIGTERM,
Ctrl-C, or at the end of its input, and then removes the namespaces. Keys:

    rtt         round trip, ms; each direction gets half
    jitter      largest deviation of the round trip, ms; each direction gets half, drawn uniformly
    loss        probability of dropping a packet
    up, down    Mbit/s from a to b, and from b to a; 0: no limit
    mode        pass; drop: every packet is lost; hold: packets wait for another mode
"""

import argparse
import fcntl
import heapq
import json
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Self

ADDRESSES = ("10.88.0.1", "10.88.0.2")
SET_INTERFACE, IP_PACKETS, NO_HEADER = 0x400454CA, 1, 0x1000  # TUNSETIFF, IFF_TUN, IFF_NO_PI
QUEUE_BYTES = 512 * 1024
"""Queue size for a limited rate, in bytes. A full queue drops packets, as in a router."""
PACKET_BYTES = 65536
BATCH = 64
"""Number of packets to read before arrived packets are delivered again."""
DEFAULTS = {"rtt": 0.0, "jitter": 0.0, "loss": 0.0, "up": 0.0, "down": 0.0, "mode": "pass"}


class EmulatedLink:
    """Context manager for both namespaces and their link, in a separate process."""

    def __init__(self, name: str = "pdlink", sysctls: Sequence[str] = ()) -> None:
        """Prepare the link. ``sysctls``: kernel settings for both namespaces, as NAME=VALUE."""
        self.namespaces, self.sysctls = (f"{name}_a", f"{name}_b"), sysctls
        self.settings: dict[str, Any] = {}

    def __enter__(self) -> Self:
        command = [sys.executable, __file__, "--name", self.namespaces[0].removesuffix("_a")]
        command += [f"--sysctl={setting}" for setting in self.sysctls]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise OSError(f"no link: status {self._process.wait()}")
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)

    def set(self, **settings: Any) -> None:
        """Change the link. Missing settings take their defaults."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(settings) + "\n")
        self._process.stdin.flush()
        self._process.stdout.readline()
        self.settings = settings

    def command(self, side: int, words: Sequence[str]) -> list[str]:
        """Return the command for running ``words`` on one side (0 or 1)."""
        return ["ip", "netns", "exec", self.namespaces[side], *words]


def numbers(text: str) -> list[float]:
    """Parse a comma list, for options like --rtt 5,20."""
    return [float(part) for part in text.split(",")]


def run(*words: str) -> None:
    subprocess.run(words, check=True)


def open_interface(name: str, namespace: str, address: str, sysctls: Sequence[str]) -> int:
    """Create an interface in a namespace, and return the descriptor for its packets."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH", name.encode(), IP_PACKETS | NO_HEADER)
    fcntl.ioctl(descriptor, SET_INTERFACE, request)
    run("ip", "link", "set", name, "netns", namespace)
    inside = ("ip", "-n", namespace)
    run(*inside, "addr", "add", f"{address}/24", "dev", name)
    run(*inside, "link", "set", name, "up")
    run(*inside, "link", "set", "lo", "up")
    # Otherwise TCP begins with a round trip measured under earlier settings.
    forget = "net.ipv4.tcp_no_metrics_save=1"
    run("ip", "netns", "exec", namespace, "sysctl", "-qw", forget, *sysctls)
    return descriptor


@dataclass
class Wire:
    """Packets between two descriptors, with their arrival times."""

    ends: Sequence[int]
    settings: dict[str, Any] = field(default_factory=lambda: dict(DEFAULTS))
    random: Random = field(default_factory=lambda: Random(0))
    free_s: list[float] = field(default_factory=lambda: [0.0, 0.0])
    arrival_s: list[float] = field(default_factory=lambda: [0.0, 0.0])
    held: list[tuple[int, bytes]] = field(default_factory=list)
    queue: list[tuple[float, int, int, bytes]] = field(default_factory=list)
    num_packets: int = 0

    def set(self, settings: dict[str, Any]) -> None:
        if unknown := settings.keys() - DEFAULTS.keys():
            raise ValueError(f"{sorted(unknown)}: unknown; give {', '.join(DEFAULTS)}")
        self.settings = DEFAULTS | settings
        if self.settings["mode"] != "hold":
            held, self.held = self.held, []
            for end, packet in held:
                self.take(end, packet)

    def take(self, end: int, packet: bytes) -> None:
        """Accept a packet sent from one end (0 or 1), and schedule its arrival or drop it."""
        settings, now_s = self.settings, time.monotonic()
        if settings["mode"] == "hold":
            self.held.append((end, packet))
            return
        if settings["mode"] == "drop" or self.random.random() < settings["loss"]:
            return
        left_s = now_s
        bytes_per_s = (settings["up"], settings["down"])[end] * 125e3
        if bytes_per_s:
            if (self.free_s[end] - now_s) * bytes_per_s > QUEUE_BYTES:
                return
            left_s = max(now_s, self.free_s[end]) + len(packet) / bytes_per_s
            self.free_s[end] = left_s
        jitter_ms = settings["jitter"] / 2
        delay_ms = settings["rtt"] / 2 + self.random.uniform(-jitter_ms, jitter_ms)
        self.arrival_s[end] = max(self.arrival_s[end], left_s + max(delay_ms, 0) / 1e3)
        self.num_packets += 1
        heapq.heappush(self.queue, (self.arrival_s[end], self.num_packets, end, packet))

    def deliver(self) -> float | None:
        """Write all arrived packets. Return the seconds until the next one, if any."""
        while self.queue:
            wait_s = self.queue[0][0] - time.monotonic()
            if wait_s > 0:
                return wait_s
            _, _, end, packet = heapq.heappop(self.queue)
            # The packet is lost if the queue is full or the interface is down.
            with suppress(OSError):
                os.write(self.ends[1 - end], packet)
        return None

    def read(self, descriptor: int) -> None:
        for _ in range(BATCH):
            try:
                self.take(self.ends.index(descriptor), os.read(descriptor, PACKET_BYTES))
            except BlockingIOError:
                return


def carry(wire: Wire) -> None:
    """Carry packets, and read settings from standard input until it ends."""
    source = sys.stdin.fileno()
    unread = b""
    while True:
        ready, _, _ = select.select([*wire.ends, source], [], [], wire.deliver())
        for descriptor in ready:
            if descriptor != source:
                wire.read(descriptor)
                continue
            data = os.read(source, PACKET_BYTES)
            if not data:
                return
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                wire.set(json.loads(line))
                print("set", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sysctl", action="append", default=[], help="setting of both namespaces")
    parser.add_argument("--name", default="pdlink", help="the namespaces are NAME_a and NAME_b")
    for key in ("rtt", "jitter", "loss", "up", "down"):
        parser.add_argument(f"--{key}", type=float, default=0.0)
    args = parser.parse_args()
    if sys.platform != "linux" or os.geteuid() or not Path("/dev/net/tun").exists():
        parser.error("needs Linux, root, and /dev/net/tun")
    # Raise SystemExit, so the exit stack removes the namespaces.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with ExitStack() as stack:
        ends = []
        for side, address in zip("ab", ADDRESSES, strict=True):
            namespace = f"{args.name}_{side}"
            run("ip", "netns", "add", namespace)
            stack.callback(subprocess.run, ["ip", "netns", "del", namespace], check=False)
            ends.append(open_interface(f"{args.name[:12]}_{side}", namespace, address, args.sysctl))
        wire = Wire(ends)
        wire.set({key: value for key, value in vars(args).items() if key in DEFAULTS})
        print(f"{args.name}_a is {ADDRESSES[0]}, {args.name}_b is {ADDRESSES[1]}", flush=True)
        with suppress(KeyboardInterrupt):
            carry(wire)


if __name__ == "__main__":
    main()
