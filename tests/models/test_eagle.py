"""EAGLE-1: decoding equals training, the supervised rows, and the checkpoint's contents."""

import math

import pytest
import torch
import torch.nn.functional as F
from attention_runs import MASKS, make_batch, tiny_objective
from tiny_drafts import decode_chain, make_head, seeded
from tiny_models import tiny_llama, tiny_qwen3
from train_runs import BY_HEART

from pipedraft.models import load_draft
from pipedraft.models.heads.eagle import Eagle
from pipedraft.models.target import capture_hidden
from pipedraft.train.batch import Batch
from pipedraft.train.eagle import EVALUATED_DEPTH, EagleObjective, chain_rows, feature_noise
from pipedraft.train.loop import make_optimizers
from pipedraft.train.methods import EagleTrainConfig

LENGTH = 11


def make_eagle(target) -> Eagle:
    return make_head(target, "eagle").double()


def text_of(target, head) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [T] and float64 features [T, H] for one text."""
    generator = torch.Generator().manual_seed(5)
    ids_T = torch.randint(0, target.config.vocab_size, (LENGTH,), generator=generator)
    taps = capture_hidden(target, ids_T[None], head.taps)
    return ids_T, head.feature(taps)[0].double()


# -- train = decode -------------------------------------------------------------------------


@pytest.mark.parametrize("make_target", [tiny_llama, tiny_qwen3])
def test_training_states_equal_decoding_states_at_every_depth(make_target):
    target = make_target()
    head = make_eagle(target)
    ids_T, features_TH = text_of(target, head)
    trained_RH = head.causal_rows(ids_T[None, 1:], features_TH[None, :-1])[0]
    every_R = torch.arange(LENGTH - 1)
    unrolled = head.unroll(features_TH[None, :-1], ids_T[None], [every_R] * 4)
    for row in range(LENGTH - 1):
        depth = min(4, LENGTH - 1 - row)
        decoded = decode_chain(head, ids_T, features_TH, row, depth)
        assert torch.allclose(trained_RH[row], decoded[0], atol=1e-10), row
        for step, state in enumerate(decoded):
            assert torch.allclose(unrolled[step][row], state, atol=1e-10), (row, step)


def test_the_first_state_is_the_formula_of_the_paper():
    """Written out for the first row: it attends only to itself, so its output is its value."""
    target = tiny_llama()
    head = make_eagle(target)
    ids_T, features_TH = text_of(target, head)
    embedding_H = target.get_input_embeddings()(ids_T[1]).double()
    z_H = head.fc.weight @ torch.cat([embedding_H, features_TH[0]]) + head.fc.bias
    values = (head.layer.self_attn.v_proj.weight @ z_H).unflatten(0, (2, -1))
    attended = head.layer.self_attn.o_proj.weight @ values.repeat_interleave(2, 0).flatten()
    r_H = z_H + attended
    normed = head.layer.post_attention_layernorm(r_H)
    expected_H = r_H + head.layer.mlp(normed)
    state_H = head.causal_rows(ids_T[None, 1:], features_TH[None, :-1])[0, 0]
    assert torch.allclose(state_H, expected_H, atol=1e-12)
    logits_V = target.lm_head.weight.double() @ expected_H
    assert torch.allclose(head.logits(state_H.float()).double(), logits_V, atol=1e-4)


# -- which rows count -----------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_row_counts_when_its_tokens_are_all_of_one_assistant_turn(depth):
    generator = torch.Generator().manual_seed(0)
    mask_BT = torch.rand(20, 17, generator=generator) < 0.7
    counted_BR = chain_rows(mask_BT, depth)
    assert counted_BR.shape == (20, 16)
    for mask, counted in zip(mask_BT.tolist(), counted_BR.tolist(), strict=True):
        for t in range(16):
            inside = t + 1 + depth < 17
            assert counted[t] == (inside and all(mask[t + 1 : t + 2 + depth])), t


# -- the objective --------------------------------------------------------------------------


def batch_of(trainer, num_rows: int) -> Batch:
    return trainer.load(trainer.data.train, list(range(num_rows)))


def test_the_loss_is_the_regression_and_a_tenth_of_the_divergence(world, tmp_path):
    """Row by row, from the target's own logits and final hidden states."""
    trainer = world.trainer("eagle", tmp_path, model__noise=0)
    objective, batch = trainer.objective, batch_of(trainer, 3)
    output = objective(batch, seeded(0))
    head, target = objective.draft, objective.target
    expected, count, agreed = 0.0, 0, 0
    with torch.no_grad():
        for ids_T, mask_T in zip(batch.ids_BT, batch.mask_BT.tolist(), strict=True):
            full = target(input_ids=ids_T[None], output_hidden_states=True)
            f_TH, logits_TV = full.hidden_states[-1][0], full.logits[0]
            states_RH = head.causal_rows(ids_T[None, 1:], f_TH[None, :-1])[0]
            for t in range(len(ids_T) - 2):
                if mask_T[t + 1] and mask_T[t + 2]:
                    p_V = logits_TV[t + 1].softmax(-1)  # for token t + 2
                    draft_V = target.lm_head(states_RH[t])
                    divergence = (p_V * (p_V.log() - draft_V.log_softmax(-1))).sum()
                    expected += float(F.smooth_l1_loss(states_RH[t], f_TH[t + 1]))
                    expected += 0.1 * float(divergence)
                    agreed += int(p_V.argmax() == draft_V.argmax())
                    count += 1
    assert int(output.counted) == objective.num_supervised(batch) == count
    assert float(output.loss.detach()) == pytest.approx(expected, rel=1e-4)
    assert int(output.sums["agreement"]) == agreed


