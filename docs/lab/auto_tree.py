"""Compare tokens per second of `--tree auto` and fixed chains, in turns on the same prompts.

OMP_NUM_THREADS=1 python docs/lab/auto_tree.py --dtype float32
"""

import argparse
from collections import Counter

import pipedraft
from pipedraft.eval.metrics import decode_seconds
from pipedraft.eval.tasks import encode_turn, load_tasks

TREES = ("chain:1", "chain:2", "chain:3", "chain:4", "chain:6", "auto")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--target", default="out/smollm2")
    parser.add_argument("--head", default="assets/heads/smollm2_eagle3")
    parser.add_argument("--data-dir", default="data/eval")
    parser.add_argument("--limit", type=int, default=4, help="prompts per benchmark")
    parser.add_argument("--new-tokens", type=int, default=64)
    options = parser.parse_args()
    loaded = pipedraft.load(options.target, draft=options.head, dtype=options.dtype)
    tasks = load_tasks(["mt_bench", "gsm8k", "humaneval"], options.data_dir, options.limit)
    rows = [
        [*map(int, encode_turn(loaded.tokenizer, prompt, []))]
        for prompts in zip(*tasks.values(), strict=True)
        for prompt in prompts
    ]
    # One model each: an engine's measurements stay with it.
    network = loaded.draft
    models = {
        tree: pipedraft.load(loaded.target, network, tokenizer=loaded.tokenizer) for tree in TREES
    }
    seconds, tokens = Counter[str](), Counter[str]()
    outputs: dict[str, list[list[int]]] = {tree: [] for tree in TREES}
    for turn, ids in enumerate([rows[0], *rows]):
        for tree in (TREES * 2)[turn % len(TREES) :][: len(TREES)]:
            size = options.new_tokens if turn else 8
            answer = models[tree].generate(
                ids, schedule="eagle", tree=tree, stages=1, max_new_tokens=size
            )
            if turn:  # the first is a warm-up
                outputs[tree].append([token.id for token in answer.tokens])
                seconds[tree] += decode_seconds(answer.result)
                tokens[tree] += len(outputs[tree][-1]) - 1
    for tree in TREES:
        equal = sum(a == b for a, b in zip(outputs[tree], outputs[TREES[0]], strict=True))
        speed = tokens[tree] / seconds[tree]
        print(f"{options.dtype} {tree}: {speed:.2f} tokens/s, {equal}/{len(rows)} outputs equal")


if __name__ == "__main__":
    main()
