"""One page from any number of evaluations: `python -m pipedraft.eval report --help`."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipedraft.errors import Parser, UsageError, make_folder
from pipedraft.eval import compare
from pipedraft.eval.html.charts import Span
from pipedraft.eval.html.report import Comparison, Source, build_page, printable
from pipedraft.eval.provenance import fact
from pipedraft.eval.report import write_atomically
from pipedraft.eval.tables import Table

EXAMPLE = """\
example:
  python -m pipedraft.eval report out/eval_n4 out/eval_n8 --trace out/trace.json --out report.html

The page needs no network and no other file. It shows the folders' results.json and manifest.json:
L' with its intervals, plots, what differs between the first folder and each other one on the same
prompts, and what the numbers depend on. Each evaluation writes the page of its own folder itself.

A results.json may also hold, or hold alone, times of edge-cloud decoding:
  {"latency": [{"method": "picospec", "network": "4g", "temperature": 0, "ms_per_token": 31.5,
                "ci95": [30.1, 33.0]}]}          ci95: null where there is no interval
"""
Entry = dict[str, Any]
Kind = Callable[[Any], bool]


def _is(*kinds: type) -> Kind:
    return lambda value: isinstance(value, kinds)


def _is_list_of(kind: Kind) -> Kind:
    return lambda value: isinstance(value, list) and all(map(kind, value))


_is_number = _is(int, float)
_may_be_number = _is(int, float, type(None))


def _is_interval(value: Any) -> bool:
    return _is_list_of(_may_be_number)(value) and len(value) == 2


# What every entry has, and what it must be.
FIELDS: dict[str, Kind] = {
    "method": _is(str),
    "schedule": _is(str),
    "benchmark": _is(str),
    "stages": _is(int),
    "temperature": _is_number,
    "tree_width": _is(int),
    "tree": _is(str, type(None)),
    "prompts": _is(int),
    "tokens": _is(int),
    "steps": _is(int),
    "rounds": _is(int),
    "equivalent_acceptance_length": _is(dict),
    "equivalent_acceptance_length.pooled": _may_be_number,
    "equivalent_acceptance_length.mean": _may_be_number,
    "equivalent_acceptance_length.ci95": _is_interval,
    "mean_acceptance_length": _may_be_number,
    "draft_acceptance_rate": _may_be_number,
    "theoretical_speedup": _may_be_number,
    "wallclock": _is(dict, type(None)),
    "lossless.checked": _is(int),
    "lossless.mismatches": _is(int),
    "acceptance_histogram": _is_list_of(_is(int)),
    "acceptance_by_position": _is_list_of(_may_be_number),
    "position_tests": _is_list_of(_is(int)),
    "position_accepts": _is_list_of(_is(int)),
}
LATENCY_FIELDS: dict[str, Kind] = {
    "method": _is(str),
    "network": _is(str),
    "temperature": _is_number,
    "ms_per_token": _is_number,
    "ci95": lambda value: value is None or _is_interval(value),
}


def _read_json(option: str, path: Path) -> tuple[Any, bytes]:
    try:
        content = path.read_bytes()
        return printable(json.loads(content)), content
    except OSError as error:
        raise UsageError(
            f"{option}: {str(path)!r} cannot be read ({error.strerror}); give the --out folder of "
            "python -m pipedraft.eval"
        ) from error
    except ValueError as error:
        raise UsageError(
            f"{option}: {str(path)!r} is not JSON ({error}); write it again"
        ) from error


def _rows(path: Path, content: Entry, key: str, fields: dict[str, Kind]) -> list[Entry]:
    """A list of objects; an absent one is empty."""
    rows = content.get(key, [])
    for row in rows if isinstance(rows, list) else [rows]:
        for name, is_right in fields.items():
            value = fact(row, *name.split("."))
            if not is_right(value):
                raise UsageError(
                    f"OUT: {str(path)!r}: {name!r} in {key!r} is {str(value)[:60]!r}; run the "
                    "evaluation again"
                )
    return rows


def read_source(folder: Path, name: str) -> Source:
    """
    Args:
        name: what the page calls it.
    """
    path = folder / "results.json"
    content, raw = _read_json("OUT", path)
    if not isinstance(content, dict):
        raise UsageError(f"OUT: {str(path)!r} is not an object; run the evaluation again")
    manifest = None
    if (folder / "manifest.json").is_file():
        manifest, _ = _read_json("OUT", folder / "manifest.json")
    return Source(
        name=printable(name),
        entries=[
            entry for key in ("runs", "overall") for entry in _rows(path, content, key, FIELDS)
        ],
        manifest=manifest if isinstance(manifest, dict) else None,
        latency=_rows(path, content, "latency", LATENCY_FIELDS),
        digest=hashlib.sha256(raw).hexdigest(),
    )


def short_names(folders: Sequence[Path]) -> list[str]:
    """The last parts of the paths, as many as it takes to tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            break
    else:
        raise UsageError("OUT: a folder is given twice; give each once")
    return names


