"""Decode batches with vLLM's own Python for vllm_fill.py. Imports vllm only.

python vllm_child.py REQUEST.json ANSWER.json

The request has ``settings`` for vllm.LLM and ``batches``: prompts, params (one for all, or one per
prompt), is_together, and abort_after, which aborts the batch's first request after so many engine
steps. The answer has outputs, seconds and the scheduler's counts per batch.

vLLM's processes spin for SPIN_S seconds, 1 by default, while they wait for a message. Scheduler and
two ranks are three processes: on two cores one always spins where another one would compute.
"""

import importlib
import json
import os
import sys
import time
from pathlib import Path

MAX_STEPS = 100_000

if "SPIN_S" in os.environ:  # before the ranks start
    waiting = importlib.import_module("vllm.distributed.device_communicators.shm_broadcast")
    waiting.SpinCondition.__init__.__defaults__ = (float(os.environ["SPIN_S"]),)


def completion(found):
    """Return one output as JSON values."""
    logprobs = found.logprobs and [
        {str(token): one.logprob for token, one in place.items()} for place in found.logprobs
    ]
    return {
        "ids": list(found.token_ids),
        "text": found.text,
        "ended": [found.finish_reason, found.stop_reason],
        "logprobs": logprobs,
    }


class Watch:
    """Counts of the scheduler, plain or filling."""

    def __init__(self, scheduler):
        self.scheduler, self.num_preempted = scheduler, 0
        preempt = scheduler._preempt_request

        def counted(*args, **kwargs):
            self.num_preempted += 1
            return preempt(*args, **kwargs)

        scheduler._preempt_request = counted
        scheduler._report = lambda: None  # keeps the counts until they are read
        self.free = self.num_free()

    def num_free(self):
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def take(self):
        held = getattr(self.scheduler, "counts", None)  # plain vLLM has none
        counts = dict(vars(held)) if held is not None else {}
        for name in counts:
            setattr(held, name, 0)
        counts |= {"preempted": self.num_preempted, "blocks_lost": self.free - self.num_free()}
        self.num_preempted = 0
        return counts


def generate_aborting(llm, prompts, params, after):
    """Return all outputs but the first one's, which is aborted after some steps."""
    engine, found = llm.llm_engine, {}
    for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(index), prompt, one)
    for step in range(MAX_STEPS):
        if not engine.has_unfinished_requests():
            return [found[name] for name in sorted(found) if name != "0"]
        if step == after:
            engine.abort_request(["0"])
        for output in engine.step():
            if output.finished:
                found[output.request_id] = output
    raise RuntimeError("the engine does not end")


def run(llm, batch, vllm, watch):
    prompts = [{"prompt_token_ids": ids} for ids in batch["prompts"]]
    given = batch["params"]
    given = given if isinstance(given, list) else [given] * len(prompts)
    params = [vllm.SamplingParams(**one) for one in given]
    started = time.perf_counter()
    if batch.get("abort_after") is not None:
        found = generate_aborting(llm, prompts, params, batch["abort_after"])
    elif batch.get("is_together"):
        found = llm.generate(prompts, params, use_tqdm=False)
    else:
        pairs = zip(prompts, params, strict=True)
        found = [llm.generate([p], [one], use_tqdm=False)[0] for p, one in pairs]
    seconds = time.perf_counter() - started
    for _ in range(8):  # steps behind the last output
        llm.llm_engine.step()
    outputs = [[completion(one) for one in output.outputs] for output in found]
    return {"outputs": outputs, "seconds": seconds, "counts": watch.take()}


def main():
    request = json.loads(Path(sys.argv[1]).read_text())
    vllm = importlib.import_module("vllm")
    if request["settings"]["worker_cls"].startswith("vllm_link."):
        importlib.import_module("vllm_link")  # in this process, too, and first
    llm = vllm.LLM(**request["settings"])
    watch = Watch(llm.llm_engine.engine_core.engine_core.scheduler)
    prompts = request["batches"][0]["prompts"][:1]
    run(llm, {"prompts": prompts, "params": {"max_tokens": 4}}, vllm, watch)  # warms up
    answers = [run(llm, batch, vllm, watch) for batch in request["batches"]]
    Path(sys.argv[2]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
