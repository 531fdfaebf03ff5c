"""Replay recorded runs on other hardware, without a model: `python -m pipedraft.eval replay
--help`."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from tqdm import tqdm

from ..errors import UsageError
from ..inference.config import ROW_COSTS, DecodeConfig, read_cost
from ..inference.cost_model import CostModel, StageCost, VirtualClock
from ..inference.cut import cut_layers
from ..inference.result import DecodeResult
from ..inference.schedules.base import Schedule
from ..options import Options, option
from .metrics import AUTOREGRESSIVE, OVERALL, acceptance_length, pooled_ratio
from .record import AcceptanceLength, Interval, RunRecord, number_or_nan
from .tables import Table, align_columns, bounds, number, pooled_runs
from .traces import Recording, read_recordings

if TYPE_CHECKING:
    from ..inference.engine import Engine

# P conversations
EXAMPLE = """\
example:
  pipedraft eval replay out/eval --cost h100 --link 0,0.05
  pipedraft eval replay out/eval --cost h100 --link 0,1ms --pass-ms 20 --best

TRACES is an evaluation's --out folder, its traces folder, or a file in it. The cost model's clock
times the steps of every turn; no model is loaded. To see another number of stages, decode again
with eval --stages N.
"""
LEGEND = """\
N: tokens. K: steps. L' = n N / K for n stages. S: modeled speed-up over autoregressive decoding on
the same pipeline. one device: speed-up over all layers on one device. Intervals: 95 % bootstrap
over conversations. link: latency of one link, in target passes over one token."""
UNEQUAL = 1.1
"""Speed ratio between two ranks above which a calibrated cost model has one speed per rank."""
STAGED_DRAFTS = ("spd", "ppsd")
"""Drafts that read the stages' outputs: another cut changes their draft tokens."""
UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Hardware:
    """A named cost model."""

    name: str
    cost: CostModel | None
    """Cost model; None: the recorded one."""
    link: float | None
    """Link time instead of the cost model's."""
    cuts: bool = False
    """Cut the target again, by memory and speed."""

    def cost_for(self, recording: Recording) -> CostModel:
        """Return the cost model with the draft's cost filled in."""
        cost = self.cost or recording.config.cost
        if self.link is not None:
            stages = tuple(replace(stage, link=None) for stage in cost.stages)
            cost = replace(cost, link=self.link, stages=stages)
        return recording.with_draft(cost)

    def boundaries_for(self, recording: Recording, cost: CostModel) -> tuple[int, ...]:
        """Return the layers at which the target is cut on this hardware."""
        num_stages, own = recording.config.num_stages, recording.boundaries
        if cost.stages and len(cost.stages) != num_stages:
            raise NotReplayable(f"the cost model has {len(cost.stages)} devices")
        if not self.cuts:
            return own
        try:
            cut = cut_layers(cost, own[-1], num_stages)
        except ValueError as error:
            raise NotReplayable(str(error)) from error
        if recording.draft_type in STAGED_DRAFTS and cut != own:
            raise NotReplayable(f"{recording.draft_type} was trained for the cut {[*own]}")
        return cut


class NotReplayable(Exception):
    """Error with one line, if a recorded run cannot predict the run under another cost model."""


def cost_conflict(schedule: Schedule, recorded: CostModel, cost: CostModel) -> str:
    """Return why a run under ``cost`` would have drafted other tokens, or "" if it would not."""
    if cost == recorded:
        return ""
    if schedule.is_auto:
        return (
            f"{schedule.name} chose its draft tokens (auto) by its own cost model or clock; record "
            "a run under this one"
        )
    before, now = ((one.draft_forward, one.draft_on_first_stage) for one in (recorded, cost))
    if schedule.fills_step and before != now:
        return (
            f"{schedule.name} drafted as much as fits beside a step under its own cost model; "
            "record a run under this one, or with --expansion-depth"
        )
    return ""


