"""Rounded and joined weights: products, passes, loading. test_bitwise.py compares decoded texts."""

from copy import deepcopy

import pytest
import torch
from decode_runs import PROMPTS, decode_exactly, engine_for
from needs import NEEDS_KERNELS
from staged_targets import chain_segment, tiny
from tiny_drafts import make_head
from tiny_models import REPOSITORY, tiny_llama, tiny_mistral, tiny_qwen3

from pipedraft.models.speed import kernels, plain_layers, rounded
from pipedraft.models.speed.cpu import MOST_ROWS
from pipedraft.models.speed.rounded import (
    DTYPES,
    RoundedLinear,
    RoundedPart,
    dtype_of,
    round_target,
    rounded_dtype,
)
from pipedraft.models.target import StagedTarget, load_target
from pipedraft.models.target_part import load_target_part

ASSETS = str(REPOSITORY / "assets" / "target")
MAKERS = {"llama": tiny_llama, "qwen3": tiny_qwen3, "mistral": tiny_mistral}


EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def rounded_target(dtype, family="llama", hidden=64, **sizes):
    """Target with logits so close that other bits change its texts."""
    target = MAKERS[family](layers=4, hidden=hidden, vocab=1000, **sizes)
    round_target(target, dtype)
    return target


@NEEDS_KERNELS
@EVERY_DTYPE
def test_a_part_of_a_joined_layer_has_the_bits_of_the_layer(dtype):
    torch.manual_seed(0)
    layer = RoundedLinear(torch.randn(48, 80), torch.randn(48), dtype, keep_weight=False)
    x = torch.randn(9, 80)
    assert torch.equal(RoundedPart(layer, slice(10, 30))(x), layer(x)[:, 10:30])
    assert torch.equal(deepcopy(layer)(x), layer(x))


@NEEDS_KERNELS
@EVERY_DTYPE
@pytest.mark.parametrize(
    "hidden", [64, 128]
)  # heads of 16 and 32: products, or whole layers by kernels
@pytest.mark.parametrize("family", MAKERS)
def test_every_row_of_a_segment_has_the_bits_of_one_row_at_a_time(family, hidden, dtype):
    window = {"sliding_window": 12} if family == "mistral" else {}
    target = StagedTarget(rounded_target(dtype, family, hidden, **window), 2)
    prompt, ids = torch.arange(20), torch.arange(30, 36)

    def logits_of(sizes):
        target.prefill(prompt)
        rows, first = [], 0
        for size in sizes:
            segment = chain_segment(target, ids[first : first + size])
            for stage in target.stages:
                segment = stage.forward(segment)
            rows.append(target.logits(segment.hidden))
            first += size
        return torch.cat(rows)

    alone = logits_of([1] * 6)
    assert torch.equal(alone, logits_of([6])) and torch.equal(alone, logits_of([4, 2]))


@NEEDS_KERNELS
def test_masked_attention_instead_of_rows_alone_changes_bits(monkeypatch):
    """Known-bad: a pass whose rows attend together, as in float32."""
    target = StagedTarget(rounded_target(torch.int8), 1)
    found = []
    for is_alone in (True, False):
        target.stages[0].is_rounded = is_alone
        target.prefill(torch.arange(200))
        segment = chain_segment(target, torch.arange(30, 46))
        found.append(target.stages[0].forward(segment).hidden)
    assert torch.allclose(*found, atol=0.05) and not torch.equal(*found)


