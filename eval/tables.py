"""Text tables for every report, in Markdown or for the terminal, and manifest.json as lines."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from msgspec import UNSET, UnsetType

from pipedraft.eval.groups import group_name
from pipedraft.eval.metrics import AUTOREGRESSIVE, OVERALL
from pipedraft.eval.record import EntropyRecord, LatencyRecord, Manifest, RunRecord, is_known
from pipedraft.eval.tasks import FORMS
from pipedraft.inference.config import COST_PRESETS

Cell = Callable[[RunRecord], str]
Entry = TypeVar("Entry")
HISTOGRAM_LENGTHS = 8
NUM_POSITIONS = 6
LEGEND = """\
- **n** pipeline stages of the target, **T** temperature, **W** tree width (draft tokens per layer,
  children of the root, or branches of a micro-batch), **tree** what is drafted at once
  (chain:levels, dynamic:levels:beams:tokens, or micro-batch:tokens), **N** tokens after the prefill
  token, **K** pipeline steps (idle and rejecting ones counted).
- **alpha** accepted over tested draft tokens; **tau** tokens per round.
- **L'** = n N / K, the equivalent acceptance length: *pooled* is n sum(N) / sum(K) with its 95 %
  bootstrap interval over conversations, *mean* the average over conversations, *benchmark mean* the
  average over benchmarks, each pooled. Autoregressive decoding has L' = 1 by construction for
  every n, so it is decoded once per temperature, on the smallest n of the table.
- **S** modeled speed-up under the engine's cost model. **tokens/s** and **speed-up** are measured
  in this process (prefill excluded), the latter against the autoregressive row. The three
  measures are different things and must not be compared with each other.
- **lossless** turns whose greedy output equals that of `transformers`, of turns checked; at T > 0,
  by the rule gumbel, and with --bitwise that of plain decoding with the same seed. It is exact for
  a target in float32 and with --bitwise; in half precision without, near-ties may fall differently,
  and sampled outputs are not compared.
"""
SCORE_LEGEND = """\
- **score** share of right answers (last number, GSM8K) with its 95 % Wilson interval. Lossless
  decoding leaves it as the target's own.