@dataclass(frozen=True, kw_only=True, eq=False)
class Replayed:
    """One recorded run on other hardware, on one benchmark or on all ("overall")."""

    recording: Recording
    cost_name: str
    cost: CostModel
    cut: tuple[int, ...]
    """Layers where the target is cut: (0, b1, .., L)."""
    benchmark: str
    prompts_P4: np.ndarray
    """Tokens, steps, time, and autoregressive decoding time per conversation."""

    @property
    def config(self) -> DecodeConfig:
        return self.recording.config

    @cached_property
    def length(self) -> AcceptanceLength:
        counts = [(int(row[0]), int(row[1])) for row in self.prompts_P4]
        return acceptance_length(counts, self.config.num_stages)

    @cached_property
    def speedup(self) -> tuple[float, Interval]:
        """Speed-up S over autoregressive decoding on the same pipeline, with its interval."""
        _, _, time_P, plain_P = self.prompts_P4[self.prompts_P4[:, 1] > 0].T
        return pooled_ratio(plain_P, time_P)

    @property
    def one_device_speedup(self) -> float:
        """Speed-up over autoregressive decoding of all layers on the cost model's fastest device.

        Unlike ``speedup``, this value includes what the pipeline itself costs.
        """
        fastest = max(self.cost.stages, key=lambda stage: stage.speed, default=None)
        one = () if fastest is None else (replace(fastest, link=0.0, link_row=0.0, replicas=1),)
        free = replace(self.cost, link=0.0, link_row=0.0, stages=one)
        alone = VirtualClock(free, (0, self.cut[-1]), 0.0).autoregressive_time(1)
        piped = VirtualClock(self.cost, self.cut, 0.0).autoregressive_time(1)
        return self.speedup[0] * (alone / piped)


def replay(recording: Recording, hardware: Hardware) -> list[Replayed]:
    """Compute how long the recorded steps would take on other hardware.

    Returns:
        One result per benchmark, and one named "overall" if there are several benchmarks.

    Raises:
        NotReplayable: a run there would have drafted other tokens.
    """
    config, cost = recording.config, hardware.cost_for(recording)
    if conflict := cost_conflict(config.schedule, recording.with_draft(config.cost), cost):
        raise NotReplayable(conflict)
    cut = hardware.boundaries_for(recording, cost)
    prompts = _price(recording, cost, cut)
    benchmarks = list(dict.fromkeys(benchmark for benchmark, _ in prompts))
    return [
        Replayed(
            recording=recording,
            cost_name=hardware.name,
            cost=cost,
            cut=cut,
            benchmark=benchmark,
            prompts_P4=np.stack([v for k, v in prompts.items() if benchmark in (k[0], OVERALL)]),
        )
        for benchmark in [*benchmarks, *[OVERALL] * (len(benchmarks) > 1)]
    ]


def _price(
    recording: Recording, cost: CostModel, cut: Sequence[int]
) -> dict[tuple[str, str], np.ndarray]:
    """Return each conversation's row in ``Replayed.prompts_P4`` under another cost model."""
    sums: dict[tuple[str, str], np.ndarray] = {}
    for (benchmark, name, _), result in recording.turns.items():
        clock = VirtualClock(cost, cut, cost.draft_forward or 0.0)
        replay_log(result, clock)
        plain = clock.autoregressive_time(result.num_tokens)
        turn = np.array([result.num_tokens, clock.num_steps, clock.time, plain])
        sums[benchmark, name] = sums.get((benchmark, name), 0.0) + turn
    return sums


def replay_log(result: DecodeResult, clock: VirtualClock) -> None:
    """Repeat the recorded steps on a clock with other costs."""
    for times, *event in result.step_log:
        for _ in range(times):
            if len(event) == 1:
                clock.serial_draft(event[0])
            else:
                forwards, overlap, *rows = event
                clock.step(rows, draft_forwards=forwards, overlap=bool(overlap))


def speedups_by_row(results: Sequence[DecodeResult], engine: "Engine") -> dict[str, float]:
    """Return the recorded steps' S for each stage cost of an extra row, the run's own included.

    If the schedule chooses its draft tokens by this cost, only S at the run's own cost is returned.
    """
    found, config = {}, engine.config
    for row in sorted({*ROW_COSTS, config.cost.row}):
        cost = replace(config.cost, row=row)
        if cost_conflict(config.schedule, config.cost, cost):
            continue
        clock = VirtualClock(cost, engine.target.boundaries, engine.draft_cost)
        for result in results:
            replay_log(result, clock)
        if clock.time:
            plain = clock.autoregressive_time(sum(result.num_tokens for result in results))
            found[f"{row:g}"] = plain / clock.time
    return found


def best_of(found: Sequence[Replayed]) -> list[Replayed]:
    """Return the replay with the highest S for each combination of benchmark, sampling, stages,
    cost, link, output length and random seed."""
    best: dict[tuple[object, ...], int] = {}
    for index in np.argsort(np.nan_to_num([one.speedup[0] for one in found]), kind="stable"):
        one, config = found[index], found[index].config
        way = config.sampling, config.num_stages, config.max_new_tokens, config.seed
        best[one.benchmark, *way, one.cost_name, one.cost.link] = index
    return [found[index] for index in sorted(best.values())]


