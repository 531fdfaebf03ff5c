"""Measure the English in docstrings and pages. Run `python docs/english.py` in the checkout.

Print counts per 1,000 words of `of`, relative words and `such`, verbs for doing, and `you`. Also
print words per sentence (median and 90th percentile). Code, tables and command lists are left out.
The figures are a thermometer, not a goal. A low figure proves nothing, and a high figure names the
folder to read again.
"""

import argparse
import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
GENERATED = ("cli.md", "config.md")
FOLDERS = ("models", "train", "data_recipes", "inference", "eval", "tests", "benchmarks")
RELATIVE = {"that", "which", "what", "whose", "whom", "who", "those", "such", "whether"}
DOING = {"use", "set", "run", "return", "compute", "verify", "drop", "send"}
SENTENCE = re.compile(r"(?<=[.!?:;])\s+(?=[A-Z`*(])|\n\s*\n")
WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")


def is_doing(word: str) -> bool:
    """Return True for a verb in ``DOING``, in any form."""
    stems = {word, word.removesuffix("s"), word.removesuffix("es")}
    stems |= {word.removesuffix("ing"), word.removesuffix("ing") + "e"}
    stems |= {word.removesuffix("ed"), word.removesuffix("d")}
    return bool(stems & DOING)


@dataclass
class Sample:
    """Words and sentence lengths from some texts."""

    words: list[str] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    """Words per sentence."""

    def add(self, text: str) -> None:
        for sentence in SENTENCE.split(text):
            words = [word.lower() for word in WORD.findall(sentence)]
            self.words += words
            if words:
                self.lengths.append(len(words))

    def line(self, name: str) -> str:
        """Return the sample's line in the table."""
        total = max(len(self.words), 1)
        shares = (
            sum(word == "of" for word in self.words),
            sum(word in RELATIVE for word in self.words),
            sum(map(is_doing, self.words)),
            sum(word in ("you", "your") for word in self.words),
        )
        per_thousand = "".join(f"{1000 * share / total:10.1f}" for share in shares)
        middle, high = np.percentile(self.lengths or [0], [50, 90])
        return f"{name:24}{total:9,}{per_thousand}{middle:8.0f}{high:8.0f}"


def docstrings(path: Path) -> Iterator[str]:
    """Yield docstrings from modules, classes, functions and fields."""
    for node in ast.walk(ast.parse(path.read_text())):
        for child in ast.iter_child_nodes(node):
            value = child.value if isinstance(child, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield re.sub(r"``[^`]*``|`[^`]*`", " ", value.value)


def prose(text: str) -> str:
    """Return a page's text without code, tables, headings, link addresses and front matter."""
    text = re.sub(r"```.*?```", "\n\n", text, flags=re.S)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    kept = []
    for line in text.splitlines():
        is_code = line.startswith(("    ", "\t"))
        kept.append("" if is_code or line.lstrip().startswith(("|", "#", "!", "<")) else line)
    return re.sub(r"`[^`]*`", " ", "\n".join(kept))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", action="store_true", help="a line for each page, too")
    wants_pages = parser.parse_args().pages
    columns = "".join(f"{name:>10}" for name in ("of", "relative", "doing", "you"))
    print(f"{'':24}{'words':>9}{columns}{'median':>8}{'90 %':>8}")
    everything = Sample()
    for folder in ("", *FOLDERS):
        sample = Sample()
        files = (ROOT / folder).rglob("*.py") if folder else ROOT.glob("*.py")
        for path in sorted(files):
            for text in docstrings(path):
                sample.add(text)
                if folder not in ("tests", "benchmarks"):
                    everything.add(text)
        print(sample.line(folder or "root"))
    print(everything.line("all docstrings of source"))
    pages = Sample()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))):
        own = Sample()
        own.add(prose(path.read_text()))
        if "lab" not in path.relative_to(ROOT).parts and path.name not in GENERATED:
            pages.add(prose(path.read_text()))
        if wants_pages:
            print(own.line(path.name))
    print(pages.line("all pages"))


if __name__ == "__main__":
    main()
