"""Draw the way from conversations to a served head: each command and its result.

python docs/images/draw_flow.py --out docs/images
"""

from picture_files import write_pictures

from pipedraft.inference.diagram import Diagram

WIDTH, HEIGHT, GAP, TOP = 178.0, 46.0, 136.0, 78.0
MADE = ["your conversations", "the target's own answers", "head"]
COMMANDS = ["data regenerate", "train"]
USES = [
    ("eval", "report: tau, L', tokens/s"),
    ("models export", "vLLM, SGLang, llama.cpp"),
    ("serve", "OpenAI API, chat page"),
]


def link(diagram: Diagram, x1: float, y1: float, x2: float, y2: float, words: str) -> None:
    """Draw an arrow to the right with a command above its last part."""
    middle = x1 + 16
    diagram.path(f"M{x1} {y1}H{middle}V{y2}H{x2}", "edge", 1.5)
    diagram.path(f"M{x2 - 7} {y2 - 4}L{x2} {y2}L{x2 - 7} {y2 + 4}", "edge", 1.5)
    diagram.text((middle + x2) / 2, y2 - 10, words, "mark")


def flow() -> str:
    diagram = Diagram("From conversations to a served head")
    for index, name in enumerate(MADE):
        x = 8 + index * (WIDTH + GAP)
        diagram.box(x, TOP, WIDTH, HEIGHT, "right" if name == "head" else "work")
        diagram.text(x + WIDTH / 2, TOP + HEIGHT / 2, name)
    for index, command in enumerate(COMMANDS):
        x = 8 + index * (WIDTH + GAP) + WIDTH
        link(diagram, x, TOP + HEIGHT / 2, x + GAP, TOP + HEIGHT / 2, command)
    x = 8 + 2 * (WIDTH + GAP) + WIDTH
    for index, (command, name) in enumerate(USES):
        y = 8 + index * (TOP - 8)
        link(diagram, x, TOP + HEIGHT / 2, x + GAP, y + HEIGHT / 2, command)
        diagram.box(x + GAP, y, WIDTH + 12, HEIGHT, "work")
        diagram.text(x + GAP + WIDTH / 2 + 6, y + HEIGHT / 2, name)
    return diagram.svg()


if __name__ == "__main__":
    write_pictures(__doc__, [("flow", flow())])
