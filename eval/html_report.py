"""One page from any number of evaluations: `python -m pipedraft.eval report --help`.

report.html is one file without scripts and network. jinja2 escapes everything that was read from
files; the page is report.html.jinja, its charts are in plots.py.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from pipedraft.errors import Parser, UsageError, make_folder
from pipedraft.eval import compare, plots, provenance, tables
from pipedraft.eval.charts import THEMES, Chart, Span
from pipedraft.eval.metrics import AUTOREGRESSIVE, OVERALL
from pipedraft.eval.tables import Run, Table
from pipedraft.files import write_atomically

EXAMPLE = """\
example:
  python -m pipedraft.eval report out/eval_n4 out/eval_n8 --trace out/trace.json --out report.html

The page needs no network and no other file. It shows the folders' results.json and manifest.json:
L' with its intervals, plots, what differs between the first folder and each other one on the same
prompts, and what the numbers depend on. Each evaluation writes the page of its own folder itself.

A results.json may also hold, or hold alone, times of edge-cloud decoding:
  {"latency": [{"method": "picospec", "network": "4g", "temperature": 0, "ms_per_token": 31.5,
                "ci95": [30.1, 33.0]}]}          ci95: null where there is no interval
"""
Kind = Callable[[Any], bool]


def _is(*kinds: type) -> Kind:
    return lambda value: isinstance(value, kinds)


def _is_list_of(kind: Kind) -> Kind:
    return lambda value: isinstance(value, list) and all(map(kind, value))


_is_number = _is(int, float)
_may_be_number = _is(int, float, type(None))


def _is_interval(value: Any) -> bool:
    return _is_list_of(_may_be_number)(value) and len(value) == 2


# What every entry has, and what it must be.
FIELDS: dict[str, Kind] = {
    "method": _is(str),
    "schedule": _is(str),
    "benchmark": _is(str),
    "stages": _is(int),
    "temperature": _is_number,
    "tree_width": _is(int),
    "tree": _is(str, type(None)),
    "prompts": _is(int),
    "tokens": _is(int),
    "steps": _is(int),
    "rounds": _is(int),
    "equivalent_acceptance_length": _is(dict),
    "equivalent_acceptance_length.pooled": _may_be_number,
    "equivalent_acceptance_length.mean": _may_be_number,
    "equivalent_acceptance_length.ci95": _is_interval,
    "mean_acceptance_length": _may_be_number,
    "draft_acceptance_rate": _may_be_number,
    "theoretical_speedup": _may_be_number,
    "wallclock": _is(dict, type(None)),
    "lossless.checked": _is(int),
    "lossless.mismatches": _is(int),
    "acceptance_histogram": _is_list_of(_is(int)),
    "acceptance_by_position": _is_list_of(_may_be_number),
    "position_tests": _is_list_of(_is(int)),
    "position_accepts": _is_list_of(_is(int)),
}
LATENCY_FIELDS: dict[str, Kind] = {
    "method": _is(str),
    "network": _is(str),
    "temperature": _is_number,
    "ms_per_token": _is_number,
    "ci95": lambda value: value is None or _is_interval(value),
}


# Not allowed in XML, or able to turn the reading direction of what follows.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def printable(value: Any) -> Any:
    """The same with a replacement character for each character that no page can hold."""
    if isinstance(value, str):
        return _UNPRINTABLE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {printable(key): printable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [printable(entry) for entry in value]
    return value


@dataclass(frozen=True, kw_only=True)
class Source:
    """What one folder holds."""

    name: str
    entries: list[Run]
    manifest: dict[str, Any] | None = None
    """None: there is none."""
    latency: list[dict[str, Any]] = field(default_factory=list)
    digest: str
    """SHA-256 of results.json."""

    @property
    def facts(self) -> list[tuple[str, str]]:
        described = provenance.describe(self.manifest or {})
        if self.manifest is None:
            described.append(("manifest.json", "missing: what the numbers depend on is unknown"))
        found = [fact for fact in described if fact[0] != "command"]
        return [*found, ("results.json", f"SHA-256 {self.digest}")]

    @property
    def command(self) -> str | None:
        return provenance.fact(self.manifest or {}, "command")

    @property
    def settings(self) -> list[tuple[str, str]]:
        return provenance.settings(self.manifest or {})


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A folder against the first one."""

    title: str
    warnings: list[str]
    table: Table | None
    """None: nothing can be compared; the warnings say why."""


