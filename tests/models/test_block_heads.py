"""DFlash and DSpark: one forward per block, the losses, and trees under every schedule."""

import pytest
import torch
from attention_runs import (
    MASKS,
    assert_loss_and_gradients,
    make_batch,
    tune,
)
from block_runs import (
    OTHER_WAYS,
    SAMPLED_WAYS,
    CheckedDFlash,
    CheckedDSpark,
    assert_training_is_decoding,
    make_objective,
    plain_loss,
    tree_of_one_pass,
)
from decode_runs import (
    CHAIN,
    NEW_TOKENS,
    PROMPTS,
    SMALL,
    VOCAB,
    WAYS,
    assert_sampled_like_the_target,
    decode_exactly,
    engine_for,
    sampling_target,
    way_name,
)
from tiny_drafts import make_head
from tiny_models import tiny_llama, tiny_qwen3

from pipedraft.inference.shapes import TreeShape
from pipedraft.inference.sources.dflash import DFlashSource
from pipedraft.inference.sources.dspark import DSparkSource
from pipedraft.models.heads import dflash
from pipedraft.models.heads.configs import five_feature_layers
from pipedraft.models.heads.dspark import DSpark
from pipedraft.train.dflash import (
    block_lengths,
    dpace_weights,
    draw_anchors,
)

CHECKED = {"dflash": CheckedDFlash, "dspark": CheckedDSpark}
BATCH = make_batch(MASKS)
DSPARKS = [
    {},
    {"sample_from_anchor": False},
    {"confidence": "state"},
    {"markov_rank": 0, "confidence": "none"},
    {"draft_vocab_size": 9},
]

# -- blocks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("group_rows", [1, 12, 128])
@pytest.mark.parametrize("family", [tiny_llama, tiny_qwen3])
def test_the_blocks_of_training_are_those_of_decoding(family, group_rows, monkeypatch):
    monkeypatch.setattr(dflash, "GROUP_ROWS", group_rows)
    assert_training_is_decoding(make_objective(family(layers=6, hidden=32, vocab=24)))


@pytest.mark.parametrize("options", DSPARKS, ids=str)
@pytest.mark.parametrize("family", [tiny_llama, tiny_qwen3])
def test_a_token_before_each_place_is_given_in_training_as_in_decoding(family, options):
    target = family(layers=6, hidden=32, vocab=24)
    assert_training_is_decoding(make_objective(target, "dspark", **options))


def sees(change):
    """Return known-bad attention: ``change(visible rows, context row count)`` edits each mask."""
    right = dflash._attend_in_groups

    def mutant(groups, *tensors):
        wrong = []
        for group in groups:
            visible_GK = group.visible_GK.clone()
            change(visible_GK, group.context.stop - group.context.start)
            wrong.append(group._replace(visible_GK=visible_GK))
        return right(wrong, *tensors)

    return mutant


def own_state(visible_GK, num_context):
    """Let the context include the anchor itself, for all blocks but the last in a group."""
    rows = visible_GK[:, :num_context]
    rows |= torch.nn.functional.pad(rows[:, :-1], (1, 0), value=True)


