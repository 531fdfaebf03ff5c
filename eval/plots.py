"""Select an evaluation's charts, for report.md and report.html."""

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

from . import tables
from .charts import Chart, Estimate, IntervalChart, LineChart
from .metrics import AUTOREGRESSIVE
from .record import LatencyRecord, RunRecord

MIN_TESTS = 20
"""Minimum tests to draw a position: with fewer, its acceptance is noise."""
MAX_POSITIONS = 16
PLAIN = "The dashed line is autoregressive decoding, 1 by construction."
Series = dict[str, dict[Any, Estimate]]
"""label -> place -> estimate."""


def drafted_series(runs: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    """Return the entries with a draft, grouped under one label per method and setting.

    A label names the method and n. It names temperature, shape and folder only where they vary.
    """
    drafted = [run for run in runs if run.schedule != AUTOREGRESSIVE]
    names = [
        (run.method, f"n={run.stages}", f"T={run.sampling}", run.shape, run.folder)
        for run in drafted
    ]
    columns = zip(*names, strict=True)
    is_shown = [index < 2 or len(set(column)) > 1 for index, column in enumerate(columns)]
    labeled: dict[str, list[RunRecord]] = {}
    for run, parts in zip(drafted, names, strict=True):
        labeled.setdefault(", ".join(compress(parts, is_shown)), []).append(run)
    return labeled


def _by_temperature(
    runs: Sequence[RunRecord], values: Callable[[list[RunRecord]], dict[Any, Estimate]]
) -> dict[str, Series]:
    """Return one panel per temperature, with all non-empty series."""
    drafted = tables.drafted_runs(runs)
    by_temperature = sorted(drafted, key=lambda run: run.temperature)
    samplings = dict.fromkeys(run.sampling for run in by_temperature)
    panels = {}
    for sampling in samplings:
        labeled = drafted_series([run for run in drafted if run.sampling == sampling])
        series = {label: found for label, own in labeled.items() if (found := values(own))}
        if series:
            panels[f"T = {sampling}" * (len(samplings) > 1)] = series
    return panels


def _length(run: RunRecord) -> Estimate:
    length = run.equivalent_acceptance_length
    return Estimate.of(length.pooled, length.ci95)


def lengths_by_benchmark(runs: Sequence[RunRecord]) -> Chart:
    return IntervalChart(
        title="L' by benchmark",
        caption=f"Pooled over prompts, with 95 % intervals. {PLAIN}",
        panels=_by_temperature(runs, lambda own: {run.benchmark: _length(run) for run in own}),
        axis="equivalent acceptance length L'",
        reference=1,
    )


def lengths_by_stages(pooled: Sequence[RunRecord]) -> Chart:
    """Draw L' against stages. Each method with several stage counts gets a line."""
    series: Series = {}
    for run in sorted(tables.drafted_runs(pooled), key=lambda run: run.stages):
        label = f"{run.method}, T={run.sampling}, {run.shape}"
        if run.stages in series.get(label, {}):  # an earlier folder has the same number
            label += f" ({run.folder})"
        series.setdefault(label, {})[run.stages] = _length(run)
    series = {label: found for label, found in series.items() if len(found) > 1}
    return LineChart(
        title="L' against n",
        caption=f"Pooled over all prompts, with 95 % intervals. {PLAIN}",
        panels={"": series},
        axis="equivalent acceptance length L'",
        place_axis="pipeline stages n",
        reference=1,
        has_table=True,
    )


def _position_rates(entries: Sequence[RunRecord]) -> dict[int, Estimate]:
    """Return pooled acceptance rates by position, counted from 1, with at least MIN_TESTS tests."""
    # Intervals belong to one entry; several have none in common.
    intervals = entries[0].acceptance_by_position_ci95 if len(entries) == 1 else ()
    rates = {}
    for j in range(min(MAX_POSITIONS, max(len(run.position_tests) for run in entries))):
        counted = [run for run in entries if j < len(run.position_tests)]
        tests = sum(run.position_tests[j] for run in counted)
        if tests >= MIN_TESTS:
            rate = sum(run.position_accepts[j] for run in counted) / tests
            rates[j + 1] = Estimate(rate, *intervals[j] if j < len(intervals) else ())
    return rates


def acceptance_by_position(pooled: Sequence[RunRecord]) -> Chart:
    return LineChart(
        title="Acceptance by position",
        caption="Share accepted of the draft tokens tested at each of the first "
        f"{MAX_POSITIONS} positions of a round, where {MIN_TESTS} or more were tested, with 95 % "
        "intervals over prompts.",
        panels=_by_temperature(pooled, _position_rates),
        axis="share accepted",
        place_axis="position in the round",
        limits=(0, 1.02),
    )


def latencies(rows: Sequence[LatencyRecord]) -> Chart:
    """Draw the time per token on links."""
    panels: dict[str, Series] = {}
    for row in sorted(rows, key=lambda row: row.temperature):
        label = ", ".join(filter(None, (row.method, row.folder)))
        label += " *" * bool(row.caveat)
        series = panels.setdefault(f"T = {row.sampling}", {})
        series.setdefault(label, {})[row.network] = Estimate.of(row.ms_per_token, row.ci95)
    caveats = dict.fromkeys(row.caveat for row in rows if row.caveat)
    return IntervalChart(
        title="Latency against network",
        caption="Time of a token on simulated links, with 95 % intervals over prompts."
        + "".join(f" * {caveat}." for caveat in caveats),
        panels=panels,
        axis="ms per token",
        has_table=True,
    )


def all_charts(
    runs: Sequence[RunRecord], pooled: Sequence[RunRecord], latency: Sequence[LatencyRecord]
) -> list[Chart]:
    """Return all charts with data.

    Args:
        runs: every entry.
        pooled: entries pooled over all prompts in their folder.
    """
    charts = [
        lengths_by_benchmark(runs),
        lengths_by_stages(pooled),
        acceptance_by_position(pooled),
        latencies(latency),
    ]
    return [chart for chart in charts if any(chart.panels.values())]
