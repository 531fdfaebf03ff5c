"""What the filling scheduler knows about a request in flight."""

from collections.abc import MutableSequence
from dataclasses import dataclass, field
from typing import Protocol


class EngineRequest(Protocol):
    """Attributes of vLLM's ``Request`` that the filling reads or changes."""

    request_id: str
    max_tokens: int
    num_computed_tokens: int
    num_in_flight_tokens: int
    num_stale_output_tokens: int
    drop_stale_output: bool
    _output_token_ids: MutableSequence[int]
    _all_token_ids: MutableSequence[int]

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_tokens_with_spec(self) -> int: ...
    @property
    def num_output_tokens(self) -> int: ...
    def is_finished(self) -> bool: ...


@dataclass
class Flight:
    """Unverified tokens of one request."""

    is_plain: bool
    """True: this request gets no guesses."""
    epoch: int = 0
    """Number of restarts behind a rejected guess."""
    guesses: list[int] = field(default_factory=list)
    """The last tokens of the request, oldest first."""
    num_cached: int = 0
    """Tokens that the prefix cache may hash."""


@dataclass(frozen=True, kw_only=True)
class Sent:
    """One request's part of a scheduled step."""

    request: EngineRequest
    epoch: int
    start: int
    """Index of the first token computed in the step, counted from the prompt's first."""
    tokens: tuple[int, ...]
    is_guess: bool

    @property
    def end(self) -> int:
        """Index of the token that the step samples."""
        return self.start + len(self.tokens)


@dataclass
class Counts:
    """Counters since the engine was last idle."""

    steps: int = 0
    """Steps with at least one token."""
    guesses: int = 0
    hits: int = 0
    misses: int = 0
    stale: int = 0
    """Outputs dropped because an earlier guess was rejected."""
