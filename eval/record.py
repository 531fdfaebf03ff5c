"""Types for results.json, which the evaluation writes and every reader uses.

Fields have the same names and nesting as the file's keys. Readers skip unknown keys, and use
defaults for keys that older files lack. A missing number, such as a rate without tests, may be NaN
before writing. It is null in the file and None once read (see ``is_known``). Unset fields are left
out of the file.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeGuard, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ..errors import UsageError
from ..files import Values
from ..inference.rules.filters import sampling_label
from ..machine_load import is_busy

MAX_BYTES = 2**29
"""Maximum file size, enough for 100,000s of prompts with ten methods."""
Count = Annotated[int, Meta(ge=0, lt=2**53)]
Counts = Annotated[list[Count], Meta(max_length=1_000_000)]
GroupCounts = Annotated[list[Count], Meta(min_length=4, max_length=4)]
Amount = Annotated[float, Meta(ge=0)]
Figure = float | None
Interval = tuple[Figure, Figure]
Name = Annotated[str, Meta(max_length=100_000)]
T = TypeVar("T")
Filtered = Annotated[dict[Name, Amount], Meta(max_length=100)]
"""Active sample filters by name."""
Manifest = Values
"""manifest.json; see ``manifest.build_manifest``."""


def is_known(value: float | None | UnsetType) -> TypeGuard[float]:
    """Return True for a finite number. A missing value is NaN, None or unset."""
    return isinstance(value, int | float) and math.isfinite(value)


def number_or_nan(value: Figure) -> float:
    """Return the number, or NaN for None, because arithmetic and plots ignore NaN."""
    return math.nan if value is None else value


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """Base record for one line in the tables."""

    run: Name | UnsetType = UNSET
    """Folder, if entries from several folders are shown together; never stored in a file."""
    method: Name
    temperature: Amount
    filters: Filtered = {}

    @property
    def folder(self) -> str:
        """Return the folder's name for labels, or "" if there is only one folder."""
        return self.run or ""  # type: ignore[return-value]  # an unset field is false

    @property
    def sampling(self) -> str:
        """Label for temperature and filters."""
        return sampling_label(self.temperature, self.filters)


class AcceptanceLength(msgspec.Struct, frozen=True, kw_only=True):
    """Equivalent acceptance length L' = n N / K."""

    pooled: Figure
    mean: Figure = None
    """Mean over conversations."""
    ci95: Interval


class WallClockRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Times measured in one process by ``metrics.measure_times``."""

    tokens_per_s: Figure
    ttft_ms: Figure = None
    itl_ms_p50: Figure = None
    itl_ms_p99: Figure = None
    speedup: Figure = None
    """Speed-up over autoregressive tokens per second in the same process."""
    load_average: Figure = None
    """The machine's load average over one minute, the median over turns; None in older files."""
    cores: Count | None = None

    @property
    def is_busy(self) -> bool:
        """Return True if more processes wanted to run than the machine has cores."""
        return is_busy(self.load_average, self.cores)


class ShapeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Draft shape that the evaluation chose, because the user named none."""

    tree: Name
    tokens_per_s: dict[Name, Figure] = {}
    """In the first rounds, by shape, the fastest first; "none": without a draft. Empty: nothing was
    timed, because shares of an evaluation must decode alike."""


class LosslessRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison with the reference. The optional fields exist only in half precision."""

    checked: Count
    mismatches: Count
    """Turns with different tokens."""
    faults: Count | UnsetType = UNSET
    """Mismatched turns whose first difference exceeds the noise."""
    near_ties: Count | None | UnsetType = UNSET
    """Reference positions whose two best logits are within the noise."""
    positions: Count | UnsetType = UNSET
    """Positions checked for near ties."""
    noise: Figure | UnsetType = UNSET
    """Nats. Largest difference in a margin between step-by-step and single-pass computation."""
    margins: list[Figure] | UnsetType = UNSET
    """Each mismatch's margin at its first difference."""
    ties: Count | UnsetType = UNSET
    """Mismatches within the noise."""

    def __post_init__(self) -> None:
        if self.mismatches > self.checked:
            raise ValueError(f"mismatches {self.mismatches} of {self.checked} checked")


UNCHECKED = LosslessRecord(checked=0, mismatches=0)


class ProcessRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One process's times and counts, by kind of work."""

    name: Name
    seconds: dict[Name, Amount]
    counts: dict[Name, Count] = {}
    rows: dict[Name, Count] = {}
    peak_rss_mb: Figure = None


def add_up(reports: Sequence[ProcessRecord]) -> ProcessRecord:
    """Add up one process's reports on several benchmarks."""

    def total(counts: Iterable[Mapping[str, Any]]) -> Values:
        return dict(sum(map(Counter, counts), Counter()))

    return ProcessRecord(
        name=reports[0].name,
        seconds=total(report.seconds for report in reports),
        counts=total(report.counts for report in reports),
        rows=total(report.rows for report in reports),
        peak_rss_mb=max(report.peak_rss_mb or 0.0 for report in reports),
    )


class RateRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of tested and accepted draft tokens, and their ratio."""

    tests: Count
    accepts: Count
    draft_acceptance_rate: Figure
    draft_acceptance_rate_ci95: Interval


class CategoryRecord(RateRecord, frozen=True, kw_only=True):
    """One prompt category."""

    prompts: Count
    equivalent_acceptance_length: AcceptanceLength


class EntropyRecord(RateRecord, frozen=True, kw_only=True):
    """Tested draft tokens where the target's entropy in nats is in [entropy_from, entropy_to)."""

    entropy_from: float
    entropy_to: Figure
    """Upper end; None: no end."""


class GroupRecord(RateRecord, frozen=True, kw_only=True):
    """Tested draft tokens in one text group, named DIMENSION/GROUP as in ``groups``."""

    group: Name
    prompts: Count
    rounds: Count
    mean_acceptance_length: Figure


class RepeatsRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Times of the same prompts, decoded several times with the same random numbers."""

    repeats: Count
    unequal_turns: Count
    """Turns with tokens or steps that differ between repeats: 0 unless something is broken."""
    tokens_per_s: list[Figure]


class ScoreRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Number and share of correct answers."""

    kind: Name
    scored: Count
    passed: Count
    mean: Figure
    ci95: Interval
    cut: Count
    """Answers cut at --max-new-tokens or the context: most of these cannot be correct."""


class PromptRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Counts for one conversation, to compare two runs prompt by prompt."""

    benchmark: Name
    id: Name
    category: Name = "all"
    turns: Count = 0
    tokens: Count
    steps: Count
    rounds: Count = 0
    virtual_time: Amount | UnsetType = UNSET
    virtual_time_autoregressive: Amount | UnsetType = UNSET
    decode_s: Amount | UnsetType = UNSET
    """Decoding time in seconds, the mean over the repeats."""
    decode_s_repeats: list[Amount] = []
    position_tests: Counts = []
    position_accepts: Counts = []
    entropy_tests: Counts | UnsetType = UNSET
    entropy_accepts: Counts | UnsetType = UNSET
    groups: dict[Name, GroupCounts] | UnsetType = UNSET
    """Tests, accepted tests, rounds and their tokens, per text group."""
    score: Count | UnsetType = UNSET
    """1 or 0; unset if nothing was scored."""
    outcome: Name | UnsetType = UNSET


class RunRecord(Entry, frozen=True, kw_only=True):
    """One method on one benchmark, or on all benchmarks ("overall")."""

    schedule: Name
    benchmark: Name
    stages: Annotated[int, Meta(ge=1, lt=2**31)]
    tree_width: Count
    tree: Name | None
    """Draft tree or micro-batch shape; None: layers of ``tree_width``."""
    prompts: Count
    tokens: Count
    """N, the prefill tokens excluded."""
    steps: Count
    """K, idle and rejecting steps included."""
    equivalent_acceptance_length: AcceptanceLength
    mean_acceptance_length: Figure
    draft_acceptance_rate: Figure
    theoretical_speedup: Figure
    theoretical_speedup_by_row: dict[Name, Figure] = {}
    """S by the cost of an extra row, relative to the first row. Only the run's own cost is listed
    if the schedule chose draft tokens by this cost."""
    wallclock: WallClockRecord | None
    lossless: LosslessRecord
    turns: Count = 0
    rounds: Count
    acceptance_histogram: Counts
    """Entry j: rounds that emitted j tokens."""
    acceptance_by_position: list[Figure]
    position_tests: Counts
    position_accepts: Counts
    drafted: Count = 0
    """0 with ``eval --endpoint``, like ``draft_forwards``: servers count drafts differently."""
    draft_forwards: Count = 0
    checkpoint: Name | None = None
    """The draft's location; None for autoregressive decoding."""
    chosen: ShapeRecord | UnsetType = UNSET
    """Unset if the user or the schedule set the shape."""
    verifier: Name = "match"
    seed: int = 0
    max_new_tokens: Count | None = None
    skipped_turns: Count = 0
    processes: list[ProcessRecord] = []
    stop_reasons: dict[Name, Count] = {}
    repeats: RepeatsRecord | UnsetType = UNSET
    acceptance_by_category: dict[Name, CategoryRecord] = {}
    acceptance_by_position_ci95: list[Interval] = []
    acceptance_by_entropy: list[EntropyRecord] = []
    acceptance_by_group: list[GroupRecord] = []
    score: ScoreRecord | UnsetType = UNSET
    per_prompt: list[PromptRecord] = []

    def __post_init__(self) -> None:
        if len(self.position_accepts) != len(self.position_tests):
            raise ValueError(
                f"position_accepts has {len(self.position_accepts)} entries, position_tests "
                f"{len(self.position_tests)}"
            )

    @property
    def benchmark_mean(self) -> float:
        """Return the mean of the benchmarks' pooled L', with equal weights."""
        sums: dict[str, tuple[int, int]] = {}
        for prompt in self.per_prompt:
            tokens, steps = sums.get(prompt.benchmark, (0, 0))
            sums[prompt.benchmark] = tokens + prompt.tokens, steps + prompt.steps
        lengths = [self.stages * tokens / steps for tokens, steps in sums.values() if steps]
        return sum(lengths) / len(lengths) if lengths else math.nan

    @property
    def shape(self) -> str:
        """Label for the draft's shape."""
        return self.tree or f"W={self.tree_width}"

    @property
    def speedup(self) -> Figure:
        """Measured tokens per second over the baseline's."""
        return self.wallclock.speedup if self.wallclock else None

    @property
    def in_turns(self) -> bool:
        """Return True if one process ran several stages, one after the other."""
        return self.stages > 1 and len(self.processes) < 2


