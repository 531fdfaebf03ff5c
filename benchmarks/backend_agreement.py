"""Do both backends decode the same text in the same number of steps?

    torchrun --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 \\
        benchmarks/backend_agreement.py --checkpoint out/eagle3 out/spd_n4 out/ppsd_n4

Every schedule that a checkpoint can drive, with the draft that was made for it if there is one,
decodes every prompt with one process a stage and in one process. The prompts are the first turns of
the three benchmarks, in equal parts. One line of JSON: decodings compared for each schedule and
temperature, and the prompts whose text or K differ; how many were compared with plain decoding's
text, where plain decoding came first and by the same rule, and those unlike it on either backend.
PipeInfer and SSD have another K on processes, where a verdict that waits cuts a micro-batch, or the
preparation of the next batch, short.
"""

import argparse
import json
import sys
from typing import Any

import torch

BENCHMARKS = ("mt_bench", "gsm8k", "humaneval")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--checkpoint", nargs="+", required=True, help="drafts for as many stages as processes")
    add("--target", default="assets/target")
    add("--data-dir", help="official files (default: the prompts of assets/eval)")
    add("--schedules", nargs="+", help="only these")
    add("--prompts", type=int, default=200)
    add("--prompt-tokens", type=int, default=128, help="the last ones of each prompt")
    add("--max-new-tokens", type=int, default=16)
    add("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    add("--verifier", default="auto", help="gumbel: no text depends on the draft (default: auto)")
    return parser.parse_args()


def read_prompts(args: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
    from pipedraft.eval.tasks import encode_turn, load_task

    share = -(-args.prompts // len(BENCHMARKS))
    found = [
        encode_turn(tokenizer, prompt, [])[-args.prompt_tokens :]
        for name in BENCHMARKS
        for prompt in load_task(name, args.data_dir, share)
    ]
    if len(found) < args.prompts:
        raise SystemExit(f"--prompts: {args.prompts}, but the benchmarks have {len(found)}")
    return found[: args.prompts]


def compare(args: argparse.Namespace, cluster: Any) -> dict[str, Any]:
    from pipedraft.inference.config import DecodeConfig
    from pipedraft.inference.engine import Engine
    from pipedraft.inference.schedules import SCHEDULES
    from pipedraft.inference.sources import default_schedule, make_source
    from pipedraft.models import load_draft
    from pipedraft.models.target import load_target, load_tokenizer

    num_stages = cluster.world_size
    tokenizer, whole = load_tokenizer(args.target), load_target(args.target)
    drafts = [load_draft(name, whole) for name in args.checkpoint]
    cut = next((draft.boundaries for draft in drafts if draft.boundaries), ())
    part = cluster.load_target(args.target, revision=None, num_stages=num_stages, boundaries=cut)
    prompts = read_prompts(args, tokenizer)
    counts: dict[str, int] = {}
    texts: list[list[Any]] = []
    steps: list[list[Any]] = []
    plain: dict[Any, list[int]] = {}
    as_plain: dict[str, int] = {}
    unlike_plain: list[list[Any]] = []
    for name in args.schedules or [n for n, kind in SCHEDULES.items() if not kind.needs_link]:
        schedule = SCHEDULES[name]
        able = [d for d in drafts if schedule.grows in make_source(d).grows]
        if schedule.grows is not None and not able:
            continue
        able.sort(key=lambda draft: default_schedule(draft.draft_type) != name)
        draft = able[0] if schedule.grows is not None else None
        for temperature in args.temperature:
            config = DecodeConfig.of(
                name,
                num_stages=num_stages,
                temperature=temperature,
                max_new_tokens=args.max_new_tokens,
                verifier=args.verifier,
                boundaries=cut,
            )
            engines = [
                Engine(whole, tokenizer, config, draft),
                Engine(part, tokenizer, config, draft, connect=cluster.connect),
            ]
            label = f"{name}, T = {temperature:g}"
            for index, prompt in enumerate(prompts):
                one, other = (e.decode(prompt, prompt_index=index) for e in engines)
                counts[label] = counts.get(label, 0) + 1
                if one.token_ids != other.token_ids:
                    texts.append([label, index])
                if one.num_steps != other.num_steps:
                    steps.append([label, index])
                key = config.rule, temperature, index
                if schedule.grows is None:
                    plain[key] = one.token_ids
                if key in plain:
                    as_plain[label] = as_plain.get(label, 0) + 1
                    if not one.token_ids == other.token_ids == plain[key]:
                        unlike_plain.append([label, index])
            found = counts[label], len(texts), len(steps), as_plain.get(label, 0), len(unlike_plain)
            print(label, *found, file=sys.stderr, flush=True)
    total = sum(counts.values())
    return {
        "compared": counts,
        "total": total,
        "different_text": texts,
        "different_steps": steps,
        "compared_with_plain": as_plain,
        "unlike_plain": unlike_plain,
    }


def main() -> None:
    from pipedraft.inference.ranks.cluster import Cluster
    from pipedraft.inference.ranks.watch import WatchLimits

    args = parse_arguments()
    torch.set_num_threads(1)
    with Cluster(WatchLimits(silence_s=60, undelivered_s=60, step_s=60)) as cluster:
        if cluster.is_controller:
            print(json.dumps(compare(args, cluster)), flush=True)
        else:
            cluster.serve()


if __name__ == "__main__":
    main()
