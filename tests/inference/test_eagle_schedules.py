"""EAGLE heads on a pipelined target: exact output and distribution, steps by closed forms."""

import math
from dataclasses import replace

import pytest
import torch
from decode_runs import (
    CHAIN,
    GREEDY,
    NEW_TOKENS,
    PROMPTS,
    SMALL,
    WAYS,
    attentive_llama,
    begun,
    decode_exactly,
    engine_for,
    greedy_reference,
    paths_of,
    prompts_of,
    simulate,
    simulated_texts,
    way_name,
)
from tiny_drafts import make_head, make_module
from tiny_models import tiny_llama, tiny_qwen3

from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.cost_model import CostModel
from pipedraft.inference.pipelines.local import LocalPipeline
from pipedraft.inference.schedules import SCHEDULES
from pipedraft.inference.shapes import EAGLE1_PATHS, TreeShape, segment_sizes
from pipedraft.inference.sources.eagle import EagleSource
from pipedraft.inference.tree import TokenTree
from pipedraft.models.heads.language_model import LanguageModelDraft
from pipedraft.models.target import capture_hidden
from pipedraft.models.transformer.layers import KeyValues


@pytest.mark.parametrize(
    ("way", "kind", "num_stages", "prompts"),
    [
        pytest.param(
            *(way, *head, PROMPTS if is_left else prompts_of(index + (head[1] == 3))),
            id=f"{way_name(way)}-{head}",
            marks=[pytest.mark.all] * is_left,
        )
        for index, way in enumerate(WAYS)
        for head, is_left in (
            (("eagle3", 3), False),
            (("eagle", 4), index % 2 > 0),
            (("eagle3", 1), index % 2 == 0),
        )
    ],
)
def test_greedy_text_equals_transformers_greedy(way, kind, num_stages, prompts):
    """Every way decodes two prompts on three stages, and the other two on one or four."""
    target = tiny_qwen3(vocab=16) if num_stages == 3 else attentive_llama(8, vocab=16)
    engine = engine_for(
        target,
        draft=make_head(target, kind),
        num_stages=num_stages,
        max_new_tokens=NEW_TOKENS,
        **way,
    )
    for prompt in prompts:
        decode_exactly(engine, prompt)


class Watch:
    """Counts segments pruned to one row by a KeepRows, and late steps that returned nothing."""

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
    target = attentive_llama(8, vocab=16)
    for prompt in PROMPTS[1:3] if acceptance == 0.6 else PROMPTS[2:3]:
        simulate(target, prompt, acceptance, **way)


PRUNED = dict(micro_batches=9, tree=TreeShape(depth=6, top_k=3, num_tokens=18))


@pytest.mark.parametrize(
    "way",
    [
        {"schedule": "pruned_pp", **PRUNED},
        {"schedule": "flowspec", **PRUNED, "expansion_depth": 2, "expansion_tokens": 6},
        {"schedule": "flowspec_continued", "expansion_depth": 2, "step_tokens": 1},
    ],
    ids=way_name,
)
def test_segments_pruned_to_one_row_and_to_none_change_nothing(way, monkeypatch):
    """Use many small segments and a frequently rejected draft."""
    watch = Watch(monkeypatch)
    target = attentive_llama(8, vocab=16)
    for prompt in PROMPTS:
        simulate(target, prompt, 0.7, max_new_tokens=48, **way)
    assert watch.single > 5 and watch.emptied > 5


def test_ignoring_the_mask_of_single_row_segments_is_noticed(monkeypatch):
    """Fault in the published runtime: a segment with one row saw its siblings' keys."""
    segment = TokenTree.segment

    def mutant(tree, start, stop):
        cut = segment(tree, start, stop)
        if cut.num_rows == 1:
            cut = replace(cut, visible=torch.ones_like(cut.visible))
        return cut

    # Two children a node: a grandchild enters the first stage before its uncle is pruned.
    way = {"schedule": "flowspec", "tree": replace(SMALL, top_k=2), "max_segment_rows": 1}
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
    expected = (1 - 0.8**6) / (1 - 0.8)
    assert abs(result.equivalent_acceptance_length - expected) < 0.15 * expected


