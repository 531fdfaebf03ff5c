"""Tables of the papers, ours beside the published ones: `python -m pipedraft.eval table --help`."""

import argparse
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pipedraft
from pipedraft.errors import Parser, UsageError, make_folder
from pipedraft.eval.papers.declarations import (
    Measure,
    PaperTable,
    read_roles,
    read_table,
    table_names,
)
from pipedraft.inference.arguments import positive

EXAMPLE = """\
example:
  python -m pipedraft.eval table --list
  python -m pipedraft.eval table spd1 --limit 4 --data-dir data/eval --out out/tables/spd1
  python -m pipedraft.eval table flowspec1 --target Qwen/Qwen3-8B --checkpoints heads.yaml \\
      --out out/tables/flowspec1

prints the table and writes table.md, table.json, manifest.json and the entries behind it
(results.json) into --out. A row whose checkpoint is missing names the command that makes it. What
a pipeline decoded is kept in OUT/traces: the same command goes on after a kill.
"""
DEFAULT_TARGET = Path(pipedraft.__file__).parent / "assets" / "target"


def build_parser() -> Parser:
    parser = Parser(
        prog="python -m pipedraft.eval table",
        description="Make a table of a paper with the drafts at hand, beside the published one.",
        epilog=EXAMPLE,
    )
    add = parser.add_argument
    add("name", nargs="?", metavar="NAME", help="of the table; see --list")
    add("--list", action="store_true", help="name all tables, a line each, and end")
    add("--target", help="folder or Hub name of the target (default: the embedded one)")
    add(
        "--checkpoints",
        nargs="+",
        default=["out"],
        metavar="PLACE",
        help="folders of runs to find the drafts in, or YAML files of role: folder (default: out)",
    )
    add("--limit", type=positive, metavar="P", help="the first P prompts of each benchmark")
    add("--data-dir", metavar="D", help="of the benchmarks' official files; see eval --help")
    add("--max-new-tokens", type=positive, default=128, metavar="M", help="a turn (default: 128)")
    add("--seed", type=int, default=0, help="of the sampling and the bootstrap (default: 0)")
    add("--fresh", action="store_true", help="decode again what OUT/traces has")
    add("--out", type=Path, metavar="OUT", help="folder of the results")
    return parser


def check(name: str, table: PaperTable) -> None:
    """Raise ValueError for settings or measures that no evaluation has. Loads no model."""
    from pipedraft.eval.papers.runs import KINDS

    kind = KINDS[table.kind]
    for text in table.measures:
        if Measure(text=text).quantity not in kind.quantities:
            raise ValueError(
                f"{name}: measure {text!r} is none of a {table.kind} table; give one of "
                f"{', '.join(sorted(kind.quantities))}"
            )
    try:
        kind.check(table)
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from error


def list_tables() -> str:
    tables = {name: read_table(name) for name in table_names()}
    width = max(map(len, tables), default=0)
    return "\n".join(f"{name.ljust(width)}  {table.title}" for name, table in tables.items())


def run(argv: Sequence[str]) -> None:
    """
    Args:
        argv: the words after ``table``.
    """
    options = build_parser().parse_args(argv)
    if options.list:
        print(list_tables())
        return
    if options.name is None:
        raise UsageError("NAME: missing; see --list")
    if options.out is None:
        raise UsageError("--out: missing; give a folder for the results")
    table = read_table(options.name)
    check(options.name, table)
    _make(options, table, argv)


def _make(options: argparse.Namespace, table: PaperTable, argv: Sequence[str]) -> None:
    from transformers.utils import logging

    from pipedraft.eval.manifest import build_manifest
    from pipedraft.eval.papers.checkpoints import LANGUAGE_MODEL
    from pipedraft.eval.papers.report import for_terminal, notes, paper_table
    from pipedraft.eval.papers.runs import KINDS

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    world = _world(options, table)
    finished = KINDS[table.kind].run(table, world)
    if finished.results is None:
        reasons = dict.fromkeys(outcome.remark for outcome in finished.outcomes)
        raise ValueError(
            f"--checkpoints: nothing of {options.name} can be run: {'; '.join(reasons)}"
        )
    folders = {role: str(folder) for role, folder in world.drafts.folders.items()}
    models = [role for role in folders if world.drafts.places.roles[role].kind == LANGUAGE_MODEL]
    settings = {name: str(v) if isinstance(v, Path) else v for name, v in vars(options).items()}
    manifest = build_manifest(
        target=world.target,
        tokenizer=world.tokenizer,
        benchmarks=world.benchmarks,
        checkpoints=[Path(folders[role]) for role in folders if role not in models],
        draft_model=world.drafts.find(models[0]).model if models else None,
        config=settings | {"target": world.name, "drafts": folders},
        argv=["python", "-m", "pipedraft.eval", "table", *argv],
        seed=options.seed,
    )
    _write(options, table, finished, manifest, world)
    shown = paper_table(table, finished.outcomes)
    print(table.title)
    print(for_terminal(shown))
    print("\n".join(notes(table, world, manifest["hardware"]["processor"])))
    print(f"written: {shlex.quote(str(options.out))}/table.md, table.json, results.json")


def _world(options: argparse.Namespace, table: PaperTable) -> Any:
    import torch

    from pipedraft.eval.papers.checkpoints import Drafts, Places
    from pipedraft.eval.papers.runs import World
    from pipedraft.eval.tasks import load_tasks
    from pipedraft.models.target import load_target, load_tokenizer

    benchmarks = load_tasks(table.benchmarks, options.data_dir, options.limit)
    places = Places(options.checkpoints, read_roles())
    make_folder("--out", options.out)
    if options.fresh:
        shutil.rmtree(options.out / "traces", ignore_errors=True)
    name = options.target or str(DEFAULT_TARGET)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    target, tokenizer = load_target(name, device=device), load_tokenizer(name)
    return World(
        target=target,
        name=name,
        tokenizer=tokenizer,
        benchmarks=benchmarks,
        drafts=Drafts(places, target, tokenizer),
        options=options,
    )


def _write(
    options: argparse.Namespace,
    table: PaperTable,
    finished: Any,
    manifest: dict[str, Any],
    world: Any,
) -> None:
    from pipedraft.eval.papers.report import LEGEND, notes, paper_table, record
    from pipedraft.eval.report import write_report
    from pipedraft.eval.tables import markdown
    from pipedraft.files import to_json, write_atomically

    out: Path = options.out
    if table.kind == "pipeline":
        write_report(out, finished.results.runs, manifest)
    else:
        write_atomically(out / "manifest.json", to_json(manifest))
        write_atomically(out / "results.json", to_json(finished.results))
    lines = notes(table, world, manifest["hardware"]["processor"])
    parts = [
        f"# {table.title}",
        f"    {manifest['command']}",
        markdown(paper_table(table, finished.outcomes)),
        "\n".join(f"- {line}" for line in lines),
        LEGEND,
    ]
    write_atomically(out / "table.md", ("\n\n".join(parts) + "\n").encode())
    content = to_json(record(options.name, table, finished.outcomes))
    write_atomically(out / "table.json", content)
