# Time --never-slower with EAGLE-3's head that ships, the same head with noise on its weights, and one whose tokens
# are always wrong: in one process, on two ranks, and a wrong language model across an emulated link. Needs two idle
# cores. Last table: tokens/s over autoregressive decoding in the same run.
set -eu
out=${1:-out/never_slower} limit=${2:-8} repeats=${3:-3}
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
for place in one two; do
    where="--stages 1"
    [ $place = two ] && where="--stages 2 --backend process --processes 2"
    for head in good half wrong; do
        for gate in off on; do
            name=$place-$head-$gate
            [ $gate = on ] && option=--never-slower || option=
            python -m pipedraft.eval --checkpoint "$out/$head" --schedule eagle --tree chain:3 $where $option \
                --benchmarks gsm8k,humaneval --limit "$limit" --repeats "$repeats" --no-lossless --fresh \
                --out "$out/$name" >"$out/$name.log" 2>&1
        done
    done
done
python - "$out" <<'END'
import json, pathlib, sys
print(f"{'place':<6}{'draft':<7}{'gate':<5}{'alpha':>6}{'tokens/s':>10}{'alone':>8}{'over':>7}")
for path in sorted(pathlib.Path(sys.argv[1]).glob("*-*-*/results.json")):
    plain, drafted = (
        next(run for run in reversed(json.loads(path.read_text())["runs"]) if run["schedule"] == name)
        for name in ("autoregressive", "eagle")
    )
    speed, alone = (run["wallclock"]["tokens_per_s"] for run in (drafted, plain))
    place, head, gate = path.parent.name.split("-")
    alpha = drafted["draft_acceptance_rate"] or 0
    print(f"{place:<6}{head:<7}{gate:<5}{alpha:6.2f}{speed:10.1f}{alone:8.1f}{speed / alone:7.3f}")
END
PYTHONPATH=tests:${PYTHONPATH:-} python - "$out" <<'END'
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
            for draft in 2 * [("--tokenizer", "assets/target"), ("--draft-model", f"{sys.argv[1]}/random_lm")]:
                await ask(link.port, *draft)
    finally:
        server.terminate()
        await server.wait()
asyncio.run(main())
END
