"""Other pipelines from recorded runs, without a model: `python -m pipedraft.eval replay --help`."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from tqdm import tqdm

from pipedraft.cli import Options, UsageError, make_folder, option
from pipedraft.eval.metrics import AUTOREGRESSIVE, OVERALL, acceptance_length, pooled_ratio
from pipedraft.eval.record import (
    ReplayedPrompt,
    ReplayRecord,
    RunRecord,
    number_or_nan,
)
from pipedraft.eval.tables import Table, align_columns, bounds, number
from pipedraft.eval.traces import Recording, read_recordings
from pipedraft.files import to_json, write_atomically
from pipedraft.inference.clock import CostModel, VirtualClock
from pipedraft.inference.config import ROW_COSTS, read_cost
from pipedraft.inference.filters import sampling_label
from pipedraft.inference.result import DecodeResult
from pipedraft.inference.schedules.base import Refusal, Round, Schedule
from pipedraft.models import stage_boundaries

if TYPE_CHECKING:
    from pipedraft.inference.engine import Engine

EXAMPLE = """\
example:
  python -m pipedraft.eval replay out/eval --stages 2,4,8 --cost out/cost.json --link 0,0.05
  python -m pipedraft.eval replay out/eval --stages 4 --cost h100 --link 0,1ms --pass-ms 20 --best

TRACES is the --out folder of an evaluation, its traces folder, or a file in there. Every turn in it
is replayed; no model is loaded.
"""
LEGEND = """\
how: recorded, the steps of the run itself on the clock of the cost model; exact, another number of
stages, whose draft tokens and verdicts are the same; assumed, the draft's tokens depend on the
number of stages, and those on the new one are taken to be right as often. N tokens, K steps, L' = n
N / K, S modeled speed-up over plain decoding on the same pipeline, both with 95 % bootstrap
intervals over conversations; one device: the same over plain decoding with all layers on one. link:
one hop, in times of a target pass over one token."""
UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Hardware:
    """A cost model by name."""

    name: str
    cost: CostModel | None
    """None: the recorded one."""
    link: float | None
    """Time of a hop in place of the model's."""

    def cost_for(self, recording: Recording) -> CostModel:
        """The cost model with the draft's cost filled in."""
        cost = self.cost or recording.config.cost
        if self.link is not None:
            cost = replace(cost, link=self.link)
        return recording.with_draft(cost)


@dataclass(frozen=True)
class Replay:
    """One recorded way of decoding on one pipeline."""

    recording: Recording
    hardware: Hardware
    cost: CostModel
    stages: int
    how: str
    rows: list[ReplayedPrompt]


def replay(recording: Recording, stages: int, hardware: Hardware) -> Replay:
    """What a recorded run would take on another number of stages and other hardware.

    Raises:
        Refusal: the recorded run does not say what this pipeline would do.
    """
    config, cost = recording.config, hardware.cost_for(recording)
    recorded_cost = recording.with_draft(config.cost)
    schedule = config.schedule
    if cost != recorded_cost and (conflict := schedule.cost_conflict(recorded_cost, cost)):
        raise Refusal(conflict)
    num_layers = recording.boundaries[-1]
    if stages > num_layers:
        raise Refusal(f"the target has {num_layers} layers, too few for {stages} stages")
    how, boundaries = "recorded", recording.boundaries
    if stages != config.num_stages:
        how = schedule.replay_basis(recording.draft_type, config.num_stages, config.cost)
        boundaries = stage_boundaries(num_layers, stages)
        for key, result in recording.turns.items():
            if not follows_rounds(result, recording.clock(recorded_cost), schedule):
                raise Refusal(
                    f"the recorded steps of {'/'.join(map(str, key))} are not those of "
                    f"{schedule.name}'s rounds on {config.num_stages} stages"
                )
    turns: dict[tuple[str, str], list[tuple[int, int, float, float]]] = {}
    for (benchmark, name, _), result in recording.turns.items():
        clock = VirtualClock(cost, boundaries, cost.draft_forward or 0.0)
        if how == "recorded":
            replay_log(result, clock)
        else:
            replay_rounds(result, clock, schedule)
        plain = clock.autoregressive_time(result.num_tokens)
        turn = result.num_tokens, clock.num_steps, clock.time, plain
        turns.setdefault((benchmark, name), []).append(turn)
    rows = []
    for (benchmark, name), own in turns.items():
        tokens, steps, times, plains = zip(*own, strict=True)
        rows.append(
            ReplayedPrompt(
                benchmark=benchmark,
                id=name,
                tokens=sum(tokens),
                steps=sum(steps),
                virtual_time=sum(times, 0.0),
                virtual_time_autoregressive=sum(plains, 0.0),
            )
        )
    return Replay(recording, hardware, cost, stages, how, rows)


