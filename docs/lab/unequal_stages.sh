# Compare --boundaries auto with every other cut of the embedded target on two ranks. A layer takes 2 ms on the first rank
# and 4 ms on the second: each pass sleeps for the rest, because the time of the same pass without a sleep varies more
# than the cuts differ. About twelve minutes. Last line: auto's time per step over the best cut's.
set -eu
out=${1:-out/unequal} limit=${2:-3} cuts=${3:-"1 2 3 4 5 6 7 8 9 10 11 12 13 14 15"}
export OMP_NUM_THREADS=1
mkdir -p "$out"
cat >"$out/rank.py" <<'END'
import os, runpy, time
from pipedraft.models.target import Stage
layer_s = 0.002 * (1 + int(os.environ["RANK"]))
run = Stage.forward
def forward(stage, *inputs):
    end = time.perf_counter() + layer_s * (stage.end - stage.start)
    output = run(stage, *inputs)
    time.sleep(max(end - time.perf_counter(), 0))
    return output
Stage.forward = forward
runpy.run_module("pipedraft.eval", run_name="__main__", alter_sys=True)
END
run() {
    name=$1
    shift
    python -c "import sys
from pipedraft.inference.ranks.launch import run_ranks
run_ranks(2, [sys.executable, *sys.argv[1:]])" "$out/rank.py" --target assets/target --draft ngram \
        --schedule pipeinfer --draft-tokens 1 --stages 2 --backend process --benchmarks gsm8k --limit "$limit" \
        --repeats 2 --no-lossless --fresh --out "$out/$name" "$@" >"$out/$name.log" 2>&1
}
run even --calibrate "$out/cost.json"
run auto --cost "$out/cost.json" --boundaries auto
for layer in $cuts; do
    run "cut$layer" --boundaries "0,$layer,16"
done
python - "$out" <<'END'
import json, pathlib, sys
out, steps = pathlib.Path(sys.argv[1]), {}
print((out / "cost.json").read_text())
for path in out.glob("*/results.json"):
    runs = json.loads(path.read_text())["runs"]
    drafted = next(run for run in runs if run["schedule"] == "pipeinfer")
    prompts = drafted["per_prompt"]
    ms = 1e3 * sum(prompt["decode_s"] for prompt in prompts) / sum(prompt["steps"] for prompt in prompts)
    cut = json.loads((path.parent / "manifest.json").read_text())["config"]["boundaries"]
    steps[path.parent.name] = ms, drafted["wallclock"]["tokens_per_s"], cut
for name, (ms, speed, cut) in sorted(steps.items(), key=lambda item: item[1]):
    print(f"{name:<8}{ms:8.3f} ms a step{speed:9.1f} tokens/s   cut {cut}")
best = min(step for name, step in steps.items() if name != "auto")
print(f"auto over the best cut: {steps['auto'][0] / best[0]:.3f} in time per step")
END
