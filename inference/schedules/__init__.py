"""Schedules decide when to draft and inject tokens. Each has a file and calls ``Session``."""

from collections.abc import Iterable
from importlib import import_module
from pkgutil import iter_modules

from ...errors import nearest
from .base import Schedule


def find_schedules(package: str, folders: Iterable[str]) -> dict[str, type[Schedule]]:
    """Import a package's files and return their schedules by name."""
    found: dict[str, type[Schedule]] = {}
    for file in iter_modules(folders):
        for kind in vars(import_module(f"{package}.{file.name}")).values():
            if isinstance(kind, type) and issubclass(kind, Schedule) and "name" in vars(kind):
                found[kind.name] = kind
    return found


SCHEDULES = find_schedules(__name__, __path__)
"""Schedule by name. A folder with schedules of its own adds them."""
OTHER_NAMES = {"specpipe": "pipedec"}
"""Schedule's name, by another name from its paper. Results use the schedule's."""


def schedule_name(text: object) -> str:
    """Return the name in ``SCHEDULES`` for one of a schedule's names. Keep unknown names."""
    return OTHER_NAMES.get(str(text), str(text))


def known_schedule(text: object) -> str:
    """Return the name in ``SCHEDULES`` for one of a schedule's names.

    Raises:
        ValueError: the name is unknown. The message suggests the nearest one.
    """
    name = schedule_name(text)
    if name not in SCHEDULES:
        raise ValueError(f"{text!r} is unknown; {nearest(name, SCHEDULES)}")
    return name
