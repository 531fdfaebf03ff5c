"""Print an evaluation's table in less than 100 columns, and check its output folder."""

import json
from collections.abc import Sequence
from pathlib import Path

from ..errors import UsageError, flag_name
from ..files import Values, to_json
from . import tables
from .record import RunRecord
from .tables import Cell, Table, align_columns, number

WIDTH = 99
LONGEST_NAME = 28
LEAST_TOLD = ("S", "95 % CI", "alpha")
"""Columns dropped from the terminal, in this order, when a line is too long; the report has them.
tau and the speed-up stay: they are read first."""
MEANINGS = {
    "tau": "tau: tokens per verification round",
    "L'": "L': n times tokens over pipeline steps",
    "S": "S: modeled speed-up",
    "speed-up": "speed-up: measured tokens/s over the baseline's",
}
"""Legend under the table, by column."""
ANY_RUN = {"fresh", "shard", "calibrate", "save_answers", "out", "config", "no_lossless"}
ANY_RUN |= {"concurrency", "attempts", "deadline", "key_variable"}
"""Options that may differ between results in one folder."""


def _name(run: RunRecord) -> str:
    name = run.method
    return name if len(name) <= LONGEST_NAME else f"...{name[3 - LONGEST_NAME :]}"


def _interval(run: RunRecord) -> str:
    low, high = (number(bound, 2) for bound in run.equivalent_acceptance_length.ci95)
    return "-" if low == "-" else f"{low}-{high}"


COLUMNS: dict[str, Cell] = {
    "benchmark": lambda run: run.benchmark,
    "method": _name,
    "n": tables.COLUMNS["n"],
    "T": tables.COLUMNS["T"],
    "shape": lambda run: run.tree or ("-" if run.tree_width < 2 else f"width {run.tree_width}"),
    "alpha": lambda run: number(run.draft_acceptance_rate, 2),
    "tau": lambda run: number(run.mean_acceptance_length, 2),
    "L'": lambda run: number(run.equivalent_acceptance_length.pooled, 2),
    "95 % CI": _interval,
    "S": lambda run: number(run.theoretical_speedup, 2),
    "tokens/s": tables.COLUMNS["tokens/s"],
    "speed-up": tables.COLUMNS["speed-up"],
    "lossless": tables.COLUMNS["lossless"],
}


def screen_table(runs: Sequence[RunRecord]) -> str:
    """Return the results for a terminal, benchmark by benchmark, with common settings above."""
    benchmarks = list(dict.fromkeys(run.benchmark for run in runs))
    runs = sorted(runs, key=lambda run: benchmarks.index(run.benchmark))
    whole = Table.of(tables.with_scores(COLUMNS, runs), runs)
    cells = dict(zip(whole.header, zip(*whole.rows, strict=True), strict=True))
    same = [name for name in ("n", "T", "shape") if len(set(cells[name])) == 1]
    above = ", ".join(f"{name} = {cells[name][0]}" for name in same if cells[name][0] != "-")
    empty = [name for name in ("S", "tokens/s", "speed-up") if set(cells[name]) == {"-"}]
    too_wide: list[str] = []
    for further in ("", *LEAST_TOLD):
        too_wide += [further] * (further in cells and further not in empty)
        left_out = {*same, *empty, *too_wide}
        kept = {name: column for name, column in cells.items() if name not in left_out}
        table = Table(list(kept), [list(row) for row in zip(*kept.values(), strict=True)])
        text = align_columns(table)
        if max(map(len, text.splitlines())) <= WIDTH:
            break
    notes = tables.warnings(runs)
    notes.append("; ".join(text for name, text in MEANINGS.items() if name in kept) + ".")
    if too_wide:
        notes.append(f"Left out, as the line is full: {', '.join(too_wide)}; the report has them.")
    notes += [*tables.choices(runs), *tables.slower_drafts(runs)]
    if "tokens/s" in empty:
        notes.append(
            "No tokens/s: decoded beside other work, several sequences at once, or by a server "
            "that tells no times."
        )
    return "\n".join([above] * bool(above) + [text, *notes])


def check_folder(out: Path, config: Values, *, is_fresh: bool) -> None:
    """Raise UsageError if ``out`` contains results from other settings.

    Args:
        is_fresh: accept every folder, because its old results will be replaced.
    """
    try:
        held = json.loads((out / "manifest.json").read_bytes())["config"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if is_fresh or not isinstance(held, dict):
        return
    now = json.loads(to_json(config))
    # Other commands lack the option, and share other options with the same values.
    for name in {*(now.keys() & held.keys() - ANY_RUN), "endpoint"}:
        old, new = held.get(name), now.get(name)
        is_same_device = name == "device" and "auto" in (new, old)
        if new != old and not is_same_device:
            raise UsageError(
                f"--out: {str(out)!r} holds another evaluation ({flag_name(name)} was "
                f"{old}, is {new}); give another folder, or --fresh, which replaces it"
            )
