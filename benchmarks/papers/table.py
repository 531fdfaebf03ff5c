"""Reproduce a paper's table next to its published values, as text, Markdown and JSON."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from pipedraft.endings import leave_at_interrupts, run_command
from pipedraft.errors import UsageError

if __name__ == "__main__":
    leave_at_interrupts()

import msgspec
from drafts import TableContext
from kinds import KINDS, check
from rows import (
    RowOutcome,
    Value,
    decode_shard,
    load_context,
)
from spec import (
    DEFAULT_TARGET,
    Column,
    Row,
    Spec,
    read_spec,
    table_names,
)
from table_options import TableOptions

from pipedraft.eval.manifest import build_manifest
from pipedraft.eval.record import is_known
from pipedraft.eval.report import write_report
from pipedraft.eval.tables import Table, align_columns, bounds, markdown, number
from pipedraft.eval.traces import remove_traces
from pipedraft.files import to_json, write_atomically
from pipedraft.pretrained import quieten

NOT_PUBLISHED = "not published"
LEGEND = """\
- **ours** measured with the command above: L' equivalent acceptance length (95 % interval over
  prompts), S modeled speed-up over plain decoding, tau tokens per round, alpha accepted over
  tested draft tokens; outputs equal to the target's own, of those compared. **published** as its
  source has it, on its own target, prompts and hardware.
- "not published": the source prints no such number, or draws it as a curve."""


def measured(table: Spec, outcomes: Sequence[RowOutcome], index: int, measure: Column) -> Value:
    """Return a row's value in a column. A ratio to a row that was not run is missing."""
    own = outcomes[index].values.get(measure.benchmark, {}).get(measure.quantity, (None, None))
    if measure.over is None:
        return own
    other = table.baseline(table.rows[index], measure)
    if other is None:
        return None, None
    divisor, _ = (
        outcomes[other].values.get(measure.benchmark, {}).get(measure.quantity, (None, None))
    )
    if not is_known(own[0]) or not is_known(divisor) or not divisor:
        return None, None
    return own[0] / divisor, None


def _cell(value: Value) -> str:
    middle, interval = value
    if interval is None or not is_known(interval[0]):  # one prompt has no spread
        return number(middle)
    return f"{number(middle)} {bounds(interval, 2)}"


def _published(row: Row, column: str) -> str:
    if row.is_ours:
        return "-"
    value = row.published.get(column, NOT_PUBLISHED)
    return value if isinstance(value, str) else f"{value:g}"


def _remark(row: Row, outcome: RowOutcome) -> str:
    return "; ".join(dict.fromkeys(x for x in (outcome.remark, row.remark) if x))


def paper_table(table: Spec, outcomes: Sequence[RowOutcome]) -> Table:
    """Return a table with each row's names, measured values, published values and remark."""
    places = [table.place(row) for row in table.rows]
    has_network = len({place[1] for place in places}) > 1
    has_stages = any(outcome.stages for outcome in outcomes)
    header = ["method", *(["network"] if has_network else []), *(["n"] if has_stages else []), "T"]
    header += [f"ours: {text}" for text in table.measures]
    header += ["outputs equal", *(f"published: {column}" for column in table.sources), "remark"]
    rows = []
    for index, (row, outcome) in enumerate(zip(table.rows, outcomes, strict=True)):
        temperature, network = places[index]
        named = [row.name]
        named += [str(network or "-")] if has_network else []
        named += [str(outcome.stages or "-")] if has_stages else []
        ours = [
            _cell(measured(table, outcomes, index, Column.parse(text))) for text in table.measures
        ]
        published = [_published(row, column) for column in table.sources]
        shown = [*named, f"{temperature:g}", *ours, outcome.agreement, *published]
        rows.append([*shown, _remark(row, outcome)])
    return Table(header, rows)


def for_terminal(table: Table) -> str:
    """Return the table with aligned columns, followed by the long remarks."""
    lines = [align_columns(Table(table.header[:-1], [row[:-1] for row in table.rows]))]
    place = table.header.index("T")
    for row in table.rows:
        if row[-1]:
            lines.append(f"{row[0]}, T = {row[place]}: {row[-1]}")
    return "\n".join(lines)


def notes(table: Spec, context: TableContext, machine: str) -> list[str]:
    """Return the lines below a table, with differences and the numbers' sources."""
    prompts = ", ".join(f"{len(found)} of {name}" for name, found in context.benchmarks.items())
    name = "assets/target" if table.target == DEFAULT_TARGET else table.target
    lines = [
        f"differs: {table.differences} Ours: target `{name}`, prompts "
        f"{prompts}, {table.max_new_tokens} new tokens a turn, {machine}.",
    ]
    lines += [f"published, {column}: {source}" for column, source in table.sources.items()]
    for role, folder in context.drafts.folders.items():
        lines.append(f"{role}: `{folder}`")
    return lines


