"""Options of a command: a dataclass whose fields are flags, read by jsonargparse.

    @dataclass(frozen=True, kw_only=True)
    class Push(Options):
        '''upload a checkpoint to the Hub'''

        checkpoint: str
        '''checkpoint folder, or a run's folder'''
        dry_run: bool = False
        '''only write the folder'''

``Push.read(["--checkpoint", "out/spd", "--dry-run"])`` is a ``Push``. A field without default is
required, a bool is a switch, a tuple takes a comma list (``repeated``: the flag several times), and
``--config FILE`` reads any of them from YAML. The fields of a base class are a group of the help.
"""

import argparse
import difflib
import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from itertools import zip_longest
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, Literal, Self, TypeAlias, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace, get_loader, set_loader

from pipedraft.errors import UsageError
from pipedraft.files import Values, check_yaml, read_yaml

Reader: TypeAlias = Callable[[Any], Any]
"""Makes a value of a word, or of a value of a file."""
OptionField: TypeAlias = Field[Any]
Group: TypeAlias = Any
"""A parser, or a group of one: jsonargparse gives them no common type."""
UNKNOWN_KEYS = (
    r"[Uu]nrecognized arguments: (?P<key>[^\s=]+)",
    r"Group '(?P<group>[^']+)' does not accept option '(?P<key>[^']+)'",
    r"Option '(?P<key>[^']+)' is not accepted",
)
WRONG_TYPE = r'Parser key "(?P<key>[^"]+)": (?P<reason>.*?)(?:Got|Given) value: (?P<value>.*)'
MISSING_KEY = r"the following arguments are required: (?P<key>.*)"
LOAD_YAML = get_loader("yaml")
METAVARS: dict[object, str] = {int: "N", float: "X", Path: "FILE"}


