"""Write an evaluation's report, or one page for several: `python -m pipedraft.eval report --help`.

report.html is one file that needs neither scripts nor a network. jinja2 escapes all text from
files; the page is report.html.jinja, its charts are in plots.py.
"""

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from jinja2 import Environment, StrictUndefined
from msgspec import UNSET
from msgspec.structs import replace

from pipedraft.cli import Options, UsageError, option
from pipedraft.eval import compare, plots, tables
from pipedraft.eval.charts import THEMES, Chart, Span
from pipedraft.eval.metrics import AUTOREGRESSIVE, OVERALL
from pipedraft.eval.record import (
    LatencyRecord,
    Manifest,
    Results,
    RunRecord,
    is_known,
    parse,
    read_bytes,
)
from pipedraft.eval.tables import Table, describe, fact, given_options, markdown
from pipedraft.files import Values, make_place, to_json, write_atomically

EXAMPLE = """\
example:
  pipedraft eval report out/eval out/other --out out/report.html

The page needs no network and no other file. It shows results.json and manifest.json from each
folder: L' with intervals, charts, differences from the first folder on the same prompts, and the
settings behind the numbers. `pipedraft eval` already writes such a page for its own folder.

A results.json may also, or only, have latencies for edge-cloud decoding:
  {"latency": [{"method": "picospec", "network": "4g", "temperature": 0, "ms_per_token": 31.5,
                "ci95": [30.1, 33.0]}]}          ci95: null where there is no interval
"""
CHARTS = "charts"
"""Folder for the pictures."""
SHOWN_CHARTS = ("length_by_benchmark.png", "acceptance_by_position.png")
"""Charts in report.md."""
# Characters that XML forbids, or that can change the reading direction.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def printable(value: Any) -> Any:
    """Replace each character that a page cannot contain by a replacement character."""
    if isinstance(value, str):
        return _UNPRINTABLE.sub("\ufffd", value)
    if isinstance(value, msgspec.Struct):
        return msgspec.convert(printable(msgspec.to_builtins(value)), type(value))
    if isinstance(value, dict):
        return {printable(key): printable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [printable(entry) for entry in value]
    return value


@dataclass(frozen=True, kw_only=True)
class ReportSource:
    """Parsed files from one evaluation's folder."""

    name: str
    entries: list[RunRecord]
    manifest: Manifest | None = None
    """Contents of manifest.json; None: there is none."""
    latency: list[LatencyRecord] = field(default_factory=list)
    digest: str
    """SHA-256 of results.json."""

    @property
    def facts(self) -> list[tuple[str, str]]:
        described = describe(self.manifest or {})
        if self.manifest is None:
            described.append(("manifest.json", "missing: what the numbers depend on is unknown"))
        found = [fact for fact in described if fact[0] != "command"]
        return [*found, ("results.json", f"SHA-256 {self.digest}")]

    @property
    def command(self) -> str | None:
        return fact(self.manifest or {}, "command")

    @property
    def settings(self) -> list[tuple[str, str]]:
        return given_options(self.manifest or {})


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A folder compared with the first one."""

    title: str
    warnings: list[str]
    table: Table | None
    """Table of compared quantities; None: nothing can be compared, and the warnings say why."""
    verdicts: Sequence[str] = ()


def _summary(pooled: Sequence[RunRecord]) -> Values:
    """Return each method's main number, and its interval's place from 0 to the largest number."""
    drafted = [run for run in pooled if run.schedule != AUTOREGRESSIVE and run.steps]
    lengths = [run.equivalent_acceptance_length for run in drafted]
    known = [v for x in lengths for v in (x.pooled, *x.ci95) if is_known(v)]
    scale = max(1.0, *known) * 1.05 if known else 1.0

    def percent(value: float | None) -> str | None:
        return f"{100 * value / scale:.2f}" if is_known(value) else None

    rows = []
    for run, length in zip(drafted, lengths, strict=True):
        low, high = map(percent, length.ci95)
        rows.append(
            {
                "method": ", ".join(
                    filter(None, (run.method, f"n={run.stages}", run.shape, run.folder))
                ),
                "temperature": run.sampling,
                "length": tables.number(length.pooled),
                "interval": tables.bounds(length.ci95),
                "point": percent(length.pooled),
                "low": low if high is not None else None,
                "high": high,
                "lossless": tables.lossless_share(run),
            }
        )
    return {"summary": rows, "scale": f"{scale:.1f}", "one": percent(1.0)}


def _losses(runs: Sequence[RunRecord]) -> str:
    drafted = [r for r in runs if r.benchmark != OVERALL and r.schedule != AUTOREGRESSIVE]
    checked = sum(run.lossless.checked for run in drafted)
    wrong = sum(run.lossless.mismatches for run in drafted)
    if not checked:
        return "No output was compared with the target's own."
    if wrong:
        return f"{wrong} of {checked} greedy outputs differ from the target's own."
    return f"All {checked} greedy outputs that were checked equal the target's own."


def title_of(manifests: Sequence[Manifest], runs: Sequence[RunRecord]) -> str:
    """Return the measurement, the target and the day."""
    drafts = dict.fromkeys(run.method for run in runs if run.schedule != AUTOREGRESSIVE)
    targets = dict.fromkeys(filter(None, (fact(one, "target", "name") for one in manifests)))
    days = sorted(str(fact(one, "created"))[:10] for one in manifests if fact(one, "created"))
    title = ", ".join(drafts) if len(drafts) < 4 else f"{len(drafts)} methods"
    title = " on ".join(filter(None, (title or "Evaluation", " and ".join(targets))))
    return ", ".join([title, *dict.fromkeys(days[:1] + days[-1:])])


def _overview(sources: Sequence[ReportSource], runs: Sequence[RunRecord]) -> list[tuple[str, str]]:
    """Return facts for the top of the page: the measurement, and its target."""

    def listed(values: Iterable[object]) -> str:
        return ", ".join(dict.fromkeys(str(value) for value in values if value is not None))

    prompts = {(run.benchmark, run.prompts) for run in runs if run.benchmark != OVERALL}
    manifests = [source.manifest or {} for source in sources]
    found = {
        "target": listed(fact(manifest, "target", "name") for manifest in manifests),
        "draft": listed(
            name for manifest in manifests for name in fact(manifest, "checkpoints") or ()
        ),
        "measured": listed(fact(manifest, "created") for manifest in manifests),
        "methods": listed(r.method for r in runs if r.schedule != AUTOREGRESSIVE),
        "benchmarks": ", ".join(f"{name} ({count} prompts)" for name, count in sorted(prompts)),
        "stages": listed(sorted({run.stages for run in runs})),
        "temperatures": listed(f"{t:g}" for t in sorted({run.temperature for run in runs})),
        "dtype": listed(fact(manifest, "dtype") for manifest in manifests),
        "machine": listed(fact(manifest, "hardware", "processor") for manifest in manifests),
        "runs": ", ".join(source.name for source in sources) if len(sources) > 1 else "",
    }
    return [(name, text) for name, text in found.items() if text]


def _legend(runs: Sequence[RunRecord]) -> list[tuple[str, str]]:
    """Return the Markdown legend as terms; entries begin with a bold one."""
    plain = " ".join(re.sub(r"[*`]", "", tables.legend(runs)).split())
    entries = [entry.strip() for entry in plain.removeprefix("- ").split(" - ")]
    return [(entry.partition(" ")[0].rstrip(","), entry) for entry in entries]


def build_page(
    sources: Sequence[ReportSource],
    *,
    comparisons: Sequence[Comparison] = (),
    traces: Mapping[str, Mapping[str, Sequence[Span]]] | None = None,
) -> bytes:
    """Build the HTML page for one evaluation, or for several side by side.

    Args:
        sources: one or more, in page order.
        traces: name -> process -> its spans; the names are printable.
    """
    several = len(sources) > 1
    runs, pooled, latency = [], [], []
    for source in sources:
        name = source.name if several else UNSET
        entries = [printable(replace(entry, run=name)) for entry in source.entries]
        runs += entries
        pooled += tables.pooled_runs(entries)
        latency += [printable(replace(row, run=name)) for row in source.latency]
    charts = plots.all_charts(runs, pooled, latency)
    charts += [plots.time_line(name, tracks) for name, tracks in (traces or {}).items()]
    if not traces:
        reason = "no trace was given (--trace)"
        charts.append(Chart(title="Time line", caption="", panels={}, axis="ms", missing=reason))
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
        title=title_of([source.manifest or {} for source in sources], runs),
        sections=[name for name, content in sections.items() if content],
        themes=THEMES,
        text_columns=tables.TEXT_COLUMNS,
        facts=_overview(sources, runs),
        warnings=tables.warnings(runs),
        losses=_losses(runs),
        **summary,
        results=tables.results_table(runs, with_benchmark=True) if runs else None,
        legend=_legend(runs),
        details=tables.details(runs),
        charts=charts,
        comparisons=comparisons,
        comparison_legend=compare.LEGEND,
        sources=sources,
    )
    return printable(page).encode()


# -- the files of one evaluation -------------------------------------------------------------------


def format_report(
    runs: Sequence[RunRecord], manifest: Manifest, pictures: Collection[str] = ()
) -> str:
    """Return the text for report.md.

    Args:
        pictures: existing chart files.
    """
    hardware, target = manifest["hardware"], manifest["target"]
    parts = [
        f"# {title_of([manifest], runs)}",
        f"Target `{target['name']}` ({manifest['dtype']}), {hardware['processor']}, "
        f"{hardware['torch_threads']} threads, seed {manifest['seed']}.",
        f"    {manifest['command']}",
        *(
            "- " + line.replace("Not lossless", "**Not lossless**", 1)
            for line in tables.warnings(runs)
        ),
    ]
    if not manifest["tokenizer"]["chat_template_sha256"]:
        parts.append("The tokenizer has no chat template: prompts are plain text.")
    benchmarks = dict.fromkeys(run.benchmark for run in runs)
    # The pooled table comes first; a reader looks for one number.
    for name in sorted(benchmarks, key=lambda name: name != OVERALL):
        of_benchmark = [run for run in runs if run.benchmark == name]
        parts += [f"## {name}", markdown(tables.results_table(of_benchmark))]
    parts += [tables.legend(runs)]
    for name in (name for name in SHOWN_CHARTS if name in pictures):
        alt = name.removesuffix(".png").replace("_", " ")
        parts.append(f"![{alt}]({CHARTS}/{name})")
    for title, text, table in tables.details(runs):
        parts += [f"## {title}", text, markdown(table)]
    parts += ["## Provenance", "\n".join(f"- {n}: {text}" for n, text in describe(manifest))]
    return "\n\n".join(parts) + "\n"


def write_report(out_dir: Path, runs: Sequence[RunRecord], manifest: Manifest) -> None:
    """Write results.json, manifest.json, report.md, report.html and charts into ``out_dir``.

    results.json: {"runs": [one entry per method and benchmark], "overall": [the same, pooled over
    the benchmarks; empty with a single benchmark]}.
    """
    content = to_json(
        Results(
            runs=[run for run in runs if run.benchmark != OVERALL],
            overall=[run for run in runs if run.benchmark == OVERALL],
        )
    )
    pictures: dict[str, bytes] = {}
    for chart in plots.all_charts(runs, tables.pooled_runs(runs), ()):
        pictures |= {} if chart.is_empty else chart.files()
    (out_dir / CHARTS).mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.items():
        write_atomically(out_dir / CHARTS / name, picture)
    write_atomically(out_dir / "manifest.json", to_json(manifest))
    write_atomically(out_dir / "report.md", format_report(runs, manifest, pictures).encode())
    source = ReportSource(
        name=out_dir.resolve().name,
        entries=parse(content, Results, str(out_dir / "results.json")).entries,
        manifest=manifest,
        digest=hashlib.sha256(content).hexdigest(),
    )
    write_atomically(out_dir / "report.html", build_page([source]))
    # Last: once results.json exists, so does the rest.
    write_atomically(out_dir / "results.json", content)


# -- the page of several folders -------------------------------------------------------------------


def read_source(folder: Path, name: str) -> ReportSource:
    """Read an evaluation's folder.

    Args:
        name: its name on the page.
    """
    path, about = folder / "results.json", folder / "manifest.json"
    content = read_bytes("OUT", path)
    results = parse(content, Results, f"OUT: {str(path)!r}")
    manifest = None
    if about.is_file():
        manifest = printable(parse(read_bytes("OUT", about), dict, f"OUT: {str(about)!r}"))
    return ReportSource(
        name=printable(name),
        entries=results.entries,
        manifest=manifest,
        latency=results.latency or [],
        digest=hashlib.sha256(content).hexdigest(),
    )


def short_names(folders: Sequence[Path], option: str = "OUT") -> list[str]:
    """Return the paths' last parts, as many as needed to tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            break
    else:
        raise UsageError(f"{option}: the same one is given twice; give each once")
    return names


def read_trace(path: Path) -> dict[str, list[Span]]:
    """Return process -> its spans, from a Chrome trace written by ``--trace``."""
    content = printable(parse(read_bytes("--trace", path), dict, f"--trace: {str(path)!r}"))
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
    """Compare every folder with the first one."""
    found = []
    for folder, name in zip(folders[1:], names[1:], strict=True):
        title = f"{name} compared with {names[0]}"
        try:
            baseline, other = compare.Evaluated.read(folders[0]), compare.Evaluated.read(folder)
            lines = compare.compare_runs(baseline, other)
        except UsageError as error:
            reason = f"Not compared: {str(error).removeprefix('RUN: ')}."
            found.append(Comparison(title=title, warnings=[reason], table=None))
            continue
        found.append(
            Comparison(
                title=title,
                warnings=compare.find_warnings(baseline, other, lines),
                table=Table.of(compare.COLUMNS, lines),
                verdicts=compare.verdicts(lines),
            )
        )
    return found


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Options):
    """Write one self-contained HTML page about evaluations."""

    PROG: ClassVar[str] = "pipedraft eval report"
    EXAMPLE: ClassVar[str] = EXAMPLE

    folders: tuple[Path, ...] = option(metavar="OUT", positional=True)
    """--out folders of evaluations"""
    trace: tuple[Path, ...] = option((), metavar="FILE", repeated=True)
    """process timeline from pipedraft inference --trace; repeatable"""
    out: Path | None = None
    """output page; default: OUT/report.html for one folder, report.html for several"""


build_parser = ReportOptions.parser


def run(argv: Sequence[str]) -> None:
    """Run the whole subcommand; bad input raises ValueError."""
    arguments = ReportOptions.read(argv)
    folders = arguments.folders
    names = short_names(folders)
    trace_names = short_names(arguments.trace, "--trace") if arguments.trace else []
    path = arguments.out
    if path is None:
        path = folders[0] / "report.html" if len(folders) == 1 else Path("report.html")
    make_place("--out", path, b'<meta name="generator" content="pipedraft eval">')
    sources = [read_source(folder, name) for folder, name in zip(folders, names, strict=True)]
    traces = {
        name: read_trace(trace) for name, trace in zip(trace_names, arguments.trace, strict=True)
    }
    page = build_page(
        sources,
        comparisons=compare_folders(folders, names),
        traces={printable(name): tracks for name, tracks in traces.items()},
    )
    write_atomically(path, page)
    print(f"written: {path} ({len(page) / 1e3:.0f} kB)")