def replay_log(result: DecodeResult, clock: VirtualClock) -> None:
    """The recorded steps once more, on a clock with other costs."""
    for times, *event in result.step_log:
        for _ in range(times):
            if len(event) == 1:
                clock.serial_draft(event[0])
            else:
                forwards, overlap, *rows = event
                clock.step(rows, draft_forwards=forwards, overlap=bool(overlap))


def speedups_by_row(results: Sequence[DecodeResult], engine: "Engine") -> dict[str, float]:
    """S of recorded steps by what a row more costs a stage, the run's own cost among them.

    A schedule that chooses its draft tokens by that cost has its own alone.
    """
    found, config = {}, engine.config
    for row in sorted({*ROW_COSTS, config.cost.row}):
        cost = replace(config.cost, row=row)
        if row != config.cost.row and config.schedule.cost_conflict(config.cost, cost):
            continue
        clock = VirtualClock(cost, engine.target.boundaries, engine.draft_cost)
        for result in results:
            replay_log(result, clock)
        if clock.time:
            plain = clock.autoregressive_time(sum(result.num_tokens for result in results))
            found[f"{row:g}"] = plain / clock.time
    return found


def replay_rounds(result: DecodeResult, clock: VirtualClock, schedule: Schedule) -> None:
    """The recorded rounds on the clock's number of stages, by the schedule's own rule."""
    columns = (result.round_lengths, result.round_ends, result.round_drafted, result.round_forwards)
    for length, end, drafted, forwards in zip(*columns, strict=True):
        schedule.replay(clock, Round(length, end, drafted, forwards))


def follows_rounds(result: DecodeResult, clock: VirtualClock, schedule: Schedule) -> bool:
    """Whether the recorded steps are those of the rule; the clock is a fresh one of that run."""
    replay_rounds(result, clock, schedule)
    return clock.log == result.step_log


def records(found: Replay) -> Iterator[ReplayRecord]:
    """One for each benchmark, and with several "overall"."""
    recording, config = found.recording, found.recording.config
    benchmarks = dict.fromkeys(row.benchmark for row in found.rows)
    for benchmark in [*benchmarks, *([OVERALL] if len(benchmarks) > 1 else [])]:
        rows = [row for row in found.rows if benchmark in (row.benchmark, OVERALL)]
        counts = [(row.tokens, row.steps) for row in rows]
        time_P, plain_P = (
            np.array([getattr(row, field) for row in rows if row.steps], dtype=np.float64)
            for field in ("virtual_time", "virtual_time_autoregressive")
        )
        speedup, speedup_ci95 = pooled_ratio(plain_P, time_P)
        yield ReplayRecord(
            method=recording.name,
            draft_type=recording.draft_type,
            draft_sha256=recording.draft_hash,
            schedule=config.schedule.name,
            tree_width=config.schedule.width,
            tree=config.schedule.label,
            temperature=config.temperature,
            filters=config.active,
            seed=config.seed,
            max_new_tokens=config.max_new_tokens,
            recorded_stages=config.num_stages,
            benchmark=benchmark,
            stages=found.stages,
            cost_name=found.hardware.name,
            cost=asdict(found.cost),
            how=found.how,
            prompts=len(rows),
            tokens=sum(tokens for tokens, _ in counts),
            steps=sum(steps for _, steps in counts),
            equivalent_acceptance_length=acceptance_length(counts, found.stages),
            theoretical_speedup=speedup,
            theoretical_speedup_ci95=speedup_ci95,
            one_device_speedup=speedup * _one_device_share(found),
            per_prompt=rows,
        )


def _one_device_share(found: Replay) -> float:
    """Plain decoding's time of a token on one device, over that on the pipeline."""
    layers = found.recording.boundaries[-1]
    alone = VirtualClock(replace(found.cost, link=0.0, link_row=0.0), (0, layers), 0.0)
    piped = VirtualClock(found.cost, stage_boundaries(layers, found.stages), 0.0)
    return alone.autoregressive_time(1) / piped.autoregressive_time(1)


def best_of(found: Sequence[ReplayRecord]) -> list[ReplayRecord]:
    """Replays with the highest S of each benchmark, sampling, number of stages, cost and link.

    Outputs of other lengths or random numbers are not compared.
    """
    best: dict[tuple[object, ...], ReplayRecord] = {}
    speeds = np.nan_to_num([number_or_nan(record.theoretical_speedup) for record in found])
    for record in (found[index] for index in np.argsort(speeds, kind="stable")):
        sampling = sampling_label(record.temperature, record.filters)
        way = record.cost_name, record.cost["link"], record.max_new_tokens, record.seed
        best[record.benchmark, sampling, record.stages, *way] = record
    return [record for record in found if record in best.values()]