class LatencyRecord(Entry, frozen=True, kw_only=True):
    """One edge-cloud decoding method on one link."""

    network: Name
    rule: Name | None = None
    caveat: Name = ""
    """Reason why the output is not the target's own; "" if it is."""
    prompts: Count = 0
    tokens: Count = 0
    ms_per_token: Figure
    ci95: Interval | None
    ms_per_token_p50: Figure = None
    ms_per_token_p99: Figure = None
    ms_per_round: Figure = None
    tokens_per_s: Figure = None
    speedup: Figure = None
    ttft_ms: Figure = None
    itl_ms_p50: Figure = None
    itl_ms_p99: Figure = None
    up_bytes_per_token: Figure = None
    down_bytes_per_token: Figure = None
    messages_per_token: Figure = None
    wire_bytes_per_token: Figure = None
    joules_per_token: Figure = None
    joules_by_cause: dict[Name, Figure] = {}
    draft_acceptance_rate: Figure = None
    mean_acceptance_length: Figure = None
    drafted_per_token: Figure = None
    lossless: LosslessRecord = UNCHECKED


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of results.json.

    An evaluation fills ``runs`` and ``overall``. Edge-cloud decoding fills ``latency`` and
    ``times``.
    """

    runs: list[RunRecord] | UnsetType = UNSET
    overall: list[RunRecord] | UnsetType = UNSET
    """Entries pooled over the benchmarks; empty with a single benchmark."""
    latency: list[LatencyRecord] | UnsetType = UNSET
    times: dict[str, float] | UnsetType = UNSET

    @property
    def entries(self) -> list[RunRecord]:
        """Return the runs, followed by the pooled entries."""
        return [*(self.runs or ()), *(self.overall or ())]


def parse(content: bytes, kind: type[T], path: Path) -> T:
    """Parse a JSON file into its record.

    Raises:
        UsageError: one line with the file and the field.
    """
    where = f"RUN: {str(path)!r}"
    try:
        return msgspec.convert(json.loads(content), kind)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: {error}; run the evaluation again") from error
    except ValueError as error:
        raise UsageError(f"{where} is not JSON ({error}); run the evaluation again") from error
    except RecursionError as error:
        raise UsageError(f"{where} is nested too deeply; run the evaluation again") from error