"""
HISTOGRAM_TEXT = "Share of rounds that emitted so many tokens, the target's own one included."
CATEGORY_TEXT = "Acceptance and L' of each category of prompts, with 95 % intervals over prompts."
ROW_COST_TEXT = (
    "Modeled speed-up S where every row after a segment's first makes a stage longer by this part "
    "of its time: the steps of the run, priced again. Draft tokens that were chosen by the cost of "
    "a row (auto) have the run's own cost alone. The presets' costs: "
    + ", ".join(f"{name} {cost.row:.2g}" for name, cost in COST_PRESETS.items())
    + "."
)
POSITION_TEXT = """\
Share accepted of the draft tokens tested as first, second, ... of their round, with 95 % intervals
over prompts.
"""
ENTROPY_TEXT = """\
Share accepted of the draft tokens tested where the target's distribution has so many nats, with
95 % intervals over prompts.
"""
GROUP_TEXT = """\
Share accepted of the draft tokens tested, and tokens per round, where the context has so many
tokens, the answer is in a language, or the text is of a kind: in fences, thinking, a tool call. A
round is of its first token's group. 95 % intervals over prompts.
"""
REPEATS_TEXT = """\
Everything was decoded several times with the same random numbers: only the machine's speed differs.
"""
PROCESS_TEXT = """\
Seconds that each process spent on each kind of work, over all prompts.
"""


@dataclass(frozen=True)
class Table:
    """Header and cells of a table."""

    header: list[str]
    rows: list[list[str]]

    @classmethod
    def of(cls, columns: Mapping[str, Callable[[Entry], str]], entries: Iterable[Entry]) -> "Table":
        """Build one line per entry.

        Args:
            columns: name -> function from an entry to its cell.
        """
        rows = [[cell(entry) for cell in columns.values()] for entry in entries]
        return cls(list(columns), rows)


def align_columns(table: Table) -> str:
    """Return equally wide columns for the terminal, numbers to the right."""
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


def _wallclock(run: RunRecord, key: str, digits: int) -> str:
    return "-" if run.wallclock is None else number(getattr(run.wallclock, key), digits)


def lossless_share(run: RunRecord | LatencyRecord) -> str:
    checked = run.lossless.checked
    return f"{checked - run.lossless.mismatches}/{checked}" if checked else "-"


def _score(run: RunRecord) -> str:
    score = run.score
    return "-" if score is UNSET else f"{number(score.mean)} {bounds(score.ci95, 2)}"


RUN_COLUMN: dict[str, Cell] = {"run": lambda run: run.folder}
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
    "tokens/s": lambda run: _wallclock(run, "tokens_per_s", 1),
    "speed-up": lambda run: _wallclock(run, "speedup", 2),
    "lossless": lossless_share,
}
SCORE_COLUMN: dict[str, Cell] = {"score": _score}
MEAN_COLUMN: dict[str, Cell] = {"L' benchmark mean": lambda run: number(run.benchmark_mean)}
TEXT_COLUMNS = {"benchmark", "method", "category", "of", "run", "network", "process"}
TEXT_COLUMNS |= {"group", "domain", "target", "scope"}
"""Text columns; the others contain numbers."""


def _is_scored(runs: Sequence[RunRecord]) -> bool:
    return any(run.score is not UNSET for run in runs)


def legend(runs: Sequence[RunRecord]) -> str:
    return LEGEND + (SCORE_LEGEND if _is_scored(runs) else "")


def _named(runs: Sequence[RunRecord], columns: dict[str, Cell]) -> dict[str, Cell]:
    return (RUN_COLUMN if any(run.folder for run in runs) else {}) | columns


def _setting(runs: Sequence[RunRecord]) -> tuple[list[str], list[list[str]]]:
    """Return header and cells that identify each entry."""
    table = Table.of(_named(runs, SETTING_COLUMNS), runs)
    return table.header, table.rows


def results_table(runs: Sequence[RunRecord], *, with_benchmark: bool = False) -> Table:
    """Return the results table: one row per run.

    Args:
        with_benchmark: for entries from several benchmarks.
    """
    columns = COLUMNS | (SCORE_COLUMN if _is_scored(runs) else {})
    if any(run.benchmark == OVERALL for run in runs):
        columns |= MEAN_COLUMN
    if with_benchmark:
        columns = {"benchmark": lambda run: run.benchmark, **columns}
    return Table.of(_named(runs, columns), runs)


def histogram_table(runs: Sequence[RunRecord]) -> Table:
    """Return the share of rounds that emitted j tokens."""
    lengths = [str(j) for j in range(HISTOGRAM_LENGTHS + 1)] + [f"> {HISTOGRAM_LENGTHS}"]
    header, rows = _setting(runs)
    for row, run in zip(rows, runs, strict=True):
        counts = run.acceptance_histogram
        head = counts[: HISTOGRAM_LENGTHS + 1]
        head = head + [0] * (HISTOGRAM_LENGTHS + 1 - len(head))
        row += [f"{n / run.rounds:.3f}" for n in (*head, sum(counts[HISTOGRAM_LENGTHS + 1 :]))]
    return Table(header + lengths, rows)


def row_cost_table(runs: Sequence[RunRecord]) -> Table:
    """Return S by the cost per row."""
    costs = sorted({cost for run in runs for cost in run.theoretical_speedup_by_row}, key=float)
    header, rows = _setting(runs)
    for row, run in zip(rows, runs, strict=True):
        row += [number(run.theoretical_speedup_by_row.get(cost)) for cost in costs]
    return Table(header + costs, rows)


def position_table(runs: Sequence[RunRecord]) -> Table:
    """Return the acceptance rate for the first, second, ... token in a round."""
    header, rows = _setting(runs)
    for row, run in zip(rows, runs, strict=True):
        rates = run.acceptance_by_position[:NUM_POSITIONS]
        row += [
            f"{number(rate, 2)} {bounds(interval, 2)}".removesuffix(" -")
            for rate, interval in zip(rates, run.acceptance_by_position_ci95, strict=False)
        ]
        row += ["-"] * (NUM_POSITIONS - len(rates))
    return Table(header + [str(j + 1) for j in range(NUM_POSITIONS)], rows)


def has_categories(run: RunRecord) -> bool:
    """Return True if a benchmark's prompts have several categories.

    Return False for entries pooled over benchmarks, because each benchmark has its own entry.
    """
    drafted = run.schedule != AUTOREGRESSIVE and run.benchmark != OVERALL
    return drafted and len(run.acceptance_by_category) > 1


def category_table(runs: Sequence[RunRecord]) -> Table:
    header, settings = _setting(runs)
    rows = []
    for setting, run in zip(settings, runs, strict=True):
        for name, category in run.acceptance_by_category.items():
            length = category.equivalent_acceptance_length
            rows.append(
                setting
                + [name, str(category.prompts), number(category.draft_acceptance_rate)]
                + [bounds(category.draft_acceptance_rate_ci95), number(length.pooled)]
                + [bounds(length.ci95)]
            )
    return Table([*header, "category", "prompts", "alpha", "95 % CI", "L' pooled", "95 % CI"], rows)


def entropy_range(entropy_bin: EntropyRecord) -> str:
    low, high = entropy_bin.entropy_from, entropy_bin.entropy_to
    return f"{low:g} to {high:g}" if is_known(high) else f"{low:g} up"


def entropy_table(runs: Sequence[RunRecord]) -> Table:
    """Return acceptance by the target's entropy in nats."""
    header, settings = _setting(runs)
    rows = [
        [*setting, entropy_range(found), str(found.tests)]
        + [number(found.draft_acceptance_rate), bounds(found.draft_acceptance_rate_ci95)]
        for setting, run in zip(settings, runs, strict=True)
        for found in run.acceptance_by_entropy
    ]
    return Table([*header, "nats", "tests", "alpha", "95 % CI"], rows)


