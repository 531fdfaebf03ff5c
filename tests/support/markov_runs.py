"""An order-2 Markov chain as the target for whole pipelines: the law of every token is known.

Its stages hold no weights. They assert that a row sees exactly one token at every earlier position.
A stale, missing or sibling row fails where it is made.
"""

# V vocabulary, a, b the two tokens before; c the token after them

from dataclasses import replace
from functools import cache

import numpy as np
import torch
from decode_runs import PlainTokenizer
from scipy.stats import chi2

from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.cost_model import CostModel
from pipedraft.inference.engine import Engine
from pipedraft.inference.rules.filters import TokenFilters
from pipedraft.inference.rules.random import UNFILTERED, probabilities
from pipedraft.inference.sources.tree_source import TreeSource
from pipedraft.models.target import KeepRows, Segment

VOCAB, PROMPT = 4, [1, 2]


def tables() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [a, b, c] for the target, and for a draft in partial agreement.

    The seed is one of 40. With it, a correction that reuses its test's uniform is far from the law
    (noncentrality 212 in 1,800 tokens), and no token is rare (at least 0.045). Sum min(p, q) is
    0.69.
    """
    generator = torch.Generator().manual_seed(26)
    tables = torch.randn(2, VOCAB, VOCAB, VOCAB, generator=generator).double()
    target_abc = 0.9 * tables[0]
    return target_abc, target_abc + 1.8 * tables[1]


TARGET, DRAFT = tables()


class MarkovStage:
    """Stage without weights: keeps only the token and position for each row."""

    def __init__(self) -> None:
        self.committed: list[int] = []
        self.rows: list[tuple[int, int]] = []

    @property
    def num_speculative(self) -> int:
        return len(self.rows)

    def forward(self, segment: Segment, taps=(), is_wanted=None) -> Segment:
        """Hidden states [R, 2]: the newest two tokens visible to a row."""
        assert segment.lo == len(self.rows)
        newest = segment.hidden[:, 1] if segment.ids is None else segment.ids
        self.rows += zip(newest.tolist(), segment.positions.tolist(), strict=True)
        contexts = []
        for visible, position in zip(
            segment.visible.tolist(), segment.positions.tolist(), strict=True
        ):
            seen = {
                at: token for (token, at), sees in zip(self.rows, visible, strict=False) if sees
            }
            first = len(self.committed)
            assert len(seen) == sum(visible) and sorted(seen) == [*range(first, position + 1)]
            contexts.append([(self.committed[-2:] + [seen[at] for at in sorted(seen)])[-2:]])
        return replace(segment, ids=None, hidden=torch.tensor(contexts)[:, 0])

    def keep(self, keep: KeepRows) -> None:
        kept = [self.rows[row] for row in keep.rows if row < len(self.rows)]
        committed, self.rows = kept[: keep.num_committed], kept[keep.num_committed :]
        self.committed += [token for token, _ in committed]


class MarkovTarget:
    """Stand-in for a ``StagedTarget``."""

    max_positions, device = 10**9, torch.device("cpu")
    eos_token_ids: tuple[int, ...] = ()
    recompute_length = None

    def __init__(self, num_stages: int) -> None:
        self.num_stages, self.boundaries = num_stages, tuple(range(num_stages + 1))
        self.stages = [MarkovStage() for _ in range(num_stages)]

    def set_bitwise(self, is_on):
        assert not is_on

    def reserve(self, num_rows):
        pass

    def prefill(self, ids, taps=()):
        for stage in self.stages:
            stage.committed, stage.rows = ids.tolist(), []
        return TARGET[tuple(ids[-2:])], {}

    def can_choose(self, num_rows):
        return False

    def logits(self, hidden_R2):
        return TARGET[hidden_R2[:, 0], hidden_R2[:, 1]]


class MarkovSource(TreeSource):
    """Draft from the table, for every way to grow a tree."""

    target_vocab_size, draft_ids = VOCAB, torch.arange(VOCAB)

    def __init__(self) -> None:
        super().__init__(self)

    def logits(self, outputs_RV):
        return outputs_RV

    def begin(self, features, tokens):
        self._restart()
        self.text = list(tokens)

    def observe(self, features, next_tokens):
        self.text += next_tokens

    def _root_output(self, tree):
        return DRAFT[self.text[-2], self.text[-1]]

    def _compute(self, tree, rows):
        self.num_forwards += 1
        for row in rows:
            before = tree.tokens[tree.parents[row]]
            self._states[self._name(tree, row)] = DRAFT[before, tree.tokens[row]]


class MarkovEngine(Engine):
    def _stage(self, target):
        return MarkovTarget(self.config.num_stages)


def markov_engine(**options) -> Engine:
    options = {
        "num_stages": 4,
        "temperature": 1.0,
        "cost": CostModel(draft_forward=1 / 16),
        **options,
    }
    config = DecodeConfig.of(**options)
    source = None if config.schedule.grows is None else MarkovSource()
    return MarkovEngine(None, PlainTokenizer(), config, source=source)


def markov_texts(num_texts: int, **options) -> list[list[int]]:
    """Sampled outputs, each with its own random numbers."""
    engine = markov_engine(**options)
    results = [engine.decode(PROMPT, prompt_index=index) for index in range(num_texts)]
    num_tested = sum(result.num_tested for result in results)
    assert engine.config.schedule.grows is None or num_tested > num_texts
    return [result.token_ids for result in results]


@cache
def plain_texts(num_texts: int, length: int, rule: str, filters: TokenFilters) -> list[list[int]]:
    """Baseline outputs."""
    settings = {"max_new_tokens": length, "verifier": rule, **filters.active}
    return markov_texts(num_texts, schedule="autoregressive", num_stages=1, **settings)


def markov_p_value(texts, temperature=1.0, filters=UNFILTERED) -> float:
    """Return the p-value for tokens under the target's law, grouped by the two tokens before each.

    An impossible token decides the result alone.
    """
    counts_abc = np.zeros((VOCAB,) * 3)
    for text in texts:
        tokens = np.array([*PROMPT, *text])
        np.add.at(counts_abc, (tokens[:-2], tokens[1:-1], tokens[2:]), 1)
    p_abc = probabilities(TARGET, temperature, filters).numpy()
    if counts_abc[p_abc == 0].any():
        return 0.0
    expected_abc = counts_abc.sum(-1, keepdims=True) * p_abc
    statistic = freedom = 0.0
    for counts_c, expected_c in zip(
        counts_abc.reshape(-1, VOCAB), expected_abc.reshape(-1, VOCAB), strict=False
    ):
        possible = expected_c > 0
        if possible.any() and expected_c[possible].min() >= 2:
            parts_c = (counts_c - expected_c)[possible] ** 2 / expected_c[possible]
            statistic, freedom = statistic + parts_c.sum(), freedom + possible.sum() - 1
    assert freedom >= VOCAB
    return float(chi2.sf(statistic, freedom))
