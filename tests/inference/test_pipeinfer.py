"""PipeInfer's schedule, and a language model as the draft in every schedule."""

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from decode_runs import (
    CHAIN,
    GREEDY,
    NEW_TOKENS,
    PROMPTS,
    SMALL,
    STATIC,
    RemembersText,
    SimulatedSource,
    attentive_llama,
    decode_exactly,
    engine_for,
    greedy_reference,
    paths_of,
    simulate,
    simulated_texts,
)
from staged_targets import tiny
from tiny_drafts import make_module, noisy_copy
from tiny_models import tiny_llama, tiny_mistral

from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.cost_model import CostModel
from pipedraft.inference.pipelines.local import LocalPipeline
from pipedraft.inference.schedules.pipeinfer import PipeInfer
from pipedraft.inference.shapes import TreeShape
from pipedraft.inference.sources.base import DraftSource
from pipedraft.inference.sources.language_model import LanguageModelSource
from pipedraft.inference.tree import TokenTree
from pipedraft.models.heads.language_model import LanguageModelDraft

# Simulated draft tokens have the probabilities 0.62, 0.23 and 0.01.
OPTIONS = {
    "default": PipeInfer(),
    "one": PipeInfer(draft_tokens=1),
    "branches": PipeInfer(draft_tokens=4, branches=3),
    "cutoffs": PipeInfer(accept=0.7, recovery=0.1, decay=0.1),
    "restart": PipeInfer(restart=True),
    "restart, branches": PipeInfer(restart=True, draft_tokens=4, branches=2),
    "few in flight": PipeInfer(max_in_flight=2),
}


PROMPT, LONGEST = [1, 2, 3], 250


@cache
def target_and_text():
    target = tiny_llama(layers=4, vocab=16)
    return target, [*PROMPT, *greedy_reference(target, PROMPT, LONGEST)]


def simulated(acceptance, batch, *, new_tokens=NEW_TOKENS, **options):
    target, text = target_and_text()
    options = {"schedule": batch, "max_new_tokens": new_tokens, **options}
    return simulate(target, PROMPT, acceptance, text=text, **options)


# -- the schedule ---------------------------------------------------------------------------


