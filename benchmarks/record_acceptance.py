"""Where a small language model drafts the target's next token: recordings for draft_length.py.

    python assets/target/train.py --config configs/target/tiny_draft.yaml
    python benchmarks/record_acceptance.py --out assets/acceptance/tiny_draft.json

The target answers the prompts of assets/eval, greedily and at temperature 1. A draft that reads the
text alone can be tested at every place of it in one pass, because the draft tokens before an
accepted one are the text. "1" is a token that would be accepted where all before it are:

- match: it is the draft's likeliest token (temperature 0 and 1; one id back from the cloud);
- rejection: with probability min(1, q / p), what speculative sampling's acceptances look like from
  the text that comes out (temperature 1).
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipedraft.benchmarks.measurement import make_parser
from pipedraft.eval.tasks import encode_turn, load_tasks
from pipedraft.models.language_model import load_draft_model
from pipedraft.models.target import load_target, load_tokenizer

# T tokens of an answer, V vocabulary


@torch.no_grad()
def tested(
    target: Any, draft: Any, prompt_ids: list[int], temperature: float, max_new_tokens: int
) -> dict[str, np.ndarray]:
    """Whether each token of the target's answer would be accepted, [T] by rule."""
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    ids = target.generate(
        torch.tensor([prompt_ids]),
        max_new_tokens=max_new_tokens,
        **(sampling if temperature else {"do_sample": False}),
    )
    answer_T = ids[0, len(prompt_ids) :]
    draft_TV = draft(ids).logits[0, len(prompt_ids) - 1 : -1]
    is_likeliest_T = (draft_TV.argmax(-1) == answer_T).numpy()
    if not temperature:
        return {"match": is_likeliest_T}
    target_TV = target(ids).logits[0, len(prompt_ids) - 1 : -1]
    log_q_T, log_p_T = (
        torch.log_softmax(logits_TV / temperature, -1).gather(-1, answer_T[:, None])[:, 0]
        for logits_TV in (draft_TV, target_TV)
    )
    is_accepted_T = (torch.rand(len(answer_T)).log() < log_q_T - log_p_T).numpy()
    return {"match": is_likeliest_T, "rejection": is_accepted_T}


def main() -> None:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--target", default="assets/target")
    add("--draft-model", default="out/draft_model/best")
    add("--max-new-tokens", type=int, default=128)
    add("--out", type=Path, required=True)
    args = parser.parse_args()
    target, tokenizer = load_target(args.target), load_tokenizer(args.target)
    draft = load_draft_model(args.draft_model, target, tokenizer).model
    torch.manual_seed(0)
    held: dict[str, list[str]] = {}
    for prompts in load_tasks(["mt_bench", "gsm8k", "humaneval"]).values():
        for prompt in prompts:
            prompt_ids = encode_turn(tokenizer, prompt, [])
            for temperature in (0, 1):
                rules = tested(target, draft, prompt_ids, temperature, args.max_new_tokens)
                for rule, is_right_T in rules.items():
                    row = "".join("01"[int(right)] for right in is_right_T)
                    held.setdefault(f"t{temperature}_{rule}", []).append(row)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(held, indent=0) + "\n", encoding="utf-8")
    for name, rows in held.items():
        text = "".join(rows)
        print(f"{name}: {len(rows)} answers, {len(text)} tokens, {text.count('1') / len(text):.3f}")


if __name__ == "__main__":
    main()
