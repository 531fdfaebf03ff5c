"""Chart types: each chart becomes a PNG for report.md and an SVG for report.html.

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
from typing import Any, ClassVar, NamedTuple

from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from pipedraft.eval.record import is_known
from pipedraft.eval.tables import Table
from pipedraft.files import Values

# (light, dark). Text has a contrast of 4.5 or more against paper and panel, marks 3 or more; series
# differ by 20 or more in CIELAB for color-blind readers too (tests/test_eval_html_look.py).
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
# Color and bar height per kind of work. Work is tall, hand-over low, waiting lowest.
KINDS = {
    "stage": (0, 0.8),
    "draft": (1, 0.6),
    "verify": (2, 0.7),
    "prefill": (3, 0.5),
    "send": (4, 0.4),
    "skip": (5, 0.3),
    "unfinished": (5, 0.55),
    "wait": (7, 0.14),
}
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

    @property
    def bounds(self) -> tuple[float, float]:
        """Return the interval's ends; both equal the value if there is no interval."""
        if is_known(self.low) and is_known(self.high):
            return self.low, self.high
        return self.value, self.value


class Span(NamedTuple):
    """One piece of work in a process: start and duration."""

    kind: str
    start: float
    duration: float

    @property
    def end(self) -> float:
        return self.start + self.duration


def shorten(text: str, letters: int) -> str:
    """Cut in the middle, because names often differ at the end."""
    half = (letters - 3) // 2
    return text if len(text) <= letters else f"{text[:half]}...{text[-half:]}"


@dataclass(frozen=True, kw_only=True)
class Chart:
    title: str
    caption: str
    panels: Mapping[str, Mapping[str, Any]]
    """Panel title -> label -> data to draw."""
    axis: str
    table: Table | None = None
    """Table with the chart's numbers, if no other table shows them."""
    missing: str = ""
    """Reason for an empty chart; "": it has data."""
    COLUMNS: ClassVar[tuple[str, ...]]
    """Columns in the CSV file."""

    @property
    def is_empty(self) -> bool:
        return not any(self.panels.values())

    @property
    def labels(self) -> list[str]:
        return list(dict.fromkeys(label for found in self.panels.values() for label in found))

    @property
    def full_caption(self) -> str:
        left = f" The first {MAX_SERIES} of {len(self.labels)} are drawn."
        return self.caption + left * (len(self.labels) > MAX_SERIES)

    def figure(self) -> Figure:
        raise NotImplementedError

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
        """Return an SVG file."""
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        return self._save(format="svg", metadata=nothing).decode()

    def numbers(self) -> Iterator[Sequence[object]]:
        """Yield the lines for the CSV file."""
        raise NotImplementedError

    def files(self) -> dict[str, bytes]:
        """Return the chart by file name: a picture, a drawing and its numbers."""
        name = re.sub(r"\W+", "_", self.title.lower().replace("l'", "length"))
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.COLUMNS, *self.numbers()])
        drawing, numbers = self.drawing.encode(), text.getvalue().encode()
        return {f"{name}.png": self.png(), f"{name}.svg": drawing, f"{name}.csv": numbers}

    def svg(self) -> str:
        """Return the chart as a page element; all its text is escaped."""
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


