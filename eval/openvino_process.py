"""Run OpenVINO GenAI for pipedraft, without importing anything from the package.

python openvino_process.py decode REQUEST.json ANSWER.json     see eval/engine_parity.py

python openvino_process.py convert TARGET HEAD FOLDER     writes their IRs into two folders in it

The pipeline reports how many tokens each round added, but no draft tokens. So a round's accepted
draft tokens are read off the output, and the token behind them was not drafted.
"""

import importlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

IR = "openvino_model.xml"


def target_ir(target, place):
    """Return the target's folder if it holds an IR, else a float32 IR made in ``place``."""
    if Path(target, IR).exists():
        return str(target)
    command = [Path(sys.executable).with_name("optimum-cli"), "export", "openvino"]
    command += ["--task", "text-generation-with-past", "--weight-format", "fp32"]
    subprocess.run([*command, "--model", target, place], check=True, stdout=sys.stderr)
    return place


def draft_ir(draft, place):
    """Return the draft's folder if it holds an IR, else a copy with one."""
    if Path(draft, IR).exists():
        return draft
    shutil.copytree(draft, place)
    script = Path(__file__).parents[1] / "models/exchange/openvino_ir.py"
    subprocess.run([sys.executable, script, place], check=True, stdout=sys.stderr)
    return place


def folders(request, place):
    """Return the request with folders in which target and draft are IRs."""
    draft = request["speculative_config"]
    if draft:
        draft = {**draft, "model": draft_ir(draft["model"], f"{place}/draft")}
    target = target_ir(request["target"], f"{place}/target")
    return {**request, "target": target, "speculative_config": draft}


def load(request):
    genai = importlib.import_module("openvino_genai")
    # The IR asks for a float16 cache.
    settings = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    if "threads" in request:
        settings["INFERENCE_NUM_THREADS"] = request["threads"]
    scheduler, draft = genai.SchedulerConfig(), request["speculative_config"]
    scheduler.enable_prefix_caching = False  # DFlash refuses it
    more = {"draft_model": genai.draft_model(draft["model"], "CPU", **settings)} if draft else {}
    return genai.LLMPipeline(
        request["target"], "CPU", scheduler_config=scheduler, **more, **settings
    )


def generate(pipeline, ids, request):
    """Return a prompt's output, the number of tokens that each step added, and the wall time."""
    numpy, openvino, genai = map(importlib.import_module, ("numpy", "openvino", "openvino_genai"))
    rows, draft = numpy.array([ids], numpy.int64), request["speculative_config"]
    settings = genai.GenerationConfig(
        max_new_tokens=request["max_new_tokens"], apply_chat_template=False
    )
    if draft:
        settings.num_assistant_tokens = draft["num_speculative_tokens"]
    inputs = genai.TokenizedInputs(openvino.Tensor(rows), openvino.Tensor(numpy.ones_like(rows)))
    start = time.perf_counter()
    found = pipeline.generate(inputs, settings)
    seconds, out = time.perf_counter() - start, [int(token) for token in found.tokens[0]]
    if not draft:
        return out, [1] * len(out), seconds
    steps = found.extended_perf_metrics.main_model_metrics.raw_metrics.m_batch_sizes
    return out, [int(size) for size in steps], seconds


def rounds_of(prompt, out, steps, depth):
    """Return rounds: the first step reads the prompt, and each other verifies a draft."""
    ids, rounds, end = [*prompt, *out], [], len(prompt) + steps[0]
    for size in steps[1:]:
        accepted = ids[end : end + size - 1]
        end += size
        # The last round is cut where the output ends.
        is_whole = len(accepted) < depth and end < len(ids)
        missed = ids[end - 1] if is_whole else None
        rounds.append({"root": end - size - 1, "drafted": accepted, "missed": missed})
    return rounds


def decode(request):
    """Decode the prompts in as many fresh pipelines as asked; report the first one's rounds."""
    genai = importlib.import_module("openvino_genai")
    depth = (request["speculative_config"] or {}).get("num_speculative_tokens", 0)
    answers, starts = [], []
    with tempfile.TemporaryDirectory() as place:
        request = folders(request, place)
        for _ in range(request["starts"]):
            pipeline, runs = load(request), []
            for prompt in request["prompts"]:
                out, steps, seconds = generate(pipeline, prompt["prompt_ids"], request)
                rounds = rounds_of(prompt["prompt_ids"], out, steps, depth) if depth else []
                runs.append({"token_ids": out, "rounds": rounds, "seconds": seconds})
            del pipeline
            answers.append(runs)
            starts.append(sum(len(one["drafted"]) for run in runs for one in run["rounds"]))
    rounds = [one for run in answers[0] for one in run["rounds"]]
    accepted = [sum(len(one["drafted"]) > place for one in rounds) for place in range(depth)]
    return {
        "engine": f"OpenVINO GenAI {genai.__version__.partition('-')[0]}",
        "dtype": "float32",
        "runs": answers[0],
        "num_drafts": len(rounds),
        "accepted": accepted,
        "starts": starts,
    }


def convert(target, head, folder):
    target_ir(target, f"{folder}/target")
    draft_ir(head, f"{folder}/draft")


if __name__ == "__main__":
    if sys.argv[1] == "convert":
        convert(*sys.argv[2:])
        sys.exit()
    Path(sys.argv[3]).write_text(json.dumps(decode(json.loads(Path(sys.argv[2]).read_text()))))
