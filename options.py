"""Read a command's options: a dataclass with fields as flags, parsed by jsonargparse.

    @dataclass(frozen=True, kw_only=True)
    class Push(Options):
        '''upload a checkpoint to the Hub'''

        checkpoint: str
        '''checkpoint folder, or a run's folder'''
        dry_run: bool = False
        '''only write the folder'''

``Push.read(["--checkpoint", "out/spd", "--dry-run"])`` returns a ``Push``. A field without default
is required. A bool is a switch. A tuple takes a comma list, or with ``repeated`` the flag several
times. ``--config FILE`` reads options from YAML. In the help, the fields of each base class form a
group.
"""

import argparse
import difflib
import inspect
import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from itertools import zip_longest
from pathlib import Path
from pkgutil import resolve_name
from types import NoneType
from typing import Any, ClassVar, Literal, Self, TypeVar, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace, get_loader, set_loader

from .endings import show_help
from .errors import UsageError, did_you_mean, flag_name, nearest
from .files import Values, check_yaml

Reader = Callable[[Any], Any]
"""Parses a word, or a value from a file."""
OptionField = Field[Any]
Part = TypeVar("Part", bound="Options")
Group = Any
"""A parser or one of its groups: jsonargparse gives them no common type."""
HELP_FLAGS = ("-h", "--help", "--help-all")
LOAD_YAML = get_loader("yaml")
METAVARS: dict[object, str] = {int: "N", float: "X", Path: "FILE"}


def option(default: Any = MISSING, **how: Any) -> Any:
    """Declare an option field that needs more than a type and a docstring.

    Args:
        how: metavar; parse: text -> value (of each entry); known: possible names, for the help;
            least: smallest value; split: comma list -> entries; repeated: one entry each time the
            flag is given; many: all words after it; positional: no flag; flag: a name other than
            the field's; hidden: no argument.
    """
    if default is MISSING:
        return field(metadata=how)
    return field(default=default, metadata=how)


