"""The staged target against the unmodified Hugging Face model.

Oracle: the model's own forward on one root-to-node path, from scratch, without a cache.
"""

from itertools import product

import pytest
import torch
import transformers as hf
from staged_targets import (
    FAMILIES,
    SIZES,
    Controller,
    assert_close,
    chain_segment,
    continue_the_row_before,
    keep_everywhere,
    random_ids,
    run,
    tiny,
    tolerance,
)
from tiny_models import tiny_llama

from pipedraft.models.stages import stage_layers
from pipedraft.models.stages.stage import Stage
from pipedraft.models.target import (
    KeepRows,
    Segment,
    StagedTarget,
    choose_decoding_threads,
    prune_segment,
)
from pipedraft.models.transformer.boundaries import stage_boundaries
from pipedraft.models.transformer.stage_cache import additive_mask


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_chained_stages_equal_the_models_forward_in_full_and_row_by_row(name, num_stages):
    model, ids = tiny(name), random_ids(40)
    target = StagedTarget(model, num_stages)
    reference_TV = model(ids[None], use_cache=False).logits[0]
    target.prefill(ids[:1])
    target.reset()
    full = run(target, chain_segment(target, ids))
    assert_close(target.logits(full.hidden), reference_TV, tolerance(name))

    logits_V, _ = target.prefill(ids[:17], chunk_rows=7)
    rows = [logits_V[None]]
    start = 17
    for size in [5, 1, 1, 3] + [1] * 13:
        rows.append(target.logits(run(target, chain_segment(target, ids[start:][:size])).hidden))
        keep_everywhere(target, KeepRows(tuple(range(size)), size))
        start += size
    assert_close(torch.cat(rows), reference_TV[16:], tolerance(name))


KINDS_OF_LAYERS = ("llama", "qwen3_half_sliding", "mixtral", "qwen3_5")
CUTS = [(name, 3) for name in FAMILIES]
CUTS += [(name, cut) for cut in (1, (0, 1, 2, 3, 4)) for name in KINDS_OF_LAYERS]
MORE_CUTS = [
    pytest.param(name, cut, marks=pytest.mark.all)
    for name, cut in product(FAMILIES, (1, (0, 1, 2, 3, 4)))
    if name not in KINDS_OF_LAYERS
]


@pytest.mark.parametrize(("name", "num_stages"), CUTS + MORE_CUTS)
def test_random_segments_and_keeps_equal_recomputing_each_path_from_scratch(name, num_stages):
    num_compared = 0
    for seed in range(2):
        controller = Controller(name, num_stages, seed)
        controller.fuzz(num_steps=24)
        num_compared += controller.num_compared
    assert num_compared > 25


def test_fuzz_holds_with_eager_attention():
    Controller("llama", 2, seed=5, attention="eager").fuzz(num_steps=16)


def ignore_the_mask_of_single_rows(monkeypatch) -> None:
    def mutant(visible_lS, positions_C, window, dtype, groups):
        visible_lS = visible_lS | (visible_lS.shape[0] == 1)
        return additive_mask(visible_lS, positions_C, window, dtype, groups)

    monkeypatch.setattr(stage_layers, "additive_mask", mutant)


def ignore_the_window(monkeypatch) -> None:
    def mutant(visible_lS, positions_C, window, dtype, groups):
        return additive_mask(visible_lS, positions_C, None, dtype, groups)

    monkeypatch.setattr(stage_layers, "additive_mask", mutant)


def keep_the_first_rows(monkeypatch) -> None:
    """Keep the first rows instead of the retained ones."""

    def mutant(keep, num_cached):
        return tuple(range(sum(i < num_cached for i in keep.rows)))

    monkeypatch.setattr(KeepRows, "cached", mutant)


def keep_the_latest_recurrent_state(monkeypatch) -> None:
    def mutant(stage, keep):
        latest = stage.cache._states[-1]
        stage.cache.keep(keep)
        stage.cache._states[-1] = latest

    monkeypatch.setattr(Stage, "keep", mutant)


@pytest.mark.parametrize(
    ("mutate", "name"),
    [
        (ignore_the_mask_of_single_rows, "llama"),
        (ignore_the_mask_of_single_rows, "qwen3_half_sliding"),
        (ignore_the_mask_of_single_rows, "mistral_sliding"),
        (ignore_the_window, "mistral_sliding"),
        (keep_the_first_rows, "llama"),
        (keep_the_latest_recurrent_state, "qwen3_5"),
        (continue_the_row_before, "qwen3_5"),
    ],
)
def test_fuzz_catches(mutate, name, monkeypatch):
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        for seed in range(4):
            Controller(name, 3, seed).fuzz(num_steps=16)