def table_record(name: str, table: Spec, outcomes: Sequence[RowOutcome]) -> dict[str, object]:
    """Return the contents of table.json, with every row's measured and published values."""
    rows = []
    for index, (row, outcome) in enumerate(zip(table.rows, outcomes, strict=True)):
        ours = {}
        for text in table.measures:
            value, interval = measured(table, outcomes, index, Column.parse(text))
            ours[text] = {"value": value, "ci95": interval}
        temperature, network = table.place(row)
        rows.append(
            {
                "name": row.name,
                "temperature": temperature,
                "network": network,
                "ours": ours,
                "published": row.published,
                "remark": _remark(row, outcome),
            }
        )
    head = {"name": name, "title": table.title, "paper": table.paper, "sources": table.sources}
    return head | {"differences": table.differences, "rows": rows}


# -- the command -----------------------------------------------------------------------------------


def read_options(options: TableOptions) -> Spec:
    """Return the checked specification, with the options applied."""
    names = ("target", "limit", "data_dir", "max_new_tokens", "seed", "dtype")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    spec = msgspec.structs.replace(read_spec(options.name), **given)
    check(options.name, spec)
    return spec


def run(argv: Sequence[str]) -> None:
    """Run a table, write its files and print it.

    Args:
        argv: the words after the script's name.
    """
    options = TableOptions.read(argv)
    if options.list:
        for name in table_names():
            print(f"{name:<24}{read_spec(name).title}")
        return
    if not options.name:
        raise UsageError("NAME: missing; see --list")
    if options.out == Path():
        raise UsageError("--out: missing; give a folder for the results")
    spec = read_options(options)
    for name in ("sequences", "shard"):
        if spec.kind != "pipeline" and getattr(options, name) not in (1, None):
            raise UsageError(
                f"--{name}: {getattr(options, name)}, but {options.name} is a table of kind "
                f"{spec.kind}, whose rows are decoded one after the other; leave it out"
            )
    quieten()
    context = load_context(spec, options)
    if options.fresh:
        remove_traces(options.out, options.shard)
    if options.shard is not None:
        outcomes, turns = decode_shard(spec, context)
        if turns is None:
            raise _nothing_runs(options.name, outcomes)
        print(f"{turns} decoded turns of this share are in {options.out}/traces")
        return
    outcomes, results = KINDS[spec.kind].run(spec, context)
    if results is None:
        raise _nothing_runs(options.name, outcomes)
    drafts, folders = context.drafts, context.drafts.folders
    models = [name for name in folders if drafts.is_model(name)]
    model = drafts.find(models[0]) if models else None
    shared = {n: v for n, v in msgspec.to_builtins(spec).items() if n not in ("rows", "title")}
    manifest = build_manifest(
        target=context.target,
        tokenizer=context.tokenizer,
        benchmarks=context.benchmarks,
        checkpoints=[folder for name, folder in folders.items() if name not in models],
        draft=model,
        config=options.to_dict()
        | shared
        | {"drafts": {name: str(f) for name, f in folders.items()}},
        argv=["python", "benchmarks/papers/table.py", *argv],
        seed=spec.seed,
    )
    print(spec.title)
    out: Path = options.out
    if spec.kind == "pipeline":
        write_report(out, results.runs or [], manifest)
    else:
        write_atomically(out / "manifest.json", to_json(manifest))
        write_atomically(out / "results.json", to_json(results))
    lines = notes(spec, context, manifest["hardware"]["processor"])
    table = paper_table(spec, outcomes)
    parts = [f"# {spec.title}", f"    {manifest['command']}", markdown(table)]
    parts += ["\n".join(f"- {line}" for line in lines), LEGEND]
    write_atomically(out / "table.md", ("\n\n".join(parts) + "\n").encode())
    write_atomically(out / "table.json", to_json(table_record(options.name, spec, outcomes)))
    written = f"written: {shlex.quote(str(out))}/table.md, table.json, results.json"
    print(for_terminal(table), *lines, written, sep="\n")


def _nothing_runs(name: str, outcomes: Sequence[RowOutcome]) -> ValueError:
    reasons = dict.fromkeys(outcome.remark for outcome in outcomes)
    return ValueError(f"--checkpoints: nothing of {name} can be run: {'; '.join(reasons)}")


if __name__ == "__main__":
    run_command(lambda: run(sys.argv[1:]))