class WideHelp(argparse.RawDescriptionHelpFormatter):
    """Help in 100 columns, for fewer lines than in argparse's 80."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=100)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base class of a command's options."""

    PROG: ClassVar[str] = ""
    DESCRIPTION: ClassVar[str] = ""
    """Description in the help; default: the class's docstring."""
    EXAMPLE: ClassVar[str] = ""
    ONE_OF: ClassVar[Sequence[Sequence[str]]] = ()
    """Groups of fields; exactly one field in each group must be given."""
    AT_MOST_ONE: ClassVar[Sequence[Sequence[str]]] = ()
    IN_SHORT_HELP: ClassVar[bool] = True
    """True: --help lists this class's own options; --help-all always does."""
    RARE: ClassVar[Sequence[str]] = ()
    """Further fields that only --help-all lists."""

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
            flags = [flag_name(name) for name in (given or self._usual(group))]
            if not given and group in self.ONE_OF:
                raise UsageError(f"{' or '.join(flags)}: missing; see --help for an example")
            if len(given) > 1:
                raise UsageError(f"{flags[1]}: not allowed with {flags[0]}; leave one out")

    def _usual(self, names: Sequence[str]) -> Sequence[str]:
        """Leave out rare options, if no other option of their class is given."""
        parts = {part.name: part for part in fields(self)}
        used = {owner_of(type(self), x) for x in parts.values() if vars(self)[x.name] != x.default}
        owners = {name: owner_of(type(self), parts[name]) for name in names}
        is_usual = {x: vars(owners[x]).get("IN_SHORT_HELP", True) for x in names}
        return [x for x in names if is_usual[x] or owners[x] in used]

    @classmethod
    def parser(cls, *, shows_help: bool = True, is_short: bool = False) -> ArgumentParser:
        """Return the parser for this class's flags, --help and --config.

        Args:
            shows_help: fill in the help texts from the fields' docstrings. This is slow.
            is_short: leave out options unless their class is ``IN_SHORT_HELP``.
        """
        epilog = cls.EXAMPLE
        is_whole = all(vars(owner).get("IN_SHORT_HELP", True) for owner in cls.__mro__)
        if is_short and not (is_whole and not cls.RARE):
            more = "--help-all also lists options of single schedules, limits and filters"
            epilog = f"{more}\n\n{epilog}"
        parser = ArgumentParser(
            prog=cls.PROG,
            usage=f"{cls.PROG} [options]" if is_short else None,
            description=cls.DESCRIPTION or cls.__doc__,
            epilog=epilog,
            exit_on_error=False,
            allow_abbrev=False,
            formatter_class=WideHelp if is_short else argparse.RawDescriptionHelpFormatter,
        )
        if is_short:
            cls.add_to(parser, shows_help, is_short)
        parser.add_argument("--config", action="config", help="YAML file of options")
        if not is_short:
            cls.add_to(parser, shows_help, is_short)
        tidy(parser, is_short=is_short)
        return parser

    @classmethod
    def add_to(cls, parser: ArgumentParser, shows_help: bool, is_short: bool) -> None:
        groups: dict[type, Group] = {cls: parser}
        parts = typed_fields(cls)
        if is_short:  # the command's own options first, then those of the classes below it
            parts = sorted(parts, key=lambda part: cls.__mro__.index(owner_of(cls, part[0])))
        for part, hint in parts:
            owner = owner_of(cls, part)
            is_rare = part.name in cls.RARE or not vars(owner).get("IN_SHORT_HELP", True)
            if (is_short and is_rare) or part.metadata.get("hidden"):
                continue
            if owner not in groups and not is_short:
                title, _, about = inspect.cleandoc(owner.__doc__ or "").partition("\n\n")
                groups[owner] = parser.add_argument_group(title, about)
            text = help_of(cls, part.name) if shows_help else ""
            _add(groups.get(owner, parser), part, hint, text)

    @classmethod
    def read(cls, words: Sequence[str]) -> Self:
        """Parse the words of a command line. The word --help prints the help and exits.

        Raises:
            UsageError: one line with the option, the value and the fix.
        """
        wants_help = any(word in HELP_FLAGS for word in words)
        is_short = wants_help and "--help-all" not in words
        parser = cls.parser(shows_help=wants_help, is_short=is_short)
        return cls(**cls.values(vars(parse(parser, words))))

    @classmethod
    def of(cls, given: Values) -> Self:
        """Check values by field name, as ``read`` checks words. None stands for the default.

        Raises:
            UsageError: one line with the option, the value and the fix.
        """
        values = {name: value for name, value in given.items() if value is not None}
        for part in fields(cls):
            value = values.get(part.name)
            if isinstance(value, tuple) or (value is not None and part.metadata.get("repeated")):
                values[part.name] = list(value) if isinstance(value, list | tuple) else [value]
        return cls(**cls.values(vars(parse_values(cls.parser(shows_help=False), values))))

    @classmethod
    def read_own(cls, words: Sequence[str]) -> tuple[Self, list[str]]:
        """Parse the words for this class's options. Return the options and all other words."""
        takes = {flag_of(part): hint is not bool for part, hint in typed_fields(cls)}
        own: list[str] = []
        rest: list[str] = []
        at = 0
        while at < len(words):
            flag, has_value, _ = as_declared(words[at], takes).partition("=")
            size = 1 + (takes.get(flag, False) and not has_value)
            (own if flag in takes or flag in HELP_FLAGS else rest).extend(words[at : at + size])
            at += size
        return cls.read(own), rest

    @classmethod
    def values(cls, parsed: Values) -> Values:
        """Convert parsed values into arguments for the class."""
        return {
            part.name: tuple(value) if isinstance(value, list) else value
            for part in fields(cls)
            for value in [parsed.get(part.name)]
            if part.name in parsed and not (value is None and part.metadata.get("repeated"))
        }

    def part(self, kind: type[Part]) -> Part:
        """Return the fields of one base class alone, for a callee that uses no others."""
        return kind(**{part.name: getattr(self, part.name) for part in fields(kind)})

    def to_dict(self) -> Values:
        return {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(self).items()
        }


def own_annotations(kind: type) -> Mapping[str, object]:
    return vars(kind).get("__annotations__", {})


def typed_fields(kind: type) -> list[tuple[OptionField, Any]]:
    hints = get_type_hints(kind)
    return [(part, hints[part.name]) for part in fields(kind)]


def owner_of(kind: type, part: OptionField) -> type:
    """Return the first class that has the field."""
    return next(c for c in reversed(kind.__mro__) if part.name in own_annotations(c))


def tidy(parser: ArgumentParser, *, is_short: bool = False) -> None:
    """Show plain names for values in the help, and leave out jsonargparse's own options."""
    for action in parser._actions:
        if action.dest.endswith(".help") or (is_short and action.dest == "print_config"):
            action.help = argparse.SUPPRESS
        if "." in action.dest and action.metavar is None and action.nargs != 0:
            action.metavar = action.dest.rpartition(".")[2].upper()
        if action.dest == "data" and action.metavar == "CONFIG":
            action.metavar = "FILE"
            action.help = "files, folders or Hub ids with commas; or the section's YAML file"
        action.help = (action.help or "").replace("``", "") or None


