"""Kinds of charts for report.html: intervals, lines, histograms, shares of time, a time line."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipedraft.eval.html.svg import (
    FAINT,
    bar_swatch,
    colour,
    line_swatch,
    marker,
    new_figure,
    to_svg,
)
from pipedraft.eval.tables import Table, is_known

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_SERIES = 12
"""More lines are a tangle; the tables have the rest."""
MAX_LETTERS = 22
"""Of a name beside an axis."""
PANEL_LETTERS = 54
# What a process does: colour and height of its bar. Work is tall, a hand-over low, waiting lowest.
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


@dataclass(frozen=True)
class Estimate:
    value: float
    low: float | None = None
    """Bounds of the 95 % interval; None or NaN where there is none."""
    high: float | None = None

    @classmethod
    def of(cls, value: float, interval: Sequence[float | None] = (None, None)) -> "Estimate":
        return cls(value, *interval)

    @property
    def bounds(self) -> tuple[float, float] | None:
        if is_known(self.low) and is_known(self.high):
            return self.low, self.high
        return None


@dataclass(frozen=True, kw_only=True)
class Picture:
    name: str
    """Of letters, digits and hyphens; unique on the page."""
    title: str
    caption: str
    svg: str
    legend: Sequence[tuple[str, str]] = ()
    """(swatch as SVG, text)."""
    table: Table | None = None
    """The same in numbers."""


@dataclass(frozen=True, kw_only=True)
class Missing:
    """In place of a picture that the results do not hold."""

    title: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Frame:
    """What is said about a picture."""

    name: str
    title: str
    caption: str
    axis: str
    """Of the values; of y for lines, of x for intervals."""
    other_axis: str = ""
    table: Table | None = None

    def picture(
        self, svg: str, legend: Sequence[tuple[str, str]] = (), *, note: str = ""
    ) -> Picture:
        return Picture(
            name=self.name,
            title=self.title,
            caption=f"{self.caption} {note}".strip(),
            svg=svg,
            legend=legend,
            table=self.table,
        )


def shorten(text: str, letters: int = MAX_LETTERS) -> str:
    return text if len(text) <= letters else text[: letters - 3] + "..."


def _first(series: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Those that are drawn, and a sentence on the others."""
    drawn = dict(list(series.items())[:MAX_SERIES])
    left = len(series) - len(drawn)
    return drawn, f"The first {len(drawn)} of {len(series)} are drawn." if left else ""


def _line_legend(labels: Sequence[str]) -> list[tuple[str, str]]:
    return [(line_swatch(index), label) for index, label in enumerate(labels)]


def interval_chart(
    frame: Frame,
    series: Mapping[str, Mapping[str, Estimate]],
    *,
    reference: float | None = None,
    limits: tuple[float, float | None] = (0, None),
) -> Picture:
    """A row for each place, in it a point with its interval for each series.

    Args:
        series: label -> place -> estimate.
        reference: a dashed line.
    """
    drawn, note = _first(series)
    places = list(dict.fromkeys(place for found in drawn.values() for place in found))
    band = 13 * len(drawn) + 12
    with new_figure(48 + band * len(places)) as (figure, (axes,)):
        if reference is not None:
            axes.axvline(reference, color=FAINT, linestyle="--", linewidth=1)
        for index, found in enumerate(drawn.values()):
            for place, estimate in found.items():
                y = band * places.index(place) + 13 * (index - (len(drawn) - 1) / 2)
                _draw_estimate(axes, index, estimate, y)
        for row in range(1, len(places)):
            axes.axhline(band * (row - 0.5), color=FAINT, linewidth=0.5)
        ticks = [band * row for row in range(len(places))]
        axes.set_yticks(ticks, [shorten(place) for place in places])
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(band * (len(places) - 0.5), -band / 2)
        axes.set_xlim(*limits)
        axes.grid(axis="x")
        axes.set_xlabel(frame.axis)
        svg = to_svg(figure, frame.name, f"{frame.title}. {frame.caption}")
    return frame.picture(svg, _line_legend(list(drawn)), note=note)


def _draw_estimate(axes: "Axes", index: int, estimate: Estimate, y: float) -> None:
    if estimate.bounds is not None:
        axes.plot(estimate.bounds, [y, y], color=colour(index), linewidth=2)
    look: Any = {"color": colour(index), "marker": marker(index), "markersize": 7}
    axes.plot([estimate.value], [y], clip_on=False, **look)  # whole at the end of the scale too


def line_chart(
    frame: Frame,
    series: Mapping[str, Mapping[float, Estimate]],
    *,
    reference: float | None = None,
    top: float | None = None,
) -> Picture:
    """
    Args:
        series: label -> x, a whole number -> estimate; intervals are a band.
        top: of the axis of values.
    """
    from matplotlib.ticker import MaxNLocator

    drawn, note = _first(series)
    with new_figure(250) as (figure, (axes,)):
        if reference is not None:
            axes.axhline(reference, color=FAINT, linestyle="--", linewidth=1)
        for index, found in enumerate(drawn.values()):
            points = sorted(found.items())
            x = [place for place, _ in points]
            # Where there is no interval the band has no width.
            bands = [e.bounds or (e.value, e.value) for _, e in points]
            low, high = zip(*bands, strict=True)
            axes.fill_between(x, low, high, color=colour(index), alpha=0.15, linewidth=0)
            axes.plot(
                x,
                [estimate.value for _, estimate in points],
                color=colour(index),
                marker=marker(index),
                markersize=6,
            )
        axes.set_ylim(0, top)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="y")
        axes.set_xlabel(frame.other_axis)
        axes.set_ylabel(frame.axis)
        svg = to_svg(figure, frame.name, f"{frame.title}. {frame.caption}")
    return frame.picture(svg, _line_legend(list(drawn)), note=note)


