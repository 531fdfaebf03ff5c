"""Write an evaluation's report, or one page for several: `python -m pipedraft.eval report --help`.

report.html is one file that needs neither scripts nor a network. jinja2 escapes all text from
files. The page's template is report.html.jinja, and its charts are in plots.py.
"""

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from jinja2 import Environment, StrictUndefined
from msgspec import UNSET
from msgspec.structs import replace

from ..errors import UsageError
from ..files import Values, make_place, to_json, write_atomically
from ..options import Options, option
from . import compare, plots, tables
from .charts import THEMES, Chart, printable
from .compare import Evaluated
from .metrics import AUTOREGRESSIVE, OVERALL
from .record import Manifest, Results, RunRecord, is_known
from .tables import describe, fact, markdown

EXAMPLE = """\
example:
  pipedraft eval report out/eval out/other --out out/report.html

The page needs no network and no other file. It shows results.json and manifest.json from each
folder: L' with intervals, charts, differences from the first folder on the same prompts, and the
settings behind the numbers. `pipedraft eval` already writes such a page for its own folder. Folders
of `eval edge` show latencies.
"""
CHARTS = "charts"
"""Folder for the pictures."""
SHOWN_CHARTS = ("length_by_benchmark.png", "acceptance_by_position.png")
"""Charts in report.md."""


def title_of(manifests: Sequence[Manifest], runs: Sequence[RunRecord]) -> str:
    """Return a title with the methods, the targets and the days."""
    drafts = dict.fromkeys(run.method for run in runs if run.schedule != AUTOREGRESSIVE)
    names = filter(None, (fact(one, "target", "name") for one in manifests))
    targets = dict.fromkeys(map(str, names))
    days = sorted(str(fact(one, "created"))[:10] for one in manifests if fact(one, "created"))
    title = ", ".join(drafts) if len(drafts) < 4 else f"{len(drafts)} methods"
    title = " on ".join(filter(None, (title or "Evaluation", " and ".join(targets))))
    return ", ".join([title, *dict.fromkeys(days[:1] + days[-1:])])


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _overview(sources: Sequence[Evaluated], runs: Sequence[RunRecord]) -> list[tuple[str, str]]:
    """Return facts about the measurement and its target for the top of the page."""
    manifests = [source.manifest for source in sources]
    prompts = {(run.benchmark, run.prompts) for run in runs if run.benchmark != OVERALL}
    found: dict[str, Iterable[object]] = {
        "target": [fact(one, "target", "name") for one in manifests],
        "draft": [name for one in manifests for name in _listed(fact(one, "checkpoints"))],
        "measured": [fact(one, "created") for one in manifests],
        "methods": [run.method for run in runs if run.schedule != AUTOREGRESSIVE],
        "benchmarks": [
            f"{name} ({count} prompt{'s' * (count != 1)})" for name, count in sorted(prompts)
        ],
        "stages": sorted({run.stages for run in runs}),
        "temperatures": [f"{t:g}" for t in sorted({run.temperature for run in runs})],
        "dtype": [fact(one, "dtype") for one in manifests],
        "machine": [fact(one, "hardware", "processor") for one in manifests],
        "runs": [source.name for source in sources if len(sources) > 1],
    }
    shown = {
        name: ", ".join(dict.fromkeys(str(value) for value in values if value is not None))
        for name, values in found.items()
    }
    return [(name, text) for name, text in shown.items() if text]


def _scale(runs: Sequence[RunRecord]) -> float:
    """Return the right end of the summary's axis, a little above the largest number."""
    lengths = [run.equivalent_acceptance_length for run in runs]
    known = [v for x in lengths for v in (x.pooled, *x.ci95) if is_known(v)]
    return 1.05 * max(1.0, *known) if known else 1.0


