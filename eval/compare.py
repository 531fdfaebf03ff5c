"""Compare methods between runs prompt by prompt: `python -m pipedraft.eval compare --help`.

The input is the "per_prompt" rows in results.json. The statistics are in intervals.py.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
from msgspec import UNSET, UnsetType

from ..errors import UsageError, one_line
from ..files import make_place, read_bounded, to_json, write_atomically
from ..options import Options, option
from .intervals import PairedComparison, compare_paired
from .metrics import AUTOREGRESSIVE, OVERALL
from .record import (
    MAX_BYTES,
    LatencyRecord,
    Manifest,
    PromptRecord,
    Results,
    RunRecord,
    parse,
)
from .tables import Table, align_columns, bounds, fact

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
    "processor": ("hardware", "processor"),
    "threads": ("hardware", "torch_threads"),
    "accelerator": ("hardware", "accelerator"),
    "--backend": ("config", "backend"),
}


@dataclass(frozen=True)
class Quantity:
    """Ratio of two sums over prompts."""

    name: str
    label: str
    counts: Callable[[RunRecord, PromptRecord], tuple[float | UnsetType, float | UnsetType]]
    """A prompt's numerator and denominator; unset: not recorded."""


QUANTITIES = (
    Quantity(
        "equivalent_acceptance_length", "L'", lambda run, row: (run.stages * row.tokens, row.steps)
    ),
    Quantity(
        "theoretical_speedup",
        "S",
        lambda _, row: (row.virtual_time_autoregressive, row.virtual_time),
    ),
    Quantity("tokens_per_s", "tokens/s", lambda _, row: (row.tokens, row.decode_s)),
)
WALLCLOCK = QUANTITIES[-1]
SPEEDS = QUANTITIES[:-1]


def _group_counts(group: str, _: RunRecord, row: PromptRecord) -> tuple[float, float]:
    _tests, _accepts, rounds, tokens = (row.groups or {}).get(group, [0] * 4)
    return tokens, rounds


def by_group(entries: Iterable[RunRecord]) -> list[Quantity]:
    """Return one quantity, tokens per round, for each group in the entries."""
    names = dict.fromkeys(found.group for entry in entries for found in entry.acceptance_by_group)
    return [
        Quantity(f"tokens per round, {name}", f"tau, {name}", partial(_group_counts, name))
        for name in names
    ]


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """File contents from an evaluation's output folder."""

    name: str
    entries: list[RunRecord]
    latency: list[LatencyRecord]
    manifest: Manifest
    """Contents of manifest.json; empty if there is none."""
    digest: str
    """SHA-256 of results.json."""

    @classmethod
    def read(cls, folder: Path, name: str = "") -> "Evaluated":
        """Read the files. Raise UsageError with the file and the field if one is bad.

        Args:
            name: name in tables and on the page. The default is the folder's path.
        """
        path, manifest = folder / "manifest.json", {}
        if path.is_file():
            manifest = parse(read_bounded(path, "RUN", MAX_BYTES), dict, path)
        content = read_bounded(folder / "results.json", "RUN", MAX_BYTES)
        return cls.of(content, manifest, folder, name)

    @classmethod
    def of(cls, content: bytes, manifest: Manifest, folder: Path, name: str = "") -> "Evaluated":
        results = parse(content, Results, folder / "results.json")
        return cls(
            name=name or str(folder),
            entries=results.entries,
            latency=results.latency or [],
            manifest=manifest,
            digest=hashlib.sha256(content).hexdigest(),
        )


@dataclass(frozen=True)
class Line:
    """One quantity for a method in one run, compared with the baseline run."""

    baseline: RunRecord
    compared: RunRecord
    quantity: Quantity
    left_out: int
    """Number of prompts missing in one run."""
    result: PairedComparison


def _setting(entry: RunRecord, fields: Sequence[str]) -> tuple[object, ...]:
    return tuple(getattr(entry, field) for field in fields)


def compare_entries(
    baseline: RunRecord, compared: RunRecord, quantities: Sequence[Quantity] = QUANTITIES
) -> Iterator[Line]:
    """Compare every quantity recorded in both entries, on their common prompts.

    For autoregressive decoding, compare only the wall clock, because L' and S are always 1. A
    difference in the wall clock then means a faster or slower machine.
    """
    entries = baseline, compared
    rows = [{(row.benchmark, row.id): row for row in entry.per_prompt} for entry in entries]
    keys = [key for key in rows[0] if key in rows[1]]
    for quantity in quantities:
        if compared.schedule == AUTOREGRESSIVE and quantity is not WALLCLOCK:
            continue
        counts = [
            [quantity.counts(entry, own[key]) for key in keys]
            for entry, own in zip(entries, rows, strict=True)
        ]
        if any(UNSET in pair for side in counts for pair in side):
            continue
        counts_SP2 = np.array(counts, dtype=np.float64).reshape(2, len(keys), 2)
        numerator_SP, denominator_SP = np.moveaxis(counts_SP2, -1, 0)
        if denominator_SP.any(1).all():
            result = compare_paired(numerator_SP, denominator_SP)
            yield Line(baseline, compared, quantity, len(rows[0].keys() ^ rows[1].keys()), result)


