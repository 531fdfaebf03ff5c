"""EAGLE heads on a pipelined target: exact text and distribution, steps as in closed forms."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import tiny_llama, tiny_qwen3
from decode_runs import (
    CHAIN,
    NEW_TOKENS,
    PROMPTS,
    PUBLISHED,
    SMALL,
    WAYS,
    PlainTokenizer,
    assert_sampled_like_the_target,
    attentive_llama,
    decode_exactly,
    engine_for,
    greedy_reference,
    paths_of,
    sampling_target,
    simulate,
    simulated_texts,
    way_name,
)
from staged_targets import tiny
from tiny_drafts import make_head

from pipedraft.inference.clock import (
    chain_acceptance_length,
    continuous_acceptance_length,
)
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.engine import Engine
from pipedraft.inference.pipelines.local import LocalPipeline
from pipedraft.inference.schedules.flowspec import FlowSpec
from pipedraft.inference.shapes import EAGLE1_PATHS, TreeShape
from pipedraft.inference.sources.base import Sampling
from pipedraft.inference.sources.eagle import EagleSource
from pipedraft.inference.tree import TokenTree
from pipedraft.inference.verify import KeyedRandom, MatchVerifier
from pipedraft.models.layers import KeyValues
from pipedraft.models.target import capture_hidden


@pytest.mark.parametrize(("kind", "num_stages"), [("eagle", 4), ("eagle3", 1), ("eagle3", 3)])
@pytest.mark.parametrize("way", WAYS, ids=way_name)
def test_greedy_text_equals_transformers_greedy(way, kind, num_stages):
    target = (tiny_qwen3 if num_stages == 3 else tiny_llama)(layers=4, vocab=16)
    engine = engine_for(
        target,
        draft=make_head(target, kind),
        num_stages=num_stages,
        max_new_tokens=NEW_TOKENS,
        **way,
    )
    for prompt in PROMPTS:
        decode_exactly(engine, prompt)


class Watch:
    """Counts segments that a Keep left with one row, and steps that returned nothing late."""

    def __init__(self, monkeypatch) -> None:
        self.single = self.emptied = 0
        keep = LocalPipeline.keep

        def watched(pipeline, message):
            before = [segment is not None for segment in pipeline._waiting]
            sizes = [s.num_rows if s else 0 for s in pipeline._waiting]
            committed = keep(pipeline, message)
            hit = len(message.rows) > message.num_committed
            for was, size, segment in zip(before, sizes, pipeline._waiting, strict=True):
                if hit and was:
                    self.emptied += segment is None
                    self.single += segment is not None and segment.num_rows == 1 < size
            return committed

        monkeypatch.setattr(LocalPipeline, "keep", watched)


@pytest.mark.parametrize("acceptance", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("way", WAYS, ids=way_name)
def test_greedy_text_is_the_targets_whatever_the_draft_draft_tokens(way, acceptance):
    target = tiny_llama(layers=4, vocab=16)
    for prompt in PROMPTS[1:3]:
        simulate(target, prompt, acceptance, **way)


@pytest.mark.parametrize(
    ("schedule", "tree_first"), [("pruned_pp", True), ("flowspec", True), ("flowspec", False)]
)
def test_segments_pruned_to_one_row_and_to_none_change_nothing(schedule, tree_first, monkeypatch):
    """Of many small segments, by a draft that is wrong often enough."""
    watch = Watch(monkeypatch)
    target = attentive_llama(8, vocab=16)
    grows = {"expansion_depth": 2, "step_tokens": 1, "expansion_tokens": 6}
    own = grows | {"tree_first": tree_first} if schedule == "flowspec" else {}
    for prompt in PROMPTS:
        simulate(
            target,
            prompt,
            0.7,
            schedule=schedule,
            max_new_tokens=48,
            micro_batches=9,
            tree=TreeShape(depth=6, top_k=3, num_tokens=18),
            **own,
        )
    assert watch.single > 5 and watch.emptied > 5


def test_ignoring_the_mask_of_single_row_segments_is_noticed(monkeypatch):
    """What the published runtime did: a segment of one row saw its siblings' keys."""
    segment = TokenTree.segment

    def mutant(tree, start, stop):
        cut = segment(tree, start, stop)
        if cut.num_rows == 1:
            cut = replace(cut, visible=torch.ones_like(cut.visible))
        return cut

    # Two children a node: a grandchild enters the first stage before its uncle is pruned.
    tree, expansion = replace(SMALL, top_k=2), dict(tree_first=True)
    way = {"schedule": "flowspec", "tree": tree, **expansion, "max_segment_rows": 1}
    target = attentive_llama(8, vocab=16)
    expected = [greedy_reference(target, prompt, 48) for prompt in PROMPTS]
    assert simulated_texts(target, 48, **way) == expected
    monkeypatch.setattr(TokenTree, "segment", mutant)
    assert simulated_texts(target, 48, **way) != expected