COLUMNS: dict[str, Callable[[Replayed], str]] = {
    "benchmark": lambda one: one.benchmark,
    "method": lambda one: one.recording.name,
    "T": lambda one: one.config.sampling,
    "n": lambda one: str(one.config.num_stages),
    "cost": lambda one: one.cost_name,
    "link": lambda one: f"{one.cost.link:g}",
    "N": lambda one: f"{one.prompts_P4[:, 0].sum():.0f}",
    "K": lambda one: f"{one.prompts_P4[:, 1].sum():.0f}",
    "L'": lambda one: number(one.length.pooled),
    "95 % CI": lambda one: bounds(one.length.ci95),
    "S": lambda one: number(one.speedup[0]),
    "95 % CI ": lambda one: bounds(one.speedup[1]),
    "one device": lambda one: number(one.one_device_speedup),
    "max new": lambda one: str(one.config.max_new_tokens),
    "seed": lambda one: str(one.config.seed),
    "cut": lambda one: ",".join(map(str, one.cut)),
}


def _table(found: Sequence[Replayed]) -> Table:
    """Build the table. Leave out the columns max new, seed and cut if they say nothing."""
    left_out = {name for name in ("max new", "seed") if len(set(map(COLUMNS[name], found))) == 1}
    if not any(one.cost.stages for one in found):
        left_out.add("cut")
    return Table.of({name: of for name, of in COLUMNS.items() if name not in left_out}, found)


# -- cost models from measured times ---------------------------------------------------------------


def fit_cost(runs: Sequence[RunRecord], boundaries: Sequence[int] = ()) -> CostModel:
    """Fit the cost model to a comparison's measurements.

    - A target pass is the sum of the stages' mean one-row times, in autoregressive decoding.
    - ``row``, ``sharing``: least-squares fit of the stages' times over all methods. The columns are
        calls, extra rows, and calls times the mean number of other busy processes.
    - ``verify``: mean verification time for one row.
    - ``link``: autoregressive time beyond stages and verification, divided by the links of a pass.
        The ranks form a ring, so there are as many links as ranks. In one process this is 0.
    - ``draft_forward``: drafting time divided by draft forwards, for all methods.
    - ``stages``: each rank's speed in autoregressive decoding, if one rank's layers take at least
        ``UNEQUAL`` times as long as another's.

    Args:
        runs: entries from results.json with "processes". All have one number of stages, and one
            entry is autoregressive decoding.
        boundaries: the target's cuts, if each stage had a process.
    """
    runs = pooled_runs(runs)
    plain = next(run for run in runs if run.schedule == AUTOREGRESSIVE)
    if not plain.tokens:
        raise ValueError(
            "--calibrate: plain decoding emitted one token a turn; raise --max-new-tokens"
        )
    one_row = _total(plain, "seconds", "stage") / plain.tokens
    verify = _total(plain, "seconds", "verify") / plain.tokens
    is_asynchronous, waits = len(plain.processes) > 1, 0.0
    if is_asynchronous:
        waits = max(1.0 / _tokens_per_s(plain) - one_row - verify, 0.0) / len(plain.processes)
    forwards = sum(run.draft_forwards for run in runs)
    drafting = sum(_total(run, "seconds", "draft") for run in runs if run.draft_forwards)
    row, sharing = _row_and_sharing(runs)
    return CostModel(
        row=row,
        sharing=sharing,
        link=waits / one_row,
        verify=verify / one_row,
        draft_forward=drafting / forwards / one_row if forwards else None,
        is_asynchronous=is_asynchronous,
        draft_on_first_stage=is_asynchronous and len(plain.processes) == plain.stages,
        stages=_stage_speeds(plain, boundaries),
    )


def _stage_speeds(plain: RunRecord, boundaries: Sequence[int]) -> tuple[StageCost, ...]:
    """Return each rank's device speed, or () if the speeds are similar.

    A device with speed 1 takes one time unit for all layers.
    """
    seconds = [process.seconds.get("stage", 0.0) for process in plain.processes]
    seconds = [each for each in seconds if each]
    if len(seconds) == 1 or len(seconds) != len(boundaries) - 1:
        return ()
    layers = np.diff(boundaries) / boundaries[-1]
    speeds = layers / (np.array(seconds) / sum(seconds))
    if speeds.max() < UNEQUAL * speeds.min():
        return ()
    return tuple(StageCost(speed=speed) for speed in speeds.tolist())


def _total(run: RunRecord, quantity: str, kind: str) -> float:
    return sum(getattr(process, quantity).get(kind, 0.0) for process in run.processes)


def _tokens_per_s(run: RunRecord) -> float:
    assert run.wallclock is not None
    return number_or_nan(run.wallclock.tokens_per_s)


