"""Rounds of a recorded run on another number of stages: the steps that each schedule would take.

A law holds where a round's guesses are fixed by the text alone. It gives the virtual clock the
same calls as the engine does, so that K and the modelled time follow from the recorded rounds.
What no law covers is refused with its reason; docs/evaluation.md derives the laws.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pipedraft.eval.metrics import AUTOREGRESSIVE
from pipedraft.inference.clock import CostModel, VirtualClock
from pipedraft.inference.engine import EngineConfig
from pipedraft.inference.result import DecodeResult
from pipedraft.inference.shapes import segment_sizes

TEXT_DRAFTS = {"language_model", "flexspec"}
"""Their guess is a function of the tokens before it, whenever it is made."""
TREE_DRAFTS = TEXT_DRAFTS | {"eagle", "eagle3"}
"""A tree that is drafted between rounds is a function of the committed text."""
SURE_RECOVERY = 0.2
"""PipeInfer's draft cannot pause within a round whose guesses were right up to this floor: a
verdict of right guesses alone leaves a mean share of at least ``asynchronous.STEP``."""


@dataclass(frozen=True)
class Round:
    """From one restart to the next."""

    length: int
    """Tokens emitted."""
    end: str
    """As in ``DecodeResult.round_ends``."""
    drafted: int
    forwards: int


def rounds_of(result: DecodeResult) -> Iterator[Round]:
    columns = (result.round_lengths, result.round_ends, result.round_drafted, result.round_forwards)
    for length, end, drafted, forwards in zip(*columns, strict=True):
        yield Round(length, end, drafted, forwards)


Law = Callable[[VirtualClock, Round, EngineConfig], None]


def _travel(
    clock: VirtualClock, sizes: Sequence[int], num_steps: int, *, forwards: int, overlap: bool
) -> None:
    """Segments of these sizes enter, one per step."""
    for step in range(num_steps):
        entered = [step - stage for stage in range(clock.num_stages)]
        rows = [sizes[e] if 0 <= e < len(sizes) else 0 for e in entered]
        clock.step(rows, draft_forwards=forwards, overlap=overlap)


def _autoregressive(clock: VirtualClock, found: Round, config: EngineConfig) -> None:
    """n steps a token."""
    _travel(clock, [1], clock.num_stages, forwards=0, overlap=False)


def _in_batches(clock: VirtualClock, found: Round, num_segments: int, max_rows: int) -> None:
    """eagle, naive_pp: the whole tree, verified once all of it is back: n + segments - 1 steps."""
    sizes = segment_sizes(found.drafted + 1, num_segments, max_rows)
    clock.serial_draft(found.forwards)
    num_steps = clock.num_stages + len(sizes) - 1
    _travel(clock, sizes, num_steps, forwards=0, overlap=False)


def _eagle(clock: VirtualClock, found: Round, config: EngineConfig) -> None:
    _in_batches(clock, found, 1, config.max_segment_rows)


def _naive(clock: VirtualClock, found: Round, config: EngineConfig) -> None:
    num_segments = config.micro_batches or clock.num_stages + 1
    _in_batches(clock, found, num_segments, config.max_segment_rows)


def _pruned(clock: VirtualClock, found: Round, config: EngineConfig) -> None:
    """A chain: the round ends as the segment returns that holds the row before its last token."""
    num_segments = config.micro_batches or clock.num_stages + 1
    sizes = segment_sizes(found.drafted + 1, num_segments, config.max_segment_rows)
    last, returned = 0, sizes[0]
    while returned < found.length:
        last += 1
        returned += sizes[last]
    clock.serial_draft(found.forwards)
    _travel(clock, sizes, clock.num_stages + last, forwards=0, overlap=True)


def _layered(clock: VirtualClock, found: Round, config: EngineConfig) -> None:
    """A chain that grows by a row a step: n steps to the first token, one to each further one."""
    num_steps = clock.num_stages + found.length - 1
    _travel(clock, [1] * num_steps, num_steps, forwards=1, overlap=True)


def _ppsd(clock: VirtualClock, found: Round, config: EngineConfig) -> None:
    """As layered, but every step waits for the draft.

    On one stage the root is verified before its guess is made, so every token is a round.
    """
    num_rounds = 1 if clock.num_stages > 1 else found.length
    for _ in range(num_rounds):
        num_steps = clock.num_stages + found.length // num_rounds - 1
        for step in range(num_steps):
            rows = [int(stage <= step) for stage in range(clock.num_stages)]
            clock.step(rows, draft_forwards=0, overlap=False)
            clock.serial_draft(1)


def _pipeinfer(clock: VirtualClock, found: Round, config: EngineConfig) -> None:
    """A chain that grows by a micro-batch a step, or a round in which the draft pauses."""
    if not found.drafted:
        _travel(clock, [1], clock.num_stages, forwards=0, overlap=True)
        return
    size = config.micro_batch.size
    num_steps = clock.num_stages + math.ceil((found.length - 1) / size)
    sizes = [1] + [size] * num_steps
    _travel(clock, sizes, num_steps, forwards=size, overlap=True)


LAWS: dict[str, Law] = {
    AUTOREGRESSIVE: _autoregressive,
    "eagle": _eagle,
    "naive_pp": _naive,
    "pruned_pp": _pruned,
    "flowspec": _pruned,
    "spd": _layered,
    "pipedec": _layered,
    "ppsd": _ppsd,
    "pipeinfer": _pipeinfer,
}


class Refusal(Exception):
    """One line: why no number is given."""


def replay_log(result: DecodeResult, clock: VirtualClock) -> None:
    """The recorded steps once more, on a clock with other costs."""
    for times, *event in result.step_log:
        for _ in range(times):
            if len(event) == 1:
                clock.serial_draft(event[0])
            else:
                forwards, overlap, *rows = event
                clock.step(rows, draft_forwards=forwards, overlap=bool(overlap))


def replay_law(result: DecodeResult, clock: VirtualClock, config: EngineConfig) -> None:
    """The recorded rounds on the clock's number of stages."""
    for found in rounds_of(result):
        LAWS[config.schedule](clock, found, config)


