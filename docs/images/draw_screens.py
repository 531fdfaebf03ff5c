"""Draw terminal pictures from the command output recorded by record_screens.py.

python docs/images/draw_screens.py --out docs/images
"""

import json
from collections.abc import Iterator
from pathlib import Path
from textwrap import TextWrapper
from xml.sax.saxutils import escape

from picture_files import write_pictures

from pipedraft.inference.diagram import Diagram

COLUMNS, LETTER, LINE, TOP, LEFT, SIZE = 104, 7.8, 18, 22, 12, 13
"""Characters per line; pixels per character and line; top and left margins; font size."""


def wrapped(line: str, indent: str = "") -> list[str]:
    """Break a line at ``COLUMNS`` as a terminal does, but between words."""
    wrapper = TextWrapper(COLUMNS, subsequent_indent=indent, break_on_hyphens=False)
    return [line] if len(line) <= COLUMNS else wrapper.wrap(line)


def screen(command: str, lines: list[str]) -> str:
    diagram = Diagram(command, width=LEFT + COLUMNS * LETTER)
    typed = [f"{row} \\" for row in wrapped(f"$ {command}", indent="    ")]
    typed[-1] = typed[-1].removesuffix(" \\")
    rows = [(row, "mark") for row in typed]
    rows += [(row, "ink") for line in lines for row in wrapped(line)]
    for index, (row, kind) in enumerate(rows):
        # A fixed text length keeps columns aligned if a font has another width.
        length = f'textLength="{len(row) * LETTER:.1f}" lengthAdjust="spacingAndGlyphs"'
        look = f'class="{kind}" font-family="monospace" font-size="{SIZE}" xml:space="preserve"'
        place = f'x="{LEFT}" y="{TOP + index * LINE}"'
        if row:
            diagram.parts.append(f"<text {look} {place} {length}>{escape(row)}</text>")
    diagram.height = TOP + len(rows) * LINE - SIZE / 2
    return diagram.svg()


def pictures() -> Iterator[tuple[str, str]]:
    for name, one in json.loads(Path(__file__).with_name("screens.json").read_text()).items():
        yield name, screen(one["command"], one["lines"])


if __name__ == "__main__":
    write_pictures(__doc__, pictures())
