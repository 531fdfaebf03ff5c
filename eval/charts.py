"""Draw charts as PNG files for report.md, SVG for report.html, and CSV files of the numbers.

Charts are drawn in the light theme. The SVG uses CSS variables for its colors, so one drawing
serves a light and a dark page. matplotlib runs without a display and without global state.
"""

import csv
import io
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from ..files import Values
from .record import Interval, is_known, number_or_nan
from .tables import Table, bounds, number

# (light, dark). Text has a contrast of 4.5 or more against paper and panel, marks 3 or more; series
# differ by 20 or more in CIELAB for color-blind readers too (tests/eval/test_eval_html.py).
THEMES = {
    "paper": ("#ffffff", "#15181d"),
    "panel": ("#f4f5f7", "#20252c"),
    "ink": ("#1c2026", "#e8eaed"),
    "faint": ("#5b6470", "#a4adb8"),
    "grid": ("#d9dde3", "#3a414b"),
    "link": ("#0b57b0", "#8ab8f5"),
    "alarm": ("#a3261b", "#ff9a8f"),
    "series-1": ("#002de3", "#b9e3ff"),
    "series-2": ("#6e1100", "#ff8a2f"),
    "series-3": ("#046d4b", "#30b49a"),
    "series-4": ("#b54594", "#f3e8a1"),
    "series-5": ("#96710b", "#ac7c49"),
    "series-6": ("#0086ff", "#5b759f"),
    "series-7": ("#5e279e", "#a147e9"),
    "series-8": ("#4c1842", "#b79dff"),
}
PAPER, INK, FAINT, GRID = (THEMES[name][0] for name in ("paper", "ink", "faint", "grid"))
COLORS = [light for name, (light, _) in THEMES.items() if name.startswith("series")]
MARKERS = "osD^vP*"
"""Shapes of points: 7 shapes in 8 colors tell 56 series apart."""
WIDTH = 420
"""Chart width in points: 11-point letters stay readable on a phone."""
MAX_SERIES = 12
"""Maximum lines in a readable chart; the tables list the rest."""
MAX_LETTERS = 22
"""Maximum letters in a name next to an axis."""
LEGEND_LETTERS = 56
"""Maximum letters in a name in a legend or above a panel."""
# Characters that XML forbids, or that can change the reading direction.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # letters stay text, so that search finds them
    "text.parse_math": False,  # names may contain dollar signs
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "grid.color": GRID,
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), FAINT),
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor"), INK),
    **dict.fromkeys(("xtick.labelcolor", "ytick.labelcolor"), INK),
}


class Estimate(NamedTuple):
    value: float
    low: float | None = None
    """Bounds of the 95 % interval; None or NaN if there is none."""
    high: float | None = None

    @classmethod
    def of(cls, value: float | None, interval: Interval | None) -> "Estimate":
        return cls(number_or_nan(value), *(interval or ()))

    @property
    def bounds(self) -> tuple[float, float]:
        """Return the interval's ends, or the value twice if there is no interval."""
        if is_known(self.low) and is_known(self.high):
            return self.low, self.high
        return self.value, self.value


def printable(text: str) -> str:
    """Replace each character that a page cannot contain by a replacement character."""
    return _UNPRINTABLE.sub("\ufffd", text)


def shorten(text: str, letters: int) -> str:
    """Shorten a text in the middle, because names often differ at the end."""
    text, half = printable(text), (letters - 3) // 2
    return text if len(text) <= letters else f"{text[:half]}...{text[-half:]}"


