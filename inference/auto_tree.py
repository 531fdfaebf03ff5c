"""Choose draft shapes for ``--tree auto`` by the measured tokens per second of each shape."""

import statistics
from collections import Counter, deque

from .shapes import NO_DRAFT, PAPER, TreeShape

DRAFTED = (
    *("chain:3", "chain:1", "chain:2", "chain:4", "chain:6"),
    *("dynamic:3:3:7", "dynamic:5:6:16", PAPER),
)
FIRST, *_OTHERS = map(TreeShape.parse, DRAFTED)
SHAPES = {shape.label: shape for shape in (FIRST, NO_DRAFT, *_OTHERS)}
"""Shapes to choose from. The first is drafted first; the others are tried in this order. No draft
is tried second, because it limits what a bad draft can cost."""
TRIAL = 3
"""Rounds per trial. With fewer, one slow round (capturing a CUDA graph) would be the median."""
TURN = 4
"""Rounds in a row with ``in_turn``. The first one after another shape is slower, as its code and
data have left the processor's caches."""
MEMORY = 32
"""Rounds remembered per shape."""
DOUBT = 8
"""Weight, in rounds, of the estimate from other shapes, so a few lucky rounds do not decide."""
DECAY = 0.998
"""Weight for a round's draft tokens, relative to the next round's."""
SIBLINGS = 1.25
"""Acceptance chances that each level of a tree is assumed to give. A chain's level gives 1."""
BUDGET, FIRST_BUDGET = 0.001, 0.03
"""Maximum time lost by each shape's trials, relative to all decoding time. A second trial may come
sooner: a busy machine, or a cold cache, may have slowed down the first one."""


class ShapeMeter:
    """Timer for rounds with different draft shapes.

    The meter times each shape's rounds. Rounds with a long chain also measure shorter chains,
    because the first draft tokens are the same. The meter tries a shape if it could be the best
    one. After a loss of time, a shape's next trial waits for loss / BUDGET. Several
    sequences may share a meter.
    """

    def __init__(self, *, in_turn: bool = False) -> None:
        """
        Args:
            in_turn: change the shape every few rounds, to compare all that may win.
        """
        self._in_turn = in_turn
        self._times = {text: deque[float](maxlen=MEMORY) for text in SHAPES}
        self._lengths = {text: deque[int](maxlen=MEMORY) for text in SHAPES}
        """Tokens per round."""
        depth = max(shape.depth for shape in SHAPES.values())
        self._tested, self._accepted = [0.0] * depth, [0.0] * depth
        """Tests and acceptances for each place in a chain, weighted by ``DECAY``."""
        self._due = dict.fromkeys(SHAPES, 0.0)
        self._uncharged = Counter[str]()
        """Rounds per shape since its last ``_charge``."""
        self._total = 0.0
        self._used, self._left = FIRST.label, TRIAL

    @property
    def shape(self) -> TreeShape:
        """Shape to draft in the next round."""
        return SHAPES[self._used]

    @property
    def speeds(self) -> dict[str, float]:
        """Expected tokens per second, for every shape timed so far."""
        return {text: self._speed(text) for text in SHAPES if self._times[text]}

    def count(self, shape: TreeShape, num_tokens: int, time: float) -> None:
        """Record a round with this shape, and choose the shape for the next one."""
        self._total += time
        self._times[shape.label].append(time)
        self._lengths[shape.label].append(num_tokens)
        if shape.is_chain:
            self._note_chain(shape.depth, num_tokens - 1)
        best = self._best()
        self._uncharged[shape.label] += 1
        if len(self._times[shape.label]) >= TRIAL:
            self._charge(shape.label, best)
        self._left -= shape == self.shape
        if self._left <= 0:
            self._choose(best)

    def _note_chain(self, depth: int, num_accepted: int) -> None:
        for place in range(min(depth, num_accepted + 1)):
            self._tested[place] = DECAY * self._tested[place] + 1
            self._accepted[place] = DECAY * self._accepted[place] + (place < num_accepted)

    def _charge(self, text: str, best: str) -> None:
        """Delay the shape's next trial in proportion to the time lost by its last rounds.

        Rounds of several sequences end one by one, so a trial may exceed ``TRIAL`` rounds.
        """
        lost = self._time(text) - self._tokens_of(text) / self._speed(best)
        budget = BUDGET if len(self._times[text]) > TRIAL else FIRST_BUDGET
        wait = self._uncharged.pop(text) * max(lost, 0.0) / budget
        self._due[text] = max(self._due[text], self._total) + wait

    def _best(self) -> str:
        return max((text for text in SHAPES if self._times[text]), key=self._speed)

    def _choose(self, best: str) -> None:
        if self._in_turn:
            in_question = (text for text in SHAPES if self._may_win(text, best))
            self._used = min(in_question, key=lambda text: len(self._times[text]))
            self._left = TURN
            return
        tried = [
            text
            for text in SHAPES
            if text != best and self._due[text] <= self._total and self._may_win(text, best)
        ]
        # Unmeasured shapes first.
        tried.sort(key=lambda text: len(self._times[text]) > 0)
        self._used = tried[0] if tried else best
        self._left = TRIAL if tried else 1

    def _may_win(self, text: str, best: str) -> bool:
        """Return False if other shapes' times show that an untried shape cannot be the fastest."""
        shape, least = SHAPES[text], 0.0
        if self._times[text]:
            return True
        points = {SHAPES[other].most: self._time(other) for other in SHAPES if self._times[other]}
        cheaper = sorted(size for size in points if size <= shape.most)
        if cheaper:
            first, last = cheaper[0], cheaper[-1]
            price = (points[last] - points[first]) / max(last - first, 1)
            # Half the price: more rows at once may cost less each.
            least = points[last] + 0.5 * max(price, 0.0) * (shape.most - last)
        # Optimistic: few rounds may underestimate acceptance, and siblings raise a tree's.
        most = self._chain_tokens(shape, 1.5 if shape.is_chain else 2.0)
        return most > self._speed(best) * least

    def _speed(self, text: str) -> float:
        return self._tokens_of(text) / self._time(text)

    def _time(self, text: str) -> float:
        # Low median: hiccups must not decide.
        return statistics.median_low(self._times[text])

    def _tokens_of(self, text: str) -> float:
        """Return the expected tokens per round."""
        shape, own = SHAPES[text], self._lengths[text]
        tokens = self._chain_tokens(shape, 1.0 if shape.is_chain else SIBLINGS)
        # A chain's own rounds are in the acceptance rates already.
        return tokens if shape.is_chain else (DOUBT * tokens + sum(own)) / (DOUBT + len(own))

    def _chain_tokens(self, shape: TreeShape, chances: float) -> float:
        """Return 1 + b_1 + b_1 b_2 + .., b_i = 1 - (1 - a_i)^chances, for acceptance rates a_i."""
        tokens = reached = 1.0
        rate, doubt = 0.5, 1
        for tested, accepted in zip(self._tested[: shape.depth], self._accepted, strict=False):
            # A place seldom tested is taken to be like the one before.
            rate = (accepted + doubt * rate) / (tested + doubt)
            doubt = DOUBT
            reached *= 1 - (1 - rate) ** chances
            tokens += reached
        return tokens
