"""Decode tiny targets, and compare outputs with the target's own output or distribution."""

# Q rows asked for, R rows of a tree, U draft vocabulary, V vocabulary

from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from itertools import product

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import chi2
from tiny_drafts import make_module
from tiny_models import tiny_llama

from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.engine import Engine
from pipedraft.inference.pipelines.local import LocalPipeline
from pipedraft.inference.rules.random import KeyedRandom, probabilities
from pipedraft.inference.rules.sampled import MatchVerifier
from pipedraft.inference.shapes import TreeShape
from pipedraft.inference.sources.base import DraftSampling, DraftSource, add_children, best_children
from pipedraft.inference.sources.eagle import EagleSource
from pipedraft.inference.sources.row_cache import RowCache
from pipedraft.inference.verdict import Verdict
from pipedraft.models.target import capture_hidden

NEW_TOKENS = 24
PROMPTS = [[5], [1, 2], [7, 3, 9, 3, 7, 1], [index * 5 % 16 for index in range(29)]]
CHAIN = TreeShape(kind="chain", depth=3)
SMALL = TreeShape(depth=3, top_k=3, num_tokens=8)
STATIC = TreeShape(kind="static", paths=((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
GREEDY = DraftSampling(MatchVerifier(0.0, KeyedRandom(0, 0)))
GREEDY_TEXTS: dict[tuple, list[int]] = {}
PUBLISHED = dict(expansion_depth=2, expansion_tokens=5)
WAYS = [
    {"schedule": "eagle", "tree": CHAIN},
    {"schedule": "eagle", "tree": SMALL},
    {"schedule": "eagle", "tree": STATIC},
    {"schedule": "naive_pp", "tree": SMALL},
    {"schedule": "pruned_pp", "tree": SMALL},
    {"schedule": "pruned_pp", "tree": CHAIN},
    {"schedule": "pipedec", "tree_width": 4},
    {"schedule": "flowspec_continued"},
    {"schedule": "flowspec_continued", **dict(expansion_depth=2, level_order=True)},
    {"schedule": "flowspec_continued", **dict(expansion_depth=4, step_tokens=3)},
    {"schedule": "flowspec", "tree": SMALL, **PUBLISHED},
    {"schedule": "flowspec", "tree": SMALL, **PUBLISHED, "level_order": True},
    {"schedule": "flowspec", "tree": SMALL, **PUBLISHED, "max_segment_rows": 1},
    {"schedule": "eagle", "tree": SMALL, "max_segment_rows": 3},
]


def prompts_of(number: int) -> list[list[int]]:
    """Return a short and a long prompt; the next number gets the other two."""
    return PROMPTS[number % 2 :: 2]


class PlainTokenizer:
    def decode(self, ids, skip_special_tokens=True):
        return " ".join(map(str, ids))


def engine_for(target, *, draft=None, source=None, connect=LocalPipeline, **options) -> Engine:
    config = DecodeConfig.of(**options)
    return Engine(target, PlainTokenizer(), config, draft, source=source, connect=connect)


# -- targets and drafts ---------------------------------------------------------------------


def attentive_llama(factor, **sizes):
    """Random weights scaled up for attention: else a wrong mask rarely changes a greedy token."""
    target = tiny_llama(layers=4, **sizes)
    for layer in target.model.layers:
        layer.self_attn.o_proj.weight.mul_(factor)
    return target


def friendly_module(target, **options):
    """Return a module whose draft tokens are often, not always, accepted: the target plus noise."""
    return make_module(target, **options).float()


class StatelessSource(DraftSource):
    """Drafts random tokens from ``vocab`` without reading the text."""

    vocab: int

    def begin(self, features, tokens):
        pass

    def observe(self, features, next_tokens):
        pass

    @property
    def draft_ids(self):
        return torch.arange(self.vocab)


class SimulatedSource(StatelessSource):
    """Drafts the target's greedy token with a given probability, among ``width`` children.

    Each call of ``add_children`` draws the acceptance at its position anew.
    """

    grows = ("layers", "trees", "micro_batches")

    def __init__(self, target, prompt, acceptance, length=400, seed=0, *, text=None):
        """``text``: prompt and greedy output, if known."""
        self.text = text or [*prompt, *greedy_reference(target, prompt, length)]
        self.vocab = target.config.get_text_config().vocab_size
        self.acceptance, self.rng, self.num_forwards = acceptance, np.random.default_rng(seed), 0
        self._right: list[bool] = []

    def leaf_logits(self, tree, rows, features):
        """Logits that rank the greedy token first, or second; a position always keeps its rank."""
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
        """Add children, with the accepted token among them or not; return the best child's row."""
        position = tree.position(leaf) + 1
        right = self.text[position] if position < len(self.text) else 0
        is_right = self.rng.random() < self.acceptance
        rows = []
        for rank in range(width):
            shift = rank if is_right else rank + 1
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
        """Grow a spine of first children with ``top_k - 1`` siblings at each node."""
        added, leaf = len(tree), 0
        for _ in range(shape.depth):
            self.num_forwards += 1
            leaf = self.add_children(tree, leaf, 1 if shape.is_chain else shape.top_k)
        return len(tree) - added

    def expand_tree(self, tree, expansion, sampling):
        """Run one forward: add the two best children below the best childless rows."""
        leaves = [row for row in range(len(tree)) if not tree.children(row)]
        leaves = sorted(leaves, key=lambda row: -tree.scores[row])[: expansion.width]
        logits_QU = self.leaf_logits(tree, leaves, {})
        width = 2 * len(leaves)
        best_2QW = best_children(tree, leaves, logits_QU, self.draft_ids, width, sampling)
        return add_children(tree, leaves, best_2QW, width, sampling)

    def deepen_tree(self, tree, levels, num_tokens):
        self.num_forwards += 1
        added = len(tree)
        self.add_children(tree, len(tree) - 1, 1)
        return len(tree) - added


def begun(head, target, text, size=None, source=None):
    """Return a source after the first ``size`` tokens of a text, and the remaining features to
    observe.

    ``source``: a source already used on another text.
    """
    taps = capture_hidden(target, torch.tensor([text]), set(head.taps))
    size = size or len(text)
    source = source or EagleSource(head)
    source.begin({layer: hidden[0, : size - 1] for layer, hidden in taps.items()}, text[:size])
    rest = {layer: hidden[0, size - 1 : -1] for layer, hidden in taps.items()}
    return source, rest


class RemembersText:
    """Mixin for a draft source: records the text for comparison with a computation from scratch."""

    text: list[int]

    def begin(self, features, tokens):
        self.text = []
        super().begin(features, tokens)
        self.text = list(tokens)

    def observe(self, features, next_tokens):
        super().observe(features, next_tokens)
        self.text += next_tokens

    def text_at(self, tree, row) -> list[int]:
        """Text plus the draft tokens on the path to a row; the root is the last text token."""
        path = []
        while row:
            path, row = [tree.tokens[row], *path], tree.parents[row]
        return self.text + path


def see_siblings(monkeypatch) -> None:
    """A known-bad mask: every tree row sees all rows."""
    right = RowCache.compute

    def mutant(cache, tree, rows, forward, **options):
        blind = lambda caches, visible: forward(caches, torch.ones_like(visible))  # noqa: E731
        return right(cache, tree, rows, blind, **options)

    monkeypatch.setattr(RowCache, "compute", mutant)


# -- greedy text ----------------------------------------------------------------------------


def greedy_reference(target, prompt, max_new_tokens=NEW_TOKENS) -> list[int]:
    """Greedy output from transformers, cached by weights, configuration and EOS tokens."""
    weights = sha256(f"{target.config} {target.generation_config}".encode())
    for name, weight in target.state_dict().items():
        weights.update(f"{name} {weight.dtype} {weight.device}".encode())
        weights.update(weight.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    key = (weights.digest(), *prompt, max_new_tokens)
    if key not in GREEDY_TEXTS:
        ids = torch.tensor([prompt])
        output = target.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens
        )
        GREEDY_TEXTS[key] = output[0, len(prompt) :].tolist()
    return [*GREEDY_TEXTS[key]]


def decode_exactly(engine, prompt, expected=None):
    """Decode and assert the greedy output from transformers, or ``expected`` if given."""
    if expected is None:
        length = engine.config.max_new_tokens
        expected = greedy_reference(engine.target.model, prompt, length)
    result = engine.decode(prompt)
    assert result.token_ids == expected, (engine.config, prompt)
    assert sum(result.round_lengths) == result.num_tokens
    return result


def count_tests(results: Sequence) -> tuple[int, int]:
    """Sum the tested and the accepted draft tokens."""
    return sum(r.num_tested for r in results), sum(r.num_accepted for r in results)


def simulate(target, prompt, acceptance, *, text=None, **options):
    """Decode exactly on four stages, with draft tokens accepted at a given probability."""
    options = {"num_stages": 4, "max_new_tokens": NEW_TOKENS, **options}
    length = options["max_new_tokens"]
    source = SimulatedSource(target, prompt, acceptance, length, text=text)
    expected = source.text[len(prompt) :][:length]
    return decode_exactly(engine_for(target, source=source, **options), prompt, expected)


def simulated_texts(target, length, *, prompts=PROMPTS, **options) -> list[list[int]]:
    """Decode prompts on four stages with often rejected draft tokens."""
    texts = []
    for prompt in prompts:
        source = SimulatedSource(target, prompt, 0.7, length)
        engine = engine_for(target, source=source, num_stages=4, max_new_tokens=length, **options)
        texts.append(engine.decode(prompt).token_ids)
    return texts


def plain_text(target, prompt, *, prompt_index=0, **options) -> list[int]:
    """Decode without a draft."""
    options = {"max_new_tokens": NEW_TOKENS, **options}
    engine = engine_for(target, schedule="autoregressive", num_stages=1, **options)
    return engine.decode(prompt, prompt_index=prompt_index).token_ids


# -- sampling -------------------------------------------------------------------------------

VOCAB = 4


@cache
def sampling_target():
    return tiny_llama(layers=2, hidden=16, vocab=VOCAB, heads=2, kv_heads=1)


class Script:
    """Uniforms by purpose instead of by hash."""

    def __init__(self, **values: float) -> None:
        self.values = values

    def uniform(self, position: int, purpose: str, attempt: int = 0) -> float:
        return self.values[purpose]


def simplex_points(size: int, parts: int = 4) -> list[torch.Tensor]:
    """Distributions with entries in multiples of 1 / parts, zeros included."""
    points = [p for p in product(range(parts + 1), repeat=size) if sum(p) == parts]
    return [torch.tensor(p, dtype=torch.float64) / parts for p in points]


def surplus(one_hot_EV, p_EV) -> tuple[float, int]:
    """Return the chi-square statistic over token counts, and its degrees of freedom."""
    excess_U = (one_hot_EV - p_EV).sum(0)[:-1]  # the last one follows from the others
    p_EU = p_EV[:, :-1]
    covariance_UU = torch.diag(p_EU.sum(0)) - p_EU.T @ p_EU
    return float(excess_U @ torch.linalg.solve(covariance_UU, excess_U)), len(excess_U)


def distribution_p_value(target, draft, *, samples=330, **options) -> float:
    """Return the p-value for sampled outputs under the target's distribution.

    Every token is compared with its probabilities under the target given all tokens before it.
    Tokens are counted in two ways. Grouping by the last two tokens shows a fault in any context.
    Pooling all tokens in probability order shows a preference for likely tokens from fewer samples.
    """
    options = {"num_stages": 2, "temperature": 1.3, "max_new_tokens": 8, **options}
    engine, prompt = engine_for(target, draft=draft, **options), [1, 2]
    texts = [engine.decode(prompt, prompt_index=index).token_ids for index in range(samples)]
    ids_SN = torch.tensor([prompt + text for text in texts])
    logits_EV = target(ids_SN).logits[:, 1:-1].flatten(0, 1).double()
    p_EV = torch.as_tensor(probabilities(logits_EV, options["temperature"]))
    one_hot_EV = F.one_hot(ids_SN[:, 2:].flatten(), VOCAB).double()
    before_E = (ids_SN[:, 1:-1] + VOCAB * ids_SN[:, :-2]).flatten()
    alike = [before_E == before for before in range(VOCAB**2)]
    found = [surplus(one_hot_EV[a], p_EV[a]) for a in alike if p_EV[a].sum(0).min() > 2]
    assert len(found) >= VOCAB
    order_EV = p_EV.argsort(-1)
    together = surplus(one_hot_EV.gather(1, order_EV), p_EV.gather(1, order_EV))
    apart = chi2.sf(sum(x for x, _ in found), sum(freedom for _, freedom in found))
    return 2 * min(apart, chi2.sf(*together))


def unlike_plain_text(target, draft, *, samples=100, **options) -> int:
    """Count sampled outputs unlike the baseline's with the same random numbers.

    Under the rules gumbel and match every output equals the baseline's, whatever is drafted. This
    test is stricter than a comparison of distributions.
    """
    options = {"temperature": 1.3, "max_new_tokens": 8, **options}
    engine = engine_for(target, draft=draft, num_stages=2, **options)
    results = [engine.decode([1, 2], prompt_index=index) for index in range(samples)]
    settings = (options["temperature"], options["max_new_tokens"], engine.config.rule)
    expected = plain_sampled_texts(target, *settings)
    assert sum(result.num_accepted for result in results) > samples / 5
    pairs = zip((result.token_ids for result in results), expected, strict=False)
    return sum(text != other for text, other in pairs)


@cache
def plain_sampled_texts(target, temperature, length, rule) -> list[list[int]]:
    options = {"temperature": temperature, "max_new_tokens": length, "verifier": rule}
    texts = [plain_text(target, [1, 2], prompt_index=index, **options) for index in range(100)]
    assert len(set(map(tuple, texts))) > 50
    return texts


def assert_sampled_like_the_target(target, draft, **options) -> None:
    """Assert the baseline's output under the rule gumbel, or its distribution under rejection."""
    if options.get("verifier") == "rejection":
        assert distribution_p_value(target, draft, **options) > 1e-3
    else:
        assert unlike_plain_text(target, draft, **{"verifier": "gumbel", **options}) == 0


class AcceptMostLikelyMutant(MatchVerifier):
    """Published fault: accept a greedy token with probability p(x) / q(x) although it was not
    sampled."""

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
                return Verdict([0], token, [True])
        positions = tree.positions(0, len(logits_RV))
        return super().walk(tree, self.target_tokens(logits_RV, positions))


def way_name(way) -> str:
    schedule, tree = way["schedule"], way.get("tree")
    name = schedule if isinstance(schedule, str) else schedule.name
    return name + (f"-{tree.kind}" if tree else "")


def paths_of(tree):
    paths = [()]
    for row in range(1, len(tree)):
        paths.append((*paths[tree.parents[row]], tree.tokens[row]))
    return paths
