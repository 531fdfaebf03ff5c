"""Command line of the scripts that draw: where their pictures are written."""

import argparse
from collections.abc import Iterable
from pathlib import Path


def write_pictures(script: str, pictures: Iterable[tuple[str, str]]) -> None:
    """
    Args:
        script: its docstring: a first line that says what is drawn, then the example.
        pictures: names and SVG texts.
    """
    description, _, example, *_ = script.splitlines()
    parser = argparse.ArgumentParser(description=description, epilog=f"example: {example.strip()}")
    parser.add_argument("--out", type=Path, required=True, help="folder of the SVG files")
    out = parser.parse_args().out
    for name, svg in pictures:
        (out / f"{name}.svg").write_text(svg)
