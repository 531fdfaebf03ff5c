"""Count invalidated segments and their cost in recorded runs.

    python docs/lab/runs.py out/eval

PipeInfer calls a segment a run. If verification rejects all rows in a segment, it is invalidated,
and later stages leave it out. The table has the invalidated share of all segments, the left-out
share among stage passes, and the standard deviation of L' over prompts. For runs in processes it
adds tokens/s per GB (resident, all ranks) and the segments skipped by ranks.
"""

import argparse
import statistics
from pathlib import Path

import msgspec

from pipedraft.eval.record import Results
from pipedraft.eval.tables import Table, align_columns, number
from pipedraft.eval.traces import read_recordings
from pipedraft.inference.result import DecodeResult


def fates(result: DecodeResult) -> tuple[int, int, int, int]:
    """Return four counts: segments, invalidated segments, stage passes made, stage passes left out.

    Segments still in flight when a text ends do not count.
    """
    steps = [event for times, *event in result.step_log for _ in range(times) if len(event) > 1]
    rows = [event[2:] for event in steps]
    n, counts = result.num_stages, [0, 0, 0, 0]
    for start in range(len(rows) - n + 1):
        if not rows[start][0]:
            continue
        made = next((k for k in range(n) if not rows[start + k][k]), n)
        for place, more in enumerate((1, made < n, made, n - made)):
            counts[place] += more
    return counts[0], counts[1], counts[2], counts[3]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="an evaluation's --out")
    folder = parser.parse_args().folder
    lines = []
    results = msgspec.json.decode((folder / "results.json").read_bytes(), type=Results)
    # The last one with these settings covers all benchmarks.
    records = {(run.schedule, run.tree, run.stages, run.temperature): run for run in results.runs}
    for recording in read_recordings([folder]):
        found = [fates(result) for result in recording.turns.values()]
        entered, emptied, made, left = (sum(column) for column in zip(*found, strict=True))
        config, stages = recording.config, recording.config.num_stages
        schedule = config.schedule
        run = records.get((schedule.name, schedule.label, stages, config.temperature))
        if run is None:  # left from other settings
            continue
        prompts = [prompt for prompt in run.per_prompt if prompt.steps]
        lengths = [stages * prompt.tokens / prompt.steps for prompt in prompts]
        memory = sum(process.peak_rss_mb or 0.0 for process in run.processes) / 1024
        clock = run.wallclock.tokens_per_s if run.processes and run.wallclock else None
        counts = [process.counts for process in run.processes]
        stopped = sum(c.get("skip", 0) for c in counts)
        lines.append(
            [
                recording.name,
                str(stages),
                str(entered),
                number(emptied / entered),
                number(left / (made + left)),
                number(run.equivalent_acceptance_length.pooled, 2),
                number(statistics.stdev(lengths), 2) if len(lengths) > 1 else "-",
                number(clock, 1),
                number(clock / memory if clock and memory else None, 1),
                str(stopped) if counts else "-",
            ]
        )
    names = "method,n,segments,invalidated,left out,L',deviation,tokens/s,per GB,skipped"
    print(align_columns(Table(names.split(","), lines)))


if __name__ == "__main__":
    main()
