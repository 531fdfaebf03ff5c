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
    return run["method"], run["stages"], run["temperature"], run["tree_width"], run["tree"]


def _drafted(runs: Sequence[Run]) -> dict[tuple, list[Run]]:
    """Entries of each method and setting; the baseline is a line, not a method."""
    series: dict[tuple, list[Run]] = {}
    for run in runs:
        if run["schedule"] != AUTOREGRESSIVE:
            series.setdefault(_key(run), []).append(run)
    return series


def _labels(series: dict[tuple, list[Run]]) -> list[str]:
    """Method and n; temperature, width and tree only where they differ between the lines."""
    varies = [len({key[i] for key in series}) > 1 for i in range(5)]
    labels = []
    for method, stages, temperature, width, tree in series:
        label = f"{method}, n={stages}"
        label += f", T={temperature:g}" * varies[2]
        label += f", {tree}" * varies[4] if tree else f", W={width}" * varies[3]
        labels.append(label)
    return labels


def _new_figure(width: float) -> "tuple[Figure, Axes]":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def _to_png(figure: "Figure", num_lines: int) -> bytes:
    if num_lines:
        # Below the axes, so that it covers no point.
        figure.legend(loc="outside lower center", ncols=min(num_lines, 4), frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def plot_equivalent_acceptance_length(runs: Sequence[Run]) -> bytes:
    """L' of every method and n with its 95 % interval, by benchmark, against AR's 1."""
    benchmarks = list(dict.fromkeys(run["benchmark"] for run in runs))
    series = _drafted(runs)
    spacing = DODGE / max(len(series), 1)
    figure, axes = _new_figure(max(6.4, 1.6 * len(benchmarks) + 0.3 * len(series) + 2))
    axes.axhline(1, color="0.35", linestyle="--", linewidth=1.2, label="autoregressive, any n")
    for index, (label, entries) in enumerate(zip(_labels(series), series.values(), strict=True)):
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
    axes.set_xticks(range(len(benchmarks)), benchmarks)
    axes.set_xlim(-0.5, len(benchmarks) - 0.5)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("equivalent acceptance length L' = nN/K")
    axes.set_title("Equivalent acceptance length (pooled, 95 % interval over prompts)", fontsize=11)
    return _to_png(figure, len(series) + 1)


def plot_acceptance_by_position(runs: Sequence[Run]) -> bytes:
    """Share of accepted draft tokens at each position of a round, given that it was tested."""
    from matplotlib.ticker import MaxNLocator

    series = _drafted(runs)
    figure, axes = _new_figure(6.4)
    drawn = 0
    for index, (label, entries) in enumerate(zip(_labels(series), series.values(), strict=True)):
        positions, rates = [], []
        num_positions = max(len(run["position_tests"]) for run in entries)
        for j in range(num_positions):
            counted = [run for run in entries if j < len(run["position_tests"])]
            tests = sum(run["position_tests"][j] for run in counted)
            if tests >= MIN_TESTS:
                positions.append(j + 1)
                rates.append(sum(run["position_accepts"][j] for run in counted) / tests)
        if positions:
            drawn += 1
            axes.plot(
                positions,
                rates,
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
