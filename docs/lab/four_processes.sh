# FlowSpec and PipeInfer on the wall clock of four ranks (stage 0 shares its rank with the draft), PipeInfer also without
# cancellation. Needs idle cores, four of them for figures of a pipeline; with fewer the ranks share them, and only the
# order of the methods says something. Each folder's table: python docs/lab/runs.py FOLDER
set -eu
out=${1:-out/four} limit=${2:-4} schedules=${3:-"naive_pp flowspec flowspec_continued pipeinfer uncancelled"}
export OMP_NUM_THREADS=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29519 WORLD_SIZE=4
mkdir -p "$out"
uncancelled="from pipedraft.inference.pipelines.process import ProcessPipeline as P
P._cancel, P.is_wanted = (lambda *_: None), (lambda _: True)"
for name in $schedules; do
    patch="" schedule=$name options=""
    case $name in
    naive_pp) options="--tree dynamic:7:10:80" ;;
    flowspec) options="--tree dynamic:7:10:80 --expansion-depth 6" ;;
    uncancelled) schedule=pipeinfer patch=$uncancelled ;;
    esac
    ranks=""
    for rank in 3 2 1 0; do
        RANK=$rank LOCAL_RANK=$rank python -c "$patch
import runpy, sys
runpy.run_module('pipedraft.eval', run_name='__main__', alter_sys=True)" --checkpoint assets/heads/eagle3 \
            --schedule $schedule $options --stages 4 --backend process --benchmarks mt_bench,gsm8k,humaneval \
            --limit "$limit" --max-new-tokens 64 --fresh --out "$out/$name" >"$out/$name-$rank.log" 2>&1 &
        ranks="$ranks $!"
    done
    for rank in $ranks; do wait $rank; done
    echo "== $name"
    python docs/lab/runs.py "$out/$name"
done
