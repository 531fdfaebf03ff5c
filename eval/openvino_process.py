"""Run OpenVINO GenAI for pipedraft, without importing anything from the package.

python openvino_process.py decode REQUEST.json ANSWER.json     see eval/engine_parity.py

The pipeline reports how many tokens each round added, but no draft tokens. So a round's accepted
draft tokens are read off the output, and the token behind them was not drafted.
"""

import importlib
import json
import shutil
import subprocess
import sys
import tempfile
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
    settings = request["speculative_config"]
    draft = {**settings, "model": draft_ir(settings["model"], f"{place}/draft")}
    target = target_ir(request["target"], f"{place}/target")
    return {**request, "target": target, "speculative_config": draft}


def load(request):
    genai = importlib.import_module("openvino_genai")
    # The IR asks for a float16 cache.
    precision = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    draft = request["speculative_config"]["model"]
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False  # DFlash refuses it
    return genai.LLMPipeline(
        request["target"],
        "CPU",
        scheduler_config=scheduler,
        draft_model=genai.draft_model(draft, "CPU", **precision),
        **precision,
    )


def generate(pipeline, ids, request):
    """Return a prompt's output, and the number of tokens that each step added."""
    numpy, openvino, genai = map(importlib.import_module, ("numpy", "openvino", "openvino_genai"))
    rows = numpy.array([ids], numpy.int64)
    settings = genai.GenerationConfig(
        max_new_tokens=request["max_new_tokens"],
        apply_chat_template=False,
        num_assistant_tokens=request["speculative_config"]["num_speculative_tokens"],
    )
    inputs = genai.TokenizedInputs(openvino.Tensor(rows), openvino.Tensor(numpy.ones_like(rows)))
    found = pipeline.generate(inputs, settings)
    steps = found.extended_perf_metrics.main_model_metrics.raw_metrics.m_batch_sizes
    return [int(token) for token in found.tokens[0]], [int(size) for size in steps]


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
    depth = request["speculative_config"]["num_speculative_tokens"]
    answers, starts = [], []
    with tempfile.TemporaryDirectory() as place:
        request = folders(request, place)
        for _ in range(request["starts"]):
            pipeline, runs = load(request), []
            for prompt in request["prompts"]:
                out, steps = generate(pipeline, prompt["prompt_ids"], request)
                rounds = rounds_of(prompt["prompt_ids"], out, steps, depth)
                runs.append({"token_ids": out, "rounds": rounds})
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


if __name__ == "__main__":
    Path(sys.argv[3]).write_text(json.dumps(decode(json.loads(Path(sys.argv[2]).read_text()))))