def flag_of(part: OptionField) -> str:
    if part.metadata.get("positional"):
        return part.name
    return str(part.metadata.get("flag", flag_name(part.name)))


def help_of(kind: type, name: str) -> str:
    """Return the docstring below a field."""
    for owner in kind.__mro__[:-1]:
        if name in own_annotations(owner) and (text := _docstrings(owner).get(name)):
            return text
    raise AssertionError(f"{kind.__name__}.{name} has no docstring")


@cache
def _docstrings(kind: type) -> dict[str, str]:
    """Return the docstring below each of a class's own fields."""
    from docstring_parser import parse_from_object  # reads the source

    entries = parse_from_object(kind).params
    return {entry.arg_name: " ".join((entry.description or "").split()) for entry in entries}


def _add(group: Group, part: OptionField, hint: Any, text: str) -> None:
    """Add one argument to a group. The module's docstring explains the types."""
    how = part.metadata
    default = part.default
    is_shown = default is not MISSING and default not in (None, (), "")
    if text and is_shown and not isinstance(default, bool):
        shown = default if isinstance(default, tuple) else (default,)
        text += f" (default: {','.join(map(str, shown))})"
    if text and "known" in how:
        text += f"; one of {', '.join(how['known'])}"
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
        settings["type"] = checked(
            listed(one, how.get("split", split_commas)) if is_comma_list else each(one)
        )
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


def split_commas(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def listed(parse: Reader, split: Callable[[str], list[str]] = split_commas) -> Reader:
    """Return a function that parses a comma list with ``parse`` and refuses repeated values."""

    def parse_list(value: object) -> list[object]:
        parts: Sequence[object] = value if isinstance(value, list | tuple) else [value]
        if isinstance(value, str):
            parts = split(value)
        if not all(part != "" for part in parts):
            raise ValueError(f"{value!r} has an empty entry; write a,b,c")
        parsed = [parse(part) for part in parts]
        for one in parsed:
            if parsed.count(one) > 1:
                raise ValueError(f"{value!r} names {one} twice; leave one out")
        return parsed

    return parse_list


def each(parse: Reader) -> Reader:
    """Return a function that parses one entry, or each entry of a list in a --config file."""
    return lambda value: [parse(v) for v in value] if isinstance(value, list) else parse(value)


class Refusal(argparse.ArgumentTypeError, ValueError):
    """Error whose message the parser shows, for words by the one class, for values by the other."""


def checked(parse: Reader) -> Reader:
    """Return ``parse`` with ValueErrors as ``Refusal``, so that the user sees the messages."""

    def parse_one(value: object) -> object:
        try:
            return parse(value)
        except ValueError as error:
            raise Refusal(str(error)) from error

    return parse_one


def load_bounded_yaml(text: str) -> object:
    check_yaml(text)
    return LOAD_YAML(text)


REFUSALS = (ArgumentError, TypeError, ValueError, RecursionError)
"""What jsonargparse raises for bad input."""
REPLACED = ("--data.sources", "--data.decontaminate")
"""Lists of objects: a later one replaces an earlier one, which the parser would merge instead."""
SYNONYMS = {"--out": "--output_dir"}
"""Flag -> the flag for it in a parser that has no such flag."""
KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}
"""Type -> what a refused value is not."""
ELSEWHERE = {
    **dict.fromkeys(("learning_rate", "learning-rate"), "optim.lr"),
    **dict.fromkeys(("batch_size", "batch-size", "per_device_train_batch_size"), "batch_tokens"),
    **dict.fromkeys(("num_epochs", "num-epochs", "num_train_epochs"), "epochs"),
    **dict.fromkeys(("max_length", "max-length", "max_seq_length"), "data.max_length"),
    **dict.fromkeys(("model", "model_name_or_path", "target_model_path"), "target"),
    **dict.fromkeys(("dataset", "train_data_path", "train-data-path"), "data"),
    "report_to": "trackers",
}
"""Names in other packages -> ours, for hints."""


