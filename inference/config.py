"""Decoding configuration, the same in commands, YAML, traces, manifests and tables.

Cost models come from presets (data sheets, and one measurement) or from files.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

import msgspec

from ..errors import UsageError, check_ranges
from ..files import Values, read_text
from .cost_model import CostModel, StageCost
from .rules import SAMPLING_RULES, RuleName
from .rules.filters import TokenFilters, sampling_label
from .rules.temperature import check_temperature
from .schedules import SCHEDULES, schedule_name
from .schedules.base import Schedule
from .schedules.spd import SPDSchedule
from .shapes import Budget, TreeShape

SEEDS = f"[{-(2**63)}, {2**63})"
"""Range for seeds: int64, as in OpenAI's clients."""


Value = TypeVar("Value")

# Folders with schedules of their own add them to SCHEDULES when they are imported.
for _folder in sorted(Path(__file__).parent.glob("*/schedules/__init__.py")):
    import_module(f"{__package__}.{_folder.parts[-3]}.schedules")


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(TokenFilters):
    """A schedule with its settings, plus the settings shared by all schedules."""

    schedule: Schedule = field(default_factory=SPDSchedule)
    num_stages: int = 4
    boundaries: tuple[int, ...] = ()
    """First layer per stage, then the layer count: (0, b1, .., L). Empty: the boundaries of the
    draft's training, or else nearly equal stages."""
    temperature: float = 0.0
    """0 is greedy."""
    verifier: Literal["auto"] | RuleName = "auto"
    """Acceptance rule above temperature 0; block, recursive and traversal need whole rounds. auto:
    across a link, the schedule's own rule. In a pipeline, rejection if the schedule samples a chain
    (one draft token at a time), else gumbel."""
    payload_tokens: int = 10
    """Number of the target's most likely tokens that topk and tail_escape send to the draft with a
    rejection."""
    tail_samples: int = 4
    """Number of tokens that tail_escape samples from the remaining ones and sends with a
    rejection."""
    seed: int = 0
    max_new_tokens: int = 128
    """Maximum new tokens, including the one from the prefill."""
    bitwise: bool = False
    """Compute each target row bit for bit as autoregressive decoding would."""
    never_slower: bool = False
    """Time rounds with and without the draft while decoding, and shrink or pause the draft if it
    slows decoding down. The drafted tokens then depend on the machine; the output's distribution
    does not."""
    cost: CostModel = field(default_factory=CostModel)

    def __post_init__(self) -> None:
        if isinstance(self.schedule, str):  # its name, with the default settings
            object.__setattr__(self, "schedule", make_schedule(self.schedule, {}))
        check_temperature(self.temperature)
        super().__post_init__()
        self.check_at(self.temperature)
        most = dict.fromkeys(("num_stages", "payload_tokens", "tail_samples"), "[1, 4096]")
        check_ranges(self, most | {"max_new_tokens": "[1, 1e9]", "seed": SEEDS})
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
                f"verifier: {self.verifier!r} needs a sampled chain (temperature above 0, and a "
                "tree of width 1 or of kind chain); use 'match', which is exact for every tree"
            )
        if self.never_slower and not self.schedule.can_pause:
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
        kind = tree.kind if isinstance(tree, TreeShape) else None
        if kind == "auto" and not self.schedule.verifies_whole:
            raise ValueError(
                f"tree: auto with schedule {self.schedule.name!r}, which has no rounds to time; "
                "give --schedule eagle or naive_pp, or a shape such as chain:7"
            )
        is_fixed = kind in ("static", "dynamic") and not self.schedule.is_auto
        if self.verifier in ("recursive", "traversal") and not (whole and is_fixed):
            raise ValueError(
                f"verifier: {self.verifier!r} tests whole trees of a fixed number of draft tokens; "
                "give a temperature above 0 and --schedule eagle or naive_pp with --tree static or "
                "dynamic:7:10:59, or use 'gumbel'"
            )

    @property
    def sampling(self) -> str:
        """Label for temperature and filters."""
        return sampling_label(self.temperature, self.active)

    @property
    def rule(self) -> RuleName:
        """The acceptance rule in use."""
        # Greedy decoding allows one token: ``match`` compares with it, whatever ``verifier`` is.
        if self.temperature == 0:
            return "match"
        return self.schedule.auto_rule if self.verifier == "auto" else self.verifier

    @classmethod
    def of(cls, schedule: str | Schedule = SPDSchedule.name, **settings: Any) -> DecodeConfig:
        """Build a configuration from one mapping with the schedule's and the shared settings."""
        shared = {f.name for f in fields(cls)}
        own = {name: value for name, value in settings.items() if name not in shared}
        common = {name: value for name, value in settings.items() if name in shared}
        if isinstance(schedule, str):
            schedule = make_schedule(schedule, own)
        elif own:
            schedule = replace(schedule, **own)
        return cls(schedule=schedule, **common)

    def to_dict(self) -> Values:
        """Return plain values for JSON and YAML, which ``from_dict`` reads."""
        plain = dataclasses.asdict(self)
        plain["schedule"] = {"name": self.schedule.name} | plain["schedule"]
        # JSON and YAML have no tuples.
        return plain | {"boundaries": list(self.boundaries)}

    @classmethod
    def from_dict(cls, values: Values) -> DecodeConfig:
        """Build a configuration from plain YAML or JSON values."""
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


def check_prompt(prompt_ids: Sequence[int], max_positions: int) -> None:
    """Refuse a prompt that is empty or does not fit the target's positions."""
    if not prompt_ids:
        raise ValueError("prompt: empty; give at least one token of text")
    if len(prompt_ids) >= max_positions:
        raise ValueError(
            f"prompt: {len(prompt_ids)} tokens leave no room in the target's {max_positions} "
            "positions; shorten it"
        )


