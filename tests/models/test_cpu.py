import json
import os
import subprocess
import sys
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from decode_runs import PROMPTS, decode_exactly, engine_for, friendly_module
from needs import NEEDS_KERNELS
from tiny_models import tiny_llama
from torch.optim import _muon

from pipedraft.models.speed import attending, cpu, kernels
from pipedraft.models.speed.cpu import argmax, lay_out, muon_in_float32, torch_orthogonalize


@pytest.fixture(params=["kernels", "no compiler"])
def is_compiled(request, monkeypatch):
    """Run a test with the compiled kernels, and with torch alone."""
    if request.param == "kernels" and kernels.library() is None:
        pytest.skip("no C++ compiler")
    if request.param == "no compiler":
        monkeypatch.setattr(kernels, "library", lambda: None)
    return request.param == "kernels"


def large_layer(has_bias=False):
    layer = torch.nn.Linear(256, cpu.LEAST_WEIGHTS // 256, bias=has_bias).requires_grad_(False)
    lay_out(torch.nn.Sequential(layer))
    assert type(layer) is cpu.LaidOutLinear
    return layer


def product(layer, x):
    """Product in float64, and float32's error bound."""
    bias = None if layer.bias is None else layer.bias.double()
    exact = F.linear(x.double(), layer.weight.double(), bias)
    return exact, 1e-5 * exact.abs().max()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 8, cpu.MOST_ROWS])
def test_few_rows_times_a_laid_out_weight_are_the_product(rows, has_bias, is_compiled):
    layer = large_layer(has_bias)
    wide = torch.randn(rows, 300)
    for x in (wide[:, :256].contiguous(), wide[:, 44:], torch.randn(1, rows, 256)):
        exact, tolerance = product(layer, x)
        with torch.inference_mode():
            found = layer(x)
        assert found.shape == exact.shape and (found - exact).abs().max() < tolerance
        assert found.is_contiguous()


def test_a_laid_out_weight_may_change(is_compiled):
    layer, x = large_layer(), torch.randn(3, 256)
    changes = (
        lambda weight: weight.mul_(2),
        lambda weight: setattr(layer, "weight", torch.nn.Parameter(weight + 1, False)),
        lambda weight: setattr(weight, "data", torch.randn_like(weight)),
        lambda weight: setattr(weight, "data", torch.randn(256, len(weight)).T),  # not contiguous
    )
    for change in changes:
        change(layer.weight)
        exact, tolerance = product(layer, x)
        with torch.inference_mode():
            assert (layer(x) - exact).abs().max() < tolerance


