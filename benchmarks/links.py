"""Measure the process pipeline over links with latency, and compare it with the cost model.

    python benchmarks/links.py --out out/links               # root: it makes two network namespaces
    python benchmarks/links.py --only pipeline --stages 4 --rtt 60,150 --out out/links
    python benchmarks/links.py --only breaks,exits,edge --json --out out/links
    python benchmarks/links.py --only pipeline --checkpoint out/mine --schedules spd --out out/mine

A launch's ranks alternate between two network namespaces, so every stage-to-stage message crosses
the emulated link (emulated_link.py). Launches use the commands in docs/pipeline.md. Parts:

pipeline    Decodes with every schedule, outputs compared with transformers. The cost model is
            fitted at 5 ms (--calibrate), in the median launch out of three. For another round trip,
            each link gets half the difference. S and ms are medians over --repeats.
exits       --launches launches at 150 ms: statuses, seconds from the answer to the last exit.
breaks      Stalls, outages, a killed rank and a cut namespace, at a round trip of 60 ms. All ranks
            end with 0 and the same output, or within 10 s after noticing, each with a line.
edge        See edge/links.py.

Results stay in --out, and are not measured again. The last line of --json has:

spd_over_model  measured S of SPD (n = 4) over the modeled one, the worse of 60 and 150 ms
lowest_s        the lowest measured S in the table
different       outputs unlike transformers'
bad_exits       launches with a wrong ending
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from emulated_link import ADDRESSES, EmulatedLink, numbers

from pipedraft.eval.replay import Hardware, replay
from pipedraft.eval.tables import Table, align_columns
from pipedraft.eval.traces import read_recordings
from pipedraft.files import to_json, write_atomically
from pipedraft.inference.config import read_cost

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("pipeline", "exits", "breaks", "edge")
PORT = 29500
FITS = 3
"""Launches that fit the cost model: the processor's pace differs from launch to launch."""
FITTED_MS = 5.0
"""The cost model's round trip. Over any network, ranks sleep until a message arrives. Without
latency they do not, and compute faster."""
SPD_STAGES = 4
"""The shipped SPD head's stages."""
FAMILIES = {
    "spd": ("assets/heads/spd_n4", "spd,ppsd", ("--tree-width", "1")),
    "eagle3": (
        "assets/heads/eagle3",
        "eagle,pruned_pp,flowspec,flowspec_continued,naive_pp,pipedec,pipeinfer,ssd",
        ("--tree", "dynamic:4:4:12", "--tree-width", "4"),
    ),
}
"""Checkpoint, schedules and draft shapes; one launch decodes with all."""
PROMPT = "Write a Python function that returns the sum of a list."
NOTICE_S = 10
"""Time in seconds for all ranks to end after one noticed a failure (docs/pipeline.md)."""
SILENCE_S = 7
"""A rank counts as lost after this many seconds without a message (ranks/watch.py)."""


@dataclass
class Launch:
    """One command on several ranks, alternating between the link's sides."""

    link: EmulatedLink
    num_ranks: int
    words: Sequence[str]
    folder: Path
    started: list[subprocess.Popen] = field(default_factory=list)

    def start(self) -> "Launch":
        self.folder.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        for rank in range(self.num_ranks):
            launcher = [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(self.num_ranks)),
                *("--nproc-per-node", "1", "--node-rank", str(rank)),
                *("--rdzv-endpoint", f"{ADDRESSES[0]}:{PORT}", *self.words),
            ]
            command = self.link.command(rank % 2, launcher)
            with (
                (self.folder / f"out{rank}.txt").open("wb") as out,
                (self.folder / f"err{rank}.txt").open("wb") as err,
            ):
                child = subprocess.Popen(
                    command,
                    env=environment,
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
            self.started.append(child)
        return self

    def wait(self, limit_s: float) -> list[int | None]:
        """Return the ranks' statuses; None: killed after ``limit_s``."""
        end_s = time.monotonic() + limit_s
        for child in self.started:
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, end_s - time.monotonic()))
        statuses = [child.poll() for child in self.started]
        for child in self.started:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        return statuses

    def wait_for(self, name: str, text: str, limit_s: float) -> float:
        """Wait until a file has some text or rank 0 has ended. Return the time."""
        end_s = time.monotonic() + limit_s
        while self.started[0].poll() is None and time.monotonic() < end_s:
            found = (self.folder / name).read_text()
            if found and text in found:
                break
            time.sleep(0.02)
        return time.monotonic()

    def output(self) -> str:
        return (self.folder / "out0.txt").read_text()

    def complaints(self, rank: int) -> list[str]:
        """Return a rank's reasons for its end."""
        lines = (self.folder / f"err{rank}.txt").read_text().splitlines()
        return [line for line in lines if line.startswith("error: rank")]

    @cached_property
    def pids(self) -> list[int]:
        """Return each rank's own process, a child of its launcher."""
        found = []
        for child in self.started:
            text = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text()
            found.append(int(text.split()[0]))
        return found


