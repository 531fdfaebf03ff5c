"""Measure a draft's speed-up during decoding, and shrink or pause a slow draft (never_slower)."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection

PARTS = (1.0, 0.5, 0.0)
"""Draft sizes to try, relative to the configured draft. 0 is no draft."""
WINDOW, PLAIN_WINDOW = 8, 2
"""Minimum tokens per timing window, with and without a draft. Autoregressive decoding takes the
same time for every token, so a short window is enough without a draft."""
MEMORY = 32
"""Timing windows remembered per part."""
HICCUP = 4.0
"""Factor above the median time per token. Slower windows are left out."""
PATIENCE = 8
"""Rounds to wait before fewer sequences get their own choice. Often a new request soon takes
the place of an ended one, and each change costs time."""
BUDGET = 0.0075
"""Maximum loss by each part's trials, as a fraction of the decoding time."""


class DraftMeter:
    """Timer for rounds. It chooses the part with the most tokens per second.

    A part is a fraction of the configured draft. If a trial of another part loses time, the part's
    next trial waits for loss / BUDGET. Two other parts are tried, so trials cost about 1.5 %.
    """

    def __init__(self, factor: float = 1, before: DraftMeter | None = None) -> None:
        """
        Args:
            factor: applied to the minimum tokens per window.
            before: meter for fewer sequences. The new meter begins with the same choice, and waits
                as long before it tries larger parts. It may try smaller parts at once, because
                drafts gain less with more sequences.
        """
        self._factor = factor
        self.part = PARTS[0] if before is None else before.best
        """Part in use until the next ``choose``."""
        self.total = 0.0
        """Total time in completed windows and around changes."""
        self._windows: dict[float, deque[tuple[float, int]]] = {
            part: deque(maxlen=MEMORY) for part in PARTS
        }
        """For each part, time and token count per recent window."""
        self._due = dict.fromkeys(PARTS, 0.0)
        """For each part, the earliest ``total`` at which it may be tried again."""
        if before is not None:
            larger = (part for part in PARTS if part > self.part)
            self._due |= {part: before._due[part] - before.total for part in larger}
        self._before, self._last = self.part, 0.0
        self._tokens, self._time = 0, 0.0

    @property
    def best(self) -> float:
        """Part with the shortest time per token so far, or the current part if none is measured."""
        measured = [part for part in PARTS if self._windows[part]]
        if not measured:
            return self.part
        return min(measured, key=lambda part: _time_per_token(self._windows[part]))

    def begin(self, now: float) -> None:
        """Start timing after a prompt, because its forward pass does not count as decoding."""
        self._last = now

    def count(self, num_tokens: int, now: float) -> None:
        """Count emitted tokens, and the time since the previous call."""
        self.add(num_tokens, now - self._last)
        self._last = now

    def add(self, num_tokens: int, time: float) -> None:
        """Add tokens and their time to the window."""
        self._tokens, self._time = self._tokens + num_tokens, self._time + time

    def charge(self, num_tokens: int, time: float) -> None:
        """Charge the part on trial with time around a change. No window contains this time."""
        self.total += time
        if self._windows[self.best]:
            self._charge(num_tokens, time, self._before if self.part == self.best else self.part)

    def drop_window(self) -> None:
        """Forget the current window."""
        self._tokens, self._time = 0, 0.0

    def choose(self) -> float:
        """Record the window and return the next part. Call this only with nothing in flight."""
        if self._tokens < self._factor * (WINDOW if self.part else PLAIN_WINDOW):
            return self.part
        self._windows[self.part].append((self._time, self._tokens))
        self.total += self._time
        best, before = self.best, self.part
        # The typical time, so that a hiccup delays no trial. The best part loses nothing.
        typical = _time_per_token(self._windows[before])
        self._charge(self._tokens, typical * self._tokens, before)
        self.drop_window()
        # Autoregressive decoding is tried first: it limits the possible loss.
        tried = [part for part in reversed(PARTS) if part != best and self._due[part] <= self.total]
        self.part = tried[0] if tried else best
        self._before = before if self.part != before else self._before
        return self.part

    def _charge(self, num_tokens: int, time: float, part: float) -> None:
        lost = time - _time_per_token(self._windows[self.best]) * num_tokens
        self._due[part] = max(self._due[part], self.total) + max(lost, 0.0) / BUDGET


class BatchMeter:
    """Timer for whole steps shared by sequences, with a ``DraftMeter`` per number of sequences.

    Drafts gain time with few sequences and lose time with many, so measurements for one number say
    little about another. Numbers between two powers of two share a meter.
    """

    def __init__(self, num_stages: int = 1) -> None:
        self._num_stages = num_stages
        self._meters: dict[int, DraftMeter] = {}
        self._power, self._used = 1, self._of(1)
        self._tokens, self._num_unsteady, self._num_fewer = 0, 0, 0

    @property
    def part(self) -> float:
        return self._used.part

    def begin(self, now: float) -> None:
        """Do nothing, because ``end_step`` leaves out steps with prompt rows."""

    def count(self, num_tokens: int, now: float) -> None:
        """Count a sequence's tokens. ``end_step`` adds the time."""
        self._tokens += num_tokens

    def choose(self) -> float:
        """Return the part to use. It changes only between steps."""
        return self.part

    def end_step(self, time: float, num_sequences: int, *, has_prompt_rows: bool) -> None:
        """Add a step for all sequences, and choose the next step's part.

        No window contains the round after a change, because heads then catch up on tokens, and rows
        in flight were drafted before the change.
        """
        tokens, self._tokens = self._tokens, 0
        power, before = 2 ** (max(num_sequences, 1).bit_length() - 1), self.part
        self._num_fewer = self._num_fewer + 1 if power < self._power else 0
        if power > self._power or self._num_fewer > PATIENCE * self._num_stages:
            self._power, self._num_fewer = power, 0
            self._used.drop_window()
            self._used = self._of(power)
        elif self._num_fewer:
            self._used.drop_window()
        elif self._num_unsteady:
            self._used.charge(tokens, time)
        elif not has_prompt_rows:
            self._used.add(tokens, time)
            self._used.choose()
        self._num_unsteady = max(self._num_unsteady - 1, 0)
        if self.part != before:
            self._num_unsteady = self._num_stages

    def _of(self, power: int) -> DraftMeter:
        if power not in self._meters:
            fewer = max((other for other in self._meters if other < power), default=None)
            before = None if fewer is None else self._meters[fewer]
            # Half the power: tokens of several sequences vary less than one sequence's.
            self._meters[power] = DraftMeter(max(1, power / 2), before)
        return self._meters[power]


def _time_per_token(windows: Collection[tuple[float, int]]) -> float:
    # Median: a hiccup must not raise the limit.
    longest = HICCUP * statistics.median(time / tokens for time, tokens in windows)
    kept = [(time, tokens) for time, tokens in windows if time <= longest * tokens]
    return sum(time for time, _ in kept) / sum(tokens for _, tokens in kept)
