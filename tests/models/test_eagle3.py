"""EAGLE-3 with training-time test: attention, states, rows and loss."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from attention_runs import (
    MASKS,
    assert_loss_and_gradients,
    make_batch,
    output_and_gradients,
    rows,
    tiny_objective,
    tune,
)
from decode_runs import PROMPTS, SMALL, decode_exactly, engine_for
from tiny_drafts import decode_chain, make_head
from tiny_models import tiny_llama, tiny_qwen3

from pipedraft.models.heads.banded_attention import ttt_attention
from pipedraft.models.heads.draft import load_untied
from pipedraft.models.target import capture_hidden
from pipedraft.train.batch import Batch
from pipedraft.train.eagle3 import Eagle3Objective, chain_lengths, counted_steps
from pipedraft.train.methods import Eagle3TrainConfig
from pipedraft.train.objective import acceptance_length, feature_gap
from pipedraft.train.own_loop import NewHead

torch.set_num_threads(1)

# -- attention ----------------------------------------------------------------------------------


def attention_inputs(step, B=2, N=4, J=2, T=9, D=4):
    """Query, and keys and values for steps 0 .. step."""
    keys, values = ([rows(B, J, T, D, seed=s + 10 * i) for i in range(step + 1)] for s in (1, 2))
    return [rows(B, N, T, D), *keys, *values]


def dense_attention(query, *keys_and_values, window=None, lengths=None):
    """Oracle: one masked softmax over all steps' keys."""
    half, T, G = len(keys_and_values) // 2, query.shape[2], query.shape[1]
    G //= keys_and_values[0].shape[1]
    key, value = (
        torch.cat(x, 2).repeat_interleave(G, 1)
        for x in (keys_and_values[:half], keys_and_values[half:])
    )
    place, sizes = torch.arange(T), torch.tensor(lengths or [T])
    document = torch.arange(len(sizes)).repeat_interleave(sizes)
    behind, window = place[:, None] - place, window or T + half
    text = (behind >= 0) & (behind + half - 1 < window) & (document[:, None] == document)
    own = [(behind == 0) & (half - 1 - step < window) for step in range(1, half)]
    mask = torch.cat([text, *own], 1)
    scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ value


def attend(query, *keys_and_values):
    half = len(keys_and_values) // 2
    return ttt_attention(query, keys_and_values[:half], keys_and_values[half:])


@pytest.mark.parametrize("step", [0, 1, 6])
@pytest.mark.parametrize(
    "shape", [{}, {"T": 1}, {"T": 2, "N": 3, "J": 3}, {"N": 6, "J": 1}], ids=str
)
def test_attention_and_all_gradients_equal_the_dense_reference(step, shape):
    inputs = attention_inputs(step, **shape)
    found = (output_and_gradients(attention, inputs) for attention in (attend, dense_attention))
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("step", [0, 1, 4])
@pytest.mark.parametrize("window", [1, 3, 70])
@pytest.mark.parametrize("lengths", [None, [90, 1, 59]])
def test_attention_in_a_window_equals_the_dense_reference(window, step, lengths):
    inputs, half = attention_inputs(step, T=150), step + 1

    def windowed(query, *rest):
        return ttt_attention(query, rest[:half], rest[half:], lengths, window)

    dense = partial(dense_attention, window=window, lengths=lengths)
    found = (output_and_gradients(attention, inputs) for attention in (windowed, dense))
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def test_attention_under_autocast_computes_in_bfloat16():
    inputs = [x.detach().float().requires_grad_() for x in attention_inputs(3, T=70, D=16)]
    expected = output_and_gradients(dense_attention, [x.double() for x in inputs])
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(*inputs)
    assert out.dtype is torch.bfloat16
    assert (out - expected[0]).abs().max() < 4e-2 * expected[0].abs().max()
    (out * rows(*out.shape, seed=4).detach()).sum().backward()
    for x, y in zip(inputs, expected[1:], strict=True):
        assert (x.grad - y).abs().max() < 4e-2 * y.abs().max()


# -- rows that count ----------------------------------------------------------------------------


def counts_at(mask, row, step, rows="turn") -> bool:
    """Spell out the rule: x_{t+1} and x_{t+2+i} belong to one turn, a run of ones."""
    first, label = row + 1, row + 2 + step
    if rows != "turn":
        shift = int(rows == "speculators")  # which counts a text's last token, too
        fed = row + step + shift
        return 0 < fed < len(mask) - 1 + shift and bool(mask[fed])
    return label < len(mask) and all(mask[first : label + 1])


