"""Helpers for attention and objective tests: rows in memory order, losses and gradients."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from tiny_drafts import add_noise, seeded
from tiny_models import tiny_llama
from torch import Tensor

from pipedraft.train.batch import Batch

MASKS = ([0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1], [1, 1, 1, 0, 0, 1, 1, 1, 1], [0, 0, 1])
LABELS = [list(range(23, 3, -1)), [9, 20, 3, 11, 20]]


def tiny_objective(objective_class, config, target=None):
    """Return an objective in float64 with no parameter at a special value."""
    target = tiny_llama(layers=6, hidden=32, vocab=24) if target is None else target
    rows = {"input_ids": LABELS, "loss_mask": [[1] * len(ids) for ids in LABELS]}
    data = SimpleNamespace(train=Dataset.from_dict(rows), report=SimpleNamespace(to_dict=dict))
    objective = objective_class(
        config, target.double(), target_name="tiny", revision=None, data=data
    )
    add_noise(objective, 0.5, seeded(3))
    return objective.double()


def make_batch(masks, vocab=24):
    generator = seeded(5)
    rows = [torch.randint(vocab, (len(mask),), generator=generator).tolist() for mask in masks]
    pairs = zip(rows, masks, strict=True)
    return Batch.padded([{"input_ids": ids, "loss_mask": mask} for ids, mask in pairs], 0)


def rows(*shape, dtype=torch.float64, seed=0):
    """Random [..., heads, T, D] in the memory order [..., T, heads, D]."""
    *batch, heads, T, D = shape
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*batch, T, heads, D, generator=generator, dtype=torch.float64)
    return x.to(dtype).transpose(-3, -2).requires_grad_()


def output_and_gradients(attend, inputs, **options) -> list[torch.Tensor]:
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = attend(*inputs, **options)
    weight = rows(*out.shape, seed=4).detach().to(out.dtype)
    gradients = torch.autograd.grad((out * weight).sum(), inputs, materialize_grads=True)
    return [out.detach(), *gradients]


def assert_loss_and_gradients(objective, batch, expected, expected_sums):
    """Assert that an objective's loss, sums and gradients equal a written-out formula."""
    parameters = dict(objective.named_parameters())
    expected_gradients = torch.autograd.grad(expected, [*parameters.values()])
    output = objective(batch, torch.Generator())
    assert int(output.counted) == objective.num_supervised(batch) == expected_sums["count_1"]
    torch.testing.assert_close(output.loss, expected, rtol=1e-9, atol=1e-12)
    for name, value in expected_sums.items():
        assert output.sums[name].item() == pytest.approx(value, abs=1e-9), name
    gradients = torch.autograd.grad(output.loss, [*parameters.values()])
    for name, x, y in zip(parameters, gradients, expected_gradients, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def assert_nothing_without_rows(objective, empty, full=None) -> None:
    """Assert a zero loss and a zero gradient for every trained parameter.

    Other processes wait for each of these gradients.

    Args:
        empty: a batch without a supervised row.
        full: another batch; its sums have the same names.
    """
    output = objective(empty, torch.Generator())
    assert float(output.loss.detach()) == 0 and int(output.counted) == 0
    if full is not None:
        assert output.sums.keys() == objective(full, torch.Generator()).sums.keys()
    output.loss.backward()
    for name, parameter in objective.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and not parameter.grad.any(), name


def tune(objective, batch, steps: int) -> list[dict[str, float]]:
    """Train on one batch and return the metrics at every step."""
    optimizer = torch.optim.AdamW(objective.parameters(), lr=1e-2)
    metrics = []
    for _ in range(steps):
        output = objective(batch, torch.Generator())
        (output.loss / output.counted).backward()
        optimizer.step()
        optimizer.zero_grad()
        sums = {"loss": output.loss.item(), "count": output.counted.item()}
        sums |= {name: value.item() for name, value in output.sums.items()}
        metrics.append(objective.summarize(sums))
    return metrics


def assert_autocast_is_close(objective, batch) -> None:
    """Assert that bfloat16 autocast stays close to float32, rates of 3-token chains included."""
    outputs = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            outputs.append(objective(batch, torch.Generator().manual_seed(0), depth=3))
    exact, rounded = outputs
    assert float(rounded.loss.detach()) == pytest.approx(float(exact.loss.detach()), rel=0.05)
    for key, value in exact.sums.items():
        assert float(rounded.sums[key]) == pytest.approx(float(value), rel=0.1, abs=3), key
    rounded.loss.backward()
    assert all(p.grad.isfinite().all() for p in objective.parameters() if p.requires_grad)


def dense_structural_mask(
    T: int, n: int, occupancy: int, depth: int = 0, block_of_depth: Sequence[int] | None = None
) -> Tensor:
    """Build the boolean reference mask from structural attention's rule.

    Returns:
        mask [T, R T], R = 1 + the largest block: entry (t, r T + T') is True if the query at
        position t sees position T' in block r.
    """
    blocks = torch.tensor(range(n + 1) if block_of_depth is None else block_of_depth)
    distance_TT = torch.arange(T)[:, None] - torch.arange(T)
    k_TT = torch.where(depth + distance_TT < occupancy, depth + distance_TT, n)
    visible_TT = (distance_TT >= 0) & (depth < occupancy or depth == n)
    mask_TRT = torch.zeros(T, int(blocks.max()) + 1, T, dtype=torch.bool)
    mask_TRT.scatter_(1, blocks[k_TT.clamp(0, n)][:, None], visible_TT[:, None])
    return mask_TRT.flatten(1)
