"""Never slower: measures what drafting is worth while it decodes, and shrinks or pauses it."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection

PARTS = (1.0, 0.5, 0.0)
"""Parts of the configured draft that are tried; 0: none."""
WINDOW, PLAIN_WINDOW = 8, 2
"""Tokens over which a part is timed, at least; plain decoding takes the same time for every token,
so that a few of them tell it."""
MEMORY = 32
"""Windows of a part that are remembered."""
HICCUP = 4.0
"""Windows that took so many times the median per token are left out."""
BUDGET = 0.0075
"""Part of the time that trials of each part may lose."""


class DraftMeter:
    """Chooses the part of the draft that makes the most tokens per time, by timing the rounds.

    The part in use is compared with the others by trials. A trial that loses time is repeated only
    when its loss is BUDGET of what has passed since, so all trials together cost about 1.5 %.
    """

    def __init__(self) -> None:
        self.part = PARTS[0]
        """In use until the next ``choose``."""
        self.total = 0.0
        """Time of all that was counted."""
        self._windows: dict[float, deque[tuple[float, int]]] = {
            part: deque(maxlen=MEMORY) for part in PARTS
        }
        """Time and tokens of each part's last windows."""
        self._due = dict.fromkeys(PARTS, 0.0)
        """Total time from which a part may be tried again."""
        self._tokens, self._time, self._last = 0, 0.0, 0.0

    def begin(self, now: float) -> None:
        """A sequence has its prompt behind it: time before is not decoding's."""
        self._last = now

    def count(self, num_tokens: int, now: float) -> None:
        """Count tokens that were emitted, and the time since the last ones."""
        self._time += now - self._last
        self._tokens, self._last = self._tokens + num_tokens, now

    def choose(self) -> float:
        """Where nothing is in flight: note the window, and return the part for the next one."""
        if self._tokens < (WINDOW if self.part else PLAIN_WINDOW):
            return self.part
        self._windows[self.part].append((self._time, self._tokens))
        self.total += self._time
        typical = {part: _time_per_token(own) for part, own in self._windows.items() if own}
        best = min(typical, key=lambda part: typical[part])
        lost = (typical[self.part] - typical[best]) * self._tokens
        # The best part lost nothing, so it is due at once.
        self._due[self.part] = self.total + lost / BUDGET
        self._tokens, self._time = 0, 0.0
        # Plain decoding is tried first: it says whether there is anything to lose.
        tried = [part for part in reversed(PARTS) if part != best and self._due[part] <= self.total]
        self.part = tried[0] if tried else best
        return self.part


def _time_per_token(windows: Collection[tuple[float, int]]) -> float:
    # Median: the hiccup itself must not raise the limit.
    longest = HICCUP * statistics.median(time / tokens for time, tokens in windows)
    kept = [(time, tokens) for time, tokens in windows if time <= longest * tokens]
    return sum(time for time, _ in kept) / sum(tokens for _, tokens in kept)
