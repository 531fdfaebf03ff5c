"""Imports of source files, read without running them."""

import ast
import runpy
from functools import cache
from pathlib import Path

from tiny_models import REPOSITORY

COUNT = runpy.run_path(str(REPOSITORY / "docs" / "count.py"))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(path.read_text()))]


def resolved(folder: Path, root: Path) -> tuple[int, list[str]]:
    """Number of imports of the package's files in a folder, and those not found in ``root``."""
    number, missing = 0, []
    for path in sorted(folder.rglob("*.py")):
        for node in nodes_of(path):
            if isinstance(node, ast.Import | ast.ImportFrom):
                absolute = getattr(node, "module", None) or node.names[0].name
                if not getattr(node, "level", 0) and absolute.partition(".")[0] == "pipedraft":
                    missing.append(f"{path.relative_to(root)}:{node.lineno}: {absolute}")
                for file in COUNT["imported_files"](node, path):
                    number += 1
                    if not (file.is_file() and file.is_relative_to(root)):
                        missing.append(f"{path.relative_to(root)}:{node.lineno}: {file}")
    return number, missing
