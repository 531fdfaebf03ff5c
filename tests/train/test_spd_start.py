"""SPD's start by ridge regression, several fill draws per batch, and regression beside the loss."""

from types import SimpleNamespace

import pytest
import torch
from tiny_models import tiny_llama

from pipedraft.models.target import capture_hidden
from pipedraft.train.batch import Batch
from pipedraft.train.methods import SPDTrainConfig
from pipedraft.train.spd import RIDGE, SPDObjective


def make_objective(**settings) -> SPDObjective:
    config = SPDTrainConfig(num_stages=4, num_layers=1, **settings)
    no_data = SimpleNamespace(report=SimpleNamespace(to_dict=dict))
    return SPDObjective(
        config, tiny_llama(layers=4), target_name="tiny", revision=None, data=no_data
    )


def make_rows(seed: int = 0) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = (12, 5, 9, 20)
    ids = [torch.randint(1, 30, (n,), generator=generator).tolist() for n in lengths]
    return [{"input_ids": row, "loss_mask": [1] * len(row)} for row in ids]


@pytest.mark.parametrize("make_batch", [lambda rows: Batch.padded(rows, 0), Batch.packed])
def test_ridge_solves_the_normal_equations_without_padding(make_batch):
    rows = make_rows()
    objective = make_objective(start="ridge")
    before = [p.clone() for p in objective.draft.projections.parameters()]
    objective.start_on(iter([make_batch(rows)]))
    embedded, states = [], []
    for row in rows:
        ids = torch.tensor([row["input_ids"]])
        found = capture_hidden(objective.target, ids, {0, 4})
        embedded.append(found[0][0].double())
        states.append(found[4][0].double())
    e_PH, h_PH = torch.cat(embedded), torch.cat(states)
    u_PH = h_PH / h_PH.square().mean(-1, keepdim=True).sqrt()
    weight, *others = (p.double() for p in objective.draft.projections.parameters())
    penalty = RIDGE * (e_PH.T @ e_PH).diagonal().mean()
    gradient = (e_PH @ weight.T - u_PH).T @ e_PH + penalty * weight
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-4, rtol=0)
    assert all(torch.equal(a.double(), b) for a, b in zip(before[1:], others, strict=True))


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
