"""One output of a request on its way: its text as far as it is certain, its end, its times."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipedraft.inference.arguments import TextStream
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.result import DecodeResult, Observer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from pipedraft.inference.serving.metrics import Metrics


@dataclass(frozen=True)
class Piece:
    """New text and tokens of a choice."""

    choice: "Choice"
    text: str
    is_drafted: bool = False
    """The last token was a draft token that the target accepted."""
    steps: Sequence[Sequence[int]] = ()
    """Rows of every stage in each step since the piece before."""
    is_last: bool = False


@dataclass(eq=False)
class Choice(Observer):
    """Filled by the thread that decodes, read by the one that answers once it has ended."""

    index: int
    prompt_ids: list[int]
    config: DecodeConfig
    stop_strings: Sequence[str]
    tokenizer: "PreTrainedTokenizerBase"
    metrics: "Metrics"
    tell: Callable[[Piece], None]
    """Called by the thread that decodes."""
    text: str = ""
    result: DecodeResult | None = None
    error: BaseException | None = None
    is_cancelled: bool = False
    """Ends at the next token; set from any thread."""
    is_stopped: bool = False
    """By a stop string."""
    has_ended: bool = False
    handle: Any = None
    """The decoder's."""
    _shown: int = 0
    """Characters of ``text`` that were told."""
    _steps: list[Sequence[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stream = TextStream(self.tokenizer)
        self.submitted_s = time.monotonic()
        self.started_s = self.first_s = self.last_s = self.step_s = math.nan

    # -- by the thread that decodes ---------------------------------------------------------

    def start(self) -> None:
        self.started_s = self.step_s = time.monotonic()
        self.metrics.started(len(self.prompt_ids), self.started_s - self.submitted_s)

    def step(self, rows: Sequence[int]) -> None:
        now_s = time.monotonic()
        self.metrics.stepped(now_s - self.step_s)
        self.step_s = now_s
        self._steps.append(tuple(rows))

    def token(self, token: int, is_drafted: bool) -> bool:
        now_s = time.monotonic()
        if math.isnan(self.first_s):
            self.first_s = self.step_s = now_s
            self.metrics.first_token(now_s - self.submitted_s)
        else:
            self.metrics.next_token(now_s - self.last_s)
        self.last_s = now_s
        self.text += self.stream.add(token)
        self._cut()
        shown = len(self.text) if self.is_stopped else len(self.text) - self._held()
        self._tell(shown, is_drafted=is_drafted)
        return self.is_stopped or self.is_cancelled

    def end(self, result: DecodeResult | None, error: BaseException | None = None) -> None:
        """Nothing follows; without a result it was cancelled before its time, or has failed."""
        self.result, self.error = result, error
        if result is not None and not self.is_stopped:
            self.text += self.stream.finish(result.text)
            self._cut()
        self.has_ended = True
        self.metrics.ended(self)
        self._tell(len(self.text), is_last=True)

    def _tell(self, shown: int, **how: Any) -> None:
        piece = self.text[self._shown : shown]
        self._shown = max(shown, self._shown)
        steps, self._steps = self._steps, []
        self.tell(Piece(self, piece, steps=steps, **how))

    def _cut(self) -> None:
        """End the text before the first stop string in it."""
        places = [self.text.find(stop, self._shown) for stop in self.stop_strings]
        found = [place for place in places if place >= 0]
        if found:
            self.text, self.is_stopped = self.text[: min(found)], True

    def _held(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        longest = max(map(len, self.stop_strings), default=1) - 1
        for size in range(min(longest, len(self.text) - self._shown), 0, -1):
            if any(stop.startswith(self.text[-size:]) for stop in self.stop_strings):
                return size
        return 0

    # -- once it has ended ------------------------------------------------------------------

    @property
    def finish_reason(self) -> str:
        """Why a choice ended, as OpenAI names it; "abort": cancelled or failed."""
        if self.is_stopped:
            return "stop"
        if self.result is None or self.result.stop_reason == "stopped":
            return "abort"
        return "stop" if self.result.stop_reason == "eos" else "length"

    @property
    def num_tokens(self) -> int:
        return 0 if self.result is None else len(self.result.token_ids)

    def report(self) -> dict[str, object]:
        """Times in vLLM's per-request shape, and its acceptance figures with L', K and n."""
        between = self.last_s - self.first_s
        gaps, whole = self.num_tokens - 1, self.last_s - self.started_s
        return {
            "time_to_first_token_ms": known((self.first_s - self.started_s) * 1e3),
            "generation_time_ms": known(between * 1e3),
            "queue_time_ms": known((self.started_s - self.submitted_s) * 1e3),
            "mean_itl_ms": known(between / gaps * 1e3) if gaps > 0 else None,
            "tokens_per_second": known(self.num_tokens / whole) if whole > 0 else None,
            "speculative_decoding": None if self.result is None else acceptance(self.result),
        }


def acceptance(result: DecodeResult) -> dict[str, object]:
    """Acceptance counts of one output; a round is vLLM's speculative step."""
    accepted = [
        length - (end != "a")
        for length, end in zip(result.round_lengths, result.round_ends, strict=True)
    ]
    histogram = [0] * (max(accepted, default=0) + 1)
    for count in accepted:
        histogram[count] += 1
    return {
        "mean_acceptance_length": known(result.mean_acceptance_length),
        "draft_acceptance_rate": known(result.draft_acceptance_rate),
        "acceptance_histogram": histogram,
        "num_spec_steps": len(accepted),
        "num_accepted_draft_tokens": result.num_accepted,
        "num_draft_tokens": result.num_tested,
        "num_spec_tokens": len(histogram) - 1,
        "equivalent_acceptance_length": known(result.equivalent_acceptance_length),
        "num_steps": result.num_steps,
        "num_stages": result.num_stages,
    }


def known(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None
