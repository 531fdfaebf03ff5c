"""Read acceptance from a server's answers, or from its counters before and after an answer."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ...data_recipes.answers import RowFailed
from ...data_recipes.chat_client import TryAgain
from ...inference.result import DecodeResult
from ..record import Amount, Count, Counts

TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Stages = Annotated[int, Meta(ge=1, lt=2**31)]
SAMPLE = re.compile(
    r"^(?P<server>\w+):(?:spec_decode_num_)?"
    r"(?P<name>drafts|accepted_tokens_per_pos|generation_tokens)_total"
    r"(?:\{(?P<labels>.*)\})? (?P<value>\d+(?:\.\d+)?(?:[eE]\+?\d{1,2})?)$",
    re.MULTILINE,
)
"""A line of Prometheus' text format."""
POSITION = re.compile(r'position="(\d+)"')


class SpeculativeDecoding(msgspec.Struct):
    """Acceptance in an answer. ``num_steps`` and ``num_stages`` come from pipedraft alone."""

    acceptance_histogram: Counts
    per_step_accepted: Counts | None = None
    per_step_drafted: Counts | None = None
    num_steps: Count | None = None
    num_stages: Stages = 1


class CompletionMetrics(msgspec.Struct):
    speculative_decoding: SpeculativeDecoding | None = None
    time_to_first_token_ms: Amount | None = None
    generation_time_ms: Amount | None = None


class CompletionChoice(msgspec.Struct):
    text: str
    finish_reason: str | None = None
    token_ids: list[TokenId] | None = None


class Completion(msgspec.Struct):
    """The fields that are read of an answer to /v1/completions with one choice."""

    choices: Annotated[list[CompletionChoice], Meta(min_length=1, max_length=1)]
    metrics: CompletionMetrics | None = None

    @property
    def acceptance(self) -> SpeculativeDecoding | None:
        return None if self.metrics is None else self.metrics.speculative_decoding


def read_completion(payload: Any) -> Completion:
    """Parse an answer, or raise TryAgain."""
    try:
        return msgspec.convert(payload, Completion)
    except msgspec.ValidationError as error:
        raise TryAgain(f"answer is not a completion ({error})") from error


@dataclass(frozen=True)
class Counters:
    """A server's counters over all requests so far."""

    generated: int
    """Tokens of all outputs."""
    drafts: int
    """Verification rounds with draft tokens."""
    accepted: tuple[int, ...]
    """Rounds that accepted the first, second, ... draft token."""

    def __sub__(self, other: "Counters") -> "Counters":
        pairs = zip(self.accepted, other.accepted, strict=True)
        return Counters(
            self.generated - other.generated,
            self.drafts - other.drafts,
            tuple(a - b for a, b in pairs),
        )

    @property
    def histogram(self) -> list[int]:
        """Return how many rounds accepted 0, 1, 2, ... draft tokens."""
        at_least = (self.drafts, *self.accepted, 0)
        return [a - b for a, b in zip(at_least, at_least[1:], strict=False)]


def read_counters(text: str) -> Counters | None:
    """Return the counters in a /metrics page in vLLM's form, or None if the page lacks them.

    Several engines behind one address are added up.
    """
    pages: dict[str, dict[tuple[str, int], int]] = {}
    for sample in SAMPLE.finditer(text):
        position = POSITION.search(sample["labels"] or "")
        key = sample["name"], int(position[1]) if position else 0
        counts = pages.setdefault(sample["server"], {})
        counts[key] = counts.get(key, 0) + int(float(sample["value"]))
    for counts in pages.values():
        accepted = [
            counts[name, place] for name, place in sorted(counts) if name.startswith("accepted")
        ]
        if accepted and {("drafts", 0), ("generation_tokens", 0)} <= counts.keys():
            return Counters(counts["generation_tokens", 0], counts["drafts", 0], tuple(accepted))
    return None


