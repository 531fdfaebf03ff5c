"""Comparison entries to results.json, report.md, plots and a table for the terminal."""

import json
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipedraft.eval.metrics import AUTOREGRESSIVE, OVERALL
from pipedraft.eval.plots import plot_acceptance_by_position, plot_equivalent_acceptance_length

Run = dict[str, Any]
HISTOGRAM_LENGTHS = 8
LENGTH_PLOT = "equivalent_acceptance_length.png"
POSITION_PLOT = "acceptance_by_position.png"
LEGEND = """\
- **n** pipeline stages of the target, **T** temperature, **W** tree width (guesses per layer,
  children of the root, or branches of a micro-batch), **tree** what is drafted at once
  (chain:levels, dynamic:levels:beams:tokens, or micro-batch:tokens), **N** tokens after the prefill
  token, **K** pipeline steps (idle and rejecting ones counted).
- **alpha** accepted over tested draft tokens; **tau** tokens per round.
- **L'** = n N / K, the equivalent acceptance length: *pooled* is n sum(N) / sum(K) with its 95 %
  bootstrap interval over conversations, *mean* the average over conversations. Autoregressive
  decoding has L' = 1 by construction for every n, so it is decoded once per temperature, on the
  smallest n of the table.
- **S** modelled speed-up under the engine's cost model. **tokens/s** and **speed-up** are measured
  in this process (prefill excluded), the latter against the autoregressive row. The three
  measures are different things and must not be compared with each other.
- **lossless** turns whose greedy text equals that of `transformers`, of turns checked. It is exact
  for a target in float32; in half precision near-ties may fall differently.
"""


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def _interval(run: Run) -> str:
    low, high = run["equivalent_acceptance_length"]["ci95"]
    return "-" if math.isnan(low) else f"[{low:.3f}, {high:.3f}]"


def _wallclock(run: Run, key: str, digits: int) -> str:
    return _number(run["wallclock"][key], digits) if run["wallclock"] is not None else "-"


def _lossless(run: Run) -> str:
    checked = run["lossless"]["checked"]
    return f"{checked - run['lossless']['mismatches']}/{checked}" if checked else "-"


COLUMNS: dict[str, Callable[[Run], str]] = {
    "method": lambda run: run["method"],
    "n": lambda run: str(run["stages"]),
    "T": lambda run: f"{run['temperature']:g}",
    "W": lambda run: str(run["tree_width"]),
    "tree": lambda run: run["tree"] or "-",
    "prompts": lambda run: str(run["prompts"]),
    "N": lambda run: str(run["tokens"]),
    "K": lambda run: str(run["steps"]),
    "alpha": lambda run: _number(run["draft_acceptance_rate"]),
    "tau": lambda run: _number(run["mean_acceptance_length"]),
    "L' pooled": lambda run: _number(run["equivalent_acceptance_length"]["pooled"]),
    "95 % CI": _interval,
    "L' mean": lambda run: _number(run["equivalent_acceptance_length"]["mean"]),
    "S": lambda run: _number(run["theoretical_speedup"]),
    "tokens/s": lambda run: _wallclock(run, "tokens_per_s", 1),
    "speed-up": lambda run: _wallclock(run, "speedup", 2),
    "lossless": _lossless,
}
TEXT_COLUMNS = {"benchmark", "method"}


