"""Wings: folders that nothing else names, so that deleting them leaves the rest whole.

A folder of ``inference`` or ``eval`` is a wing if it has a file ``wing.py``. Its ``WING`` says what
the folder adds to the command around it. ``inference/config`` finds schedules by itself.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name

from .options import Options


@dataclass(frozen=True, kw_only=True)
class Subcommand:
    """Subcommand of a wing. Names are MODULE:NAME, imported at the call."""

    about: str
    options: str
    """Name of the options' class. Its module must not import torch: --help has to be fast."""
    run: str
    """Name of a function that takes the options and the words they were read from."""

    @property
    def options_class(self) -> type[Options]:
        found: type[Options] = resolve_name(self.options)
        return found

    def start(self, words: Sequence[str]) -> None:
        options = self.options_class.read(words)
        resolve_name(self.run)(options, words)


@dataclass(frozen=True, kw_only=True)
class Wing:
    """What a folder adds to the command around it."""

    commands: Mapping[str, Subcommand] = field(default_factory=dict)
    options: type[Options] = Options
    """Further options of the command itself."""
    example: str = ""
    """Further text below the command's help."""
    needs_no_prompt: Sequence[str] = ()
    """Options given instead of a prompt."""
    decodes: Mapping[str, str] = field(default_factory=dict)
    """Option -> name of the function that decodes if the option is given. It takes all options."""


def find_wings(package: str) -> list[Wing]:
    """Import the ``wing.py`` of each folder in a package, for example ``pipedraft.inference``."""
    folder = Path(__file__).parent.joinpath(*package.split(".")[1:])
    names = sorted(path.parent.name for path in folder.glob("*/wing.py"))
    return [import_module(f"{package}.{name}.wing").WING for name in names]


def chosen_decoder(wings: Sequence[Wing], options: Options) -> Callable[[Options], None] | None:
    """Return the function of the wing that the given options ask for, or None."""
    names = (name for wing in wings for name in wing.decodes.items())
    return next((resolve_name(run) for name, run in names if getattr(options, name)), None)


def commands_of(wings: Sequence[Wing]) -> dict[str, Subcommand]:
    return {name: command for wing in wings for name, command in wing.commands.items()}


def options_of(wings: Sequence[Wing]) -> type[Options]:
    """Return a base class with the options of all wings."""
    kinds = [wing.options for wing in wings if wing.options is not Options]
    return type("WingOptions", (*kinds, Options), {})
