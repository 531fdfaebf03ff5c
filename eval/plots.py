"""Figures of a comparison, as PNG bytes. matplotlib without a display, no global state."""

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pipedraft.eval.metrics import AUTOREGRESSIVE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Run = dict[str, Any]
# Okabe and Ito's palette, told apart by colour-blind readers too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vP*"
MIN_TESTS = 20
"""Positions tested less often are not drawn: their acceptance is noise."""
DODGE = 0.6
"""Width that the methods of one benchmark share, in units of the distance of benchmarks."""


def _key(run: Run) -> tuple:
    setting = run["method"], run["stages"], run["temperature"], run["tree_width"], run["tree"]
    return *setting, run.get("run")


def drafted_series(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Entries of each method and setting by label; the baseline is a line, not a method.

    A label has method and n; temperature, width, tree and run only where labels need them.
    """
    series: dict[tuple, list[Run]] = {}
    for run in runs:
        if run["schedule"] != AUTOREGRESSIVE:
            series.setdefault(_key(run), []).append(run)
    varies = [len({key[i] for key in series}) > 1 for i in range(5)]
    names_run = len({key[:-1] for key in series}) < len(series)
    labelled = {}
    for key, entries in series.items():
        method, stages, temperature, width, tree, name = key
        label = f"{method}, n={stages}"
        label += f", T={temperature:g}" * varies[2]
        label += f", {tree}" * varies[4] if tree else f", W={width}" * varies[3]
        labelled[label + f", {name}" * names_run] = entries
    return labelled


def tested_positions(entries: Sequence[Run]) -> list[tuple[int, float]]:
    """(position from 1 up, share accepted), entries pooled; those tested often enough."""
    found = []
    for j in range(max(len(run["position_tests"]) for run in entries)):
        counted = [run for run in entries if j < len(run["position_tests"])]
        tests = sum(run["position_tests"][j] for run in counted)
        if tests >= MIN_TESTS:
            found.append((j + 1, sum(run["position_accepts"][j] for run in counted) / tests))
    return found


def _new_figure(width: float) -> "tuple[Figure, Axes]":
    figure, (axes,) = _new_panels(width, 1)
    return figure, axes


def _new_panels(width: float, number: int) -> "tuple[Figure, list[Axes]]":
    """Side by side, with one scale of y."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(1, number, sharey=True, squeeze=False)[0])
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.9", linewidth=0.8)
        axes.set_axisbelow(True)
    return figure, panels


def _to_png(figure: "Figure", num_lines: int) -> bytes:
    if num_lines:
        # Below the axes, so that it covers no point.
        legend = figure.legend(loc="outside lower center", ncols=min(num_lines, 4), frameon=False)
        for text in legend.get_texts():
            text.set_parse_math(False)  # a name may hold a dollar sign
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def plot_equivalent_acceptance_length(runs: Sequence[Run]) -> bytes:
    """L' of every method and n with its 95 % interval, by benchmark, against AR's 1."""
    benchmarks = list(dict.fromkeys(run["benchmark"] for run in runs))
    series = drafted_series(runs)
    spacing = DODGE / max(len(series), 1)
    figure, axes = _new_figure(max(6.4, 1.6 * len(benchmarks) + 0.3 * len(series) + 2))
    axes.axhline(1, color="0.35", linestyle="--", linewidth=1.2, label="autoregressive, any n")
    for index, (label, entries) in enumerate(series.items()):
        x, y, below, above = [], [], [], []
        for run in entries:
            length = run["equivalent_acceptance_length"]
            low, high = length["ci95"]
            x.append(benchmarks.index(run["benchmark"]) + spacing * (index - (len(series) - 1) / 2))
            y.append(length["pooled"])
            below.append(0 if math.isnan(low) else max(length["pooled"] - low, 0))
            above.append(0 if math.isnan(high) else max(high - length["pooled"], 0))
        axes.errorbar(
            x,
            y,
            yerr=[below, above],
            fmt=MARKERS[index % len(MARKERS)],
            color=COLOURS[index % len(COLOURS)],
            markersize=6,
            capsize=3,
            label=label,
        )
    axes.set_xticks(range(len(benchmarks)), benchmarks, parse_math=False)
    axes.set_xlim(-0.5, len(benchmarks) - 0.5)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("equivalent acceptance length L' = nN/K")
    axes.set_title("Equivalent acceptance length (pooled, 95 % interval over prompts)", fontsize=11)
    return _to_png(figure, len(series) + 1)


def plot_acceptance_by_position(runs: Sequence[Run]) -> bytes:
    """Share of accepted draft tokens at each position of a round, given that it was tested."""
    from matplotlib.ticker import MaxNLocator

    series = drafted_series(runs)
    figure, axes = _new_figure(6.4)
    drawn = 0
    for index, (label, entries) in enumerate(series.items()):
        positions = tested_positions(entries)
        if positions:
            drawn += 1
            axes.plot(
                *zip(*positions, strict=True),
                marker=MARKERS[index % len(MARKERS)],
                markersize=4,
                color=COLOURS[index % len(COLOURS)],
                label=label,
            )
    if not drawn:
        text = f"no position was tested {MIN_TESTS} times"
        axes.text(0.5, 0.5, text, ha="center", transform=axes.transAxes, color="0.35")
    axes.set_ylim(0, 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(f"position of the draft token in its round (tested at least {MIN_TESTS} times)")
    axes.set_ylabel("acceptance, given that it was tested")
    axes.set_title("Acceptance by position", fontsize=11)
    return _to_png(figure, drawn)


def plot_retention(targets: Sequence[dict[str, Any]], drafts: Sequence[dict[str, Any]]) -> bytes:
    """Acceptance of every draft on every target with its interval, by the target's drift.

    Args:
        targets: entries of a retention report: domain, target, kl.
        drafts: domain, target, draft, alpha, alpha_ci95.
    """
    domains = list(dict.fromkeys(entry["domain"] for entry in targets))
    names = list(dict.fromkeys(entry["draft"] for entry in drafts))
    drift = {(entry["domain"], entry["target"]): entry["kl"] for entry in targets}
    figure, panels = _new_panels(max(6.4, 4.4 * len(domains)), len(domains))
    for domain, axes in zip(domains, panels, strict=True):
        for index, name in enumerate(names):
            own = [e for e in drafts if (e["domain"], e["draft"]) == (domain, name)]
            own.sort(key=lambda e: drift[domain, e["target"]])
            low, high = zip(*(e["alpha_ci95"] for e in own), strict=True)
            alpha = [e["alpha"] for e in own]
            axes.errorbar(
                [drift[domain, e["target"]] for e in own],
                alpha,
                yerr=[
                    [max(a - x, 0) for a, x in zip(alpha, low, strict=True)],
                    [max(x - a, 0) for a, x in zip(alpha, high, strict=True)],
                ],
                marker=MARKERS[index % len(MARKERS)],
                color=COLOURS[index % len(COLOURS)],
                markersize=5,
                linewidth=1,
                capsize=2,
                label=name if domain == domains[0] else None,
            )
        axes.set_ylim(0, 1.02)
        axes.set_title(domain, fontsize=11, parse_math=False)
        axes.set_xlabel("drift: KL(base || target) per token, nats")
    panels[0].set_ylabel("acceptance rate")
    return _to_png(figure, len(names))
