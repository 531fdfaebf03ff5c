"""Packed rows compute the same as separate documents; checkpointing changes no bit."""

import copy
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from attention_runs import tiny_objective
from hypothesis import given, settings
from hypothesis import strategies as st
from staged_targets import NUM_LAYERS, random_ids, tiny
from tiny_models import tiny_llama
from torch.overrides import TorchFunctionMode
from train_runs import logged, train

from pipedraft.data_recipes.batch import packed_batches
from pipedraft.errors import UsageError
from pipedraft.models.heads import structural
from pipedraft.models.heads.structural import structural_attention
from pipedraft.models.target import capture_hidden
from pipedraft.models.transformer import layers
from pipedraft.models.transformer.layers import GatedMLP, RotaryEmbedding
from pipedraft.train.batch import Batch
from pipedraft.train.dflash import DFlashObjective
from pipedraft.train.dspark import DSparkObjective
from pipedraft.train.eagle import EagleObjective, feature_noise
from pipedraft.train.eagle3 import Eagle3Objective
from pipedraft.train.flexspec import FlexSpecObjective
from pipedraft.train.methods import (
    DFlashTrainConfig,
    DSparkTrainConfig,
    Eagle3TrainConfig,
    EagleTrainConfig,
    FlexSpecTrainConfig,
    MTPTrainConfig,
    PPSDTrainConfig,
    SPDTrainConfig,
)
from pipedraft.train.mtp import MTPObjective
from pipedraft.train.ppsd import PPSDObjective
from pipedraft.train.spd import SPDObjective

torch.set_num_threads(1)

VOCAB = 24
LENGTHS = [9, 1, 14, 2, 7, 11]
DRAFTS = {
    "spd_newest": (SPDObjective, SPDTrainConfig(num_stages=4)),
    "spd_all": (SPDObjective, SPDTrainConfig(num_stages=4, query="all")),
    "ppsd": (PPSDObjective, PPSDTrainConfig(num_layers=2)),
    "eagle": (EagleObjective, EagleTrainConfig(noise=0.0)),
    "eagle3": (Eagle3Objective, Eagle3TrainConfig(num_steps=4)),
    "mtp": (MTPObjective, MTPTrainConfig(num_steps=4)),
    "dflash": (DFlashObjective, DFlashTrainConfig(num_layers=2, block_size=5)),
    "dspark": (DSparkObjective, DSparkTrainConfig(num_layers=2, block_size=4, markov_rank=6)),
    "flexspec": (FlexSpecObjective, FlexSpecTrainConfig(stem_layers=1, feature_source="self")),
}


def make_objective(name: str) -> Any:
    """Return an objective in float64 with no parameter at a special value."""
    objective_class, config = DRAFTS[name]
    return tiny_objective(objective_class, config, tiny_llama(layers=8, vocab=VOCAB))


def make_rows(lengths=LENGTHS) -> list[dict[str, list[int]]]:
    """Turns reach both ends of a document: anything across a boundary would count."""
    generator = torch.Generator().manual_seed(5)
    rows = []
    for length in lengths:
        mask = [1] * length
        if length > 8:
            mask[4] = 0
        ids = torch.randint(VOCAB, (length,), generator=generator).tolist()
        rows.append({"input_ids": ids, "loss_mask": mask})
    return rows