def _row_and_sharing(runs: Sequence[RunRecord]) -> tuple[float, float]:
    """Return the extra time for each further row, and for each further busy process, as fractions
    of the first row's time.

    Fit by non-negative least squares. A zero column is left out.
    """
    calls = np.array([_total(run, "counts", "stage") for run in runs])
    rows = np.array([_total(run, "rows", "stage") for run in runs])
    seconds = np.array([_total(run, "seconds", "stage") for run in runs])
    columns = [calls, rows - calls, calls * np.array([_others_busy(run) for run in runs])]
    used = [index for index, column in enumerate(columns) if column.any()]
    while True:
        chosen = np.stack([columns[index] for index in used], 1)
        fitted, *_ = np.linalg.lstsq(chosen, seconds, rcond=None)
        if (fitted >= 0).all() or len(used) == 1:
            break
        used.pop(int(fitted[1:].argmin()) + 1)
    times = dict(zip(used, fitted.tolist(), strict=True))
    first = times[0]
    return (times.get(1, 0.0) / first, times.get(2, 0.0) / first) if first > 0 else (0.0, 0.0)


def _others_busy(run: RunRecord) -> float:
    """Return the mean number of other processes that compute alongside a busy one."""
    if run.wallclock is None or len(run.processes) == 1:
        return 0.0
    kinds = ("stage", "verify", "draft")
    busy = sum(_total(run, "seconds", kind) for kind in kinds)
    return max(busy * _tokens_per_s(run) / run.tokens - 1.0, 0.0)


# -- the command -----------------------------------------------------------------------------------


def _in_passes(link: str, pass_ms: float | None) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)?", link)
    if not found:
        raise UsageError(
            f"--link: {link!r} is no link; give the time of a hop as 0.05 (target passes) or "
            "200us, 20ms, 1s"
        )
    time, unit = float(found[1]), found[2]
    if not unit:
        return time
    if pass_ms is None or not pass_ms > 0:
        raise UsageError(
            f"--pass-ms: {pass_ms}; a link of {link} needs the milliseconds of a target pass over "
            "one token, e.g. --pass-ms 35"
        )
    return time * UNITS_S[unit] / (pass_ms / 1e3)


@dataclass(frozen=True, kw_only=True)
class ReplayOptions(Options):
    """Compute N, K, L' and S for recorded runs on other hardware and links."""

    PROG: ClassVar[str] = "pipedraft eval replay"
    EXAMPLE: ClassVar[str] = EXAMPLE + "\n" + LEGEND

    traces: tuple[Path, ...] = option(metavar="TRACES", positional=True)
    """evaluation folders with traces"""
    cost: tuple[str, ...] = option((), metavar="PRESET|FILE", repeated=True)
    """cost model: h100, a100, rtx4090, jetson_orin, this_cpu, or a file written by --calibrate;
    repeatable; default: the run's"""
    link: tuple[str, ...] = option((), metavar="T,..")
    """link time instead of the cost model's: in target passes over one token, or with a unit
    (200us, 20ms) and --pass-ms"""
    boundaries: Literal["recorded", "auto"] = "recorded"
    """auto: cut the target again by each stage's memory and speed in --cost"""
    pass_ms: float | None = option(None, metavar="MS")
    """milliseconds per target pass over one token"""
    best: bool = False
    """show only the method with the highest S per benchmark, temperature, stages, cost, link, and
    recorded --max-new-tokens and --seed"""


build_parser = ReplayOptions.parser


def _hardware(arguments: ReplayOptions) -> list[Hardware]:
    costs: list[tuple[str, CostModel | None]] = [
        (Path(text).stem, read_cost(text)) for text in arguments.cost
    ]
    return [
        Hardware(
            name,
            cost,
            None if link is None else _in_passes(link, arguments.pass_ms),
            arguments.boundaries == "auto",
        )
        for name, cost in costs or [("recorded", None)]
        for link in arguments.link or (None,)
    ]


def run(argv: Sequence[str]) -> None:
    """Run the whole subcommand. Raise ValueError for bad input."""
    arguments = ReplayOptions.read(argv)
    found: list[Replayed] = []
    refused: dict[str, None] = {}
    wanted = list(product(read_recordings(arguments.traces), _hardware(arguments)))
    for recording, hardware in tqdm(wanted, desc="replays", unit="run"):
        try:
            found += replay(recording, hardware)
        except NotReplayable as reason:
            refused[f"{recording.name} on {recording.config.num_stages} stages: {reason}"] = None
    if not found:
        raise UsageError(f"--cost: nothing can be replayed; {next(iter(refused))}")
    found = best_of(found) if arguments.best else found
    lines = [f"left out: {line}" for line in refused]
    print("\n".join([align_columns(_table(found)), *lines, "", LEGEND]))
