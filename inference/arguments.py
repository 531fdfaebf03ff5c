"""Decoding options shared by several commands: engine, backend, schedule, filters, server."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, Literal, get_args, get_origin, get_type_hints

from jsonargparse import ArgumentParser

from ..chats import read_template_variables
from ..errors import UsageError, flag_name
from ..files import Values
from ..model_names import check_names
from ..options import Group, Options, checked, help_of, listed, option
from .config import read_cost, setting_owners
from .cut import read_boundary
from .ranks import is_launched
from .ranks.launch import run_ranks
from .rules import RULE_NAMES
from .rules.filters import TokenFilters
from .rules.temperature import check_temperature
from .schedules import SCHEDULES, known_schedule
from .shapes import Budget, TreeShape

if TYPE_CHECKING:
    from .ranks.cluster import Cluster

Rule = Literal["auto", *RULE_NAMES]  # type: ignore[valid-type]
FloatDtype = Literal["auto", "float32", "bfloat16", "float16"]
Dtype = Literal[FloatDtype, "int8", "int4"]
MAX_SECONDS = 1_000_000


def read_temperature(text: str) -> float:
    try:
        check_temperature(value := float(text))
    except ValueError as error:
        fix = "give 0 (greedy), or 0.0001 to 1000000"
        raise ValueError(f"{text!r} is not a temperature; {fix}") from error
    return value


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        # 0 is out of range: both faults share one message.
        value = 0.0
    if not 0 < value <= MAX_SECONDS:
        raise ValueError(f"{text!r} is no time; give seconds above 0, at most {MAX_SECONDS}")
    return value


def read_budget(value: object) -> int | str:
    """Return a number as an integer and other text as it is (``make_schedule`` takes only auto)."""
    return int(text) if (text := str(value)).isdecimal() else text


@dataclass(frozen=True, kw_only=True)
class FilterOptions(Options):
    """sampling filters

    The filters apply to target and draft at temperatures above 0, in this order, as in
    transformers.
    """

    IN_SHORT_HELP: ClassVar[bool] = False

    top_k: int = option(0, metavar="K")
    """keep the K most likely tokens; 0: all"""
    top_p: float = option(1.0, metavar="P")
    """keep the most likely tokens until their probabilities add up to P; 1: all"""
    min_p: float = option(0.0, metavar="P")
    """keep tokens with at least P times the largest probability; 0: all"""
    typical_p: float = option(1.0, metavar="P")
    """keep the most typical tokens (surprisal nearest to the entropy) until their probabilities add
    up to P; 1: all"""

    @property
    def filters(self) -> dict[str, float]:
        """Filters with an effect, by name."""
        return TokenFilters(**{f.name: getattr(self, f.name) for f in fields(TokenFilters)}).active


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions(Options):
    """schedule settings"""

    IN_SHORT_HELP: ClassVar[bool] = False

    SETTINGS_ARE_LISTS: ClassVar[bool] = False
    """True if values are comma-separated lists. The command then tries every combination."""

    settings: Values = option(None, hidden=True)
    """Settings present on the command line."""

    @classmethod
    def add_to(cls, parser: ArgumentParser, shows_help: bool, is_short: bool) -> None:
        super().add_to(parser, shows_help, is_short)
        owners = setting_owners()
        group: Group = parser
        if is_short:  # what newcomers set
            owners = {name: owners[name] for name in ("tree", "tree_width")}
        else:
            about = "Each line begins with the schedules that accept the setting."
            group = parser.add_argument_group(ScheduleOptions.__doc__, about)
        for name, schedules in owners.items():
            _add_setting(group, name, schedules, cls.SETTINGS_ARE_LISTS, shows_help)

    @classmethod
    def values(cls, parsed: Values) -> Values:
        given = {name: parsed[name] for name in setting_owners() if parsed[name] is not None}
        return super().values(parsed) | {"settings": given}

    def to_dict(self) -> Values:
        found = super().to_dict()
        return found | found.pop("settings")


def _add_setting(
    group: Group, name: str, owners: Sequence[str], is_list: bool, shows_help: bool
) -> None:
    """Add an option for a schedule setting. Its value is None if the user does not give it."""
    # If one schedule accepts auto, the option does, too; the other schedules refuse it.
    kinds = {get_type_hints(SCHEDULES[owner])[name]: SCHEDULES[owner] for owner in owners}
    hint, kind = (Budget, kinds[Budget]) if Budget in kinds else list(kinds.items())[-1]
    default, text = getattr(kind, name), ""
    if shows_help:
        about = help_of(kind, name).partition(". ")[0].rstrip(".")
        if hint is bool and default:
            about = f"do not {about[0].lower()}{about[1:]}"
        defaults = {getattr(SCHEDULES[owner], name) for owner in owners}
        # The default tree depends on the run; the setting's text says how.
        has_one = len(defaults) == 1 and not isinstance(default, TreeShape)
        if has_one and default is not None and hint is not bool:
            about += f" (default: {default})"
        # argparse formats its help texts with %.
        text = f"{', '.join(owners)}: {about}".replace("%", "%%").replace("None: ", "default: ")
    if hint is bool:
        flag = f"--no-{flag_name(name)[2:]}" if default else flag_name(name)
        # Not store_true: its default False would look like a given value.
        group.add_argument(flag, dest=name, action="store_const", const=not default, help=text)
        return
    types = [kind for kind in (get_args(hint) or (hint,)) if kind is not type(None)]
    # A tree stays text: the parsed shape's label, with all its numbers.
    read_tree = checked(lambda text: TreeShape.parse(str(text)).label)
    parse = read_tree if TreeShape in types else types[0]
    metavar = {int: "N", float: "P", str: "NAME"}.get(types[0], "TREE")
    if hint == Budget:
        parse, metavar = checked(read_budget), "N|auto"
    if get_origin(hint) is Literal:
        parse, metavar = hint, f"{{{','.join(get_args(hint))}}}"
    elif is_list:
        text, parse = f"{text}; or a comma list", checked(listed(parse))
    group.add_argument(flag_name(name), type=parse, metavar=metavar, help=text)


# -- where the stages run ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PlaceOptions(Options):
    """device and dtype"""

    device: str = option("auto", metavar="DEVICE")
    """device for target and draft: cpu, cuda or cuda:N; auto: an accelerator if there is one"""
    dtype: Dtype = "auto"
    """dtype for target and draft; auto: float32 on a CPU, the target's stored dtype on a GPU; on a
    CPU, all but float32 round only the weights, and sums are float32"""


@dataclass(frozen=True, kw_only=True)
class TemplateOptions(Options):
    """chat template"""

    chat_template_kwargs: Values | None = option(
        None, metavar="JSON", parse=read_template_variables
    )
    """variables for the target's chat template, for example {"enable_thinking": false}"""


