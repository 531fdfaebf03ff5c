# Compare --boundaries auto with every other cut of the embedded target on two ranks, the second one
# slowed by a program that shares its core. Needs two idle cores. Last line: auto's tokens/s over the
# best cut's.
set -eu
out=${1:-out/unequal}
taskset -c 1 sh -c 'while :; do :; done' &
busy=$!
trap 'kill $busy' EXIT
export MASTER_ADDR=127.0.0.1 MASTER_PORT=29517 WORLD_SIZE=2 OMP_NUM_THREADS=1
run() {
    name=$1
    shift
    set -- --target assets/target --draft ngram --schedule pipeinfer --draft-tokens 1 --stages 2 --backend process \
        --benchmarks gsm8k --limit 3 --no-lossless --fresh --out "$out/$name" "$@"
    RANK=1 LOCAL_RANK=1 taskset -c 1 python -m pipedraft.eval "$@" >"$out/rank1.log" 2>&1 &
    second=$!
    RANK=0 LOCAL_RANK=0 taskset -c 0 python -m pipedraft.eval "$@" >"$out/rank0.log" 2>&1
    wait $second
}
mkdir -p "$out"
run even --calibrate "$out/cost.json"
run auto --cost "$out/cost.json" --boundaries auto
for layer in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do
    run "cut$layer" --boundaries "0,$layer,16"
done
python - "$out" <<'END'
import json, pathlib, sys
speed = {}
for path in pathlib.Path(sys.argv[1]).glob("*/results.json"):
    runs = json.loads(path.read_text())["runs"]
    drafted = next(run for run in runs if run["schedule"] == "pipeinfer")
    speed[path.parent.name] = drafted["wallclock"]["tokens_per_s"]
for name, value in sorted(speed.items(), key=lambda item: -item[1]):
    print(f"{name:<8}{value:8.1f} tokens/s with a draft token a step")
print("auto over the best cut", speed["auto"] / max(speed.values()))
END