@pytest.mark.parametrize(
    "mask",
    [
        [0, 0, 1, 1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 0, 1, 0, 0, 1, 1, 1, 1],
        [1] * 9,
        [0] * 5,
        [1],
        [0, 1],
    ],
    ids=str,
)
def test_a_row_counts_at_the_steps_whose_label_is_in_the_turn_of_its_token(mask):
    lengths = chain_lengths(torch.tensor([mask]).bool(), 4)[0].tolist()
    for row in range(len(mask)):
        assert [counts_at(mask, row, step) for step in range(4)] == [
            step < lengths[row] for step in range(4)
        ]


# -- states and loss ----------------------------------------------------------------------------


def make_objective(target=None, **options) -> Eagle3Objective:
    config = Eagle3TrainConfig(**{"num_steps": 3, **options})
    return tiny_objective(Eagle3Objective, config, target)


ROPE = {"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
FLAGS = [{}, {"norm_output": True}, {"fc_norm": True, "norm_output": True}]
WINDOWED = {"sliding_window": 3, **ROPE}


def features_of(objective, batch):
    taps = capture_hidden(objective.target, batch.ids_BT, objective.draft.taps)
    return objective.draft.feature(taps)


@pytest.mark.parametrize("flags", [*FLAGS, WINDOWED], ids=str)
@pytest.mark.parametrize("family", [tiny_llama, tiny_qwen3])
def test_the_states_of_training_are_those_of_decoding(family, flags):
    steps, T = 4, 12
    objective = make_objective(family(layers=6, hidden=32, vocab=24), num_steps=steps, **flags)
    draft, batch = objective.draft, make_batch([[1] * T] * 2)
    with torch.no_grad():
        feature = features_of(objective, batch)
        # Every row with a label at its step, the two texts' rows interleaved.
        lengths, order = chain_lengths(batch.mask_BT, steps).flatten().sort(descending=True)
        step_rows = [order[lengths > step] for step in range(steps)]
        states = draft.unroll(feature, batch.ids_BT, step_rows)
        for text in range(2):
            for row in range(T - 2):
                ids_T, depth = batch.ids_BT[text], min(steps, T - 2 - row)
                chain = decode_chain(draft, ids_T, feature[text], row, depth)
                for step, expected in enumerate(chain):
                    place = (step_rows[step] == text * T + row).nonzero().item()
                    actual = states[step][place]
                    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
                    torch.testing.assert_close(draft.logits(actual), draft.logits(expected))


def test_training_without_the_window_is_not_decoding(monkeypatch):
    monkeypatch.setattr(
        "pipedraft.models.heads.eagle3.ttt_attention", lambda *inputs: ttt_attention(*inputs[:-1])
    )
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        test_the_states_of_training_are_those_of_decoding(tiny_llama, WINDOWED)


def plain_loss(objective, batch):
    """Oracle: every row at every step with a dense mask, whole logits, gradients by autograd."""
    config, draft, ids = objective.config, objective.draft, batch.ids_BT
    B, T = ids.shape
    taps = capture_hidden(objective.target, ids, {*draft.taps, draft.config.num_target_layers})
    last_full = objective.target.model.norm(taps[draft.config.num_target_layers])
    p_full = objective.target.lm_head(last_full).softmax(-1)
    state, loss, keys, values = draft.feature(taps), 0.0, [], []
    sums = {
        f"{k}_{i + 1}": 0.0
        for k in ("acceptance", "agreement", "count")
        for i in range(config.num_steps)
    }
    for step in range(config.num_steps):
        tokens = torch.nn.functional.pad(ids, (0, step + 1))[:, step + 1 :][:, :T]
        cos, sin = (x[:, None] for x in draft.rotary(torch.arange(T) + step, state.dtype))
        residual, query, key, value = draft.project(draft.embed(tokens), state, cos, sin)
        keys.append(key.transpose(1, 2))
        values.append(value.transpose(1, 2))
        out = dense_attention(query.transpose(1, 2), *keys, *values)
        state = draft.finish(residual, out.transpose(1, 2))
        q = draft.logits(state).softmax(-1)
        for text in range(B):
            for row in range(T):
                mask = batch.mask_BT[text, : batch.lengths[text]].tolist()
                if not counts_at(mask, row, step, config.rows):
                    continue
                p_all, q_row = p_full[text, row + 1 + step], q[text, row]
                p = p_all[draft.draft_ids]
                sums[f"acceptance_{step + 1}"] += torch.minimum(p, q_row).sum().item()
                top = draft.draft_ids[q_row.argmax()]
                sums[f"agreement_{step + 1}"] += float(top == p_all.argmax())
                sums[f"count_{step + 1}"] += 1
                overlap, p = torch.minimum(p, q_row).sum(), p / p.sum()
                divergence = {
                    "kl": (p * (p.log() - q_row.log())).sum(),
                    "tv": 1 - overlap,
                    "lk": -overlap.log(),
                }[config.loss]
                wanted = last_full[text, row + 1 + step]
                gap = (draft.normed(state)[text, row] - wanted).square().sum()
                divergence = divergence + config.feature_weight * gap / wanted.square().sum()
                loss = loss + config.step_decay**step * divergence
    return loss, sums


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"draft_vocab_size": 10},
        {"loss": "tv", "draft_vocab_size": 10},
        {"loss": "lk", "step_decay": 0.5},
        {"feature_weight": 3.0, "draft_vocab_size": 10},
        {"rows": "specforge"},
        {"rows": "speculators", "draft_vocab_size": 10},
        {"rows": "official"},
        {"norm_before_residual": True, "norm_before_fc": True, "query_key_norm": True},
        *FLAGS[1:],
    ],
    ids=str,
)
def test_loss_sums_and_gradients_equal_the_plain_formula(options):
    objective, batch = make_objective(**options), make_batch(MASKS)
    assert_loss_and_gradients(objective, batch, *plain_loss(objective, batch))