def read_trace(path: Path) -> dict[str, list[Span]]:
    """Process -> its spans, of a Chrome trace as ``--trace`` writes it."""
    content, _ = _read_json("--trace", path)
    try:
        events = content["traceEvents"]
        names = {
            event["pid"]: str(event["args"]["name"])
            for event in events
            if event["ph"] == "M" and event["name"] == "process_name"
        }
        tracks: dict[str, list[Span]] = {name: [] for name in names.values()}
        for event in (event for event in events if event["ph"] == "X"):
            span = Span(str(event["name"]), float(event["ts"]) / 1e3, float(event["dur"]) / 1e3)
            tracks[names[event["pid"]]].append(span)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"--trace: {str(path)!r} is no trace of this program ({error!r}); write one with "
            "python -m pipedraft.inference --backend process --trace FILE"
        ) from error
    if not any(tracks.values()):
        raise UsageError(f"--trace: {str(path)!r} has no spans; decode at least one token with it")
    return tracks


def compare_folders(folders: Sequence[Path], names: Sequence[str]) -> list[Comparison]:
    """Every folder against the first one."""
    found = []
    for folder, name in zip(folders[1:], names[1:], strict=True):
        title = f"{name} compared with {names[0]}"
        try:
            baseline, other = compare.Run.read(folders[0]), compare.Run.read(folder)
            lines = compare.compare_runs(baseline, other)
        except UsageError as error:
            reason = f"Not compared: {str(error).removeprefix('RUN: ')}."
            found.append(Comparison(title=title, warnings=[reason], table=None))
            continue
        cells = [[cell(line) for cell in compare.COLUMNS.values()] for line in lines]
        found.append(
            Comparison(
                title=title,
                warnings=compare.find_warnings(baseline, other, lines),
                table=Table(list(compare.COLUMNS), cells),
            )
        )
    return found


def build_parser() -> Parser:
    parser = Parser(
        prog="python -m pipedraft.eval report",
        description="Write one self-contained HTML page about evaluations.",
        epilog=EXAMPLE,
    )
    add = parser.add_argument
    add("folders", type=Path, nargs="+", metavar="OUT", help="--out folders of evaluations")
    add(
        "--trace",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="what processes did when, from python -m pipedraft.inference --trace; may be given "
        "several times",
    )
    add(
        "--out",
        type=Path,
        metavar="FILE",
        help="the page (default: OUT/report.html of a single folder, report.html of several)",
    )
    return parser


def run(argv: Sequence[str]) -> None:
    """The whole subcommand; bad input raises ValueError."""
    arguments = build_parser().parse_args(argv)
    folders = arguments.folders
    names = short_names(folders)
    path = arguments.out
    if path is None:
        path = folders[0] / "report.html" if len(folders) == 1 else Path("report.html")
    if path.is_dir():
        raise UsageError(f"--out: {str(path)!r} is a folder; give a file, e.g. report.html")
    sources = [read_source(folder, name) for folder, name in zip(folders, names, strict=True)]
    traces = {
        name: read_trace(trace)
        for name, trace in zip(
            short_names(arguments.trace) if arguments.trace else [], arguments.trace, strict=True
        )
    }
    page = build_page(
        sources,
        comparisons=compare_folders(folders, names),
        comparison_legend=compare.LEGEND,
        traces={printable(name): tracks for name, tracks in traces.items()},
    )
    make_folder("--out", path.parent)
    write_atomically(path, page)
    print(f"written: {path} ({len(page) / 1e3:.0f} kB)")