@pytest.mark.parametrize("micro_batches", [1, 3, 5, None])
def test_naive_micro_batches_cost_n_plus_m_minus_1_steps_a_round(micro_batches):
    shape = TreeShape(depth=6, top_k=2, num_tokens=12)
    result = bernoulli("naive_pp", length=120, tree=shape, micro_batches=micro_batches)
    steps = 4 + (micro_batches or 5) - 1
    assert result.num_steps == steps * len(result.round_lengths)


def test_eighty_draft_tokens_are_five_segments_of_sixteen():
    """FlowSpec's L = 80 and L_max = 16: the root is no draft token, so 81 rows are five parts."""
    assert segment_sizes(81, 5, 16) == [16, 16, 16, 16, 17]
    assert segment_sizes(82, 5, 16) == [13, 14, 14, 13, 14, 14]
    assert segment_sizes(17, 1, 16, has_root=False) == [8, 9]
    shape = TreeShape(depth=40, top_k=2)
    result = bernoulli("naive_pp", length=40, tree=shape)
    assert result.num_steps == (4 + 5 - 1) * len(result.round_lengths)


@pytest.mark.parametrize(
    "schedule", [n for n, s in SCHEDULES.items() if s.engine == "pipeline" and n != "flowspec"]
)
def test_no_segment_has_more_draft_tokens_than_the_setting_says(schedule):
    """The root adds one row where it enters with them."""
    limits = {
        "autoregressive": {},
        "eagle": {"max_segment_rows": 3},
        "pipeinfer": {"draft_tokens": 3, "branches": 2},
        "ssd": {"draft_tokens": 3},
        **dict.fromkeys(("spd", "ppsd", "pipedec"), {"tree_width": 3}),
        **dict.fromkeys(("naive_pp", "pruned_pp", "flowspec_continued"), {"max_segment_rows": 3}),
    }
    target = tiny_llama(layers=4, vocab=16)
    draft = LanguageModelDraft(target, target)
    engine = engine_for(
        target, draft=draft, schedule=schedule, max_new_tokens=24, **limits[schedule]
    )
    result = engine.decode(PROMPTS[2])
    rows = [max(event[3:]) for event in result.step_log if len(event) > 2]
    assert max(rows) <= (4 if limits[schedule] else 1)
    assert schedule == "autoregressive" or max(rows) >= 3


def test_pruned_rounds_end_with_the_segment_that_missed():
    """One row per segment: the j-th token in a round returns with step n + j - 1."""
    chain = TreeShape(kind="chain", depth=5)
    result = bernoulli("pruned_pp", tree=chain, micro_batches=6)
    assert result.num_steps == sum(4 + length - 1 for length in result.round_lengths)


def test_flowspec_with_a_perfect_draft_never_restarts():
    expansion = dict(expansion_depth=8, expansion_tokens=16)
    result = bernoulli("flowspec", 1.0, 120, tree=CHAIN, **expansion)
    assert len(result.round_lengths) == 1
    restarting = bernoulli("pruned_pp", 1.0, 120, tree=CHAIN)
    assert result.equivalent_acceptance_length > restarting.equivalent_acceptance_length


@pytest.mark.parametrize("schedule", ["flowspec", "flowspec_continued"])
@pytest.mark.parametrize("row", [0.0, 0.5])
def test_expansion_depth_stays_within_the_time_of_one_row(schedule, row):
    """Only flowspec, whose rounds have the published order, makes the stages wait."""
    target = tiny_llama(layers=4, vocab=16)
    head = make_head(target)
    for num_stages, expected in ((1, 4), (2, 2), (4, 1)):
        options = {"num_stages": num_stages, "max_new_tokens": 40, "cost": CostModel(row=row)}
        options |= {"tree": SMALL} if schedule == "flowspec" else {}
        engine = engine_for(target, draft=head, schedule=schedule, **options)
        assert engine.draft_cost == 1 / 4
        result = engine.decode([3, 1, 4])
        steps = [event for event in result.step_log if len(event) > 2]
        waits = [event for event in result.step_log if len(event) == 2]
        refill = 2 if schedule == "flowspec" else 0
        most = min(expected, SMALL.depth if schedule == "flowspec" else 7)
        assert {event[1] for event in steps} <= {*range(most + 1), refill}
        assert bool(waits) == (schedule == "flowspec")


