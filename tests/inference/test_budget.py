"""Automatic budgets: as many draft tokens as are worth it, the same output, fewer if rows cost
more."""

import math

import numpy as np
import pytest
from decode_runs import PROMPTS, engine_for, greedy_reference
from markov_runs import PROMPT, markov_engine
from tiny_models import tiny_llama

from pipedraft.eval.replay import cost_conflict
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.cost_model import CostModel
from pipedraft.inference.shapes import RowCosts, rows_that_pay
from pipedraft.inference.sources import tree_source
from pipedraft.inference.sources.tree_source import TreeSource
from pipedraft.models.heads.language_model import LanguageModelDraft

AUTO = [
    {"schedule": "spd", "tree_width": "auto"},
    {"schedule": "ppsd", "tree_width": "auto"},
    {"schedule": "pipedec", "tree_width": "auto"},
    {"schedule": "eagle", "tree": "dynamic:3:4:auto"},
    {"schedule": "naive_pp", "tree": "dynamic:3:4:auto"},
    {"schedule": "pruned_pp", "tree": "dynamic:3:4:auto"},
    {"schedule": "flowspec", "tree": "dynamic:3:4:auto", "expansion_tokens": "auto"},
    {"schedule": "flowspec_continued", "step_tokens": "auto"},
    {"schedule": "pipeinfer", "draft_tokens": "auto", "branches": 2},
]


def best_count(scores, costs):
    """Return the best count, by trying all."""
    tokens = [costs.tokens + sum(map(math.exp, scores[:k])) for k in range(len(scores) + 1)]
    rates = [made / (costs.time + k * costs.row) for k, made in enumerate(tokens)]
    return int(np.argmax(rates))


def test_the_rows_that_pay_make_the_most_tokens_per_time():
    rng = np.random.default_rng(0)
    counts = []
    for _ in range(300):
        scores = sorted(-rng.exponential(2, size=rng.integers(0, 12)), reverse=True)
        tokens, time, row = rng.uniform(0.5, 40), rng.uniform(0.1, 9), rng.exponential(0.1)
        costs = RowCosts(tokens=tokens, time=time, row=row)
        counts.append(rows_that_pay(scores, costs))
        assert counts[-1] == best_count(scores, costs)
    assert min(counts) == 0 and len(set(counts)) > 8


def test_free_rows_all_pay_but_those_that_are_never_right():
    costs = RowCosts(tokens=1, time=1, row=0)
    assert rows_that_pay([-1.0, -50.0, -math.inf], costs) == 2


@pytest.fixture(scope="module")
def pair():
    target = tiny_llama(layers=4, vocab=16)
    return target, LanguageModelDraft(target, target)


def decode(pair, way, places=(0, 1, 2, 3), **shared):
    target, draft = pair
    draft = None if way["schedule"] == "autoregressive" else draft
    engine = engine_for(target, draft=draft, max_new_tokens=24, **way, **shared)
    return [engine.decode(PROMPTS[i], prompt_index=i) for i in places]


@pytest.fixture(scope="module")
def plain(pair):
    results = decode(pair, {"schedule": "autoregressive"}, temperature=1.0)
    return [result.token_ids for result in results]


@pytest.mark.parametrize("row", [0.0, 0.3])
@pytest.mark.parametrize("way", AUTO, ids=lambda way: way["schedule"])
def test_outputs_are_the_targets_whatever_rows_cost(way, row, pair, plain):
    """Compare greedy outputs and, with noise shared by target and draft, outputs at temperature 1.
    Each way decodes all four prompts."""
    greedy, sampled = (1, 3) if row else (2, 0)
    cost = CostModel(row=row, link_row=row / 9, head_row=row / 9, draft_forward=1 / 16)
    (result,) = decode(pair, way, [greedy], cost=cost)
    assert result.token_ids == greedy_reference(pair[0], PROMPTS[greedy], 24)
    (result,) = decode(pair, way, [sampled], cost=cost, temperature=1.0)
    assert result.token_ids == plain[sampled]


@pytest.mark.parametrize("way", AUTO, ids=lambda way: way["schedule"])
def test_fewer_rows_enter_where_they_cost_more(way, pair):
    rows = []
    for row in (0.0, 2.0):
        cost = CostModel(row=row, draft_forward=1 / 16)
        results = decode(pair, way, (1, 2), cost=cost, temperature=1.0)
        rows.append(max(max(e[3:]) for r in results for e in r.step_log if len(e) > 2))
    assert rows[1] < rows[0] <= 60


def steps_where_no_row_pays(**way):
    """Steps for five outputs on four stages; a further row costs nine times a segment's first."""
    cost = CostModel(row=9.0, draft_forward=1 / 16)
    engine = markov_engine(num_stages=4, max_new_tokens=24, cost=cost, **way)
    return [engine.decode(PROMPT, prompt_index=index).num_steps for index in range(5)]


CHAIN = {"schedule": "spd", "verifier": "gumbel"}
CONTINUED = {"schedule": "flowspec_continued", "step_tokens": "auto"}


def test_where_no_row_pays_a_tree_is_a_chain():
    """The first row of every step costs nothing extra, so each step has one."""
    assert steps_where_no_row_pays(**CONTINUED) == steps_where_no_row_pays(**CHAIN)


def best_child_alone(tree, leaves, best_2QW, width, sampling):
    """Add one child; or a child already in the tree takes its place."""
    tokens_K, scores_K = best_2QW.flatten(1)
    place = int(scores_K.argmax())
    if sampling.worth(tree, scores_K[place : place + 1].tolist()):
        parent = leaves[place // best_2QW.shape[2]]
        tree.add(parent, int(tokens_K[place]), float(scores_K[place]))


@pytest.mark.parametrize("mutant", ["asked_once", "counts_what_is_on_its_way"])
def test_a_free_row_that_is_left_out_is_noticed(mutant, monkeypatch):
    if mutant == "asked_once":  # a draft token whose children were not worth it gets none any more
        whole = TreeSource._rows_to_continue
        monkeypatch.setattr(
            TreeSource, "_rows_to_continue", lambda self, *args: whole(self, *args[:3])
        )
    else:
        monkeypatch.setattr(tree_source, "add_children", best_child_alone)
    assert sum(steps_where_no_row_pays(**CONTINUED)) > sum(steps_where_no_row_pays(**CHAIN))


FIXED_EXPANSION = {"schedule": "flowspec", "tree": "dynamic:3:4:auto", "expansion_tokens": 48}


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ({"schedule": "spd", "tree_width": "wide"}, "tree_width"),
        ({"schedule": "eagle", "tree": "dynamic:auto:10:59"}, "tree: .*59 .*or auto"),
        ({"schedule": "eagle", "tree": "chain:auto"}, "tree: 'chain:auto' is no tree"),
        ({"schedule": "eagle", "tree_width": "auto"}, "tree_width: schedule 'eagle' has no such"),
    ],
)
def test_other_words_are_refused(way, words):
    with pytest.raises(ValueError, match=words):
        DecodeConfig.of(**way)


@pytest.mark.parametrize("way", [*AUTO, FIXED_EXPANSION], ids=lambda way: way["schedule"])
def test_a_budget_of_auto_depends_on_the_cost_model_and_survives_a_file(way):
    config = DecodeConfig.of(**way)
    assert DecodeConfig.from_dict(config.to_dict()) == config
    assert "auto" in (config.schedule.label or "")
    conflict = cost_conflict(config.schedule, CostModel(), CostModel(row=0.1))
    assert "auto" in conflict and not config.schedule.is_chain
