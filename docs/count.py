"""Print figures with a budget, one per line. Run `python docs/count.py` in the checkout.

Source is every Python file outside benchmarks, docs and tests. Code lines are lines of source
other than blank lines, comments and docstrings. Files in a circle import each other, directly or
through other files; an import for type checkers alone counts, too. A class name has two meanings if
two classes have it.
"""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("models", "data_recipes", "inference", "eval", "train")
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
IMPORTS = ast.Import | ast.ImportFrom
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
MAX_CODE_LINES = 42_400
"""What stands now. A change that adds code raises it in the same commit."""


def num_matches(files: list[Path], pattern: str) -> int:
    return sum(len(re.findall(pattern, path.read_text())) for path in files)


def code_lines(path: Path, tree: ast.Module) -> int:
    """Return the number of lines with code. The docstring under a field is none, either."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type not in NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str()), lineno=first, end_lineno=int(last)):
                found.difference_update(range(first, last + 1))
    return len(found)


def imports_in_functions(tree: ast.Module) -> int:
    functions = [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
    found = {node for top in functions for node in ast.walk(top) if isinstance(node, IMPORTS)}
    return len(found)


def imported_files(node: IMPORTS, path: Path) -> Iterator[Path]:
    """Yield the files that a relative import in the file ``path`` reads."""
    if not isinstance(node, ast.ImportFrom) or not node.level:
        return
    module = path.parents[node.level - 1].joinpath(*filter(None, (node.module or "").split(".")))
    for alias in node.names:
        names = (module / alias.name, module)
        candidates = [f for name in names for f in (name.with_suffix(".py"), name / "__init__.py")]
        yield next((file for file in candidates if file.is_file()), candidates[-1])


def import_graph(trees: dict[Path, ast.Module]) -> dict[Path, set[Path]]:
    return {
        path: {
            file
            for node in ast.walk(tree)
            if isinstance(node, IMPORTS)
            for file in imported_files(node, path)
            if file != path
        }
        for path, tree in trees.items()
    }


def circles(graph: dict[Path, set[Path]]) -> list[list[Path]]:
    """Return the largest groups of files. In a group, every file reaches every other by imports."""
    reach = {name: set(used) for name, used in graph.items()}
    for middle in graph:
        for name in graph:
            if middle in reach[name]:
                reach[name] |= reach[middle]
    found = {frozenset(b for b in reach[a] if a in reach[b]) for a in graph if a in reach[a]}
    return sorted(sorted(group) for group in found)


def names_of_several_classes(trees: Iterable[ast.Module]) -> list[str]:
    nodes = (node for tree in trees for node in ast.walk(tree))
    counts = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    return sorted(name for name, count in counts.items() if count > 1)


def figures() -> dict[str, tuple[int, int]]:
    """Return name -> figure and budget."""
    source = sorted({*ROOT.glob("*.py")} - {ROOT / "setup.py"})
    source += [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    trees = {path: ast.parse(path.read_text()) for path in source}
    lines = num_matches(source, "\n")
    benchmarks = [*(ROOT / "benchmarks").rglob("*.py")]
    return {
        "code lines": (sum(code_lines(*item) for item in trees.items()), MAX_CODE_LINES),
        "lines of the largest file": (max(num_matches([path], "\n") for path in source), 700),
        "test lines": (num_matches(sorted((ROOT / "tests").rglob("*.py")), "\n"), lines * 4 // 5),
        "benchmark scripts": (len(benchmarks), 35),
        "Any, as a word": (num_matches(source, r"\bAny\b"), 190),
        "imports in functions": (sum(map(imports_in_functions, trees.values())), 60),
        "import circles": (len(circles(import_graph(trees))), 0),
        "class names with two meanings": (len(names_of_several_classes(trees.values())), 0),
    }


if __name__ == "__main__":
    for name, (figure, budget) in figures().items():
        print(f"{name:<30}{figure:>7,}  at most {budget:,}")
