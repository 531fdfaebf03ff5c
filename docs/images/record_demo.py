"""Record an answer without and with a draft, each token with its time, for draw_demo.py.

    python docs/images/record_demo.py --target out/smollm2 --draft assets/heads/smollm2_eagle3 --out docs/images/demo.json

Times are the decoding thread's CPU seconds. The fastest of several runs is kept. Other programs
share the caches, so let the machine be idle.
"""  # noqa: E501

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

import pipedraft
from pipedraft.eval.manifest import processor_name
from pipedraft.inference.generation import TextPieces, tokens_of

DRAFT_DTYPE = "int8"  # on a CPU the fastest; the answer stays the same
WAYS = {"without": {"schedule": "autoregressive"}, "with": {"schedule": "eagle", "tree": "chain:3"}}


class TimedPieces(TextPieces):
    """Token texts, with each token's CPU time."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer, None)
        self.times_s: list[float] = []

    def token(self, token: int, is_drafted: bool) -> bool:
        self.times_s.append(time.thread_time())
        return super().token(token, is_drafted)


def main() -> None:
    description, _, example, *_ = __doc__.splitlines()
    parser = argparse.ArgumentParser(description=description, epilog=f"example: {example.strip()}")
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--prompt", default="Write a Python function that adds two numbers.")
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = pipedraft.load(options.target, options.draft, draft_dtype=DRAFT_DTYPE)
    runs: dict[str, list[list[object]]] = {}
    for way, settings in [*WAYS.items()] * options.repeats:
        sizes = {"max_new_tokens": options.tokens}
        engine = model.engine(model.configure(sizes, stages=1, **settings))
        observer = TimedPieces(model.tokenizer)
        result = engine.decode(model.encode(options.prompt), observer=observer)
        tokens = tokens_of(result, observer.finish(result.text))
        times = [time_s - observer.times_s[0] for time_s in observer.times_s]
        run = [[one.text, one.kind, round(at, 4)] for one, at in zip(tokens, times, strict=True)]
        runs[way] = min(run, runs.get(way, run), key=lambda run: run[-1][2])
    assert [text for text, *_ in runs["with"]] == [text for text, *_ in runs["without"]]
    record = {
        "prompt": options.prompt,
        "target": Path(options.target).name,
        "draft": f"{model.draft.draft_type}, {WAYS['with']['tree']}, {DRAFT_DTYPE}",
        "machine": f"{processor_name()}, one thread",
        "runs": runs,
    }
    options.out.write_text(json.dumps(record, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
