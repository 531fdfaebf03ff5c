"""Compare every schedule with autoregressive decoding at one precision, on 200 prompts.

    python docs/lab/same_tokens.py int8 --ppsd out/ppsd --flexspec out/flexspec

Decodes with the target and the heads in assets, greedy and at temperature 1 (rule gumbel). In
float32, greedy decoding is compared with transformers' `generate`, too. Prints for each run how
many outputs are equal.
"""

import argparse
import json
from itertools import product
from pathlib import Path

import pipedraft
from pipedraft.api import Model
from pipedraft.eval.lossless import generate_greedy
from pipedraft.eval.tasks import load_tasks

ROOT = Path(__file__).resolve().parents[2]
TARGET, HEADS = ROOT / "assets/target", ROOT / "assets/heads"
MOST_PROMPT_TOKENS = 96
RUNS = {
    "spd_n4": [("spd", {}), ("spd", {"tree_width": 4}), ("pipedec", {"tree_width": 4})],
    "eagle3": [
        ("eagle", {"tree": "chain:3"}),
        ("eagle", {"tree": "dynamic:4:4:16"}),
        ("naive_pp", {"tree": "dynamic:4:4:16"}),
        ("pruned_pp", {"tree": "dynamic:4:4:16"}),
        ("flowspec", {"tree": "dynamic:4:4:16"}),
        ("flowspec_continued", {}),
        ("pipeinfer", {}),
        ("ssd", {}),
    ],
    "ppsd": [("ppsd", {}), ("ppsd", {"tree_width": 4})],
    "flexspec": [("eagle", {"tree": "chain:4"}), ("pipeinfer", {})],
    "target": [("pipeinfer", {}), ("flowspec", {"tree": "chain:4"})],
}
"""Schedules and settings, by draft; the draft "target" is the target itself, in float32."""


def encoded_prompts(model: Model, count: int) -> list[list[int]]:
    """Return the last tokens of each prompt. Benchmark questions precede training prompts."""
    tasks = load_tasks(["mt_bench", "gsm8k", "humaneval"], ROOT / "assets/eval")
    texts = [prompt.turns[0] for prompts in tasks.values() for prompt in prompts]
    lines = (ROOT / "assets/train/prompts.jsonl").read_text().splitlines()
    texts += [json.loads(line)["prompt"] for line in lines]
    return [model.encode(text)[-MOST_PROMPT_TOKENS:] for text in texts[:count]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dtype", choices=["float32", "bfloat16", "float16", "int8", "int4"])
    parser.add_argument("--ppsd", type=Path, help="folder: a PPSD head for the target")
    parser.add_argument("--flexspec", type=Path, help="folder: a FlexSpec draft for the target")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--new-tokens", type=int, default=24)
    options = parser.parse_args()
    drafts = {name: HEADS / name for name in ("spd_n4", "eagle3")} | {"target": TARGET}
    drafts |= {name: getattr(options, name) for name in ("ppsd", "flexspec")}
    model = pipedraft.load(TARGET, dtype=options.dtype)
    rows, count = encoded_prompts(model, options.prompts), options.new_tokens

    def outputs(model: Model, **settings: object) -> list[list[int]]:
        found = (model.generate(ids, max_new_tokens=count, **settings) for ids in rows)
        return [[token.id for token in answer.tokens] for answer in found]

    def report(name: str, found: list[list[int]], expected: list[list[int]]) -> None:
        equal = sum(a == b for a, b in zip(found, expected, strict=True))
        print(f"{options.dtype} {name}: {equal} of {len(expected)} outputs equal", flush=True)

    alone = {temperature: outputs(model, temperature=temperature) for temperature in (0.0, 1.0)}
    if options.dtype == "float32":
        theirs = [generate_greedy(model.target, ids, max_new_tokens=count) for ids in rows]
        report("transformers", theirs, alone[0.0])
    for draft, runs in RUNS.items():
        if drafts[draft] is None:
            continue
        loaded = pipedraft.load(model.target, draft=drafts[draft], tokenizer=model.tokenizer)
        for (schedule, settings), (temperature, expected) in product(runs, alone.items()):
            rule = {"verifier": "gumbel"} if temperature else {}
            sampling = {"temperature": temperature, **rule}
            found = outputs(loaded, schedule=schedule, **sampling, **settings)
            words = " ".join(f"{key}={value}" for key, value in settings.items())
            name = f"{draft} {schedule} {words}".rstrip()
            report(f"{name}, temperature {temperature:g}", found, expected)


if __name__ == "__main__":
    main()
