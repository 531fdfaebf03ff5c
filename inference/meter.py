"""Never slower: measure the draft's speed-up while decoding, and shrink or pause a slow draft."""

import statistics
from collections import deque
from collections.abc import Collection

PARTS = (1.0, 0.5, 0.0)
"""Fractions of the configured draft to try; 0: no draft."""
WINDOW, PLAIN_WINDOW = 8, 2
"""Minimum tokens per timing window, with and without a draft. Autoregressive decoding takes the
same time for every token, so a short window is enough without a draft."""
MEMORY = 32
"""Timing windows remembered per part."""
HICCUP = 4.0
"""Windows whose time per token exceeds this many times the median are left out."""
BUDGET = 0.0075
"""Maximum loss by each part's trials, as a fraction of the decoding time."""


class DraftMeter:
    """Timer for rounds: chooses the part of the draft with the most tokens per second.

    After a trial of another part that lost time, the part's next trial waits for loss / BUDGET.
    There are two other parts to try, so all trials together cost about 1.5 %.
    """

    def __init__(self) -> None:
        self.part = PARTS[0]
        """Part in use until the next ``choose``."""
        self.total = 0.0
        """Total time in completed windows."""
        self._windows: dict[float, deque[tuple[float, int]]] = {
            part: deque(maxlen=MEMORY) for part in PARTS
        }
        """For each part, time and token count per recent window."""
        self._due = dict.fromkeys(PARTS, 0.0)
        """Per part: it may be tried again once ``total`` reaches this value."""
        self._tokens, self._time, self._last = 0, 0.0, 0.0

    def begin(self, now: float) -> None:
        """Start timing after a prompt: its forward pass does not count as decoding."""
        self._last = now

    def count(self, num_tokens: int, now: float) -> None:
        """Count emitted tokens, and the time since the last ones."""
        self._time += now - self._last
        self._tokens, self._last = self._tokens + num_tokens, now

    def choose(self) -> float:
        """Record the window and return the next part; call only while nothing is in flight."""
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
        # Autoregressive decoding is tried first: it limits the possible loss.
        tried = [part for part in reversed(PARTS) if part != best and self._due[part] <= self.total]
        self.part = tried[0] if tried else best
        return self.part


def _time_per_token(windows: Collection[tuple[float, int]]) -> float:
    # Median: a hiccup must not raise the limit.
    longest = HICCUP * statistics.median(time / tokens for time, tokens in windows)
    kept = [(time, tokens) for time, tokens in windows if time <= longest * tokens]
    return sum(time for time, _ in kept) / sum(tokens for _, tokens in kept)