def counterparts(entry: RunRecord, candidates: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the candidates most like ``entry``.

    The first tuple in ``LIKENESS`` for which a candidate has equal settings decides.
    """
    is_plain = entry.schedule == AUTOREGRESSIVE
    candidates = [other for other in candidates if (other.schedule == AUTOREGRESSIVE) == is_plain]
    for fields in LIKENESS:
        wanted = _setting(entry, ("benchmark", "sampling", *fields))
        alike = [c for c in candidates if _setting(c, ("benchmark", "sampling", *fields)) == wanted]
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
        raise UsageError(
            f"RUN: {compared.name!r} and {baseline.name!r} share no prompt with a token after the "
            "first; evaluate both with the same --benchmarks and --temperature, and "
            "--max-new-tokens above 1"
        )
    return lines


def find_warnings(baseline: Evaluated, compared: Evaluated, lines: Sequence[Line]) -> list[str]:
    """Return warnings to read before trusting the numbers."""
    found = []
    facts = dict(CONDITIONS)
    for benchmark in dict.fromkeys(line.compared.benchmark for line in lines):
        facts[f"prompts of {benchmark}"] = ("prompts", benchmark, "sha256")
        left_out = max(x.left_out for x in lines if x.compared.benchmark == benchmark)
        if left_out:
            found.append(f"{left_out} prompts of {benchmark} are in one run only: left out")
    for name, path in facts.items():
        first, second = (fact(run.manifest, *path) for run in (baseline, compared))
        if first != second:
            found.append(f"{name}: {_short(first)} and {_short(second)} differ")
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
    """Return one sentence per method that names the faster run, by S if S was recorded."""
    found: dict[str, str] = {}
    for line in [line for line in lines if line.compared.benchmark == OVERALL] or lines:
        if line.quantity not in SPEEDS or line.compared.schedule == AUTOREGRESSIVE:
            continue
        result, said = line.result, "these prompts do not tell the runs apart"
        if result.differs:
            said = f"the {'second' if result.ratio > 1 else 'first'} run is faster"
        method = f"{line.compared.benchmark}, T={line.compared.sampling}, {_name(line)}"
        interval = bounds(result.ratio_ci95)
        doubt = "too few prompts for an interval" if interval == "-" else f"95 % CI {interval}"
        found[method] = (
            f"{method}: {said} ({line.quantity.label} {result.baseline:.3f} and "
            f"{result.compared:.3f}, ratio {result.ratio:.3f}, {doubt}).{_against_none(line)}"
        )
    return list(found.values())


def _against_none(line: Line) -> str:
    """Return a sentence if both sides measured slower than no draft, else ""."""
    speedups = [side.speedup for side in (line.baseline, line.compared) if not side.in_turns]
    known = [speedup for speedup in speedups if speedup is not None]
    if len(known) < 2 or max(known) >= 1:
        return ""
    return f" Both were slower than no draft (speed-up {known[0]:.2f} and {known[1]:.2f})."


def format_comparison(baseline: Evaluated, compared: Evaluated, lines: Sequence[Line]) -> str:
    """Return a comparison's warnings, table and sentences."""
    parts = [f"{compared.name} compared with {baseline.name}"]
    parts += [f"warning: {text}" for text in find_warnings(baseline, compared, lines)]
    table, said = align_columns(Table.of(COLUMNS, lines)), verdicts(lines)
    return "\n".join([*map(one_line, parts), table, *map(one_line, said), ""])


def _line_record(line: Line, baseline: Evaluated, compared: Evaluated) -> dict[str, object]:
    def side(run: Evaluated, entry: RunRecord) -> dict[str, object]:
        return {"run": run.name} | {field: getattr(entry, field) for field in LIKENESS[0]}

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
    groups: bool = False
    """add tokens per round by context length, place in the answer, language, segment and text
    entropy"""
    json: Path | None = None
    """also write the comparisons to this file"""


build_parser = CompareOptions.parser


def run(argv: Sequence[str]) -> None:
    """Run the whole subcommand. Raise ValueError for bad input."""
    arguments = CompareOptions.read(argv)
    baseline, *others = [
        Evaluated.read(folder) for folder in (arguments.baseline, *arguments.others)
    ]
    for run in (baseline, *others):
        if not run.manifest:
            raise UsageError(f"RUN: {run.name} has no manifest.json; give an evaluation's folder")
    if arguments.json is not None:
        make_place("--json", arguments.json, b'{\n  "comparisons": [')
    records, warnings = [], []
    for other in others:
        quantities = list(QUANTITIES)
        if arguments.groups:
            quantities += by_group([*baseline.entries, *other.entries])
        lines = compare_runs(baseline, other, quantities)
        found = find_warnings(baseline, other, lines)
        print(format_comparison(baseline, other, lines))
        records += [_line_record(line, baseline, other) for line in lines]
        warnings += [f"{other.name}: {text}" for text in found]
    print(LEGEND)
    if arguments.json is not None:
        content = {
            "comparisons": records,
            "runs": [run.name for run in (baseline, *others)],
            "warnings": warnings,
        }
        write_atomically(arguments.json, to_json(content))
        print(f"written: {arguments.json}")