@dataclass(frozen=True)
class ChainRound:
    """One verification round of a chain."""

    accepted: int
    tested: int
    """Draft tokens tested: the accepted ones, and the first rejected one if there is any."""
    length: int
    """Tokens emitted."""

    @property
    def end(self) -> str:
        """Return the letter in ``DecodeResult.round_ends``."""
        if self.length == self.accepted:
            return "a"
        return "r" if self.tested > self.accepted else "u"


def rounds_of(found: SpeculativeDecoding, num_tokens: int) -> tuple[list[ChainRound], bool]:
    """Return an answer's rounds, and whether their order is known.

    - A server may count accepted draft tokens behind the answer's end. The last round is cut there,
      as in this project's own engine. Without an order, the longest round is cut.
    - vLLM does not count rounds without draft tokens (n-gram lookup found nothing). They are added,
      and the order is then unknown.

    Args:
        num_tokens: tokens of the answer after the first one.

    Raises:
        RowFailed: the counts do not fit the answer.
    """
    histogram = found.acceptance_histogram
    fault = RowFailed(f"acceptance counts do not fit an answer of {num_tokens + 1} tokens")
    if sum(histogram) > num_tokens:  # every round emits a token
        raise fault
    accepted, drafted = found.per_step_accepted, found.per_step_drafted
    is_ordered = accepted is not None and drafted is not None
    if accepted is not None and drafted is not None:
        if len(accepted) != len(drafted) or len(accepted) != sum(histogram):
            raise fault
        pairs = list(zip(accepted, drafted, strict=True))
    else:
        most = len(histogram) - 1
        pairs = [(j, most) for j, count in enumerate(histogram) for _ in range(count)]
    rounds = [ChainRound(a, min(a + 1, d), a + 1) for a, d in pairs]
    if any(one.tested < one.accepted for one in rounds):
        raise fault
    excess = sum(one.length for one in rounds) - num_tokens
    if excess > 0:
        last = rounds.pop()
        if excess >= last.length:
            raise fault
        kept = last.length - excess
        rounds.append(ChainRound(kept, kept, kept))
    rounds += [ChainRound(0, 0, 1)] * -excess
    return rounds, (is_ordered and excess >= 0) or len(set(rounds)) < 2


def decode_result(
    prompt_ids: list[int], said: Completion, found: SpeculativeDecoding
) -> DecodeResult:
    """Return an answer as this project's own engine would report it.

    L' counts vLLM's rounds as the steps of one stage. Modeled times are unknown.
    """
    choice, token_ids = said.choices[0], said.choices[0].token_ids or []
    rounds, is_ordered = rounds_of(found, max(len(token_ids) - 1, 0))
    tests = _by_position([one.tested for one in rounds])
    accepts = _by_position([one.accepted for one in rounds])
    metrics = said.metrics or CompletionMetrics()
    first, later = metrics.time_to_first_token_ms, metrics.generation_time_ms
    is_timed = first is not None and later is not None
    times_s = [first / 1e3, (first + later) / 1e3] if is_timed else []  # type: ignore[operator]
    return DecodeResult(
        prompt_ids=prompt_ids,
        token_ids=token_ids,
        text=choice.text,
        stop_reason="max_new_tokens" if choice.finish_reason == "length" else "eos",
        num_stages=found.num_stages,
        num_steps=len(rounds) if found.num_steps is None else found.num_steps,
        round_lengths=[one.length for one in rounds],
        round_ends="".join(one.end for one in rounds) if is_ordered else "",
        position_tests=tests,
        position_accepts=accepts + [0] * (len(tests) - len(accepts)),
        prefill_s=times_s[0] if is_timed else 0.0,
        token_times_s=times_s,
    )


def _by_position(counts: Sequence[int]) -> list[int]:
    """Return, for each position, how many rounds have at least so many tokens."""
    return [sum(count > place for count in counts) for place in range(max(counts, default=0))]