@dataclass(frozen=True, kw_only=True)
class Chart:
    title: str
    caption: str
    panels: Mapping[str, Mapping[str, Mapping[Any, Estimate]]]
    """Panel title -> series label -> place -> estimate. A place is a row's name, or a number on the
    horizontal axis."""
    axis: str
    has_table: bool = False
    """Show the numbers in a table, because no other table has them."""
    reference: float | None = None
    """Value of a dashed line; None: no line."""
    limits: tuple[float, float | None] = (0, None)
    """Lowest and highest value on the axis."""

    @property
    def labels(self) -> list[str]:
        return list(dict.fromkeys(label for found in self.panels.values() for label in found))

    @property
    def full_caption(self) -> str:
        left = f" The first {MAX_SERIES} of {len(self.labels)} are drawn."
        return self.caption + left * (len(self.labels) > MAX_SERIES)

    @property
    def looks(self) -> dict[str, Values]:
        """Color and marker of each drawn series."""
        return {
            label: {"color": COLORS[i % len(COLORS)], "marker": MARKERS[i % len(MARKERS)]}
            for i, label in enumerate(self.labels[:MAX_SERIES])
        }

    def figure(self) -> Figure:
        raise NotImplementedError

    def _new_figure(self, height: float) -> tuple[Figure, list[Axes]]:
        """Make a figure with panels below each other and a legend at the bottom.

        Args:
            height: points per panel.
        """
        labels = [shorten(label, LEGEND_LETTERS) for label in self.looks]
        columns = max(1, min(4, (LEGEND_LETTERS + 8) // (8 + max(map(len, labels), default=0))))
        rows = math.ceil(len(labels) / columns)
        height = (height + 24) * len(self.panels) + 16 * rows + 26
        figure = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")
        grid = figure.subplots(len(self.panels), sharex=True, squeeze=False)
        panels: list[Axes] = list(grid[:, 0])
        for axes, title in zip(panels, self.panels, strict=True):
            axes.set_title(shorten(title, LEGEND_LETTERS))
        lines = [Line2D([], [], **look) for look in self.looks.values()]
        figure.legend(lines, labels, loc="outside lower center", ncols=columns)
        return figure, panels

    def _save(self, **settings: Any) -> bytes:
        buffer = io.BytesIO()
        # The salt makes ids reproducible and different between charts.
        with rc_context(STYLE | {"svg.hashsalt": self.title}), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
            self.figure().savefig(buffer, **settings)
        return buffer.getvalue()

    def png(self) -> bytes:
        return self._save(format="png", dpi=160, facecolor=PAPER)

    @cached_property
    def drawing(self) -> str:
        """The chart as an SVG file."""
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        return self._save(format="svg", metadata=nothing).decode()

    def numbers(self) -> Iterator[Sequence[Any]]:
        """Yield the lines of the CSV file."""
        yield "panel", "series", "place", "value", "low", "high"
        for panel, series in self.panels.items():
            for label, found in series.items():
                for place, estimate in found.items():
                    yield panel, label, place, *estimate

    @property
    def table(self) -> Table:
        """The numbers for the page, rounded."""
        _, *lines = self.numbers()
        rows = [
            [*map(str, names), number(value), bounds((low, high))]
            for *names, value, low, high in lines
        ]
        return Table(["panel", "series", "place", self.axis, "95 % CI"], rows)

    def files(self) -> dict[str, bytes]:
        """Return the chart's PNG, SVG and CSV files as file name -> content."""
        name = re.sub(r"\W+", "_", self.title.lower().replace("l'", "length"))
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(self.numbers())
        drawing, numbers = self.drawing.encode(), text.getvalue().encode()
        return {f"{name}.png": self.png(), f"{name}.svg": drawing, f"{name}.csv": numbers}

    def svg(self) -> str:
        """Return the chart as an HTML element with all text escaped."""
        text = self.drawing
        box = re.search(r'viewBox="[^"]*"', text)
        assert box
        body = text.partition("<svg")[2].partition(">")[2]
        body = re.sub(r"<style.*?</style>", "", body, flags=re.DOTALL)  # it would apply to the page
        body = re.sub(r"<[^>]*>", _themed, body)  # text contains neither "<" nor ">"
        return f'<svg class="plot" {box[0]} aria-hidden="true">{body}'


def _themed(tag: re.Match[str]) -> str:
    variables = {light: f"var(--{name})" for name, (light, _) in THEMES.items()}
    text = re.sub(r'^<g id="[^"]*"', "<g", tag[0])  # several charts share ids
    text = re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", text)
    return re.sub(r"#[0-9a-f]{6}", lambda color: variables.get(color[0], color[0]), text)


class IntervalChart(Chart):
    """Chart with one row per place, where each series has a point and an interval."""

    def figure(self) -> Figure:
        looks = self.looks
        found = (place for series in self.panels.values() for x in series.values() for place in x)
        places = list(dict.fromkeys(found))
        step = 1 / (len(looks) + 1)
        figure, panels = self._new_figure((13 * len(looks) + 12) * len(places))
        for axes, series in zip(panels, self.panels.values(), strict=True):
            if self.reference is not None:
                axes.axvline(self.reference, color=FAINT, linestyle="--", linewidth=1)
            for index, (label, look) in enumerate(looks.items()):
                for place, estimate in series.get(label, {}).items():
                    y = places.index(place) + step * (index - (len(looks) - 1) / 2)
                    axes.plot(estimate.bounds, [y, y], color=look["color"], linewidth=2)
                    # Without clipping, a point is whole at the axis' ends, too.
                    axes.plot([estimate.value], [y], clip_on=False, **look)
            for row in range(1, len(places)):
                axes.axhline(row - 0.5, color=GRID, linewidth=0.8)
            axes.set_yticks(range(len(places)), [shorten(name, MAX_LETTERS) for name in places])
            axes.tick_params(axis="y", length=0)
            axes.set_ylim(len(places) - 0.5, -0.5)
            axes.grid(axis="x")
            axes.set_xlim(*self.limits)
        panels[-1].set_xlabel(self.axis)
        return figure


@dataclass(frozen=True, kw_only=True)
class LineChart(Chart):
    """Line chart with one line per series, numbers on the x axis, and intervals as whiskers."""

    place_axis: str
    whole_places: bool = True
    """Places are whole numbers, and whiskers at the same one stand side by side."""

    def figure(self) -> Figure:
        looks = self.looks
        figure, panels = self._new_figure(210 if len(self.panels) == 1 else 160)
        for axes, series in zip(panels, self.panels.values(), strict=True):
            if self.reference is not None:
                axes.axhline(self.reference, color=FAINT, linestyle="--", linewidth=1)
            for index, (label, look) in enumerate(looks.items()):
                points = sorted(series.get(label, {}).items())
                aside = 0.08 * (index - (len(looks) - 1) / 2) * self.whole_places
                places = [place + aside for place, _ in points]
                low, high = ([e.bounds[side] for _, e in points] for side in (0, 1))
                axes.vlines(places, low, high, color=look["color"], linewidth=1)
                axes.plot(places, [estimate.value for _, estimate in points], **look)
            axes.set_ylim(*self.limits)
            axes.xaxis.set_major_locator(MaxNLocator(integer=self.whole_places))
            axes.grid(axis="y")
            axes.set_ylabel(self.axis)
        panels[-1].set_xlabel(self.place_axis)
        return figure