def run(objective, batches, **options) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Sums over the batches, and gradients of the loss."""
    parameters = [p for p in objective.parameters() if p.requires_grad]
    sums: dict[str, Any] = {}
    gradients: Any = [torch.zeros_like(p) for p in parameters]
    for batch in batches:
        output = objective(batch, torch.Generator().manual_seed(0), **options)
        assert int(output.counted) == objective.num_supervised(batch)
        entries = {"loss": output.loss.detach(), "count": output.counted, **output.sums}
        sums = {key: sums.get(key, 0) + value.double() for key, value in entries.items()}
        if output.loss.requires_grad:
            own = torch.autograd.grad(output.loss, parameters, allow_unused=True)
            gradients = [g if x is None else g + x for g, x in zip(gradients, own, strict=True)]
    return sums, gradients


def draw_from(monkeypatch, occupancies: list[int]) -> None:
    """Make SPD training draw these, one for each example, in example order."""
    left = []

    def sample(num_examples, *_):
        if not left:
            left.extend(occupancies)
        drawn = left[:num_examples]
        del left[:num_examples]
        return drawn

    monkeypatch.setattr("pipedraft.train.spd.sample_occupancy", sample)


def packed_and_apart(objective, monkeypatch, seed=0, **options):
    rows = make_rows()
    generator = torch.Generator().manual_seed(seed)
    draw_from(monkeypatch, torch.randint(1, 5, (len(rows),), generator=generator).tolist())
    packed = run(objective, [Batch.packed(rows)], **options)
    return packed, run(objective, [Batch.padded([row], 0) for row in rows], **options)


def assert_same(packed, apart, tolerance=1e-9) -> None:
    assert packed[0].keys() == apart[0].keys()
    close = {"rtol": 10 * tolerance, "atol": tolerance}
    for name, value in apart[0].items():
        torch.testing.assert_close(packed[0][name], value, **close, msg=name)
    for x, y in zip(packed[1], apart[1], strict=True):
        torch.testing.assert_close(x, y, **close)


def differ(packed, apart) -> bool:
    return not torch.allclose(packed[0]["loss"], apart[0]["loss"], rtol=1e-6, atol=0)


# -- packed == apart ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAFTS)
def test_losses_sums_and_gradients_of_a_packed_row_are_those_of_its_documents(name, monkeypatch):
    objective = make_objective(name)
    for seed in range(3 if name.startswith("spd") else 1):
        packed, apart = packed_and_apart(objective, monkeypatch, seed)
        assert packed[0]["count"] > 20
        assert any(gradient.any() for gradient in packed[1])
        assert_same(packed, apart)


@pytest.mark.parametrize("name", DRAFTS)
def test_an_evaluation_of_a_packed_row_sums_over_its_documents(name, monkeypatch):
    objective = make_objective(name)
    with torch.no_grad():
        both = packed_and_apart(objective, monkeypatch, **objective.evaluation_options())
        assert_same(*both)


@st.composite
def packed_cases(draw):
    n = draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(1, 7), min_size=1, max_size=5))
    size = len(lengths)
    occupancy = draw(st.lists(st.integers(1, n), min_size=size, max_size=size))
    return n, lengths, occupancy, draw(st.integers(0, n))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(packed_cases())
def test_structural_attention_of_documents_is_that_of_rows(case):
    """Against one padded row per document: attention is causal, so padding changes nothing."""
    n, lengths, occupancy, depth = case
    generator = torch.Generator().manual_seed(0)
    N, J, D, T = 4, 2, 4, max(lengths)

    def rows(heads, *blocks):
        shape = (*blocks, 1, heads, sum(lengths), D)
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    inputs = [rows(N), rows(J, n + 1), rows(J, n + 1)]
    options = {"occupancy": occupancy, "depth": depth}

    def padded(x):
        parts = x.split(lengths, -2)
        return torch.cat(
            [torch.nn.functional.pad(part, (0, 0, 0, T - part.shape[-2])) for part in parts], -4
        )

    together = structural_attention(*inputs, **options, lengths=lengths)
    alone = structural_attention(*(padded(x) for x in inputs), **options)
    expected = torch.cat([x[:, :size] for x, size in zip(alone, lengths, strict=True)], 1)[None]
    weight = torch.randn(together.shape, generator=generator, dtype=torch.float64)
    results = [
        (out, *torch.autograd.grad((out * weight).sum(), inputs)) for out in (together, expected)
    ]
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "qwen3_half_sliding", "mistral_sliding", "mixtral"])
def test_the_target_sees_every_document_as_if_apart(name, attention):
    model, ids = copy.deepcopy(tiny(name, attention)), random_ids(30)
    if name != "mixtral":  # its grouped product knows no float64
        model = model.double()
    lengths, layers = [9, 1, 14, 6], [0, 2, NUM_LAYERS]
    packed = capture_hidden(model, ids[None], layers, lengths)
    apart = [capture_hidden(model, part[None], layers) for part in ids.split(lengths)]
    for layer in layers:
        expected = torch.cat([part[layer] for part in apart], 1)
        # eager attention takes its softmax in float32.
        tolerance = 1e-9 if attention == "sdpa" and name != "mixtral" else 1e-5
        torch.testing.assert_close(packed[layer], expected, rtol=tolerance, atol=tolerance)


class Watch(TorchFunctionMode):
    """Collects query lengths and masks from every attention call."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.calls.append((args[0].shape[2], kwargs.get("attn_mask")))
        return func(*args, **kwargs)


def test_the_target_builds_no_mask_of_a_packed_row():
    calls = []
    with Watch(calls):
        capture_hidden(tiny("llama"), random_ids(30)[None], [NUM_LAYERS], [9, 1, 14, 6])
    assert calls == [(length, None) for length in (9, 1, 14, 6)] * NUM_LAYERS


def test_a_target_with_recurrent_layers_is_refused_before_the_run(world, tmp_path, monkeypatch):
    config = hf.Qwen3_5TextConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    )
    target = tmp_path / "target"
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(target)
    hf.AutoTokenizer.from_pretrained(world.target).save_pretrained(target)
    arguments = world.arguments("spd", tmp_path / "run", target=target, packing=True)
    with pytest.raises((UsageError, ValueError), match="^packing: true, but the recurrent layers"):
        train(arguments, monkeypatch)


