"""How a prompt is decoded, described once: in commands, YAML, traces, manifests and tables.

Its cost models have names, from data sheets and from a measurement, or are in files.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_type_hints

import msgspec

from pipedraft.cli import UsageError, check_ranges
from pipedraft.files import Values, read_text
from pipedraft.inference.clock import CostModel, StageCost
from pipedraft.inference.rules.filters import TokenFilters, sampling_label
from pipedraft.inference.schedules import SCHEDULES
from pipedraft.inference.schedules.base import Schedule, check_at_least
from pipedraft.inference.schedules.spd import SPDSchedule
from pipedraft.inference.shapes import Budget, TreeShape

MIN_TEMPERATURE = 1e-4
"""Logits divided by less than this may overflow."""
MAX_TEMPERATURE = 1e6
SEEDS = f"[{-(2**63)}, {2**63})"
"""int64, as OpenAI's clients draw them."""
MAX_SETTING = "[-1024, 1024]"
"""Of a schedule's numbers: no draft has more rows, and larger ones would never end."""
RuleName = Literal[
    "match",
    "gumbel",
    "rejection",
    "tail_escape",
    "topk",
    "argmax",
    "block",
    "recursive",
    "traversal",
]
"""Acceptance rules; ``rules/`` has them."""
RULE_NAMES: list[RuleName] = list(get_args(RuleName))
SAMPLING_RULES = ("rejection", "tail_escape", "topk")
"""Their draft tokens are drawn from the draft's distribution."""

