"""Wall clock of SSD on processes over the same draft's one-batch rounds, with its cache hits.

    torchrun --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 \\
        benchmarks/ssd.py --checkpoint assets/heads/eagle3
    torchrun ... benchmarks/ssd.py --noise 0.13 --pass-ms 100 --draft-cost 0.125 --draft-tokens 7

One process holds the draft, the others a stage each: with two, the target is not split. Every
prompt is decoded by rounds (``eagle``, a chain), by SSD with chains as long, plainly, by SSD and by
rounds again, all on these processes; so a machine that grows slower or faster does so to all. One
line of JSON. For each temperature: tokens per second of the three; ``ssd_over_round``, time of the
rounds over SSD's, with a 95 % bootstrap interval over prompts; batches of SSD, and hits among them,
for which no stage waited; S on the virtual clock of the same runs, on which a draft forward takes
--draft-cost, else its layers over the target's; and prompts whose five texts are not one. SSD
prepares what has time beside a pass on that clock, and no more once the verdict is back.

With --noise the draft is the target with noise in its weights, as large as itself. With --pass-ms a
pass of a stage takes that long, as a larger target's would: the stage waits, and computes nothing.
"""

import argparse
import json
import statistics
import time
from collections import Counter
from random import Random
from typing import Any
from unittest.mock import patch

import torch
from backend_agreement import read_prompts
from sampled_trees import with_noise

from pipedraft.benchmarks.measurement import make_parser
from pipedraft.inference.clock import CostModel
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.engine import Engine
from pipedraft.inference.ranks.cluster import Cluster
from pipedraft.inference.ranks.watch import WatchLimits
from pipedraft.inference.shapes import TreeShape
from pipedraft.models import load_draft
from pipedraft.models.language_model import load_draft_model
from pipedraft.models.target import Stage, load_target, load_tokenizer


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--checkpoint", help="draft head")
    add("--draft-model", help="a language model as the draft instead")
    add("--noise", type=float, help="the target with so much noise as the draft instead")
    add("--pass-ms", type=float, default=0.0, help="least time of a pass of a stage")
    add("--draft-cost", type=float, help="target passes that a draft forward is taken to last")
    add("--target", default="assets/target")
    add("--data-dir", help="official files (default: the prompts of assets/eval)")
    add("--draft-tokens", type=int, default=4, help="of a chain, of both")
    add("--fallback-tokens", type=int, help="of a chain after a miss (default: the same)")
    add("--outcomes", type=int, default=8)
    add("--prompts", type=int, default=12)
    add("--prompt-tokens", type=int, default=128, help="the last ones of each prompt")
    add("--max-new-tokens", type=int, default=64)
    add("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    return parser.parse_args()


def measure(args: argparse.Namespace, cluster: Any) -> dict[str, Any]:
    num_stages = cluster.world_size - 1
    tokenizer, whole = load_tokenizer(args.target), load_target(args.target)
    if args.noise is not None:
        draft: Any = with_noise(whole, args.noise)
    elif args.draft_model:
        draft = load_draft_model(args.draft_model, whole, tokenizer)
    else:
        draft = load_draft(args.checkpoint, whole)
    part = cluster.load_target(args.target, revision=None, num_stages=num_stages)
    prompts = read_prompts(args, tokenizer)
    ways: dict[str, dict[str, Any]] = {
        "plain": {"schedule": "autoregressive"},
        "round": {
            "schedule": "eagle",
            "tree": TreeShape(kind="chain", depth=args.draft_tokens),
        },
        "ssd": {
            "schedule": "ssd",
            "draft_tokens": args.draft_tokens,
            "fallback_tokens": args.fallback_tokens,
            "outcomes": args.outcomes,
        },
    }
    found = {}
    for temperature in args.temperature:
        common = {
            "num_stages": num_stages,
            "temperature": temperature,
            "max_new_tokens": args.max_new_tokens,
            "verifier": "gumbel",
            "cost": CostModel(draft_forward=args.draft_cost),
        }
        engines = {
            way: Engine(
                part,
                tokenizer,
                DecodeConfig.of(**options, **common),
                draft,
                connect=cluster.connect,
            )
            for way, options in ways.items()
        }
        found[f"{temperature:g}"] = compare(engines, prompts)
    return {"processes": cluster.world_size, "draft_tokens": args.draft_tokens, "by_T": found}


def compare(engines: dict[str, Any], prompts: list[list[int]]) -> dict[str, Any]:
    for engine in engines.values():
        engine.decode(prompts[0])  # warm up
    seconds: dict[str, list[float]] = {way: [] for way in engines}
    sums: dict[str, Counter[str]] = {way: Counter() for way in engines}
    unlike = 0
    for index, prompt in enumerate(prompts):
        texts, spent = set(), Counter[str]()
        for way in ("round", "ssd", "plain", "ssd", "round"):
            result = engines[way].decode(prompt, prompt_index=index)
            times = result.token_times_s
            spent[way] += (times[-1] - times[0]) / (1 if way == "plain" else 2)
            texts.add(tuple(result.token_ids))
            sums[way].update(
                tokens=result.num_tokens,
                batches=result.num_steps // result.num_stages,
                misses=sum(event[0] for event in result.step_log if len(event) == 2),
                time=result.virtual_time,
                plain_time=result.virtual_time_autoregressive,
            )
        unlike += len(texts) > 1
        for way, taken in spent.items():
            seconds[way].append(taken)
    tokens = sums["plain"]["tokens"]
    ratio, low, high = speedup(seconds["round"], seconds["ssd"])
    batches = sums["ssd"]["batches"]
    return {
        "tokens_per_s": {way: tokens / sum(taken) for way, taken in seconds.items()},
        "ssd_over_round": ratio,
        "ssd_over_round_ci95": [low, high],
        "batches": batches,
        "hits": batches - sums["ssd"]["misses"],
        "tokens_per_batch": {
            way: sums[way]["tokens"] / sums[way]["batches"] for way in ("round", "ssd")
        },
        "virtual_S": {way: sums[way]["plain_time"] / sums[way]["time"] for way in ("round", "ssd")},
        "prompts": len(prompts),
        "texts_unlike_plain": unlike,
    }


def speedup(slow_s: list[float], fast_s: list[float]) -> tuple[float, float, float]:
    """Ratio of sums, and a 95 % bootstrap interval over prompts."""
    random, places = Random(0), range(len(slow_s))

    def ratio(chosen: Any) -> float:
        return sum(slow_s[i] for i in chosen) / sum(fast_s[i] for i in chosen)

    drawn = [ratio(random.choices(places, k=len(places))) for _ in range(2000)]
    low, *_, high = statistics.quantiles(drawn, n=40)
    return ratio(places), low, high


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    with Cluster(WatchLimits(silence_s=60, undelivered_s=60, step_s=60)) as cluster:
        if cluster.is_controller:
            print(json.dumps(measure(args, cluster)), flush=True)
        else:
            forward = Stage.forward

            def slowed(stage: Stage, *rows: Any) -> Any:
                began_s = time.perf_counter()
                output = forward(stage, *rows)
                time.sleep(max(0.0, args.pass_ms / 1e3 - (time.perf_counter() - began_s)))
                return output

            with patch.object(Stage, "forward", slowed):
                cluster.serve()


if __name__ == "__main__":
    main()