@pytest.mark.parametrize("acceptance", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("batch", OPTIONS.values(), ids=OPTIONS)
def test_greedy_text_is_the_targets_whatever_the_draft_draft_tokens(batch, acceptance):
    for num_stages in (1, 3, 4):
        result = simulated(acceptance, batch, num_stages=num_stages)
        assert result.num_steps <= num_stages * result.num_tokens  # never slower than plain


@pytest.mark.parametrize("size", [1, 2, 4])
def test_steps_follow_the_closed_form(size):
    acceptance, num_stages = 0.8, 4
    result = simulated(acceptance, PipeInfer(draft_tokens=size), new_tokens=LONGEST)
    rounds = [num_stages + math.ceil((tokens - 1) / size) for tokens in result.round_lengths]
    assert result.num_steps == sum(rounds)
    alpha = result.draft_acceptance_rate
    # If rounds filled their micro-batches, with the same chance at every draft token.
    expected = 1 / ((1 - alpha) + alpha / (size * num_stages))
    assert abs(alpha - acceptance) < 0.1
    # A round that ends inside a micro-batch has paid for the whole micro-batch.
    assert 0.85 * expected < result.equivalent_acceptance_length < expected * 1.02


def test_a_draft_that_is_never_right_is_asked_rarely():
    """Output and steps stay the same; an occasional probe notices if draft tokens get accepted."""
    eager, rare = (simulated(0.0, PipeInfer(give_up=floor), new_tokens=80) for floor in (0, 0.1))
    assert rare.token_ids == eager.token_ids and rare.num_steps == eager.num_steps
    assert rare.num_drafted < 0.25 * eager.num_drafted
    useful = [simulated(0.6, PipeInfer(give_up=floor), new_tokens=80) for floor in (0, 0.1)]
    assert useful[0].num_steps == useful[1].num_steps


def test_a_draft_that_becomes_right_is_asked_again(monkeypatch):
    monkeypatch.setattr(SimulatedSource, "is_right", lambda source, position: position > 50)
    """No pause is longer than the useless time before it, so twice that time is the worst."""
    result = simulated(0.0, PipeInfer(), new_tokens=120)
    assert result.num_steps < 4 * 96 + 24


def test_starting_again_at_the_root_costs_steps():
    """The longer the rounds, the more steps it costs; rounds that end at once cost no more."""
    for acceptance, least in ((0.4, 1.0), (0.9, 1.05), (1.0, 1.5)):
        continued, restarted = (
            simulated(acceptance, PipeInfer(restart=restart), new_tokens=100)
            for restart in (False, True)
        )
        assert restarted.token_ids == continued.token_ids
        assert restarted.num_steps >= least * continued.num_steps
    assert simulated(0.0, PipeInfer(restart=True)).equivalent_acceptance_length == 1.0


def test_drafting_stops_when_a_verdict_waits(monkeypatch):
    """The draft asks for a waiting verdict before every forward but a micro-batch's first."""
    monkeypatch.setattr(LocalPipeline, "verdict_waits", lambda pipeline: True)
    cut = simulated(0.8, PipeInfer(draft_tokens=4), new_tokens=100)
    monkeypatch.undo()
    assert cut.num_steps == simulated(0.8, PipeInfer(draft_tokens=1), new_tokens=100).num_steps


def test_drafting_overlaps_the_stages():
    """A step waits only for the draft forwards beyond the stages' time."""
    for draft_forward, step in ((1 / 16, 1 / 4), (1 / 4, 3 / 4)):
        result = simulated(1.0, PipeInfer(), cost=CostModel(draft_forward=draft_forward))
        assert result.virtual_time == pytest.approx(result.num_steps * step)


class Largest:
    """Records the row count of the largest tree."""

    def __init__(self, monkeypatch) -> None:
        self.rows = 0
        segment = TokenTree.segment

        def watched(tree, start, stop):
            self.rows = max(self.rows, len(tree))
            return segment(tree, start, stop)

        monkeypatch.setattr(TokenTree, "segment", watched)


@pytest.mark.parametrize(("limit", "expected"), [(None, 12), (5, 7), (1, 1)])
def test_no_more_is_drafted_while_enough_is_under_way(limit, expected, monkeypatch):
    largest = Largest(monkeypatch)
    simulated(1.0, PipeInfer(max_in_flight=limit), new_tokens=60)
    assert largest.rows == expected


def test_a_wrong_mask_between_branches_is_noticed(monkeypatch):
    """Mutant: siblings attending to each other give another output."""
    segment = TokenTree.segment

    def mutant(tree, start, stop):
        cut = segment(tree, start, stop)
        return replace(cut, visible=torch.ones_like(cut.visible))

    target, batch = attentive_llama(8, vocab=16), PipeInfer(draft_tokens=4, branches=3)
    expected = [greedy_reference(target, prompt, 32) for prompt in PROMPTS]
    assert simulated_texts(target, 32, schedule=batch) == expected
    monkeypatch.setattr(TokenTree, "segment", mutant)
    assert simulated_texts(target, 32, schedule=batch) != expected


# -- micro-batches --------------------------------------------------------------------------


class Fixed(DraftSource):
    """Token t is followed by t + 1, t + 2, t + 3 with fixed probabilities."""

    def __init__(self, *levels) -> None:
        self.levels, self.num_forwards = levels, 0

    @property
    def draft_ids(self):
        return torch.arange(10, 20)

    def leaf_logits(self, tree, rows, features):
        self.num_forwards += 1
        logits_QU = torch.full((len(rows), 10), -30.0)
        for logits_U, row in zip(logits_QU, rows, strict=True):
            for rank, probability in enumerate(self.levels[tree.depths[row]]):
                logits_U[(tree.tokens[row] + 1 + rank) % 10] = math.log(probability)
        return logits_QU


def paths(tree) -> set[tuple[int, ...]]:
    return {*paths_of(tree)} - {()}


def grow(source, tree, batch, *, start=0, shift=0.0, interrupted=lambda: False):
    return batch.grow(
        source,
        tree,
        {},
        start=start,
        shift=shift,
        sampling=GREEDY,
        size=batch.draft_tokens,
        interrupted=interrupted,
    )


def test_a_chain_ends_at_its_size_or_where_the_draft_is_unsure():
    source = Fixed([0.9, 0.1], [0.6, 0.4], [0.3, 0.25, 0.25, 0.2], [1.0])
    for accept, expected in ((0.0, 3), (0.59, 2), (0.61, 1), (0.95, 0)):
        tree = TokenTree(10, 0)
        rows = grow(source, tree, PipeInfer(accept=accept))
        assert rows == list(range(1, expected + 1)) == list(range(1, len(tree)))
        assert tree.tokens == [10, 11, 12, 13][: expected + 1]
    assert math.isclose(tree.scores[0], 0.0)
    tree = TokenTree(10, 0)
    grow(source, tree, PipeInfer(accept=0.9), shift=-0.5)
    assert len(tree) == 3 and math.isclose(math.exp(tree.scores[2]), 0.9 * 0.6, rel_tol=1e-5)


def test_branches_share_the_size_and_end_one_by_one():
    source = Fixed([0.5, 0.3, 0.2], [0.7, 0.3], *[[0.9, 0.1]] * 9)
    tree = TokenTree(10, 0)
    grow(source, tree, PipeInfer(draft_tokens=5, branches=2, split=0.25))
    # Two children of the root, and no third branch afterwards.
    assert paths(tree) == {(11,), (12,), (11, 12), (12, 13), (11, 12, 13)}
    tree = TokenTree(10, 0)
    grow(source, tree, PipeInfer(draft_tokens=9, branches=4, split=0.25), shift=0.04)
    assert paths(tree) >= {(11,), (12,), (11, 12), (11, 13), (12, 13), (12, 14)}
    assert (13,) not in paths(tree)
    tree = TokenTree(10, 0)
    grow(source, tree, PipeInfer(draft_tokens=9, branches=4, split=0.25), shift=0.1)
    assert all(path[0] == 11 for path in paths(tree))


def test_rows_that_the_tree_has_count_but_are_not_added_again():
    source = Fixed([1.0], [1.0], [1.0], [1.0], [1.0])
    tree = TokenTree(10, 0)
    first = grow(source, tree, PipeInfer(draft_tokens=2))
    assert grow(source, tree, PipeInfer(draft_tokens=2)) == first
    assert grow(source, tree, PipeInfer(draft_tokens=2), start=first[-1]) == [3, 4]


def test_a_micro_batch_is_interrupted_between_two_forwards():
    source, tree = Fixed([1.0], [1.0], [1.0]), TokenTree(10, 0)
    answers = iter([False, True])
    assert grow(source, tree, PipeInfer(), interrupted=lambda: next(answers)) == [1, 2]
    assert source.num_forwards == 2


# -- a language model as the draft ----------------------------------------------------------

# Random weights are never as sure as the simulated draft.
LM_OPTIONS = OPTIONS | {"cutoffs": PipeInfer(accept=0.3, recovery=0.1, decay=0.1)}
WAYS = [
    *({"schedule": batch} for batch in LM_OPTIONS.values()),
    {"schedule": "spd"},
    {"schedule": "pipedec", "tree_width": 3},
    {"schedule": "eagle", "tree": CHAIN},
    {"schedule": "eagle", "tree": STATIC},
    {"schedule": "naive_pp", "tree": SMALL},
    {"schedule": "pruned_pp", "tree": SMALL},
    {"schedule": "pruned_pp", "tree": CHAIN},
    {"schedule": "flowspec_continued", "expansion_depth": 2, "step_tokens": 6},
    {"schedule": "flowspec", "tree": SMALL, "expansion_depth": 2},
]


def way_name(way) -> str:
    if isinstance(way["schedule"], PipeInfer):
        names = [name for name, batch in LM_OPTIONS.items() if batch == way["schedule"]]
        return "-".join(["pipeinfer", *names])
    return way["schedule"] + (f"-{way['tree'].kind}" if "tree" in way else "")


class Checked(RemembersText, LanguageModelSource):
    """Compares its logits with the model on the whole text up to a row, from scratch."""

    def __init__(self, draft) -> None:
        super().__init__(draft)
        self.num_checked = 0

    def _logits(self, tree, rows):
        logits_QV = super()._logits(tree, rows)
        assert self.text[-1] == tree.tokens[0]
        whole = [self.text_at(tree, row) for row in rows]
        for length in {*map(len, whole)}:
            places = [place for place, text in enumerate(whole) if len(text) == length]
            expected_QV = self.draft.model(torch.tensor([whole[i] for i in places])).logits[:, -1]
            own_QV = torch.stack([logits_QV[place] for place in places])
            torch.testing.assert_close(own_QV, expected_QV.float(), atol=1e-5, rtol=1e-5)
            self.num_checked += len(places)
        return logits_QV


@pytest.mark.parametrize("way", WAYS, ids=way_name)
def test_a_language_model_drafts_in_every_schedule(way):
    """Exact output, and draft tokens from exactly the text and path before them."""
    target = (tiny_mistral if "tree" in way else tiny_llama)(layers=4, vocab=16).double()
    source = Checked(noisy_copy(target))
    engine = engine_for(target, source=source, num_stages=2, max_new_tokens=NEW_TOKENS, **way)
    result = decode_exactly(engine, PROMPTS[2])
    assert 0 < result.num_accepted < result.num_drafted
    assert source.num_checked >= 10


@pytest.mark.parametrize("shape", [(5, 6, 30), (4, 3, 12)])
def test_fresh_trees_leave_the_cache_of_a_language_model_in_order(shape):
    """An in-flight draft token is in a fresh tree again, but its child is not. Cache rows become
    text in their order, so the parent's must stay before the child's."""
    target, (depth, top_k, num_tokens) = tiny_llama(layers=4, vocab=16).double(), shape
    source = Checked(noisy_copy(target))
    tree = TreeShape(depth=depth, top_k=top_k, num_tokens=num_tokens)
    way = {"schedule": "flowspec", "tree": tree, "expansion_depth": depth - 1}
    engine = engine_for(target, source=source, num_stages=4, max_new_tokens=NEW_TOKENS, **way)
    decode_exactly(engine, PROMPTS[1])
    assert source.num_checked >= 150


def test_rows_that_are_kept_at_the_wrong_place_are_noticed(monkeypatch):
    renumber = LanguageModelSource._keep_rows

    def mutant(source, keep):
        renumber(source, keep)
        source._places = {row: max(place - 1, 0) for row, place in source._places.items()}

    monkeypatch.setattr(LanguageModelSource, "_keep_rows", mutant)
    target = tiny_llama(layers=2, vocab=16).double()
    way = {"schedule": OPTIONS["branches"], "num_stages": 2, "max_new_tokens": NEW_TOKENS}
    engine = engine_for(target, source=Checked(noisy_copy(target)), **way)
    with pytest.raises(AssertionError):
        engine.decode(PROMPTS[2])


def test_what_a_draft_token_cost_is_paid_once():
    """A draft token committed to the text, or the root, is not forwarded again."""
    target = tiny_llama(layers=4, vocab=16)
    same = LanguageModelDraft(target, target)
    way = {"schedule": "pipeinfer", "num_stages": 4, "max_new_tokens": 41}
    result = engine_for(target, draft=same, **way).decode([1, 2, 3])
    assert result.draft_acceptance_rate == 1.0
    assert result.num_steps == 4 + math.ceil(39 / 3)
    assert result.num_draft_forwards == result.num_drafted == 3 * result.num_steps


def test_a_recurrent_language_model_drafts_branches():
    target = tiny("qwen3_5")
    draft = LanguageModelDraft(target, target)
    dense = tiny_llama(vocab=61)
    for model in (target, dense):
        for batch in (PipeInfer(), PipeInfer(branches=3, draft_tokens=4), PipeInfer(restart=True)):
            options = {"schedule": batch, "num_stages": 2, "max_new_tokens": 12}
            decode_exactly(engine_for(model, draft=draft, **options), PROMPTS[2])


# -- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("draft_tokens", 0),
        ("branches", 0),
        ("accept", 1.1),
        ("split", -0.1),
        ("recovery", -1.0),
        ("decay", math.inf),
        ("max_in_flight", 0),
    ],
)
def test_bad_settings_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=rf"{field}: {value}; give"):
        PipeInfer(**{field: value})


def test_what_cannot_be_combined_is_refused():
    target = tiny_llama(layers=4, vocab=16)
    with pytest.raises(ValueError, match="verifier: 'rejection'"):
        DecodeConfig.of(schedule="pipeinfer", temperature=1.0, verifier="rejection")
    assert DecodeConfig.of(schedule="pipeinfer", temperature=1.0).rule == "gumbel"
    with pytest.raises(ValueError, match="draft_model: vocab_size 17, but the target's is 16"):
        LanguageModelDraft(tiny_llama(vocab=17), target)
    module = make_module(target, num_stages=2, num_layers=1).float()
    with pytest.raises(ValueError, match="'pipeinfer' grows micro_batches.*choose spd or"):
        engine_for(target, draft=module, schedule="pipeinfer", num_stages=2)