def test_noise_is_uniform_and_wider_for_shorter_texts():
    features = torch.zeros(2, 400, 50)
    lengths = torch.tensor([400, 100])
    noise = feature_noise(features, lengths, seeded(0))
    for example, length in zip(noise, lengths.tolist(), strict=True):
        assert example.abs().max() <= 256 / length
        assert float(example.std()) == pytest.approx(512 / length / math.sqrt(12), rel=0.02)
    assert not torch.equal(noise[0] * 4, noise[1])


def test_noise_comes_from_the_generator_and_only_while_training(world, tmp_path):
    trainer = world.trainer("eagle", tmp_path)
    objective, batch = trainer.objective, batch_of(trainer, 3)
    with torch.no_grad():
        first, again, other = (float(objective(batch, seeded(s)).loss) for s in (0, 0, 1))
        evaluated = [float(objective(batch, seeded(s), depth=2).loss) for s in (0, 1)]
    assert first == again != other
    assert evaluated[0] == evaluated[1] < min(first, other)  # untrained: passes the state on


def test_rates_of_deeper_draft_tokens_are_those_of_decoded_chains(world, tmp_path):
    trainer = world.trainer("eagle", tmp_path)
    objective, batch = trainer.objective, batch_of(trainer, 2)
    head, target, depth = objective.draft, objective.target, 3
    with torch.no_grad():
        sums = objective(batch, seeded(0), depth=depth).sums
        count, agreed = 0, 0
        for ids_T, mask_T in zip(batch.ids_BT, batch.mask_BT.tolist(), strict=True):
            f_TH = target(input_ids=ids_T[None], output_hidden_states=True).hidden_states[-1][0]
            for t in range(len(ids_T) - 1 - depth):
                if all(mask_T[t + 1 : t + 2 + depth]):
                    state_H = decode_chain(head, ids_T, f_TH, t, depth)[-1]
                    wanted = target.lm_head(f_TH[t + depth]).argmax()
                    agreed += int(head.logits(state_H).argmax() == wanted)
                    count += 1
    assert 0 < count == int(sums["count_3"]) < int(sums["count_2"])
    assert int(sums["agreement_3"]) == agreed


def test_the_score_is_the_length_of_a_chain_with_the_measured_rates(world, tmp_path):
    trainer = world.trainer("eagle", tmp_path)
    steps = range(2, EVALUATED_DEPTH + 1)
    sums = {"loss": 1.0, "count": 10.0, "regression": 1.0, "kl": 1.0}
    sums |= {"acceptance": 6.0, "agreement": 8.0}
    sums |= {f"count_{i}": 5.0 for i in steps}
    sums |= {f"agreement_{i}": 4.0 for i in steps} | {f"acceptance_{i}": 3.0 for i in steps}
    metrics = trainer.objective.summarize(sums)
    assert metrics["score"] == pytest.approx((1 - 0.8 ** (EVALUATED_DEPTH + 1)) / (1 - 0.8))
    length = (1 - 0.6 ** (EVALUATED_DEPTH + 1)) / (1 - 0.6)
    assert metrics["acceptance_length_T1"] == pytest.approx(length)
    sums["agreement_3"] = 0.0
    assert trainer.objective.summarize(sums)["score"] == pytest.approx(1 + 0.8 + 0.64)


