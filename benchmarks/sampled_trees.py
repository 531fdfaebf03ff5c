"""Equivalent acceptance length of sampled chains and trees, n = 4, against plain decoding's output.

The draft is the embedded target with noise on its weights, priced at a sixteenth of a target pass.
Target and draft share the noise of every draw (rule ``gumbel``), so every output has to be plain
decoding's of the same seed, token for token; chains are shown by the rejection rule as well.

    python benchmarks/sampled_trees.py --json

The last line is JSON: L' of each row, and how many of all outputs were equal.
"""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from pipedraft.benchmarks.measurement import make_parser
from pipedraft.eval.tasks import encode_turn, load_task
from pipedraft.inference.clock import CostModel
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.engine import Engine
from pipedraft.inference.result import DecodeResult
from pipedraft.models.language_model import LanguageModelDraft
from pipedraft.models.target import load_target, load_tokenizer

TARGET = Path(__file__).resolve().parents[1] / "assets" / "target"
BENCHMARKS = ("mt_bench", "gsm8k", "humaneval")
ROWS: dict[str, dict[str, Any]] = {
    "plain": {"schedule": "autoregressive"},
    "spd_chain_rejection": {"schedule": "spd", "verifier": "rejection"},
    "spd_chain": {"schedule": "spd", "verifier": "gumbel"},
    "spd_tree_match": {"schedule": "spd", "tree_width": 4, "verifier": "match"},
    "spd_tree": {"schedule": "spd", "tree_width": 4},
    "pipedec": {"schedule": "pipedec"},
    "eagle_chain_rejection": {"schedule": "eagle", "tree": "chain:7", "verifier": "rejection"},
    "eagle_chain": {"schedule": "eagle", "tree": "chain:7", "verifier": "gumbel"},
    "eagle_chain_block": {"schedule": "eagle", "tree": "chain:7", "verifier": "block"},
    "eagle_tree_recursive": {"schedule": "eagle", "verifier": "recursive"},
    "eagle_tree_traversal": {"schedule": "eagle", "verifier": "traversal"},
    "eagle_tree_match": {"schedule": "eagle", "verifier": "match"},
    "eagle_tree": {"schedule": "eagle"},
    "naive_pp": {"schedule": "naive_pp"},
    "pruned_pp": {"schedule": "pruned_pp"},
    "flowspec": {"schedule": "flowspec"},
    "flowspec_continued": {"schedule": "flowspec_continued"},
    "pipeinfer": {"schedule": "pipeinfer", "verifier": "gumbel"},
}


def with_noise(target: PreTrainedModel, share: float) -> LanguageModelDraft:
    """The target with normal noise on every weight, in shares of a tensor's standard deviation."""
    model = copy.deepcopy(target)
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        weight.data.add_(noise * share * weight.std())
    return LanguageModelDraft(model.eval().requires_grad_(False), target)


def acceptance_length(results: Sequence[DecodeResult]) -> float:
    tokens, steps = (sum(getattr(r, name) for r in results) for name in ("num_tokens", "num_steps"))
    return results[0].num_stages * tokens / steps


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=2, help="of each benchmark (default 2)")
    parser.add_argument("--tokens", type=int, default=48, help="new ones of each (default 48)")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument(
        "--top-k", type=int, default=0, help="likeliest tokens alone (default: all)"
    )
    parser.add_argument("--top-p", type=float, default=1.0, help="nucleus (default: all tokens)")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--noise", type=float, default=0.13, help="on the draft (default 0.13)")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=[*ROWS], help="(default: all)")
    parser.add_argument("--json", action="store_true", help="only the last line")
    args = parser.parse_args()
    torch.set_num_threads(1)
    target, tokenizer = load_target(str(TARGET)), load_tokenizer(str(TARGET))
    draft = with_noise(target, args.noise)
    prompts = [
        encode_turn(tokenizer, prompt, [])
        for name in BENCHMARKS
        for prompt in load_task(name, limit=args.prompts)
    ]
    found: dict[str, float] = {}
    plain: list[list[int]] = []
    texts = texts_equal = 0
    for name in dict.fromkeys(["plain", *args.rows]):
        config = DecodeConfig.of(
            **ROWS[name],
            num_stages=args.stages,
            temperature=args.temperature,
            max_new_tokens=args.tokens,
            top_k=args.top_k,
            top_p=args.top_p,
            cost=CostModel(draft_forward=1 / 16),
        )
        engine = Engine(target, tokenizer, config, None if name == "plain" else draft)
        results = [engine.decode(ids, prompt_index=index) for index, ids in enumerate(prompts)]
        plain = plain or [result.token_ids for result in results]
        found[name] = acceptance_length(results)
        equal = sum(r.token_ids == ids for r, ids in zip(results, plain, strict=True))
        if config.rule == "gumbel":
            texts, texts_equal = texts + len(results), texts_equal + equal
        if not args.json:
            plain_time = sum(result.virtual_time_autoregressive for result in results)
            speedup = plain_time / sum(result.virtual_time for result in results)
            drafted = sum(r.num_drafted for r in results) / sum(r.num_tokens for r in results)
            print(
                f"{name:22} {config.rule:10} L' {found[name]:.3f}  S {speedup:.3f}  "
                f"drafted a token {drafted:6.2f}  as plain decoding {equal}/{len(results)}",
                flush=True,
            )
    print(json.dumps(found | {"texts": texts, "texts_equal": texts_equal}))


if __name__ == "__main__":
    main()
