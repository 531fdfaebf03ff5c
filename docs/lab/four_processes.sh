# FlowSpec and PipeInfer on the wall clock of four ranks (stage 0 shares its rank with the draft), PipeInfer also without
# cancellation. Needs idle cores, four of them for figures of a pipeline; with fewer the ranks share them, and only the
# order of the methods says something. Each folder's table: python docs/lab/runs.py FOLDER
set -eu
out=${1:-out/four} limit=${2:-4} schedules=${3:-"naive_pp flowspec flowspec_continued pipeinfer uncancelled"}
export OMP_NUM_THREADS=1
mkdir -p "$out"
cat >"$out/rank.py" <<'END'
import os, runpy
from pipedraft.inference.pipelines.process import ProcessPipeline
if os.environ.get("UNCANCELLED"):
    ProcessPipeline._cancel = lambda *_: None
    ProcessPipeline.is_wanted = lambda _: True
runpy.run_module("pipedraft.eval", run_name="__main__", alter_sys=True)
END
for name in $schedules; do
    schedule=$name options="" UNCANCELLED=""
    case $name in
    naive_pp) options="--tree dynamic:7:10:80" ;;
    flowspec) options="--tree dynamic:7:10:80 --expansion-depth 6" ;;
    uncancelled) schedule=pipeinfer UNCANCELLED=1 ;;
    esac
    export UNCANCELLED
    python -c "import sys
from pipedraft.inference.ranks.launch import run_ranks
run_ranks(4, [sys.executable, *sys.argv[1:]])" "$out/rank.py" --checkpoint assets/heads/eagle3 \
        --schedule $schedule $options --stages 4 --backend process --benchmarks mt_bench,gsm8k,humaneval \
        --limit "$limit" --max-new-tokens 64 --fresh --out "$out/$name" >"$out/$name.log" 2>&1
    echo "== $name"
    python docs/lab/runs.py "$out/$name"
done
