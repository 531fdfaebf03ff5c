"""Comparison entries to files (results.json, reports, plots) and a table for the terminal."""

import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipedraft.eval import tables
from pipedraft.eval.html.report import Source, build_page
from pipedraft.eval.metrics import OVERALL
from pipedraft.eval.plots import plot_acceptance_by_position, plot_equivalent_acceptance_length
from pipedraft.eval.provenance import describe
from pipedraft.eval.tables import TEXT_COLUMNS, Run, Table

LENGTH_PLOT = "equivalent_acceptance_length.png"
POSITION_PLOT = "acceptance_by_position.png"


def format_table(runs: Sequence[Run]) -> str:
    """Aligned text for the terminal, one line per entry, benchmark by benchmark."""
    benchmarks = list(dict.fromkeys(run["benchmark"] for run in runs))
    runs = sorted(runs, key=lambda run: benchmarks.index(run["benchmark"]))
    table = tables.results_table(runs, with_benchmark=True)
    return align_columns(table.header, table.rows)


def align_columns(header: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """A table of equally wide lines, numbers to the right."""
    rows = [header, *cells]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        padded = [
            text.ljust(width) if name in TEXT_COLUMNS else text.rjust(width)
            for name, text, width in zip(header, row, widths, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


def markdown(table: Table) -> str:
    align = [":--" if name in TEXT_COLUMNS else "--:" for name in table.header]
    rows = [[cell.replace("|", "\\|") for cell in row] for row in table.rows]
    lines = [table.header, align, *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def format_report(runs: Sequence[Run], manifest: dict[str, Any]) -> str:
    """report.md."""
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
    benchmarks = dict.fromkeys(run["benchmark"] for run in runs)
    # The pooled table comes first; a reader looks for one number.
    for name in sorted(benchmarks, key=lambda name: name != OVERALL):
        of_benchmark = [run for run in runs if run["benchmark"] == name]
        parts += [f"## {name}", markdown(tables.results_table(of_benchmark))]
    parts += [tables.legend(runs), f"![L' by method and benchmark]({LENGTH_PLOT})"]
    drafted = tables.drafted_runs(tables.pooled_runs(runs))
    if drafted:
        parts += ["## Tokens per round", "Share of rounds that emitted so many tokens."]
        parts += [markdown(tables.histogram_table(drafted))]
        parts += ["## Acceptance by position", tables.POSITION_TEXT]
        parts += [markdown(tables.position_table(drafted))]
        parts += [f"![Acceptance by position]({POSITION_PLOT})"]
    counted = [run for run in drafted if run.get("acceptance_by_entropy")]
    if counted:
        parts += ["## Acceptance by entropy", tables.ENTROPY_TEXT]
        parts += [markdown(tables.entropy_table(counted))]
    for name in benchmarks:
        varied = [r for r in runs if r["benchmark"] == name and tables.has_categories(r)]
        if varied:
            parts += [f"## {name} by category", markdown(tables.category_table(varied))]
    repeated = [run for run in tables.pooled_runs(runs) if run.get("repeats")]
    if repeated:
        parts += ["## Repeats", tables.REPEATS_TEXT, markdown(tables.repeats_table(repeated))]
    timed = [run for run in tables.pooled_runs(runs) if run.get("processes")]
    if timed:
        parts += ["## Processes", tables.PROCESS_TEXT, markdown(tables.process_table(timed))]
    parts += ["## Provenance", "\n".join(f"- {n}: {text}" for n, text in describe(manifest))]
    return "\n\n".join(parts) + "\n"


def _without_nan(value: Any) -> Any:
    """JSON has no NaN: a value that does not exist is null."""
    if isinstance(value, dict):
        return {key: _without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_atomically(path: Path, content: bytes) -> None:
    """A reader, or a kill at any moment, sees the whole file or the one before it."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes files that only their owner may read
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def to_json(content: Any) -> bytes:
    """Indented JSON with a list of numbers on one line; NaN and infinity become null."""
    text = json.dumps(_without_nan(content), indent=2, allow_nan=False)
    # Texts hold no raw line break, so a bracket before one opens a list.
    return (re.sub(r"\[\n[-+\d.eE,\snul]*\]", _on_one_line, text) + "\n").encode()


def _on_one_line(found: re.Match[str]) -> str:
    return "[" + " ".join(found[0].strip("[]").split()) + "]"


def write_report(out_dir: Path, runs: Sequence[Run], manifest: dict[str, Any]) -> None:
    """Write results.json, manifest.json, report.md, report.html and the plots into ``out_dir``.

    results.json: {"runs": [one entry per method and benchmark], "overall": [the same, pooled over
    the benchmarks; empty with a single benchmark]}.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    pooled = tables.pooled_runs(runs)
    results = {
        "runs": [run for run in runs if run["benchmark"] != OVERALL],
        "overall": [run for run in runs if run["benchmark"] == OVERALL],
    }
    write_atomically(out_dir / LENGTH_PLOT, plot_equivalent_acceptance_length(runs))
    write_atomically(out_dir / POSITION_PLOT, plot_acceptance_by_position(pooled))
    write_atomically(out_dir / "manifest.json", to_json(manifest))
    write_atomically(out_dir / "report.md", format_report(runs, manifest).encode())
    content = to_json(results)
    read_back = json.loads(content)
    source = Source(
        name=out_dir.resolve().name,
        entries=[*read_back["runs"], *read_back["overall"]],
        manifest=manifest,
        digest=hashlib.sha256(content).hexdigest(),
    )
    write_atomically(out_dir / "report.html", build_page([source]))
    # Last: whoever finds results.json finds the rest.
    write_atomically(out_dir / "results.json", content)
