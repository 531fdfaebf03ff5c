"""Load an OpenAI-compatible server with streams. Run `python docs/lab/servers.py PID URL`.

PID is the server's process. For 1, 4 and 8 streams, print tokens/s, tokens per CPU second in the
server's processes, and median times to the first token and per further token. Equal hashes show
equal answers from two servers. Requests are greedy: first turns from MT-Bench, GSM8K and HumanEval,
with up to 64 new tokens.
"""

import argparse
import asyncio
import hashlib
import statistics
import time
from typing import NamedTuple

import psutil
from openai import AsyncOpenAI

from pipedraft.eval.tasks import load_task

TASKS = ("mt_bench", "gsm8k", "humaneval")
REQUESTS = {1: 4, 4: 8, 8: 16}
"""Requests for each stream count."""


class Answer(NamedTuple):
    text: str
    num_tokens: int
    first_s: float
    """Time to the first text."""
    rest_s: float
    """Time from the first text to the last."""


def cpu_s(server: psutil.Process) -> float:
    """Return user and system seconds spent by a process and its children."""
    times = [p.cpu_times() for p in (server, *server.children(recursive=True))]
    return sum(t.user + t.system for t in times)


async def ask(client: AsyncOpenAI, model: str, prompt: str, num_tokens: int) -> Answer:
    start, arrivals, text, count = time.perf_counter(), [], "", 0
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=num_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            text += chunk.choices[0].delta.content
            arrivals.append(time.perf_counter())
        count = chunk.usage.completion_tokens if chunk.usage else count
    return Answer(text, count, arrivals[0] - start, arrivals[-1] - arrivals[0])


async def load(options: argparse.Namespace, streams: int, prompts: list[str]) -> str:
    server = psutil.Process(options.server)
    async with AsyncOpenAI(
        base_url=f"{options.url}/v1", api_key="none", max_retries=0, timeout=600
    ) as client:
        model = (await client.models.list()).data[0].id
        await ask(client, model, prompts[-1], 4)
        gate = asyncio.Semaphore(streams)

        async def one(prompt: str) -> Answer:
            async with gate:
                return await ask(client, model, prompt, options.tokens)

        start, before = time.perf_counter(), cpu_s(server)
        answers = await asyncio.gather(*map(one, prompts[: REQUESTS[streams]]))
        seconds, cpu = time.perf_counter() - start, cpu_s(server) - before
    count = sum(answer.num_tokens for answer in answers)
    token_ms = 1e3 * statistics.median(a.rest_s / max(1, a.num_tokens - 1) for a in answers)
    first_s = statistics.median(answer.first_s for answer in answers)
    texts = hashlib.sha256("\0".join(answer.text for answer in answers).encode()).hexdigest()[:8]
    return (
        f"{streams} streams: {count} tokens, {count / seconds:.1f} tokens/s, {count / cpu:.1f} per "
        f"CPU s, first {first_s:.2f} s, then {token_ms:.0f} ms a token, texts {texts}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("server", type=int, metavar="PID")
    parser.add_argument("url", metavar="URL", help="such as http://127.0.0.1:8000")
    parser.add_argument("--data-dir", default="data/eval", help="folder with the benchmarks")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per request")
    options = parser.parse_args()
    tasks = [load_task(name, options.data_dir, 6) for name in TASKS]
    prompts = [str(p.turns[0]) for row in zip(*tasks, strict=True) for p in row]
    for streams in REQUESTS:
        print(asyncio.run(load(options, streams, prompts)), flush=True)


if __name__ == "__main__":
    main()
