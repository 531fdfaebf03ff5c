"""SPD's start by ridge regression, several fill draws per batch, and regression beside the loss."""

from types import SimpleNamespace

import pytest
import torch
from tiny_models import tiny_llama, tiny_qwen3

from pipedraft.models.target import capture_hidden
from pipedraft.train import spd
from pipedraft.train.batch import Batch
from pipedraft.train.methods import SPDTrainConfig
from pipedraft.train.ridge import Ridge
from pipedraft.train.spd import SPDObjective


def make_objective(target=None, **settings) -> SPDObjective:
    config = SPDTrainConfig(num_stages=4, num_layers=1, **settings)
    no_data = SimpleNamespace(report=SimpleNamespace(to_dict=dict))
    target = tiny_llama(layers=4) if target is None else target
    return SPDObjective(config, target, target_name="tiny", revision=None, data=no_data)


def make_rows(seed: int = 0) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = (12, 5, 9, 20)
    ids = [torch.randint(1, 30, (n,), generator=generator).tolist() for n in lengths]
    return [{"input_ids": row, "loss_mask": [1] * len(row)} for row in ids]


def pairs(objective: SPDObjective, rows: list, count: int) -> list[torch.Tensor]:
    """Return newest tokens' embeddings, normed features at distances 1 to ``count``, and u."""
    found = []
    for row in rows:
        layers = {layer for depth in objective.draft.feature_layers for layer in depth} | {4}
        taps = capture_hidden(objective.target, torch.tensor([row["input_ids"]]), layers)
        near = [
            spd.normed(taps[objective.draft.feature_layers[d][-1]][0])[count - d : -d]
            for d in range(1, count + 1)
        ]
        own, last = (taps[layer][0][count:] for layer in (0, 4))
        found.append([x.double() for x in (own, torch.stack(near, 1), spd.normed(last))])
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


@pytest.mark.parametrize("make_batch", [lambda rows: Batch.padded(rows, 0), Batch.packed])
def test_the_start_is_the_best_linear_continuation(make_batch, monkeypatch):
    monkeypatch.setattr(spd, "FITTED_ROWS", 2)  # a batch for each fit
    objective = make_objective(start="ridge")
    before = [p.clone() for p in objective.draft.projections.parameters()]
    objective.start_on(iter([make_batch(make_rows(seed)) for seed in (0, 1)]))
    weight, *others = (p.double() for p in objective.draft.projections.parameters())
    assert all(torch.equal(a.double(), b) for a, b in zip(before[1:], others, strict=True))
    # First, the newest token with the one before it.
    own, near, unit = pairs(objective, make_rows(0), 1)
    fit = Ridge(64, 32, torch.device("cpu"))
    fit.add(torch.cat([own, near[:, 0]], -1), unit)
    torch.testing.assert_close(weight.T, fit.solve(spd.FIT_PENALTY, 32)[:32], atol=1e-5, rtol=1e-4)
    attention = objective.draft.layers[0].self_attn
    values, _ = fit.solve_rank(spd.FIT_PENALTY, len(attention.v_proj.weight), 32)
    found = attention.v_proj.weight.double().T
    torch.testing.assert_close(found / found.norm(), values / values.norm(), atol=1e-4, rtol=1e-3)
    # Then what all heads read, if each attends to its distance alone.
    count = attention.num_heads // attention.num_key_value_heads
    own, near, unit = pairs(objective, make_rows(1), count)
    read = (near @ found).unflatten(-1, (-1, attention.head_size)).transpose(1, 2).flatten(1)
    gradient = (read @ attention.o_proj.weight.double().T - (unit - own @ weight.T)).T @ read
    penalty = spd.FIT_PENALTY * (read.T @ read).diagonal().mean()
    gradient += penalty * attention.o_proj.weight.double()
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", [tiny_llama, tiny_qwen3])
def test_fitted_heads_attend_to_their_distances(kind):
    objective = make_objective(kind(layers=4))
    attention, rotary = objective.draft.layers[0].self_attn, objective.draft.rotary
    with torch.no_grad():
        attention.q_proj.weight.zero_()
        attention.k_proj.weight.zero_()
        constant = torch.zeros(32).index_fill(0, torch.tensor([3]), 1.0)
        spd.attend_to_distances(attention, rotary.frequencies, range(1, 9), constant, constant)
        rows = torch.randn(12, 32, generator=torch.Generator().manual_seed(0))
        rows[:, 3] = 1
        query, key, _ = attention.project(rows, *rotary.of_heads(torch.arange(12), torch.float32))
    groups = attention.num_heads // attention.num_key_value_heads
    assert groups > 1
    for head in range(attention.num_heads):
        scores = query[-1, head] @ key[:, head // groups].T / attention.head_size**0.5
        place = 11 - (head % groups + 1)
        assert int(scores.argmax()) == place
        if kind is tiny_llama:  # Qwen3's norms set the scores' scale
            drops = scores[place] - scores[[place - 1, place + 1]]
            torch.testing.assert_close(drops, torch.full((2,), spd.SCORE_DROP))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"query": "all"},
        {"timing": "output_states"},
        {"tokens_per_step": 2},
        {"features": "listed", "depth_layers": ((1,), (2,), (3,), (2, 4)), "normed_last": True},
    ],
    ids=lambda settings: "_".join(settings) or "paper",
)
def test_an_untrained_head_is_closer_to_the_target_than_a_random_one(settings, monkeypatch):
    monkeypatch.setattr(spd, "FITTED_ROWS", 300)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 30, (16, 40), generator=generator).tolist()
    batch = Batch.padded([{"input_ids": row, "loss_mask": [1] * 40} for row in ids], 0)
    target, losses, right = tiny_llama(layers=4), [], Ridge.add

    def wrong(fit: Ridge, x: torch.Tensor, y: torch.Tensor) -> None:
        right(fit, x, y.roll(1, 0))

    for start, add in (("deepest", right), ("ridge", right), ("ridge", wrong)):
        torch.manual_seed(1)
        objective = make_objective(target, start=start, **settings)
        with monkeypatch.context() as patched:
            patched.setattr(Ridge, "add", add)
            objective.start_on(iter([batch, batch]))
        full = [objective.draft.config.max_in_flight]
        with torch.no_grad():
            losses.append(float(objective(batch, torch.Generator(), occupancies=full).loss))
    assert losses[1] < 0.9 * losses[0] and losses[1] < 0.9 * losses[2]