MUTANTS = {
    "own_state": own_state,
    "causal_block": lambda visible_GK, num_context: visible_GK[:, num_context:].tril_(),
    "other_blocks": lambda visible_GK, num_context: visible_GK[:, num_context:].fill_(True),
    "no_context": lambda visible_GK, num_context: visible_GK[:, :num_context].fill_(False),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_block_that_sees_other_rows_is_noticed(mutant, monkeypatch):
    objective = make_objective()
    assert_training_is_decoding(objective)
    monkeypatch.setattr(dflash, "_attend_in_groups", sees(MUTANTS[mutant]))
    with pytest.raises(AssertionError):
        assert_training_is_decoding(objective)


def test_feature_layers_are_spread_over_the_target():
    assert five_feature_layers(36) == (2, 10, 18, 26, 34)  # as in the published heads
    assert five_feature_layers(16) == (2, 5, 8, 11, 14)
    assert five_feature_layers(2) == (1, 2)


def test_the_anchors_row_gives_a_draft_token_too():
    """Seven rows give seven draft tokens; DFlash's would give six."""
    assert make_objective(kind="dspark", block_size=7).num_steps == 7
    assert make_objective(kind="dspark", block_size=7, sample_from_anchor=False).num_steps == 6


@pytest.mark.parametrize(
    ("kind", "setting", "words"),
    [
        ("dflash", {"block_size": 1}, "model.block_size: 1; give at least 2 and at most 256"),
        ("dflash", {"feature_layers": (9,)}, r"model.feature_layers: \[9\] are not all in 0..6"),
        ("dflash", {"mask_token_id": 24}, "model.mask_token_id: 24 is not in 0..23"),
        ("dspark", {"markov_rank": 0}, "model.confidence: 'pair' with model.markov_rank 0"),
    ],
    ids=str,
)
def test_a_setting_that_makes_no_head_is_refused(kind, setting, words):
    with pytest.raises(ValueError, match=words):
        make_objective(kind=kind, **setting)


# -- the losses ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("dflash", {}),
        ("dflash", {"loss": "ce", "decay_gamma": 2.0}),
        ("dflash", {"position_weights": "dpace"}),
        ("dflash", {"position_weights": "dpace", "dpace_alpha": 0.1, "block_size": 6}),
        ("dflash", {"draft_vocab_size": 9}),
        ("dflash", {"loss": "ce", "position_weights": "dpace", "draft_vocab_size": 9}),
        ("dspark", {}),
        ("dspark", {"loss": "kl", "decay_gamma": 2.0, "confidence_weight": 0.3}),
        ("dspark", {"feature_weight": 3.0, "draft_vocab_size": 9}),
        ("dspark", {"loss": "ce", "position_weights": "dpace", "confidence": "state"}),
        ("dspark", {"loss_ce": 0.6, "sample_from_anchor": False, "block_size": 6}),
        ("dspark", {"markov_rank": 0, "confidence": "none"}),
        ("dspark", {"draft_vocab_size": 9}),
    ],
    ids=str,
)
def test_losses_sums_and_gradients_equal_the_plain_formula(kind, options):
    objective = make_objective(kind=kind, **options)
    assert_loss_and_gradients(objective, BATCH, *plain_loss(objective, BATCH))


def half_gradient(draft):
    pair_UR = draft.markov_head.markov_w2.weight
    return (pair_UR + pair_UR.detach()) / 2


RIGHT = DSpark.behind, DSpark.acceptance
FORMULAS = {
    "another token": ("behind", lambda draft, h, ids: RIGHT[0](draft, h, ids.roll(1))),
    "deaf table": ("pair_UR", property(half_gradient)),
    "deaf confidence": ("acceptance", lambda draft, x: RIGHT[1](draft, x.detach())),
    "blind confidence": ("acceptance", lambda draft, x: RIGHT[1](draft, x.roll(1, -1))),
}


@pytest.mark.parametrize("mutant", FORMULAS)
def test_another_formula_is_noticed(mutant, monkeypatch):
    objective = make_objective(kind="dspark")
    monkeypatch.setattr(DSpark, *FORMULAS[mutant])
    with pytest.raises(AssertionError):
        assert_loss_and_gradients(objective, BATCH, *plain_loss(objective, BATCH))