@dataclass(frozen=True, kw_only=True)
class BackendOptions(PlaceOptions):
    """stages as processes (--backend process)"""

    IN_SHORT_HELP: ClassVar[bool] = False

    ENDS_GENTLY: ClassVar[bool] = False
    """True if a signal lets the ranks finish their work before they exit."""

    backend: Literal["local", "process"] = "local"
    """local: one process and a virtual clock; process: one process (rank) per stage; rank 0 runs
    the draft and the first stage, or only the draft if there is one rank more than stages"""
    processes: int | None = option(None, metavar="N", least=1)
    """ranks to start on this machine; leave it out under torchrun, which starts them itself"""
    boundaries: tuple[int, ...] = option((), metavar="0,B,..,L|auto", parse=read_boundary)
    """first layer of each stage, then the number of layers; auto: choose them by each stage's
    memory and speed in --cost; default: nearly equal stages"""
    links: Literal["auto", "device", "host"] = "auto"
    """how hidden states travel between ranks; device: NCCL between GPUs; host: through host memory;
    auto: device if every rank has its own GPU, else host"""
    rank_host: str | None = option(None, metavar="ADDRESS")
    """address where the other ranks reach this machine; default: its address on the way to rank 0,
    or no network if all ranks are on one machine"""
    rank_port: int = option(0, metavar="PORT", least=0)
    """first port to listen on: three for each of this machine's ranks; default: any free ports"""
    step_timeout: float = option(8.0, metavar="S", parse=seconds)
    """end the run if a stage's forward pass takes more than S seconds; raise S on a busy machine"""


