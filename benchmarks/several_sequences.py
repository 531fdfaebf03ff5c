"""Throughput and speed of each user against the number of sequences in one pipeline.

    python benchmarks/several_sequences.py --json

The embedded target decodes prompts of its benchmarks greedily on ``BatchEngine``, ``--concurrency``
of them at once; taken are prompts whose answers are long enough. Times are the virtual clock's, in
passes of one token over the whole target, from the step in which the last sequence gets its first
token to the one in which the first sequence ends:

    throughput  tokens of all sequences in one pass over the target
    user        tokens of one sequence in one pass; "slowest": of the slowest one
    slowdown    time of a sequence's tokens over their time alone in the pipeline; the largest

Rows of all sequences in a stage cost what a segment of as many rows costs (``--cost``, ``--row``).
Draft forwards of several sequences are one, or with ``--drafts apart`` made one after the other on
one device. Ways: plain decoding; naive pipeline parallelism with a chain of draft tokens; one tree
a round in one segment; the pipelined schedules, and these with automatic budgets.
"""

import argparse
import json
import random
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pipedraft.benchmarks.measurement import names_of
from pipedraft.eval.charts import Estimate, LineChart
from pipedraft.eval.tasks import encode_turn, load_task
from pipedraft.inference.batch import BatchEngine, BatchLimits, Handle
from pipedraft.inference.config import DecodeConfig, read_cost
from pipedraft.models import load_draft
from pipedraft.models.target import load_target, load_tokenizer

ASSETS = Path(__file__).resolve().parents[1] / "assets"
TASKS = ("mt_bench", "gsm8k", "humaneval")
CONTINUED = {"schedule": "flowspec_continued"}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("", {"schedule": "autoregressive"}),
    "naive_pp": ("eagle3", {"schedule": "naive_pp", "tree": "chain:3"}),
    "eagle": ("eagle3", {"schedule": "eagle", "tree": "static"}),
    "flowspec_continued": ("eagle3", CONTINUED),
    "flowspec_continued:auto": ("eagle3", {**CONTINUED, "step_tokens": "auto"}),
    "spd": ("spd_n4", {"schedule": "spd"}),
    "spd:auto": ("spd_n4", {"schedule": "spd", "tree_width": "auto"}),
}
"""The shipped head and the settings of each way."""


