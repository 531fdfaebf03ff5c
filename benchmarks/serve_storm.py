"""Test `pipedraft serve` under load from 200 clients, some of them hostile, and kill a rank.

    python benchmarks/serve_storm.py --json

The server decodes the embedded target on ranks. Each client sends one request after another. It
asks for a whole answer, or for a stream that it reads to the end, reads slowly, leaves in the
middle or never reads. Some requests are malformed. Every text must equal ``Engine.decode``'s, as
far as the client read it.

Half-way one rank is killed. The server must exit with status 1. The script restarts it, as service
managers do. At the end SIGTERM arrives under full load, and open requests must finish. Resident
memory is the sum over ranks.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from pipedraft.errors import Failure
from pipedraft.eval.tasks import encode_turn, load_task
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.engine import Engine
from pipedraft.models import load_draft
from pipedraft.models.target import load_target, load_tokenizer

ASSETS = Path(__file__).resolve().parents[1] / "assets"
TASKS = ("mt_bench", "gsm8k", "humaneval")
DRAFT = str(ASSETS / "heads" / "eagle3")
SCHEDULE = "flowspec_continued"
KINDS = {"whole": 6, "stream": 6, "leaves": 3, "crawls": 2, "hostile": 3}
"""Requests per kind, out of 20."""
BUSY = (429, 503)
LIMIT_S = 120
CHAT = "/v1/chat/completions"
NO_REQUESTS: list[tuple[bytes, tuple[int, ...]]] = [
    (b"{", (400,)),
    (b"\xff\xfe", (400,)),
    (b"[" * 100_000, (400,)),
    (b'{"messages": 1}', (400,)),
    (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}', (400,)),
    (b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e400}', (400,)),
    (b'{"prompt": [99999999], "max_tokens": 1}', (400,)),
    (b'{"messages": [{"role": "user", "content": "' + b"x" * 2_000_000 + b'"}]}', (413,)),
]
"""Malformed bodies, and the allowed statuses for each."""


@dataclass
class Asked:
    """Request and its expected text."""

    fields: dict[str, Any]
    text: str


def make_requests(num_stages: int, count: int) -> list[Asked]:
    """Return greedy and sampled requests for embedded prompts, with texts decoded one by one."""
    target = load_target(str(ASSETS / "target"))
    tokenizer = load_tokenizer(str(ASSETS / "target"))
    draft = load_draft(DRAFT, target)
    rng, found = random.Random(0), []
    prompts = [p for name in TASKS for p in load_task(name) if p.system is None]
    for prompt in rng.sample(prompts, count):
        sampling = {"temperature": rng.choice([0.0, 1.0]), "seed": rng.randrange(1000)}
        length = rng.randrange(4, 32)
        config = DecodeConfig.of(SCHEDULE, num_stages=num_stages, max_new_tokens=length, **sampling)
        alone = Engine(target, tokenizer, config, draft).decode(encode_turn(tokenizer, prompt, []))
        turn = {"role": "user", "content": prompt.turns[0]}
        found.append(Asked({"messages": [turn], "max_tokens": length, **sampling}, alone.text))
    return found


class ServerUnderLoad:
    """Server process, with the ranks it starts."""

    def __init__(self, port: int, num_ranks: int) -> None:
        words = f"--checkpoint {DRAFT} --schedule {SCHEDULE} --stages {num_ranks} --port {port}"
        ranks = f"--backend process --processes {num_ranks} --step-timeout 60"
        ranks += " --max-client-sequences 1000"
        # Use a file: nobody reads a pipe here, and the server would block on a full one.
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed at its end)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pipedraft.inference.serving", *words.split(), *ranks.split()],
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        assert self.process.stdout is not None
        if not any(line.startswith("ready: ") for line in self.process.stdout):
            raise Failure(f"the server did not begin: {self.end()}")

    def ranks(self) -> list[int]:
        """Return the ranks' process ids."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return sorted(map(int, children))

    def memory_mb(self) -> float:
        total_kb = 0
        for pid in self.ranks():
            with suppress(OSError, StopIteration):
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                total_kb += next(int(x.split()[1]) for x in lines if x.startswith("VmRSS"))
        return total_kb / 1024

    def end(self) -> dict[str, Any]:
        """Wait for the server's exit, and return status, seconds and the last lines of output."""
        started_s = time.monotonic()
        out, _ = self.process.communicate(timeout=120)
        seconds = round(time.monotonic() - started_s, 1)
        self.errors.seek(0)
        said = [*out.splitlines()[-1:], *self.errors.read().splitlines()[-3:]]
        self.errors.close()
        return {"status": self.process.returncode, "seconds": seconds, "said": said}