# -- known-bad ----------------------------------------------------------------------------------


def absolute_rotation(self, positions, dtype):
    """Encode absolute positions, unlike rotary attention: a document's start then matters."""
    factor = 1 + positions[..., None].to(dtype) / 10
    return factor.expand(*positions.shape, 2 * len(self.frequencies)), torch.zeros((), dtype=dtype)


@pytest.mark.parametrize("name", DRAFTS)
def test_positions_restart_in_every_document_and_a_mutant_is_caught(name, monkeypatch):
    objective = make_objective(name)

    def rotation(self, positions, dtype):
        cos, sin = absolute_rotation(self, positions, dtype)
        return cos, sin.expand_as(cos)

    monkeypatch.setattr(RotaryEmbedding, "forward", rotation)
    assert_same(*packed_and_apart(objective, monkeypatch))
    for module in ("spd", "ppsd", "eagle", "eagle3", "dflash", "flexspec"):
        monkeypatch.setattr(
            f"pipedraft.models.heads.{module}.positions_of",
            lambda num_positions, lengths, device: torch.arange(num_positions, device=device),
        )
    assert differ(*packed_and_apart(objective, monkeypatch))


def test_the_targets_positions_restart_and_a_mutant_is_caught(monkeypatch):
    model, ids, lengths = copy.deepcopy(tiny("llama")).double(), random_ids(20), [8, 12]

    def rotation(x, position_ids):
        cos, sin = absolute_rotation(SimpleNamespace(frequencies=range(4)), position_ids, x.dtype)
        return cos, sin.expand_as(cos)

    monkeypatch.setattr(model.model.rotary_emb, "forward", rotation)
    apart = [capture_hidden(model, part[None], [4])[4] for part in ids.split(lengths)]
    expected = torch.cat(apart, 1)
    torch.testing.assert_close(capture_hidden(model, ids[None], [4], lengths)[4], expected)
    plain = layers.positions_of
    monkeypatch.setattr(layers, "positions_of", lambda T, _, device: plain(T, None, device))
    wrong = capture_hidden(model, ids[None], [4], lengths)[4]
    assert (wrong - expected).abs().max() > 1e-3


@pytest.mark.parametrize("name", DRAFTS)
def test_attention_across_documents_is_caught_in_the_draft(name, monkeypatch):
    objective = make_objective(name)
    monkeypatch.setattr(structural._Examples, "lengths_of", lambda *_: None)
    attend = layers.causal_attention
    for module in ("transformer.layers", "heads.eagle"):
        monkeypatch.setattr(
            f"pipedraft.models.{module}.causal_attention",
            lambda query, keys, values, lengths: attend(query, keys, values),
        )
    from pipedraft.models.heads import dflash, eagle, eagle3

    monkeypatch.setattr(
        dflash, "document_slices", lambda lengths: [slice(0, sum(lengths))] * len(lengths)
    )
    ttt = eagle3.ttt_attention
    for module in (eagle, eagle3):
        monkeypatch.setattr(
            module, "ttt_attention", lambda query, keys, values, *_: ttt(query, keys, values)
        )
    assert differ(*packed_and_apart(objective, monkeypatch))


def test_diagonals_that_reach_into_the_document_before_are_caught(monkeypatch):
    objective = make_objective("spd_newest")
    monkeypatch.setattr(
        "pipedraft.models.heads.banded_attention._hide_other_documents", lambda band, scores: None
    )
    assert differ(*packed_and_apart(objective, monkeypatch))


def test_attention_across_documents_is_caught_in_the_target(monkeypatch):
    objective = make_objective("spd_newest")
    monkeypatch.setattr(
        "pipedraft.models.target.packed_call",
        lambda config, ids, lengths: layers.packed_call(config, ids, None),
    )
    assert differ(*packed_and_apart(objective, monkeypatch))


def test_a_label_across_a_boundary_is_caught(monkeypatch):
    """Known-bad: the first tokens in documents keep their mask; the whole row is one text."""
    objective, rows = make_objective("spd_newest"), make_rows()
    draw_from(monkeypatch, [4] * len(rows))
    batch = Batch.packed(rows)
    mask_BT = torch.cat([torch.tensor(row["loss_mask"]) for row in rows])[None].bool()
    wrong = replace(batch, mask_BT=mask_BT)
    assert objective.num_supervised(wrong) > objective.num_supervised(batch)


# -- batches --------------------------------------------------------------------------------------


def test_a_packed_batch_has_no_padding_and_no_label_on_a_first_token():
    rows = make_rows([3, 1, 2])
    batch = Batch.packed(rows)
    assert batch.ids_BT.tolist() == [sum((row["input_ids"] for row in rows), [])]
    assert batch.mask_BT.tolist() == [[False, True, True, False, False, True]]
    assert batch.documents == batch.lengths == [3, 1, 2]
    assert (batch.ids_BT.dtype, batch.mask_BT.dtype) == (torch.int64, torch.bool)
    assert Batch.padded(rows, 0).documents is None
    assert Batch.packed(rows[:1]).documents is None


