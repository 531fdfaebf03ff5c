"""Streams of `pipedraft serve` at once, against the same streams one after the other: wall clock.

    python benchmarks/concurrent_streams.py --json

The server decodes the embedded target on two processes, a stage each. ``--streams`` clients ask for
a stream each, all at once or each when the one before has ended; a pair is one way and the other,
and the order changes from pair to pair. Texts of both ways must be the same. A time is from the
first request to the end of the last stream, the server's, the ranks' and the clients' work on the
same processors included. Seconds of these processors are told, too: other work on the machine
changes them less.
"""

import argparse
import http.client
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pipedraft.benchmarks.measurement import names_of
from pipedraft.eval.tasks import load_task

ASSETS = Path(__file__).resolve().parents[1] / "assets"
TASKS = ("mt_bench", "gsm8k", "humaneval")
HEAD = f"--checkpoint {ASSETS / 'heads' / 'eagle3'}"
WAYS = {
    "plain": f"--target {ASSETS / 'target'} --schedule autoregressive",
    "eagle_chain": f"{HEAD} --schedule eagle --tree chain:3",
    "flowspec_continued": f"{HEAD} --schedule flowspec_continued --expansion-depth 1",
    "flowspec_continued:auto": f"{HEAD} --schedule flowspec_continued --step-tokens auto",
}
LIMIT_S = 120


def ask(port: int, fields: dict[str, Any]) -> tuple[str, int]:
    """Text and number of tokens of one stream."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    body = json.dumps({**fields, "stream": True, "stream_options": {"include_usage": True}})
    connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    answer, text, count = connection.getresponse(), "", 0
    assert answer.status == 200, answer.read()
    for line in answer:
        if line.startswith(b"data: {"):
            chunk = json.loads(line[6:])
            text += "".join(c["delta"].get("content", "") for c in chunk["choices"])
            count = (chunk["usage"] or {}).get("completion_tokens", count)
    connection.close()
    return text, count


def cpu_s(server: int) -> float:
    """Seconds of processors: this process's, the server's and its ranks'."""
    ranks = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    total = time.process_time()
    for pid in (server, *ranks):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
    return total


def measure(server: int, port: int, asked: list[dict[str, Any]], num_pairs: int) -> dict[str, Any]:
    pairs: list[dict[str, float]] = []
    work: dict[str, list[float]] = {"apart": [], "together": []}
    texts: set[tuple[str, ...]] = set()
    num_tokens = 0
    with ThreadPoolExecutor(len(asked)) as pool:
        for number in range(-1, num_pairs):  # the first pair warms up
            seconds = {}
            for way in ("apart", "together")[:: 1 if number % 2 else -1]:
                started_s, before_s = time.monotonic(), cpu_s(server)
                run = map if way == "apart" else pool.map
                told = list(run(lambda fields: ask(port, fields), asked))
                seconds[way] = time.monotonic() - started_s
                work[way].append(cpu_s(server) - before_s)
                texts.add(tuple(text for text, _ in told))
                num_tokens = sum(count for _, count in told)
            if number >= 0:
                pairs.append(seconds)
    ratios = [pair["apart"] / pair["together"] for pair in pairs]
    return {
        "tokens": num_tokens,
        "same_texts": len(texts) == 1,
        "tokens_per_s": {
            way: round(num_tokens / statistics.median(pair[way] for pair in pairs), 1)
            for way in ("apart", "together")
        },
        "faster": round(statistics.median(ratios), 2),
        "pairs": [round(ratio, 2) for ratio in ratios],
        "cpu_s": {way: round(statistics.median(work[way][1:]), 2) for way in work},
    }


def serve(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one way of decoding on a server of its own."""
    num = options.processes
    ranks = f"--stages {num} --backend process --processes {num} --step-timeout 60"
    server = subprocess.Popen(
        [
            *(sys.executable, "-m", "pipedraft.inference.serving", "--port", "0"),
            *WAYS[way].split(),
            *ranks.split(),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    try:
        found = re.search(r"127\.0\.0\.1:(\d+)", server.stdout.readline())
        assert found is not None, "the server did not begin"
        prompts = [prompt.turns[0] for name in TASKS for prompt in load_task(name)]
        every = len(prompts) // options.streams
        asked = [
            {
                "messages": [{"role": "user", "content": prompts[index * every]}],
                "max_tokens": options.max_new_tokens,
                "temperature": index % 2,
                "seed": index,
            }
            for index in range(options.streams)
        ]
        return {"way": way, **measure(server.pid, int(found[1]), asked, options.pairs)}
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(LIMIT_S)
        server.stdout.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one line of JSON at the end")
    parser.add_argument("--ways", type=names_of(WAYS), default=",".join(WAYS))
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args()
    runs = [serve(way, options) for way in options.ways.split(",")]
    for run in runs:
        print(json.dumps(run), file=sys.stderr)
    if options.json:
        print(json.dumps({"runs": runs, "streams": options.streams}))


if __name__ == "__main__":
    main()