def format_table(runs: Sequence[Run]) -> str:
    """Aligned text for the terminal, one line per entry, benchmark by benchmark."""
    benchmarks = list(dict.fromkeys(run["benchmark"] for run in runs))
    runs = sorted(runs, key=lambda run: benchmarks.index(run["benchmark"]))
    columns = {"benchmark": lambda run: run["benchmark"], **COLUMNS}
    rows = [list(columns)] + [[cell(run) for cell in columns.values()] for run in runs]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            text.ljust(width) if name in TEXT_COLUMNS else text.rjust(width)
            for name, text, width in zip(columns, row, widths, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    align = [":--" if name in TEXT_COLUMNS else "--:" for name in header]
    lines = [header, align, *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _results_table(runs: Sequence[Run]) -> str:
    return _markdown(list(COLUMNS), [[cell(run) for cell in COLUMNS.values()] for run in runs])


def _histogram_table(runs: Sequence[Run]) -> str:
    """Share of rounds that emitted j tokens."""
    lengths = [str(j) for j in range(HISTOGRAM_LENGTHS + 1)] + [f"> {HISTOGRAM_LENGTHS}"]
    rows = []
    for run in runs:
        counts = run["acceptance_histogram"]
        head = counts[: HISTOGRAM_LENGTHS + 1]
        head = head + [0] * (HISTOGRAM_LENGTHS + 1 - len(head))
        shares = [*head, sum(counts[HISTOGRAM_LENGTHS + 1 :])]
        names = [COLUMNS[name](run) for name in ("method", "n", "T", "W")]
        rows.append(names + [f"{count / run['rounds']:.3f}" for count in shares])
    return _markdown(["method", "n", "T", "W", *lengths], rows)


def pooled_runs(runs: Sequence[Run]) -> list[Run]:
    """The entries over all benchmarks: "overall", or the only benchmark's own."""
    return [run for run in runs if run["benchmark"] == OVERALL] or list(runs)


def _warnings(runs: Sequence[Run]) -> list[str]:
    lines = []
    for run in (run for run in runs if run["benchmark"] != OVERALL):
        where = f"{run['benchmark']}, {run['method']}, T={run['temperature']:g}"
        if run["lossless"]["mismatches"]:
            lines.append(f"- **Not lossless** ({where}): {_lossless(run)} turns agree.")
        if run["skipped_turns"]:
            lines.append(
                f"- {where}: {run['skipped_turns']} turns left out, their prompt is longer than "
                "the target's context allows."
            )
    return lines


def format_report(runs: Sequence[Run], manifest: dict[str, Any]) -> str:
    """report.md."""
    hardware, target = manifest["hardware"], manifest["target"]
    parts = [
        "# Evaluation",
        f"Target `{target['name']}` ({manifest['dtype']}), {hardware['processor']}, "
        f"{hardware['torch_threads']} threads, seed {manifest['seed']}.",
        f"    {manifest['command']}",
        *_warnings(runs),
    ]
    if not manifest["tokenizer"]["chat_template_sha256"]:
        parts.append("The tokenizer has no chat template: prompts are plain text.")
    benchmarks = dict.fromkeys(run["benchmark"] for run in runs)
    # The pooled table comes first; a reader looks for one number.
    for name in sorted(benchmarks, key=lambda name: name != OVERALL):
        parts += [f"## {name}", _results_table([r for r in runs if r["benchmark"] == name])]
    parts += [LEGEND, f"![L' by method and benchmark]({LENGTH_PLOT})"]
    drafted = [r for r in pooled_runs(runs) if r["schedule"] != AUTOREGRESSIVE and r["rounds"]]
    if drafted:
        parts += ["## Tokens per round", "Share of rounds that emitted so many tokens."]
        parts += [_histogram_table(drafted), f"![Acceptance by position]({POSITION_PLOT})"]
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


def _json(content: Any) -> bytes:
    return (json.dumps(_without_nan(content), indent=2, allow_nan=False) + "\n").encode()


def write_report(out_dir: Path, runs: Sequence[Run], manifest: dict[str, Any]) -> None:
    """Write results.json, manifest.json, report.md and the plots into ``out_dir``.

    results.json: {"runs": [one entry per method and benchmark], "overall": [the same, pooled over
    the benchmarks; empty with a single benchmark]}.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    pooled = pooled_runs(runs)
    results = {
        "runs": [run for run in runs if run["benchmark"] != OVERALL],
        "overall": [run for run in runs if run["benchmark"] == OVERALL],
    }
    write_atomically(out_dir / LENGTH_PLOT, plot_equivalent_acceptance_length(runs))
    write_atomically(out_dir / POSITION_PLOT, plot_acceptance_by_position(pooled))
    write_atomically(out_dir / "manifest.json", _json(manifest))
    write_atomically(out_dir / "report.md", format_report(runs, manifest).encode())
    # Last: whoever finds results.json finds the rest.
    write_atomically(out_dir / "results.json", _json(results))