def bernoulli(schedule, acceptance=0.8, length=400, **options):
    options = {"schedule": schedule, "max_new_tokens": length, **options}
    return simulate(tiny_llama(layers=4, vocab=16), [1, 2, 3], acceptance, **options)


def test_one_batch_costs_n_steps_a_round():
    chain = TreeShape(kind="chain", depth=5)
    result = bernoulli("eagle", tree=chain)
    assert result.num_steps == 4 * len(result.round_lengths)
    expected = chain_acceptance_length(0.8, 5)
    assert abs(result.equivalent_acceptance_length - expected) < 0.15 * expected


@pytest.mark.parametrize("micro_batches", [1, 3, 5, None])
def test_naive_micro_batches_cost_n_plus_m_minus_1_steps_a_round(micro_batches):
    shape = TreeShape(depth=6, top_k=2, num_tokens=12)
    result = bernoulli("naive_pp", tree=shape, micro_batches=micro_batches)
    steps = 4 + (micro_batches or 5) - 1
    assert result.num_steps == steps * len(result.round_lengths)


def test_pruned_rounds_end_with_the_segment_that_missed():
    """One row per segment: the j-th token of a round returns with step n + j - 1."""
    chain = TreeShape(kind="chain", depth=5)
    result = bernoulli("pruned_pp", tree=chain, micro_batches=6)
    assert result.num_steps == sum(4 + length - 1 for length in result.round_lengths)


def test_pipedec_follows_the_closed_form_of_one_verdict_per_step():
    result = bernoulli("pipedec", tree_width=1)
    *finished, last = result.round_lengths
    assert result.num_steps == sum(3 + tokens for tokens in finished) + 3 + last
    expected = continuous_acceptance_length([result.draft_acceptance_rate], 4)
    assert abs(result.equivalent_acceptance_length - expected) < 0.08


def test_flowspec_with_a_perfect_draft_never_restarts():
    expansion = dict(tree_first=True, expansion_depth=8, expansion_tokens=16)
    result = bernoulli("flowspec", 1.0, 120, tree=CHAIN, **expansion)
    assert len(result.round_lengths) == 1
    restarting = bernoulli("pruned_pp", 1.0, 120, tree=CHAIN)
    assert result.equivalent_acceptance_length > restarting.equivalent_acceptance_length


@pytest.mark.parametrize("tree_first", [True, False])
def test_expansion_depth_stays_within_the_stage_time(tree_first):
    """Only the published order of a round lets the stages wait for the draft."""
    target = tiny_llama(layers=4, vocab=16)
    head = make_head(target)
    for num_stages, expected in ((1, 4), (2, 2), (4, 1)):
        config = DecodeConfig.of(
            schedule="flowspec",
            num_stages=num_stages,
            max_new_tokens=40,
            tree=SMALL,
            tree_first=tree_first,
        )
        engine = Engine(target, PlainTokenizer(), config, head)
        assert engine.draft_cost == 1 / 4
        result = engine.decode([3, 1, 4])
        waits = len(result.round_lengths) if tree_first else 0
        serial = waits * SMALL.depth * engine.draft_cost
        refills = config.schedule.refill_depth * engine.draft_cost * tree_first
        longest = max(expected * engine.draft_cost, 1 / num_stages, refills)
        assert result.virtual_time <= serial + result.num_steps * longest + 1e-9