ROUND_RULES = ("block", "recursive", "traversal")
"""Their tests look at a round as a whole: no streams, no links."""

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(TokenFilters):
    """A schedule with its settings, and what every schedule has."""

    schedule: Schedule = field(default_factory=SPDSchedule)
    num_stages: int = 4
    boundaries: tuple[int, ...] = ()
    """Where the target is cut, (0, b1, .., L); empty: near-even, or as the draft was trained."""
    temperature: float = 0.0
    """0 is greedy."""
    verifier: Literal["auto"] | RuleName = "auto"
    """Acceptance rule above temperature 0; block, recursive and traversal are for whole rounds.
    auto: the schedule's own across a link, elsewhere rejection for sampled chains (one draft token
    at a time), else gumbel."""
    payload_tokens: int = 10
    """The target's most likely tokens that a rejection shows the draft, by topk and tail_escape."""
    tail_samples: int = 4
    """Tokens drawn from the others that a rejection shows the draft, by tail_escape."""
    seed: int = 0
    max_new_tokens: int = 128
    """New tokens at most, the one drawn from the prefill included."""
    bitwise: bool = False
    """Compute each row of the target as plain decoding would, to the last bit."""
    never_slower: bool = False
    """Time the rounds with and without the draft while decoding, and shrink or pause it where it
    loses. Which tokens are drafted then depends on the machine; the law of the output does not."""
    cost: CostModel = field(default_factory=CostModel)

    def __post_init__(self) -> None:
        if isinstance(self.schedule, str):  # its name, with the default settings
            object.__setattr__(self, "schedule", make_schedule(self.schedule, {}))
        check_temperature(self.temperature)
        super().__post_init__()
        self.check_at(self.temperature)
        check_at_least(self, 1, "num_stages", "max_new_tokens", "payload_tokens", "tail_samples")
        most = dict.fromkeys(("num_stages", "payload_tokens", "tail_samples"), "[1, 4096]")
        check_ranges(self, most | {"max_new_tokens": "[1, 1e9]", "seed": SEEDS})
        numbers = (part.name for part in fields(self.schedule) if part.name != "tree")
        sizes = [n for n in numbers if isinstance(getattr(self.schedule, n), int | float)]
        check_ranges(self.schedule, dict.fromkeys(sizes, MAX_SETTING))
        if self.boundaries and len(self.boundaries) != self.num_stages + 1:
            raise ValueError(
                f"boundaries: {list(self.boundaries)} do not make {self.num_stages} stages; give "
                f"{self.num_stages + 1} ascending layer numbers, 0 first"
            )
        if self.cost.stages and len(self.cost.stages) != self.num_stages:
            raise ValueError(
                f"cost.stages: {len(self.cost.stages)} devices for {self.num_stages} stages; give "
                "a cost model (--cost) with one for each stage"
            )
        samples = self.verifier in SAMPLING_RULES
        if samples and not (self.temperature and self.schedule.can_sample):
            raise ValueError(
                f"verifier: {self.verifier!r} needs a sampled chain (temperature above 0 and tree "
                "width 1, or a chain as the tree's kind); use 'match', which is exact for every "
                "tree"
            )

        if self.never_slower and self.schedule.needs_link:
            raise ValueError(
                f"never_slower: True with schedule {self.schedule.name!r}, whose client compares "
                "itself with the target alone; leave it out"
            )
        self._check_round_rule()

    def _check_round_rule(self) -> None:
        whole = bool(self.temperature) and self.schedule.verifies_whole
        if self.verifier == "block" and not (whole and self.schedule.is_chain):
            raise ValueError(
                "verifier: 'block' tests whole chains; give a temperature above 0 and "
                "--schedule eagle or naive_pp with --tree chain:7, or use 'rejection'"
            )
        tree = getattr(self.schedule, "tree", None)
        is_fixed = isinstance(tree, TreeShape) and not (tree.is_chain or tree.is_auto)
        if self.verifier in ("recursive", "traversal") and not (whole and is_fixed):
            raise ValueError(
                f"verifier: {self.verifier!r} tests whole trees of a fixed number of draft tokens; "
                "give a temperature above 0 and --schedule eagle or naive_pp with --tree static or "
                "dynamic:7:10:59, or use 'gumbel'"
            )

    @property
    def sampling(self) -> str:
        """Label of temperature and filters."""
        return sampling_label(self.temperature, self.active)

    @property
    def rule(self) -> RuleName:
        """The acceptance rule that decides."""
        # Greedy decoding allows one token: ``match`` compares with it, whatever the rule.
        if self.temperature == 0:
            return "match"
        return self.schedule.auto_rule if self.verifier == "auto" else self.verifier

    @classmethod
    def of(cls, schedule: str | Schedule = SPDSchedule.name, **settings: Any) -> DecodeConfig:
        """Configuration of flat settings: the schedule's, and those that every schedule has.

        Raises:
            ValueError: unknown schedule, a setting that it does not have, a value out of range.
        """
        shared = {f.name for f in fields(cls)}
        own = {name: value for name, value in settings.items() if name not in shared}
        common = {name: value for name, value in settings.items() if name in shared}
        if isinstance(schedule, str):
            schedule = make_schedule(schedule, own)
        elif own:
            schedule = replace(schedule, **own)
        return cls(schedule=schedule, **common)

    def to_dict(self) -> Values:
        """JSON and YAML: a mapping of plain values, read back by ``from_dict``."""
        plain = dataclasses.asdict(self)
        plain["schedule"] = {"name": self.schedule.name} | plain["schedule"]
        # JSON and YAML have no tuples.
        return plain | {"boundaries": list(self.boundaries)}

    @classmethod
    def from_dict(cls, values: Values) -> DecodeConfig:
        """Read a configuration from YAML's or JSON's values.

        Raises:
            ValueError: an unknown or missing field, or a value of the wrong type or range.
        """
        check_names(values, [f.name for f in fields(cls)], "decode")
        rest = dict(values)
        settings = rest.pop("schedule", {"name": SPDSchedule.name})
        if isinstance(settings, str):
            settings = {"name": settings}
        if not isinstance(settings, Mapping) or not isinstance(settings.get("name"), str):
            raise ValueError(f"schedule: {settings!r} names none; give name: spd, for example")
        settings = dict(settings)
        schedule = make_schedule(settings.pop("name"), settings)
        hints = get_type_hints(cls)
        shared = {name: convert(value, hints[name], name) for name, value in rest.items()}
        return cls(schedule=schedule, **shared)


