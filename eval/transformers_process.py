"""Run `generate` of transformers for pipedraft, without importing anything from the package.

python transformers_process.py decode REQUEST.json ANSWER.json     see eval/engine_parity.py
"""

import importlib
import json
import sys
from pathlib import Path

GENERATOR = "DFlashTokenCandidateGenerator"


def noted(generator, rounds, lengths):
    """Return a candidate generator's class whose objects note each round, and its acceptance."""

    class Noted(generator):
        def get_candidates(self, input_ids, *args, **options):
            found, logits = super().get_candidates(input_ids, *args, **options)
            before = input_ids.shape[1]
            rounds.append({"root": before - 1, "drafted": found[0, before:].tolist()})
            return found, logits

        def update_candidate_strategy(self, input_ids, scores, num_matches):
            lengths.append(int(num_matches))
            return super().update_candidate_strategy(input_ids, scores, num_matches)

    return Noted


def decode(request):
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    places = importlib.import_module("transformers.generation.utils")
    transformers.utils.logging.set_verbosity_error()
    settings = request["speculative_config"]
    dtype = getattr(torch, request["dtype"])
    target = transformers.AutoModelForCausalLM.from_pretrained(request["target"], dtype=dtype)
    draft = transformers.AutoModel.from_pretrained(settings["model"], dtype=dtype)
    tokenizer = transformers.AutoTokenizer.from_pretrained(request["target"])
    rounds, lengths, runs, accepted = [], [], [], [0] * settings["num_speculative_tokens"]
    num_drafts = 0
    setattr(places, GENERATOR, noted(getattr(places, GENERATOR), rounds, lengths))
    for prompt in request["prompts"]:
        rounds.clear()
        lengths.clear()
        ids = torch.tensor([prompt["prompt_ids"]])
        out = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=request["max_new_tokens"],
            do_sample=False,
            assistant_model=draft,
            speculation_type="dflash",
        )
        rendered = None
        if tokenizer.chat_template:
            rendered = tokenizer.apply_chat_template(
                prompt["messages"], add_generation_prompt=True, return_dict=False
            )
        drafting = [(r, n) for r, n in zip(rounds, lengths, strict=True) if r["drafted"]]
        num_drafts += len(drafting)
        for _, length in drafting:
            for position in range(length):
                accepted[position] += 1
        new = out[0, ids.shape[1] :].tolist()
        runs.append({"token_ids": new, "rendered": rendered, "rounds": [r for r, _ in drafting]})
    return {
        "engine": f"transformers {transformers.__version__}",
        "dtype": str(target.dtype).removeprefix("torch."),
        "runs": runs,
        "num_drafts": num_drafts,
        "accepted": accepted,
    }


if __name__ == "__main__":
    Path(sys.argv[3]).write_text(json.dumps(decode(json.loads(Path(sys.argv[2]).read_text()))))
