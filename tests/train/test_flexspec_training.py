"""Training FlexSpec's draft: losses, frozen parts, and acceptance in evaluation."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from decode_runs import (
    CHAIN,
    engine_for,
    greedy_reference,
)
from tiny_drafts import FROZEN, KINDS, kind_name
from train_runs import BY_HEART, assert_learns_by_heart, losses_on_one_batch

from pipedraft.models import load_draft
from pipedraft.models.heads.flexspec import FlexSpec
from pipedraft.train import flexspec as flexspec_training
from pipedraft.train.batch import Batch
from pipedraft.train.flexspec import FlexSpecObjective, prefix_survival
from pipedraft.train.methods import FlexSpecTrainConfig
from pipedraft.train.objective import labeled_rows

# -- training -----------------------------------------------------------------------------------


def expected_loss(objective, batch) -> tuple[float, float]:
    """Loss and agreement, row by row from the target's own logits and final hidden states."""
    draft, target, config = objective.draft, objective.target, objective.config
    temperature, loss, agreed = config.distillation_temperature, 0.0, 0
    for ids_T, mask_T in zip(batch.ids_BT, batch.mask_BT.tolist(), strict=True):
        full = target(input_ids=ids_T[None], output_hidden_states=True)
        states_TEH = draft(ids_T[None])[0]
        for t in range(len(ids_T) - 1):
            if mask_T[t + 1]:
                logits_V, own_U = full.logits[0, t].double(), draft.logits(states_TEH[t]).double()
                inside_U = (logits_V[draft.draft_ids] / temperature).softmax(-1)
                log_q_U = (own_U / temperature).log_softmax(-1)
                divergence = F.kl_div(log_q_U, inside_U, reduction="sum").item()
                loss += config.distillation_weight * temperature**2 * divergence
                if config.feature_weight:
                    wanted_H = full.hidden_states[-1][0, t]
                    error_H = objective.regressor(states_TEH[t, -1]) - wanted_H
                    loss += config.feature_weight * error_H.square().mean().item()
                agreed += int(draft.draft_ids[log_q_U.argmax()] == logits_V.argmax())
    return loss, agreed


LOSSES = [
    {},
    {"model__preset": "paper", "model__feature_weight": 1, "model__distillation_temperature": 2},
    {"model__draft_vocab_size": 40, "model__feature_weight": 0},
    {"model__feature_source": "self", "model__distillation_weight": 0.5},
]


def compare_losses(world, folder, changes) -> None:
    trainer = world.trainer("flexspec", folder, **changes)
    objective, batch = trainer.objective, trainer.load(trainer.data.train, [0, 1, 2])
    if changes.get("model__feature_weight") != 0:
        torch.manual_seed(0)
        objective.regressor.weight.data.add_(0.1 * torch.randn(32, 32))
    output = objective(batch, torch.Generator())
    loss, agreed = expected_loss(objective, batch)
    assert output.counted == objective.num_supervised(batch) == labeled_rows(batch).sum() > 0
    assert output.loss.item() == pytest.approx(loss, rel=1e-4)
    assert output.sums["agreement"] == agreed


@pytest.mark.parametrize("changes", LOSSES, ids=kind_name)
def test_the_loss_is_that_of_the_paper_per_hidden_entry(world, tmp_path, changes):
    with torch.no_grad():
        compare_losses(world, tmp_path, changes)


def shift_features(monkeypatch, by):
    right = FlexSpecObjective.hidden

    def mutant(objective, batch):
        return {layer: x.roll(by, 1) for layer, x in right(objective, batch).items()}

    monkeypatch.setattr(FlexSpecObjective, "hidden", mutant)


@pytest.mark.parametrize("by", [1, -1])
def test_a_feature_of_the_wrong_position_is_noticed(world, tmp_path, monkeypatch, by):
    shift_features(monkeypatch, by)
    with torch.no_grad(), pytest.raises(AssertionError):
        compare_losses(world, tmp_path, {})


def train_and_compare(world, folder, changes) -> None:
    """After a few steps every trained weight has moved, and no frozen one by a single bit."""
    trainer = world.trainer("flexspec", folder, max_steps=4, optim__name="muon", **changes)
    objective = trainer.objective
    draft, target = objective.draft, objective.target
    before = {name: value.clone() for name, value in draft.state_dict().items()}
    teacher = {name: value.clone() for name, value in target.state_dict().items()}
    metrics = trainer.run()
    assert metrics["score"] == metrics["acceptance_length_T0"] >= 1
    for name, value in target.state_dict().items():
        assert torch.equal(value, teacher[name]), name
    for name, value in draft.state_dict().items():
        assert torch.equal(value, before[name]) == name.startswith(FROZEN), name
    frozen = {name for name, p in draft.named_parameters() if not p.requires_grad}
    assert frozen == {name for name in before if name.startswith(FROZEN[:3])}
    loaded = load_draft(str(folder), target)
    for name, value in draft.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert not any("regressor" in name for name in loaded.state_dict())


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[5]], ids=kind_name)
def test_frozen_parts_keep_every_bit_and_the_others_move(world, tmp_path, kind):
    train_and_compare(world, tmp_path, {f"model__{key}": value for key, value in kind.items()})


