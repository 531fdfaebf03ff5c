"""Train the short runs for the forecast's prior, and measure the forecast on them.

    python docs/lab/forecast_curves.py --out out/forecast
    python docs/lab/forecast_curves.py --out out/forecast --only eagle3_0,spd_0
    python docs/lab/forecast_curves.py --out out/forecast --measure

Each run trains a head for the embedded target in one to five minutes on a CPU core. Finished runs
are kept and an interrupted run resumes, so you can repeat the command. --measure writes the runs'
curves to train/curves.csv, which keeps those of other runs. Then it forecasts each run's end from
its first part, with a prior from the other runs, and prints how often the 90 % interval covers the
measured end.
"""

import argparse
import csv
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import yaml

from pipedraft.train.config import parse_run
from pipedraft.train.forecast import (
    CURVES,
    FRACTIONS,
    Curve,
    Forecaster,
    Kind,
    alike,
    points_of,
    read_curves,
)
from pipedraft.train.methods import methods
from pipedraft.train.run import run_training

EVERY = {
    "evaluation.max_rows": 48,
    "evaluation.decode_prompts": 16,
    "log_every_steps": 2,
    "save_every_steps": 200,
    "keep_checkpoints": 1,
}
# The two recipes as they were when the curves were drawn: configs/spd/quickstart.yaml and
# configs/eagle/tiny_eagle3.yaml.
PLAIN: dict[str, object] = {
    "model.start": "deepest",
    "model.feature_weight": 0,
    "optim.lr": 3e-3,
    "reuse": 1,
}
WHOLE: dict[str, object] = {"batch_tokens": 1024, "model.curriculum_steps": 0}
# Settings for the quickstart's own run, and for trials of its recipe
# (docs/lab/training_trials.md). Trials 1 to 4 read stored states.
SPARSE: dict[str, object] = {
    **PLAIN,
    "log_every_steps": 10,
    "evaluation.decode_prompts": 8,
    "evaluation.every_steps": 0,
    "max_steps": 1200,
}
TRIAL: dict[str, object] = {
    **PLAIN,
    "log_every_steps": 50,
    "evaluation.decode_prompts": 0,
    "evaluation.every_steps": 0,
    "evaluation.max_rows": 94,
}
FITTED: dict[str, object] = {"max_steps": 400, "evaluation.decode_prompts": 48}
HALF: dict[str, object] = {"max_steps": 600, "batch_tokens": 512, "model.start": "ridge"}
RUNS: dict[str, tuple[str, dict[str, object]]] = {
    "eagle_0": ("eagle/tiny_eagle", {"max_steps": 150}),
    "ppsd_0": ("ppsd/tiny_n4", {"max_steps": 200}),
    "mtp_0": ("mtp/tiny", {"max_steps": 100}),
    "flexspec_0": ("flexspec/tiny", {"max_steps": 120}),
    "eagle3_0": ("eagle/tiny_eagle3", {**WHOLE, "max_steps": 120, "batch_tokens": 512}),
    "dspark_0": ("dspark/tiny", {"max_steps": 60}),
    "spd_1": ("spd/quickstart", {**PLAIN, "max_steps": 200, "seed": 1, "batch_tokens": 512}),
    "eagle3_1": (
        "eagle/tiny_eagle3",
        {"max_steps": 150, "seed": 1, "model.num_steps": 3, "batch_tokens": 512},
    ),
    **{
        f"eagle3_fitted_{seed}": ("eagle/tiny_eagle3", {**FITTED, "seed": seed})
        for seed in range(3)
    },
    **{
        f"eagle3_longer_{seed}": (
            "eagle/tiny_eagle3",
            {**FITTED, "max_steps": 800, "seed": seed, "log_every_steps": 10},
        )
        for seed in (3, 4)
    },
    "eagle_1": ("eagle/tiny_eagle", {"max_steps": 100, "seed": 1, "optim.lr": 0.001}),
    "ppsd_1": ("ppsd/tiny_n4", {"max_steps": 80, "seed": 1, "batch_tokens": 2048}),
    "mtp_1": ("mtp/tiny", {"max_steps": 100, "seed": 1, "model.num_steps": 1}),
    "dflash_0": ("dflash/tiny", {"max_steps": 100}),
    "spd_2": ("spd/quickstart", {**PLAIN, "max_steps": 150, "seed": 2, "model.start": "ridge"}),
    "eagle3_2": ("eagle/tiny_eagle3", {**WHOLE, "max_steps": 60, "seed": 2}),
    "spd_n8": ("spd/tiny_n8", {"max_steps": 100}),
    "spd_0": (
        "spd/quickstart",
        {**PLAIN, "max_steps": 600, "evaluation.every_steps": 150, "evaluation.decode_prompts": 24},
    ),
    "spd_quickstart": ("spd/quickstart", {**SPARSE, "seed": 42, "evaluation.every_steps": 600}),
    "spd_ridge": ("spd/quickstart", {**SPARSE, "model.start": "ridge", "batch_tokens": 512}),
    "trial_0": ("spd/quickstart", {**TRIAL, "max_steps": 300}),
    "trial_1": ("spd/quickstart", {**TRIAL, "max_steps": 300, "model.start": "ridge"}),
    "trial_2": ("spd/quickstart", {**TRIAL, **HALF}),
    "trial_3": ("spd/quickstart", {**TRIAL, **HALF, "model.loss": "lk"}),
    "trial_4": ("spd/quickstart", {**TRIAL, **HALF, "optim.lr": 5e-3}),
}
"""Run name -> configuration file, and the settings to override."""


