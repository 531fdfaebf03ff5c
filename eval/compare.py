"""Compare methods between runs prompt by prompt: `python -m pipedraft.eval compare --help`.

The input is the "per_prompt" rows in results.json; intervals.py computes the statistics.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from msgspec import UNSET

from pipedraft.cli import Options, UsageError, option
from pipedraft.eval.groups import group_name
from pipedraft.eval.intervals import PairedComparison, compare_paired
from pipedraft.eval.metrics import AUTOREGRESSIVE, ENTROPY_EDGES, OVERALL
from pipedraft.eval.record import Manifest, PromptRecord, RunRecord, parse, read_bytes, read_results
from pipedraft.eval.tables import Table, align_columns, bounds, fact
from pipedraft.files import make_place, to_json, write_atomically

EXAMPLE = """\
example:
  pipedraft eval compare out/eval out/other --json out/compared.json

Each method is compared with the baseline's method that has the same name, schedule, stages and
tree, or else with the most similar ones. Prompts are matched by id.
"""
LEGEND = """\
ratio: compared / baseline, pooled over the prompts, with a 95 % interval from a bootstrap over
prompts. If the interval contains 1, the runs do not differ measurably. tokens/s: a machine that was
slower during one run looks like a difference."""


# Fields shared by both entries in a comparison: the strictest match first, any entry last.
LIKENESS = (
    ("method", "schedule", "stages", "tree_width", "tree"),
    ("schedule", "stages", "tree_width", "tree"),
    ("method", "schedule", "tree_width", "tree"),
    ("schedule",),
    (),
)
# Numbers are hard to compare if these conditions differ. Values: paths in manifest.json.
CONDITIONS = {
    "target": ("target", "fingerprint", "hash"),
    "tokenizer": ("tokenizer", "sha256"),
    "dtype": ("dtype",),
    "--max-new-tokens": ("config", "max_new_tokens"),
    "--chat-template-kwargs": ("config", "chat_template_kwargs"),
}
MACHINE = {
    "processor": ("hardware", "processor"),
    "threads": ("hardware", "torch_threads"),
    "accelerator": ("hardware", "accelerator"),
    "--backend": ("config", "backend"),
}


@dataclass(frozen=True)
class Quantity:
    """Ratio of two sums over prompts: [n] sum(numerator) / sum(denominator)."""

    name: str
    label: str
    numerator: str
    denominator: str
    times_stages: bool = False
    place: int | None = None
    """Index to compare, for fields with lists; None: the field is a number."""
    group: str = ""
    """Text group for tokens per round."""

    def counts(self, row: PromptRecord) -> tuple[float, float] | None:
        """Return a prompt's numerator and denominator; None if it did not record them."""
        if self.group and row.groups is not UNSET:
            *_, rounds, tokens = row.groups.get(self.group, [0] * 4)
            return tokens, rounds
        fields = getattr(row, self.numerator), getattr(row, self.denominator)
        if UNSET in fields:
            return None
        return fields if self.place is None else (fields[0][self.place], fields[1][self.place])


QUANTITIES = (
    Quantity("equivalent_acceptance_length", "L'", "tokens", "steps", times_stages=True),
    Quantity("theoretical_speedup", "S", "virtual_time_autoregressive", "virtual_time"),
    Quantity("tokens_per_s", "tokens/s", "tokens", "decode_s"),
)
WALLCLOCK = QUANTITIES[-1]
SPEEDS = QUANTITIES[:-1]
BY_ENTROPY = tuple(
    Quantity(
        f"draft_acceptance_rate from {low:g} nats",
        f"alpha, {low:g} nats",
        "entropy_accepts",
        "entropy_tests",
        place=place,
    )
    for place, low in enumerate(ENTROPY_EDGES)
)


def by_group(entries: Iterable[RunRecord]) -> list[Quantity]:
    """Return tokens per round for every group in any entry."""
    names = dict.fromkeys(found.group for entry in entries for found in entry.acceptance_by_group)
    return [
        Quantity(f"tokens per round, {x}", f"tau, {group_name(x)}", "groups", "groups", group=x)
        for x in names
    ]


def has(quantity: Quantity, entry: RunRecord) -> bool:
    """Return True if every prompt recorded the quantity, and the denominator's sum is positive."""
    counts = [quantity.counts(row) for row in entry.per_prompt]
    return None not in counts and sum(count[1] for count in counts if count) > 0


@dataclass(frozen=True)
class Evaluated:
    """An evaluation's output folder."""

    folder: Path
    entries: list[RunRecord]
    manifest: Manifest

    @classmethod
    def read(cls, folder: Path) -> "Evaluated":
        entries, path = read_results("RUN", folder).entries, folder / "manifest.json"
        return cls(folder, entries, parse(read_bytes("RUN", path), dict, f"RUN: {str(path)!r}"))


def _rows_by_id(entry: RunRecord) -> dict[tuple[str, str], PromptRecord]:
    return {(row.benchmark, row.id): row for row in entry.per_prompt}