# -- the schedules' time --------------------------------------------------------------------------


def families(args: argparse.Namespace) -> dict[str, tuple[str, str, tuple[str, ...]]]:
    """Return the shipped heads, or the user's own."""
    if args.checkpoint is None:
        return FAMILIES
    shape = "--tree chain:3" if args.shape is None else args.shape
    return {"own": (args.checkpoint, args.schedules or "eagle", tuple(shape.split()))}


def eval_words(args: argparse.Namespace, family: str, stages: int, out: Path) -> list[str]:
    head, schedules, shape = families(args)[family]
    return [
        *("-m", "pipedraft.eval", "--checkpoint", head, "--schedule", schedules, *shape),
        *("--stages", str(stages), "--benchmarks", "gsm8k", "--limit", "1"),
        *("--max-new-tokens", str(args.tokens), "--repeats", str(args.repeats)),
        *("--backend", "process", "--out", str(out)),
        *(("--never-slower",) if args.never_slower else ()),
    ]


def runs_in(folder: Path) -> list[dict[str, Any]]:
    found = folder / "results.json"
    return json.loads(found.read_text())["runs"] if found.is_file() else []


def ms_per_token(run: dict[str, Any]) -> float:
    seconds = sum(statistics.median(one["decode_s_repeats"]) for one in run["per_prompt"])
    return 1e3 * seconds / run["tokens"]


def fit(
    args: argparse.Namespace, link: EmulatedLink, family: str, stages: int, index: int
) -> tuple[float, Path, float]:
    """Return measured ms per token without a draft, the fitted file, and a target pass in ms."""
    out = args.out / f"fit_{family}_n{stages}_{index}"
    cost = out / "cost.json"
    if not cost.is_file():
        link.set(rtt=FITTED_MS)
        words = [*eval_words(args, family, stages, out), "--calibrate", str(cost)]
        say(args, f"{family}, n = {stages}, the cost model, {index + 1} of {FITS}")
        statuses = Launch(link, stages, words, out).start().wait(args.limit_s)
        if set(statuses) != {0}:
            raise OSError(f"{family}, n = {stages}, the cost model: statuses {statuses}; see {out}")
    plain = next(run for run in runs_in(out) if run["schedule"] == "autoregressive")
    stage_s = sum(process["seconds"].get("stage", 0.0) for process in plain["processes"])
    return ms_per_token(plain), cost, 1e3 * stage_s / plain["tokens"]


def calibrated(
    args: argparse.Namespace, link: EmulatedLink, family: str, stages: int
) -> tuple[Path, float]:
    """Return the fitted file and a target pass in ms, from the launch with the median time."""
    fits = sorted(fit(args, link, family, stages, index) for index in range(FITS))
    _, cost, pass_ms = fits[FITS // 2]
    return cost, pass_ms


def measure_pipeline(args: argparse.Namespace, link: EmulatedLink) -> list[dict[str, Any]]:
    """Return one record per schedule, number of stages and round trip."""
    records = []
    for stages in args.stages:
        for family in families(args):
            if family == "spd" and stages != SPD_STAGES:
                continue
            cost, pass_ms = calibrated(args, link, family, stages)
            for rtt in args.rtt:
                out = args.out / f"{family}_n{stages}_rtt{rtt:g}"
                if not (out / "statuses.json").is_file():
                    link.set(rtt=rtt)
                    out.mkdir(parents=True, exist_ok=True)
                    over = json.loads(cost.read_text())
                    # FlowSpec drafts what fits beside a step.
                    over["link"] = max(0.0, over["link"] + (rtt - FITTED_MS) / 2 / pass_ms)
                    write_atomically(out / "cost.json", to_json(over))
                    words = eval_words(args, family, stages, out)
                    words += ["--cost", str(out / "cost.json")]
                    say(args, f"{family}, n = {stages}, {rtt:g} ms")
                    statuses = Launch(link, stages, words, out).start().wait(args.limit_s)
                    write_atomically(out / "statuses.json", to_json(statuses))
                records += records_of(out, stages, rtt, pass_ms)
    return records


def records_of(out: Path, stages: int, rtt: float, pass_ms: float) -> list[dict[str, Any]]:
    """Return a launch's records. The recorded steps are priced with the link's latency."""
    exits = json.loads((out / "statuses.json").read_text())
    runs = runs_in(out)
    if not runs:
        return [{"n": stages, "rtt": rtt, "method": out.name, "different": 0, "exits": exits}]
    cost = read_cost(str(out / "cost.json"))
    hardware = Hardware("links", cost, cost.link)
    modeled = {
        recording.config.schedule.name: replay(recording, hardware)[0]
        for recording in read_recordings([out])
    }
    plain = runs[0]
    assert plain["schedule"] == "autoregressive"
    found = []
    for run in runs:
        tokens, _, time, alone = modeled[run["schedule"]].prompts_P4.sum(0)
        found.append(
            {
                "n": stages,
                "rtt": rtt,
                "method": run["schedule"],
                "draft": out.name.partition("_")[0],
                "length": run["equivalent_acceptance_length"]["pooled"],
                "ms": ms_per_token(run),
                "ms_modeled": time * pass_ms / tokens,
                "S": ms_per_token(plain) / ms_per_token(run),
                "S_modeled": alone / time,
                "different": run["lossless"]["mismatches"],
                "exits": exits,
            }
        )
    return found


def pipeline_table(records: Sequence[dict[str, Any]]) -> Table:
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "n": lambda one: str(one["n"]),
        "round trip": lambda one: f"{one['rtt']:g} ms",
        "schedule": lambda one: one["method"],
        "L'": lambda one: f"{one['length']:.2f}",
        "ms per token": lambda one: f"{one['ms']:.1f}",
        "modeled": lambda one: f"{one['ms_modeled']:.1f}",
        "S": lambda one: f"{one['S']:.2f}",
        "modeled ": lambda one: f"{one['S_modeled']:.2f}",
        "measured / modeled": lambda one: f"{one['S'] / one['S_modeled']:.2f}",
        "different": lambda one: str(one["different"]),
    }
    return Table.of(columns, [one for one in records if "ms" in one])