def build_page(
    sources: Sequence[Evaluated],
    comparisons: Sequence[Values] = (),
    charts: Sequence[Chart] | None = None,
) -> bytes:
    """Build the HTML page for one evaluation, or for several side by side.

    Args:
        charts: charts to show. By default they are drawn from ``sources``.
    """
    runs, pooled, latency = [], [], []
    for source in sources:
        name = source.name if len(sources) > 1 else UNSET
        entries = [replace(entry, run=name) for entry in source.entries]
        runs += entries
        pooled += tables.pooled_runs(entries)
        latency += [replace(row, run=name) for row in source.latency]
    summary = [run for run in pooled if run.schedule != AUTOREGRESSIVE and run.steps]
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.tests["known"] = is_known
    template = Path(__file__).with_name("report.html.jinja").read_text()
    page = environment.from_string(template).render(
        title=title_of([source.manifest for source in sources], runs),
        themes=THEMES,
        tables=tables,
        facts=_overview(sources, runs),
        runs=runs,
        summary=summary,
        scale=_scale(summary),
        charts=plots.all_charts(runs, pooled, latency) if charts is None else charts,
        comparisons=comparisons,
        compare=compare,
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
    target = manifest["target"]
    if hardware := manifest.get("hardware"):
        place = (
            f"Target `{target['name']}` ({manifest['dtype']}), {hardware['processor']}, "
            f"{hardware['torch_threads']} threads"
        )
    else:
        place = f"Server `{target['name']}`, model `{target['model']}`"
    parts = [
        f"# {title_of([manifest], runs)}",
        f"{place}, seed {manifest['seed']}.",
        f"    {manifest['command']}",
        *(
            "- " + line.replace("Not lossless", "**Not lossless**", 1)
            for line in tables.warnings(runs)
        ),
        *(f"- {line}" for line in (*tables.choices(runs), *tables.slower_drafts(runs))),
    ]
    if not manifest["tokenizer"]["chat_template_sha256"]:
        parts.append("The tokenizer has no chat template: prompts are plain text.")
    benchmarks = dict.fromkeys(run.benchmark for run in runs)
    # The pooled table comes first; a reader looks for one number.
    for name in sorted(benchmarks, key=lambda name: name != OVERALL):
        of_benchmark = [run for run in runs if run.benchmark == name]
        parts += [f"## {name}", markdown(tables.results_table(of_benchmark))]
    parts.append("\n".join(f"- **{term}**: {text}" for term, text in tables.LEGEND.items()))
    for name in (name for name in SHOWN_CHARTS if name in pictures):
        alt = name.removesuffix(".png").replace("_", " ")
        parts.append(f"![{alt}]({CHARTS}/{name})")
    for title, text, table in tables.details(runs):
        parts += [f"## {title}", text, markdown(table)]
    parts += ["## Provenance", "\n".join(f"- {n}: {text}" for n, text in describe(manifest))]
    return "\n\n".join(parts) + "\n"


def write_report(out_dir: Path, runs: Sequence[RunRecord], manifest: Manifest) -> None:
    """Write results.json, manifest.json, report.md, report.html and charts into ``out_dir``.

    results.json is {"runs": [...], "overall": [...]}. ``runs`` has one entry per method and
    benchmark. ``overall`` pools the benchmarks, and is empty with a single benchmark.
    """
    content = to_json(
        Results(
            runs=[run for run in runs if run.benchmark != OVERALL],
            overall=[run for run in runs if run.benchmark == OVERALL],
        )
    )
    charts = plots.all_charts(runs, tables.pooled_runs(runs), ())
    pictures = {name: content for chart in charts for name, content in chart.files().items()}
    (out_dir / CHARTS).mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.items():
        write_atomically(out_dir / CHARTS / name, picture)
    write_atomically(out_dir / "manifest.json", to_json(manifest))
    write_atomically(out_dir / "report.md", format_report(runs, manifest, pictures).encode())
    source = Evaluated.of(content, manifest, out_dir, out_dir.resolve().name)
    write_atomically(out_dir / "report.html", build_page([source], charts=charts))
    # Last: once results.json exists, so does the rest.
    write_atomically(out_dir / "results.json", content)


# -- the page of several folders -------------------------------------------------------------------


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return each path without the parent folders that all paths share."""
    paths = [folder.resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        raise UsageError("RUN: the same one is given twice; give each once")
    common = os.path.commonpath([path.parent for path in paths])
    return [str(path.relative_to(common)) for path in paths]


def compare_with_first(sources: Sequence[Evaluated]) -> list[Values]:
    """Compare every evaluation with the first. Return title, warnings and lines for each."""
    found = []
    baseline, *others = sources
    for other in others:
        lines: list[compare.Line] = []
        try:
            lines = compare.compare_runs(baseline, other)
            warnings = compare.find_warnings(baseline, other, lines)
        except UsageError as error:
            warnings = [f"Not compared: {str(error).removeprefix('RUN: ')}."]
        title = f"{other.name} compared with {baseline.name}"
        found.append({"title": title, "warnings": warnings, "lines": lines})
    return found


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Options):
    """Write one self-contained HTML page about evaluations."""

    PROG: ClassVar[str] = "pipedraft eval report"
    EXAMPLE: ClassVar[str] = EXAMPLE

    folders: tuple[Path, ...] = option(metavar="RUN", positional=True)
    """--out folders of evaluations"""
    out: Path | None = None
    """output page; default: RUN/report.html for one folder, report.html for several"""


build_parser = ReportOptions.parser


def run(argv: Sequence[str]) -> None:
    """Run the whole subcommand. Raise ValueError for bad input."""
    arguments = ReportOptions.read(argv)
    folders = arguments.folders
    names = short_names(folders)
    path = arguments.out
    if path is None:
        path = folders[0] / "report.html" if len(folders) == 1 else Path("report.html")
    make_place("--out", path, b'<meta name="generator" content="pipedraft eval">')
    sources = [Evaluated.read(folder, name) for folder, name in zip(folders, names, strict=True)]
    page = build_page(sources, compare_with_first(sources))
    write_atomically(path, page)
    print(f"written: {path} ({len(page) / 1e3:.0f} kB)")