def option(default: Any = MISSING, **how: Any) -> Any:
    """A field with more than its type and docstring say.

    Args:
        how: metavar; parse: text -> value (of each entry); least: smallest value; repeated: one
            entry each time the flag is given; keeps_repeats: values of a comma list may be equal;
            many: all words after it; positional: no flag; flag: another one than the name; hidden:
            no argument.
    """
    if default is MISSING:
        return field(metadata=how)
    return field(default=default, metadata=how)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base class of a command's options."""

    PROG: ClassVar[str] = ""
    DESCRIPTION: ClassVar[str] = ""
    """Default: the docstring of the class."""
    EXAMPLE: ClassVar[str] = ""
    ONE_OF: ClassVar[Sequence[Sequence[str]]] = ()
    """Of each of these groups of fields one is to be given."""
    AT_MOST_ONE: ClassVar[Sequence[Sequence[str]]] = ()

    def __post_init__(self) -> None:
        for part in fields(self):
            value, least = getattr(self, part.name), part.metadata.get("least")
            for one in value if isinstance(value, tuple) else (value,):
                if isinstance(one, str) and not one and value != part.default:
                    wanted = help_of(type(self), part.name)
                    raise UsageError(f"{flag_of(part)}: ''; give {wanted}")
                if isinstance(one, float) and not math.isfinite(one):
                    raise UsageError(f"{flag_of(part)}: {one}; give a finite number")
                if least is not None and one is not None and not one >= least:
                    raise UsageError(f"{flag_of(part)}: {one}; give at least {least}")
        for group in (*self.ONE_OF, *self.AT_MOST_ONE):
            given = [name for name in group if getattr(self, name) not in (None, (), False)]
            flags = [flag_name(name) for name in (given or group)]
            if not given and group in self.ONE_OF:
                raise UsageError(f"{' or '.join(flags)}: missing; see --help for an example")
            if len(given) > 1:
                raise UsageError(f"{flags[1]}: not allowed with {flags[0]}; leave one out")

    @classmethod
    def parser(cls, *, shows_help: bool = True) -> ArgumentParser:
        """The parser of these options: flags, --help and --config.

        Args:
            shows_help: with the docstring of every field, which takes a moment to read.
        """
        parser = ArgumentParser(
            prog=cls.PROG,
            description=cls.DESCRIPTION or cls.__doc__,
            epilog=cls.EXAMPLE,
            exit_on_error=False,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("--config", action="config", help="YAML file of options")
        cls.add_to(parser, shows_help)
        return parser

    @classmethod
    def add_to(cls, parser: ArgumentParser, shows_help: bool) -> None:
        groups: dict[type, Group] = {cls: parser}
        for part, hint in typed_fields(cls):
            if part.metadata.get("hidden"):
                continue
            owner = next(c for c in reversed(cls.__mro__) if part.name in own_annotations(c))
            if owner not in groups:
                title, _, about = inspect.cleandoc(owner.__doc__ or "").partition("\n\n")
                groups[owner] = parser.add_argument_group(title, about)
            text = help_of(owner, part.name) if shows_help else ""
            _add(groups[owner], part, hint, text)

    @classmethod
    def read(cls, words: Sequence[str]) -> Self:
        """Read the words of a command line; --help prints the help and exits.

        Raises:
            UsageError: one line that names the option, the value and the fix.
        """
        shows_help = any(word in ("-h", "--help") for word in words)
        parser = cls.parser(shows_help=shows_help)
        return cls(**cls.values(vars(parse(parser, words))))

    @classmethod
    def read_own(cls, words: Sequence[str]) -> tuple[Self, list[str]]:
        """Read the words that are options of this class; returns the other words, too."""
        takes = {flag_of(part): hint is not bool for part, hint in typed_fields(cls)}
        own: list[str] = []
        rest: list[str] = []
        at = 0
        while at < len(words):
            flag, has_value, _ = words[at].partition("=")
            size = 1 + (takes.get(flag, False) and not has_value)
            (own if flag in takes or flag in ("-h", "--help") else rest).extend(
                words[at : at + size]
            )
            at += size
        return cls.read(own), rest

    @classmethod
    def values(cls, parsed: Values) -> Values:
        """Parsed values as arguments of the class."""
        return {
            part.name: tuple(value) if isinstance(value, list) else value
            for part in fields(cls)
            for value in [parsed.get(part.name)]
            if part.name in parsed and not (value is None and part.metadata.get("repeated"))
        }

    def to_dict(self) -> Values:
        """Values as a file can hold them."""
        return {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(self).items()
        }


def own_annotations(kind: type) -> Mapping[str, object]:
    return vars(kind).get("__annotations__", {})


def typed_fields(kind: type) -> list[tuple[OptionField, Any]]:
    hints = get_type_hints(kind)
    return [(part, hints[part.name]) for part in fields(kind)]


def flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def flag_of(part: OptionField) -> str:
    if part.metadata.get("positional"):
        return part.name
    return str(part.metadata.get("flag", flag_name(part.name)))


def help_of(kind: type, name: str) -> str:
    """The docstring under a field."""
    from docstring_parser import parse_from_object  # reads the source

    for owner in kind.__mro__[:-1]:
        if name in own_annotations(owner):
            for entry in parse_from_object(owner).params:
                if entry.arg_name == name and entry.description:
                    return " ".join(entry.description.split())
    raise AssertionError(f"{kind.__name__}.{name} has no docstring")


def _add(group: Group, part: OptionField, hint: Any, text: str) -> None:
    """One argument; what its type means is said in this module's docstring."""
    how = part.metadata
    default = part.default
    if text and default not in (MISSING, None, (), False, True):
        shown = default if isinstance(default, tuple) else (default,)
        text += f" (default: {','.join(map(str, shown))})"
    settings: Values = {"help": text.replace("%", "%%")}
    if hint is bool:
        group.add_argument(
            flag_of(part), action="store_false" if default else "store_true", **settings
        )
        return
    kind = next((k for k in get_args(hint) if k is not NoneType), hint)
    kind = kind if NoneType in get_args(hint) else hint
    if get_origin(kind) is not Literal:
        settings["metavar"] = how.get("metavar", METAVARS.get(kind, "NAME"))
    if get_origin(kind) is tuple:
        one = how.get("parse", get_args(kind)[0])
        is_comma_list = not {"repeated", "positional", "many"} & how.keys()
        if one is not str or is_comma_list:  # shells complete files where no type is given
            entries = listed(one, keeps_repeats=how.get("keeps_repeats", False))
            settings["type"] = checked(entries if is_comma_list else each(one))
        default = list(default) if isinstance(default, tuple) else default
    else:
        settings["type"] = checked(how["parse"]) if "parse" in how else kind
    if how.get("positional"):
        many, needed = get_origin(kind) is tuple, default is MISSING
        nargs = ("+" if needed else "*") if many else (None if needed else "?")
        group.add_argument(part.name, **settings, **({"nargs": nargs} if nargs else {}))
        return
    if how.get("many"):
        settings["nargs"] = "+"
    if how.get("repeated"):
        settings["action"], default = "append", None
    settings |= {"required": True} if default is MISSING else {"default": default}
    group.add_argument(flag_of(part), dest=part.name, **settings)


def listed(parse: Reader, *, keeps_repeats: bool = False) -> Reader:
    """Read a comma list; a repeated value counts once, unless repeats are kept."""

    def parse_list(value: str | list[object]) -> list[object]:
        parts = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
        if not all(part != "" for part in parts):
            raise ValueError(f"{value!r} has an empty entry; write a,b,c")
        values = [parse(part) for part in parts]
        return values if keeps_repeats else list(dict.fromkeys(values))

    return parse_list


def each(parse: Reader) -> Reader:
    """Reads one entry, or the entries of a file's list."""
    return lambda value: [parse(v) for v in value] if isinstance(value, list) else parse(value)


def checked(parse: Reader) -> Reader:
    """Lets the message of a ValueError be what the user reads."""

    def parse_one(value: object) -> object:
        try:
            return parse(value)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse_one


def load_bounded_yaml(text: str) -> object:
    check_yaml(text)
    return LOAD_YAML(text)


REPLACED = ("--data.sources", "--data.decontaminate")
"""Lists of objects, which the parser would mix with those before where both have one length."""


def parse(
    parser: ArgumentParser,
    words: Sequence[str],
    *,
    flags: bool = True,
    known: Sequence[str] = (),
) -> Namespace:
    """The values of all options; --help prints it and exits.

    Args:
        flags: messages name ``--a-b``, else the key ``a_b`` of a file.
        known: keys beside those of the parser, to name the one that was meant.

    Raises:
        UsageError: one line that names the option, the value and the fix.
    """
    if any(word in ("-h", "--help") for word in words):
        print(parser.format_help())
        sys.exit(0)
    set_loader("yaml", load_bounded_yaml, (yaml.YAMLError,))
    given: list[str] = []
    for word, after in zip_longest(words, words[1:], fillvalue=""):
        name, _, value = word.partition("=")
        lists = _lists_of_file(value or after, parser) if name == "--config" else [name]
        given += [f"{flag}=[]" for flag in REPLACED if flag in lists] + [word]
    try:
        return parser.parse_args(given)
    except (ArgumentError, TypeError, ValueError) as error:
        raise UsageError(explain(error, parser, flags=flags, known=known)) from error


def _lists_of_file(path: str, parser: ArgumentParser) -> list[str]:
    """Flags of the lists that a --config file sets; what is wrong with it the parser says."""
    if not any(flag in action.option_strings for action in parser._actions for flag in REPLACED):
        return []
    try:
        data = read_yaml(Path(path), "--config").get("data")
    except (AttributeError, UsageError):
        return []
    return [f"--data.{key}" for key in data] if isinstance(data, dict) else []


def explain(
    error: Exception, parser: ArgumentParser, *, flags: bool, known: Sequence[str] = ()
) -> str:
    """jsonargparse's message as one line: the field, the value, the fix; as in ``parse``."""
    text = " ".join(str(error).split())
    for pattern in UNKNOWN_KEYS:
        if found := re.search(pattern, text):
            parts = found.groupdict()
            key = ".".join(filter(None, (parts.get("group"), parts["key"])))
            return _unknown(key, parser, flags, known)
    if found := re.search(MISSING_KEY, text):
        if not flags:
            return f"{found['key']}: missing; set it in the --config file or on the command line"
        names = [_shown(name, parser) for name in found["key"].split(", ")]
        return f"{', '.join(names)}: missing; see --help for an example"
    if found := re.fullmatch(WRONG_TYPE, text):
        # A field inside a list has its own key after that of the list.
        key = ".".join(re.findall(r'Parser key "([^"]+)"', text))
        key = _shown(key, parser) if flags else key
        return f"{key}: {found['value']!r} does not fit; expected {_expected(found['reason'])}"
    text = re.sub(r"^--([\w-]+): \1: ", r"--\1: ", text.removeprefix("argument "))
    return f"{text} (see --help)"


def _shown(name: str, parser: ArgumentParser) -> str:
    """Name as the user writes it: the flag, or the metavar of what has none."""
    for action in parser._actions:
        if action.dest == name:
            return action.option_strings[0] if action.option_strings else str(action.metavar)
    return name


def _expected(reason: str) -> str:
    types = re.findall(r"Expected an? (?:<class ')?([\w.]+(?:\[.*?\])?)", reason)
    names = " or ".join(types).replace("typing.", "").replace("NoneType", "null")
    return re.sub(r"Literal\[(.*?)\]", lambda found: f"one of {found[1]}", names)


def _unknown(key: str, parser: ArgumentParser, flags: bool, known: Sequence[str]) -> str:
    """Names the known key that looks most like ``key``, with its path."""
    if flags:
        options = [option for action in parser._actions for option in action.option_strings]
        near = difflib.get_close_matches(key, options, 1)
        hint = f"did you mean {near[0]}? (" if near else "("
        return f"unknown argument {key!r}; {hint}see --help)"
    key = key.removeprefix("--")
    names = [action.dest for action in parser._actions if action.dest not in ("help", "config")]
    names += known
    last = {name.rpartition(".")[2]: name for name in reversed(names)}
    near = difflib.get_close_matches(key, names, 1)
    near = near or [
        last[name] for name in difflib.get_close_matches(key.rpartition(".")[2], last, 1)
    ]
    nearest = f"nearest known key: {near[0]}" if near else "see --help for the known ones"
    return f"{key}: unknown key; {nearest}"


def subcommand(word: str, known: Sequence[str]) -> str:
    """A command's first word, checked against those that there are.

    Raises:
        UsageError: it is none of the known ones; the nearest is named.
    """
    if word not in known:
        near = difflib.get_close_matches(word, known, n=1)
        fix = f"did you mean {near[0]!r}?" if near else f"give {' or '.join(map(repr, known))}"
        raise UsageError(f"command: {word!r} is unknown; {fix} (see --help)")
    return word