# -- how launches end -----------------------------------------------------------------------------


def inference_words(tokens: int) -> list[str]:
    return [
        *("-m", "pipedraft.inference", "--checkpoint", FAMILIES["spd"][0], "--backend", "process"),
        *("--prompt", PROMPT, "--max-new-tokens", str(tokens)),
    ]


def measure_exits(args: argparse.Namespace, link: EmulatedLink) -> list[dict[str, Any]]:
    """Return a record for each launch at 150 ms."""
    saved = args.out / "exits.json"
    records = json.loads(saved.read_text()) if saved.is_file() else []
    link.set(rtt=150)
    while len(records) < args.launches:
        folder = args.out / "exits" / str(len(records))
        launch = Launch(link, SPD_STAGES, inference_words(24), folder).start()
        # Rank 0 prints this line last: the answer is complete.
        done_s = launch.wait_for("err0.txt", "rank 3", args.limit_s)
        statuses = launch.wait(args.limit_s)
        records.append(
            {
                "statuses": statuses,
                "seconds": time.monotonic() - done_s,
                "output": launch.output(),
            }
        )
        say(args, f"launch {len(records)}: {statuses}, {records[-1]['seconds']:.1f} s")
        write_atomically(saved, to_json(records))
    return records


BREAKS: dict[str, tuple[dict[str, Any], float]] = {
    "nothing": ({}, 0),
    "stall of 3 s": ({"mode": "hold"}, 3),
    "outage of 3 s": ({"mode": "drop"}, 3),
    "outage of 10 s": ({"mode": "drop"}, 10),
    "outage of 30 s": ({"mode": "drop"}, 30),
    "namespaces cut": ({"mode": "drop"}, 1e9),
    "a rank killed": ({}, 0),
}
"""Each break's settings of the link, and its seconds."""


def measure_breaks(args: argparse.Namespace, link: EmulatedLink) -> list[dict[str, Any]]:
    """Return one record per break, each half a second after the first text."""
    saved = args.out / "breaks.json"
    if saved.is_file():
        return json.loads(saved.read_text())
    records = []
    for name, (settings, seconds) in BREAKS.items():
        link.set(rtt=60)
        folder = args.out / "breaks" / name.replace(" ", "_")
        launch = Launch(link, SPD_STAGES, inference_words(args.break_tokens), folder).start()
        launch.wait_for("out0.txt", "", args.limit_s)
        time.sleep(0.5)
        broken_s = time.monotonic()
        was_running = launch.started[0].poll() is None
        if name == "a rank killed":
            os.kill(launch.pids[2], signal.SIGKILL)
        if settings:
            link.set(rtt=60, **settings)
        while time.monotonic() < broken_s + seconds and launch.started[0].poll() is None:
            time.sleep(0.02)
        link.set(rtt=60)
        statuses = launch.wait(args.limit_s)
        ended_s = time.monotonic() - broken_s
        complaints = [launch.complaints(rank) for rank in range(SPD_STAGES)]
        aborted = [
            rank
            for rank in range(SPD_STAGES)
            if "SIGABRT" in (folder / f"err{rank}.txt").read_text()
        ]
        records.append(
            {
                "break": name,
                "was_running": was_running,
                "statuses": statuses,
                "seconds": ended_s,
                "complaints": complaints,
                "aborted": aborted,
                "output": launch.output(),
            }
        )
        say(args, f"{name}: {statuses}, {ended_s:.1f} s")
    write_atomically(saved, to_json(records))
    return records