@pytest.mark.parametrize(
    "keep",
    [
        KeepRows((0, 1, 2, 3, 4, 5), 6),
        KeepRows((0, 1, 2), 2),
        KeepRows((2,), 0),
        KeepRows((0, 2, 5), 1),
        KeepRows((), 0),
        KeepRows((0,), 1),
    ],
    ids=["chain commit", "prefix", "one row", "sibling prune", "no row", "commit the root"],
)
def test_keep_holds_the_rows_of_exactly_the_retained_indices(keep):
    """Positions stand for rows: the same code gathers them and the keys and values."""
    target = StagedTarget(tiny("llama"), 2)
    target.prefill(random_ids(3))
    run(target, chain_segment(target, random_ids(6)))
    keep_everywhere(target, keep)
    for stage in target.stages:
        assert stage.num_committed == 3 + keep.num_committed
        assert stage.num_speculative == len(keep.rows) - keep.num_committed
        held = stage.cache._positions_C[: stage.cache.num_rows].tolist()
        assert held == [0, 1, 2] + [3 + i for i in keep.rows]


def test_chain_commit_moves_no_row():
    target = StagedTarget(tiny("llama"), 1)
    target.prefill(random_ids(3))
    run(target, chain_segment(target, random_ids(6)))
    target.stages[0].cache._keys = None  # fails when touched
    keep_everywhere(target, KeepRows((0, 1, 2, 3), 2))
    with pytest.raises(AttributeError):
        keep_everywhere(target, KeepRows((1,), 0))


def test_cache_grows_past_its_first_capacity_without_losing_rows():
    config = hf.LlamaConfig(**{**SIZES, "max_position_embeddings": 400})
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(config).eval().requires_grad_(False)
    ids = random_ids(300)
    target = StagedTarget(model, 2)
    target.prefill(ids[:120])
    parts = [run(target, chain_segment(target, part)).hidden for part in ids[120:].split(50)]
    reference_TV = model(ids[None], use_cache=False).logits[0, 120:]
    assert_close(target.logits(torch.cat(parts)), reference_TV)


def test_prune_segment_keeps_rows_columns_and_taps_together():
    visible = torch.arange(15).reshape(3, 5) % 2 == 0
    segment = Segment(
        positions=torch.tensor([7, 8, 9]),
        visible=visible,
        hidden=torch.arange(3.0)[:, None].expand(3, 4),
        taps={1: torch.arange(3.0)[:, None]},
    )
    pruned = prune_segment(segment, KeepRows((0, 1, 3, 4), 1), num_cached=2)
    assert pruned.positions.tolist() == [8, 9]
    assert torch.equal(pruned.visible, visible[1:][:, [1, 3, 4]])
    assert pruned.hidden[:, 0].tolist() == pruned.taps[1][:, 0].tolist() == [1, 2]
    assert (pruned.lo, pruned.hi) == (1, 3)
    assert prune_segment(segment, KeepRows((0, 1), 0), num_cached=2) is None


def test_committing_a_row_that_a_stage_has_not_cached_is_refused():
    target = StagedTarget(tiny("llama"), 1)
    target.prefill(random_ids(3))
    run(target, chain_segment(target, random_ids(2)))
    with pytest.raises(AssertionError, match="commits row 2, but this stage holds only 2"):
        keep_everywhere(target, KeepRows((0, 1, 2), 3))


def test_stage_boundaries_are_near_even_with_the_longer_stages_last():
    assert stage_boundaries(10, 4) == (0, 2, 4, 7, 10)
    for num_layers in range(1, 20):
        for num_stages in range(1, num_layers + 1):
            cuts = stage_boundaries(num_layers, num_stages)
            sizes = [b - a for a, b in zip(cuts, cuts[1:], strict=False)]
            assert cuts[0] == 0 and sum(sizes) == num_layers and len(sizes) == num_stages
            assert sizes == sorted(sizes) and sizes[-1] - sizes[0] <= 1


@pytest.mark.parametrize("num_stages", [0, 5])
def test_more_stages_than_layers_or_none_are_refused(num_stages):
    with pytest.raises(ValueError, match=f"num_stages: {num_stages} stages"):
        stage_boundaries(4, num_stages)


@pytest.mark.parametrize("cuts", [(0, 2), (1, 4), (0, 2, 2, 4), (0,), ()])
def test_boundaries_that_do_not_cut_the_layers_are_refused(cuts):
    with pytest.raises(ValueError, match="num_stages: boundaries"):
        StagedTarget(tiny("llama"), cuts)


def test_prompt_length_is_checked():
    target = StagedTarget(tiny("llama"), 2)
    for num_rows in (0, 97):
        with pytest.raises(ValueError, match=f"prompt: {num_rows} tokens"):
            target.prefill(torch.zeros(num_rows, dtype=torch.long))


@pytest.mark.parametrize(
    ("hidden", "asked", "expected"), [(32, None, 1), (1024, None, 3), (32, "3", 3)]
)
def test_a_small_target_decodes_with_one_thread(hidden, asked, expected, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    torch.set_num_threads(3)
    choose_decoding_threads(tiny_llama(layers=1, hidden=hidden))
    found = torch.get_num_threads()
    torch.set_num_threads(1)
    assert found == expected
