"""Draw the README's animated answer, token by token, with the times from record_demo.py.

python docs/images/draw_demo.py --out docs/images
"""

import json
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from picture_files import write_pictures

from pipedraft.inference.diagram import Diagram

WIDTH, GAP, TOP, LINE, LETTER = 880, 40, 86, 21, 7.8
COLUMNS = int(((WIDTH - GAP) / 2) / LETTER)
"""Letters per line."""
HOLD_S = 2.5
"""Seconds to show the whole answer before it begins again."""
MARKS = {"accepted": "right", "rejected": "wrong", "plain": ""}


def appear(at_s: float, whole_s: float) -> str:
    times = f"0;{min(at_s / whole_s, 0.999):.4f}"
    how = f'calcMode="discrete" values="0;1" keyTimes="{times}" dur="{whole_s:.2f}s"'
    return f'<animate attributeName="opacity" {how} repeatCount="indefinite"/>'


def draw_answer(
    diagram: Diagram, left: float, tokens: list[list[Any]], whole_s: float, has_draft: bool
) -> None:
    """Draw one answer's tokens in a fixed-width font; each appears at its time."""
    column, line = 0, 0
    for text, kind, time_s in tokens:
        shapes = []
        for index, part in enumerate(text.split("\n")):
            if index or column + len(part) > COLUMNS:
                column, line = 0, line + 1
                part = part if index else part.lstrip()
            if not part:
                continue
            x, y, width = left + column * LETTER, TOP + line * LINE, len(part) * LETTER
            mark = MARKS[kind] if has_draft else ""
            if mark:
                box = f'x="{x:.1f}" y="{y - 14}" width="{width:.1f}" height="{LINE - 2}"'
                shapes.append(f'<rect class="{mark}" {box} rx="2"/>')
            size = f'textLength="{width:.1f}" lengthAdjust="spacingAndGlyphs"'
            look = f'x="{x:.1f}" y="{y}" {size} xml:space="preserve" font-family="monospace"'
            shapes.append(f'<text class="ink" {look} font-size="13">{escape(part)}</text>')
            column += len(part)
        if shapes:
            diagram.parts.append(f"<g>{appear(time_s, whole_s)}{''.join(shapes)}</g>")
    diagram.height = max(diagram.height, TOP + (line + 1) * LINE)


def demo() -> str:
    record = json.loads(Path(__file__).with_name("demo.json").read_text())
    runs: dict[str, list[list[Any]]] = record["runs"]
    speeds = {way: (len(tokens) - 1) / tokens[-1][2] for way, tokens in runs.items()}
    whole_s = max(tokens[-1][2] for tokens in runs.values()) + HOLD_S
    title = f"{record['prompt']} Answered without and with a draft"
    diagram = Diagram(title, width=WIDTH)
    diagram.text(8, 16, f"“{record['prompt']}”", anchor="start", size=14)
    places = {"without": 8.0, "with": (WIDTH + GAP) / 2}
    for way, left in places.items():
        name = f"with {record['draft']}" if way == "with" else "without a draft"
        diagram.text(left, 44, f"{record['target']} {name}", "faint", anchor="start", size=13)
        speed = f"{speeds[way]:.1f} tokens/s"
        if way == "with":
            speed += f", {speeds['with'] / speeds['without']:.2f} times as fast"
        diagram.text(left, 62, speed, "mark", anchor="start", size=14)
        draw_answer(diagram, left, runs[way], whole_s, way == "with")
    entries = [
        ("right", "accepted draft token"),
        ("wrong", "own token after a rejected draft token"),
    ]
    diagram.height += 14
    diagram.legend(8, diagram.height, entries)
    return diagram.svg()


if __name__ == "__main__":
    write_pictures(__doc__, [("demo", demo())])
