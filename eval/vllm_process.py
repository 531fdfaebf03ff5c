"""Run vLLM for pipedraft with vLLM's own Python, without importing anything from the package.

python vllm_process.py decode REQUEST.json ANSWER.json     draft tokens: eval/engine_parity.py

python vllm_process.py serve REQUEST.json FOLDER           hidden states: train/features/vllm.py
"""

import contextlib
import importlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path


def note_rounds(llm, rounds):
    """Append each verification round's root index and draft tokens to ``rounds``."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    update = scheduler.update_from_output

    def noted(scheduled, output):
        for name, drafted in scheduled.scheduled_spec_decode_tokens.items():
            root = scheduler.requests[name].num_tokens - 1
            rounds.append({"root": root, "drafted": [int(token) for token in drafted]})
        return update(scheduled, output)

    scheduler.update_from_output = noted


def counted(llm):
    """Return vLLM's own counters for drafts, and for accepted tokens by position."""
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
        ids, start = prompt["prompt_ids"], time.perf_counter()
        (output,) = llm.generate([{"prompt_token_ids": ids}], greedy, use_tqdm=False)
        seconds = time.perf_counter() - start
        rendered = None
        if tokenizer.chat_template:
            rendered = tokenizer.apply_chat_template(
                prompt["messages"], add_generation_prompt=True, return_dict=False
            )
        out = [int(token) for token in output.outputs[0].token_ids]
        run = {"token_ids": out, "rendered": rendered, "rounds": list(rounds)}
        runs.append(run | {"seconds": seconds})
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


class NoStream:
    """Stand-in for CUDA streams and events on a CPU, where every operation is synchronous."""

    def __init__(self, *_, **__):
        pass

    def nothing(self, *_, **__):
        pass

    record = wait_event = wait_stream = synchronize = nothing
    __enter__ = __exit__ = nothing

    def query(self):
        return True


def without_cuda():
    """Let vLLM's CUDA-only connector for hidden states run on a CPU."""
    torch = importlib.import_module("torch")
    if torch.cuda.is_available():
        return
    with contextlib.suppress(ImportError):  # sets smaller stand-ins when it is imported
        importlib.import_module("vllm.v1.worker.cpu.shm")
    for name in ("Stream", "Event", "stream", "current_stream"):
        setattr(torch.cuda, name, NoStream)
    empty_like = torch.empty_like
    torch.empty_like = lambda *a, pin_memory=False, **more: empty_like(*a, **more)


def end_with_stdin():
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


def serve(request, folder):
    """Run vLLM's server, which writes each row's hidden states into the folder."""
    if request.get("ends_with_stdin"):
        threading.Thread(target=end_with_stdin, daemon=True).start()
    layers = {"eagle_aux_hidden_state_layer_ids": request["layers"]}
    settings = {
        "speculative-config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": layers},
        },
        "kv-transfer-config": {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        },
        **request["settings"],
    }
    words = ["serve", request["target"], "--enforce-eager", "--no-enable-prefix-caching"]
    words.append("--no-enable-chunked-prefill")
    for name, value in settings.items():
        words += [f"--{name}", value if isinstance(value, str) else json.dumps(value)]
    sys.argv = ["vllm", *words]
    importlib.import_module("vllm.entrypoints.cli.main").main()


if __name__ == "__mp_main__" and "serve" in sys.argv:  # in a process started by vLLM's server
    without_cuda()

if __name__ == "__main__":
    task, place, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if task == "serve":
        serve(json.loads(place.read_text()), out)
    else:
        out.write_text(json.dumps(decode(json.loads(place.read_text()))))
