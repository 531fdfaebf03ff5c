"""Fits in closed form, and EAGLE-3 heads that start from them."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tiny_models import tiny_llama

from pipedraft.models.target import capture_hidden
from pipedraft.train.batch import Batch
from pipedraft.train.eagle3 import FUSED_PENALTY, Eagle3Objective
from pipedraft.train.methods import Eagle3TrainConfig
from pipedraft.train.ridge import Ridge


def filled(num_rows=50, inputs=6, outputs=4):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, inputs, generator=generator, dtype=torch.float64)
    y = torch.randn(num_rows, outputs, generator=generator, dtype=torch.float64)
    fit = Ridge(inputs, outputs, torch.device("cpu"))
    for part in (slice(0, 20), slice(20, num_rows)):
        fit.add(x[part], y[part])
    return x, y, fit


def test_a_fit_from_parts_has_no_gradient():
    x, y, fit = filled()
    w = fit.solve(0.1)
    penalty = 0.1 * (x.T @ x).diagonal().mean()
    gradient = x.T @ (x @ w - y) + penalty * w
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-9, rtol=0)


@pytest.mark.parametrize("rank", [1, 2, 4, 9])
def test_no_other_fit_of_this_rank_is_closer(rank):
    x, y, fit = filled()
    a, b = fit.solve_rank(0.0, rank)
    # Eckart-Young: of the fitted values, the first singular directions are the closest.
    fitted = x @ fit.solve(0.0)
    u, s, v = torch.linalg.svd(fitted, full_matrices=False)
    best = u[:, :rank] * s[:rank] @ v[:rank]
    torch.testing.assert_close(x @ a @ b, best)
    assert a.shape[1] == b.shape[0] == min(rank, 4)


# -- EAGLE-3 ------------------------------------------------------------------------------------


def make_objective(target=None, **settings) -> Eagle3Objective:
    config = Eagle3TrainConfig(**{"num_steps": 2, "start": "ridge", **settings})
    no_data = SimpleNamespace(report=SimpleNamespace(to_dict=dict))
    torch.manual_seed(1)
    target = tiny_llama(layers=6, hidden=32) if target is None else target
    return Eagle3Objective(config, target, target_name="tiny", revision=None, data=no_data)


def make_rows(seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = (40, 5, 90, 200, 120)
    ids = [torch.randint(1, 30, (n,), generator=generator).tolist() for n in lengths]
    return [{"input_ids": row, "loss_mask": [1] * len(row)} for row in ids]


def pairs(objective):
    """Return fused states, unit states and embeddings at t, and unit states and embeddings next."""
    found = []
    for row in make_rows():
        ids = torch.tensor([row["input_ids"]])
        layers = {*objective.draft.taps, objective.num_target_layers}
        taps = {k: x[0] for k, x in capture_hidden(objective.target, ids, layers).items()}
        fused = torch.cat([taps[layer] for layer in objective.draft.config.feature_layers], -1)
        last = taps[objective.num_target_layers]
        unit = last / last.square().mean(-1, keepdim=True).sqrt()
        embedded = objective.draft.embed(ids[0])
        found.append([x.double() for x in (fused[:-1], unit[:-1], unit[1:], embedded[1:])])
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


@pytest.mark.parametrize("make_batch", [lambda rows: Batch.padded(rows, 0), Batch.packed])
def test_the_start_is_the_best_linear_continuation(make_batch):
    objective = make_objective()
    objective.start_on(iter([make_batch(make_rows())]))
    draft, attention = objective.draft, objective.draft.midlayer.self_attn
    fused, unit, after, embedded = pairs(objective)
    fc = draft.fc.weight.double()
    penalty = FUSED_PENALTY * (fused.T @ fused).diagonal().mean()
    gradient = (fused @ fc.T - unit).T @ fused + penalty * fc
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=2e-3, rtol=0)
    # Values and outputs of the heads that attend to their own row.
    joined = torch.cat([F.rms_norm(x, (x.shape[1],)) for x in (embedded, unit)], -1)
    size, count = attention.head_size, attention.num_key_value_heads
    group = attention.num_heads // count
    values = (joined.float() @ attention.v_proj.weight.T).unflatten(1, (count, size))
    own = attention.o_proj.weight.unflatten(1, (count, group, size))[:, :, 0]
    step = torch.einsum("mjd,hjd->mh", values, own)
    fit = Ridge(joined.shape[1], unit.shape[1], torch.device("cpu"))
    fit.add(joined, after - unit)
    a, b = fit.solve_rank(0.01, size * count)
    torch.testing.assert_close(step.double(), joined @ a @ b, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("settings", [{}, {"norm_output": True}, {"norm_before_residual": True}])
def test_an_untrained_head_is_closer_to_the_target_than_a_random_one(settings):
    batch = Batch.padded(make_rows(), 0)
    target = tiny_llama(layers=6, hidden=32)
    losses = []
    for start in ("deepest", "ridge"):
        objective = make_objective(target, start=start, **settings)
        objective.start_on(iter([batch]))
        with torch.no_grad():
            losses.append(float(objective(batch, torch.Generator()).loss))
    assert losses[1] < 0.9 * losses[0]


def test_a_fit_to_the_wrong_token_is_no_start(monkeypatch):
    """Known-bad: each row fitted to the next row's state."""
    batch, target = Batch.padded(make_rows(), 0), tiny_llama(layers=6, hidden=32)
    losses, right = [], Ridge.add
    for wrong in (False, True):
        objective = make_objective(target)
        if wrong:
            monkeypatch.setattr(Ridge, "add", lambda fit, x, y: right(fit, x, y.roll(1, 0)))
        objective.start_on(iter([batch]))
        monkeypatch.undo()
        with torch.no_grad():
            losses.append(float(objective(batch, torch.Generator()).loss))
    assert losses[0] < losses[1]


@pytest.mark.parametrize("goes_on", [False, True])
def test_other_starts_are_left_alone(goes_on, tmp_path):
    objective = make_objective(start="deepest")
    if goes_on:
        objective.draft.save(tmp_path)
        objective = make_objective(init_from=str(tmp_path))
    before = {name: x.clone() for name, x in objective.draft.state_dict().items()}
    objective.start_on(iter([Batch.padded(make_rows(), 0)]))
    for name, x in objective.draft.state_dict().items():
        assert torch.equal(x, before[name]), name