COLUMNS: dict[str, Callable[[ReplayRecord], str]] = {
    "benchmark": lambda record: record.benchmark,
    "method": lambda record: record.method,
    "T": lambda record: sampling_label(record.temperature, record.filters),
    "recorded n": lambda record: str(record.recorded_stages),
    "n": lambda record: str(record.stages),
    "cost": lambda record: record.cost_name,
    "link": lambda record: f"{record.cost['link']:g}",
    "N": lambda record: str(record.tokens),
    "K": lambda record: str(record.steps),
    "L'": lambda record: number(record.equivalent_acceptance_length.pooled),
    "95 % CI": lambda record: bounds(record.equivalent_acceptance_length.ci95),
    "S": lambda record: number(record.theoretical_speedup),
    "95 % CI ": lambda record: bounds(record.theoretical_speedup_ci95),
    "one device": lambda record: number(record.one_device_speedup),
    "how": lambda record: record.how,
}
VARYING: dict[str, Callable[[ReplayRecord], str]] = {
    "max new": lambda record: str(record.max_new_tokens),
    "seed": lambda record: str(record.seed),
}
"""Columns where runs of several settings are in the traces."""


def _table(found: Sequence[ReplayRecord]) -> Table:
    varying = {name: of for name, of in VARYING.items() if len(set(map(of, found))) > 1}
    return Table.of(COLUMNS | varying, found)


# -- cost models from measured times ---------------------------------------------------------------


def fit_cost(runs: Sequence[RunRecord]) -> CostModel:
    """Fit the cost model to what a comparison measured.

    - A target pass is the stages' mean time for one row, added up, in plain decoding.
    - ``row``, ``sharing``: least squares of the stages' times over calls, further rows, and calls
      times the processes that computed beside them on average, of all methods.
    - ``verify``: a mean verification of one row.
    - ``link``: what plain decoding takes beyond stages and verification, over its n + 1 hops.
      In one process: nothing.
    - ``draft_forward``: drafting time over forward passes, of all methods.

    Args:
        runs: entries of results.json with "processes", one number of stages, plain decoding among
            them.

    Raises:
        ValueError: plain decoding emitted nothing to measure.
    """
    runs = [run for run in runs if run.benchmark == OVERALL] or list(runs)
    plain = next(run for run in runs if run.schedule == AUTOREGRESSIVE)
    if not plain.tokens:
        raise ValueError(
            "--calibrate: plain decoding emitted one token a turn; raise --max-new-tokens"
        )
    num_stages = plain.stages
    one_row = _total(plain, "seconds", "stage") / plain.tokens
    names = [process.name for process in plain.processes]
    is_asynchronous = len(names) > 1
    verify = _total(plain, "seconds", "verify") / plain.tokens
    waits = 0.0
    if is_asynchronous:
        per_token = 1.0 / _tokens_per_s(plain)
        waits = max(per_token - one_row - verify, 0.0) / (num_stages + 1)
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
        draft_on_first_stage=is_asynchronous and len(names) == num_stages,
    )


def _total(run: RunRecord, quantity: str, kind: str) -> float:
    return sum(getattr(process, quantity).get(kind, 0.0) for process in run.processes)


def _tokens_per_s(run: RunRecord) -> float:
    assert run.wallclock is not None
    return number_or_nan(run.wallclock.tokens_per_s)


def _row_and_sharing(runs: Sequence[RunRecord]) -> tuple[float, float]:
    """Extra time of a further row, and beside a further busy process, over the time of the first.

    Non-negative least squares; a column that does not vary is left out.
    """
    calls = np.array([_total(run, "counts", "stage") for run in runs])
    rows = np.array([_total(run, "rows", "stage") for run in runs])
    seconds = np.array([_total(run, "seconds", "stage") for run in runs])
    columns = [calls, rows - calls, calls * np.array([_others_busy(run) for run in runs])]
    used = [index for index, column in enumerate(columns) if column.any()]
    while True:
        fitted, *_ = np.linalg.lstsq(
            np.stack([columns[index] for index in used], 1), seconds, rcond=None
        )
        if (fitted >= 0).all() or len(used) == 1:
            break
        used.pop(int(fitted[1:].argmin()) + 1)
    times = dict(zip(used, fitted.tolist(), strict=True))
    first = times[0]
    return (times.get(1, 0.0) / first, times.get(2, 0.0) / first) if first > 0 else (0.0, 0.0)


