"""Draw the charts in docs/benchmarks.md from docs/lab/figures.csv, one per question.

python docs/images/draw_benchmarks.py --out docs/images
"""

import csv
import io
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator
from picture_files import write_pictures

from pipedraft.eval.charts import COLORS, FAINT, GRID, MARKERS, STYLE, THEMES

FIGURES = Path(__file__).parents[1] / "lab" / "figures.csv"
WIDTH, HEIGHT, ROW, EDGE = 12.4, 4.5, 0.29, 0.7
"""Inches: picture width, its height, height per row with dots, room for the axis below them."""
LETTERS = 0.062
"""Minimum distance between two names, as a share of the panel's height."""
FAR_UP = 2
"""The axis begins above 0 if all its values exceed this."""
PRICE = "price: "
MEASURED = "measured: "
"""Before the name of a series: points beside the modeled line of that name."""
Series = dict[str, list[tuple[float, float]]]


@dataclass(frozen=True, kw_only=True)
class Question:
    x_axis: str
    y_axis: str
    is_log: bool = False
    has_baseline: bool = True
    """True if autoregressive decoding is 1 by construction."""


QUESTIONS = {
    "acceptance_by_position": Question(
        x_axis="draft token of a round", y_axis="share accepted", has_baseline=False
    ),
    "speedup_by_stages": Question(
        x_axis="pipeline stages, n", y_axis="S, times autoregressive decoding", is_log=True
    ),
    "speedup_by_link": Question(
        x_axis="link latency, microseconds", y_axis="S, times autoregressive decoding", is_log=True
    ),
    "measured_by_link": Question(
        x_axis="round trip, milliseconds", y_axis="S, times autoregressive decoding", is_log=True
    ),
    "speedup_by_row_price": Question(
        x_axis="price of one more token, in passes", y_axis="S, times autoregressive decoding"
    ),
    "acceptance_by_tokens": Question(
        x_axis="supervised tokens in the run",
        y_axis="acceptance, teacher-forced",
        has_baseline=False,
    ),
    "acceptance_by_cpu_time": Question(
        x_axis="tokens per round, EAGLE-3 on the embedded target", y_axis=""
    ),
    "measured_speed": Question(
        x_axis="measured tokens/s, times autoregressive decoding", y_axis=""
    ),
}


def read_panels(question: str) -> dict[str, Series]:
    """Return panel -> series -> points (x, y); y is NaN for prices, which have only x."""
    panels: dict[str, Series] = defaultdict(lambda: defaultdict(list))
    with FIGURES.open(newline="") as file:
        for line in csv.DictReader(file):
            if line["question"] == question:
                point = float(line["x"]), float(line["y"] or "nan")
                panels[line["panel"]][line["series"]].append(point)
    return panels


def spread(heights: Sequence[float]) -> list[float]:
    """Return heights with overlapping names moved apart, as little as needed."""
    places = list(heights)
    order = sorted(range(len(places)), key=places.__getitem__)
    for _ in range(100):
        for low, high in zip(order, order[1:], strict=False):
            missing = LETTERS - (places[high] - places[low])
            if missing > 0:
                places[low] -= missing / 2
                places[high] += missing / 2
    return places


def short(value: float, _: object = None) -> str:
    """Write 20000 as 20 k and 1500000 as 1.5 M."""
    for unit, letter in ((1e6, " M"), (1e3, " k")):
        if value >= unit:
            return f"{value / unit:g}{letter}"
    return f"{value:g}"