# -- training -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["eagle", "spd"])
def test_muon_takes_the_maps_between_hidden_states(world, tmp_path, method):
    trainer = world.trainer(method, tmp_path, optim__name="muon")
    named = dict(trainer.objective.named_parameters())
    optimizers = make_optimizers(list(named.items()), trainer.config.optim)
    (muon,) = [o for o in optimizers if isinstance(o, torch.optim.Muon)]
    taken = {id(p) for group in muon.param_groups for p in group["params"]}
    names = {name for name, p in named.items() if id(p) in taken}
    parts = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up")
    layer = {"eagle": "layer", "spd": "layers.0"}[method]
    expected = {f"draft.{layer}.{part}_proj.weight" for part in (*parts, "mlp.down")}
    features = {name for name in named if "projections" in name or name == "draft.fc.weight"}
    assert len(features) == {"eagle": 1, "spd": 3}[method]
    assert names == expected | features


def test_another_optimizers_moments_are_refused(world, tmp_path):
    trainer = world.trainer("spd", tmp_path, optim__name="muon")
    name = "draft.projections.0.weight"
    moments = {f"{name}:exp_avg": torch.zeros(1)}
    with pytest.raises(ValueError, match=f"{name} had another optimizer then"):
        trainer.state._load_moments(moments)


def test_the_loop_ends_a_curriculum(world, tmp_path):
    chains = {"num_steps": 3, "curriculum_steps": 1, "curriculum_share": 0.5}
    changes = {f"model__{name}": value for name, value in chains.items()}
    trainer = world.trainer("eagle3", tmp_path, max_steps=4, **changes)
    metrics = [trainer.optimize([batch_of(trainer, 4)]) for _ in range(4)]
    assert ["agreement_2" in entry for entry in metrics] == [False, False, True, True]


def test_a_handful_of_conversations_is_learned_by_heart(world, tmp_path):
    trainer = world.trainer("eagle", tmp_path, model__noise=0, **BY_HEART)
    batch = batch_of(trainer, 4)
    metrics = [trainer.optimize([batch]) for _ in range(80)]
    assert all(math.isfinite(entry["loss"]) for entry in metrics)
    assert metrics[-1]["loss"] < 0.4 * metrics[0]["loss"]
    assert metrics[-1]["agreement"] > metrics[0]["agreement"] + 0.3


# -- checkpoints ----------------------------------------------------------------------------


def test_a_checkpoint_holds_the_head_alone_and_needs_its_target(world, tmp_path):
    trainer = world.trainer("eagle", tmp_path, max_steps=2)
    metrics = trainer.run()
    assert metrics["score"] == metrics["acceptance_length_T0"] >= 1
    draft, target = trainer.objective.draft, trainer.objective.target
    loaded = load_draft(str(tmp_path), target)
    assert {name.partition(".")[0] for name in loaded.state_dict()} == {"fc", "layer"}
    ids_BT = torch.arange(12).view(2, 6)
    features_BTH = loaded.feature(capture_hidden(target, ids_BT, loaded.taps))
    with torch.no_grad():
        expected, states = (
            d.logits(d.causal_rows(ids_BT[:, 1:], features_BTH[:, :-1])) for d in (draft, loaded)
        )
    assert torch.equal(states, expected)
    vocabulary = target.config.vocab_size
    with pytest.raises(ValueError, match="hash: .* != .*; give that target"):
        load_draft(str(tmp_path), tiny_llama(vocab=vocabulary, seed=9))


@pytest.mark.parametrize("rows", ["turn", "official"])
def test_alone_padded_and_packed_documents_have_one_loss(rows):
    config = EagleTrainConfig(noise=0.0, rows=rows)
    objective = tiny_objective(EagleObjective, config)
    masks = [*MASKS, [0, 0, 1, 1, 1], [0, 1, 0, 1]]  # documents that end on an assistant token, too
    batch, alone, documents = make_batch(masks), 0.0, []
    for index, mask in enumerate(masks):
        documents.append({"input_ids": batch.ids_BT[index, : len(mask)], "loss_mask": mask})
        one = Batch.padded(documents[-1:], 0)
        alone = alone + objective(one, torch.Generator()).loss
    for together in (batch, Batch.packed(documents)):
        torch.testing.assert_close(
            objective(together, torch.Generator()).loss, alone, rtol=1e-9, atol=0
        )
        assert objective.num_supervised(together) > 0