def _summary(pooled: Sequence[Run]) -> dict[str, Any]:
    """The one number of every method, and where its interval lies between 0 and the largest."""
    drafted = [run for run in pooled if run["schedule"] != AUTOREGRESSIVE and run["steps"]]
    lengths = [run["equivalent_acceptance_length"] for run in drafted]
    known = [v for x in lengths for v in (x["pooled"], *x["ci95"]) if tables.is_known(v)]
    scale = max(1.0, *known) * 1.05 if known else 1.0

    def percent(value: float | None) -> str | None:
        return f"{100 * value / scale:.2f}" if tables.is_known(value) else None

    rows = []
    for run, length in zip(drafted, lengths, strict=True):
        low, high = map(percent, length["ci95"])
        shape = run["tree"] or f"W={run['tree_width']}"
        rows.append(
            {
                "method": ", ".join(
                    filter(None, (run["method"], f"n={run['stages']}", shape, run.get("run")))
                ),
                "temperature": f"{run['temperature']:g}",
                "length": tables.number(length["pooled"]),
                "interval": tables.bounds(length["ci95"]),
                "point": percent(length["pooled"]),
                "low": low if high is not None else None,
                "high": high,
                "lossless": tables.lossless_share(run),
            }
        )
    return {"summary": rows, "scale": f"{scale:.1f}", "one": percent(1.0)}


def _losses(runs: Sequence[Run]) -> str:
    drafted = [r for r in runs if r["benchmark"] != OVERALL and r["schedule"] != AUTOREGRESSIVE]
    checked = sum(run["lossless"]["checked"] for run in drafted)
    wrong = sum(run["lossless"]["mismatches"] for run in drafted)
    if not checked:
        return "No output was compared with the target's own."
    if wrong:
        return f"{wrong} of {checked} greedy outputs differ from the target's own."
    return f"All {checked} greedy outputs that were checked equal the target's own."


def _overview(sources: Sequence[Source], runs: Sequence[Run]) -> list[tuple[str, str]]:
    """What was measured, on which target."""

    def listed(values: Any) -> str:
        return ", ".join(dict.fromkeys(str(value) for value in values if value is not None))

    prompts = {(run["benchmark"], run["prompts"]) for run in runs if run["benchmark"] != OVERALL}
    manifests = [source.manifest or {} for source in sources]
    fact = provenance.fact
    found = {
        "target": listed(fact(manifest, "target", "name") for manifest in manifests),
        "methods": listed(r["method"] for r in runs if r["schedule"] != AUTOREGRESSIVE),
        "benchmarks": ", ".join(f"{name} ({count} prompts)" for name, count in sorted(prompts)),
        "stages": listed(sorted({run["stages"] for run in runs})),
        "temperatures": listed(f"{t:g}" for t in sorted({run["temperature"] for run in runs})),
        "dtype": listed(fact(manifest, "dtype") for manifest in manifests),
        "machine": listed(fact(manifest, "hardware", "processor") for manifest in manifests),
        "runs": ", ".join(source.name for source in sources) if len(sources) > 1 else "",
    }
    return [(name, text) for name, text in found.items() if text]


def _disagreements(sources: Sequence[Source]) -> list[str]:
    """Why the numbers of several folders may not be comparable."""
    lines = []
    for name, path in (
        ("targets", ("target", "fingerprint", "hash")),
        ("numbers (dtype)", ("dtype",)),
        ("lengths of answers (--max-new-tokens)", ("config", "max_new_tokens")),
    ):
        values = [provenance.fact(source.manifest or {}, *path) for source in sources]
        if len({value for value in values if value is not None}) > 1:
            lines.append(f"The runs have different {name}: their L' are not comparable.")
    return lines


