# Time --never-slower with EAGLE-3's head that ships, the same head with noise on its weights, and one whose tokens
# are always wrong: in one process, on two ranks, and a wrong language model across an emulated link. Needs two idle
# cores, 20 minutes. Every prompt is decoded without a draft, with one, and with --never-slower, one after the other in
# changing order: a machine that slows down does so for all three. Medians over the prompts, and 95 % intervals.
set -eu
out=${1:-out/never_slower} limit=${2:-6} repeats=${3:-2}
export OMP_NUM_THREADS=1
mkdir -p "$out"
python - "$out" <<'END'
import pathlib, shutil, sys, torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
source, out = pathlib.Path("assets/heads/eagle3"), pathlib.Path(sys.argv[1])
torch.manual_seed(0)
for name, noise in {"good": 0.0, "half": 0.35, "wrong": 0.0}.items():
    weights = load_file(source / "model.safetensors")
    for key in weights.keys() - {"draft_ids"}:
        weights[key] += noise * weights[key].std() * torch.randn_like(weights[key])
    if name == "wrong":
        weights["lm_head.weight"] = weights["lm_head.weight"].roll(1, 0).contiguous()
    shutil.copytree(source, out / name, dirs_exist_ok=True)
    save_file(weights, out / name / "model.safetensors")
config = AutoConfig.for_model("llama", vocab_size=4096, hidden_size=128, intermediate_size=384,
    num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=1024)
AutoModelForCausalLM.from_config(config).save_pretrained(out / "random_lm")
AutoTokenizer.from_pretrained("assets/target").save_pretrained(out / "random_lm")
END
cat >"$out/rank.py" <<'END'
import json, os, pathlib, runpy
from dataclasses import replace
from pipedraft.eval.metrics import decode_seconds
from pipedraft.eval.evaluation import EvalMethod, Evaluation
from pipedraft.eval.tasks import encode_turn
from pipedraft.inference.schedules.autoregressive import Autoregressive
def run(evaluation, methods):
    drafted = methods[0]
    plain = EvalMethod(name="plain", draft=None, config=replace(drafted.config, schedule=Autoregressive(), never_slower=False))
    gated = replace(drafted, config=replace(drafted.config, never_slower=True))
    ways = {"alone": plain, "off": drafted, "on": gated}
    for method in ways.values():
        evaluation._warm_up(method, 1000)
    engines = {name: evaluation._engine(method) for name, method in ways.items()}
    prompts = [prompt for prompts in evaluation.benchmarks.values() for prompt in prompts]
    rows = []
    for index, prompt in enumerate(int(os.environ["REPEATS"]) * prompts):
        ids, row = encode_turn(evaluation.tokenizer, prompt, []), {}
        for name in (list(ways) * 2)[index % 3 :][:3]:
            result = engines[name].decode(ids)
            row[name] = decode_seconds(result), result.num_tokens, result.num_steps
        rows.append(row)
    pathlib.Path(os.environ["ROWS"]).write_text(json.dumps(rows))
    raise SystemExit
Evaluation.run = run
runpy.run_module("pipedraft.eval", run_name="__main__", alter_sys=True)
END
for place in one two; do
    for head in good half wrong; do
        export ROWS="$out/$place-$head.json" REPEATS="$repeats"
        rm -f "$ROWS"
        set -- "$out/rank.py" --checkpoint "$out/$head" --schedule eagle --tree chain:3 --benchmarks gsm8k,humaneval \
            --limit "$limit" --no-lossless --fresh --out "$out/$place-$head"
        if [ $place = one ]; then
            python "$@" --stages 1
        else
            python -c "import sys
from pipedraft.inference.ranks.launch import run_ranks
run_ranks(2, [sys.executable, *sys.argv[1:]])" "$@" --stages 2 --backend process
        fi >"$out/$place-$head.log" 2>&1 || [ -s "$ROWS" ]  # the ranks call rank.py's exit an error
    done
done
cat >"$out/table.py" <<'END'
import json, pathlib, random, statistics, sys
def interval(values):
    random.seed(0)
    drawn = sorted(statistics.median(random.choices(values, k=len(values))) for _ in range(2000))
    return f"{statistics.median(values):7.3f} ({drawn[50]:.3f} to {drawn[-51]:.3f})"
print(f"time over time, n prompts: {'on over alone':>26}{'on over off':>26}{'off over alone':>26}")
for path in sorted(pathlib.Path(sys.argv[1]).glob("*-*.json")):
    rows = json.loads(path.read_text())
    ratios = [
        interval([row[a][0] * row[b][1] / (row[b][0] * row[a][1]) for row in rows])
        for a, b in (("on", "alone"), ("on", "off"), ("off", "alone"))
    ]
    tokens = [sum(row[way][1] for row in rows) / sum(row[way][2] for row in rows) for way in ("off", "on")]
    print(f"{path.stem:<12}{len(rows):>4}", *ratios, "tokens per step off, on", *(f"{x:.2f}" for x in tokens))
END
python "$out/table.py" "$out"
PYTHONPATH=tests/edge:${PYTHONPATH:-} python - "$out" <<'END'
import asyncio, re, subprocess, sys
from emulated_link import EmulatedLink
from pipedraft.inference.edge.channel import PRESETS
command = [sys.executable, "-u", "-m", "pipedraft.inference"]
async def ask(port, *draft):
    words = [*command, "--server", f"127.0.0.1:{port}", *draft, "--max-new-tokens", "512", "--raw", "--prompt", "import"]
    asked = await asyncio.create_subprocess_exec(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    text, errors = (part.decode() for part in await asked.communicate())
    print(*draft, text.splitlines()[-1], errors.strip()[-200:], sep=" | ")
async def main():
    server = await asyncio.create_subprocess_exec(*command, "serve", "--target", "assets/target", "--port", "0", stdout=subprocess.PIPE)
    try:
        while not (found := re.search(rb":(\d+)", await server.stdout.readline())):
            pass
        async with EmulatedLink(PRESETS["5g"], "127.0.0.1", int(found[1])) as link:
            for draft in 5 * [("--tokenizer", "assets/target"), ("--draft-model", f"{sys.argv[1]}/random_lm")]:
                await ask(link.port, *draft)
    finally:
        server.terminate()
        await server.wait()
asyncio.run(main())
END
