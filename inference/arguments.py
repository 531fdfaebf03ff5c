"""Command-line options about decoding that several commands share."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import Field, fields
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from pipedraft.inference.config import check_temperature
from pipedraft.inference.schedules import SCHEDULES
from pipedraft.inference.shapes import TreeShape

if TYPE_CHECKING:
    from pipedraft.inference.transport.cluster import Cluster


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up; give e.g. 4")
    return int(text)


def temperature(text: str) -> float:
    try:
        value = float(text)
        check_temperature(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a temperature; give 0 (greedy), or 0.0001 to 1000000"
        ) from error
    return value


def tree_label(text: str) -> str:
    """The label of a tree, checked."""
    try:
        return TreeShape.parse(text).label
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


# -- settings of the schedules ----------------------------------------------------------------


def add_schedule_arguments(parser: argparse.ArgumentParser, *, are_lists: bool = False) -> None:
    """An option for every setting of every schedule; what is not given has no value.

    Args:
        are_lists: values may be comma lists, for ``settings_grid``.
    """
    group = parser.add_argument_group(
        "settings of schedules", "each with the schedules that have it; others refuse it"
    )
    for name, owners in _owners().items():
        _add_setting(group, name, owners, are_lists)


def _owners() -> dict[str, list[str]]:
    """Setting -> the schedules that have it."""
    owners: dict[str, list[str]] = {}
    for schedule, kind in SCHEDULES.items():
        for setting in fields(kind):
            owners.setdefault(setting.name, []).append(schedule)
    return owners


def _add_setting(group: Any, name: str, owners: Sequence[str], is_list: bool) -> None:
    kind = SCHEDULES[owners[-1]]
    setting: Field[Any] = next(f for f in fields(kind) if f.name == name)
    hint = get_type_hints(kind)[name]
    default = setting.default
    flag = name.replace("_", "-")
    text = f"{', '.join(owners)}: {setting_help(kind, name)}".replace("%", "%%")
    if hint is bool:
        flag = f"no-{flag}" if default else flag
        group.add_argument(
            f"--{flag}", dest=name, action="store_const", const=not default, help=text
        )
        return
    if get_origin(hint) is Literal:
        choices = list(get_args(hint))
        group.add_argument(f"--{flag}", choices=choices, help=f"{text} (default: {default})")
        return
    types = [kind for kind in (get_args(hint) or (hint,)) if kind is not type(None)]
    shown = default.label if isinstance(default, TreeShape) else default
    all_defaults = {
        f.default for owner in owners for f in fields(SCHEDULES[owner]) if f.name == name
    }
    if shown is not None and len(all_defaults) == 1:
        text += f" (default: {shown})"
    parse: Callable[[str], Any] = tree_label if types[0] is TreeShape else types[0]
    if is_list:
        text += "; or a comma list"
        parse = listed(parse)
    metavar = {int: "N", float: "P", str: "NAME"}.get(types[0], "TREE")
    group.add_argument(f"--{flag}", type=parse, metavar=metavar, help=text)


def setting_help(kind: type, name: str) -> str:
    """First sentence of the docstring under a setting."""
    from docstring_parser import parse_from_object

    for owner in kind.__mro__[:-2]:
        for entry in parse_from_object(owner).params:
            if entry.arg_name == name and entry.description:
                return " ".join(entry.description.split()).partition(". ")[0].rstrip(".")
    raise AssertionError(f"{kind.__name__}.{name} has no docstring")


def given_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The settings of schedules that are on the command line."""
    found = {name: getattr(options, name, None) for name in _owners()}
    return {name: value for name, value in found.items() if value is not None}


def listed(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Type of an option that takes a comma list; a repeated value counts once."""

    def parse_list(text: str) -> list[Any]:
        parts = [part.strip() for part in text.split(",")]
        if not all(parts):
            raise argparse.ArgumentTypeError(f"{text!r} has an empty entry; write a,b,c")
        try:
            return list(dict.fromkeys(parse(part) for part in parts))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse_list


def settings_grid(
    options: argparse.Namespace, schedules: Sequence[str]
) -> list[list[dict[str, Any]]]:
    """For each schedule all combinations of the given settings that it has.

    Raises:
        ValueError: a setting that none of the schedules has.
    """
    given, owners = given_settings(options), _owners()
    for name in given:
        if not set(schedules) & set(owners[name]):
            raise ValueError(
                f"--{name.replace('_', '-')}: {', '.join(schedules)} has no such setting; it "
                f"belongs to {', '.join(owners[name])}"
            )
    grid = []
    for schedule in schedules:
        own = {name: value for name, value in given.items() if schedule in owners[name]}
        lists = [value if isinstance(value, list) else [value] for value in own.values()]
        grid.append([dict(zip(own, values, strict=True)) for values in product(*lists)])
    return grid


# -- where the stages run ---------------------------------------------------------------------


def _layer_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def add_backend_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the stages run."""
    group = parser.add_argument_group("stages as processes (--backend process, under torchrun)")
    add = group.add_argument
    add(
        "--backend",
        choices=["local", "process"],
        default="local",
        help="local: one process and the virtual clock; process: one rank per stage, the draft on "
        "rank 0 beside the first stage, or alone if there is one rank more",
    )
    add(
        "--boundaries",
        type=_layer_numbers,
        default=(),
        metavar="0,B,..,L",
        help="first layer of each stage, then the number of layers (default: near-even)",
    )
    add(
        "--links",
        choices=["auto", "device", "host"],
        default="auto",
        help="way of hidden states between ranks; device: NCCL between GPUs, host: through host "
        "memory (default: device where every rank has a GPU of its own)",
    )
    add(
        "--step-timeout",
        type=float,
        default=8.0,
        metavar="S",
        help="a forward pass of a stage that takes longer ends the run (default 8 s)",
    )


@contextmanager
def backend_of(options: argparse.Namespace) -> Iterator[Cluster | None]:
    """The cluster that the options ask for, entered; None for the local backend."""
    from pipedraft.inference.transport import is_launched

    if options.backend == "local":
        if is_launched() and int(os.environ["WORLD_SIZE"]) > 1:
            if os.environ["RANK"] != "0":
                sys.exit(2)  # rank 0 says it
            raise ValueError(
                "--backend: 'local' runs in one process; add --backend process under torchrun"
            )
        yield None
        return
    from pipedraft.inference.transport.cluster import Cluster
    from pipedraft.inference.transport.watch import Limits

    with Cluster(Limits(step_s=options.step_timeout), options.links) as cluster:
        yield cluster