def as_declared(word: str, flags: Collection[str]) -> str:
    """Return a word with its flag as in ``flags``, if only hyphens and underscores differ."""
    name, equals, value = word.partition("=")
    if name.startswith("--") and name not in flags:
        own = name[2:]
        spellings = (f"--{own.replace('-', '_')}", flag_name(own), SYNONYMS.get(name, ""))
        name = next((flag for flag in spellings if flag in flags), name)
    return name + equals + value


def sources_of(text: str, flag: str) -> str | None:
    """Return the list for a bare file, folder or Hub id, or a comma list of them.

    None if the text is a list already.
    """
    if text.lstrip()[:1] in ("", "[", "{"):
        return None
    paths = [text] if Path(text).exists() else [path.strip() for path in text.split(",")]
    return json.dumps([{"path": x} for x in paths] if flag == "--data.sources" else paths)


def with_sources(words: Sequence[str], flags: Collection[str]) -> list[str]:
    """Return the words with bare files for --data and for ``REPLACED`` written as lists of sources.

    A YAML file for --data stays what it is, the settings of the section.
    """
    given = list(words)
    for at, word in enumerate(given):
        name, equals, value = word.partition("=")
        if name not in ("--data", *REPLACED) or "--data.sources" not in flags:
            continue
        value = value if equals else "".join(given[at + 1 : at + 2])
        is_section = name == "--data" and Path(value).suffix in (".yaml", ".yml")
        name = "--data.sources" if name == "--data" else name
        if not is_section and (sources := sources_of(value, name)) is not None:
            end = at + 1 + (not equals)
            # One word, so that a list keeps its place in the command line.
            given[at:end] = [f"{name}={sources}"] + [""] * (end - at - 1)
    return [word for word, old in zip_longest(given, words) if word or word == old]


def parse(parser: ArgumentParser, words: Sequence[str]) -> Namespace:
    """Parse the words into all option values. The word --help prints the help and exits.

    Raises:
        UsageError: one line with the option, the value and the fix.
    """
    if any(word in HELP_FLAGS for word in words):
        show_help(parser.format_help())
    set_loader("yaml", load_bounded_yaml, (yaml.YAMLError,))
    flags = flags_of(parser)
    words = with_sources([as_declared(word, flags) for word in words], flags)
    given: list[str] = []
    for word, after in zip_longest(words, words[1:], fillvalue=""):
        name, _, value = word.partition("=")
        lists = _lists_of_file(value or after, parser) if name == "--config" else [name]
        given += [f"{flag}=[]" for flag in REPLACED if flag in lists] + [word]
    try:
        return parser.parse_args(given)
    except REFUSALS as error:
        check_flags(words, parser)  # a missing option may be the one misspelled
        raise UsageError(explain(error, parser)) from error


def flags_of(parser: ArgumentParser) -> list[str]:
    every = (flag for action in parser._actions for flag in action.option_strings)
    return [flag for flag in every if flag.startswith("--")]


def check_flags(words: Sequence[str], parser: ArgumentParser, beside: Sequence[str] = ()) -> None:
    """Raise UsageError for the first flag neither in the parser nor in ``beside``."""
    flags = [*flags_of(parser), *beside]
    for word in words:
        name = as_declared(word, flags).partition("=")[0].rstrip("+")
        # A dictionary's keys are flags, too, which no list contains.
        is_key = any(name.startswith(f"{flag}.") for flag in flags)
        if re.fullmatch(r"--[a-zA-Z][\w.-]*", name) and name not in flags and not is_key:
            raise UsageError(_unknown(name, parser, beside))


def parse_values(parser: ArgumentParser, values: Values) -> Namespace:
    """Check nested values by key, as ``parse`` checks words, and fill in the defaults.

    Raises:
        UsageError: one line with the option, the value and the fix.
    """
    for name in [action.dest for action in parser._actions if action.nargs == 0]:
        if not isinstance(value := values.get(name, False), bool):
            raise UsageError(f"{flag_name(name)}: {value!r}; give True or False")
    try:
        return parser.parse_object(values)
    except REFUSALS as error:
        raise UsageError(explain(error, parser)) from error


def _lists_of_file(path: str, parser: ArgumentParser) -> list[str]:
    """Return a ``--data.KEY`` flag for each key in the ``data`` section of a --config file.

    An unreadable file gives no flags, because the parser reports its errors later.
    """
    if not any(flag in action.option_strings for action in parser._actions for flag in REPLACED):
        return []
    try:
        text = Path(path).read_text()
        check_yaml(text)
        data = yaml.safe_load(text).get("data")
    except (AttributeError, OSError, ValueError, TypeError, RecursionError, yaml.YAMLError):
        return []
    return [f"--data.{key}" for key in data] if isinstance(data, dict) else []