def test_both_fits_share_an_only_batch():
    objective = make_objective(start="ridge")
    attention = objective.draft.layers[0].self_attn
    before = {name: x.clone() for name, x in attention.state_dict().items()}
    objective.start_on(iter([Batch.padded(make_rows(), 0)]))
    for name, x in attention.state_dict().items():
        assert x.isfinite().all() and not torch.equal(x, before[name]), name


def test_the_start_is_left_alone_unless_asked_for():
    objective = make_objective()
    before = objective.draft.projections[0].weight.clone()
    objective.start_on(iter([Batch.padded(make_rows(), 0)]))
    assert torch.equal(before, objective.draft.projections[0].weight)


def test_several_fills_are_the_mean_of_single_ones():
    batch = Batch.padded(make_rows(), 0)
    one, three = make_objective(), make_objective(fills=3)
    three.draft.load_state_dict(one.draft.state_dict())
    generator = torch.Generator().manual_seed(3)
    singles = [one(batch, generator) for _ in range(3)]
    together = three(batch, torch.Generator().manual_seed(3))
    assert together.counted == singles[0].counted
    expected = sum(single.loss for single in singles) / 3
    torch.testing.assert_close(together.loss, expected)
    for name in ("acceptance", "agreement"):
        mean = sum(single.sums[name] for single in singles) / 3
        torch.testing.assert_close(together.sums[name], mean)


def test_no_fill_is_refused():
    with pytest.raises(ValueError, match="model.fills: 0; give at least 1"):
        make_objective(fills=0)


def test_the_feature_loss_is_the_distance_relative_to_the_targets_norm():
    batch = Batch.padded(make_rows(), 0)
    plain, weighted = make_objective(), make_objective(feature_weight=3.0)
    weighted.draft.load_state_dict(plain.draft.state_dict())
    outputs = [one(batch, torch.Generator().manual_seed(3)) for one in (plain, weighted)]
    counted, order, occupancy = [], *plain._fill(batch, torch.Generator().manual_seed(3))
    taps = plain.hidden(order)
    stream_BTH = plain.draft.norm(plain.draft(taps, occupancy))
    last_BTH = plain.target.model.norm(taps[4])
    for text, length in enumerate(order.lengths):
        counted += [(text, row) for row in range(length - 1)]  # all are assistant tokens
    gaps = [
        (stream_BTH[place] - last_BTH[place]).square().sum() / last_BTH[place].square().sum()
        for place in counted
    ]
    expected = outputs[0].loss + 3 * torch.stack(gaps).sum()
    torch.testing.assert_close(outputs[1].loss, expected)
    # The metrics and a validation's loss are those of the divergence alone.
    assert outputs[0].sums == outputs[1].sums
    with torch.no_grad():
        losses = [one(batch, torch.Generator(), occupancies=[4]).loss for one in (plain, weighted)]
    assert losses[0] == losses[1]
