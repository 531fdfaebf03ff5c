"""Losslessness of every schedule: greedy text is the target's own, sampled text has its law."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from conftest import tiny_llama, tiny_mistral, tiny_qwen3
from test_spd import make_module

from pipedraft.inference.closed_forms import continuous_acceptance_length
from pipedraft.inference.engine import Engine, EngineConfig
from pipedraft.inference.sources import DraftSource, add_most_likely
from pipedraft.inference.verify import MatchVerifier, probabilities

NEW_TOKENS = 24


class PlainTokenizer:
    def decode(self, ids, skip_special_tokens=True):
        return " ".join(map(str, ids))


def engine_for(target, *, draft=None, **options) -> Engine:
    return Engine(target, PlainTokenizer(), EngineConfig(**options), draft)


def greedy_reference(target, prompt, max_new_tokens=NEW_TOKENS) -> list[int]:
    ids = torch.tensor([prompt])
    output = target.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens
    )
    return output[0, len(prompt) :].tolist()


def friendly_module(target, **options):
    """A module that is right often but not always: noise on a module that starts at the target."""
    module = make_module(target, **options).float()
    return module


class SimulatedSource(DraftSource):
    """Guesses the target's own greedy token with a given probability, among ``width`` children.

    Whether the guess at a position is right is drawn once per visit of a growing verb.
    """

    grows = ("layers", "trees", "micro_batches")

    def __init__(self, target, prompt, acceptance, length=400, seed=0):
        self.text = [*prompt, *greedy_reference(target, prompt, length)]
        self.vocab = target.config.vocab_size
        self.acceptance, self.rng, self.num_forwards = acceptance, np.random.default_rng(seed), 0
        self._right: list[bool] = []

    def begin(self, features, tokens):
        pass

    def observe(self, features, next_tokens):
        pass

    @property
    def draft_ids(self):
        return torch.arange(self.vocab)

    def leaf_logits(self, tree, rows, features):
        """The right token first or, for a whole text at the same positions, second."""
        self.num_forwards += 1
        logits_QU = torch.zeros(len(rows), self.vocab)
        for logits_U, row in zip(logits_QU, rows, strict=True):
            position = tree.position(row) + 1
            right = self.text[position] if position < len(self.text) else 0
            best = right if self.is_right(position) else right + 1
            logits_U[best % self.vocab] = 4.0
            logits_U[(best - 1) % self.vocab] = 3.0
        return logits_QU

    def is_right(self, position):
        while len(self._right) <= position:
            self._right.append(self.rng.random() < self.acceptance)
        return self._right[position]

    def add_children(self, tree, leaf, width):
        """The right token's child among the others, or not; returns the best child's row."""
        position = tree.position(leaf) + 1
        right = self.text[position] if position < len(self.text) else 0
        guess_right = self.rng.random() < self.acceptance
        rows = []
        for rank in range(width):
            shift = rank if guess_right else rank + 1
            score = tree.scores[leaf] - float(rank) - 0.1
            rows.append(tree.add(leaf, (right + shift) % self.vocab, score))
        return rows[0]

    def grow_layer(self, tree, features, *, width, sampling):
        self.num_forwards += 1
        deepest = tree.depths[-1]
        leaves = [row for row in range(len(tree)) if tree.depths[row] == deepest]
        added = len(tree)
        for leaf in leaves:
            self.add_children(tree, leaf, width)
        return len(tree) - added

    def grow_tree(self, tree, shape, *, by_score, sampling):
        """A spine of first children with ``top_k - 1`` siblings at each node."""
        added, leaf = len(tree), 0
        for _ in range(shape.depth):
            self.num_forwards += 1
            leaf = self.add_children(tree, leaf, 1 if shape.is_chain else shape.top_k)
        return len(tree) - added

    def expand_tree(self, tree, num_forwards, width, *, by_score):
        """One forward: the two best children of the best rows that have none."""
        leaves = [row for row in range(len(tree)) if not tree.children(row)]
        leaves = sorted(leaves, key=lambda row: -tree.scores[row])[:width]
        logits_QU = self.leaf_logits(tree, leaves, {})
        return add_most_likely(tree, leaves, logits_QU, self.draft_ids, 2 * len(leaves))

    def deepen_tree(self, tree, levels, num_tokens):
        self.num_forwards += 1
        added = len(tree)
        self.add_children(tree, len(tree) - 1, 1)
        return len(tree) - added


PROMPTS = [[5], [1, 2], [7, 3, 9, 3, 7, 1], [index * 5 % 16 for index in range(29)]]
WAYS = [
    {"schedule": "autoregressive"},
    {"schedule": "spd"},
    {"schedule": "spd", "tree_width": 3},
]


@pytest.mark.parametrize(
    ("make_target", "num_stages", "query"),
    [
        (tiny_llama, 1, "newest"),
        (tiny_llama, 4, "all"),
        (tiny_qwen3, 3, "newest"),
        (tiny_mistral, 2, "all"),
    ],
)
def test_greedy_text_equals_transformers_greedy(make_target, num_stages, query):
    target = make_target(layers=4, vocab=16)
    draft = friendly_module(target, num_stages=num_stages, num_layers=1, query=query)
    for prompt in PROMPTS:
        expected = greedy_reference(target, prompt)
        for way in WAYS:
            engine = engine_for(
                target, draft=draft, num_stages=num_stages, max_new_tokens=NEW_TOKENS, **way
            )
            result = engine.decode(prompt)
            assert result.token_ids == expected, (way, prompt)
            assert sum(result.round_lengths) == result.num_tokens
            if way["schedule"] == "autoregressive":
                assert result.equivalent_acceptance_length == 1.0


@pytest.mark.parametrize("acceptance", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("width", [1, 2])
def test_greedy_text_is_the_targets_whatever_the_draft_guesses(acceptance, width):
    """Hits, misses, leaves and segments pruned to one row or to none, at every acceptance."""
    target = tiny_llama(layers=4, vocab=16)
    for prompt in PROMPTS:
        source = SimulatedSource(target, prompt, acceptance, length=NEW_TOKENS)
        config = EngineConfig(num_stages=4, tree_width=width, max_new_tokens=NEW_TOKENS)
        result = Engine(target, PlainTokenizer(), config, source=source).decode(prompt)
        assert result.token_ids == greedy_reference(target, prompt)


def test_steps_equal_the_closed_form_on_a_bernoulli_draft():
    target = tiny_llama(layers=4, vocab=16)
    length, acceptance = 400, 0.8
    source = SimulatedSource(target, [1, 2, 3], acceptance, length)
    config = EngineConfig(num_stages=4, max_new_tokens=length)
    result = Engine(target, PlainTokenizer(), config, source=source).decode([1, 2, 3])
    *finished, last = result.round_lengths
    steps = sum(4 + tokens - 1 for tokens in finished)
    assert result.num_steps == steps + 4 + last - 1
    expected = continuous_acceptance_length([result.draft_acceptance_rate], 4)
    assert abs(result.equivalent_acceptance_length - expected) < 0.08
    assert abs(result.draft_acceptance_rate - acceptance) < 0.07


def eos_target(eos):
    target = tiny_llama(layers=8, vocab=16)
    target.generation_config.eos_token_id = eos
    return target


@pytest.mark.parametrize("way", WAYS)
def test_text_stops_at_any_eos_token_and_counts_it(way):
    plain = greedy_reference(tiny_llama(layers=8, vocab=16), [1, 2, 3])
    for stop in (plain[0], plain[4]):
        target = eos_target([15 if stop != 15 else 14, stop])
        draft = friendly_module(target, num_stages=4, num_layers=1)
        engine = engine_for(target, draft=draft, num_stages=4, max_new_tokens=NEW_TOKENS, **way)
        result = engine.decode([1, 2, 3])
        assert result.token_ids == greedy_reference(target, [1, 2, 3])
        assert result.stop_reason == "eos" or len(result.token_ids) == NEW_TOKENS
        assert all(
            token not in target.generation_config.eos_token_id for token in result.token_ids[:-1]
        )


def test_text_stops_at_the_last_position_of_the_target():
    target = tiny_llama(layers=4, vocab=16)
    limit = target.config.max_position_embeddings
    prompt = [index % 16 for index in range(limit - 3)]
    draft = friendly_module(target, num_stages=2, num_layers=1)
    result = engine_for(target, draft=draft, num_stages=2).decode(prompt)
    assert (len(result.token_ids), result.stop_reason) == (3, "max_length")


# -- sampling: the first three tokens against the exact product law -------------------------

SAMPLES = 1500
VOCAB = 4


def exact_law(target, prompt, temperature) -> dict[tuple[int, ...], float]:
    law = {}
    for path in itertools.product(range(VOCAB), repeat=3):
        chance = 1.0
        for depth in range(3):
            logits = target(torch.tensor([[*prompt, *path[:depth]]])).logits[0, -1]
            chance *= float(probabilities(logits, temperature)[path[depth]])
        law[path] = chance
    return law


def total_variation(engine, prompt, law) -> float:
    counts = Counter(
        tuple(engine.decode(prompt, prompt_index=index).token_ids) for index in range(SAMPLES)
    )
    return 0.5 * sum(abs(counts[path] / SAMPLES - chance) for path, chance in law.items())


def noise_bound(law) -> float:
    """Mean plus five deviations of the total variation of as many exact draws."""
    rng = np.random.default_rng(1)
    chances = np.array(list(law.values()))
    draws = rng.multinomial(SAMPLES, chances / chances.sum(), size=200) / SAMPLES
    distances = 0.5 * np.abs(draws - chances).sum(1)
    return float(distances.mean() + 5 * distances.std())


def sampling_target():
    return tiny_llama(layers=2, hidden=16, vocab=VOCAB, heads=2, kv_heads=1)


SAMPLED_WAYS = [
    {"schedule": "autoregressive"},
    {"schedule": "spd", "verifier": "match"},
    {"schedule": "spd", "verifier": "rejection"},
    {"schedule": "spd", "tree_width": 3},
]


@pytest.mark.parametrize("way", SAMPLED_WAYS)
def test_sampled_text_has_the_targets_law(way):
    target = sampling_target()
    prompt, temperature = [1, 2], 1.3
    draft = friendly_module(target, num_stages=2, num_layers=1)
    engine = engine_for(
        target, draft=draft, num_stages=2, temperature=temperature, max_new_tokens=3, **way
    )
    law = exact_law(target, prompt, temperature)
    assert total_variation(engine, prompt, law) < noise_bound(law)


class AcceptMostLikelyMutant(MatchVerifier):
    """Published: accept a greedy guess with probability p(x) / q(x) although it was not sampled."""

    def judge(self, logits_RV, positions_R):
        return logits_RV

    def walk(self, tree, logits_RV):
        children = tree.children(0)
        if children:
            position = tree.position(0) + 1
            p = probabilities(logits_RV[0], self.temperature)
            token = tree.tokens[children[0]]
            q = np.exp(tree.scores[children[0]])
            if self.random.uniform(position, "accept") * q < p[token]:
                from pipedraft.inference.verify import Walk

                return Walk([0], token, [True])
        positions = tree.positions(0, len(logits_RV))
        return super().walk(tree, self.target_tokens(logits_RV, positions))


def test_the_law_test_catches_the_published_tree_rule(monkeypatch):
    import pipedraft.inference.engine as engine_module

    monkeypatch.setattr(engine_module, "MatchVerifier", AcceptMostLikelyMutant)
    target = sampling_target()
    draft = friendly_module(target, num_stages=2, num_layers=1)
    engine = engine_for(
        target, draft=draft, num_stages=2, temperature=1.3, max_new_tokens=3, verifier="match"
    )
    law = exact_law(target, [1, 2], 1.3)
    assert total_variation(engine, [1, 2], law) > noise_bound(law)


def test_the_match_rule_gives_the_same_text_whatever_the_schedule():
    target = tiny_llama(layers=8, vocab=16)
    draft = friendly_module(target, num_stages=4, num_layers=1)
    texts = set()
    for way in (
        {"schedule": "autoregressive"},
        {"schedule": "spd"},
        {"schedule": "spd", "tree_width": 5},
    ):
        engine = engine_for(
            target,
            draft=draft,
            num_stages=4,
            temperature=0.9,
            verifier="match",
            max_new_tokens=40,
            **way,
        )
        texts.add(tuple(engine.decode([3, 1, 4], prompt_index=7).token_ids))
    assert len(texts) == 1
