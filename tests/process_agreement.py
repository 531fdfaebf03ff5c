"""What every rank of tests/test_process.py runs: all schedules on processes and in one process.

torchrun --nproc-per-node 2 tests/process_agreement.py FOLDER LINKS HALF

HALF (0 or 1): which half of the ways to decode with an EAGLE head.
"""

import json
import sys
from collections import Counter
from pathlib import Path

from conftest import tiny_llama
from decode_runs import PROMPTS, PlainTokenizer, friendly_module
from decode_runs import WAYS as EAGLE_WAYS
from tiny_drafts import make_head

from pipedraft.inference.config import ROUND_RULES, DecodeConfig
from pipedraft.inference.engine import Engine
from pipedraft.inference.transport.cluster import Cluster
from pipedraft.inference.transport.watch import Limits
from pipedraft.inference.verify import RULES

NEW_TOKENS = 16


def main() -> None:
    folder = Path(sys.argv[1])
    with Cluster(Limits(), sys.argv[2]) as cluster:
        if not cluster.is_controller:
            cluster.serve()
            return
        name = str(folder / "t")
        tiny_llama(layers=4, vocab=16).save_pretrained(name)
        part = cluster.load_target(name, revision=None, num_stages=2)
        print(json.dumps(compare(cluster, part, name)))


def compare(cluster, part, name):
    from pipedraft.models.target import load_target

    whole = load_target(name)
    head = make_head(whole)
    head.attach(whole)
    module = friendly_module(whole, num_stages=2, num_layers=1)
    ways = [({"schedule": "autoregressive"}, None), ({"schedule": "spd"}, module)]
    ways += [({"schedule": "spd", "tree_width": 3, "temperature": 1.0, "top_p": 0.8}, module)]
    sampled = {"schedule": "spd", "temperature": 1.0}
    rules = [
        (sampled | {"verifier": rule, "payload_tokens": 2}, module)
        for rule in RULES
        if rule not in ROUND_RULES
    ]
    eagle = {"schedule": "eagle", "temperature": 1.0}
    rules += [(eagle | {"tree": "chain:4", "verifier": "block"}, head)]
    rules += [(eagle | {"tree": "dynamic:3:3:8", "verifier": "recursive"}, head)]
    ways += rules + [(way, head) for way in EAGLE_WAYS[int(sys.argv[3]) :: 2]]
    different, compared = [], Counter()
    for way, draft in ways:
        config = DecodeConfig.of(num_stages=2, max_new_tokens=NEW_TOKENS, **way)
        engines = [
            Engine(whole, PlainTokenizer(), config, draft),
            Engine(part, PlainTokenizer(), config, draft, connect=cluster.connect),
        ]
        for prompt in PROMPTS[1::2]:
            compared[config.rule if "verifier" in way else "greedy"] += 1
            local, other = (engine.decode(prompt) for engine in engines)
            names = ("token_ids", "num_steps", "position_tests")
            if any(getattr(local, name) != getattr(other, name) for name in names):
                different.append([str(way), prompt])
    reports = cluster.pipeline.reports()
    held = sum(p.numel() for p in part.parameters() if not p.is_meta)
    total = sum(p.numel() for p in whole.parameters())
    return {
        "compared": compared,
        "different": different,
        "reports": reports,
        "parameters": [total, held],
        "device_links": sum(
            link.device_link is not None for link in cluster.watch.sent + cluster.watch.received
        ),
    }


if __name__ == "__main__":
    main()
