"""Text tables for every report, in Markdown or for the terminal, and manifest.json as lines."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from msgspec import UNSET, UnsetType

from ..errors import flag_name, one_line
from .metrics import AUTOREGRESSIVE, OVERALL
from .record import (
    AcceptanceLength,
    EntropyRecord,
    GroupRecord,
    LatencyRecord,
    Manifest,
    RateRecord,
    RunRecord,
    is_known,
)
from .tasks import FORMS

Cell = Callable[[RunRecord], str]
Entry = TypeVar("Entry")
NUM_POSITIONS = 6
MAX_SPREAD = 1.1
"""Repeats' fastest over slowest tokens/s; a larger ratio is told."""
LEGEND = {
    "n, T, W, tree": "stages; temperature; tree width; what is drafted at once (chain:levels, "
    "dynamic:levels:beams:tokens, or micro-batch:tokens).",
    "N, K": "tokens after the prefill token; pipeline steps (idle and rejecting ones counted).",
    "alpha, tau": "accepted over tested draft tokens; tokens per round.",
    "L'": "n N / K, the equivalent acceptance length. Pooled: n sum(N) / sum(K) with its 95 % "
    "bootstrap interval over conversations. Mean: over conversations. Benchmark mean: over "
    "benchmarks, each pooled. Autoregressive decoding has L' = 1 for every n by construction.",
    "S": "modeled speed-up under the engine's cost model.",
    "tokens/s, speed-up": "measured in this process without the prefill; over the baseline's.",
    "lossless": "turns, of those checked, whose greedy output equals that of `transformers`. At T "
    "> 0 by the rule gumbel, and with --bitwise, it is compared with the baseline's. In half "
    "precision without --bitwise near-ties may fall differently.",
    "score": "(with --score) share of right answers with its 95 % Wilson interval.",
}
ROW_COST_TEXT = """\
Modeled speed-up S where every row after a segment's first makes a stage longer by this part of its
time. Draft tokens that were chosen by the cost of a row (auto) have the run's own cost alone.
"""
TESTED = "Share accepted of the draft tokens tested, with 95 % intervals over prompts,"
POSITION_TEXT = f"{TESTED} as first, second, ... of their round."
ENTROPY_TEXT = f"{TESTED} where the target's distribution has so many nats."
GROUP_TEXT = f"""\
{TESTED} and tokens per round, by the context's tokens, the place in the answer, the answer's
language, the kind of text, and the unigram entropy (nats) of the 64 tokens before. A round is of
its first token's group.
"""
REPEATS_TEXT = "Decoded several times with the same random numbers: only the speed differs."
PROCESS_TEXT = "Seconds that each process spent on each kind of work, over all prompts."
CATEGORY_TEXT = "Acceptance and L' of each category of prompts, with 95 % intervals over prompts."


@dataclass(frozen=True)
class Table:
    """Header and cells of a table."""

    header: list[str]
    rows: list[list[str]]

    @classmethod
    def of(cls, columns: Mapping[str, Callable[[Entry], str]], entries: Iterable[Entry]) -> "Table":
        """Build one line per entry. ``columns`` maps names to functions from entry to cell."""
        rows = [[one_line(cell(entry)) for cell in columns.values()] for entry in entries]
        return cls(list(columns), rows)


