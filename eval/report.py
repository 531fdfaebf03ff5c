"""Comparison entries to results.json, report.md, plots and a table for the terminal."""

import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipedraft.eval.metrics import AUTOREGRESSIVE, OVERALL
from pipedraft.eval.plots import plot_acceptance_by_position, plot_equivalent_acceptance_length
from pipedraft.eval.scores import NOT_ISOLATED

Run = dict[str, Any]
HISTOGRAM_LENGTHS = 8
NUM_POSITIONS = 6
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
SCORE_LEGEND = """\
- **score** share of right answers with its 95 % Wilson interval: last number (GSM8K), or the
  function passes its test (HumanEval, pass@1). Lossless decoding leaves it as the target's own.
"""
POSITION_TEXT = """\
Share accepted of the draft tokens tested as first, second, ... of their round, with 95 % intervals
over prompts.
"""


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def _bounds(interval: Sequence[float], digits: int = 3) -> str:
    low, high = interval
    return "-" if math.isnan(low) else f"[{low:.{digits}f}, {high:.{digits}f}]"


def _interval(run: Run) -> str:
    return _bounds(run["equivalent_acceptance_length"]["ci95"])


def _wallclock(run: Run, key: str, digits: int) -> str:
    return _number(run["wallclock"][key], digits) if run["wallclock"] is not None else "-"


def _lossless(run: Run) -> str:
    checked = run["lossless"]["checked"]
    return f"{checked - run['lossless']['mismatches']}/{checked}" if checked else "-"


def _score(run: Run) -> str:
    score = run.get("score")
    return f"{_number(score['mean'])} {_bounds(score['ci95'], 2)}" if score else "-"


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
TEXT_COLUMNS = {"benchmark", "method", "category", "of"}
SCORE_COLUMN: dict[str, Callable[[Run], str]] = {"score": _score}
SETTING = ("method", "n", "T", "W", "tree")
"""Columns that name an entry within its benchmark."""


def _columns(runs: Sequence[Run]) -> dict[str, Callable[[Run], str]]:
    return COLUMNS | (SCORE_COLUMN if any("score" in run for run in runs) else {})


def format_table(runs: Sequence[Run]) -> str:
    """Aligned text for the terminal, one line per entry, benchmark by benchmark."""
    benchmarks = list(dict.fromkeys(run["benchmark"] for run in runs))
    runs = sorted(runs, key=lambda run: benchmarks.index(run["benchmark"]))
    columns = {"benchmark": lambda run: run["benchmark"], **_columns(runs)}
    return align_columns(list(columns), [[cell(run) for cell in columns.values()] for run in runs])


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


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    align = [":--" if name in TEXT_COLUMNS else "--:" for name in header]
    lines = [header, align, *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _results_table(runs: Sequence[Run]) -> str:
    columns = _columns(runs)
    return _markdown(list(columns), [[cell(run) for cell in columns.values()] for run in runs])


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


def _position_table(runs: Sequence[Run]) -> str:
    """Share accepted of the tokens tested as first, second, ... of their round."""
    rows = []
    for run in runs:
        shares = [
            f"{rate:.2f} {_bounds(interval, 2)}"
            for rate, interval in zip(
                run["acceptance_by_position"], run["acceptance_by_position_ci95"], strict=True
            )
        ][:NUM_POSITIONS]
        names = [COLUMNS[name](run) for name in SETTING]
        rows.append(names + shares + ["-"] * (NUM_POSITIONS - len(shares)))
    return _markdown([*SETTING, *(str(j + 1) for j in range(NUM_POSITIONS))], rows)


def _has_categories(run: Run) -> bool:
    """What is pooled over benchmarks is shown by benchmark already."""
    drafted = run["schedule"] != AUTOREGRESSIVE and run["benchmark"] != OVERALL
    return drafted and len(run["acceptance_by_category"]) > 1


def _category_table(runs: Sequence[Run]) -> str:
    header = [*SETTING, "category", "prompts", "alpha", "95 % CI", "L' pooled", "95 % CI"]
    rows = []
    for run in runs:
        for name, category in run["acceptance_by_category"].items():
            length = category["equivalent_acceptance_length"]
            rows.append(
                [COLUMNS[column](run) for column in SETTING]
                + [name, str(category["prompts"]), _number(category["draft_acceptance_rate"])]
                + [_bounds(category["draft_acceptance_rate_ci95"]), _number(length["pooled"])]
                + [_bounds(length["ci95"])]
            )
    return _markdown(header, rows)


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
        score = run.get("score")
        if score and score["cut"]:
            lines.append(
                f"- {where}: {score['cut']} of {score['scored']} scored answers did not end before "
                "--max-new-tokens or the target's context."
            )
        if score and score["isolated"] is False:
            lines.append(f"- {where}: programs ran {NOT_ISOLATED}.")
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
    legend = LEGEND + (SCORE_LEGEND if any("score" in run for run in runs) else "")
    parts += [legend, f"![L' by method and benchmark]({LENGTH_PLOT})"]
    drafted = [r for r in pooled_runs(runs) if r["schedule"] != AUTOREGRESSIVE and r["rounds"]]
    if drafted:
        parts += ["## Tokens per round", "Share of rounds that emitted so many tokens."]
        parts += [_histogram_table(drafted)]
        parts += ["## Acceptance by position", POSITION_TEXT, _position_table(drafted)]
        parts += [f"![Acceptance by position]({POSITION_PLOT})"]
    for name in benchmarks:
        varied = [r for r in runs if r["benchmark"] == name and _has_categories(r)]
        if varied:
            parts += [f"## {name} by category", _category_table(varied)]
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
    write_atomically(out_dir / "manifest.json", to_json(manifest))
    write_atomically(out_dir / "report.md", format_report(runs, manifest).encode())
    # Last: whoever finds results.json finds the rest.
    write_atomically(out_dir / "results.json", to_json(results))
