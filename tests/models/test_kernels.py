"""Compiled CPU kernels: products, attention, and how they are compiled."""

import os
import platform
import subprocess

import pytest
import torch
import torch.nn.functional as F
from tiny_models import tiny_llama

from pipedraft.models.speed import kernels, plain_layers
from pipedraft.models.speed.kernels import attend, library, pack, product, unpack_int4, weight

if library() is None:
    pytest.skip("no C++ compiler", allow_module_level=True)
NARROW = {"avx2": kernels.AVX2_FLAGS, "sse": ("-mno-avx",)}
"""Registers of 8 and of 4 floats -> flags to compile for them."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int4)


@pytest.fixture(params=["native", *NARROW])
def registers(request, monkeypatch):
    """Run the test with kernels for this machine, and for the registers of older ones."""
    if request.param != "native":
        if platform.machine() != "x86_64":
            pytest.skip("flags of x86")
        monkeypatch.setattr(kernels, "_limits", lambda: NARROW[request.param])
        found = library.__wrapped__()
        monkeypatch.setattr(kernels, "library", lambda: found)


def packed(weight_GH, dtype):
    """Return packed rows, scales, and the float32 weights they stand for."""
    if dtype == torch.float32:
        return weight_GH, None, weight_GH
    rows, scale_G = pack(weight_GH, dtype)
    whole = unpack_int4(rows) if dtype == torch.int4 else rows.float()
    if scale_G is not None:
        whole = whole * scale_G[:, None]
    return rows, scale_G, whole[:, : weight_GH.shape[1]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("channels", "inputs"), [(49, 80), (4, 160), (7, 32), (300, 1536)])
@pytest.mark.usefixtures("registers")
def test_a_product_is_the_stored_weights_and_a_row_has_the_same_bits_alone(channels, inputs, dtype):
    torch.manual_seed(0)
    if dtype == torch.float32:
        inputs += -inputs % kernels.BLOCK  # only packed weights are padded
    w, bias = torch.randn(channels, inputs), torch.randn(channels)
    w[3] = 0
    rows, scale_G, stored = packed(w, dtype)
    for num_rows in (1, 2, 5, 6, 7, 23, 70):
        x = torch.randn(num_rows, inputs)
        for own_bias in (None, bias):
            own = weight(rows, scale_G, own_bias)
            found = product(own, x)
            exact = x.double() @ stored.double().T + (0 if own_bias is None else own_bias)
            assert (found - exact).abs().max() < 1e-5 * exact.abs().max()
            assert torch.equal(found, torch.cat([product(own, row) for row in x.split(1)]))
            assert torch.equal(found, torch.cat([product(own, part) for part in x.split(4)]))


@pytest.mark.parametrize("num_threads", [1, 2])
def test_threads_change_no_bits(num_threads):
    torch.manual_seed(0)
    w, x = torch.randn(3072, 576), torch.randn(5, 576)
    expected, before = product(weight(w), x), torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert torch.equal(product(weight(w), x), expected)
    finally:
        torch.set_num_threads(before)


def test_rounding_is_as_close_as_the_format_and_rounds_nothing_twice():
    torch.manual_seed(0)
    w = torch.randn(40, 96)
    for dtype, most in ((torch.float16, 2e-3), (torch.int8, 0.02), (torch.int4, 0.3)):
        *_, stored = packed(w, dtype)
        assert 0 < (stored - w).abs().max() < most
        *_, again = packed(stored, dtype)
        assert torch.allclose(again, stored, atol=1e-6)  # GGUF's Q4_1 keeps its values


@pytest.mark.parametrize("size", [8, 32, 64, 80])
@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.usefixtures("registers")
def test_attention_is_torchs_and_hidden_columns_change_no_bits(num_rows, size):
    torch.manual_seed(0)
    query, buffer = torch.randn(1, 6, num_rows, size), torch.randn(2, 1, 2, 300, size)
    keys, values = buffer[0, :, :, :70], buffer[1, :, :, :70]
    seen = torch.rand(num_rows, 70) < 0.8
    seen[:, 3] = True
    mask = torch.zeros(1, 1, num_rows, 70).masked_fill_(~seen, torch.finfo(torch.float32).min)
    found = attend(query, keys, values, mask, 0.2)
    theirs = F.scaled_dot_product_attention(query, keys, values, mask, scale=0.2, enable_gqa=True)
    assert torch.allclose(found, theirs, atol=2e-6)
    swapped = values.transpose(1, 2).contiguous().transpose(1, 2)  # heads next to each other
    assert torch.equal(attend(query, keys, swapped, mask, 0.2), found)
    for row, seen_C in enumerate(seen):
        own = query[:, :, row : row + 1]
        no_mask = torch.zeros(1, 1, 1, int(seen_C.sum()))
        alone = attend(own, keys[:, :, seen_C], values[:, :, seen_C], no_mask, 0.2)
        assert torch.equal(alone, found[:, :, row : row + 1])


def test_rows_that_do_not_fit_are_refused_and_a_row_that_sees_nothing_is_zero():
    own = weight(torch.randn(8, 64))
    rows = torch.randn(2, 64)
    for wrong in (rows.double(), rows.bfloat16(), rows[:, :32], torch.randn(2, 65)):
        with pytest.raises(ValueError, match="want float32, 64 wide"):
            product(own, wrong)
    query, keys = torch.randn(1, 2, 2, 8), torch.randn(1, 1, 3, 8)
    mask = torch.full((1, 1, 2, 3), -1e30)
    mask[:, :, 0] = 0
    assert not attend(query, keys, keys, mask, 1.0)[:, :, 1].any()
    with pytest.raises(ValueError, match="want float32"):
        attend(query, keys, keys, mask[:, :, :1], 1.0)
    with pytest.raises(ValueError, match="keys have"):
        attend(query, keys, keys[..., :4], mask, 1.0)


def test_layers_take_rows_with_gaps_and_refuse_another_stages():
    target = tiny_llama(layers=1, hidden=128)
    layer = plain_layers.PlainLayer(target.model.layers[0])._kernels
    wide, turn = torch.randn(1, 5, 200), torch.randn(2, 5, 1, 64)
    gaps = kernels.before_attention(layer, wide[..., :128], *turn[..., ::2])
    copies = wide[..., :128].contiguous(), *turn[..., ::2].contiguous()
    assert torch.equal(gaps, kernels.before_attention(layer, *copies))
    for wrong in (wide[..., :64], copies[0].half()):
        with pytest.raises(ValueError, match="want float32, 128 wide"):
            kernels.before_attention(layer, wrong, *turn[..., ::2])


@pytest.mark.usefixtures("registers")
def test_a_layer_is_the_same_with_any_registers():
    target = tiny_llama(layers=1, hidden=128)
    layer = plain_layers.PlainLayer(target.model.layers[0])._kernels
    torch.manual_seed(0)
    hidden, attended = torch.randn(1, 3, 128), torch.randn(1, 3, layer.heads, layer.head_size)
    found = kernels.after_attention(layer, hidden, attended)
    own, mlp = target.model.layers[0], target.model.layers[0].mlp
    with torch.inference_mode():
        middle = hidden + own.self_attn.o_proj(attended.flatten(2))
        expected = middle + mlp(own.post_attention_layernorm(middle))
    assert torch.allclose(found, expected, atol=1e-5)


def test_torchs_variable_chooses_the_instructions(monkeypatch):
    monkeypatch.setattr(kernels.platform, "machine", lambda: "x86_64")
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    assert kernels._limits() == ()
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert kernels._limits() == kernels.AVX2_FLAGS
    monkeypatch.setattr(kernels.platform, "machine", lambda: "aarch64")
    assert kernels._limits() == ()


def test_a_library_is_compiled_once_and_only_ours_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels.constants, "HF_HOME", str(tmp_path))
    compiled, run = [], subprocess.run

    def count(command, **options):
        compiled.extend(command[-1:] if "-shared" in command else [])
        return run(command, **options)

    monkeypatch.setattr(kernels.subprocess, "run", count)
    monkeypatch.setattr(kernels, "FLAGS", (*kernels.FLAGS, "-O0"))  # compiles faster
    load = library.__wrapped__
    assert load() is not None and load() is not None and len(compiled) == 1
    (path,) = (tmp_path / "pipedraft" / "kernels").iterdir()
    os.chmod(path.parent, 0o777)  # somebody else may have put the file there
    assert load() is not None and len(compiled) == 2
    os.chmod(path.parent, 0o700)
    os.chmod(path, 0o666)
    assert load() is not None and len(compiled) == 3
    damaged = tmp_path / "other" / path.relative_to(tmp_path)
    damaged.parent.mkdir(parents=True, mode=0o700)
    damaged.write_bytes(b"no library")
    damaged.chmod(0o600)
    monkeypatch.setattr(kernels.constants, "HF_HOME", str(tmp_path / "other"))
    assert load() is not None and len(compiled) == 4
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("fault", ["none", "broken", "hanging"])
def test_without_a_working_compiler_torch_decodes(fault, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(kernels.constants, "HF_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    if fault != "none":
        script = tmp_path / "c++"
        wait = "[ $1 = --version ] || exec /bin/sleep 60" if fault == "hanging" else ""
        script.write_text(f"#!/bin/sh\n{wait}\necho no such flag >&2; [ $1 = --version ]\n")
        script.chmod(0o755)
        monkeypatch.setattr(kernels, "COMPILE_SECONDS", 0.5)
    assert library.__wrapped__() is None
    expected = {"none": "", "broken": "no such flag", "hanging": "timed out"}[fault]
    assert expected in caplog.text
