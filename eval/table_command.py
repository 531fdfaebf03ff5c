"""Specifications, ours beside what was published: `python -m pipedraft.eval table --help`."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pipedraft.errors import UsageError, make_folder
from pipedraft.options import Options, option

if TYPE_CHECKING:
    from pipedraft.eval.published import TableContext
    from pipedraft.eval.runner import Finished
    from pipedraft.eval.spec import Spec

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
    from pipedraft.eval.spec import read_spec, table_names

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
    _make(options, read_options(options), argv)


def read_options(options: TableOptions) -> "Spec":
    """The specification with the options over it, checked."""
    import msgspec

    from pipedraft.eval.runner import check
    from pipedraft.eval.spec import read_spec

    names = ("target", "limit", "data_dir", "max_new_tokens", "seed")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    spec = msgspec.structs.replace(read_spec(options.name), **given)
    check(options.name, spec)
    return spec


def load(options: TableOptions, spec: "Spec") -> "TableContext":
    import torch

    from pipedraft.eval.checkpoints import Drafts
    from pipedraft.eval.published import TableContext
    from pipedraft.eval.runner import search_for
    from pipedraft.eval.tasks import load_tasks
    from pipedraft.eval.traces import traces_folder
    from pipedraft.models.target import load_target, load_tokenizer

    benchmarks = {
        name: [p for found in load_tasks(b, spec.data_dir, spec.limit).values() for p in found]
        for name, b in {n: d.benchmarks for n, d in spec.domains.items()}.items()
    } or load_tasks(spec.benchmarks, spec.data_dir, spec.limit)
    search = search_for(spec, list(options.checkpoints))
    make_folder("--out", options.out)
    traces_folder(options.out, fresh=options.fresh)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    target = load_target(spec.target, dtype=getattr(torch, spec.dtype), device=device)
    tokenizer = load_tokenizer(spec.target)
    return TableContext(
        target=target,
        tokenizer=tokenizer,
        benchmarks=benchmarks,
        drafts=Drafts(search, target, tokenizer),
        out=options.out,
    )


def _make(options: TableOptions, spec: "Spec", argv: Sequence[str]) -> None:
    import msgspec
    from transformers.utils import logging

    from pipedraft.eval.manifest import build_manifest
    from pipedraft.eval.runner import KINDS

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    context = load(options, spec)
    finished = KINDS[spec.kind].run(spec, context)
    if finished.results is None:
        reasons = dict.fromkeys(outcome.remark for outcome in finished.outcomes)
        raise ValueError(
            f"--checkpoints: nothing of {options.name} can be run: {'; '.join(reasons)}"
        )
    drafts, folders = context.drafts, context.drafts.folders
    models = [name for name in folders if drafts.is_model(name)]
    model = drafts.find(models[0]) if models else None
    shared = {n: v for n, v in msgspec.to_builtins(spec).items() if n not in ("rows", "title")}
    manifest = build_manifest(
        target=context.target,
        tokenizer=context.tokenizer,
        benchmarks=context.benchmarks,
        checkpoints=[folder for name, folder in folders.items() if name not in models],
        draft_model=None if model is None else model.model,
        config=options.to_dict()
        | shared
        | {"drafts": {name: str(f) for name, f in folders.items()}},
        argv=["python", "-m", "pipedraft.eval", "table", *argv],
        seed=spec.seed,
    )
    print(spec.title)
    print(_write(options, spec, finished, manifest, context))


def _write(
    options: TableOptions,
    spec: "Spec",
    finished: "Finished",
    manifest: dict[str, Any],
    context: "TableContext",
) -> str:
    """Write the files; returns what the terminal shows."""
    from pipedraft.eval.published import LEGEND, for_terminal, notes, paper_table, table_record
    from pipedraft.eval.report import write_report
    from pipedraft.eval.retention import write_retention
    from pipedraft.eval.tables import markdown
    from pipedraft.files import to_json, write_atomically

    out: Path = options.out
    results, shown = finished.results, []
    assert results is not None
    if spec.kind == "pipeline":
        write_report(out, results.runs or [], manifest)
    elif spec.kind == "retention":
        shown.append(write_retention(out, results, manifest))
    else:
        write_atomically(out / "manifest.json", to_json(manifest))
        write_atomically(out / "results.json", to_json(results))
    if spec.rows:
        lines = notes(spec, context, manifest["hardware"]["processor"])
        table = paper_table(spec, finished.outcomes)
        parts = [f"# {spec.title}", f"    {manifest['command']}", markdown(table)]
        parts += ["\n".join(f"- {line}" for line in lines), LEGEND]
        write_atomically(out / "table.md", ("\n\n".join(parts) + "\n").encode())
        content = to_json(table_record(options.name, spec, finished.outcomes))
        write_atomically(out / "table.json", content)
        shown = [for_terminal(table), *lines]
    names = "table.md, table.json, results.json" if spec.rows else "report.md, results.json"
    return "\n".join([*shown, f"written: {shlex.quote(str(out))}/{names}"])