def test_a_curriculum_trains_short_chains_first_and_evaluates_whole_ones():
    batch, generator = make_batch(MASKS), torch.Generator()
    short, whole = make_objective(num_steps=2), make_objective(num_steps=4)
    both = make_objective(num_steps=4, curriculum_steps=2, curriculum_share=0.5)
    for other in (short, whole):
        other.load_state_dict(both.state_dict())
    for done, equal in ((0.0, short), (0.49, short), (0.5, whole)):
        both.done = done
        expected, output = equal(batch, generator), both(batch, generator)
        assert output.loss == expected.loss
        assert output.sums == expected.sums
        sums = {"loss": float(output.loss.detach()), "count": float(output.counted)}
        metrics = both.summarize(sums | {name: float(x) for name, x in output.sums.items()})
        assert ("agreement_3" in metrics) == (equal is whole)
        # Short chains count as four draft tokens, the later ones accepted as often as the last.
        last = "agreement_4" if equal is whole else "agreement_2"
        names = [f"agreement_{step}" for step in range(1, 5)]
        rates = [metrics.get(name, metrics[last]) for name in names]
        assert metrics["acceptance_length_T0"] == acceptance_length(rates)
    own = NewHead(both, SimpleNamespace(), 0)
    for done, equal in ((0.0, short), (1.0, whole)):
        expected = equal(batch, generator)
        assert own.loss(batch, done=done) == expected.loss / expected.counted
    both.done = 0.0
    with torch.no_grad():
        assert both(batch, generator).sums == whole(batch, generator).sums


def test_a_share_without_a_curriculum_is_refused():
    with pytest.raises(ValueError, match=r"model.curriculum_share: 0.5 without .*; give both"):
        make_objective(curriculum_share=0.5)


def test_another_distance_to_the_target_is_noticed(monkeypatch):
    """Known-bad: a row compared with the next row's target."""
    objective, batch = make_objective(feature_weight=3.0), make_batch(MASKS)
    expected = plain_loss(objective, batch)
    shifted = lambda h, t, index: feature_gap(h, t.roll(1, 0), index)  # noqa: E731
    monkeypatch.setattr("pipedraft.train.objective.feature_gap", shifted)
    with pytest.raises(AssertionError):
        assert_loss_and_gradients(objective, batch, *expected)


def test_a_curriculum_never_makes_chains_longer():
    objective = make_objective(num_steps=2, curriculum_steps=5)
    objective.done = 0.0
    assert objective.counted(make_batch(MASKS)).shape[1] == 2


def test_a_step_that_attends_to_no_draft_token_of_its_own_row_is_another_function(monkeypatch):
    """Known-bad: causal attention to step 0 alone, as if draft tokens left no keys."""
    objective, batch = make_objective(), make_batch(MASKS)
    expected = objective(batch, torch.Generator()).loss
    monkeypatch.setattr(
        "pipedraft.models.heads.eagle3.ttt_attention",
        lambda q, k, v, *_: ttt_attention(q, k[:1], v[:1]),
    )
    assert (objective(batch, torch.Generator()).loss - expected).abs() > 1e-4 * expected


