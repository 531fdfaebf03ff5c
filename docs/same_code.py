"""Compare two revisions' code. Run `python docs/same_code.py OLD [NEW]` in the checkout.

Parse every Python file at both revisions and drop the docstrings. Print the files with changed
code, and a count. Exit with status 1 if code changed. NEW is the working tree by default.
"""

import argparse
import ast
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def git(*arguments: str) -> str:
    """Return a git command's output."""
    return subprocess.run(
        ("git", *arguments), cwd=ROOT, text=True, check=True, capture_output=True
    ).stdout


def code(text: str) -> str:
    """Return a file's syntax tree without docstrings, also without docstrings under fields."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            is_docstring = [
                isinstance(child, ast.Expr)
                and isinstance(child.value, ast.Constant)
                and isinstance(child.value.value, str)
                for child in body
            ]
            body[:] = [
                child for child, is_doc in zip(body, is_docstring, strict=True) if not is_doc
            ]
    return ast.dump(tree)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", help="git revision")
    parser.add_argument("new", nargs="?", help="git revision; the working tree by default")
    old, new = (options := parser.parse_args()).old, options.new
    files = git("diff", "--name-only", old, *([new] if new else []), "--", "*.py").split()
    changed = []
    for file in files:
        try:
            before = git("show", f"{old}:{file}")
            after = git("show", f"{new}:{file}") if new else (ROOT / file).read_text()
        except (subprocess.CalledProcessError, FileNotFoundError):
            changed.append(f"{file} (added or removed)")
            continue
        if code(before) != code(after):
            changed.append(file)
    print(*changed, f"{len(files)} files, {len(changed)} changed", sep="\n")
    raise SystemExit(bool(changed))


if __name__ == "__main__":
    main()
