"""The training loop: resuming, averaging over tokens, frozen parts, checkpoints.

test_long_runs.py tests kills and stops, test_hostile_faults.py full disks.
"""

import json
import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_runs import assert_autocast_is_close, assert_nothing_without_rows
from scipy.stats import chisquare
from train_runs import (
    BY_HEART,
    Stop,
    as_rank,
    assert_equal_weights,
    assert_learns_by_heart,
    logged,
    train,
    weights,
)

from pipedraft.models import load_draft
from pipedraft.train import checkpoint
from pipedraft.train.batch import Batch
from pipedraft.train.config import OptimConfig
from pipedraft.train.launch import rate_factor
from pipedraft.train.methods import methods
from pipedraft.train.spd import sample_occupancy

# -- resume ---------------------------------------------------------------------------------


def test_another_seed_gives_another_run(world, tmp_path, monkeypatch):
    """Otherwise resumed runs would also compare equal without any random numbers."""
    for seed in (0, 1):
        train(world.arguments("spd", tmp_path / str(seed), seed=seed, max_steps=2), monkeypatch)
    assert logged(tmp_path / "0") != logged(tmp_path / "1")


def test_a_metric_that_an_option_added_is_the_mean_of_the_steps_that_have_it(world, tmp_path):
    trainer = world.trainer("spd", tmp_path, max_steps=1)
    trainer.progress.unlogged.append({"loss": 3.0, "dropped": 1.0})  # by the launch before
    trainer.start_log().add({"loss": 1.0, "added": 0.5}, trainer.screen)
    (record,) = logged(tmp_path)
    assert record == {"step": 0, "tokens": 0, "loss": 2.0, "added": 0.5}


def test_a_finished_run_is_left_alone_and_not_cut_short(world, tmp_path, monkeypatch):
    train(world.arguments("spd", tmp_path, max_steps=2), monkeypatch)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    train(world.arguments("spd", tmp_path, max_steps=2), monkeypatch)
    with pytest.raises(ValueError, match="max_steps: 1, but .*step-0000002 is past it; raise it"):
        train(world.arguments("spd", tmp_path, max_steps=1), monkeypatch)
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert before == after


def test_resuming_refuses_another_network_and_a_fresh_start_refuses_old_checkpoints(
    world, tmp_path
):
    trainer = world.trainer("spd", tmp_path, max_steps=1)
    trainer.run()
    with pytest.raises(ValueError, match="model.num_layers: 1 then, 2 now; .*step-0000001"):
        world.trainer("spd", tmp_path, max_steps=2, model__num_layers=2).restore()
    with pytest.raises(ValueError, match="optim.name: adamw then, muon now; .*--output_dir"):
        world.trainer("spd", tmp_path, max_steps=2, optim__name="muon").restore()
    with pytest.raises(ValueError, match="resume: false, but .*step-0000001.*--output_dir"):
        world.trainer("spd", tmp_path, resume="false").restore()


def test_a_fresh_start_forgets_the_log_of_a_run_that_never_saved(world, tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 9.0}\n{"step": 2, "lo')
    train(world.arguments("spd", tmp_path, max_steps=1), monkeypatch)
    assert [entry["step"] for entry in logged(tmp_path)] == [1, 1]
    assert logged(tmp_path)[0]["loss"] != 9.0


# -- one optimizer step ---------------------------------------------------------------------


def gradients_of(trainer: Any, window: list[Batch]) -> dict[str, torch.Tensor]:
    """Gradients as given to the optimizers, in float64."""
    trainer.optimizers = []
    trainer.module.zero_grad()
    trainer.optimize(window)
    named = trainer.module.named_parameters()
    return {name: p.grad.double().clone() for name, p in named if p.grad is not None}


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest difference relative to each parameter's largest gradient."""
    assert a.keys() == b.keys()
    return max(float((a[k] - b[k]).abs().max() / a[k].abs().max()) for k in a)


@pytest.mark.parametrize("method", ["spd", "eagle3"])
def test_accumulation_averages_over_tokens_and_not_over_batches(world, tmp_path, method):
    """One long row and five short ones, as one batch and as two, give the same gradient."""
    changes = {"model__full_probability": 1.0} if method == "spd" else {}
    trainer = world.trainer(method, tmp_path, optim__clip_norm=0, **changes)
    order = sorted(range(len(trainer.lengths)), key=lambda row: trainer.lengths[row])
    short, long = order[:5], order[-1:]
    load = lambda rows: trainer.load(trainer.data.train, rows)  # noqa: E731
    counts = [trainer.objective.num_supervised(load(rows)) for rows in (short, long)]
    assert counts[0] > 1.5 * counts[1]
    together = gradients_of(trainer, [load(short + long)])
    apart = gradients_of(trainer, [load(short), load(long)])
    assert largest_difference(together, apart) < 1e-4

    alone = [gradients_of(trainer, [load(rows)]) for rows in (short, long)]
    mean_of_means = {name: (alone[0][name] + alone[1][name]) / 2 for name in together}
    assert largest_difference(together, mean_of_means) > 0.05
    share = counts[0] / sum(counts)
    weighted = {n: share * alone[0][n] + (1 - share) * alone[1][n] for n in together}
    assert largest_difference(together, weighted) < 1e-4


def test_a_logged_loss_is_the_mean_over_the_tokens_of_the_whole_window(world, tmp_path):
    trainer = world.trainer("eagle3", tmp_path)
    batches = [trainer.load(trainer.data.train, rows) for rows in trainer.epoch_batches(0)[:3]]
    with torch.no_grad():
        outputs = [trainer.objective(batch, torch.Generator()) for batch in batches]
    expected = sum(float(o.loss) for o in outputs) / sum(int(o.counted) for o in outputs)
    trainer.optimizers = []
    assert trainer.optimize(batches)["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("method", "frozen"), [("spd", {"norm.weight", "draft_ids"}), ("eagle", set())]
)
def test_only_trainable_parts_move_and_all_of_them_do(world, tmp_path, method, frozen):
    trainer = world.trainer(method, tmp_path, max_steps=6, optim__name="muon")
    target = {k: v.clone() for k, v in trainer.objective.target.state_dict().items()}
    before = {k: v.clone() for k, v in trainer.objective.draft.state_dict().items()}
    trainer.run()
    assert_equal_weights(target, trainer.objective.target.state_dict())
    after = trainer.objective.draft.state_dict()
    trainable = {n for n, p in trainer.objective.draft.named_parameters() if p.requires_grad}
    assert after.keys() - trainable >= frozen and bool(after.keys() - trainable) == bool(frozen)
    for name, value in after.items():
        assert torch.equal(value, before[name]) == (name not in trainable), name
    assert not [name for name in trainer.objective.state_dict() if "target" in name]


DRAFTS = list(methods())


@pytest.mark.parametrize("method", DRAFTS)
def test_a_batch_without_counted_rows_has_no_loss_and_a_zero_gradient(world, tmp_path, method):
    changes = {"flexspec": {"model__feature_source": "self"}}.get(method, {})
    trainer = world.trainer(method, tmp_path, **changes)
    full = trainer.load(trainer.data.train, [0, 1])
    empty = replace(full, mask_BT=torch.zeros_like(full.mask_BT))
    empty.mask_BT[:, 0] = True  # the label of no row
    assert_nothing_without_rows(trainer.objective, empty, full)


@pytest.mark.parametrize("method", ["eagle", "flexspec"])
def test_bfloat16_autocast_is_close_to_float32(world, tmp_path, method):
    trainer = world.trainer(method, tmp_path)
    batch = trainer.load(trainer.data.train, [0, 1, 2, 3])
    assert_autocast_is_close(trainer.objective, batch)


# -- learning -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", DRAFTS)
def test_a_run_starts_with_the_weights_of_a_trained_draft(world, tmp_path, method):
    given = world.trainer(method, tmp_path / "first").objective
    for number, parameter in enumerate(given.draft.parameters()):
        parameter.data.add_(0.1 * (number + 1))
    (tmp_path / "given").mkdir()
    given.save(tmp_path / "given", {}, given.state_dict())
    start = {"model__init_from": tmp_path / "given"}
    objective = world.trainer(method, tmp_path / "second", seed=1, **start).objective
    assert_equal_weights(objective.draft.state_dict(), given.draft.state_dict())


@pytest.mark.parametrize(
    ("kind", "method", "changes", "message"),
    [
        ("spd", "spd", {"model__num_layers": 2}, "init_from: .* num_layers 1, this run 2; conf"),
        ("spd", "ppsd", {}, "init_from: .* of type 'spd'; give one of type 'ppsd'"),
        ("dspark", "dflash", {}, "init_from: .* of type 'dspark'; give one of type 'dflash'"),
        ("spd", "spd", {"model__init_from": "none"}, "model.init_from: no folder 'none'"),
    ],
)
def test_a_start_of_another_method_or_architecture_is_refused(
    world, tmp_path, kind, method, changes, message
):
    given = world.trainer(kind, tmp_path / "first").objective
    (tmp_path / "given").mkdir()
    given.save(tmp_path / "given", {}, given.state_dict())
    start = {"model__init_from": tmp_path / "given"} | changes
    with pytest.raises(ValueError, match=message):
        world.trainer(method, tmp_path / "second", **start)


FEW = {("kl", "newest", None), ("kl", "all", 260), ("tv", "newest", 260), ("lk", "all", None)}
"""Covers every loss, query and vocabulary; make test-all runs the other combinations."""


@pytest.mark.parametrize(
    ("loss", "query", "draft_vocab_size"),
    [
        pytest.param(*way, marks=() if way in FEW else pytest.mark.all)
        for way in product(("kl", "tv", "lk"), ("newest", "all"), (None, 260))
    ],
)
def test_spd_learns_a_handful_of_conversations_by_heart(
    world, tmp_path, loss, query, draft_vocab_size
):
    trainer = world.trainer(
        "spd",
        tmp_path,
        model__loss=loss,
        model__query=query,
        model__draft_vocab_size=draft_vocab_size,
        **BY_HEART,
    )
    assert_learns_by_heart(trainer)


@pytest.mark.parametrize("step", [0, 3, 9])
def test_learning_rates_follow_the_schedule(step):
    linear = OptimConfig(warmup_fraction=0.2, final_fraction=0.1)
    cosine = replace(linear, schedule="cosine")
    constant = replace(linear, schedule="constant")
    # Ten steps, two of warm-up: 1/3, 2/3, then from 1 towards final_fraction in eighths.
    expected = {
        0: (1 / 3, 1 / 3, 1 / 3),
        3: (0.1 + 0.9 * 7 / 8, 0.1 + 0.9 * (1 + math.cos(math.pi / 8)) / 2, 1.0),
        9: (0.1 + 0.9 / 8, 0.1 + 0.9 * (1 + math.cos(math.pi * 7 / 8)) / 2, 1.0),
    }[step]
    rates = [rate_factor(step, 10, optim) for optim in (linear, cosine, constant)]
    assert rates == pytest.approx(expected)


def test_the_rate_of_every_step_is_the_one_that_is_logged_and_used(world, tmp_path):
    trainer = world.trainer("spd", tmp_path, max_steps=5, optim__warmup_fraction=0.4)
    used, optimize = [], trainer.optimize

    def record(window):
        values = optimize(window)
        used.append([group["lr"] for o in trainer.optimizers for group in o.param_groups])
        return values

    trainer.optimize = record
    trainer.run()
    expected = [3e-3 * factor for factor in (1 / 3, 2 / 3, 1, 2 / 3, 1 / 3)]
    rates = [entry["lr"] for entry in logged(tmp_path) if "lr" in entry]
    assert rates == pytest.approx(expected)
    assert [set(groups) for groups in used] == [{rate} for rate in rates]


def test_epochs_are_whole_windows(world, tmp_path):
    """Windows never cross the end of an epoch, so an epoch with 2k + 1 batches has k + 1 steps."""
    trainer = world.trainer(
        "spd", tmp_path, max_steps=None, epochs=3.0, accumulation=2, batch_tokens=200
    )
    batches = [len(trainer.epoch_batches(epoch)) for epoch in range(3)]
    assert batches[0] % 2
    assert trainer.num_steps == 3 * (batches[0] // 2 + 1)
    seen, windows = [], trainer.windows()
    trainer.load = lambda dataset, rows: seen.extend(rows)
    for _ in range(trainer.num_steps):
        next(windows)
    assert sorted(seen) == sorted(list(range(len(trainer.lengths))) * 3)


# -- simulated pipeline fill ----------------------------------------------------------------


def test_occupancies_are_full_half_of_the_time_and_else_uniform():
    draws = sample_occupancy(40_000, 8, 0.5, torch.Generator().manual_seed(0))
    counts = [draws.count(occupancy) for occupancy in range(1, 9)]
    assert sum(counts) == 40_000
    expected = [40_000 * 0.5 / 7] * 7 + [40_000 * 0.5]
    assert chisquare(counts, expected).pvalue > 1e-3


def test_occupancies_are_drawn_for_each_example():
    draws = sample_occupancy(4000, 4, 0.5, torch.Generator().manual_seed(1))
    same_as_next = sum(a == b for a, b in zip(draws, draws[1:], strict=False)) / 3999
    assert same_as_next == pytest.approx(0.25 + 3 * (1 / 6) ** 2, abs=0.03)


def test_occupancies_at_the_limits():
    generator = torch.Generator().manual_seed(2)
    assert sample_occupancy(5, 1, 0.5, generator) == [1] * 5
    assert sample_occupancy(5, 4, 1.0, generator) == [4] * 5
    assert set(sample_occupancy(99, 3, 0.0, generator)) == {1, 2}


# -- processes -----------------------------------------------------------------------------


def test_processes_share_the_validation_rows_and_run_equally_often(world, tmp_path, monkeypatch):
    """With 17 rows, the first of two processes has 8 and 1, the second 8 and a zero-weight one."""
    trainer = world.trainer("spd", tmp_path, evaluation__max_rows=17, data__valid_fraction=0.5)
    assert len(trainer.data.valid) >= 17
    monkeypatch.setattr(trainer, "reduce", lambda sums: sums)
    monkeypatch.setattr(trainer.objective, "summarize", lambda sums: sums)
    alone, shares = trainer.evaluate(), []
    for rank in (0, 1):
        trainer.accelerator, passes = as_rank(trainer, rank, 2), []
        hook = trainer.module.register_forward_hook(lambda *_, passes=passes: passes.append(1))
        shares.append(trainer.evaluate())
        hook.remove()
        assert len(passes) == 2
    for key, value in alone.items():
        assert float(shares[0][key] + shares[1][key]) == pytest.approx(float(value)), key


def test_without_validation_rows_the_newest_network_is_the_best(world, tmp_path):
    trainer = world.trainer(
        "spd", tmp_path, data__valid_fraction=0.0, max_steps=3, evaluation__every_steps=2
    )
    assert trainer.run() == {}
    assert not [entry for entry in logged(tmp_path) if "valid/loss" in entry]
    newest = weights(tmp_path / "checkpoints/step-0000003")
    assert_equal_weights(weights(tmp_path / "best"), newest)


# -- checkpoints ----------------------------------------------------------------------------


def write(text: str):
    def fill(folder: Path) -> None:
        (folder / "a").write_text(text)
        (folder / "b").write_text(text)

    return fill


def contents(folder: Path) -> dict[str, str]:
    names = [path.name for path in folder.iterdir() if path.name != checkpoint.COMPLETE]
    return {name: (folder / name).read_text() for name in sorted(names)}


@pytest.mark.parametrize("kill_at", [1, 2])
def test_a_kill_at_either_rename_loses_nothing(tmp_path, monkeypatch, kill_at):
    folder = tmp_path / "best"
    checkpoint.replace_folder(folder, write("old"))
    calls, rename = [], Path.rename

    def killed(self, to):
        calls.append(to)
        if len(calls) == kill_at:
            raise Stop
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(Stop):
        checkpoint.replace_folder(folder, write("new"))
    monkeypatch.undo()
    checkpoint.recover(folder)
    assert contents(folder) == {"a": "old", "b": "old"}
    checkpoint.replace_folder(folder, write("newer"))
    assert contents(folder) == {"a": "newer", "b": "newer"}
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_folders_that_are_not_complete_are_no_checkpoints(tmp_path):
    for step in (10, 9, 200):
        checkpoint.replace_folder(checkpoint.step_folder(tmp_path, step), write("x"))
    unfinished = checkpoint.step_folder(tmp_path, 300)
    unfinished.mkdir()
    (unfinished.parent / f".{unfinished.name}.partial").mkdir()
    names = [folder.name for folder in checkpoint.step_folders(tmp_path)]
    assert names == ["step-0000009", "step-0000010", "step-0000200"]
    checkpoint.rotate(tmp_path, 2)
    names = [folder.name for folder in checkpoint.step_folders(tmp_path)]
    assert names == ["step-0000010", "step-0000200"]


def test_a_run_keeps_the_newest_checkpoints_and_the_best_network(world, tmp_path, monkeypatch):
    scores = iter([0.3, 0.9, 0.5, 0.9, 0.1])
    trainer = world.trainer(
        "spd",
        tmp_path,
        max_steps=5,
        save_every_steps=1,
        keep_checkpoints=2,
        evaluation__every_steps=1,
    )
    monkeypatch.setattr(trainer, "evaluate", lambda: {"score": next(scores)})
    stale = tmp_path / "checkpoints" / ".step-0000002.partial"
    stale.mkdir(parents=True)
    (stale / "left_behind").write_text("by a killed run")
    at_step_2, save = {}, trainer.save

    def keep_step_2(metrics):
        save(metrics)
        folder = checkpoint.step_folder(tmp_path, 2)
        if trainer.progress.step == 2:
            at_step_2.update(weights(folder))
            assert not (folder / "left_behind").exists()

    monkeypatch.setattr(trainer, "save", keep_step_2)
    trainer.run()
    names = [folder.name for folder in checkpoint.step_folders(tmp_path)]
    assert names == ["step-0000004", "step-0000005"]
    best = json.loads((tmp_path / "best/config.json").read_text())
    assert best["training"]["metrics"]["score"] == 0.9
    assert_equal_weights(weights(tmp_path / "best"), at_step_2)  # the first of equal scores
    draft = load_draft(str(tmp_path), trainer.objective.target)  # a run's folder means its best
    assert_equal_weights(draft.state_dict(), at_step_2)
