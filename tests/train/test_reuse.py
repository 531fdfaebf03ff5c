"""Several optimizer steps for one pass of the target: order, memory, and equal results."""

import shutil
from collections import Counter
from dataclasses import replace

import pytest
import torch
from train_runs import assert_ends_as, train, weights

from pipedraft.train import reuse
from pipedraft.train.batch import Batch
from pipedraft.train.loop import Trainer
from pipedraft.train.objective import DraftObjective
from pipedraft.train.reuse import KeptStates, repeat_windows

BATCHES = [[i] for i in range(23)]


@pytest.fixture(autouse=True)
def small_window(monkeypatch):
    monkeypatch.setattr(reuse, "WINDOW", 4)


@pytest.mark.parametrize("group", [1, 2, 4])
def test_every_batch_comes_as_often_as_asked_within_its_window(group):
    order = repeat_windows(BATCHES, 3, group, seed=0, epoch=1)
    assert Counter(row for (row,) in order) == Counter(list(range(23)) * 3)
    size = 4 * group
    for start in range(0, 23, size):
        visits = order[3 * start : 3 * start + 3 * len(BATCHES[start : start + size])]
        assert {row for (row,) in visits} == set(range(start, min(start + size, 23)))
    # Batch i is for process i mod group: each process gets its own batches again.
    whole = 23 - 23 % size
    assert all(row % group == place % group for place, (row,) in enumerate(order[: 3 * whole]))
    assert order != repeat_windows(BATCHES, 3, group, seed=0, epoch=2)
    assert order[:size] != order[size : 2 * size]


def test_once_leaves_the_order_alone():
    assert repeat_windows(BATCHES, 1, 2, seed=0, epoch=1) == BATCHES


def numbered(row: int) -> Batch:
    example = {"input_ids": [1, 2], "loss_mask": [0, 1]}
    batch = Batch.padded([example], 0)
    batch.rows.append(row)
    return batch


def test_states_are_computed_once_per_window_and_none_is_left():
    computed: list[int] = []

    def compute(batch: Batch) -> dict[int, torch.Tensor]:
        computed.append(batch.rows[0])
        return {0: torch.full((1,), batch.rows[0])}

    kept = KeptStates(3)
    for (row,) in repeat_windows(BATCHES, 3, 1, seed=0, epoch=0):
        assert int(kept.attach(numbered(row), compute).features[0]) == row
        assert len(kept) <= 4
    assert computed == list(range(23))
    assert not len(kept)
    # After a resume some are visited less often; they do not pile up.
    for row in range(100):
        kept.attach(numbered(row), compute)
    assert len(kept) == 4


@pytest.mark.parametrize(
    ("method", "changes"),
    [("spd", {}), ("spd", {"packing": True}), ("eagle3", {}), ("ppsd", {"accumulation": 2})],
    ids=str,
)
def test_kept_states_train_as_computed_ones(world, tmp_path, monkeypatch, method, changes):
    calls: list[int] = []
    computed = DraftObjective.hidden

    def hidden(objective: DraftObjective, batch: Batch) -> dict[int, torch.Tensor]:
        calls.append(not batch.features)
        return computed(objective, batch)

    monkeypatch.setattr(DraftObjective, "hidden", hidden)
    common = {"evaluation__max_rows": 1, "max_steps": 6, "reuse": 3, **changes}
    train(world.arguments(method, tmp_path / "kept", **common), monkeypatch)
    num_kept = sum(calls)
    monkeypatch.setattr(KeptStates, "attach", lambda self, batch, compute: batch)
    calls.clear()
    train(world.arguments(method, tmp_path / "computed", **common), monkeypatch)
    assert_ends_as(tmp_path / "kept", tmp_path / "computed")
    assert num_kept < sum(calls)


def test_states_of_another_batch_are_noticed(world, tmp_path, monkeypatch):
    """Known-bad: one place for all batches, so a batch may get another one's states."""
    common = {"batch_tokens": 64, "max_steps": 6, "reuse": 3}
    train(world.arguments("spd", tmp_path / "right", **common), monkeypatch)
    attach = KeptStates.attach

    def mixed(kept: KeptStates, batch: Batch, compute) -> Batch:
        states = kept.first = getattr(kept, "first", None) or attach(kept, batch, compute).features
        fits = states[2].shape[:2] == batch.ids_BT.shape
        return replace(batch, features=states) if fits else attach(kept, batch, compute)

    monkeypatch.setattr(KeptStates, "attach", mixed)
    train(world.arguments("spd", tmp_path / "wrong", **common), monkeypatch)
    with pytest.raises(AssertionError):
        assert_ends_as(tmp_path / "right", tmp_path / "wrong")


def test_a_run_resumes_within_a_window(world, tmp_path, monkeypatch):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    common = {"reuse": 2, "max_steps": 7, "save_every_steps": 1, "keep_checkpoints": 9}
    train(world.arguments("spd", whole, **common), monkeypatch)
    shutil.copytree(whole, stopped)
    for step in (6, 7):
        shutil.rmtree(stopped / "checkpoints" / f"step-{step:07}")
    train(world.arguments("spd", stopped, **common), monkeypatch)
    assert_ends_as(stopped, whole)
    assert weights(whole / "best")


@pytest.mark.parametrize("other", [{"features": "x"}, {"shard_target": "true"}], ids=str)
def test_reuse_with_states_from_elsewhere_is_refused(world, tmp_path, other):
    (name,) = other
    with pytest.raises(ValueError, match=f"reuse: 2 with {name}; give reuse 1"):
        world.trainer("spd", tmp_path, reuse=2, **other)


def test_an_epoch_has_so_many_times_the_steps(world, tmp_path):
    trainers: list[Trainer] = [
        world.trainer("spd", tmp_path / str(times), reuse=times, max_steps=None) for times in (1, 3)
    ]
    assert trainers[1].num_steps == 3 * trainers[0].num_steps