def align_columns(table: Table) -> str:
    """Return the table as text with aligned columns, numbers to the right."""
    rows = [table.header, *table.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        padded = [
            text.ljust(width) if name in TEXT_COLUMNS else text.rjust(width)
            for name, text, width in zip(table.header, row, widths, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


def markdown(table: Table) -> str:
    align = [":--" if name in TEXT_COLUMNS else "--:" for name in table.header]
    rows = [[cell.replace("|", "\\|") for cell in row] for row in table.rows]
    lines = [table.header, align, *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def number(value: float | None | UnsetType, digits: int = 3) -> str:
    return f"{value:.{digits}f}" if is_known(value) else "-"


def bounds(interval: Sequence[float | None], digits: int = 3) -> str:
    low, high = interval
    return f"[{low:.{digits}f}, {high:.{digits}f}]" if is_known(low) and is_known(high) else "-"


def estimate(value: float | None, interval: Sequence[float | None], digits: int = 3) -> str:
    """Return a number with its interval, if there is one."""
    return f"{number(value, digits)} {bounds(interval, digits)}".removesuffix(" -")


def _rate(part: RateRecord) -> str:
    return estimate(part.draft_acceptance_rate, part.draft_acceptance_rate_ci95)


def _length(length: AcceptanceLength) -> str:
    return estimate(length.pooled, length.ci95)


def lossless_share(run: RunRecord | LatencyRecord) -> str:
    checked = run.lossless.checked
    return f"{checked - run.lossless.mismatches}/{checked}" if checked else "-"


def _score(run: RunRecord) -> str:
    score = run.score
    return "-" if score is UNSET else estimate(score.mean, score.ci95, 2)


SETTING_COLUMNS: dict[str, Cell] = {
    "method": lambda run: run.method,
    "n": lambda run: str(run.stages),
    "T": lambda run: run.sampling,
    "W": lambda run: str(run.tree_width),
    "tree": lambda run: run.tree or "-",
}
"""Columns that identify an entry within its benchmark."""
COLUMNS: dict[str, Cell] = {
    **SETTING_COLUMNS,
    "prompts": lambda run: str(run.prompts),
    "N": lambda run: str(run.tokens),
    "K": lambda run: str(run.steps),
    "alpha": lambda run: number(run.draft_acceptance_rate),
    "tau": lambda run: number(run.mean_acceptance_length),
    "L' pooled": lambda run: number(run.equivalent_acceptance_length.pooled),
    "95 % CI": lambda run: bounds(run.equivalent_acceptance_length.ci95),
    "L' mean": lambda run: number(run.equivalent_acceptance_length.mean),
    "S": lambda run: number(run.theoretical_speedup),
    "tokens/s": lambda run: number(run.wallclock.tokens_per_s if run.wallclock else None, 1),
    "speed-up": lambda run: number(run.wallclock.speedup if run.wallclock else None, 2),
    "lossless": lossless_share,
}
TEXT_COLUMNS = {"benchmark", "method", "category", "of", "run", "network", "process"}
TEXT_COLUMNS |= {"group", "domain", "target", "scope", "panel", "series", "place"}
"""Text columns; the others contain numbers."""


def _named(runs: Sequence[RunRecord], columns: dict[str, Cell]) -> dict[str, Cell]:
    has_folders = any(run.folder for run in runs)
    return {"run": lambda run: run.folder, **columns} if has_folders else columns


def with_scores(columns: dict[str, Cell], runs: Sequence[RunRecord]) -> dict[str, Cell]:
    return columns | {"score": _score} if any(run.score is not UNSET for run in runs) else columns


def results_table(runs: Sequence[RunRecord], *, with_benchmark: bool = False) -> Table:
    """Return the results table, with one row per run."""
    columns = _named(runs, with_scores(COLUMNS, runs))
    if any(run.benchmark == OVERALL for run in runs):
        columns = columns | {"L' benchmark mean": lambda run: number(run.benchmark_mean)}
    if with_benchmark:
        columns = {"benchmark": lambda run: run.benchmark, **columns}
    return Table.of(columns, runs)


def entropy_range(entropy_bin: EntropyRecord) -> str:
    low, high = entropy_bin.entropy_from, entropy_bin.entropy_to
    return f"{low:g} to {high:g}" if is_known(high) else f"{low:g} up"


def pooled_runs(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the "overall" entries, or all entries if there is only one benchmark."""
    return [run for run in runs if run.benchmark == OVERALL] or list(runs)


def drafted_runs(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Return entries with a draft."""
    return [run for run in runs if run.schedule != AUTOREGRESSIVE and run.rounds]


class Detail(NamedTuple):
    """A table below the results, in report.md and on the page."""

    title: str
    text: str
    table: Table


def _part_table(
    runs: Sequence[RunRecord],
    header: Sequence[str],
    lines: Callable[[RunRecord], Iterable[list[str]]],
) -> Table:
    """Build a table with several lines per run, each starting with the run's own columns."""
    settings = Table.of(_named(runs, SETTING_COLUMNS), runs)
    pairs = zip(settings.rows, runs, strict=True)
    rows = [setting + line for setting, run in pairs for line in lines(run)]
    return Table([*settings.header, *header], rows)


def row_cost_table(runs: Sequence[RunRecord]) -> Table:
    priced = [run for run in runs if run.theoretical_speedup_by_row]
    costs = sorted({cost for run in priced for cost in run.theoretical_speedup_by_row}, key=float)
    return _part_table(
        priced,
        costs,
        lambda run: [[number(run.theoretical_speedup_by_row.get(cost)) for cost in costs]],
    )


def position_table(runs: Sequence[RunRecord]) -> Table:
    """Return the acceptance rate for the first, second, ... token in a round."""

    def cells(run: RunRecord) -> list[str]:
        rates = zip(run.acceptance_by_position, run.acceptance_by_position_ci95, strict=False)
        found = [estimate(rate, interval, 2) for rate, interval in rates]
        return [*found, *["-"] * NUM_POSITIONS][:NUM_POSITIONS]

    header = [str(j + 1) for j in range(NUM_POSITIONS)]
    return _part_table(runs, header, lambda run: [cells(run)])


def category_table(runs: Sequence[RunRecord]) -> Table:
    return _part_table(
        runs,
        ["category", "prompts", "alpha", "L' pooled"],
        lambda run: [
            [name, str(part.prompts), _rate(part), _length(part.equivalent_acceptance_length)]
            for name, part in run.acceptance_by_category.items()
        ],
    )


def entropy_table(runs: Sequence[RunRecord]) -> Table:
    return _part_table(
        runs,
        ["nats", "tests", "alpha"],
        lambda run: [
            [entropy_range(part), str(part.tests), _rate(part)]
            for part in run.acceptance_by_entropy
        ],
    )


GROUP_COLUMNS: dict[str, Callable[[GroupRecord], str]] = {
    "group": lambda part: part.group,
    "prompts": lambda part: str(part.prompts),
    "tests": lambda part: str(part.tests),
    "alpha": _rate,
    "tau": lambda part: number(part.mean_acceptance_length),
}


def group_table(runs: Sequence[RunRecord]) -> Table:
    return _part_table(
        runs,
        list(GROUP_COLUMNS),
        lambda run: Table.of(GROUP_COLUMNS, run.acceptance_by_group).rows,
    )


def repeats_table(runs: Sequence[RunRecord]) -> Table:
    return _part_table(
        runs,
        ["repeats", "tokens/s of each", "turns that differ"],
        lambda run: [
            [str(part.repeats), " ".join(number(speed, 2) for speed in part.tokens_per_s)]
            + [str(part.unequal_turns)]
            for part in [run.repeats]
            if part is not UNSET
        ],
    )


def process_table(runs: Sequence[RunRecord]) -> Table:
    kinds = list(dict.fromkeys(k for run in runs for p in run.processes for k in p.seconds))
    return _part_table(
        runs,
        ["process", *(f"{kind} s" for kind in kinds), "peak MB"],
        lambda run: [
            [part.name, *(number(part.seconds.get(kind), 2) for kind in kinds)]
            + [number(part.peak_rss_mb, 0)]
            for part in run.processes
        ],
    )


def details(runs: Sequence[RunRecord]) -> list[Detail]:
    """Return the tables with further measurements, which follow the results table."""
    pooled = pooled_runs(runs)
    drafted = drafted_runs(pooled)
    found = [
        Detail("S by the cost of a row", ROW_COST_TEXT, row_cost_table(drafted)),
        Detail("Acceptance by position", POSITION_TEXT, position_table(drafted)),
        Detail("Acceptance by entropy", ENTROPY_TEXT, entropy_table(drafted)),
        Detail("Acceptance by group", GROUP_TEXT, group_table(drafted)),
        Detail("Repeats", REPEATS_TEXT, repeats_table(pooled)),
        Detail("Processes", PROCESS_TEXT, process_table(pooled)),
    ]
    varied = [run for run in drafted_runs(runs) if len(run.acceptance_by_category) > 1]
    for name in dict.fromkeys(run.benchmark for run in varied if run.benchmark != OVERALL):
        table = category_table([run for run in varied if run.benchmark == name])
        found.append(Detail(f"{name} by category", CATEGORY_TEXT, table))
    return [detail for detail in found if detail.table.rows]


def choices(runs: Sequence[RunRecord]) -> list[str]:
    """Return a line for every draft shape that the evaluation chose itself."""
    lines = []
    for run in runs:
        if run.chosen is UNSET:
            continue
        speeds = ", ".join(f"{name} {number(x, 1)}" for name, x in run.chosen.tokens_per_s.items())
        timed = f"the fastest draft in first rounds (tokens/s: {speeds})"
        why = timed if speeds else "not timed, so that all shares decode alike"
        lines.append(f"{run.method}, T={run.sampling}: {run.chosen.tree} is {why}.")
    return list(dict.fromkeys(lines))


def slower_drafts(runs: Sequence[RunRecord]) -> list[str]:
    """Return a line for every draft that lost time, and the shape that was faster, if any was."""
    lines = []
    for run in pooled_runs(runs):
        speedup = run.speedup
        if run.schedule == AUTOREGRESSIVE or speedup is None or speedup >= 1:
            continue
        who = f"{run.method}, {run.shape}, T={run.sampling}"
        if run.in_turns:
            lines.append(
                f"{who}: read L', not the speed-up: one process ran the {run.stages} stages one "
                f"after the other; --backend process --processes {run.stages} runs them at once."
            )
            continue
        alike = (run.benchmark, run.checkpoint, run.sampling)
        others = [x for x in runs if (x.benchmark, x.checkpoint, x.sampling) == alike]
        best = max(others, key=lambda x: 0.0 if x.in_turns else x.speedup or 0.0)
        lines.append(
            f"{who}: the draft costs more than it saves here ({speedup:.2f})"
            + (f"; {best.shape} ran at {best.speedup:.2f}." if (best.speedup or 0.0) > 1 else ".")
        )
    return list(dict.fromkeys(lines))


def _unsteady(runs: Sequence[RunRecord]) -> list[str]:
    """Return warnings about times on a machine with other work."""
    lines = []
    clocks = [run.wallclock for run in runs if run.wallclock and run.wallclock.is_busy]
    if clocks:
        load = max(clock.load_average or 0.0 for clock in clocks)
        lines.append(
            f"The machine was busy (load average {load:.1f} on {clocks[0].cores} cores): tokens/s "
            "and speed-ups may be wrong; measure again on an idle machine, with --fresh."
        )
    for run in runs:
        speeds = [] if run.repeats is UNSET else [x for x in run.repeats.tokens_per_s if x]
        if speeds and max(speeds) > MAX_SPREAD * min(speeds):
            lines.append(
                f"{run.benchmark}, {run.method}, T={run.sampling}: repeats ran at "
                f"{min(speeds):.1f} to {max(speeds):.1f} tokens/s, so the machine's speed changed."
            )
    return lines


def warnings(runs: Sequence[RunRecord]) -> list[str]:
    """Return warnings to read before trusting the numbers."""
    lines = _unsteady(runs)
    if own := dict.fromkeys(run.benchmark for run in runs if run.benchmark in FORMS):
        forms = ", ".join(FORMS[name] for name in own)
        lines.append(
            f"{', '.join(own)}: prompts written for pipedraft in the form of {forms}, not these "
            "benchmarks; --data-dir reads theirs."
        )
    for run in (run for run in runs if run.benchmark != OVERALL):
        where = f"{run.benchmark}, {run.method}, T={run.sampling}"
        mismatches = run.lossless.mismatches
        # Counted only in half precision: in float32 every difference is a fault.
        faults = mismatches if run.lossless.faults is UNSET else run.lossless.faults
        if faults:
            lines.append(f"Not lossless ({where}): {lossless_share(run)} turns agree.")
        if mismatches > faults:
            lines.append(
                f"{where}: {mismatches - faults} outputs differ from the target's own where "
                f"rounding alone decides (margins within {run.lossless.noise:.2g} nats; so close "
                f"are {run.lossless.near_ties} of {run.lossless.positions} places)."
            )
        if run.skipped_turns:
            lines.append(
                f"{where}: {run.skipped_turns} turns left out, their prompt is longer than "
                "the target's context allows."
            )
        score = run.score
        if score is not UNSET and score.cut:
            lines.append(
                f"{where}: {score.cut} of {score.scored} scored answers did not end before "
                "--max-new-tokens or the target's context."
            )
    return lines


# -- manifest.json as named lines of text; missing facts are left out ------------------------------


def fact(manifest: Manifest, *path: str) -> Any:
    """Return the value at a path in the manifest, or None if it was not recorded."""
    value: Any = manifest
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def describe(manifest: Manifest) -> list[tuple[str, str]]:
    """Return facts (name, value) needed to repeat a run, or to tell two runs apart."""
    found: list[tuple[str, str]] = []
    for name, value in manifest.items():
        if isinstance(value, dict) and name != "config":
            found += [(f"{name} {inner}", text) for inner, text in describe(value)]
        elif value not in (None, "") and not isinstance(value, dict | list):
            found.append((name, str(value)))
    return found


def given_options(manifest: Manifest) -> list[tuple[str, str]]:
    """Return the command's resolved options, without empty ones."""
    config = fact(manifest, "config")
    return [
        (flag_name(name), str(value))
        for name, value in (config.items() if isinstance(config, dict) else ())
        if value not in (None, [], False)
    ]
