"""SVG shapes for decoding pictures, readable on light and dark pages.

Color is never the only mark: rejected rows are hatched, and rows that were certain when they
entered have a thick left edge.
"""

from xml.sax.saxutils import escape, quoteattr

STYLE = """
svg{font-family:system-ui,sans-serif;font-size:12px}
.paper{fill:#fff}.ink{fill:#1c2733}.faint{fill:#5b6876}.line{stroke:#8a97a5;fill:none}
.grid{stroke:#dfe5eb;fill:none}.certain{fill:#9ec5ee}.right{fill:#d9eaf9}.wrong{fill:#fbe3cf}
.edge{stroke:#1f5f9f;fill:none}.hatch{stroke:#c2570c}.bad{fill:#b23c00}.work{fill:#e3e7ec}
.mark{fill:#1f5f9f}.badline{stroke:#b23c00;fill:none}
@media (prefers-color-scheme:dark){
.paper{fill:#12171d}.ink{fill:#e8eef4}.faint{fill:#a3b0bd}.line{stroke:#74818e}
.grid{stroke:#29323b}.certain{fill:#1f568c}.right{fill:#183a5a}.wrong{fill:#4a2a12}
.edge{stroke:#7db7ef}.hatch{stroke:#e58a45}.bad{fill:#ffab70}.work{fill:#2b343d}
.mark{fill:#7db7ef}.badline{stroke:#ffab70}}
""".replace("\n", "")
HATCH = (
    '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><path class="hatch" d="M0 0V6" stroke-width="1.3"/></pattern>'
    "</defs>"
)


class Diagram:
    """Collects shapes and grows to contain them. The origin is the upper left corner."""

    def __init__(self, title: str, *, width: float = 0.0) -> None:
        self.title = title
        self.parts: list[str] = []
        self.width, self.height = width, 0.0

    def _reach(self, x: float, y: float) -> None:
        self.width, self.height = max(self.width, x), max(self.height, y)

    def box(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        size = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self.parts.append(f'<rect class="{kind}" {size}/>')
        if kind == "wrong":
            self.parts.append(f'<rect fill="url(#hatch)" {size}/>')
        if kind == "certain":
            self.path(f"M{x + 1.5:.1f} {y:.1f}v{height:.1f}", "edge", 3)
        self._reach(x + width, y + height)

    def path(self, d: str, kind: str, width: float = 1.0, *, dashed: bool = False) -> None:
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(f'<path class="{kind}" d="{d}" stroke-width="{width:g}"{dashes}/>')

    def text(
        self,
        x: float,
        y: float,
        words: str,
        kind: str = "ink",
        *,
        anchor: str = "middle",
        size: float = 12,
    ) -> None:
        """Draw text with the middle of its letters at ``y``."""
        place = f'x="{x:.1f}" y="{y + 0.35 * size:.1f}" text-anchor="{anchor}" font-size="{size}"'
        self.parts.append(f'<text class="{kind}" {place}>{escape(words)}</text>')
        if anchor == "start":
            self._reach(x + 0.56 * size * len(words), y + size)

    def cell(self, x: float, y: float, width: float, height: float, counts: dict[str, int]) -> None:
        """Draw a striped box with one stripe per row kind."""
        present = {kind: count for kind, count in counts.items() if count}
        least = min(8.0, width / max(len(present), 1))
        spare = width - least * len(present)
        for kind, count in present.items():
            part = least + spare * count / sum(present.values())
            self.box(x, y, part, height, kind)
            x += part

    def legend(self, x: float, y: float, entries: list[tuple[str, str]]) -> None:
        """Draw swatches with labels in one line."""
        for kind, words in entries:
            self.box(x, y - 7, 18, 14, kind)
            self.text(x + 24, y, words, "faint", anchor="start")
            x += 24 + 6.4 * len(words) + 24

    def svg(self) -> str:
        width, height = round(self.width + 12), round(self.height + 8)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" aria-label={quoteattr(self.title)}>'
            f"<title>{escape(self.title)}</title><style>{STYLE}</style>{HATCH}"
            f'<rect class="paper" width="{width}" height="{height}"/>\n'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )
