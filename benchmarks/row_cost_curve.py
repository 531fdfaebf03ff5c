"""Modeled speed-up S of every schedule over what a row more costs a stage.

The draft is the embedded target with noise on its weights, priced at a sixteenth of a target pass.
Steps are priced again under every row cost; schedules that choose their draft tokens by it (auto)
are decoded again. Every output whose text no draft changes (all at temperature 0, those of rule
gumbel above it) is compared with plain decoding's.

    python benchmarks/row_cost_curve.py --json

The last line is JSON: "rows"; "stages", for each number of them S of every schedule at these rows;
"over_best", S of the continued FlowSpec with automatic budget over the best of the others.
"""

import json
from collections.abc import Sequence
from typing import Any

import torch
from sampled_trees import BENCHMARKS, TARGET, with_noise

from pipedraft.benchmarks.measurement import make_parser
from pipedraft.eval.replay import cost_conflict, replay_log
from pipedraft.eval.tasks import encode_turn, load_task
from pipedraft.inference.clock import CostModel, VirtualClock
from pipedraft.inference.config import ROW_COSTS, DecodeConfig
from pipedraft.inference.engine import Engine
from pipedraft.inference.result import DecodeResult
from pipedraft.models.target import load_target, load_tokenizer

OURS = "flowspec_continued_auto"
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"schedule": "autoregressive"},
    "spd": {"schedule": "spd"},
    "spd_4": {"schedule": "spd", "tree_width": 4},
    "ppsd": {"schedule": "ppsd"},
    "pipedec": {"schedule": "pipedec"},
    "pipedec_auto": {"schedule": "pipedec", "tree_width": "auto"},
    "eagle_chain": {"schedule": "eagle", "tree": "chain:7"},
    "eagle": {"schedule": "eagle"},
    "eagle_auto": {"schedule": "eagle", "tree": "dynamic:7:10:auto"},
    "naive_pp": {"schedule": "naive_pp"},
    "pruned_pp": {"schedule": "pruned_pp"},
    "pruned_pp_auto": {"schedule": "pruned_pp", "tree": "dynamic:7:10:auto"},
    "flowspec": {"schedule": "flowspec"},
    "flowspec_auto": {
        "schedule": "flowspec",
        "tree": "dynamic:7:10:auto",
        "expansion_tokens": "auto",
    },
    "pipeinfer": {"schedule": "pipeinfer"},
    "pipeinfer_auto": {"schedule": "pipeinfer", "draft_tokens": "auto"},
    "flowspec_continued": {"schedule": "flowspec_continued"},
    OURS: {"schedule": "flowspec_continued", "step_tokens": "auto"},
}


def speedup(results: Sequence[DecodeResult], cost: CostModel, boundaries: Sequence[int]) -> float:
    """S of recorded steps under a cost model."""
    time = plain = 0.0
    for result in results:
        clock = VirtualClock(cost, boundaries, cost.draft_forward or 0.0)
        replay_log(result, clock)
        time, plain = time + clock.time, plain + clock.autoregressive_time(result.num_tokens)
    return plain / time


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=2, help="of each benchmark (default 2)")
    parser.add_argument("--skip", type=int, default=0, help="first prompts left out (default 0)")
    parser.add_argument("--tokens", type=int, default=48, help="new ones of each (default 48)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--stages", type=int, nargs="+", default=[4, 8], help="(default 4 8)")
    parser.add_argument("--noise", type=float, default=0.13, help="on the draft (default 0.13)")
    parser.add_argument("--rows", type=float, nargs="+", default=[*ROW_COSTS], help="row costs")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS], help="(default: all)")
    parser.add_argument("--json", action="store_true", help="only the last line")
    args = parser.parse_args()
    torch.set_num_threads(1)
    target, tokenizer = load_target(str(TARGET)), load_tokenizer(str(TARGET))
    draft = with_noise(target, args.noise)
    prompts = [
        encode_turn(tokenizer, prompt, [])
        for name in BENCHMARKS
        for prompt in load_task(name, limit=args.skip + args.prompts)[args.skip :]
    ]
    found: dict[str, dict[str, list[float]]] = {}
    over_best: dict[str, list[float]] = {}
    plain: list[list[int]] = []
    texts = texts_equal = 0
    for num_stages in args.stages:
        curves = found.setdefault(str(num_stages), {})
        for name in dict.fromkeys(["plain", *args.ways]):
            results: list[DecodeResult] = []
            recorded = CostModel()
            for row in args.rows:
                cost = CostModel(draft_forward=1 / 16, row=row)
                config = DecodeConfig.of(
                    **WAYS[name],
                    num_stages=num_stages,
                    temperature=args.temperature,
                    max_new_tokens=args.tokens,
                    cost=cost,
                )
                engine = Engine(target, tokenizer, config, None if name == "plain" else draft)
                if not results or cost_conflict(config.schedule, recorded, cost):
                    recorded = cost
                    results = [engine.decode(ids, prompt_index=i) for i, ids in enumerate(prompts)]
                    plain = plain or [result.token_ids for result in results]
                    if config.rule in ("match", "gumbel"):
                        pairs = zip(results, plain, strict=True)
                        texts_equal += sum(result.token_ids == ids for result, ids in pairs)
                        texts += len(results)
                value = speedup(results, cost, engine.target.boundaries)
                curves.setdefault(name, []).append(round(value, 3))
            if not args.json:
                line = "  ".join(f"{value:5.2f}" for value in curves[name])
                print(f"n={num_stages} {name:24} {line}", flush=True)
        if OURS in curves and len(curves) > 2:
            others = [curve for name, curve in curves.items() if name != OURS]
            best = [max(values) for values in zip(*others, strict=True)]
            over_best[str(num_stages)] = [
                round(own / other, 3) for own, other in zip(curves[OURS], best, strict=True)
            ]
    shown = {"rows": args.rows, "stages": found, "over_best": over_best}
    print(json.dumps(shown | {"texts": texts, "texts_equal": texts_equal}))


if __name__ == "__main__":
    main()
