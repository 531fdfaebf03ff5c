"""Which pictures report.html shows of the entries of results.json, and why one is left out."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pipedraft.eval import tables
from pipedraft.eval.html.charts import (
    Estimate,
    Frame,
    Missing,
    Picture,
    Span,
    histogram_chart,
    interval_chart,
    line_chart,
    share_chart,
    time_chart,
)
from pipedraft.eval.metrics import AUTOREGRESSIVE, ratio
from pipedraft.eval.plots import MIN_TESTS, drafted_series, tested_positions
from pipedraft.eval.tables import Run, Table

Result = Picture | Missing
LENGTHS = 15
"""Of a histogram; the last bar is all that is longer."""
POSITIONS = 16
SPANS = 40
"""Of the busiest process in a time line: about so many bars can be told apart."""
PLAIN = "The dashed line is autoregressive decoding, 1 by construction."


def series_table(
    series: Mapping[str, Mapping[Any, Estimate]], place: str, value: str, digits: int = 3
) -> Table:
    """The numbers of a chart that no other table has."""
    rows = [
        [label, str(x), tables.number(e.value, digits), tables.bounds((e.low, e.high), digits)]
        for label, found in series.items()
        for x, e in found.items()
    ]
    return Table(["method", place, value, "95 % CI"], rows)


def _length(run: Run) -> Estimate:
    length = run["equivalent_acceptance_length"]
    return Estimate.of(length["pooled"], length["ci95"])


def _by_temperature(runs: Sequence[Run]) -> Iterator[tuple[str, str, list[Run]]]:
    """Entries with a draft by temperature, since all of them in one picture are a tangle.

    Yields:
        End of a picture's name, end of its title, entries.
    """
    drafted = tables.drafted_runs(runs)
    temperatures = sorted({run["temperature"] for run in drafted})
    for number, temperature in enumerate(temperatures):
        alike = [run for run in drafted if run["temperature"] == temperature]
        yield f"-{number + 1}", f", T = {temperature:g}" * (len(temperatures) > 1), alike


def lengths_by_benchmark(runs: Sequence[Run]) -> Iterator[Result]:
    if not tables.drafted_runs(runs):
        yield Missing(title="L' by benchmark", reason="no entry has a draft")
    for name, title, alike in _by_temperature(runs):
        series = {
            label: {run["benchmark"]: _length(run) for run in entries}
            for label, entries in drafted_series(alike).items()
        }
        frame = Frame(
            name=f"lengths{name}",
            title=f"L' by benchmark{title}",
            caption=f"Pooled over prompts, with 95 % intervals. {PLAIN}",
            axis="equivalent acceptance length L'",
        )
        yield interval_chart(frame, series, reference=1)


def _against(
    runs: Sequence[Run], place: Callable[[Run], float | None], name: Callable[[Run], str]
) -> dict[str, dict[float, Run]]:
    """Entries that differ in ``place`` alone, where there are several of them.

    Entries of different folders may make a line. Where folders hold the same place twice, the
    second ones make another line, in the order of the folders; labels then name these.
    """
    lines: dict[str, list[dict[float, Run]]] = {}
    for run in runs:
        x = place(run)
        if x is None:
            continue
        alike = lines.setdefault(name(run), [])
        line = next((line for line in alike if x not in line), None)
        if line is None:
            alike.append(line := {})
        line[x] = run
    found = {}
    for label, alike in lines.items():
        for line in (dict(sorted(line.items())) for line in alike):
            if len(line) > 1:
                folders = ", ".join(dict.fromkeys(run.get("run", "") for run in line.values()))
                found[f"{label} ({folders})" if len(alike) > 1 else label] = line
    return found


def _shape(run: Run) -> str:
    return run["tree"] or f"W={run['tree_width']}"


def _lines(frame: Frame, series: Mapping[str, Mapping[float, Estimate]], reason: str) -> Result:
    """
    Args:
        reason: why there are none.
    """
    if not series:
        return Missing(title=frame.title, reason=reason)
    return line_chart(frame, series, reference=1)


def lengths_by_stages(pooled: Sequence[Run]) -> Iterator[Result]:
    lines = _against(
        tables.drafted_runs(pooled),
        lambda run: run["stages"],
        lambda run: f"{run['method']}, T={run['temperature']:g}, {_shape(run)}",
    )
    series = {label: {n: _length(run) for n, run in line.items()} for label, line in lines.items()}
    frame = Frame(
        name="stages",
        title="L' against n",
        caption=f"Pooled over all prompts, with 95 % intervals. {PLAIN}",
        axis="equivalent acceptance length L'",
        other_axis="pipeline stages n",
        table=series_table(series, "n", "L' pooled"),
    )
    reason = (
        "no method was run with several numbers of stages; give the folders of such evaluations "
        "together"
    )
    yield _lines(frame, series, reason)


def draft_length(run: Run) -> float | None:
    """Guesses on the longest path of what is drafted at once; None where it has no such bound."""
    _, _, sizes = (run["tree"] or "").partition(":")
    first = sizes.partition(":")[0]
    return int(first) if first.isdecimal() else None


def speedup_by_draft_length(pooled: Sequence[Run]) -> Iterator[Result]:
    lines = _against(
        [run for run in tables.drafted_runs(pooled) if tables.is_known(run["theoretical_speedup"])],
        draft_length,
        lambda run: (
            f"{run['method']}, n={run['stages']}, T={run['temperature']:g}, "
            + (run["tree"] or "").partition(":")[0]
        ),
    )
    series = {
        label: {length: Estimate(run["theoretical_speedup"]) for length, run in line.items()}
        for label, line in lines.items()
    }
    frame = Frame(
        name="draft-length",
        title="S against draft length",
        caption=f"Modelled speed-up under each run's cost model. {PLAIN}",
        axis="modelled speed-up S",
        other_axis="guesses on the longest path",
        table=series_table(series, "draft length", "S"),
    )
    reason = "no method was run with several draft lengths (--tree chain:3,chain:7)"
    yield _lines(frame, series, reason)


def _by_position(entries: Sequence[Run]) -> dict[float, Estimate]:
    rates = dict(tested_positions(entries)[:POSITIONS])
    # Intervals are those of one entry; several have none in common.
    intervals = entries[0].get("acceptance_by_position_ci95", ()) if len(entries) == 1 else ()
    bounds = dict(enumerate(intervals, start=1))
    return {j: Estimate.of(rate, bounds.get(j, (None, None))) for j, rate in rates.items()}


def acceptance_by_position(pooled: Sequence[Run]) -> Iterator[Result]:
    found = False
    for name, title, alike in _by_temperature(pooled):
        series = {label: _by_position(runs) for label, runs in drafted_series(alike).items()}
        series = {label: rates for label, rates in series.items() if rates}
        frame = Frame(
            name=f"position{name}",
            title=f"Acceptance by position{title}",
            caption="Share accepted of the draft tokens tested at each of the first "
            f"{POSITIONS} positions of a round, where {MIN_TESTS} or more were tested; 95 % "
            "intervals over prompts as bands.",
            axis="share accepted",
            other_axis="position in the round",
            table=tables.position_table(alike),
        )
        if series:
            found = True
            yield line_chart(frame, series, top=1.02)
    if not found:
        yield Missing(
            title="Acceptance by position",
            reason=f"no position of a draft was tested {MIN_TESTS} times",
        )


def acceptance_by_category(runs: Sequence[Run]) -> Iterator[Result]:
    varied = [run for run in runs if tables.has_categories(run)]
    if not varied:
        yield Missing(
            title="Acceptance by category", reason="no benchmark has prompts of several categories"
        )
        return
    several = len({run["benchmark"] for run in varied}) > 1
    series: dict[str, dict[str, Estimate]] = {}
    for label, entries in drafted_series(varied).items():
        for run in entries:
            for name, found in run["acceptance_by_category"].items():
                rate = found["draft_acceptance_rate"]
                if tables.is_known(rate):
                    place = f"{run['benchmark']}/{name}" if several else name
                    estimate = Estimate.of(rate, found["draft_acceptance_rate_ci95"])
                    series.setdefault(label, {})[place] = estimate
    benchmarks = ", ".join(dict.fromkeys(run["benchmark"] for run in varied))
    frame = Frame(
        name="category",
        title="Acceptance by category",
        caption=f"Share accepted of the tested draft tokens, prompts of {benchmarks}, with 95 % "
        "intervals over prompts.",
        axis="acceptance rate alpha",
        table=tables.category_table(varied),
    )
    yield interval_chart(frame, series, limits=(0, 1))


def acceptance_by_entropy(pooled: Sequence[Run]) -> Iterator[Result]:
    counted = [run for run in tables.drafted_runs(pooled) if run.get("acceptance_by_entropy")]
    if not counted:
        yield Missing(
            title="Acceptance by entropy", reason="results.json has no entropies of the target"
        )
        return
    series: dict[str, dict[str, Estimate]] = {}
    for label, entries in drafted_series(counted).items():
        for found in (bin for run in entries for bin in run["acceptance_by_entropy"]):
            if found["tests"]:
                estimate = Estimate.of(
                    found["draft_acceptance_rate"], found["draft_acceptance_rate_ci95"]
                )
                series.setdefault(label, {})[tables.entropy_range(found)] = estimate
    frame = Frame(
        name="entropy",
        title="Acceptance by entropy",
        caption="Share accepted of the draft tokens tested where the target's distribution has so "
        "many nats, with 95 % intervals over prompts.",
        axis="share accepted",
        table=tables.entropy_table(counted),
    )
    yield interval_chart(frame, series, limits=(0, 1))


def tokens_per_round(pooled: Sequence[Run]) -> Iterator[Result]:
    if not tables.drafted_runs(pooled):
        yield Missing(title="Tokens per round", reason="no entry has a draft")
    for name, title, alike in _by_temperature(pooled):
        series = {}
        for label, entries in drafted_series(alike).items():
            counts = [0] * (LENGTHS + 1)
            for run in entries:
                for length, count in enumerate(run["acceptance_histogram"][1:]):
                    counts[min(length, LENGTHS)] += count
            series[label] = [ratio(count, sum(counts)) for count in counts]
        frame = Frame(
            name=f"histogram{name}",
            title=f"Tokens per round{title}",
            caption="Share of rounds that emitted so many tokens, the target's own one included.",
            axis="share of rounds",
            other_axis="tokens of a round",
            table=tables.histogram_table(alike),
        )
        # Every second length, and none beside the last bar: there is no more room.
        places = [str(j) if j % 2 and j < LENGTHS else "" for j in range(1, LENGTHS + 1)]
        yield histogram_chart(frame, series, [*places, f">{LENGTHS}"])


def seconds_by_process(pooled: Sequence[Run]) -> Iterator[Result]:
    timed = [run for run in pooled if run.get("processes")]
    if not timed:
        yield Missing(
            title="Where the time went", reason="results.json has no times of the processes"
        )
        return
    series = {}
    for run in timed:
        label = ", ".join(filter(None, (run["method"], f"n={run['stages']}", run.get("run", ""))))
        label += f", T={run['temperature']:g}" + f", {_shape(run)}" * (
            run["schedule"] != AUTOREGRESSIVE
        )
        series[label] = {p["name"]: p["seconds"] for p in run["processes"]}
    frame = Frame(
        name="processes",
        title="Where the time went",
        caption="What each process did, over all prompts: work is tall, handing over low, waiting "
        "lowest.",
        axis="seconds",
        table=tables.process_table(timed),
    )
    yield share_chart(frame, series)


def time_line(name: str, number: int, tracks: Mapping[str, Sequence[Span]]) -> Picture:
    """A few steps of decoding from a Chrome trace, after the prefill.

    Args:
        tracks: process -> its spans.
    """
    spans = [span for found in tracks.values() for span in found]
    end = max(span.start + span.duration for span in spans)
    prefills = [span.start + span.duration for span in spans if span.kind == "prefill"]
    low = max(prefills, default=0.0)
    if not any(span.start >= low for span in spans):
        low = 0.0
    starts = [sorted(s.start for s in found if s.start >= low) for found in tracks.values()]
    busiest = max(starts, key=len)
    high = busiest[SPANS] if len(busiest) > SPANS else end
    kinds = sorted({span.kind for span in spans})
    rows = [
        [process, *(f"{sum(s.duration for s in found if s.kind == kind):.1f}" for kind in kinds)]
        for process, found in tracks.items()
    ]
    frame = Frame(
        name=f"time-{number}",
        title=f"Time line of {name}",
        caption=f"What each process did from {low:.1f} to {high:.1f} ms of {end:.1f}: work is "
        "tall, handing over low, waiting lowest; a span inside another one is drawn over it. The "
        "table has the whole time.",
        axis="ms",
        table=Table(["process", *(f"{kind} ms" for kind in kinds)], rows),
    )
    return time_chart(frame, tracks, (low, high))


def latencies(rows: Sequence[dict[str, Any]]) -> Iterator[Result]:
    """Of edge-cloud decoding, a picture for each temperature."""
    if not rows:
        yield Missing(
            title="Latency against network",
            reason='results.json has no "latency" (edge-cloud runs)',
        )
    for number, temperature in enumerate(sorted({row["temperature"] for row in rows})):
        series: dict[str, dict[str, Estimate]] = {}
        alike = [row for row in rows if row["temperature"] == temperature]
        for row in alike:
            label = ", ".join(filter(None, (row["method"], row.get("run"))))
            label += " *" * bool(row.get("caveat"))
            estimate = Estimate.of(row["ms_per_token"], row["ci95"] or (None, None))
            series.setdefault(label, {})[row["network"]] = estimate
        caveats = dict.fromkeys(row["caveat"] for row in alike if row.get("caveat"))
        frame = Frame(
            name=f"latency-{number + 1}",
            title=f"Latency against network, T = {temperature:g}",
            caption="Time of a token on simulated links, with 95 % intervals over prompts. "
            + " ".join(f"* {caveat}." for caveat in caveats),
            axis="ms per token",
            table=series_table(series, "network", "ms per token", digits=1),
        )
        yield interval_chart(frame, series)


def all_pictures(
    runs: Sequence[Run], pooled: Sequence[Run], latency: Sequence[dict[str, Any]]
) -> list[Result]:
    """
    Args:
        runs: every entry.
        pooled: those over all prompts of their folder.
        latency: rows of {"method", "network", "temperature", "ms_per_token", "ci95"}, and
            "caveat" where the text is not the target's own.
    """
    return [
        *lengths_by_benchmark(runs),
        *lengths_by_stages(pooled),
        *speedup_by_draft_length(pooled),
        *acceptance_by_position(pooled),
        *acceptance_by_entropy(pooled),
        *acceptance_by_category(runs),
        *tokens_per_round(pooled),
        *seconds_by_process(pooled),
        *latencies(latency),
    ]