def is_bad_break(one: dict[str, Any], whole: str) -> bool:
    if set(one["statuses"]) == {0}:
        return one["output"] != whole
    told = [bool(lines) for lines in one["complaints"]]
    must_tell = sum(told) >= SPD_STAGES - (one["break"] == "a rank killed")
    is_late = one["seconds"] > SILENCE_S + NOTICE_S
    must_live = one["break"] in ("nothing", "stall of 3 s", "outage of 3 s")
    return None in one["statuses"] or bool(one["aborted"]) or not must_tell or is_late or must_live


# -- everything -----------------------------------------------------------------------------------


def say(args: argparse.Namespace, line: str) -> None:
    if not args.json:
        print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", default=",".join(PARTS), help="comma list of pipeline, exits, breaks and edge")
    add("--stages", type=lambda text: list(map(int, text.split(","))), default=[2, 4])
    add("--rtt", type=numbers, default=[5.0, 20.0, 60.0, 150.0], help="round trips in ms")
    add("--tokens", type=int, default=48, help="per output of the schedules")
    add("--repeats", type=int, default=5)
    add("--launches", type=int, default=20, help="for exits")
    add("--break-tokens", type=int, default=160)
    add("--limit-s", type=float, default=900, help="for one launch")
    add("--checkpoint", help="your head, for pipeline; default: the shipped ones")
    add("--schedules", help="comma list, with --checkpoint; default: eagle")
    add("--shape", help="eval's draft options, with --checkpoint; default: '--tree chain:3'")
    add("--never-slower", action="store_true", help="decode with eval's gate, for pipeline")
    add("--sysctl", action="append", default=[], help="kernel setting of both namespaces")
    add("--out", type=Path, required=True)
    add("--json", action="store_true", help="no progress; a line of JSON at the end")
    args = parser.parse_args()
    parts = args.only.split(",")
    for flag in ("schedules", "shape"):
        if args.checkpoint is None and getattr(args, flag) is not None:
            parser.error(f"--{flag}: {getattr(args, flag)!r} without --checkpoint; name your head")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--only: {', '.join(sorted(unknown))}; give some of {', '.join(PARTS)}")
    args.out = args.out.absolute()
    args.out.mkdir(parents=True, exist_ok=True)
    outcome: dict[str, Any] = {"different": 0, "bad_exits": 0}
    with EmulatedLink(sysctls=args.sysctl) as link:
        if "pipeline" in parts:
            records = measure_pipeline(args, link)
            print(align_columns(pipeline_table(records)))
            outcome["different"] += sum(one["different"] for one in records)
            launches = {(one["n"], one["rtt"], one.get("draft")): one["exits"] for one in records}
            outcome["bad_exits"] += sum(set(exits) != {0} for exits in launches.values())
            spd = [
                one["S"] / one["S_modeled"]
                for one in records
                if one["method"] == "spd" and one["rtt"] in (60, 150)
            ]
            outcome["spd_over_model"] = min(spd, default=None)
            outcome["lowest_s"] = min((one["S"] for one in records if "S" in one), default=None)
        if "exits" in parts:
            exits = measure_exits(args, link)
            texts = {one["output"] for one in exits}
            bad = sum(set(one["statuses"]) != {0} for one in exits)
            seconds = sorted(one["seconds"] for one in exits)
            print(
                f"{len(exits)} launches at 150 ms: {bad} with a status other than 0, {len(texts)} "
                f"distinct outputs; last exit {statistics.median(seconds):.1f} s after the answer "
                f"(longest {seconds[-1]:.1f})"
            )
            outcome["bad_exits"] += bad
            outcome["different"] += len(texts) - 1
        if "breaks" in parts:
            breaks = measure_breaks(args, link)
            whole = breaks[0]["output"]
            for one in breaks:
                is_bad = is_bad_break(one, whole)
                outcome["bad_exits"] += is_bad
                first = next((lines[0] for lines in one["complaints"] if lines), "exact")
                print(
                    f"{one['break']}: statuses {one['statuses']}, {one['seconds']:.1f} s, "
                    f"{'BAD' if is_bad else 'as promised'}: {first}"
                )
    edge = ROOT / "benchmarks" / "edge" / "links.py"
    if "edge" in parts and edge.is_file():
        command = [sys.executable, str(edge), "--json", "--out", str(args.out / "edge")]
        child = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        *lines, last = child.stdout.splitlines()
        print("\n".join(lines))
        found = json.loads(last)
        outcome["different"] += found.pop("different")
        outcome["bad_exits"] += found.pop("bad_exits")
        outcome |= found
    print(json.dumps(outcome))


if __name__ == "__main__":
    main()