def is_finished(folder: Path, num_steps: int) -> bool:
    """Return True if the log ends with the last step's evaluation."""
    log = folder / "metrics.jsonl"
    last = json.loads(log.read_text().splitlines()[-1]) if log.exists() else {}
    return last.get("step") == num_steps and "valid/loss" in last


def train(name: str, out: Path) -> None:
    """Train a run, or skip it if it is finished."""
    config, own = RUNS[name]
    num_steps = int(str(own["max_steps"]))
    if is_finished(out / name, num_steps):
        return
    settings = {**EVERY, "evaluation.every_steps": num_steps // 2, **own}
    words = [f"--config=configs/{config}.yaml", f"--output_dir={out / name}"]
    words += [f"--{key}={value}" for key, value in settings.items()]
    print(name, flush=True)
    run_training(*parse_run(words, methods(), ""))


def read_run(folder: Path) -> Curve:
    """Read the curve of a trained run from its folder."""
    run = yaml.safe_load((folder / "config.yaml").read_text())
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return Curve(run["method"], tuple(points_of(records, run["optim"]["lr"])))


def write_curves(out: Path) -> None:
    """Write the finished runs' points to train/curves.csv. Keep those of runs not in ``out``."""
    known = read_curves()
    for name, (_, own) in RUNS.items():
        if is_finished(out / name, int(str(own["max_steps"]))):
            known[name] = read_run(out / name)
    with CURVES.open("w", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(["run", "method", "kind", "tokens", "decayed", "length"])
        for name, curve in known.items():
            for p in curve.points:
                place = [p.tokens, f"{p.decayed:.3f}", f"{p.length:.3f}"]
                lines.writerow([name, curve.method, p.kind, *place])


def measure(kind: Kind) -> None:
    """Print each run's forecasts with a prior from the other runs, and their coverage."""
    curves = {name: curve for name, curve in read_curves().items() if curve.of(kind)}
    heads = "".join(f"{f'after {fraction:.0%}':>21}" for fraction in FRACTIONS)
    print(f"{kind:<14}{'tokens':>8}{'end':>6}{heads}")
    found: dict[float, list[tuple[bool, float, float]]] = {f: [] for f in FRACTIONS}
    for name, curve in curves.items():
        others = alike((c for key, c in curves.items() if key != name), curve.method, kind)
        made, end = Forecaster.of(others, kind), curve.of(kind)[-1]
        said = []
        for fraction in FRACTIONS:
            interval = made.forecast(curve, end.tokens, end.decayed, now=fraction * curve.tokens)
            said.append("-" if interval is None else str(interval))
            if interval is not None:
                is_held = interval.low <= end.length <= interval.high
                width = (interval.high - interval.low) / interval.value
                error = abs(math.log(interval.value / end.length))
                found[fraction].append((is_held, width, error))
        cells = "".join(f"{cell:>21}" for cell in said)
        print(f"{name:<14}{curve.tokens:>8}{end.length:>6.2f}{cells}")
    for fraction, runs in found.items():
        print(f"{fraction:>6.0%} {summary(runs)}")
    print(f"all    {summary([run for runs in found.values() for run in runs])}")


def summary(runs: Sequence[tuple[bool, float, float]]) -> str:
    """Format the coverage, median width and median error of (covered, width, error) tuples."""
    if not runs:
        return "no run has enough points"
    held, widths, errors = zip(*runs, strict=True)
    return (
        f"{sum(held)} of {len(held)} intervals hold the end; median width "
        f"{statistics.median(widths):.0%} of the forecast, median error "
        f"{statistics.median(errors):.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", help="names, with commas")
    parser.add_argument("--measure", action="store_true", help="train nothing")
    args = parser.parse_args()
    if args.measure:
        write_curves(args.out)
        for kind in ("decoded", "expected"):
            measure(kind)
        return
    for name in args.only.split(",") if args.only else RUNS:
        train(name, args.out)


if __name__ == "__main__":
    main()