def histogram_chart(
    frame: Frame, series: Mapping[str, Sequence[float]], places: Sequence[str]
) -> Picture:
    """A panel for each series.

    Args:
        series: label -> share of each place.
    """
    drawn, note = _first(series)
    top = max(max(shares) for shares in drawn.values())
    height = 60 + 75 * len(drawn)
    with new_figure(height, panels=len(drawn)) as (figure, panels):
        for axes, (label, shares) in zip(panels, drawn.items(), strict=True):
            axes.bar(range(len(places)), shares, width=0.8, color=colour(0))
            axes.set_title(shorten(label, PANEL_LETTERS), fontsize=11, loc="left")
            axes.set_xlim(-0.6, len(places) - 0.4)
            axes.set_ylim(0, 1.05 * top)
            axes.set_xticks(range(len(places)), places if axes is panels[-1] else [])
            axes.grid(axis="y")
        panels[-1].set_xlabel(frame.other_axis)
        figure.supylabel(frame.axis, fontsize=11)
        svg = to_svg(figure, frame.name, f"{frame.title}. {frame.caption}")
    return frame.picture(svg, note=note)


def _kinds_legend(kinds: Sequence[str]) -> list[tuple[str, str]]:
    return [(bar_swatch(*look_of(kind)), kind) for kind in kinds]


def look_of(kind: str) -> tuple[int, float]:
    """Colour and height; what is not known looks like no other kind."""
    return KINDS.get(kind, (6, 0.9))


def share_chart(frame: Frame, series: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Picture:
    """Bars of parts put end to end, a panel for each series.

    Args:
        series: label -> process -> kind -> seconds.
    """
    drawn, note = _first(series)
    found = {k for processes in drawn.values() for parts in processes.values() for k in parts}
    kinds = [kind for kind in KINDS if kind in found] + sorted(found - KINDS.keys())
    rows = sum(len(processes) for processes in drawn.values())
    longest = max(sum(p.values()) for processes in drawn.values() for p in processes.values())
    with new_figure(60 + 17 * rows + 18 * len(drawn), panels=len(drawn)) as (figure, panels):
        for axes, (label, processes) in zip(panels, drawn.items(), strict=True):
            for row, parts in enumerate(processes.values()):
                start = 0.0
                for kind in kinds:
                    index, height = look_of(kind)
                    seconds = parts.get(kind, 0.0)
                    axes.barh(row, seconds, left=start, height=height, color=colour(index))
                    start += seconds
            axes.set_title(shorten(label, PANEL_LETTERS), fontsize=11, loc="left")
            _name_rows(axes, list(processes))
            # The same scale in all: methods are compared.
            axes.set_xlim(0, 1.02 * longest or 1)
            axes.tick_params(axis="x", labelbottom=axes is panels[-1])
        panels[-1].set_xlabel(frame.axis)
        svg = to_svg(figure, frame.name, f"{frame.title}. {frame.caption}")
    return frame.picture(svg, _kinds_legend(kinds), note=note)


def _name_rows(axes: "Axes", processes: Sequence[str]) -> None:
    """From the top; what a process does is told in brackets, which there is no room for."""
    names = [shorten(name.partition(" (")[0]) for name in processes]
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="x")


@dataclass(frozen=True)
class Span:
    kind: str
    start: float
    """In ms."""
    duration: float


def time_chart(
    frame: Frame, tracks: Mapping[str, Sequence[Span]], window: tuple[float, float]
) -> Picture:
    """What every process did when, a row for each.

    Args:
        tracks: a span inside another one starts after it, and is drawn over it.
    """
    low, high = window
    shown = {
        name: sorted(
            (s for s in spans if s.start < high and s.start + s.duration > low),
            key=lambda span: (span.start, -span.duration),
        )
        for name, spans in tracks.items()
    }
    found = {span.kind for spans in shown.values() for span in spans}
    kinds = [kind for kind in KINDS if kind in found] + sorted(found - KINDS.keys())
    with new_figure(50 + 34 * len(tracks)) as (figure, (axes,)):
        for row, spans in enumerate(shown.values()):
            for span in spans:
                index, height = look_of(span.kind)
                start, end = max(span.start, low), min(span.start + span.duration, high)
                axes.barh(row, end - start, left=start, height=height, color=colour(index))
        _name_rows(axes, list(tracks))
        axes.set_xlim(low, high)
        axes.set_xlabel(frame.axis)
        svg = to_svg(figure, frame.name, f"{frame.title}. {frame.caption}")
    return frame.picture(svg, _kinds_legend(kinds))