class Storm:
    """All clients, and their findings."""

    def __init__(self, requests: list[Asked], port: int, seed: int) -> None:
        self.requests, self.port, self.seed = requests, port, seed
        self.found: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.is_over = False
        self.phase: Literal["up", "killed", "ending"] = "up"

    async def client(self, number: int) -> None:
        rng = random.Random(self.seed * 1000 + number)
        kinds = [kind for kind, count in KINDS.items() for _ in range(count)]
        while not self.is_over:
            kind, pause_s = rng.choice(kinds), 0.05
            try:
                async with asyncio.timeout(LIMIT_S):
                    outcome = await self.ask(kind, rng)
            except (OSError, EOFError, TimeoutError) as error:
                outcome, pause_s = f"no answer, {type(error).__name__}", 1.0
            if outcome == "busy":
                pause_s = 1.0
            self.found[f"{self.phase}: {kind}: {outcome}"] += 1
            await asyncio.sleep(rng.random() * pause_s)

    async def ask(self, kind: str, rng: random.Random) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**14)
        try:
            if kind == "hostile":
                return await self.attack(reader, writer, rng)
            asked = rng.choice(self.requests)
            fields = {**asked.fields, "stream": kind != "whole"}
            send(writer, json.dumps(fields).encode())
            await writer.drain()
            if kind == "leaves" and rng.random() < 0.3:
                return "left unread"
            status = await read_head(reader)
            if status != 200:
                error = json.loads(await reader.read())["error"]
                return "busy" if status in BUSY and error["message"] else f"status {status}"
            if kind == "whole":
                told = json.loads(await reader.read())["choices"][0]["message"]["content"]
                return self.judge(told, asked, whole=True)
            most = rng.randrange(1, 12) if kind == "leaves" else 10**6
            pause_s = 0.2 if kind == "crawls" else 0.0
            told, is_whole = await read_stream(reader, most, pause_s)
            return self.judge(told, asked, whole=is_whole, left=kind == "leaves")
        finally:
            writer.transport.abort()

    def judge(self, told: str, asked: Asked, *, whole: bool, left: bool = False) -> str:
        if told != asked.text if whole else not asked.text.startswith(told):
            self.wrong.append(f"{told!r} for {asked.text!r}")
            return "wrong"
        if whole:
            return "right"
        return "right so far" if left else "cut, right so far"

    def failed(self) -> list[str]:
        """List failures, by phase.

        Wrong texts always count. Error statuses and cut texts count except around the kill, and
        missing answers count only in normal operation.
        """
        bad = {"up": ("status", "cut", "no answer"), "ending": ("status", "cut"), "killed": ()}
        return [
            what
            for what in self.found
            if any(word in what for word in ("wrong", *bad[what.partition(":")[0]]))
        ]

    async def attack(self, reader: Any, writer: Any, rng: random.Random) -> str:
        kind = rng.randrange(len(NO_REQUESTS) + 2)
        if kind == len(NO_REQUESTS):
            writer.write(rng.randbytes(200) + b"\r\n\r\n")
            return "heard" if await reader.read(1) or reader.at_eof() else "unheard"
        if kind > len(NO_REQUESTS):
            send(writer, b"{" * 10, announced=1000)
            await asyncio.sleep(rng.random())
            return "left inside"
        body, expected = NO_REQUESTS[kind]
        with suppress(ConnectionError):  # the server may refuse before it has read everything
            send(writer, body)
            await writer.drain()
        status = await read_head(reader)
        return "refused" if status in (*expected, *BUSY) else f"status {status}"


