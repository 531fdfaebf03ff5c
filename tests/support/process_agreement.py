"""Rank program for test_process.py: compare all schedules with a run in one process.

torchrun --nproc-per-node 2 tests/support/process_agreement.py FOLDER LINKS HALF

HALF 0 or 1 runs half the acceptance rules, half the EAGLE settings, and one temperature per
schedule; the two prompts take turns. "whole" runs both halves with both prompts, "bitwise" runs a
few settings in bfloat16.
"""

import json
import sys
from collections import Counter
from pathlib import Path

import torch
from decode_runs import PROMPTS, SMALL, PlainTokenizer, friendly_module, plain_text
from decode_runs import WAYS as EAGLE_WAYS
from tiny_drafts import make_exit, make_head
from tiny_models import tiny_llama

from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.engine import Engine
from pipedraft.inference.ranks.cluster import Cluster
from pipedraft.inference.ranks.links import DeviceLink
from pipedraft.inference.rules import ROUND_RULES
from pipedraft.inference.rules.sampled import RULES
from pipedraft.inference.schedules import SCHEDULES
from pipedraft.models.target import load_target

NEW_TOKENS = 16


def main() -> None:
    folder, opened, right = Path(sys.argv[1]), [], DeviceLink.open
    DeviceLink.open = lambda *link: opened.append(right(*link))
    with Cluster(links=sys.argv[2]) as cluster:
        if not cluster.is_controller:
            cluster.serve()
            return
        name = str(folder / "t")
        is_bitwise = sys.argv[3] == "bitwise"
        dtype = torch.bfloat16 if is_bitwise else torch.float32
        sizes = {"hidden": 64, "vocab": 1000} if is_bitwise else {"vocab": 16}
        tiny_llama(layers=4, **sizes).save_pretrained(name)
        whole = load_target(name, dtype=dtype)
        part = cluster.load_target(name, revision=None, num_stages=2, dtype=dtype)
        found = compare(cluster, part, whole, is_bitwise)
        print(json.dumps(found | {"device_links": len(opened)}))


def compare(cluster, part, whole, is_bitwise):
    head = make_head(whole).to(part.dtype)
    head.attach(whole)
    module = friendly_module(whole, num_stages=2, num_layers=1).to(part.dtype)
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
    tree = eagle | {"tree": "dynamic:3:3:8"}
    rules += [(tree | {"verifier": rule}, head) for rule in ("recursive", "traversal")]
    if is_bitwise:
        ways = ways[:2] + [(EAGLE_WAYS[0], head)]
    else:
        ways += half_of(rules) + [(way, head) for way in half_of(EAGLE_WAYS)]
    different, compared = [], Counter()
    for number, (way, draft) in enumerate(ways):
        config = DecodeConfig.of(num_stages=2, max_new_tokens=NEW_TOKENS, bitwise=is_bitwise, **way)
        engines = [
            Engine(whole, PlainTokenizer(), config, draft),
            Engine(part, PlainTokenizer(), config, draft, connect=cluster.connect),
        ]
        for prompt in prompts_of(number):
            compared[config.rule if "verifier" in way else "greedy"] += 1
            local, other = (engine.decode(prompt) for engine in engines)
            if is_bitwise:
                plain = plain_text(whole, prompt, max_new_tokens=NEW_TOKENS, bitwise=True)
                assert local.token_ids == plain
            names = ("token_ids", "num_steps", "position_tests")
            if any(getattr(local, name) != getattr(other, name) for name in names):
                different.append([str(way), prompt])
    unlike_plain = [] if is_bitwise else schedules_unlike_plain(cluster, part, whole, head, module)
    reports = cluster.pipeline.reports()
    held = sum(p.numel() for p in part.parameters() if not p.is_meta)
    total = sum(p.numel() for p in whole.parameters())
    return {
        "compared": compared,
        "different": different,
        "unlike_plain": unlike_plain,
        "reports": reports,
        "parameters": [total, held],
    }


def schedules_unlike_plain(cluster, part, whole, head, module):
    """Schedules with an output on the ranks unlike the baseline's in one process."""
    special = {"autoregressive": None, "spd": module, "ppsd": make_exit(whole, num_stages=2)}
    unlike, texts = [], {}
    names = [name for name, kind in SCHEDULES.items() if kind.engine == "pipeline"]
    turned = [(name, (i + j) % 2) for i, name in enumerate(names) for j in (0, 1)]
    for number, (name, temperature) in enumerate(half_of(turned)):
        own = {"tree": SMALL} if hasattr(SCHEDULES[name], "tree") else {}
        shared = {"max_new_tokens": NEW_TOKENS, "temperature": float(temperature), "seed": 3}
        shared |= {"verifier": "gumbel"} if temperature else {}
        config = DecodeConfig.of(name, num_stages=2, **shared, **own)
        draft = special.get(name, head)
        engine = Engine(part, PlainTokenizer(), config, draft, connect=cluster.connect)
        for prompt in prompts_of(number // 2):
            asked = (temperature, len(prompt))
            texts[asked] = texts.get(asked) or plain_text(whole, prompt, **shared)
            if engine.decode(prompt).token_ids != texts[asked]:
                unlike.append([name, temperature, prompt])
    return unlike


def prompts_of(number):
    prompts = PROMPTS[1::2]
    return [prompts[(number + int(sys.argv[3])) % 2]] if sys.argv[3] in "01" else prompts


def half_of(ways):
    return ways if sys.argv[3] == "whole" else ways[int(sys.argv[3]) :: 2]


if __name__ == "__main__":
    main()