def group_table(runs: Sequence[RunRecord]) -> Table:
    """Return acceptance by text group."""
    header, settings = _setting(runs)
    rows = [
        [*setting, group_name(found.group), str(found.prompts), str(found.tests)]
        + [number(found.draft_acceptance_rate), bounds(found.draft_acceptance_rate_ci95)]
        + [number(found.mean_acceptance_length)]
        for setting, run in zip(settings, runs, strict=True)
        for found in run.acceptance_by_group
    ]
    return Table([*header, "group", "prompts", "tests", "alpha", "95 % CI", "tau"], rows)


def repeats_table(runs: Sequence[RunRecord]) -> Table:
    """Return tokens per second for every repeat."""
    header, settings = _setting(runs)
    rows = []
    for setting, run in zip(settings, runs, strict=True):
        found = run.repeats
        assert found is not UNSET
        speeds = " ".join(number(speed, 2) for speed in found.tokens_per_s)
        rows.append([*setting, str(found.repeats), speeds, str(found.unequal_turns)])
    return Table([*header, "repeats", "tokens/s of each", "turns that differ"], rows)


def process_table(runs: Sequence[RunRecord]) -> Table:
    """Return the seconds each process spent on each kind of work."""
    header, settings = _setting(runs)
    kinds = list(dict.fromkeys(k for run in runs for p in run.processes for k in p.seconds))
    rows = [
        [*setting, process.name, *(number(process.seconds.get(kind), 2) for kind in kinds)]
        + [number(process.peak_rss_mb, 0)]
        for setting, run in zip(settings, runs, strict=True)
        for process in run.processes
    ]
    return Table([*header, "process", *(f"{kind} s" for kind in kinds), "peak MB"], rows)


def pooled_runs(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the entries over all benchmarks: "overall", or the only benchmark's own."""
    return [run for run in runs if run.benchmark == OVERALL] or list(runs)


def drafted_runs(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Return entries with a draft."""
    return [run for run in runs if run.schedule != AUTOREGRESSIVE and run.rounds]


class Detail(NamedTuple):
    """A table below the results, in report.md and on the page."""

    title: str
    text: str
    table: Table


def details(runs: Sequence[RunRecord]) -> list[Detail]:
    """Return tables of further records in the entries, besides the results."""
    pooled = pooled_runs(runs)
    drafted = drafted_runs(pooled)
    priced = [run for run in drafted if run.theoretical_speedup_by_row]
    counted = [run for run in drafted if run.acceptance_by_entropy]
    grouped = [run for run in drafted if run.acceptance_by_group]
    repeated = [run for run in pooled if run.repeats is not UNSET]
    timed = [run for run in pooled if run.processes]
    found = [
        Detail(title, text, make(chosen))
        for title, text, make, chosen in (
            ("Tokens per round", HISTOGRAM_TEXT, histogram_table, drafted),
            ("S by the cost of a row", ROW_COST_TEXT, row_cost_table, priced),
            ("Acceptance by position", POSITION_TEXT, position_table, drafted),
            ("Acceptance by entropy", ENTROPY_TEXT, entropy_table, counted),
            ("Acceptance by group", GROUP_TEXT, group_table, grouped),
            ("Repeats", REPEATS_TEXT, repeats_table, repeated),
            ("Processes", PROCESS_TEXT, process_table, timed),
        )
        if chosen
    ]
    for name in dict.fromkeys(run.benchmark for run in runs):
        varied = [run for run in runs if run.benchmark == name and has_categories(run)]
        if varied:
            found.append(Detail(f"{name} by category", CATEGORY_TEXT, category_table(varied)))
    return found


def warnings(runs: Sequence[RunRecord]) -> list[str]:
    """Return warnings to read before trusting the numbers."""
    own = dict.fromkeys(run.benchmark for run in runs if run.benchmark in FORMS)
    lines = [
        f"{', '.join(own)}: prompts written for pipedraft in the form of "
        f"{', '.join(FORMS[name] for name in own)}, not these benchmarks; --data-dir reads theirs."
    ] * bool(own)
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
    """Return a value by its path; None if it was not recorded."""
    value: Any = manifest
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def describe(manifest: Manifest) -> list[tuple[str, str]]:
    """Return facts (name, value) needed to repeat a run, or to tell two runs apart."""

    def leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
        if isinstance(value, dict):
            for key, inner in value.items():
                yield from leaves(f"{name} {key}", inner)
        elif value not in (None, "") and not isinstance(value, list):
            yield name, str(value)

    facts = (leaves(name, value) for name, value in manifest.items() if name != "config")
    return [named for found in facts for named in found]


def given_options(manifest: Manifest) -> list[tuple[str, str]]:
    """Return the command's resolved options, without empty ones."""
    config = fact(manifest, "config")
    return [
        (f"--{name.replace('_', '-')}", str(value))
        for name, value in (config.items() if isinstance(config, dict) else ())
        if value not in (None, [], False)
    ]