SAMPLED_WAYS = [
    {"schedule": "eagle", "tree": CHAIN, "verifier": "match"},
    {"schedule": "eagle", "tree": CHAIN, "verifier": "rejection"},
    {"schedule": "eagle", "tree": SMALL},
    {"schedule": "naive_pp", "tree": SMALL},
    {"schedule": "pruned_pp", "tree": CHAIN, "verifier": "rejection"},
    {"schedule": "pruned_pp", "tree": SMALL},
    {"schedule": "pipedec", "tree_width": 3},
    {"schedule": "pipedec", "tree_width": 1, "verifier": "rejection"},
    {"schedule": "flowspec", "tree": SMALL, **dict(expansion_depth=2, step_tokens=4)},
    {"schedule": "flowspec", "tree": SMALL, **PUBLISHED},
]


@pytest.mark.parametrize("way", SAMPLED_WAYS, ids=way_name)
def test_sampled_text_has_the_targets_distribution(way):
    target = sampling_target()
    assert_sampled_like_the_target(target, make_head(target), **way)


def reference_tree(head, target, text, shape):
    """EAGLE-2's tree with the head run from scratch for every draft token: {path: score}."""
    taps = capture_hidden(target, torch.tensor([text]), set(head.taps))
    states = head.feature({layer: hidden[0, :-1] for layer, hidden in taps.items()})

    def outputs(path):
        tokens, rows, cache = [*text[1:], *path], states, KeyValues()
        for count in range(
            len(path) + 1
        ):  # one draft token at a time: its state is the last output
            if count:
                rows = torch.cat([rows, out[-1:]])  # noqa: F821
            size = len(text) - 1 + count
            cache = KeyValues()
            out = head.rows(
                torch.tensor(tokens[:size]),
                rows,
                positions_R=torch.arange(size),
                cache=cache,
                visible_RC=torch.ones(size, size, dtype=torch.bool).tril(),
            )
        return head.logits(out[-1]).log_softmax(-1)

    pool, beams = {}, {(): 0.0}
    for _ in range(shape.depth):
        level = {}
        for path, score in beams.items():
            values, ids = outputs(path).topk(shape.top_k)
            for value, token in zip(values.tolist(), ids.tolist(), strict=True):
                level[(*path, token)] = score + value
        pool |= level
        best = sorted(level, key=lambda path: -level[path])[: shape.top_k]
        beams = {path: level[path] for path in best}
    chosen = sorted(pool, key=lambda path: -pool[path])[: shape.num_tokens]
    return {path: pool[path] for path in chosen}


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_dynamic_tree_equals_one_drafted_from_scratch(kind):
    """Incremental keys and values, feedback states, masks and the final choice."""
    target = tiny_llama(layers=4, vocab=16).double()
    head = make_head(target, kind).double()
    text = [3, 1, 4, 1, 5, 9, 2, 6]
    taps = capture_hidden(target, torch.tensor([text]), set(head.taps))
    rows = {layer: hidden[0] for layer, hidden in taps.items()}
    source = EagleSource(head)
    source.begin({layer: hidden[:3] for layer, hidden in rows.items()}, text[:4])
    source.observe({layer: hidden[3:5] for layer, hidden in rows.items()}, text[4:6])
    shape = TreeShape(depth=3, top_k=4, num_tokens=12)
    sampling = Sampling(MatchVerifier(0.0, KeyedRandom(0, 0)))
    source.grow_tree(TokenTree(text[5], 5), shape, by_score=True, sampling=sampling)
    source.observe({layer: hidden[5:7] for layer, hidden in rows.items()}, text[6:8])
    tree = TokenTree(text[7], 7)
    added = source.grow_tree(tree, shape, by_score=True, sampling=sampling)
    expected = reference_tree(head, target, text, shape)
    assert added == len(expected) == 12
    got = dict(zip(paths_of(tree)[1:], tree.scores[1:], strict=True))
    assert got.keys() == expected.keys()
    for path, score in expected.items():
        assert math.isclose(got[path], score, abs_tol=1e-5), path  # scores are kept in float32
    assert tree.scores[1:] == sorted(tree.scores[1:], reverse=True)


