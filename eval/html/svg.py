"""matplotlib figures as SVG inside a page: colours from the page's theme, ids of their own.

A figure is drawn in stand-in colours, which become CSS variables (--series-1 .. --series-8, --ink,
--faint, --grid), so that one figure serves a light and a dark page. Its legend is the page's, whose
lines break where the screen ends.
"""

import io
import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUM_COLOURS = 8
INK, FAINT, GRID = "#0000f0", "#0000f1", "#0000f2"
_VARIABLES = {INK: "ink", FAINT: "faint", GRID: "grid"} | {
    f"#0000{index + 1:02x}": f"series-{index + 1}" for index in range(NUM_COLOURS)
}
WIDTH = 380
"""Of a figure, in its own units: with letters 11 high it can be read on a screen this wide."""


def _corners(number: int, turn: float, inner: float = 1.0) -> list[tuple[float, float]]:
    """A regular polygon, y upwards; every second corner at ``inner`` of the radius."""
    angles = [math.pi * (turn + 2 * i / number) for i in range(number)]
    radii = [inner if i % 2 else 1.0 for i in range(number)]
    return [(r * math.cos(a), r * math.sin(a)) for r, a in zip(radii, angles, strict=True)]


MARKERS = (
    _corners(24, 0.0),
    _corners(4, 0.25),
    _corners(3, 0.5),
    _corners(4, 0.0),
    _corners(3, 1.5),
    _corners(10, 0.5, inner=0.45),
    [(-0.4, 1.0), (0.4, 1.0), (0.4, -1.0), (-0.4, -1.0)],
)
"""As many shapes as have no common divisor with the colours: 56 series look different."""


def colour(index: int) -> str:
    """Stand-in of the ``index``-th series."""
    return f"#0000{index % NUM_COLOURS + 1:02x}"


def marker(index: int) -> list[tuple[float, float]]:
    return MARKERS[index % len(MARKERS)]


def line_swatch(index: int) -> str:
    """The line and marker of a series, for a legend."""
    points = " ".join(f"{14 + 5 * x:.1f},{8 - 5 * y:.1f}" for x, y in marker(index))
    style = f"var(--{_VARIABLES[colour(index)]})"
    return (
        '<svg class="swatch" viewBox="0 0 28 16" aria-hidden="true"><path d="M0 8H28" '
        f'style="stroke:{style};stroke-width:2"/><polygon points="{points}" style="fill:{style}"/>'
        "</svg>"
    )


def bar_swatch(index: int, height: float) -> str:
    """A bar of ``height`` times the track's, for a legend."""
    style = f"var(--{_VARIABLES[colour(index)]})"
    return (
        '<svg class="swatch" viewBox="0 0 28 16" aria-hidden="true"><rect x="0" width="28" '
        f'y="{8 - 8 * height:.1f}" height="{16 * height:.1f}" style="fill:{style}"/></svg>'
    )


@contextmanager
def new_figure(height: float, *, panels: int = 1) -> "Iterator[tuple[Figure, list[Axes]]]":
    """A figure and its panels, one below the other.

    Args:
        height: in the units of ``WIDTH``.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    settings: dict[Any, Any] = {
        "svg.hashsalt": "pipedraft",  # the same ids, and so the same bytes, every time
        "svg.fonttype": "none",  # letters stay letters: found by a search, read aloud
        "text.parse_math": False,  # names hold dollar signs
        "font.size": 11,
        "lines.linewidth": 1.6,
        "xtick.major.size": 3,
        "ytick.major.size": 3,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.titlecolor": INK,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "axes.edgecolor": FAINT,
        "xtick.color": FAINT,
        "ytick.color": FAINT,
        "grid.color": GRID,
        "grid.linewidth": 0.8,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
    }
    with rc_context(settings), warnings.catch_warnings():
        # The page's font draws the letters, and has them: layout alone uses matplotlib's.
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        figure = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")
        FigureCanvasSVG(figure)
        yield figure, list(figure.subplots(panels, squeeze=False).flat)


def to_svg(figure: "Figure", name: str, label: str) -> str:
    """The figure as an <svg> element; to be called inside ``new_figure``.

    Args:
        name: of letters, digits and hyphens; ids begin with it.
        label: what a screen reader says.
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(buffer.getvalue())
    for element in root.iter():
        # HTML knows SVG's elements, and href, without their namespaces.
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = {key.rpartition("}")[2]: v for key, v in element.attrib.items()}
    for parent in list(root.iter()):
        for child in list(parent):
            # A <style> would be the whole page's.
            if child.tag in ("metadata", "style"):
                parent.remove(child)
    _rename_ids(root, name)
    for element in root.iter():
        for key, value in element.attrib.items():
            if key == "style":
                element.set(key, _themed(value))
            elif key in ("d", "x", "y", "transform", "width", "height"):
                element.set(key, re.sub(r"\d+\.\d{3,}", lambda n: f"{float(n[0]):.2f}", value))
        if element.tag != "text":
            element.text = None
        element.tail = None
    box = root.attrib["viewBox"]
    root.attrib = {"class": "plot", "viewBox": box, "role": "img", "aria-label": label}
    return ElementTree.tostring(root, encoding="unicode")


def _rename_ids(root: ElementTree.Element, name: str) -> None:
    """Several figures of a page have the same ids; those that nothing refers to go."""
    text = ElementTree.tostring(root, encoding="unicode")
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', text))
    for element in root.iter():
        identity = element.attrib.pop("id", None)
        if identity in used:
            element.set("id", f"{name}-{identity}")
        for key, value in element.attrib.items():
            if key == "href":
                element.set(key, f"#{name}-{value.removeprefix('#')}")
            else:
                element.set(key, re.sub(r"url\(#", f"url(#{name}-", value))


def _themed(style: str) -> str:
    style = re.sub(
        r"#[0-9a-f]{6}",
        lambda found: f"var(--{_VARIABLES[found[0]]})" if found[0] in _VARIABLES else found[0],
        style,
    )
    style = re.sub(r"font-family:[^;]*;?", "", style)
    return re.sub(r"font: ([\d.]+px)[^;]*", r"font-size: \1", style)