def _legend(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """The Markdown legend as terms; entries begin with a bold one."""
    plain = " ".join(re.sub(r"[*`]", "", tables.legend(runs)).split())
    entries = [entry.strip() for entry in plain.removeprefix("- ").split(" - ")]
    return [(entry.partition(" ")[0].rstrip(","), entry) for entry in entries]


def build_page(
    sources: Sequence[Source],
    *,
    comparisons: Sequence[Comparison] = (),
    traces: Mapping[str, Mapping[str, Sequence[Span]]] | None = None,
) -> bytes:
    """
    Args:
        sources: one or more; the order is the page's.
        traces: name -> process -> what it did when; the names are printable.
    """
    several = len(sources) > 1
    runs, pooled, latency = [], [], []
    for source in sources:
        name = {"run": source.name} if several else {}
        entries = [printable(entry | name) for entry in source.entries]
        runs += entries
        pooled += tables.pooled_runs(entries)
        latency += [printable(row | name) for row in source.latency]
    charts = plots.all_charts(runs, pooled, latency)
    charts += [plots.time_line(name, tracks) for name, tracks in (traces or {}).items()]
    if not traces:
        reason = "no trace was given (--trace)"
        charts.append(Chart(title="Time line", caption="", panels={}, axis="ms", missing=reason))
    repeated = [run for run in pooled if run.get("repeats")]
    summary = _summary(pooled)
    sections = {
        "Summary": summary["summary"],
        "Results": runs,
        "Plots": True,
        "Comparison": comparisons,
        "Provenance": True,
    }
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = Path(__file__).with_name("report.html.jinja").read_text()
    page = environment.from_string(template).render(
        title=f"{len(sources)} evaluations" if several else "Evaluation",
        sections=[name for name, content in sections.items() if content],
        themes=THEMES,
        text_columns=tables.TEXT_COLUMNS,
        facts=_overview(sources, runs),
        warnings=[*_disagreements(sources), *tables.warnings(runs)],
        losses=_losses(runs),
        **summary,
        results=tables.results_table(runs, with_benchmark=True) if runs else None,
        legend=_legend(runs),
        repeats=tables.repeats_table(repeated) if repeated else None,
        repeats_text=tables.REPEATS_TEXT,
        charts=charts,
        comparisons=comparisons,
        comparison_legend=compare.LEGEND,
        sources=sources,
    )
    return printable(page).encode()


def _read_json(option: str, path: Path) -> tuple[Any, bytes]:
    try:
        content = path.read_bytes()
        return printable(json.loads(content)), content
    except OSError as error:
        raise UsageError(
            f"{option}: {str(path)!r} cannot be read ({error.strerror}); give the --out folder of "
            "python -m pipedraft.eval"
        ) from error
    except ValueError as error:
        raise UsageError(
            f"{option}: {str(path)!r} is not JSON ({error}); write it again"
        ) from error


def _rows(path: Path, content: Run, key: str, fields: dict[str, Kind]) -> list[Run]:
    """A list of objects; an absent one is empty."""
    rows = content.get(key, [])
    for row in rows if isinstance(rows, list) else [rows]:
        for name, is_right in fields.items():
            value = provenance.fact(row, *name.split("."))
            if not is_right(value):
                raise UsageError(
                    f"OUT: {str(path)!r}: {name!r} in {key!r} is {str(value)[:60]!r}; run the "
                    "evaluation again"
                )
    return rows


def read_source(folder: Path, name: str) -> Source:
    """
    Args:
        name: what the page calls it.
    """
    path = folder / "results.json"
    content, raw = _read_json("OUT", path)
    if not isinstance(content, dict):
        raise UsageError(f"OUT: {str(path)!r} is not an object; run the evaluation again")
    manifest = None
    if (folder / "manifest.json").is_file():
        manifest, _ = _read_json("OUT", folder / "manifest.json")
    return Source(
        name=printable(name),
        entries=[
            entry for key in ("runs", "overall") for entry in _rows(path, content, key, FIELDS)
        ],
        manifest=manifest if isinstance(manifest, dict) else None,
        latency=_rows(path, content, "latency", LATENCY_FIELDS),
        digest=hashlib.sha256(raw).hexdigest(),
    )


def short_names(folders: Sequence[Path]) -> list[str]:
    """The last parts of the paths, as many as it takes to tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            break
    else:
        raise UsageError("OUT: a folder is given twice; give each once")
    return names


def read_trace(path: Path) -> dict[str, list[Span]]:
    """Process -> its spans, of a Chrome trace as ``--trace`` writes it."""
    content, _ = _read_json("--trace", path)
    try:
        events = content["traceEvents"]
        names = {
            event["pid"]: str(event["args"]["name"])
            for event in events
            if event["ph"] == "M" and event["name"] == "process_name"
        }
        tracks: dict[str, list[Span]] = {name: [] for name in names.values()}
        for event in (event for event in events if event["ph"] == "X"):
            span = Span(str(event["name"]), float(event["ts"]) / 1e3, float(event["dur"]) / 1e3)
            tracks[names[event["pid"]]].append(span)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"--trace: {str(path)!r} is no trace of this program ({error!r}); write one with "
            "python -m pipedraft.inference --backend process --trace FILE"
        ) from error
    if not any(tracks.values()):
        raise UsageError(f"--trace: {str(path)!r} has no spans; decode at least one token with it")
    return tracks


def compare_folders(folders: Sequence[Path], names: Sequence[str]) -> list[Comparison]:
    """Every folder against the first one."""
    found = []
    for folder, name in zip(folders[1:], names[1:], strict=True):
        title = f"{name} compared with {names[0]}"
        try:
            baseline, other = compare.Run.read(folders[0]), compare.Run.read(folder)
            lines = compare.compare_runs(baseline, other)
        except UsageError as error:
            reason = f"Not compared: {str(error).removeprefix('RUN: ')}."
            found.append(Comparison(title=title, warnings=[reason], table=None))
            continue
        cells = [[cell(line) for cell in compare.COLUMNS.values()] for line in lines]
        found.append(
            Comparison(
                title=title,
                warnings=compare.find_warnings(baseline, other, lines),
                table=Table(list(compare.COLUMNS), cells),
            )
        )
    return found


def build_parser() -> Parser:
    parser = Parser(
        prog="python -m pipedraft.eval report",
        description="Write one self-contained HTML page about evaluations.",
        epilog=EXAMPLE,
    )
    add = parser.add_argument
    add("folders", type=Path, nargs="+", metavar="OUT", help="--out folders of evaluations")
    add(
        "--trace",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="what processes did when, from python -m pipedraft.inference --trace; may be given "
        "several times",
    )
    add(
        "--out",
        type=Path,
        metavar="FILE",
        help="the page (default: OUT/report.html of a single folder, report.html of several)",
    )
    return parser


def run(argv: Sequence[str]) -> None:
    """The whole subcommand; bad input raises ValueError."""
    arguments = build_parser().parse_args(argv)
    folders = arguments.folders
    names = short_names(folders)
    path = arguments.out
    if path is None:
        path = folders[0] / "report.html" if len(folders) == 1 else Path("report.html")
    if path.is_dir():
        raise UsageError(f"--out: {str(path)!r} is a folder; give a file, e.g. report.html")
    sources = [read_source(folder, name) for folder, name in zip(folders, names, strict=True)]
    traces = {
        name: read_trace(trace)
        for name, trace in zip(
            short_names(arguments.trace) if arguments.trace else [], arguments.trace, strict=True
        )
    }
    page = build_page(
        sources,
        comparisons=compare_folders(folders, names),
        traces={printable(name): tracks for name, tracks in traces.items()},
    )
    make_folder("--out", path.parent)
    write_atomically(path, page)
    print(f"written: {path} ({len(page) / 1e3:.0f} kB)")