def test_growing_layer_by_layer_equals_the_tree_of_the_same_beams():
    """Until a commit, a layer's rows are what a fresh tree of one beam per level gives."""
    target = tiny_llama(layers=4, vocab=16).double()
    head = make_head(target).double()
    text = [3, 1, 4, 1, 5]
    taps = capture_hidden(target, torch.tensor([text]), set(head.taps))
    rows = {layer: hidden[0, :-1] for layer, hidden in taps.items()}
    sampling = Sampling(MatchVerifier(0.0, KeyedRandom(0, 0)))
    whole, layered = TokenTree(text[-1], 4), TokenTree(text[-1], 4)
    source = EagleSource(head)
    source.begin(rows, text)
    chain = TreeShape(kind="chain", depth=4)
    source.grow_tree(whole, chain, by_score=True, sampling=sampling)
    source.begin(rows, text)
    for _ in range(4):
        source.grow_layer(layered, {}, width=1, sampling=sampling)
    assert whole.tokens == layered.tokens
    np.testing.assert_allclose(whole.scores, layered.scores, atol=1e-5)


def test_a_static_tree_has_the_published_shape():
    target = tiny_llama(layers=4, vocab=16)
    config = DecodeConfig.of(schedule="eagle", tree=TreeShape(kind="static"), num_stages=2)
    engine = Engine(target, PlainTokenizer(), config, make_head(target, "eagle"))
    source = engine.make_source()
    assert source is not None
    taps = capture_hidden(target, torch.tensor([[1, 2, 3]]), set(source.taps))
    source.begin({layer: hidden[0] for layer, hidden in taps.items()}, [1, 2, 3, 4])
    tree = TokenTree(4, 3)
    sampling = Sampling(MatchVerifier(0.0, KeyedRandom(0, 0)))
    assert source.grow_tree(tree, config.schedule.tree, by_score=False, sampling=sampling) == 25
    assert sorted(map(len, paths_of(tree)[1:])) == sorted(map(len, EAGLE1_PATHS))


def test_what_a_draft_or_target_cannot_do_is_refused_by_name():
    target = tiny_llama(layers=4, vocab=16)
    head = make_head(target)
    config = DecodeConfig.of(schedule="spd", num_stages=2, max_new_tokens=4)
    Engine(target, PlainTokenizer(), config, head)  # EAGLE heads grow layers, too
    from tiny_drafts import make_module

    module = make_module(target, num_stages=2, num_layers=1).float()
    with pytest.raises(ValueError, match=r"schedule: 'flowspec' grows trees.*ppsd or spd"):
        Engine(target, PlainTokenizer(), replace(config, schedule=FlowSpec()), module)
    with pytest.raises(ValueError, match=r"tree\.paths: \[0, 3\] has no parent"):
        TreeShape(kind="static", paths=((1,), (0, 3)))
    with pytest.raises(ValueError, match="verifier: 'rejection'"):
        DecodeConfig.of(schedule="eagle", temperature=1.0, verifier="rejection")


@pytest.mark.parametrize("name", ["qwen3_5", "mixtral"])
def test_hybrid_and_expert_targets_decode_exactly(name):
    """Recurrent layers carry one state per sequence: chains are exact, trees are refused."""
    target, prompt = tiny(name), [7, 3, 9, 3, 7, 1]
    for schedule, tree in (("eagle", CHAIN), ("pruned_pp", CHAIN), ("naive_pp", SMALL)):
        options = {"schedule": schedule, "tree": tree, "num_stages": 2, "max_new_tokens": 16}
        if name == "qwen3_5" and tree is SMALL:
            with pytest.raises(ValueError, match=r"naive_pp: dynamic:3:3:8.*recurrent"):
                simulate(target, prompt, 0.7, **options)
        else:
            simulate(target, prompt, 0.7, **options)