@pytest.mark.parametrize("mask", [[1] * 6, [0, 1, 0, 1, 1, 1], [0, 0, 1, 1, 1, 0], [1, 0]])
def test_a_speculators_row_has_the_mask_of_its_fed_token_and_the_last_one_counts(mask):
    """speculators 0.9.0 drops each text's first mask, and moves the rest by one more a step."""
    batch = Batch.padded([{"input_ids": mask, "loss_mask": mask}], 0)
    counted_TS = counted_steps(batch, 3, "speculators")[0]
    for step in range(3):
        theirs = [bool(x) for x in mask[1 + step :]]
        assert counted_TS[:, step].tolist() == theirs + [False] * (len(mask) - len(theirs))
    named = {"loss_mask": batch.mask_BT, "lengths": torch.tensor(batch.lengths)}
    assert torch.equal(counted_steps(named, 3, "speculators")[0], counted_TS)


@pytest.mark.parametrize("rows", ["turn", "speculators", "specforge", "official"])
def test_padding_and_company_change_nothing(rows):
    objective = make_objective(rows=rows)
    masks = [*MASKS, [0, 0, 1, 1, 1], [0, 1, 0, 1]]  # documents that end on an assistant token, too
    batch, alone, documents = make_batch(masks), 0.0, []
    together = objective(batch, torch.Generator())
    for index, mask in enumerate(masks):
        documents.append({"input_ids": batch.ids_BT[index, : len(mask)], "loss_mask": mask})
        one = Batch.padded(documents[-1:], 0)
        alone = alone + objective(one, torch.Generator()).loss
    torch.testing.assert_close(together.loss, alone, rtol=1e-10, atol=0)
    packed = objective(Batch.packed(documents), torch.Generator())
    torch.testing.assert_close(packed.loss, alone, rtol=1e-9, atol=0)
    assert packed.counted == together.counted > 0


def test_simulated_acceptance_length_multiplies_the_rates_of_the_draft_tokens():
    objective = make_objective(num_steps=3)
    sums = {"loss": 8.0, "count": 4.0, "mass_outside": 0.0}
    rates = {"agreement": (0.5, 0.5, 1.0), "acceptance": (0.8, 0.5, 0.0)}
    for step in range(3):
        sums[f"count_{step + 1}"] = 4.0 - step
        for key, values in rates.items():
            sums[f"{key}_{step + 1}"] = values[step] * (4.0 - step)
    metrics = objective.summarize(sums)
    assert metrics["loss"] == 2
    assert metrics["agreement_2"] == metrics["acceptance_2"] == pytest.approx(0.5)
    assert (
        metrics["acceptance_length_T0"] == metrics["score"] == pytest.approx(1 + 0.5 + 0.25 + 0.25)
    )
    assert metrics["acceptance_length_T1"] == pytest.approx(1 + 0.8 + 0.4)


def test_training_makes_chains_longer_and_autocast_follows_float64():
    target = tiny_llama(layers=6, hidden=32, vocab=24)
    objective = make_objective(target, num_steps=3).float()
    target.float()
    batch = make_batch([[0, 0] + [1] * 20] * 2)
    first, *_, last = tune(objective, batch, 20)
    assert last["score"] > first["score"] + 0.5
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        lower = objective(batch, torch.Generator())
    loss = float(lower.loss / lower.counted)
    assert abs(loss - last["loss"]) < 0.1 * last["loss"]


@pytest.mark.parametrize("schedule", ["eagle", "flowspec_continued"])
def test_a_window_changes_no_text(schedule):
    target = tiny_qwen3(vocab=16)
    head = make_head(target, sliding_window=3)
    tree = {"tree": SMALL} if schedule == "eagle" else {}
    way = {"schedule": schedule, "num_stages": 3, "max_new_tokens": 12, **tree}
    assert decode_exactly(engine_for(target, draft=head, **way), PROMPTS[1]).num_drafted > 0


def test_a_setting_of_earlier_versions_loads_if_null(tmp_path):
    make_head(tiny_llama()).save(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    for rank in (None, 48):
        content["architecture"]["candidate_rank"] = rank
        (tmp_path / "config.json").write_text(json.dumps(content))
        if rank is None:
            assert load_untied(tmp_path).draft_type == "eagle3"
        else:
            with pytest.raises(ValueError, match="candidate_rank 48 is a setting of earlier"):
                load_untied(tmp_path)
