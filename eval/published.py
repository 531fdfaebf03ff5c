"""Ours beside what a paper published: for the terminal, as Markdown and as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pipedraft.eval.checkpoints import Drafts
from pipedraft.eval.record import is_known
from pipedraft.eval.spec import DEFAULT_TARGET, Measure, Row, Spec
from pipedraft.eval.tables import Table, align_columns, bounds, number
from pipedraft.eval.tasks import Prompt

Value = tuple[float | None, Sequence[float | None] | None]
"""And its 95 % interval, where there is one."""
NOT_AVAILABLE = "not available here"
LEGEND = """\
- **ours** measured with the command above: L' equivalent acceptance length (95 % interval over
  prompts), S modeled speed-up over plain decoding, tau tokens per round, alpha accepted over
  tested draft tokens; texts equal to the target's own, of those compared. **published** as its
  source has it, on its own target, prompts and hardware.
- "not available here": the paper may have the number; no source of it was at hand."""


@dataclass
class Outcome:
    """What became of a row."""

    values: dict[str | None, dict[str, Value]] = field(default_factory=dict)
    """Benchmark, or None for all of them, -> quantity -> value."""
    remark: str = ""
    stages: int | None = None
    texts: str = "-"
    """How many of the texts that were compared with the target's own are equal to them."""


@dataclass(frozen=True, kw_only=True)
class TableContext:
    """What all rows of a table share."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    benchmarks: Mapping[str, Sequence[Prompt]]
    drafts: Drafts
    out: Path


def measured(table: Spec, outcomes: Sequence[Outcome], index: int, measure: Measure) -> Value:
    """Value of a row's measure; one that divides by a row that was not run does not exist."""
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
    value = row.published.get(column, NOT_AVAILABLE)
    return value if isinstance(value, str) else f"{value:g}"


def paper_table(table: Spec, outcomes: Sequence[Outcome]) -> Table:
    """One line for each row: what names it, our values, the published ones, a remark."""
    places = [table.place(row) for row in table.rows]
    has_network = len({place[1] for place in places}) > 1
    has_stages = any(outcome.stages for outcome in outcomes)
    header = ["method", *(["network"] if has_network else []), *(["n"] if has_stages else []), "T"]
    header += [f"ours: {text}" for text in table.measures]
    header += ["texts equal", *(f"published: {column}" for column in table.sources), "remark"]
    rows = []
    for index, (row, outcome) in enumerate(zip(table.rows, outcomes, strict=True)):
        temperature, network = places[index]
        named = [row.name]
        named += [str(network or "-")] if has_network else []
        named += [str(outcome.stages or "-")] if has_stages else []
        ours = [
            _cell(measured(table, outcomes, index, Measure(text=text))) for text in table.measures
        ]
        published = [_published(row, column) for column in table.sources]
        remark = "; ".join(dict.fromkeys(x for x in (outcome.remark, row.remark) if x))
        rows.append([*named, f"{temperature:g}", *ours, outcome.texts, *published, remark])
    return Table(header, rows)


def for_terminal(table: Table) -> str:
    """Aligned, with the remarks below: they are long."""
    lines = [align_columns(table.header[:-1], [row[:-1] for row in table.rows])]
    place = table.header.index("T")
    for row in table.rows:
        if row[-1]:
            lines.append(f"{row[0]}, T = {row[place]}: {row[-1]}")
    return "\n".join(lines)


def notes(table: Spec, context: TableContext, machine: str) -> list[str]:
    """What differs, and where the numbers are from."""
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


def table_record(name: str, table: Spec, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """table.json."""
    rows = []
    for index, (row, outcome) in enumerate(zip(table.rows, outcomes, strict=True)):
        ours = {}
        for text in table.measures:
            value, interval = measured(table, outcomes, index, Measure(text=text))
            ours[text] = {"value": value, "ci95": interval}
        temperature, network = table.place(row)
        place = {"temperature": temperature, "network": network}
        published = {"published": row.published, "remark": outcome.remark or row.remark}
        rows.append({"name": row.name, **place, "ours": ours, **published})
    head = {"name": name, "title": table.title, "paper": table.paper, "sources": table.sources}
    return head | {"differences": table.differences, "rows": rows}
