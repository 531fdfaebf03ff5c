"""Comparison entries to files (results.json, reports, plots) and a table for the terminal."""

import hashlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from msgspec import UNSET

from pipedraft.eval import plots, tables
from pipedraft.eval.html_report import Source, build_page
from pipedraft.eval.metrics import OVERALL
from pipedraft.eval.record import Results, RunRecord, parse_results
from pipedraft.eval.tables import align_columns, describe, markdown
from pipedraft.files import to_json, write_atomically

LENGTH_PLOT = "equivalent_acceptance_length.png"
POSITION_PLOT = "acceptance_by_position.png"


def format_table(runs: Sequence[RunRecord]) -> str:
    """Aligned text for the terminal, one line per entry, benchmark by benchmark."""
    benchmarks = list(dict.fromkeys(run.benchmark for run in runs))
    runs = sorted(runs, key=lambda run: benchmarks.index(run.benchmark))
    table = tables.results_table(runs, with_benchmark=True)
    return align_columns(table.header, table.rows)


def format_report(
    runs: Sequence[RunRecord], manifest: dict[str, Any], pictures: Collection[str] = ()
) -> str:
    """report.md.

    Args:
        pictures: files of plots that there are.
    """
    hardware, target = manifest["hardware"], manifest["target"]
    parts = [
        "# Evaluation",
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
    parts += [f"![L' by method and benchmark]({LENGTH_PLOT})"] * (LENGTH_PLOT in pictures)
    drafted = tables.drafted_runs(tables.pooled_runs(runs))
    if drafted:
        parts += ["## Tokens per round", "Share of rounds that emitted so many tokens."]
        parts += [markdown(tables.histogram_table(drafted))]
        parts += ["## Acceptance by position", tables.POSITION_TEXT]
        parts += [markdown(tables.position_table(drafted))]
        parts += [f"![Acceptance by position]({POSITION_PLOT})"] * (POSITION_PLOT in pictures)
    counted = [run for run in drafted if run.acceptance_by_entropy]
    if counted:
        parts += ["## Acceptance by entropy", tables.ENTROPY_TEXT]
        parts += [markdown(tables.entropy_table(counted))]
    for name in benchmarks:
        varied = [r for r in runs if r.benchmark == name and tables.has_categories(r)]
        if varied:
            parts += [f"## {name} by category", markdown(tables.category_table(varied))]
    repeated = [run for run in tables.pooled_runs(runs) if run.repeats is not UNSET]
    if repeated:
        parts += ["## Repeats", tables.REPEATS_TEXT, markdown(tables.repeats_table(repeated))]
    timed = [run for run in tables.pooled_runs(runs) if run.processes]
    if timed:
        parts += ["## Processes", tables.PROCESS_TEXT, markdown(tables.process_table(timed))]
    parts += ["## Provenance", "\n".join(f"- {n}: {text}" for n, text in describe(manifest))]
    return "\n\n".join(parts) + "\n"


def write_report(out_dir: Path, runs: Sequence[RunRecord], manifest: dict[str, Any]) -> None:
    """Write results.json, manifest.json, report.md, report.html and the plots into ``out_dir``.

    results.json: {"runs": [one entry per method and benchmark], "overall": [the same, pooled over
    the benchmarks; empty with a single benchmark]}.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    content = to_json(
        Results(
            runs=[run for run in runs if run.benchmark != OVERALL],
            overall=[run for run in runs if run.benchmark == OVERALL],
        )
    )
    charts = {
        LENGTH_PLOT: plots.lengths_by_benchmark(runs),
        POSITION_PLOT: plots.acceptance_by_position(tables.pooled_runs(runs)),
    }
    pictures = {name: chart.png() for name, chart in charts.items() if not chart.is_empty}
    for name, picture in pictures.items():
        write_atomically(out_dir / name, picture)
    write_atomically(out_dir / "manifest.json", to_json(manifest))
    write_atomically(out_dir / "report.md", format_report(runs, manifest, pictures).encode())
    source = Source(
        name=out_dir.resolve().name,
        entries=parse_results(content, str(out_dir / "results.json")).entries,
        manifest=manifest,
        digest=hashlib.sha256(content).hexdigest(),
    )
    write_atomically(out_dir / "report.html", build_page([source]))
    # Last: whoever finds results.json finds the rest.
    write_atomically(out_dir / "results.json", content)