def follows_law(result: DecodeResult, clock: VirtualClock, config: EngineConfig) -> bool:
    """Whether the recorded steps are those of the law; the clock is a fresh one of that run."""
    replay_law(result, clock, config)
    return clock.log == result.step_log


def check_cost(config: EngineConfig, recorded: CostModel, cost: CostModel) -> None:
    """Refuse another cost model where the run decided by its own how much to draft.

    Args:
        recorded, cost: with the draft's cost filled in.
    """
    if cost == recorded:
        return
    if config.schedule == "flowspec" and config.expansion.enabled and not config.expansion.depth:
        raise Refusal(
            "flowspec drafted as much as fits beside a step under its own cost model; record a run "
            "under this one, or with --expansion-depth"
        )
    if config.schedule == "pipeinfer" and config.micro_batch.size > 1 and recorded.row + cost.row:
        raise Refusal(
            "pipeinfer chose the size of its micro-batches by its own cost model's row; record a "
            "run under this one"
        )


def basis_of(config: EngineConfig, draft_type: str | None) -> str:
    """ "exact" or "assumed": what the figures on another number of stages rest on.

    assumed: guesses depend on n, and those on another n are taken to be right as often.
    """
    schedule = config.schedule
    if schedule == AUTOREGRESSIVE:
        return "exact"
    if schedule in ("eagle", "naive_pp"):
        _require_known(draft_type, TREE_DRAFTS)
        return "exact"
    if not config.is_chain:
        raise Refusal(
            "rows of a tree are pruned before they are verified, and which ones depends on n; only "
            "chains, and trees of eagle and naive_pp, are replayed on other stages"
        )
    if schedule in ("pruned_pp", "flowspec"):
        _require_known(draft_type, TREE_DRAFTS)
        return "exact"
    if schedule == "pipeinfer":
        _check_micro_batches(config)
    if schedule == "ppsd" and config.num_stages == 1:
        raise Refusal("on one stage ppsd tests no guess; record a run on two stages or more")
    return "exact" if draft_type in TEXT_DRAFTS else "assumed"


def _require_known(draft_type: str | None, known: set[str]) -> None:
    if draft_type not in known:
        raise Refusal(f"nothing is known of what the guesses of a {draft_type} draft depend on")


def _check_micro_batches(config: EngineConfig) -> None:
    batch = config.micro_batch
    ends_early = batch.accept + batch.recovery > 0
    if ends_early or batch.max_in_flight or batch.give_up > SURE_RECOVERY:
        raise Refusal(
            "pipeinfer's thresholds (--accept, --recovery, --max-in-flight, --give-up above "
            f"{SURE_RECOVERY}) make micro-batches that depend on n; record a run on these stages"
        )
    if batch.size > 1 and config.cost.row:
        raise Refusal("pipeinfer chose the size of its micro-batches by its own cost model's row")
