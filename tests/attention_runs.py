"""What tests of attention and losses share: rows in memory order, outputs and gradients."""

import pytest
import torch


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
    """An objective's loss, sums and gradients are those of a formula written out."""
    parameters = dict(objective.named_parameters())
    expected_gradients = torch.autograd.grad(expected, [*parameters.values()])
    output = objective(batch, torch.Generator())
    assert int(output.counted) == objective.num_counted(batch) == expected_sums["count_1"]
    torch.testing.assert_close(output.loss, expected, rtol=1e-9, atol=1e-12)
    for name, value in expected_sums.items():
        assert output.sums[name].item() == pytest.approx(value, abs=1e-9), name
    gradients = torch.autograd.grad(output.loss, [*parameters.values()])
    for name, x, y in zip(parameters, gradients, expected_gradients, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