def measure(world: Any, way: str, num_stages: int, concurrency: int, options: Any) -> dict:
    """Of ``--sequences`` prompts, so many at once: the same ones for every concurrency."""
    num_groups = max(1, options.sequences // concurrency)
    groups = [
        decode(world, way, num_stages, range(first, first + concurrency), options)
        for first in range(0, num_groups * concurrency, concurrency)
    ]
    span = sum(group["span"] for group in groups)
    counts = [count for group in groups for count in group["counts"]]
    speeds = [count / group["span"] for group in groups for count in group["counts"]]
    found = {
        "throughput": sum(counts) / span,
        "user": sum(counts) / span / concurrency,
        "slowest": min(speeds),
        "slowdown": max(group["slowdown"] for group in groups),
        "drafting": statistics.mean(group["drafting"] for group in groups)
        if way.endswith("auto")
        else None,
    }
    return {"way": way, "stages": num_stages, "concurrency": concurrency, **found}


def decode(world: Any, way: str, num_stages: int, chosen: range, options: Any) -> dict[str, Any]:
    """The prompts of these numbers at once, until the first of them ends."""
    target, tokenizer, drafts, prompts = world
    head, settings = WAYS[way]
    cost = read_cost(options.cost)
    if options.row is not None:
        cost = replace(cost, row=options.row)
    settings = {**settings, "num_stages": num_stages, "max_new_tokens": options.max_new_tokens}
    batch = BatchEngine(
        target,
        tokenizer,
        DecodeConfig.of(cost=cost, **settings),
        drafts.get(head),
        limits=BatchLimits(sequences=len(chosen), rows=100_000, prompt_rows=512),
        drafts_together=options.drafts == "together",
    )
    handles = [batch.submit(prompts[index % len(prompts)]) for index in chosen]
    drafting: list[float] = []
    while batch.step() and not any(handle.future.done() for handle in handles):
        drafting.append(len(batch.clock.drafting) / max(1, len(batch.clock.live)))
    batch.close()
    start = max(handle.token_times[0] for handle in handles)
    return {
        "span": batch.clock.time - start,
        "counts": [sum(time > start for time in handle.token_times) for handle in handles],
        "slowdown": max(slowdown(handle, start) for handle in handles),
        "drafting": statistics.mean(drafting),
    }


def slowdown(handle: Handle, start: float) -> float:
    """Time of the tokens after the first one behind ``start``, over their time alone."""
    first = next(i for i, time in enumerate(handle.token_times) if time >= start)
    alone = handle.times_alone[-1] - handle.times_alone[first]
    return (handle.token_times[-1] - handle.token_times[first]) / alone if alone else 0.0


def long_answers(target: Any, tokenizer: Any, length: int) -> list[list[int]]:
    """Prompts that are answered at such a length."""
    prompts = [encode_turn(tokenizer, p, []) for name in TASKS for p in load_task(name)]
    random.Random(0).shuffle(prompts)
    config = DecodeConfig.of("autoregressive", num_stages=1, max_new_tokens=length)
    batch = BatchEngine(target, tokenizer, config)
    handles = [batch.submit(prompt) for prompt in prompts]
    while batch.step():
        pass
    return [handle.prompt_ids for handle in handles if len(handle.token_ids) == length]


def plot(rows: list[dict[str, Any]]) -> bytes:
    """A PNG: tokens of all sequences and of one against concurrency, for each number of stages."""
    panels: dict[str, Any] = {}
    for row in rows:
        for value, of in (("throughput", "all sequences"), ("user", "one sequence")):
            panel = panels.setdefault(f"n = {row['stages']}, {of}", {})
            panel.setdefault(row["way"], {})[row["concurrency"]] = Estimate(row[value])
    return LineChart(
        title="Several sequences",
        caption="",
        panels=panels,
        axis="tokens in a pass",
        place_axis="sequences at once",
    ).png()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one line of JSON at the end")
    parser.add_argument("--stages", default="4,8")
    parser.add_argument("--concurrency", default="1,2,4,8,16,32")
    parser.add_argument("--sequences", type=int, default=32, help="measured for each concurrency")
    parser.add_argument("--ways", type=names_of(WAYS), default=",".join(WAYS))
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--cost", default="h100", help="a preset or a file of --calibrate")
    parser.add_argument("--row", type=float, help="instead of the cost model's price of a row")
    parser.add_argument("--drafts", choices=["together", "apart"], default="together")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves as a PNG")
    options = parser.parse_args()
    torch.set_num_threads(1)
    target = load_target(str(ASSETS / "target"))
    tokenizer = load_tokenizer(str(ASSETS / "target"))
    drafts = {
        name: load_draft(str(ASSETS / "heads" / name), target) for name in ("eagle3", "spd_n4")
    }
    concurrencies = [int(part) for part in options.concurrency.split(",")]
    prompts = long_answers(target, tokenizer, options.max_new_tokens)
    world = (target, tokenizer, drafts, prompts)
    rows = []
    for num_stages in map(int, options.stages.split(",")):
        for concurrency in concurrencies:
            for way in options.ways.split(","):
                if way.startswith("spd") and num_stages != drafts["spd_n4"].num_stages:
                    continue
                rows.append(measure(world, way, num_stages, concurrency, options))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    if options.plot:
        options.plot.write_bytes(plot(rows))
    if options.json:
        print(json.dumps({"runs": rows, "cost": options.cost, "row": options.row}))


if __name__ == "__main__":
    main()
