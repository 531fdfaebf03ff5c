"""Schedules decide when to draft and inject tokens. Each has a file and calls ``Session``."""

from importlib import import_module
from pkgutil import iter_modules

from .base import Schedule


def _find_schedules() -> dict[str, type[Schedule]]:
    """Import the files in this folder and return every schedule by name."""
    found: dict[str, type[Schedule]] = {}
    for file in iter_modules(__path__):
        for kind in vars(import_module(f"{__name__}.{file.name}")).values():
            if isinstance(kind, type) and issubclass(kind, Schedule) and "name" in vars(kind):
                found[kind.name] = kind
    return found


SCHEDULES = _find_schedules()