def make_schedule(name: str, settings: Values) -> Schedule:
    """Make a schedule by name. The setting ``tree`` may be text in ``TreeShape.parse``'s format."""
    name = schedule_name(name)
    check_names([name], list(SCHEDULES), "schedule")
    kind, owners = SCHEDULES[name], setting_owners()
    check_names(settings, [*owners, *(part.name for part in fields(DecodeConfig))], "settings")
    for setting in settings:
        if name not in owners.get(setting, []):
            raise ValueError(
                f"{setting}: schedule {name!r} has no such setting (it belongs to "
                f"{', '.join(owners[setting])}); leave it out or choose another schedule"
            )
    values = dict(settings)
    for setting, hint in get_type_hints(kind).items():
        value, takes_auto = values.get(setting), hint == Budget
        if isinstance(value, str) and (hint is int or (takes_auto and value != "auto")):
            fix = "give a number" + " or auto" * takes_auto
            raise ValueError(f"{setting}: {value!r} with schedule {name!r}; {fix}")
    if isinstance(values.get("tree"), str):
        values["tree"] = TreeShape.parse(values["tree"])
    return convert(values, kind, name)


def setting_owners() -> dict[str, list[str]]:
    """Map each setting to the schedules with this setting."""
    owners: dict[str, list[str]] = {}
    for schedule, kind in SCHEDULES.items():
        for setting in fields(kind):
            owners.setdefault(setting.name, []).append(schedule)
    return owners


def check_names(values: Iterable[str], known: list[str], where: str) -> None:
    """Refuse unknown names, and suggest the nearest known one."""
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"{where}: {name!r} is unknown; {hint}known: {', '.join(known)}")


def convert(values: object, kind: type[Value], where: str) -> Value:
    """Convert plain values to a type. A ValueError is one line and begins with the field's name."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        # msgspec writes the field last; a user looks for it first.
        text, _, place = str(error).partition(" - at `$.")
        field_name = place.removesuffix("`") or where
        raise ValueError(f"{field_name}: {text[:1].lower()}{text[1:]}") from error


# Llama-2-7B in 16 bits (meta-llama/Llama-2-7b-hf, config.json): H = 4096, 32 layers, each with four
# H x H and three H x 11008 projections, and 32,000 tokens in the vocabulary.
HIDDEN, VOCABULARY = 4096, 32_000
LAYER_WEIGHTS = 32 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * 11_008)
HEAD_WEIGHTS = VOCABULARY * HIDDEN


def data_sheet(flops: float, bytes_per_s: float, link_bytes_per_s: float) -> CostModel:
    """Return costs for Llama-2-7B in 16 bits, one device per stage, at data sheet speed.

    A pass over one row reads every weight once. A further row computes two operations per weight
    and reads no weights, so it costs ``bytes_per_s / flops`` passes. The row also sends H values
    over each link and reads its float32 logits again to choose a token. Data sheets do not give the
    link latency, so it is 0 here. Measure it with ``--calibrate``, or set it with ``eval replay
    --link``.

    Args:
        flops: dense operations per second, for 16-bit products summed in float32.
        bytes_per_s: memory bandwidth.
        link_bytes_per_s: link bandwidth in one direction.
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
    # NVIDIA H100 SXM data sheet: 1,979 TFLOPS bf16 with sparsity (dense: half), 3.35 TB/s,
    # NVLink 900 GB/s (both directions).
    "h100": data_sheet(989.5e12, 3.35e12, 450e9),
    # NVIDIA A100 80GB SXM data sheet: 312 TFLOPS bf16, 2,039 GB/s, NVLink 600 GB/s.
    "a100": data_sheet(312e12, 2.039e12, 300e9),
    # NVIDIA Ada architecture white paper, appendix A: 165.2 TFLOPS bf16 summed in fp32, 1,008 GB/s;
    # no NVLink, PCI Express 4.0 x16: 31.5 GB/s.
    "rtx4090": data_sheet(165.2e12, 1.008e12, 31.5e9),
    # NVIDIA Jetson Orin Nano 8GB data sheet, FlowSpec's device: 20 dense INT8 TOPS, so 10 TFLOPS
    # in 16 bits, 68 GB/s; the developer kit's Gigabit Ethernet. In 4 bits a row costs four times
    # as much.
    "jetson_orin": data_sheet(10e12, 68e9, 125e6),
    # Measured with the embedded target, two processes, two CPU cores: docs/lab/results_embedded.md.
    "this_cpu": CostModel(
        row=0.035,
        link=0.0765,
        verify=0.062,
        draft_forward=0.185,
        is_asynchronous=True,
        draft_on_first_stage=True,
    ),
}
"""Cost models by machine."""


ROW_COSTS = (0.0, 0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.1)
"""Row costs at which curves of the speed-up S are computed."""


def read_cost(text: str) -> CostModel:
    """Read a preset by name, or a file in ``--calibrate``'s format. Missing costs are defaults."""
    if text in COST_PRESETS:
        return COST_PRESETS[text]
    presets = ", ".join(COST_PRESETS)
    if not Path(text).is_file():
        raise UsageError(f"--cost: {text!r} is no file; give one, or {presets}")
    try:
        values = json.loads(read_text(Path(text), "--cost"))
        if isinstance(values, dict):
            # msgspec ignores unknown dataclass fields: a misspelled cost would be 0.
            check_names(values, [part.name for part in fields(CostModel)], "cost")
            for stage in (s for s in values.get("stages", []) if isinstance(s, dict)):
                check_names(stage, [part.name for part in fields(StageCost)], "cost.stages")
        return convert(values, CostModel, "cost")
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"--cost: {text!r} is no cost model ({error}); give {presets}, or a file that "
            "--calibrate wrote"
        ) from error