def _new_figure(
    titles: Sequence[str], height: float, legend: Mapping[str, Artist]
) -> tuple[Figure, list[Axes]]:
    """Make a figure with panels one below the other and its legend at the bottom.

    Args:
        height: points per panel.
    """
    labels = [shorten(label, LEGEND_LETTERS) for label in legend]
    columns = max(1, min(4, (LEGEND_LETTERS + 8) // (8 + max(map(len, labels), default=0))))
    height = (height + 24) * len(titles) + 16 * math.ceil(len(labels) / columns) + 26
    figure = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")
    panels: list[Axes] = list(figure.subplots(len(titles), sharex=True, squeeze=False)[:, 0])
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(shorten(title, LEGEND_LETTERS))
    figure.legend(list(legend.values()), labels, loc="outside lower center", ncols=columns)
    return figure, panels


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Write the row names, from the top."""
    axes.set_yticks(range(len(names)), [shorten(name, MAX_LETTERS) for name in names])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="x")


@dataclass(frozen=True, kw_only=True)
class SeriesChart(Chart):
    """Chart of series; ``panels`` maps title -> series label -> place -> estimate.

    A place is a row's name or a number on the horizontal axis.
    """

    COLUMNS = ("panel", "series", "place", "value", "low", "high")
    reference: float | None = None
    """Value of a dashed line; None: no line."""
    limits: tuple[float, float | None] = (0, None)
    """Lowest and highest value on the axis."""

    def numbers(self) -> Iterator[Sequence[object]]:
        for panel, series in self.panels.items():
            for label, found in series.items():
                for place, estimate in found.items():
                    yield panel, label, place, *estimate

    def looks(self) -> dict[str, Values]:
        """Return color and marker for each drawn series."""
        return {
            label: {"color": COLORS[i % len(COLORS)], "marker": MARKERS[i % len(MARKERS)]}
            for i, label in enumerate(self.labels[:MAX_SERIES])
        }

    def legend(self) -> dict[str, Artist]:
        return {label: Line2D([], [], **look) for label, look in self.looks().items()}


class IntervalChart(SeriesChart):
    """One row per place, with each series' point and interval."""

    def figure(self) -> Figure:
        looks = self.looks()
        found = (place for series in self.panels.values() for x in series.values() for place in x)
        places = list(dict.fromkeys(found))
        step = 1 / (len(looks) + 1)
        height = (13 * len(looks) + 12) * len(places)
        figure, panels = _new_figure(list(self.panels), height, self.legend())
        for axes, series in zip(panels, self.panels.values(), strict=True):
            if self.reference is not None:
                axes.axvline(self.reference, color=FAINT, linestyle="--", linewidth=1)
            for index, (label, look) in enumerate(looks.items()):
                for place, estimate in series.get(label, {}).items():
                    y = places.index(place) + step * (index - (len(looks) - 1) / 2)
                    axes.plot(estimate.bounds, [y, y], color=look["color"], linewidth=2)
                    axes.plot(
                        [estimate.value], [y], clip_on=False, **look
                    )  # whole at the ends, too
            for row in range(1, len(places)):
                axes.axhline(row - 0.5, color=GRID, linewidth=0.8)
            _name_rows(axes, places)
            axes.set_xlim(*self.limits)
        panels[-1].set_xlabel(self.axis)
        return figure


@dataclass(frozen=True, kw_only=True)
class LineChart(SeriesChart):
    """One line per series over numbers, with intervals as a band or as whiskers."""

    place_axis: str
    has_whiskers: bool = False
    """Use whiskers for wide intervals, whose bands would overlap."""
    whole_places: bool = True

    def figure(self) -> Figure:
        height = 210 if len(self.panels) == 1 else 160
        figure, panels = _new_figure(list(self.panels), height, self.legend())
        for axes, series in zip(panels, self.panels.values(), strict=True):
            if self.reference is not None:
                axes.axhline(self.reference, color=FAINT, linestyle="--", linewidth=1)
            looks = self.looks()
            for index, (label, look) in enumerate(looks.items()):
                points = sorted(series.get(label, {}).items())
                aside = 0.08 * (index - (len(looks) - 1) / 2) * self.has_whiskers
                places = [place + aside for place, _ in points]
                low, high = ([e.bounds[side] for _, e in points] for side in (0, 1))
                if self.has_whiskers:
                    axes.vlines(places, low, high, color=look["color"], linewidth=1)
                else:
                    axes.fill_between(
                        places, low, high, color=look["color"], alpha=0.15, linewidth=0
                    )
                axes.plot(places, [estimate.value for _, estimate in points], **look)
            axes.set_ylim(*self.limits)
            axes.xaxis.set_major_locator(MaxNLocator(integer=self.whole_places))
            axes.grid(axis="y")
            axes.set_ylabel(self.axis)
        panels[-1].set_xlabel(self.place_axis)
        return figure


@dataclass(frozen=True, kw_only=True)
class SpanChart(Chart):
    """Timeline: one row per process.

    panels: title -> process -> spans. A span inside another starts after it and is drawn over it.
    """

    COLUMNS = ("panel", "process", "kind", "start", "duration")
    window: tuple[float, float]
    """Visible part of the axis, the same in all panels to compare them."""

    @property
    def labels(self) -> list[str]:
        return list(self.panels)

    def numbers(self) -> Iterator[Sequence[object]]:
        for panel, tracks in self.panels.items():
            for process, spans in tracks.items():
                yield from ((panel, process, *span) for span in spans)

    def figure(self) -> Figure:
        drawn = dict(list(self.panels.items())[:MAX_SERIES])
        found = {s.kind for tracks in drawn.values() for spans in tracks.values() for s in spans}
        kinds = [kind for kind in KINDS if kind in found] + sorted(found - KINDS.keys())
        look = {kind: KINDS.get(kind, (6, 0.9)) for kind in kinds}
        legend = {kind: Patch(color=COLORS[color]) for kind, (color, _) in look.items()}
        height = (20 if len(drawn) > 1 else 34) * max(len(tracks) for tracks in drawn.values())
        figure, panels = _new_figure(list(drawn), height, legend)
        for axes, tracks in zip(panels, drawn.values(), strict=True):
            for row, spans in enumerate(tracks.values()):
                for span in sorted(spans, key=lambda span: (span.start, -span.duration)):
                    color, size = look[span.kind]
                    start, end = max(span.start, self.window[0]), min(span.end, self.window[1])
                    if end > start:
                        axes.barh(row, end - start, size, start, color=COLORS[color])
            # There is no room for the description in brackets.
            _name_rows(axes, [name.partition(" (")[0] for name in tracks])
            axes.set_xlim(*self.window)
        panels[-1].set_xlabel(self.axis)
        return figure
