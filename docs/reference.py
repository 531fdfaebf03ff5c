"""Write docs/cli.md and docs/config.md from the options' docstrings.

Run `python docs/reference.py`. Each page keeps its own text above ``REST``.
"""

import json
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Iterator
from dataclasses import MISSING, Field, is_dataclass
from itertools import groupby
from pathlib import Path
from textwrap import dedent
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pipedraft import doctor
from pipedraft.data_recipes import config, regenerate
from pipedraft.data_recipes.options import DataOptions
from pipedraft.eval import arguments, audit, compare, replay, report
from pipedraft.inference import demo
from pipedraft.inference.decode_options import WINGS, DecodeOptions
from pipedraft.inference.serving.options import ServeOptions
from pipedraft.inference.vllm.options import VllmOptions
from pipedraft.models.exchange.commands import SUBCOMMANDS
from pipedraft.options import Options, help_of, typed_fields
from pipedraft.train.config import EvaluationConfig, OptimConfig, RunConfig
from pipedraft.train.features.options import FeatureOptions
from pipedraft.train.help import EXAMPLE
from pipedraft.train.methods import methods
from pipedraft.train.new.options import NewOptions
from pipedraft.wings import commands_of

REST = "<!-- from here on: python docs/reference.py -->"
NO_REMARK = (
    *(NewOptions, regenerate.RegenerateOptions, DecodeOptions, demo.DemoOptions),
    *(ServeOptions, VllmOptions),
    *(command.options_class for command in commands_of(WINGS).values()),
    arguments.EvalOptions,
    *(compare.CompareOptions, replay.ReplayOptions, report.ReportOptions),
    *(command.options_class for command in arguments.COMMANDS.values()),
    arguments.ParityOptions,
    *(audit.AuditOptions, *SUBCOMMANDS.values()),
    doctor.DoctorOptions,
)
COMMANDS: dict[type[Options], str] = {
    FeatureOptions: "Every option of [pipedraft train](#pipedraft-train) is accepted, too.",
    DataOptions: "Every [data key](config.md#data) is an option: `--data.max_length 512`. "
    "`--data FILE` names files, folders or Hub ids, with commas between them.",
} | dict.fromkeys(NO_REMARK, "")
"""Options class per command, with a remark for its section."""
SECTIONS = {"optim": OptimConfig, "evaluation": EvaluationConfig, "data": config.DataConfig}
SECTIONS |= {"data.sources": config.Source, "data.sources.filters": config.RowFilters}
TYPES = {int: "integer", float: "number", bool: "true or false", str: "text", Path: "path"}
TYPES |= {NoneType: "null", dict: "mapping"}


def row(*cells: str) -> str:
    """Return a table row, with Markdown's signs escaped."""
    text = "\0".join(" ".join(cell.split()) for cell in cells)
    for sign, escaped in (("|", r"\|"), ("<", "&lt;"), ("*", r"\*"), ("\0", " | ")):
        text = text.replace(sign, escaped)
    return f"| {text} |"


def sentence(text: str | None) -> str:
    text = " ".join((text or "").split())
    return text and text[0].upper() + text[1:].removesuffix(".") + "."


def blocks(example: str) -> Iterator[str]:
    """Yield an example's paragraphs, with indented lines as code blocks."""
    lines = example.strip().removeprefix("example:").splitlines()
    for is_code, block in groupby(lines, key=lambda line: line.startswith("  ")):
        if text := dedent("\n".join(block)).strip():
            yield f"```\n{text}\n```" if is_code else text


def tables(parser: ArgumentParser) -> Iterator[tuple[str, str]]:
    """Yield the title and table for each group in a parser."""
    formatter: Any = parser._get_formatter()
    for group in parser._action_groups:
        rows = []
        for action in group._group_actions:
            hidden = {"--help", "--config", "--print_config"}
            if action.help == SUPPRESS or hidden & {*action.option_strings}:
                continue
            flag = f"`{formatter._format_action_invocation(action)}`"
            needed = "; required" * bool(action.required and action.option_strings)
            rows.append(row(flag, (action.help or "").replace("%%", "%") + needed))
        if rows:
            title = f"**{sentence(group.title)}** {sentence(group.description)}".strip()
            yield title, "\n".join(["| option | meaning |", "|---|---|", *rows])


def cli_parts() -> Iterator[str]:
    """Yield cli.md's parts below ``REST``. A repeated table becomes a link to the first one."""
    yield from ("## pipedraft train", "Train a draft head.", *blocks(EXAMPLE))
    yield (
        "Options: `--plan FILE`, `--wish-tau X`, `--curve FOLDER`, `--overfit-one [N]`, and every "
        "key in [config.md](config.md) as `--KEY VALUE`. In all "
        "commands, hyphens and underscores are the same: `--max-steps` is `--max_steps`. `--out` "
        "is "
        '`--output_dir`, and `--data FILE` is `--data.sources \'[{"path": "FILE"}]\'`.'
    )
    seen: dict[str, str] = {}
    for kind, remark in COMMANDS.items():
        yield f"## {kind.PROG}"
        yield sentence(kind.DESCRIPTION or kind.__doc__)
        yield from blocks(kind.EXAMPLE)
        yield from [remark] * bool(remark)
        for title, table in tables(kind.parser()):
            first = seen.setdefault(table, kind.PROG)
            is_new = first == kind.PROG
            yield title if is_new else f"{title} See [{first}](#{first.replace(' ', '-')})."
            yield from [table] * is_new


def type_text(hint: Any) -> str:
    kinds = get_args(hint)
    if get_origin(hint) is Literal:
        return ", ".join(f"`{value}`" for value in kinds)
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(type_text(kind) for kind in kinds)
    if get_origin(hint) in (list, tuple):
        return f"list of {type_text(kinds[0])}"
    return "section" if is_dataclass(hint) else TYPES[get_origin(hint) or hint]


def default_text(part: Field[Any]) -> str:
    default = part.default if part.default_factory is MISSING else part.default_factory()
    if default is MISSING or is_dataclass(default):
        return "required" if default is MISSING else ""
    return f"`{default if isinstance(default, str) and default else json.dumps(default)}`"


def config_parts() -> Iterator[str]:
    """Yield config.md's parts below ``REST``."""
    models = {f"model, for method: {name}": kind for name, kind in methods().items()}
    for title, kind in ({"Keys of a run": RunConfig} | SECTIONS | models).items():
        yield f"## {title}"
        yield sentence((kind.__doc__ or "").partition("\n\n")[0])
        rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
        for part, hint in typed_fields(kind):
            about = help_of(kind, part.name).replace("None:", "null:")
            rows.append(row(f"`{part.name}`", type_text(hint), default_text(part), about))
        yield "\n".join(rows)


def pages() -> Iterator[tuple[Path, str]]:
    """Yield each page and its text."""
    for name, parts in (("cli.md", cli_parts()), ("config.md", config_parts())):
        page = Path(__file__).with_name(name)
        head = page.read_text().partition(REST)[0]
        yield page, "\n\n".join([head + REST, *parts]) + "\n"


if __name__ == "__main__":
    for path, text in pages():
        path.write_text(text)
