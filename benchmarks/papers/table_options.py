"""Options of table.py."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pipedraft.eval.arguments import read_share
from pipedraft.inference.arguments import Dtype, PlaceOptions
from pipedraft.options import option

EXAMPLE = """\
example:
  python benchmarks/papers/table.py --list
  python benchmarks/papers/table.py spd1 --limit 4 --out out/tables/spd1
  python benchmarks/papers/table.py flowspec1 --target meta-llama/Llama-2-7b-chat-hf \\
      --checkpoints benchmarks/papers/models/llama_2_7b_chat.yaml --data-dir data/eval \\
      --out out/tables/flowspec1

Prints the table and writes table.md, table.json, manifest.json and the entries behind it
(results.json) into --out. A row without a checkpoint names the command that trains one. OUT/traces
keeps what a pipeline decoded: run the same command again to resume.
"""


@dataclass(frozen=True, kw_only=True)
class TableOptions(PlaceOptions):
    """Run a specification, such as a paper's table, with the available drafts."""

    PROG: ClassVar[str] = "benchmarks/papers/table.py"
    EXAMPLE: ClassVar[str] = EXAMPLE

    name: str = option("", metavar="NAME", positional=True)
    """table name (see --list), or a YAML file"""
    list: bool = False
    """list all tables, one per line, and exit"""
    target: str | None = None
    """folder or Hub name; default: the specification's, else the embedded one"""
    checkpoints: tuple[str, ...] = option(("out",), metavar="PLACE", many=True)
    """run folders to search for drafts, or YAML files with lines role: folder"""
    limit: int | None = option(None, metavar="P", least=1)
    """first P prompts per benchmark"""
    data_dir: str | None = option(None, metavar="D")
    """folder with the benchmarks' official files; see eval --help"""
    max_new_tokens: int | None = option(None, metavar="M", least=1)
    """new tokens per turn; default: 128"""
    dtype: Dtype | None = None  # type: ignore[assignment]  # None: the specification's
    """dtype for target and draft; default: the specification's, float32"""
    seed: int | None = option(None, metavar="N", least=0)
    """seed for sampling and bootstrap; default: 0"""
    sequences: int = option(1, metavar="N", least=1)
    """conversations decoded at once; see eval --help"""
    shard: str | None = option(None, metavar="I/N", parse=read_share)
    """decode share I of N; see eval --help"""
    fresh: bool = False
    """decode again despite OUT/traces; see eval --help"""
    out: Path = option(Path(), metavar="OUT")
    """results folder"""