def test_an_anchor_that_is_not_frozen_is_noticed(world, tmp_path, monkeypatch):
    initialize = FlexSpec.initialize

    def mutant(draft, target, draft_ids=None):
        initialize(draft, target, draft_ids)
        draft.anchor.requires_grad_(True)

    monkeypatch.setattr(FlexSpec, "initialize", mutant)
    with pytest.raises(AssertionError, match="anchor"):
        train_and_compare(world, tmp_path, {})


@pytest.mark.parametrize("changes", LOSSES, ids=kind_name)
def test_it_learns_a_handful_of_conversations_by_heart(world, tmp_path, changes):
    assert_learns_by_heart(world.trainer("flexspec", tmp_path, **BY_HEART, **changes))


# -- acceptance in evaluation -------------------------------------------------------------------


def test_survival_counts_the_chains_that_fit_and_their_products():
    generator = torch.Generator().manual_seed(0)
    counted_BS = torch.rand(6, 17, generator=generator) < 0.8
    rates_M = torch.rand(int(counted_BS.sum()), generator=generator)
    sums, counts = prefix_survival(rates_M, counted_BS, 4)
    rates = iter(rates_M.tolist())
    grid = [[next(rates) if c else None for c in row] for row in counted_BS.tolist()]
    for depth in range(1, 5):
        chains = [row[t : t + depth] for row in grid for t in range(len(row) - depth + 1)]
        chains = [chain for chain in chains if None not in chain]
        assert counts[depth - 1] == len(chains)
        expected = sum(math.prod(chain) for chain in chains)
        assert sums[depth - 1].item() == pytest.approx(expected, rel=1e-5)


def test_the_score_is_the_acceptance_length_of_decoded_chains(world, tmp_path):
    """Decode texts that the target wrote itself, greedily, with every row supervised."""
    trainer = world.trainer("flexspec", tmp_path, optim__lr=1e-2, max_steps=30)
    losses_on_one_batch(trainer, 8, 30)
    objective, depth = trainer.objective, flexspec_training.EVALUATED_DEPTH
    draft, target = objective.draft, objective.target
    prompt, new_tokens = [7, 3, 9, 3], 60
    text = [*prompt, *greedy_reference(target, prompt, new_tokens)]
    mask = [0] * len(prompt) + [1] * (len(text) - len(prompt))
    batch = Batch.padded([{"input_ids": text, "loss_mask": mask}], 0)
    with torch.no_grad():
        sums = objective(batch, torch.Generator(), depth=depth).sums
        states_TEH = draft(batch.ids_BT)[0]
        draft_tokens = draft.draft_ids[draft.logits(states_TEH).argmax(-1)].tolist()
    right = [
        draft_token == token for draft_token, token in zip(draft_tokens, text[1:], strict=False)
    ]
    assert sum(right) == sums["agreement"] + sum(right[: len(prompt) - 1])
    for j in range(1, depth + 1):
        chains = [right[t : t + j] for t in range(len(prompt) - 1, len(right) - j + 1)]
        assert sums[f"chains_{j}"] == len(chains)
        assert sums[f"survived_T0_{j}"] == sum(map(all, chains))
    shape = replace(CHAIN, depth=depth)
    engine = engine_for(
        target,
        draft=draft.eval(),
        schedule="eagle",
        tree=shape,
        num_stages=1,
        max_new_tokens=new_tokens,
    )
    at, lengths = len(prompt), []
    while at < len(text) - 1:  # expected rounds: a run of accepted draft tokens, and one more token
        run = 0
        while run < depth and at + run < len(right) and right[at + run]:
            run += 1
        lengths.append(min(run + 1, len(text) - 1 - at))
        at += run + 1
    assert engine.decode(prompt).round_lengths == lengths


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"stem_layers": 3},
            r"model\.stem_layers: 3; give at least 0 and at most 2; for a deeper draft",
        ),
        ({"preset": "paper", "stem_layers": 1}, r"model\.stem_layers: 1 .*preset practical"),
        ({"preset": "paper", "feature_source": "self"}, r"model\.feature_source: self .*practical"),
    ],
)
def test_values_that_do_not_fit_are_refused_by_name(values, message):
    with pytest.raises(ValueError, match=message):
        FlexSpecTrainConfig(**values)