@dataclass(frozen=True)
class Line:
    """One quantity for a method in one run, compared with the baseline run."""

    baseline: RunRecord
    compared: RunRecord
    quantity: Quantity
    left_out: int
    """Number of prompts in only one of the two runs."""
    result: PairedComparison


def _counts(
    quantity: Quantity, entry: RunRecord, keys: Sequence[tuple[str, str]]
) -> tuple[np.ndarray, np.ndarray]:
    rows = _rows_by_id(entry)
    factor = entry.stages if quantity.times_stages else 1
    pairs = np.array([quantity.counts(rows[key]) for key in keys], dtype=np.float64)
    numerator_P, denominator_P = pairs.reshape(-1, 2).T
    return factor * numerator_P, denominator_P


def _setting(entry: RunRecord, fields: Sequence[str]) -> tuple[object, ...]:
    return tuple(getattr(entry, field) for field in fields)


def compare_entries(
    baseline: RunRecord, compared: RunRecord, quantities: Sequence[Quantity] = QUANTITIES
) -> Iterator[Line]:
    """Compare every quantity recorded in both entries, on their common prompts.

    For autoregressive decoding, compare only the wall clock: L' and S are 1 by construction. A
    difference there means a faster or slower machine.
    """
    shared = _rows_by_id(compared).keys()
    keys = [key for key in _rows_by_id(baseline) if key in shared]
    left_out = len(_rows_by_id(baseline).keys() ^ shared)
    for quantity in quantities:
        if compared.schedule == AUTOREGRESSIVE and quantity is not WALLCLOCK:
            continue
        if not (has(quantity, baseline) and has(quantity, compared)):
            continue
        pairs = [_counts(quantity, entry, keys) for entry in (baseline, compared)]
        numerator_SP, denominator_SP = (np.stack(side) for side in zip(*pairs, strict=True))
        if denominator_SP.any(1).all():
            result = compare_paired(numerator_SP, denominator_SP)
            yield Line(baseline, compared, quantity, left_out, result)