@NEEDS_KERNELS
@EVERY_DTYPE
def test_a_loaded_target_and_its_parts_agree_and_keep_their_fingerprint(dtype):
    whole = load_target(ASSETS, dtype=dtype)
    half = range(whole.config.num_hidden_layers // 2)
    part = load_target_part(ASSETS, layers=half, has_embedding=True, has_head=True, dtype=dtype)
    x = torch.randn(3, whole.config.hidden_size)
    for name, module in part.named_modules():
        if isinstance(module, RoundedLinear | RoundedPart) and module.in_features == x.shape[1]:
            assert torch.equal(module(x), whole.get_submodule(name)(x)), name
    plain = load_target(ASSETS)
    head = make_head(plain)
    assert head.fingerprint(whole) == head.fingerprint(plain)
    assert not any(isinstance(x, torch.nn.Linear) for x in whole.modules())
    assert (dtype_of(whole), dtype_of(plain)) == (dtype, torch.float32)


@NEEDS_KERNELS
def test_other_families_and_devices_are_refused_or_run_in_half_precision():
    llama, other = (tiny(family).config for family in ("llama", "qwen3_5"))
    with pytest.raises(ValueError, match="--dtype: int8 is for targets of the families llama"):
        rounded.rounds(torch.int8, other, "cpu")
    with pytest.raises(ValueError, match="--dtype: int8 runs on a CPU, not on cuda:1"):
        rounded.rounds(torch.int8, llama, "cuda:1")
    whole = load_target(ASSETS, dtype=torch.float16, may_round=False)  # as training reads weights
    assert dtype_of(whole) == whole.model.layers[0].mlp.up_proj.weight.dtype == torch.float16
    for half in (torch.float16, torch.bfloat16):
        given = [(half, llama, "cpu"), (half, other, "cpu"), (half, llama, "cuda")]
        assert [rounded.rounds(*each) for each in given] == [True, False, False]
    assert not rounded.rounds(torch.float32, llama, "cpu")


def test_without_compiler_halves_compute_in_half_precision_and_int8_is_refused(monkeypatch):
    monkeypatch.setattr(kernels, "library", lambda: None)
    assert load_target(ASSETS, dtype=torch.bfloat16).dtype == torch.bfloat16
    with pytest.raises(
        ValueError, match="--dtype: int4 needs kernels compiled by g.. .*; give float32"
    ):
        load_target(ASSETS, dtype=kernels.int4)


# -- joined weights in float32 -----------------------------------------------------------------


def test_joined_weights_are_read_by_both_ways_and_joined_again_once_replaced():
    target = tiny_llama(layers=2)
    staged, rows = StagedTarget(target, 1), torch.arange(5)

    def check():
        staged.prefill(rows)
        segment = chain_segment(staged, torch.tensor([7, 8]))
        hidden = staged.stages[0].forward(segment).hidden
        expected = target(torch.tensor([[*rows, 7, 8]])).logits[0, -2:]
        assert torch.allclose(staged.logits(hidden), expected, atol=1e-4)

    check()
    attention = target.model.layers[1].self_attn
    joined = plain_layers._joined[target.model.layers[1]].query_key_value.weight
    assert joined.data_ptr() == attention.q_proj.weight.data_ptr()
    attention.k_proj.weight.mul_(2)  # both ways read one memory
    check()
    attention.v_proj.weight = torch.nn.Parameter(attention.v_proj.weight * 3, requires_grad=False)
    check()
    other = torch.nn.Linear(32, 64, bias=False).requires_grad_(False)
    target.model.layers[1].mlp.gate_proj = other  # another module
    check()
    target.model.layers[0].mlp.up_proj = torch.nn.Sequential(target.model.layers[0].mlp.up_proj)
    assert not plain_layers._is_plain(target.model.layers[0])
    check()


def frozen(module):
    return module.requires_grad_(False)


CHANGES = {
    "output weight": lambda layer: setattr(
        layer.self_attn, "o_proj", frozen(torch.nn.Linear(128, 128, bias=False))
    ),
    "output data": lambda layer: layer.self_attn.o_proj.weight.data.mul_(3),
    "down data": lambda layer: setattr(
        layer.mlp.down_proj.weight, "data", torch.randn_like(layer.mlp.down_proj.weight)
    ),
    "down strides": lambda layer: setattr(
        layer.mlp.down_proj.weight, "data", torch.randn(*layer.mlp.down_proj.weight.shape[::-1]).T
    ),
    "norm": lambda layer: setattr(
        layer.post_attention_layernorm, "weight", torch.nn.Parameter(torch.rand(128), False)
    ),
    "hook": lambda layer: layer.self_attn.o_proj.register_forward_hook(lambda *a: 2 * a[2]),
    "wrapped": lambda layer: setattr(
        layer.mlp, "down_proj", torch.nn.Sequential(layer.mlp.down_proj, torch.nn.Tanh())
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_kernels_read_may_be_replaced_between_sequences(change):
    target = tiny_llama(layers=2, hidden=128)
    staged, rows = StagedTarget(target, 1), torch.arange(5)

    def check():
        staged.prefill(rows)
        hidden = staged.stages[0].forward(chain_segment(staged, torch.tensor([7, 8]))).hidden
        expected = target(torch.tensor([[*rows, 7, 8]])).logits[0, -2:]
        assert torch.allclose(staged.logits(hidden), expected, atol=1e-4)

    check()
    CHANGES[change](target.model.layers[1])
    check()


@pytest.mark.parametrize("fault", ["turning", "order", "norm"])
def test_a_wrong_pass_is_found_by_the_text(fault, monkeypatch):
    if fault == "turning":  # the sign of the first half is lost
        monkeypatch.setattr(
            plain_layers, "_turning", lambda tables: tuple(x[0][:, None] for x in tables)
        )
    elif fault == "norm":  # the root of the mean square is not taken
        monkeypatch.setattr(plain_layers, "_norm", lambda norm, x: x * norm.weight)
    else:
        join = plain_layers.join
        monkeypatch.setattr(plain_layers, "join", lambda parts: join(parts[::-1]))
    engine = engine_for(tiny_llama(), schedule="autoregressive", num_stages=2, max_new_tokens=8)
    with pytest.raises((AssertionError, RuntimeError)):
        decode_exactly(engine, PROMPTS[0])


def test_hooks_are_called():
    target, calls = tiny_llama(layers=1), []
    staged = StagedTarget(target, 1)
    target.model.layers[0].mlp.register_forward_hook(lambda *_: calls.append(1))
    staged.prefill(torch.arange(5))
    staged.stages[0].forward(chain_segment(staged, torch.tensor([7])))
    assert len(calls) == 2


def test_long_prompts_trained_weights_and_other_activations_take_transformers_way():
    target = tiny_llama(layers=1)
    layers, kinds = target.model.layers, ("full_attention",)
    own = plain_layers.PlainLayers(layers, kinds)

    def is_theirs(num_rows):
        own.reset()
        options = {"cache": None, "attends": {}, "masks": dict.fromkeys(kinds)}
        calls = own.calls(num_rows, places=dict.fromkeys(kinds, {}), **options)
        return calls[0].func is layers[0]

    assert is_theirs(MOST_ROWS + 1)
    target.config.hidden_act = "gelu"
    assert is_theirs(1)
    target.config.hidden_act = "silu"
    layers[0].mlp.up_proj.requires_grad_(True)
    assert is_theirs(1)
    assert rounded_dtype(rounded_target(torch.int8)) is torch.int8
    assert rounded_dtype(target) is None
