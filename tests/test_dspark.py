"""DSpark: what the token before a place adds, its two losses, its trees under every schedule."""

import pytest
import torch
from attention_runs import MASKS, assert_loss_and_gradients, make_batch, tune
from block_runs import (
    OTHER_WAYS,
    SAMPLED_WAYS,
    CheckedDSpark,
    assert_training_is_decoding,
    make_objective,
    plain_loss,
    tree_of_one_pass,
)
from conftest import tiny_llama, tiny_qwen3
from decode_runs import (
    CHAIN,
    NEW_TOKENS,
    PROMPTS,
    SMALL,
    WAYS,
    assert_sampled_like_the_target,
    decode_exactly,
    engine_for,
    sampling_target,
    way_name,
)
from tiny_drafts import make_head

from pipedraft.inference.shapes import TreeShape
from pipedraft.inference.sources.dspark import DSparkSource
from pipedraft.models.dspark import DSpark

BATCH = make_batch(MASKS)
KINDS = [
    {},
    {"sample_from_anchor": False},
    {"confidence": "state"},
    {"markov_rank": 0, "confidence": "none"},
    {"draft_vocab_size": 9},
]


@pytest.mark.parametrize("options", KINDS, ids=str)
@pytest.mark.parametrize("family", [tiny_llama, tiny_qwen3])
def test_the_blocks_of_training_are_those_of_decoding(family, options):
    target = family(layers=6, hidden=32, vocab=24)
    assert_training_is_decoding(make_objective(target, "dspark", **options))


def test_the_anchors_row_gives_a_draft_token_too():
    """Seven rows give seven of them; DFlash's would give six."""
    assert make_objective(kind="dspark", block_size=7).num_steps == 7
    assert make_objective(kind="dspark", block_size=7, sample_from_anchor=False).num_steps == 6


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss": "kl", "decay_gamma": 2.0, "confidence_weight": 0.3},
        {"loss": "ce", "position_weights": "dpace", "confidence": "state"},
        {"loss_ce": 0.6, "sample_from_anchor": False, "block_size": 6},
        {"markov_rank": 0, "confidence": "none"},
        {"draft_vocab_size": 9},
    ],
    ids=str,
)
def test_losses_sums_and_gradients_equal_the_plain_formula(options):
    objective = make_objective(kind="dspark", **options)
    assert_loss_and_gradients(objective, BATCH, *plain_loss(objective, BATCH))


def half_gradient(draft):
    pair_UR = draft.markov_head.markov_w2.weight
    return (pair_UR + pair_UR.detach()) / 2


RIGHT = DSpark.behind, DSpark.acceptance
MUTANTS = {
    "another token": ("behind", lambda draft, h, ids: RIGHT[0](draft, h, ids.roll(1))),
    "deaf table": ("pair_UR", property(half_gradient)),
    "deaf confidence": ("acceptance", lambda draft, x: RIGHT[1](draft, x.detach())),
    "blind confidence": ("acceptance", lambda draft, x: RIGHT[1](draft, x.roll(1, -1))),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_another_formula_is_noticed(mutant, monkeypatch):
    objective = make_objective(kind="dspark")
    monkeypatch.setattr(DSpark, *MUTANTS[mutant])
    with pytest.raises(AssertionError):
        assert_loss_and_gradients(objective, BATCH, *plain_loss(objective, BATCH))


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"markov_rank": -1}, "model.markov_rank: -1 is below 0"),
        ({"markov_rank": 0}, "model.confidence: 'pair' with model.markov_rank 0"),
        ({"confidence_weight": -1.0}, r"model.confidence_weight: -1.0 is not in \[0, inf\)"),
        ({"loss_ce": 1.5}, r"model.loss_ce: 1.5 is not in \[0, 1\]"),
    ],
    ids=str,
)
def test_a_setting_that_makes_no_head_is_refused(setting, words):
    with pytest.raises(ValueError, match=words):
        make_objective(kind="dspark", **setting)


def test_training_makes_blocks_longer_and_foretells_it():
    target = tiny_llama(layers=6, hidden=32, vocab=24)
    objective = make_objective(target, "dspark", loss="kl").float()
    target.float()
    first, *_, last = tune(objective, make_batch([[0, 0] + [1] * 20] * 2), 30)
    assert last["score"] > first["score"] + 0.5
    assert last["confidence_error"] < 0.1 < first["confidence_error"]


# -- decoding -----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS + OTHER_WAYS, ids=way_name)
def test_greedy_text_is_the_targets_and_every_row_has_its_own_distribution(way):
    target = tiny_llama(layers=4, vocab=16).double()
    source = CheckedDSpark(make_head(target, "dspark", block_size=5).double())
    engine = engine_for(target, source=source, num_stages=3, max_new_tokens=NEW_TOKENS, **way)
    for prompt in PROMPTS[1:3]:
        assert decode_exactly(engine, prompt).num_drafted > 0
    assert len(source.expected) > 5


@pytest.mark.parametrize("options", KINDS[1:], ids=str)
def test_every_kind_of_head_decodes_exactly(options):
    target = tiny_llama(layers=4, vocab=16).double()
    source = CheckedDSpark(make_head(target, "dspark", block_size=5, **options).double())
    way = {"schedule": "flowspec_continued", "max_new_tokens": NEW_TOKENS}
    engine = engine_for(target, source=source, num_stages=3, **way)
    assert decode_exactly(engine, PROMPTS[2]).num_drafted > 0


def test_a_row_that_is_taken_for_its_parent_is_noticed(monkeypatch):
    """Known-bad: every row is behind the root's token, as if the block had no places."""
    target = tiny_llama(layers=4, vocab=16)
    behind = DSparkSource._behind

    def rooted(source, tree, row):
        state = behind(source, tree, tree.depths[row])
        return source.draft.behind(state, torch.tensor(tree.tokens[0]))

    monkeypatch.setattr(DSparkSource, "_output", rooted)
    source = CheckedDSpark(make_head(target, "dspark", block_size=5))
    engine = engine_for(target, source=source, schedule="eagle", tree=CHAIN, num_stages=2)
    with pytest.raises(AssertionError):
        engine.decode(PROMPTS[2])


@pytest.mark.parametrize("way", SAMPLED_WAYS, ids=way_name)
def test_sampled_text_is_the_targets(way):
    target = sampling_target()
    assert_sampled_like_the_target(target, make_head(target, "dspark", block_size=5), **way)


@pytest.mark.parametrize("shape", [CHAIN, SMALL, TreeShape(kind="static")], ids=lambda s: s.label)
def test_a_tree_takes_one_pass_and_its_rows_differ(shape):
    target = tiny_llama(layers=4, vocab=16)
    source = DSparkSource(make_head(target, "dspark", block_size=6))
    tree = tree_of_one_pass(target, source, shape)
    rows = [row for row in range(len(tree)) if tree.depths[row] == 1]
    logits_QU = source._logits(tree, rows)
    if shape is not CHAIN:
        assert len(rows) > 1 and (logits_QU[0] - logits_QU[1]).abs().max() > 1e-3
