"""Decode prompts in vLLM and write what it drafted: run by vLLM's own Python, without pipedraft.

    python vllm_process.py REQUEST.json ANSWER.json

vLLM lives in an environment of its own, so this file imports nothing of the package. The request
and the answer are those of engine_parity.py.
"""

import importlib
import json
import sys
from pathlib import Path


def note_rounds(llm, rounds):
    """Keep each verification round: its sequence, the root's place, and the draft tokens."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    update = scheduler.update_from_output

    def noted(scheduled, output):
        for name, drafted in scheduled.scheduled_spec_decode_tokens.items():
            root = scheduler.requests[name].num_tokens - 1
            rounds.append({"root": root, "drafted": [int(token) for token in drafted]})
        return update(scheduled, output)

    scheduler.update_from_output = noted


def counted(llm):
    """vLLM's own counters of drafts, and of accepted tokens by position."""
    values = {metric.name: metric for metric in llm.get_metrics() if "spec_decode" in metric.name}
    drafts = values.get("vllm:spec_decode_num_drafts")
    places = values.get("vllm:spec_decode_num_accepted_tokens_per_pos")
    return [drafts.value if drafts else 0, *(places.values if places else [])]


def decode(request):
    vllm = importlib.import_module("vllm")
    settings = {
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "disable_log_stats": False,
        "max_num_seqs": 1,
        "max_model_len": request["max_model_len"],
        "kv_cache_memory_bytes": 2**29,
    }
    llm = vllm.LLM(
        request["target"],
        dtype=request["dtype"],
        speculative_config=request["speculative_config"],
        **settings,
    )
    rounds, runs = [], []
    note_rounds(llm, rounds)
    tokenizer = llm.get_tokenizer()
    greedy = vllm.SamplingParams(temperature=0.0, max_tokens=request["max_new_tokens"])
    before = counted(llm)
    for prompt in request["prompts"]:
        rounds.clear()
        ids = prompt["prompt_ids"]
        (output,) = llm.generate([{"prompt_token_ids": ids}], greedy, use_tqdm=False)
        rendered = None
        if tokenizer.chat_template:
            rendered = tokenizer.apply_chat_template(
                prompt["messages"], add_generation_prompt=True, return_dict=False
            )
        out = [int(token) for token in output.outputs[0].token_ids]
        runs.append({"token_ids": out, "rendered": rendered, "rounds": list(rounds)})
    after = counted(llm)
    before += [0] * (len(after) - len(before))
    drafts, *accepted = [int(b - a) for a, b in zip(before, after, strict=False)]
    return {
        "engine": f"vLLM {vllm.__version__}",
        "dtype": str(llm.llm_engine.model_config.dtype).removeprefix("torch."),
        "runs": runs,
        "num_drafts": drafts,
        "accepted": accepted,
    }


if __name__ == "__main__":
    place, out = map(Path, sys.argv[1:])
    out.write_text(json.dumps(decode(json.loads(place.read_text()))))