def _others_busy(run: RunRecord) -> float:
    """Processes that computed beside a busy one on average, while the run lasted."""
    if run.wallclock is None or len(run.processes) == 1:
        return 0.0
    kinds = ("stage", "verify", "draft")
    busy = sum(_total(run, "seconds", kind) for kind in kinds)
    return max(busy * _tokens_per_s(run) / run.tokens - 1.0, 0.0)


# -- the command -----------------------------------------------------------------------------------


def read_link(text: str) -> str:
    if not re.fullmatch(r"\d+(\.\d+)?(us|ms|s)?", text):
        raise ValueError(
            f"{text!r} is no link; give the time of a hop as 0.05 (target passes) or 200us, 20ms, "
            "1s"
        )
    return text


def _in_passes(link: str, pass_ms: float | None) -> float:
    number, unit = re.fullmatch(r"([\d.]+)([a-z]*)", link).groups()  # type: ignore[union-attr]
    if not unit:
        return float(number)
    if pass_ms is None or not pass_ms > 0:
        raise UsageError(
            f"--pass-ms: {pass_ms}; a link of {link} needs the milliseconds of a target pass over "
            "one token, e.g. --pass-ms 35"
        )
    return float(number) * UNITS_S[unit] / (pass_ms / 1e3)


@dataclass(frozen=True, kw_only=True)
class ReplayOptions(Options):
    """N, K, L' and S of recorded runs on other stages, hardware and links."""

    PROG: ClassVar[str] = "pipedraft eval replay"
    EXAMPLE: ClassVar[str] = EXAMPLE + "\n" + LEGEND

    traces: tuple[Path, ...] = option(metavar="TRACES", positional=True)
    """what evaluations have recorded"""
    cost: tuple[str, ...] = option((), metavar="PRESET|FILE", repeated=True)
    """cost model: h100, a100, rtx4090, jetson_orin, this_cpu, or a file as --calibrate writes it;
    may be given several times; default: the run's"""
    stages: tuple[int, ...] = option((), metavar="N,..", least=1)
    """pipeline stages; default: the run's"""
    link: tuple[str, ...] = option((), metavar="T,..", parse=read_link)
    """time of a hop in place of the cost model's: in target passes over one token, or with a unit
    (200us, 20ms) and --pass-ms"""
    pass_ms: float | None = option(None, metavar="MS")
    """milliseconds of a target pass over one token"""
    best: bool = False
    """only the method with the highest S of each benchmark, temperature, stages, cost, link, and
    recorded --max-new-tokens and --seed"""
    json: bool = False
    """print JSON alone"""
    out: Path | None = option(None, metavar="DIR")
    """write replay.json and replay.md there"""


build_parser = ReplayOptions.parser


def _hardware(arguments: ReplayOptions) -> list[Hardware]:
    costs: list[tuple[str, CostModel | None]]
    costs = [(Path(text).stem, read_cost(text)) for text in arguments.cost]
    return [
        Hardware(name, cost, None if link is None else _in_passes(link, arguments.pass_ms))
        for name, cost in costs or [("recorded", None)]
        for link in arguments.link or (None,)
    ]


def run(argv: Sequence[str]) -> None:
    """The whole subcommand; bad input raises ValueError."""
    arguments = ReplayOptions.read(argv)
    recordings = read_recordings(arguments.traces)
    wanted = [
        (recording, stages, hardware)
        for recording in recordings
        for stages in arguments.stages or [recording.config.num_stages]
        for hardware in _hardware(arguments)
    ]
    found: list[ReplayRecord] = []
    refused: dict[tuple[str, str], dict[int, None]] = {}
    for recording, stages, hardware in tqdm(wanted, desc="replays", unit="pipeline"):
        try:
            found += records(replay(recording, stages, hardware))
        except Refusal as refusal:
            refused.setdefault((recording.name, str(refusal)), {})[stages] = None
    left_out = [
        f"{name} on {', '.join(map(str, stages))} stages: {reason}"
        for (name, reason), stages in refused.items()
    ]
    if not found:
        raise UsageError(f"--stages: nothing can be replayed; {left_out[0]}")
    found = best_of(found) if arguments.best else found
    content = to_json({"replays": found, "left_out": left_out})
    lines = [f"left out: {line}" for line in left_out]
    text = "\n".join([align_columns(_table(found)), *lines, "", LEGEND])
    print(content.decode() if arguments.json else text)
    if arguments.out is not None:
        make_folder("--out", arguments.out)
        write_atomically(arguments.out / "replay.json", content)
        write_atomically(arguments.out / "replay.md", f"# Replay\n\n```\n{text}\n```\n".encode())
