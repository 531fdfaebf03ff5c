"""Choose schedule and draft shape where the user names none: what measures fastest on this device.

Commands and the Python API take their defaults from ``choose_way``. A paper's shape has a name:
``--tree paper``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle

from ..files import Values
from .arguments import EngineOptions
from .auto_tree import ShapeMeter
from .config import DecodeConfig, setting_owners
from .engine import Engine
from .schedules import SCHEDULES, schedule_name
from .schedules.base import Schedule, TreeSchedule
from .shapes import NO_DRAFT, TreeShape
from .sources import default_schedule

AUTO = TreeShape.parse("auto")
TIMED_RULES = ("auto", "match", "gumbel")
"""Acceptance rules for trees of any shape."""
MEASURED_TOKENS, ANSWER_TOKENS = 192, 32
"""Tokens to decode before a shape is chosen, and per prompt if there are several. In fewer, not
every shape has its turn."""
WARM_UP_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class Way:
    """Schedule for a draft, with the settings that the user left open."""

    schedule: str
    settings: Values = field(default_factory=dict)
    """The user's settings, and ``tree`` if it is measured."""
    is_measured: bool = False
    """True if rounds are timed, and the fastest shape is drafted."""


def choose_way(
    draft_type: str | None,
    *,
    schedule: str | None,
    num_stages: int,
    settings: Values,
    in_processes: bool = False,
) -> Way:
    """Return the schedule, and the tree where times can choose it.

    With one stage, or a process per stage, times are real. Then ``--tree auto`` starts with a chain
    and keeps the fastest shape, or no draft. Several stages in one process show steps, not times:
    there the schedule keeps its paper's tree.

    Args:
        draft_type: None without a draft.
        schedule: the user's schedule; None: the draft's own.
        settings: the user's settings for the schedule and the acceptance rule.
    """
    name, owners = schedule, setting_owners()
    if name is None:
        name = "autoregressive" if draft_type is None else default_schedule(draft_type)
        fits = all("eagle" in owners.get(setting, ["eagle"]) for setting in settings)
        if name == "pipeinfer" and num_stages == 1 and fits:
            name = "eagle"  # no stage to fill: drafting between rounds wastes the fewest tokens
    kind = SCHEDULES.get(schedule_name(name), Schedule)
    takes_auto = issubclass(kind, TreeSchedule) and kind.verifies_whole
    is_open = settings.get("tree") is None and settings.get("verifier", "auto") in TIMED_RULES
    # Schedules named for processes are compared with each other, so all keep their paper's tree.
    if takes_auto and is_open and (num_stages == 1 or (in_processes and schedule is None)):
        return Way(schedule=name, settings=settings | {"tree": AUTO}, is_measured=True)
    return Way(schedule=name, settings=settings)


def pipeline_note(options: EngineOptions, config: DecodeConfig) -> str:
    """Return a line about a head for several stages in one process, or "" if you asked for it."""
    number, is_asked = config.num_stages, options.schedule is not None or options.stages is not None
    if number == 1 or is_asked or options.backend == "process":
        return ""
    return (
        f"note: {config.schedule.name} drafts for a pipeline: one process runs the {number} stages "
        f"one after the other, so read L', not tokens/s; --backend process --processes {number} "
        "runs them at once, and --schedule autoregressive decodes without the draft"
    )


@dataclass(frozen=True, kw_only=True)
class MeasuredShape:
    """The fastest shape of a draft, and the tokens per second of every shape that was tried."""

    shape: TreeShape
    tokens_per_s: dict[str, float]
    """By shape, the fastest first. "none" is decoding without a draft."""

    @property
    def pays(self) -> bool:
        """Return True if the shape was faster than no draft."""
        own, plain = (self.tokens_per_s.get(x.label, 0.0) for x in (self.shape, NO_DRAFT))
        return own > plain

    @property
    def told(self) -> str:
        """Return the choice as a line for the user."""
        speeds = ", ".join(f"{name} {speed:.3g}" for name, speed in self.tokens_per_s.items())
        which = "the fastest of these" if self.pays else "the fastest draft, slower than none"
        return f"{self.shape.label}: {which} in first rounds, in tokens/s: {speeds}"


def fastest(meter: ShapeMeter) -> MeasuredShape | None:
    """Return the fastest shape with a draft, or None if the meter has timed none."""
    speeds = dict(sorted(meter.speeds.items(), key=lambda pair: -pair[1]))
    drafted = [name for name in speeds if name != NO_DRAFT.label]
    if not drafted:
        return None
    return MeasuredShape(shape=TreeShape.parse(drafted[0]), tokens_per_s=speeds)


def measure_shape(engine: Engine, prompts: Sequence[list[int]]) -> MeasuredShape | None:
    """Decode prompts with ``--tree auto`` until the shapes are timed, and return the fastest.

    Args:
        engine: for a measured ``Way``. Its timer starts again.
        prompts: token ids, decoded in turn, as often as needed.
    """
    config = engine.config
    engine.config = replace(config, max_new_tokens=min(WARM_UP_TOKENS, config.max_new_tokens))
    engine.decode(prompts[0])  # first calls allocate memory and choose kernels
    most = config.max_new_tokens if len(prompts) == 1 else ANSWER_TOKENS
    engine.config = replace(config, max_new_tokens=min(most, config.max_new_tokens))
    engine.shapes, num_tokens = ShapeMeter(in_turn=True), 0
    for turn, prompt in enumerate(cycle(prompts)):
        num_tokens += engine.decode(prompt).num_tokens
        # The second bound: every answer may end at once.
        if num_tokens >= MEASURED_TOKENS or turn >= MEASURED_TOKENS:
            break
    engine.config = config
    return fastest(engine.shapes)


def with_shape(config: DecodeConfig, shape: TreeShape) -> DecodeConfig:
    """Return the configuration with a fixed tree."""
    return replace(config, schedule=replace(config.schedule, tree=shape))  # type: ignore[call-arg]  # a TreeSchedule