def test_dpace_weights_are_those_of_its_equations():
    """For q = (0.5, 0.25, 1), alpha 0: w_i sums the prefix products 0.5, 0.125, 0.125 from i on."""
    q_AS = torch.tensor([[0.5, 0.25, 1.0], [0.5, 0.25, 9.0]], dtype=torch.float64)
    counted_AS = torch.tensor([[True, True, True], [True, True, False]])
    expected = torch.tensor([[0.75, 0.25, 0.125], [0.625, 0.125, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(dpace_weights(q_AS, counted_AS, 0.0), expected)
    ones = dpace_weights(q_AS, counted_AS, 1.0)
    assert ones.tolist() == [[3, 2, 1], [2, 1, 0]]


def test_anchors_are_drawn_among_those_that_have_a_label():
    counts_P, documents = block_lengths(BATCH, 3)
    every = draw_anchors(counts_P, documents, 512, torch.Generator())
    expected = [[2, 3, 4, 5, 6, 7, 10], [12 + place for place in (1, 5, 6, 7)], []]
    assert [anchors.tolist() for anchors in every] == expected
    assert counts_P[torch.cat(every)].tolist() == [3, 3, 3, 3, 2, 1, 1, 1, 3, 2, 1]
    objective = make_objective(num_anchors=3)
    assert objective.num_supervised(BATCH) == 6
    generator, losses = torch.Generator().manual_seed(1), set()
    for _ in range(4):
        drawn = draw_anchors(counts_P, documents, 3, generator)
        for some, others in zip(drawn, every, strict=True):
            assert set(some.tolist()) <= set(others.tolist()) and len(some) == min(3, len(others))
            assert some.tolist() == sorted(some.tolist())
        output = objective(BATCH, generator)
        assert int(output.counted) == 6
        losses.add(output.loss.item())
    assert len(losses) > 1


@pytest.mark.parametrize(
    ("kind", "options", "steps"), [("dflash", {}, 20), ("dspark", {"loss": "kl"}, 30)]
)
def test_training_makes_blocks_longer_and_foretells_it(kind, options, steps):
    target = tiny_llama(layers=6, hidden=32, vocab=24)
    objective = make_objective(target, kind, **options).float()
    target.float()
    first, *_, last = tune(objective, make_batch([[0, 0] + [1] * 20] * 2), steps)
    assert last["score"] > first["score"] + 0.5
    if kind == "dspark":
        assert last["confidence_error"] < 0.1 < first["confidence_error"]


# -- decoding -----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS + OTHER_WAYS, ids=way_name)
@pytest.mark.parametrize("kind", CHECKED)
def test_greedy_text_is_the_targets_and_every_draft_token_is_of_the_newest_block(kind, way):
    """The two heads take turns with the two prompts."""
    target = tiny_llama(layers=4, vocab=16).double()
    source = CHECKED[kind](make_head(target, kind, block_size=5).double())
    engine = engine_for(target, source=source, num_stages=3, max_new_tokens=NEW_TOKENS, **way)
    place = (WAYS + OTHER_WAYS).index(way) + (kind == "dspark")
    assert decode_exactly(engine, PROMPTS[1 + place % 2]).num_drafted > 0
    assert len(source.expected) > 5


@pytest.mark.parametrize("options", DSPARKS[1:], ids=str)
def test_every_kind_of_head_decodes_exactly(options):
    target = tiny_llama(layers=4, vocab=16).double()
    source = CheckedDSpark(make_head(target, "dspark", block_size=5, **options).double())
    way = {"schedule": "flowspec_continued", "max_new_tokens": NEW_TOKENS}
    engine = engine_for(target, source=source, num_stages=3, **way)
    assert decode_exactly(engine, PROMPTS[2]).num_drafted > 0


def keep_the_block(monkeypatch) -> str:
    """Mutant: after a commit, still offer the draft tokens from before it."""
    monkeypatch.setattr(DFlashSource, "_keep_rows", lambda source, keep: None)
    return "dflash"


def take_rows_for_the_first(monkeypatch) -> str:
    """Mutant: place every row directly after the root, as if the block had no places."""
    behind = DSparkSource._behind

    def rooted(source, tree, row):
        state = behind(source, tree, tree.depths[row])
        return source.draft.behind(state, torch.tensor(tree.tokens[0]))

    monkeypatch.setattr(DSparkSource, "_output", rooted)
    return "dspark"


@pytest.mark.parametrize("mutate", [keep_the_block, take_rows_for_the_first])
def test_draft_tokens_of_another_block_or_row_are_noticed(mutate, monkeypatch):
    kind = mutate(monkeypatch)
    target = tiny_llama(layers=4, vocab=16)
    source = CHECKED[kind](make_head(target, kind, block_size=5))
    engine = engine_for(target, source=source, schedule="eagle", tree=CHAIN, num_stages=2)
    with pytest.raises(AssertionError):
        engine.decode(PROMPTS[2])


@pytest.mark.parametrize("way", SAMPLED_WAYS, ids=way_name)
@pytest.mark.parametrize("kind", CHECKED)
def test_sampled_text_is_the_targets(kind, way):
    target = sampling_target()
    draft = make_head(target, kind, block_size=5)
    assert draft.target_vocab_size == VOCAB
    assert_sampled_like_the_target(target, draft, **way)


@pytest.mark.parametrize("shape", [CHAIN, SMALL, TreeShape(kind="static")], ids=lambda s: s.label)
def test_a_tree_takes_one_pass_whose_rows_know_their_depth_alone(shape):
    target = tiny_llama(layers=4, vocab=16)
    source = DFlashSource(make_head(target, "dflash", block_size=6))
    tree = tree_of_one_pass(target, source, shape)
    # Below any row at one depth the best token is the same.
    best = {}
    for row in range(len(tree)):
        for child in tree.children(row)[:1]:
            assert best.setdefault(tree.depths[row], tree.tokens[child]) == tree.tokens[child]


@pytest.mark.parametrize("shape", [CHAIN, SMALL, TreeShape(kind="static")], ids=lambda s: s.label)
def test_a_tree_takes_one_pass_whose_rows_know_the_token_before_them(shape):
    target = tiny_llama(layers=4, vocab=16)
    source = DSparkSource(make_head(target, "dspark", block_size=6))
    tree = tree_of_one_pass(target, source, shape)
    rows = [row for row in range(len(tree)) if tree.depths[row] == 1]
    logits_QU = source._logits(tree, rows)
    if shape is not CHAIN:
        assert len(rows) > 1 and (logits_QU[0] - logits_QU[1]).abs().max() > 1e-3
