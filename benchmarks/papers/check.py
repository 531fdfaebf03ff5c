"""Check that each line in published.csv is in a row of tables/, and count the lines.

    python benchmarks/papers/check.py                       counts, and every cell without a row
    python benchmarks/papers/check.py NUMBERS.yaml          also against a file of a paper's numbers
    python benchmarks/papers/check.py --fill table.json ..  also write our figures from table.py

A line in published.csv is one published cell: its table, row, column and number. If we measured a
comparable value, the line also has our measure and value. ``cell`` is the number's path in
NUMBERS.yaml.
"""

import argparse
import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml
from spec import CELL, PUBLISHED, Cell, beside, read_lines, read_published, read_spec, table_names


def in_tables() -> set[Cell]:
    """Return every published cell in the shipped tables."""
    specs = map(read_spec, table_names())
    return {
        (*spec.cell(row), name) for spec in specs for row in spec.rows for name in row.published
    }


def in_numbers(values: object, path: str = "") -> Iterator[tuple[str, float]]:
    """Yield a file's numbers with their paths. The text "2.70 / 2.47" has two numbers."""
    if isinstance(values, dict):
        for name, value in values.items():
            yield from in_numbers(value, f"{path}/{name}" if path else str(name))
    elif isinstance(values, list):
        for index, value in enumerate(values):
            yield from in_numbers(value, f"{path}/{index}")
    elif isinstance(values, str) and " / " in values:
        yield from in_numbers([float(part) for part in values.split(" / ")], path)
    elif isinstance(values, int | float):
        yield path, float(values)


def differences(numbers: Path | None = None) -> list[str]:
    """Return a line for each cell without a row, or different in NUMBERS.yaml."""
    lines = read_published()
    found = [f"{cell}: only in one of the two" for cell in lines.keys() ^ in_tables()]
    if numbers is not None:
        values = yaml.safe_load(numbers.read_text())
        theirs = dict(in_numbers({n: v for n, v in values.items() if "settings" not in n}))
        for line in lines.values():
            if line["cell"] and theirs.get(line["cell"]) != float(line["published"]):
                found.append(f"{line['cell']}: {line['published']}, {numbers} has another")
        missing = theirs.keys() - {line["cell"] for line in lines.values()}
        found += [f"{cell}: only in {numbers}" for cell in missing]
    return found


def fill(tables: list[Path]) -> None:
    """Write our figures next to the published ones."""
    lines = read_published()
    for path in tables:
        content = json.loads(path.read_text())
        for row in content["rows"]:
            own = {name: measured["value"] for name, measured in row["ours"].items()}
            place = f"{row['temperature']:g}", row["network"] or ""
            for column in row["published"]:
                line = lines[content["name"], row["name"], *place, column]
                value = own.get(line["measure"])
                line["ours"] = "" if value is None else f"{value:.4g}"
    for path in beside(PUBLISHED):
        cells = [tuple(line[name] for name in CELL) for line in read_lines(path)]
        with path.open("w", newline="") as file:
            names = [*CELL, "published", "measure", "ours", "cell"]
            writer = csv.DictWriter(file, names, lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines[cell] for cell in cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("numbers", type=Path, nargs="?", help="file of the papers' numbers")
    parser.add_argument("--fill", type=Path, nargs="+", default=[], help="table.json files")
    arguments = parser.parse_args()
    if arguments.fill:
        fill(arguments.fill)
    found, lines = differences(arguments.numbers), read_published().values()
    for name in dict.fromkeys(line["table"] for line in lines):
        own = [line for line in lines if line["table"] == name]
        comparable, beside = (sum(bool(line[n]) for line in own) for n in ("measure", "ours"))
        print(f"{name:<20}{len(own):>5} published{comparable:>5} comparable{beside:>5} beside ours")
    print(*found, sep="\n", end="\n" * bool(found))
    numbers = len({line["cell"] for line in lines} - {""})
    total = f"{len(lines)} published cells ({numbers} numbers of the papers' own tables)"
    print(f"{total}, {sum(bool(line['ours']) for line in lines)} beside ours; {len(found)} differ")
    if found:
        sys.exit(1)


if __name__ == "__main__":
    main()