def send(writer: Any, body: bytes, announced: int | None = None) -> None:
    size = len(body) if announced is None else announced
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {size}\r\n"
    writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + body)


async def read_head(reader: asyncio.StreamReader) -> int:
    head = await reader.readuntil(b"\r\n\r\n")
    return int(head.split()[1])


async def read_stream(reader: asyncio.StreamReader, most: int, pause_s: float) -> tuple[str, bool]:
    """Read at most ``most`` events. Return their text, and True if the stream was complete."""
    told, count = "", 0
    while count < most:
        line = await reader.readline()
        if not line:
            break
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            return told, True
        chunk = json.loads(line[6:])
        if "error" in chunk:
            break
        told += "".join(choice["delta"].get("content", "") for choice in chunk["choices"])
        count += 1
        await asyncio.sleep(pause_s)
    return told, False


async def run(options: argparse.Namespace) -> dict[str, Any]:
    requests = make_requests(options.processes, options.requests)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = ServerUnderLoad(port, options.processes)
    storm = Storm(requests, port, options.seed)
    clients = [asyncio.create_task(storm.client(i)) for i in range(options.clients)]
    memory: list[list[tuple[float, float]]] = [[]]
    half_s = options.seconds / 2
    await watch(server, half_s, memory[-1])
    storm.phase = "killed"
    os.kill(server.ranks()[-1], signal.SIGKILL)
    killed = await asyncio.to_thread(server.end)
    server = await asyncio.to_thread(ServerUnderLoad, port, options.processes)
    await asyncio.sleep(1)  # until the interrupted clients have noticed
    storm.phase = "up"
    memory.append([])
    await watch(server, half_s, memory[-1])
    storm.phase = "ending"
    server.process.send_signal(signal.SIGTERM)
    ended = await asyncio.to_thread(server.end)
    storm.is_over = True
    await asyncio.gather(*clients)
    return {
        "clients": options.clients,
        "seconds": options.seconds,
        "found": dict(sorted(storm.found.items())),
        "wrong": len(storm.wrong),
        "failed": storm.failed(),
        "examples": storm.wrong[:3],
        "killed": killed,
        "ended": ended,
        "memory_mb": [summary(samples) for samples in memory],
    }


async def watch(
    server: ServerUnderLoad, seconds: float, samples: list[tuple[float, float]]
) -> None:
    started_s = time.monotonic()
    while (passed_s := time.monotonic() - started_s) < seconds:
        samples.append((passed_s, server.memory_mb()))
        if server.process.poll() is not None:
            raise Failure(f"the server ended by itself: {server.end()}")
        await asyncio.sleep(min(2.0, seconds - passed_s))


def summary(samples: list[tuple[float, float]]) -> dict[str, Any]:
    """Return memory at every eighth of the time, and its growth over the last half in MB per
    minute."""
    late = samples[len(samples) // 2 :]
    at, mb = (torch.tensor(column) for column in zip(*late, strict=True))
    at, mb = at - at.mean(), mb - mb.mean()
    slope = float((at * mb).sum() / at.square().sum() * 60) if len(late) > 1 else 0.0
    every = max(1, len(samples) // 8)
    return {"at": [round(mb) for _, mb in samples[::every]], "mb_per_minute": round(slope, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one line of JSON at the end")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--processes", type=int, default=2, help="ranks, a stage each")
    parser.add_argument("--requests", type=int, default=40, help="different ones")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = asyncio.run(run(options))
    print(json.dumps(found, indent=None if options.json else 1))


if __name__ == "__main__":
    main()