def test_many_rows_gradients_other_dtypes_and_small_layers_take_the_usual_way():
    layer = large_layer()
    for x in (torch.randn(cpu.MOST_ROWS + 1, 256), torch.randn(0, 256)):
        with torch.inference_mode():
            assert torch.equal(layer(x), F.linear(x, layer.weight))
    x = torch.randn(3, 256, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    with torch.no_grad():  # as transformers generates
        assert torch.equal(layer(x), F.linear(x, layer.weight))
    with torch.inference_mode():
        rounded = deepcopy(layer).bfloat16()
        assert torch.equal(rounded(x.bfloat16()), F.linear(x.bfloat16(), rounded.weight))
    small, x = torch.nn.Linear(24, 40), torch.randn(3, 24)
    lay_out(small)
    with torch.inference_mode():
        assert torch.equal(small(x), F.linear(x, small.weight, small.bias))


@pytest.mark.parametrize("shape", [(1,), (63,), (64,), (3, 50), (2, 0), (0,)])
def test_under_autocast_products_have_whole_rows_and_the_same_results(shape, monkeypatch):
    layer, usual, counts = torch.nn.Linear(24, 40), torch.nn.Linear(24, 40), set()
    usual.load_state_dict(layer.state_dict())
    lay_out(layer)
    multiply = F.linear
    monkeypatch.setattr(F, "linear", lambda x, *rest: counts.add(len(x)) or multiply(x, *rest))
    inputs = [torch.randn(*shape, 24, requires_grad=True)]
    inputs.append(inputs[0].detach().clone().requires_grad_())
    gradient, outs = torch.randn(*shape, 40), []
    for x, one in zip(inputs, (layer, usual), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            outs.append(one(x))
        outs[-1].backward(gradient.to(torch.bfloat16))
        if one is layer:
            assert counts == {cpu.whole_rows(gradient[..., 0].numel())}
    torch.testing.assert_close(*outs, rtol=0.01, atol=0.01)
    torch.testing.assert_close(*(x.grad for x in inputs), rtol=0.02, atol=0.02)
    for found, expected in zip(layer.parameters(), usual.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=0.02, atol=0.05)


def test_zeros_fill_the_last_rows_in_bfloat16_only():
    x = torch.randn(2, 3, 65, 4)
    assert cpu.padded(x, 2) is x
    found = cpu.padded(x.bfloat16(), 2)
    assert found.shape == (2, 3, 128, 4)
    assert torch.equal(found[:, :, :65], x.bfloat16()) and not found[:, :, 65:].any()


def laid_out_engine(monkeypatch, tree_width):
    monkeypatch.setattr(cpu, "LEAST_WEIGHTS", 1)
    target = tiny_llama(layers=4, hidden=128)  # heads of 32 entries, as the kernels take them
    module = friendly_module(target, num_stages=2)
    lay_out(module)
    way = {"schedule": "spd", "num_stages": 2, "tree_width": tree_width, "max_new_tokens": 24}
    return engine_for(target, draft=module, **way)


@pytest.mark.parametrize("tree_width", [1, 4])
def test_laid_out_layers_decode_what_transformers_generates(tree_width, is_compiled, monkeypatch):
    """The reference runs the same layers, but outside inference mode, so with torch's products."""
    engine = laid_out_engine(monkeypatch, tree_width)
    for prompt in PROMPTS:
        decode_exactly(engine, prompt)
    layer = engine.target.stages[0].plain._plain[0]
    assert (layer._kernels is not None) == is_compiled


FAULTS = {
    "product": lambda own: lambda weight, rows: own(weight, rows).flip(-1),
    "before_attention": lambda own: lambda *x: own(*x[:3], x[3].abs()),  # turned the wrong way
    "attend": lambda own: lambda *x: own(*x[:3], torch.zeros_like(x[3]), x[4]),  # sees siblings
    "after_attention": lambda own: lambda *x: own(*x) - x[1],  # without a residual
}


@NEEDS_KERNELS
@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_kernel_is_found_by_the_text(name, monkeypatch):
    engine = laid_out_engine(monkeypatch, 4)
    monkeypatch.setattr(kernels, name, FAULTS[name](getattr(kernels, name)))
    monkeypatch.setattr(attending, "KERNEL_ROWS", 64)  # trees' attention, too
    with pytest.raises(AssertionError):
        for prompt in PROMPTS:
            decode_exactly(engine, prompt)


@pytest.mark.parametrize("size", [1, 7, 8, 96, 300, 4096])
def test_argmax_is_the_first_of_the_largest(size):
    x = torch.randint(0, 3, (40, size)).float()
    assert torch.equal(argmax(x), x.argmax(-1))


@pytest.mark.parametrize("shape", [(24, 8), (8, 24)])
def test_muon_orthogonalizes_in_float32_where_bfloat16_is_emulated(shape, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(shape))
    weight.grad = torch.randn(shape)
    muon = torch.optim.Muon([weight], lr=1.0, momentum=0.0, weight_decay=0.0)
    reference = torch_orthogonalize(weight.grad, (3.4445, -4.775, 2.0315), 5, 1e-7)
    with muon_in_float32(torch.device("cpu")):
        muon.step()
    assert _muon._zeropower_via_newtonschulz is torch_orthogonalize
    update = -weight.detach()
    update *= reference.float().norm() / update.norm()  # torch scales it by the shape
    torch.testing.assert_close(update, reference.float(), atol=0.02, rtol=0)
    assert not torch.equal(update.bfloat16().float(), update), "bfloat16 has been there"


@pytest.mark.parametrize("given", [{}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}])
def test_threads_that_wait_sleep_soon_unless_the_environment_says(given):
    """libgomp reads the variable once, at torch's import, so it must be set by then."""
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    code = (
        "import pipedraft, json, os, sys; assert 'torch' not in sys.modules; "
        "print(json.dumps(dict(os.environ)))"
    )
    environment = {name: value for name, value in os.environ.items() if name not in names} | given
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    found = json.loads(done.stdout)
    expected = given or {"GOMP_SPINCOUNT": "3000"}
    assert {name: found[name] for name in names if name in found} == expected


def test_freed_memory_is_used_again_without_page_faults():
    """A step's tensors are freed together, so glibc would return the heap's end to the system."""
    # Without the setting, the blocks are malloc's alone: after torch's import, something small at
    # the heap's end keeps it in some processes.
    code = (
        "import ctypes, resource, sys\n"
        "kept = sys.argv[1] == 'kept'\n"
        "if kept:\n"
        "    import torch; from pipedraft.models.speed import cpu; cpu.keep_freed_memory()\n"
        "libc, size = ctypes.CDLL(None), ctypes.c_size_t(1 << 23)\n"
        "def step():\n"
        "    if kept: tensors = [torch.ones(1 << 21) for _ in range(8)]\n"
        "    blocks = [ctypes.c_void_p() for _ in range(8)]\n"
        "    for it in blocks: libc.posix_memalign(ctypes.byref(it), 64, size)\n"
        "    for it in blocks: libc.memset(it, 1, size)\n"
        "    for it in blocks: libc.free(it)\n"
        "for _ in range(3): step()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "for _ in range(5): step()\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)"
    )

    def faults(how):
        done = subprocess.run([sys.executable, "-c", code, how], capture_output=True)
        return int(done.stdout)

    assert faults("kept") < 100
    assert faults("default") > 10_000, "the setting is of no use here"