def draw_lines(axes: Axes, series: Series, question: Question) -> None:
    lines = {n: points for n, points in series.items() if not n.startswith((PRICE, MEASURED))}
    colors = dict(zip(lines, COLORS, strict=False))
    for (name, points), marker in zip(lines.items(), MARKERS + MARKERS, strict=False):
        measured = series.get(MEASURED + name)
        dots = {"marker": marker, "markersize": 5, "color": colors[name]}
        axes.plot(*zip(*points, strict=True), **({"color": colors[name]} if measured else dots))
        if measured:
            axes.plot(*zip(*measured, strict=True), linestyle="", **dots)
    ticks = sorted({x for points in lines.values() for x, _ in points})
    if question.is_log:
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(short))
    if len(ticks) < 7:
        axes.set_xticks(ticks)
    shown = (points for name, points in series.items() if not name.startswith(PRICE))
    heights = [y for points in shown for _, y in points]
    bottom = 0.9 * min(heights) if min(heights) > FAR_UP else 0.0
    axes.set_ylim(bottom, 1.06 * max(heights))
    axes.set_xlabel(question.x_axis)
    axes.grid(axis="y")
    if question.has_baseline:
        axes.axhline(1, color=FAINT, linestyle="--", linewidth=1)
    for name, points in series.items():
        if name.startswith(PRICE):
            axes.axvline(points[0][0], color=GRID, linewidth=1)
            axes.annotate(
                name.removeprefix(PRICE),
                (points[0][0], 1),
                xycoords=("data", "axes fraction"),
                color=FAINT,
                fontsize=9,
                ha="center",
                va="bottom",
            )
    ends = {name: points[-1] for name, points in lines.items()}
    bottom, top = axes.get_ylim()
    places = spread([(y - bottom) / (top - bottom) for _, y in ends.values()])
    for (name, end), height in zip(ends.items(), places, strict=True):
        axes.annotate(
            name,
            end,
            (1.05, height),
            textcoords="axes fraction",
            color=colors[name],
            va="center",
            arrowprops={
                "arrowstyle": "-",
                "color": FAINT,
                "linewidth": 0.6,
                "shrinkA": 0,
                "shrinkB": 4,
            },
        )


def draw_dots(axes: Axes, series: Series, question: Question) -> None:
    """Draw a row per setting with a dot per run; dots below the baseline are hollow."""
    for row, points in enumerate(series.values()):
        for _, speed in points:
            face = COLORS[0] if speed > 1 else "none"
            axes.plot(speed, row, "o", markeredgecolor=COLORS[0], markerfacecolor=face)
    axes.set_yticks(range(len(series)), list(series))
    axes.set_ylim(len(series) - 0.5, -0.5)
    axes.set_xlim(0, 1.05 * max(speed for points in series.values() for _, speed in points))
    axes.axvline(1, color=FAINT, linestyle="--", linewidth=1)
    axes.grid(axis="x")
    axes.set_xlabel(question.x_axis)


def draw(name: str) -> Figure:
    question, panels = QUESTIONS[name], read_panels(name)
    are_dots = not question.y_axis
    rows = max(map(len, panels.values()))
    height = EDGE + EDGE / 2 + ROW * rows if are_dots else HEIGHT
    figure = Figure(figsize=(WIDTH, height))
    for index, (title, series) in enumerate(panels.items()):
        left, width = (0.19, 0.29) if are_dots else (0.055, 0.26)
        box = (left + 0.49 * index, EDGE / height, width, 1 - 1.55 * EDGE / height)
        axes = figure.add_axes(box)
        axes.set_title(title, pad=18 if any(label.startswith(PRICE) for label in series) else 8)
        if are_dots:
            draw_dots(axes, series, question)
        else:
            draw_lines(axes, series, question)
            axes.set_ylabel(question.y_axis if index == 0 else "")
    return figure


def svg(name: str) -> str:
    """Return a chart's file, with colors for light and dark pages."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context(STYLE | {"svg.hashsalt": name, "figure.facecolor": THEMES["paper"][0]}):
        draw(name).savefig(buffer, format="svg", metadata=nothing)
    head, _, body = buffer.getvalue().partition("<defs>")
    for variable, (light, _) in THEMES.items():
        body = body.replace(light, f"var(--{variable})")
        head = head.replace(light, f"var(--{variable})")
    themes = [";".join(f"--{k}:{pair[side]}" for k, pair in THEMES.items()) for side in (0, 1)]
    style = f"svg{{{themes[0]}}}@media(prefers-color-scheme:dark){{svg{{{themes[1]}}}}}"
    body = re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", body)
    return f"{head}<style>{style}</style><defs>{body}"


def pictures() -> Iterator[tuple[str, str]]:
    for name in QUESTIONS:
        yield name, svg(name)


if __name__ == "__main__":
    write_pictures(__doc__, pictures())