def check_temperature(value: float) -> None:
    """Refuse a temperature that nothing can be sampled at.

    Raises:
        ValueError: neither 0 nor a temperature that logits can be divided by.
    """
    if value != 0 and not MIN_TEMPERATURE <= value <= MAX_TEMPERATURE:
        raise ValueError(
            f"temperature: {value} is out of range; give 0 (greedy) or {MIN_TEMPERATURE:g} to "
            f"{MAX_TEMPERATURE:g}"
        )


def check_prompt(prompt_ids: Sequence[int], max_positions: int) -> None:
    """Refuse a prompt that cannot be decoded.

    Raises:
        ValueError: the prompt is empty or does not fit the target's positions.
    """
    if not prompt_ids:
        raise ValueError("prompt: empty; give at least one token of text")
    if len(prompt_ids) >= max_positions:
        raise ValueError(
            f"prompt: {len(prompt_ids)} tokens leave no room in the target's {max_positions} "
            "positions; shorten it"
        )


def make_schedule(name: str, settings: Values) -> Schedule:
    """A schedule by its name; a tree may be given as ``TreeShape.parse`` reads it.

    Raises:
        ValueError: unknown name, a setting that the schedule does not have, a value out of range.
    """
    check_names([name], list(SCHEDULES), "schedule")
    kind, owners = SCHEDULES[name], setting_owners()
    for setting in settings:
        if name not in owners.get(setting, []):
            if setting not in owners:
                known = [*owners, *(part.name for part in fields(DecodeConfig))]
                near = difflib.get_close_matches(setting, known, 1)
                fix = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
                raise ValueError(f"{setting}: no schedule has such a setting; {fix}")
            raise ValueError(
                f"{setting}: schedule {name!r} has no such setting (it belongs to "
                f"{', '.join(owners[setting])}); leave it out or choose another schedule"
            )
    values = dict(settings)
    for setting, hint in get_type_hints(kind).items():
        value = values.get(setting)
        if hint == Budget and isinstance(value, str) and value != "auto":
            raise ValueError(
                f"{setting}: {value!r} is no number of draft tokens; give 1 or more, or auto"
            )
        if hint is int and isinstance(value, str):
            raise ValueError(f"{setting}: {value!r} with schedule {name!r}; give a number")
    if isinstance(values.get("tree"), str):
        values["tree"] = TreeShape.parse(values["tree"])
    return convert(values, kind, name)


def setting_owners() -> dict[str, list[str]]:
    """Setting -> the schedules that have it."""
    owners: dict[str, list[str]] = {}
    for schedule, kind in SCHEDULES.items():
        for setting in fields(kind):
            owners.setdefault(setting.name, []).append(schedule)
    return owners


def check_names(values: Iterable[str], known: list[str], where: str) -> None:
    """Refuse fields that are not known.

    Raises:
        ValueError: a name that is not known, with the nearest one that is.
    """
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"{where}: {name!r} is unknown; {hint}known: {', '.join(known)}")


def convert(values: object, kind: type[Value], where: str) -> Value:
    """A dataclass, or another type, from plain values; strict in types.

    Raises:
        ValueError: one line that names the field.
    """
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        # msgspec writes the field last; a user looks for it first.
        text, _, place = str(error).partition(" - at `$.")
        field_name = place.removesuffix("`") or where
        raise ValueError(f"{field_name}: {text[:1].lower()}{text[1:]}") from error


# Llama-2-7B in 16 bits (config.json of meta-llama/Llama-2-7b-hf): H = 4096, 32 layers of four H x H
# projections and three of H x 11008, and a vocabulary of 32,000.
HIDDEN, VOCABULARY = 4096, 32_000
LAYER_WEIGHTS = 32 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * 11_008)
HEAD_WEIGHTS = VOCABULARY * HIDDEN