@pytest.mark.parametrize("make_batch", [Batch.packed, lambda rows: Batch.padded(rows, 0)])
def test_a_batch_in_another_order_is_the_batch_of_its_examples_in_that_order(make_batch):
    rows, order = make_rows(), [3, 0, 5, 1, 4, 2]
    numbers = [10 + index for index in range(len(rows))]

    def whole(batch: Batch, rows: list[int]) -> Batch:
        states_BTH = batch.ids_BT[..., None] * torch.ones(2)
        return replace(batch, rows=rows, features={3: states_BTH})

    moved = whole(make_batch(rows), numbers).reorder(order)
    wanted = whole(make_batch([rows[i] for i in order]), [numbers[i] for i in order])
    assert (moved.lengths, moved.rows) == (wanted.lengths, wanted.rows)
    assert torch.equal(moved.mask_BT, wanted.mask_BT)
    assert torch.equal(moved.ids_BT, wanted.ids_BT)
    assert torch.equal(moved.features[3], wanted.features[3])


@pytest.mark.parametrize("group", [1, 4])
def test_packed_batches_hold_every_row_once_and_no_more_than_their_tokens(group):
    lengths = torch.randint(1, 100, (500,), generator=torch.Generator().manual_seed(0)).tolist()
    batches = packed_batches(lengths, 400, seed=1, epoch=0, group=group)
    assert sorted(index for batch in batches for index in batch) == list(range(500))
    sums = [sum(lengths[index] for index in batch) for batch in batches]
    assert max(sums) <= 400 and len(batches) % group == 0
    assert sum(sums) > 0.8 * 400 * len(batches)
    assert batches == packed_batches(lengths, 400, seed=1, epoch=0, group=group)
    assert batches != packed_batches(lengths, 400, seed=1, epoch=1, group=group)


def test_a_row_longer_than_a_packed_batch_is_refused():
    with pytest.raises(ValueError, match=r"^batch_tokens: 10 is below the longest row \(11 tokens"):
        packed_batches([3, 11], 10, seed=0, epoch=0)


def test_noise_of_a_document_is_scaled_by_its_own_length():
    features = torch.zeros(1, 12, 3, dtype=torch.float64)
    noise = feature_noise(features, torch.tensor([4, 8]), torch.Generator().manual_seed(0))
    uniform = torch.rand(features.shape, generator=torch.Generator().manual_seed(0)) - 0.5
    scales = torch.tensor([128.0] * 4 + [64.0] * 8).double()
    torch.testing.assert_close(noise, uniform.double() * scales[:, None])


# -- less memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make_batch", [Batch.packed, lambda rows: Batch.padded(rows, 0)], ids=["packed", "row"]
)
@pytest.mark.parametrize("name", DRAFTS)
def test_checkpointed_layers_run_twice_and_give_the_same_bits(name, make_batch, monkeypatch):
    rows, results, calls = make_rows(), [], []
    forward = GatedMLP.forward
    monkeypatch.setattr(GatedMLP, "forward", lambda self, x: (calls.append(1), forward(self, x))[1])
    objective = make_objective(name).float()
    objective.target.float()
    for checkpointing in (False, True):
        if checkpointing:
            objective.use_checkpointing()
        draw_from(monkeypatch, [4, 1, 3, 2, 4, 1])
        results.append(run(objective, [make_batch(rows)]))
    assert calls and len(calls) % 3 == 0  # one forward without, two with
    for key, value in results[0][0].items():
        assert torch.equal(value, results[1][0][key]), key
    for x, y in zip(results[0][1], results[1][1], strict=True):
        assert torch.equal(x, y)


# -- runs ------------------------------------------------------------------------------------------


def test_a_packed_run_trains_as_many_tokens_in_fewer_steps_and_repeats(
    world, tmp_path, monkeypatch
):
    common = {"max_steps": None, "epochs": 1.0, "batch_tokens": 256}
    records = {}
    for folder, changes in (
        ("padded", {}),
        ("packed", {"packing": True}),
        ("again", {"packing": True, "checkpointing": True}),
    ):
        train(world.arguments("spd", tmp_path / folder, **common, **changes), monkeypatch)
        records[folder] = [x for x in logged(tmp_path / folder) if "loss" in x]
    last = {folder: records[folder][-1] for folder in records}
    assert last["packed"]["tokens"] == last["padded"]["tokens"]
    assert last["packed"]["step"] <= last["padded"]["step"]
    assert json.dumps(records["packed"]) == json.dumps(records["again"])
