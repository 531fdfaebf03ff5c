"""Specifications, ours beside what was published: `python -m pipedraft.eval table --help`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pipedraft.errors import UsageError
from pipedraft.eval.spec import read_spec, table_names
from pipedraft.options import Options, option

EXAMPLE = """\
example:
  python -m pipedraft.eval table --list
  python -m pipedraft.eval table spd1 --limit 4 --data-dir data/eval --out out/tables/spd1
  python -m pipedraft.eval table flowspec1 --target Qwen/Qwen3-8B --checkpoints heads.yaml \\
      --out out/tables/flowspec1
  python -m pipedraft.eval table configs/eval/retention.yaml --out out/retention

prints the table and writes table.md, table.json, manifest.json and the entries behind it
(results.json) into --out; drafts on fine-tuned targets also report.md and a plot. A row whose
checkpoint is missing names the command that makes it. What a pipeline decoded is kept in
OUT/traces: the same command goes on after a kill.
"""


@dataclass(frozen=True, kw_only=True)
class TableOptions(Options):
    """Run a specification, as a paper's table is, with the drafts at hand."""

    PROG: ClassVar[str] = "pipedraft eval table"
    EXAMPLE: ClassVar[str] = EXAMPLE

    name: str = option("", metavar="NAME", positional=True)
    """of the table (see --list), or a YAML file"""
    list: bool = False
    """name all tables, a line each, and end"""
    target: str | None = None
    """folder or Hub name; default: the specification's, else the embedded one"""
    checkpoints: tuple[str, ...] = option(("out",), metavar="PLACE", many=True)
    """folders of runs to find the drafts in, or YAML files of role: folder"""
    limit: int | None = option(None, metavar="P", least=1)
    """the first P prompts of each benchmark"""
    data_dir: str | None = option(None, metavar="D")
    """of the benchmarks' official files; see eval --help"""
    max_new_tokens: int | None = option(None, metavar="M", least=1)
    """a turn; default: 128"""
    seed: int | None = None
    """of the sampling and the bootstrap; default: 0"""
    fresh: bool = False
    """decode again what OUT/traces has"""
    out: Path = option(Path(), metavar="OUT")
    """folder of the results"""


build_parser = TableOptions.parser


def list_tables() -> str:
    tables = {name: read_spec(name) for name in table_names()}
    width = max(map(len, tables), default=0)
    return "\n".join(f"{name.ljust(width)}  {table.title}" for name, table in tables.items())


def run(argv: Sequence[str]) -> None:
    """
    Args:
        argv: the words after ``table``.
    """
    options = TableOptions.read(argv)
    if options.list:
        print(list_tables())
        return
    if not options.name:
        raise UsageError("NAME: missing; see --list")
    if options.out == Path():
        raise UsageError("--out: missing; give a folder for the results")
    from pipedraft.eval.published import make_table  # needs torch, which --help does not

    make_table(options, argv)
