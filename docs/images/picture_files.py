"""Command line for the drawing scripts: the folder for their pictures."""

import argparse
from collections.abc import Iterable
from pathlib import Path


def write_pictures(script: str, pictures: Iterable[tuple[str, str]]) -> None:
    """Write the pictures into --out.

    Args:
        script: the script's docstring: a first line for --help, then an example.
        pictures: names and SVG texts.
    """
    description, _, example, *_ = script.splitlines()
    parser = argparse.ArgumentParser(description=description, epilog=f"example: {example.strip()}")
    parser.add_argument("--out", type=Path, required=True, help="folder of the SVG files")
    out = parser.parse_args().out
    for name, svg in pictures:
        (out / f"{name}.svg").write_text(svg)