@contextmanager
def backend_of(options: BackendOptions) -> "Iterator[Cluster | None]":
    """Enter the cluster for these options and yield it. Yield None for the local backend.

    Without a launcher, --processes starts the ranks, and this process only waits for them.

    Raises:
        UsageError: the options do not fit the launcher.
    """
    if options.backend == "local":
        if is_launched() and int(os.environ["WORLD_SIZE"]) > 1:
            if os.environ["RANK"] != "0":
                sys.exit(2)  # rank 0 says it
            raise UsageError(
                "--backend: 'local' runs in one process; add --backend process under torchrun"
            )
        if options.processes is not None:
            raise UsageError(
                f"--processes: {options.processes} without --backend process; give both or neither"
            )
        yield None
        return
    if options.processes is not None:
        if not is_launched():
            run_ranks(options.processes, passes_signals=options.ENDS_GENTLY)
        if int(os.environ["WORLD_SIZE"]) != options.processes:
            raise UsageError(
                f"--processes: {options.processes}, but the launcher started "
                f"{os.environ['WORLD_SIZE']}; leave --processes out"
            )
    # Imported here: it imports torch, and --help must stay fast.
    from .ranks.cluster import Cluster

    with Cluster(
        options.step_timeout,
        options.links,
        on_cpu=options.device == "cpu",
        host=options.rank_host,
        port=options.rank_port,
    ) as cluster:
        yield cluster


def check_draft_dtype(dtype: str, weights: object) -> None:
    """Raise UsageError for a draft dtype without a draft that has weights."""
    if dtype != "auto" and not weights:
        raise UsageError(
            f"--draft-dtype: {dtype}, but no draft has weights; give --checkpoint or "
            "--draft-model, or leave it out"
        )


def check_paths(
    checkpoints: Sequence[str | None], target: str | None, draft_model: str | None
) -> None:
    """Refuse misspelled folders before torch is imported, but not in every rank of a launcher.

    Raises:
        ValueError: a path does not exist.
    """
    if not is_launched():
        check_names({"target": target, "draft_model": draft_model}, checkpoints)


SHARED_SETTINGS = ("verifier", "payload_tokens", "tail_samples", "bitwise", "never_slower")


@dataclass(frozen=True, kw_only=True)
class EngineOptions(TemplateOptions, BackendOptions, ScheduleOptions):
    """target, draft and schedule"""

    AT_MOST_ONE: ClassVar[Sequence[Sequence[str]]] = (("checkpoint", "draft_model", "draft"),)

    checkpoint: str | None = None
    """a trained draft's folder or Hub id"""
    draft_model: str | None = None
    """use this language model (folder or Hub id, with the target's tokenizer) as the draft; with
    several stages the default schedule is then pipeinfer; needs --target"""
    draft: Literal["ngram", "suffix"] | None = None
    """draft by n-gram or suffix lookup in the text so far (no neural network); needs --target"""
    target: str | None = None
    """target's folder or Hub id; default: the target that the draft was trained for"""
    schedule: str | None = option(None, parse=known_schedule, known=tuple(SCHEDULES))
    """decoding schedule, with specpipe for pipedec; default: the one that the draft was designed
    for"""
    stages: int | None = None
    """number of pipeline stages; default: the number that the draft was trained for, else 1"""
    verifier: Rule = "auto"
    """acceptance rule at temperatures above 0"""
    payload_tokens: int = option(10, metavar="K")
    """number of the target's most likely tokens that topk and tail_escape send with a rejection"""
    tail_samples: int = option(4, metavar="M")
    """number of sampled tokens that tail_escape sends with a rejection"""
    bitwise: bool = False
    """compute each token in the target bit for bit as autoregressive decoding would, so that
    outputs are equal in bfloat16, too; slower"""
    never_slower: bool = False
    """time rounds with and without the draft, and shrink or pause a draft that is slower"""
    draft_dtype: Dtype = "auto"
    """dtype for the draft; auto: as --dtype; on a CPU, int8 drafts faster, and greedy output stays
    the same"""
    cost: str | None = option(None, metavar="PRESET|FILE")
    """cost model that chooses automatic draft-token budgets: h100, a100, rtx4090, jetson_orin,
    this_cpu, or a file written by eval --calibrate; default: extra tokens per pass, links and
    verification take no time"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_draft_dtype(self.draft_dtype, self.checkpoint or self.draft_model)

    def engine_settings(self) -> Values:
        """Return the schedule's settings and the shared ones not set per prompt."""
        shared = {name: getattr(self, name) for name in SHARED_SETTINGS}
        cost = {} if self.cost is None else {"cost": read_cost(self.cost)}
        return shared | cost | self.settings