def counterparts(entry: RunRecord, candidates: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the baseline's entries most like ``entry``: entries with its name if there are any."""
    place = ("benchmark", "sampling")
    is_plain = entry.schedule == AUTOREGRESSIVE
    candidates = [
        other
        for other in candidates
        if _setting(other, place) == _setting(entry, place)
        and (other.schedule == AUTOREGRESSIVE) == is_plain
    ]
    for fields in LIKENESS:
        wanted = _setting(entry, fields)
        alike = [c for c in candidates if _setting(c, fields) == wanted]
        if alike:
            return alike
    return []


def compare_runs(
    baseline: Evaluated, compared: Evaluated, quantities: Sequence[Quantity] = QUANTITIES
) -> list[Line]:
    lines = [
        line
        for entry in compared.entries
        for other in counterparts(entry, baseline.entries)
        for line in compare_entries(other, entry, quantities)
    ]
    if not lines:
        places = [
            f"{str(run.folder)!r} ({', '.join(f'{name} at T = {label}' for name, label in found)})"
            for run in (compared, baseline)
            for found in [dict.fromkeys((e.benchmark, e.sampling) for e in run.entries)]
        ]
        raise UsageError(
            f"RUN: {' and '.join(places)} share no prompt with a token after the first; evaluate "
            "both with the same --benchmarks and --temperature, and --max-new-tokens above 1"
        )
    return lines


def find_warnings(baseline: Evaluated, compared: Evaluated, lines: Sequence[Line]) -> list[str]:
    """Return warnings to read before trusting the numbers."""
    found = []
    for benchmark in dict.fromkeys(line.compared.benchmark for line in lines):
        left_out = max(x.left_out for x in lines if x.compared.benchmark == benchmark)
        first, second = (
            fact(run.manifest, "prompts", benchmark, "sha256") for run in (baseline, compared)
        )
        if first != second:
            found.append(
                f"prompts of {benchmark} differ ({_short(first)} and {_short(second)}): those with "
                f"the same id are compared, {left_out} left out"
            )
        elif left_out:
            found.append(f"{left_out} prompts of {benchmark} are in one run only: left out")
    facts = dict(CONDITIONS)
    if any(line.quantity is WALLCLOCK for line in lines):
        facts |= MACHINE
    for name, path in facts.items():
        first, second = (fact(run.manifest, *path) for run in (baseline, compared))
        if first != second:
            found.append(f"{name} differs: {_short(first)} and {_short(second)}")
    for line in lines:
        is_plain = line.compared.schedule == AUTOREGRESSIVE
        if is_plain and line.result.differs:
            found.append(
                f"the machine was not equally fast: plain decoding of {line.compared.benchmark} "
                f"at T = {line.compared.sampling} ran at {line.result.ratio:.2f} times the "
                "baseline's tokens/s, and so differ other methods' tokens/s"
            )
    return found


def _short(value: object) -> str:
    text = str(value)
    return text[:12] if len(text) == 64 else text


def _name(line: Line) -> str:
    first, second = (f"{e.method}, n={e.stages}, {e.shape}" for e in (line.baseline, line.compared))
    return second if first == second else f"{first} -> {second}"


COLUMNS: dict[str, Callable[[Line], str]] = {
    "benchmark": lambda line: line.compared.benchmark,
    "T": lambda line: line.compared.sampling,
    "method": _name,
    "of": lambda line: line.quantity.label,
    "prompts": lambda line: str(line.result.num_prompts),
    "baseline": lambda line: f"{line.result.baseline:.3f}",
    "compared": lambda line: f"{line.result.compared:.3f}",
    "ratio": lambda line: f"{line.result.ratio:.3f}",
    "95 % CI": lambda line: bounds(line.result.ratio_ci95),
}


def verdicts(lines: Sequence[Line]) -> list[str]:
    """Name the faster run in a sentence per method, by S if it was recorded."""
    pooled = [line for line in lines if line.compared.benchmark == OVERALL] or lines
    found: dict[tuple[str, ...], str] = {}
    for line in pooled:
        if line.quantity not in SPEEDS or line.compared.schedule == AUTOREGRESSIVE:
            continue
        result, label = line.result, line.quantity.label
        place = f"{line.compared.benchmark}, T={line.compared.sampling}, {_name(line)}"
        values = f"{label} {result.baseline:.3f} and {result.compared:.3f}"
        interval = f"ratio {result.ratio:.3f}, 95 % CI {bounds(result.ratio_ci95)}"
        winner = "the second run is faster" if result.ratio > 1 else "the first run is faster"
        said = winner if result.differs else "these prompts do not tell the runs apart"
        found[line.compared.benchmark, line.compared.sampling, _name(line)] = (
            f"{place}: {said} ({values}, {interval})."
        )
    return list(found.values())


def format_comparison(baseline: Evaluated, compared: Evaluated, lines: Sequence[Line]) -> str:
    """Return a comparison's warnings, table and sentences."""
    parts = [f"{compared.folder} compared with {baseline.folder}"]
    parts += [f"warning: {text}" for text in find_warnings(baseline, compared, lines)]
    return "\n".join([*parts, align_columns(Table.of(COLUMNS, lines)), *verdicts(lines), ""])


def _line_record(line: Line, baseline: Evaluated, compared: Evaluated) -> dict[str, object]:
    def side(run: Evaluated, entry: RunRecord) -> dict[str, object]:
        return {"run": str(run.folder)} | {field: getattr(entry, field) for field in LIKENESS[0]}

    return {
        "benchmark": line.compared.benchmark,
        "temperature": line.compared.temperature,
        "filters": line.compared.filters,
        "quantity": line.quantity.name,
        "of_baseline": side(baseline, line.baseline),
        "of_compared": side(compared, line.compared),
        "left_out": line.left_out,
        **asdict(line.result),
    }


@dataclass(frozen=True, kw_only=True)
class CompareOptions(Options):
    """Compare evaluations on the same prompts."""

    PROG: ClassVar[str] = "pipedraft eval compare"
    EXAMPLE: ClassVar[str] = EXAMPLE + "\n" + LEGEND

    baseline: Path = option(metavar="RUN_A", positional=True)
    """the baseline run's --out folder"""
    others: tuple[Path, ...] = option(metavar="RUN_B", positional=True)
    """other runs' --out folders"""
    entropy: bool = False
    """add the share of accepted draft tokens by target entropy, in bins from 0, 0.05, .. nats"""
    groups: bool = False
    """add tokens per round by context length, language and kind of text"""
    json: Path | None = None
    """also write the comparisons to this file"""


build_parser = CompareOptions.parser


def run(argv: Sequence[str]) -> None:
    """Run the whole subcommand; bad input raises ValueError."""
    arguments = CompareOptions.read(argv)
    baseline, *others = [
        Evaluated.read(folder) for folder in (arguments.baseline, *arguments.others)
    ]
    if arguments.json is not None:
        make_place("--json", arguments.json, b'{\n  "comparisons": [')
    records, warnings = [], []
    for other in others:
        quantities = [*QUANTITIES, *BY_ENTROPY * arguments.entropy]
        if arguments.groups:
            quantities += by_group([*baseline.entries, *other.entries])
        lines = compare_runs(baseline, other, quantities)
        found = find_warnings(baseline, other, lines)
        print(format_comparison(baseline, other, lines))
        records += [_line_record(line, baseline, other) for line in lines]
        warnings += [f"{other.folder}: {text}" for text in found]
    print(LEGEND)
    if arguments.json is not None:
        content = {
            "comparisons": records,
            "runs": [str(run.folder) for run in (baseline, *others)],
            "warnings": warnings,
        }
        write_atomically(arguments.json, to_json(content))
        print(f"written: {arguments.json}")