def data_sheet(flops: float, bytes_per_s: float, link_bytes_per_s: float) -> CostModel:
    """Costs of Llama-2-7B in 16 bits, one device a stage, if every device reaches its data sheet.

    A pass over one row reads every weight once. A further row computes two operations a weight, as
    if beside no reading, so a row costs ``bytes_per_s / flops`` of a pass; it sends H values over a
    hop, and reads its logits (float32) once more to choose a token. A hop's latency is not on data
    sheets and is 0 here: measure it (``--calibrate``), or give ``eval replay --link``.

    Args:
        flops: dense, 16-bit products summed in float32.
        link_bytes_per_s: in one direction.
    """
    row = bytes_per_s / flops
    target_pass_s = 2 * LAYER_WEIGHTS / bytes_per_s
    head = HEAD_WEIGHTS / LAYER_WEIGHTS
    return CostModel(
        row=row,
        link_row=2 * HIDDEN / link_bytes_per_s / target_pass_s,
        verify=head,
        head_row=head * row,
        verify_row=4 * VOCABULARY / bytes_per_s / target_pass_s,
    )


COST_PRESETS = {
    # NVIDIA H100 SXM data sheet: 1,979 TFLOPS bf16 with sparsity (half of it dense), 3.35 TB/s,
    # NVLink 900 GB/s (both directions).
    "h100": data_sheet(989.5e12, 3.35e12, 450e9),
    # NVIDIA A100 80GB SXM data sheet: 312 TFLOPS bf16, 2,039 GB/s, NVLink 600 GB/s.
    "a100": data_sheet(312e12, 2.039e12, 300e9),
    # NVIDIA Ada architecture white paper, appendix A: 165.2 TFLOPS bf16 summed in fp32, 1,008 GB/s;
    # no NVLink, PCI Express 4.0 x16: 31.5 GB/s.
    "rtx4090": data_sheet(165.2e12, 1.008e12, 31.5e9),
    # NVIDIA Jetson Orin Nano 8GB data sheet, FlowSpec's device: 20 dense INT8 TOPS, so 10 TFLOPS
    # in 16 bits, 68 GB/s; Gigabit Ethernet of the developer kit. In 4 bits a row costs four times
    # as much.
    "jetson_orin": data_sheet(10e12, 68e9, 125e6),
    # docs/lab/results_embedded.md: the embedded target on two processes of two CPU cores, measured.
    "this_cpu": CostModel(
        row=0.035,
        link=0.051,
        verify=0.062,
        draft_forward=0.185,
        is_asynchronous=True,
        draft_on_first_stage=True,
    ),
}
"""Name -> cost model of a machine."""


ROW_COSTS = (0.0, 0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.1)
"""At which S is shown as a curve."""


def read_cost(text: str) -> CostModel:
    """A preset by its name, or a file as ``--calibrate`` writes it; fields it lacks are 0.

    Raises:
        UsageError: neither, or a value of the wrong type or range.
    """
    if text in COST_PRESETS:
        return COST_PRESETS[text]
    presets = ", ".join(COST_PRESETS)
    if not Path(text).is_file():
        raise UsageError(f"--cost: {text!r} is no file; give one, or {presets}")
    try:
        values = json.loads(read_text(Path(text), "--cost"))
        if isinstance(values, dict):
            # msgspec ignores unknown fields of dataclasses: a misspelled cost would be 0.
            check_names(values, [part.name for part in fields(CostModel)], "cost")
            for stage in (s for s in values.get("stages", []) if isinstance(s, dict)):
                check_names(stage, [part.name for part in fields(StageCost)], "cost.stages")
        return convert(values, CostModel, "cost")
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"--cost: {text!r} is no cost model ({error}); give {presets}, or a file that "
            "--calibrate wrote"
        ) from error