def reference_tree(head, target, text, shape):
    """EAGLE-2's tree with the head run from scratch for every draft token: {path: score}."""
    taps = capture_hidden(target, torch.tensor([text]), set(head.taps))
    states = head.feature({layer: hidden[0, :-1] for layer, hidden in taps.items()})

    def outputs(path):
        tokens, rows = [*text[1:], *path], states
        for count in range(
            len(path) + 1
        ):  # one draft token at a time: its state is the last output
            if count:
                rows = torch.cat([rows, out[-1:]])  # noqa: F821
            size = len(text) - 1 + count
            out = head.step(
                torch.tensor(tokens[:size]),
                rows,
                positions_R=torch.arange(size),
                caches=[KeyValues()],
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
    """Tests incremental keys and values, feedback states, masks and the final choice."""
    target = tiny_llama(layers=4, vocab=16).double()
    head = make_head(target, kind).double()
    text = [3, 1, 4, 1, 5, 9, 2, 6]
    taps = capture_hidden(target, torch.tensor([text]), set(head.taps))
    rows = {layer: hidden[0] for layer, hidden in taps.items()}
    source = EagleSource(head)
    source.begin({layer: hidden[:3] for layer, hidden in rows.items()}, text[:4])
    source.observe({layer: hidden[3:5] for layer, hidden in rows.items()}, text[4:6])
    shape = TreeShape(depth=3, top_k=4, num_tokens=12)
    source.grow_tree(TokenTree(text[5], 5), shape, by_score=True, sampling=GREEDY)
    source.observe({layer: hidden[5:7] for layer, hidden in rows.items()}, text[6:8])
    tree = TokenTree(text[7], 7)
    added = source.grow_tree(tree, shape, by_score=True, sampling=GREEDY)
    expected = reference_tree(head, target, text, shape)
    assert added == len(expected) == 12
    got = dict(zip(paths_of(tree)[1:], tree.scores[1:], strict=True))
    assert got.keys() == expected.keys()
    for path, score in expected.items():
        assert math.isclose(got[path], score, abs_tol=1e-5), path  # scores are kept in float32
    assert tree.scores[1:] == sorted(tree.scores[1:], reverse=True)


def test_a_static_tree_has_the_published_shape():
    target = tiny_llama(layers=4, vocab=16)
    source, _ = begun(make_head(target, "eagle"), target, [1, 2, 3, 4])
    tree, shape = TokenTree(4, 3), TreeShape(kind="static")
    assert source.grow_tree(tree, shape, by_score=False, sampling=GREEDY) == 25
    assert sorted(map(len, paths_of(tree)[1:])) == sorted(map(len, EAGLE1_PATHS))


def test_what_a_draft_or_target_cannot_do_is_refused_by_name():
    target = tiny_llama(layers=4, vocab=16)
    head = make_head(target)
    engine_for(target, draft=head, schedule="spd", num_stages=2)  # EAGLE heads grow layers, too
    module = make_module(target, num_stages=2, num_layers=1).float()
    with pytest.raises(
        ValueError, match=r"schedule: 'flowspec' grows trees.*spd or pipedec or ppsd"
    ):
        engine_for(target, draft=module, schedule="flowspec", num_stages=2)
    with pytest.raises(ValueError, match=r"tree\.paths: \[0, 3\] has no parent"):
        TreeShape(kind="static", paths=((1,), (0, 3)))
    with pytest.raises(ValueError, match="verifier: 'rejection'"):
        DecodeConfig.of(schedule="eagle", temperature=1.0, verifier="rejection")