def explain(error: Exception, parser: ArgumentParser) -> str:
    """Return jsonargparse's message as one line, beginning with the option as typed."""
    lines = [line.strip() for line in str(error).splitlines()] or [type(error).__name__]
    start, _, rest = lines[0].partition(": ")
    if start == "unrecognized arguments":
        return _unknown(rest.split()[0].partition("=")[0], parser)
    if start == "the following arguments are required":
        names = ", ".join(_shown(name, parser) for name in rest.split(", "))
        return f"{names}: missing; see --help for an example"
    if start.startswith("Group '"):
        _, group, _, key, _ = lines[0].split("'")
        return _unknown(f"{group}.{key}", parser)
    if start.startswith("Option '"):
        return _unknown(start.split("'")[1], parser)
    key = ""
    if start.startswith('Parser key "'):
        key = _shown(start.split('"')[1], parser) + ": "
        lines[0] = rest
    if lines[-1].startswith("Given value: "):  # the value fits none of several types
        lines = [" or ".join(x[2:] for x in lines if x.startswith("- ")) + ".", lines[-1]]
    text = " ".join(lines).strip().removeprefix("argument ")
    if found := re.search(r"class_path '([\w.]+)': Option '(\w+)' is not accepted", text):
        known = [part.name for part in fields(resolve_name(found[1]))]
        return f"{key}{found[2]!r} is unknown; {nearest(found[2], known, 0.5)} (see --help)"
    for name in ("<class '", "'>", "typing."):
        text = text.replace(name, "")
    if found := re.match(
        r"--(model|optim|evaluation|data): Unable to load config '(.*?)'", key + text
    ):
        section, value = found.groups()
        target = ", or the target as --target NAME" * (section == "model")
        return (
            f"--{section}: {value!r} is no YAML file with this section's keys; give one, or "
            f"--{section}.KEY VALUE{target} (see --help)"
        )
    if found := re.fullmatch(r"--config: File does not exist: '(.*)'", text):
        name = found[1].removeprefix(f"{Path.cwd()}/")
        return f"--config: no file {name}{did_you_mean(name)}; give a YAML file"
    text = re.sub(r"^(--([\w.-]+): )\2: ", r"\1", text)  # a value's reader may name it, too
    if found := re.fullmatch(r"(.*)Expected a Literal\[(.*)\]\. Got value: (.*)", text):
        known = re.findall(r"'([^']*)'", found[2])
        return f"{key}{found[1]}{found[3]!r} is unknown; {nearest(found[3], known)} (see --help)"
    number = r"(.*)Expected a (int|float|bool)( or Expected a NoneType)?\. (Got|Given) value: (.*)"
    if found := re.fullmatch(number, text):
        return f"{key}{found[1]}{found[5]!r} is not {KINDS[found[2]]} (see --help)"
    return f"{key}{text} (see --help)"


def _shown(name: str, parser: ArgumentParser) -> str:
    """Return an option's flag, or its metavar if the option has no flag."""
    for action in parser._actions:
        if action.dest == name:
            return action.option_strings[0] if action.option_strings else str(action.metavar)
    return name


def _unknown(key: str, parser: ArgumentParser, beside: Sequence[str] = ()) -> str:
    """Return an error about the unknown ``key``, with a hint at the nearest flag or file key."""
    start = "--" if key.startswith("--") else ""
    flags = [flag[2:] for flag in (*flags_of(parser), *beside)]
    names = [*flags, *(flag.rpartition(".")[2] for flag in flags)]  # the last part alone, too
    own = key[len(start) :]
    near = [ELSEWHERE[own]] if ELSEWHERE.get(own) in flags else []
    near = near or difflib.get_close_matches(own, names, 1)
    near = near or difflib.get_close_matches(key.rpartition(".")[2], names, 1)
    whole = next((flag for flag in flags if near and f".{flag}".endswith(f".{near[0]}")), None)
    if whole is None:
        return f"{key}: unknown; see --help"
    return f"{key}: unknown; did you mean {start}{whole}? (see --help)"


def subcommand(word: str, known: Sequence[str]) -> str:
    """Check a command's first word against the known subcommands.

    Raises:
        UsageError: the word is unknown. The message suggests the nearest one.
    """
    if word not in known:
        raise UsageError(f"command: {word!r} is unknown; {nearest(word, known)} (see --help)")
    return word
