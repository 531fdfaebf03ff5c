"""Long runs: kills, damaged checkpoints, signals, time limits, patience, bad losses.

A resumed run must end bit for bit like an undisturbed one.
"""

import json
import math
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save
from train_runs import (
    Runs,
    as_rank,
    assert_ends_as,
    logged,
    said,
    start_runs,
    train,
)

from pipedraft import files
from pipedraft.train import checkpoint, launch
from pipedraft.train.batch import Batch
from pipedraft.train.launch import Stopping
from pipedraft.train.objective import LossOutput

STEPS = 12
CHANGES = {
    "spd": {"max_steps": STEPS, "save_every_steps": 3, "evaluation__every_steps": 5},
    "eagle": {
        "max_steps": STEPS,
        "save_every_steps": 5,
        "evaluation__every_steps": 4,
        "optim__name": "muon",
        "accumulation": 2,  # the epoch ends at step 5 of these batches, and in a short window
        "log_every_steps": 4,  # a mean over steps before and after a kill
    },
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    with start_runs(tmp_path_factory.mktemp("world"), CHANGES) as found:
        yield found


@pytest.fixture(scope="module")
def whole(runs, tmp_path_factory) -> dict[str, Path]:
    """An undisturbed run for each method."""
    folders = {}
    for method in CHANGES:
        folders[method] = tmp_path_factory.mktemp("whole") / method
        assert runs.run(method, folders[method]) == 0, said(folders[method])
    return folders


def finish(runs: Runs, method: str, folder: Path, whole: Path) -> None:
    assert runs.run(method, folder) == 0, said(folder)
    assert_ends_as(folder, whole)
    assert not list((folder / "checkpoints").glob(".*"))


# -- kills ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_kills", [5, pytest.param(14, marks=pytest.mark.all)])
def test_a_run_killed_at_any_moment_resumes_bit_for_bit(runs, whole, tmp_path, num_kills):
    """SIGKILL at random moments: at file operations in the run's folder, and when forward and
    backward passes, exchanges and updates begin."""
    draw, saving = random.Random(7), 0
    for index in range(num_kills):
        method = "spd" if index % 4 == 0 else "eagle"
        moments = int(said(whole[method]).rpartition("moments: ")[2])
        folder = tmp_path / f"{index}"
        kill_at = draw.randrange(1, moments)
        assert runs.run(method, folder, kill_at=kill_at) == -signal.SIGKILL
        saving += any(folder.rglob(".*.partial"))
        finish(runs, method, folder, whole[method])
    assert num_kills / 5 <= saving <= 0.8 * num_kills


def test_a_run_whose_disk_is_full_again_and_again_ends_as_one_with_room(runs, whole, tmp_path):
    """Every start has room for some more files; see also test_hostile_faults.py."""
    num_full, folder = 0, tmp_path / "run"
    while not runs.run_on_disk("spd", folder, full_at=12 * (num_full + 1)):
        num_full += 1
    assert num_full > 2
    assert_ends_as(folder, whole["spd"])


def test_a_second_run_in_a_folder_is_refused_before_it_writes_there(runs, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with files.locked(folder, "output_dir"):
        assert runs.run("spd", folder) == 2
    (line,) = [x for x in said(folder).splitlines() if x.startswith("error")]
    assert f"output_dir: {str(folder)!r} is written to by another run" in line
    assert not list(folder.iterdir())


# -- damaged checkpoints --------------------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


STATE = "training_state/model.safetensors"
DAMAGES = [
    (STATE, cut, "bytes instead of"),
    ("training_state/optimizer.safetensors", Path.unlink, "is missing"),
    (checkpoint.COMPLETE, lambda path: path.write_text("?"), "manifest, cannot be read"),
    (checkpoint.COMPLETE, lambda path: path.write_text(""), "is empty"),
]


@pytest.fixture
def stopped(whole, tmp_path) -> Path:
    """A run with checkpoints at steps 9 and 12; tests damage the last one."""
    folder = tmp_path / "stopped"
    shutil.copytree(whole["spd"], folder)
    assert [f.name for f in checkpoint.step_folders(folder)] == ["step-0000009", "step-0000012"]
    return folder


@pytest.mark.parametrize(("name", "spoil", "words"), DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    runs, whole, stopped, name, spoil, words, capsys
):
    newest = checkpoint.step_folders(stopped)[-1]
    spoil(newest / name)
    trainer = runs.world.trainer("spd", stopped, **CHANGES["spd"])
    capsys.readouterr()
    trainer.restore()
    assert trainer.progress.step == 9
    line, resumed = capsys.readouterr().err.splitlines()
    for word in (str(newest), name, words, "step-0000009 is used instead"):
        assert word in line
    assert resumed == "resumed at step 9 of 12"
    assert not newest.exists()
    trainer.run()
    assert_ends_as(stopped, whole["spd"])


def test_a_run_whose_checkpoints_are_all_damaged_ends_with_status_2(runs, stopped):
    for folder in checkpoint.step_folders(stopped):
        cut(folder / STATE)
    before = sorted(stopped.rglob("*"))
    assert runs.run("spd", stopped) == 2
    (line,) = [x for x in said(stopped).splitlines() if x.startswith("error")]
    assert "step-0000012: training_state/model.safetensors has" in line
    assert "step-0000009: training_state/model.safetensors has" in line
    assert "--output_dir" in line and f"remove {stopped / 'checkpoints'}" in line
    assert sorted(stopped.rglob("*")) == before


BAD_STATES = [
    ("model.safetensors", b"junk", "model.safetensors: "),
    ("model.safetensors", None, "model.safetensors: No such file"),
    ("optimizer.safetensors", save({"other.weight:step": torch.ones(())}), "other.weight is not"),
    ("model.safetensors", save({}), "is not in it"),
    ("progress.json", b'{"progress": {"step": "os.system"}}', "progress.json: "),
    ("progress.json", b"[" * 10**5, "progress.json: "),
    ("progress.json", None, "progress.json: "),
]


@pytest.mark.parametrize(("name", "content", "words"), BAD_STATES)
def test_a_state_that_is_none_is_refused_by_its_name(runs, stopped, name, content, words):
    """The manifest is rewritten to match the changed files, so it does not give them away."""
    newest = checkpoint.step_folders(stopped)[-1]
    (newest / "training_state" / name).unlink()
    if content is not None:
        (newest / "training_state" / name).write_bytes(content)
    (newest / checkpoint.COMPLETE).unlink()
    checkpoint.write_manifest(newest)
    trainer = runs.world.trainer("spd", stopped, **CHANGES["spd"])
    with pytest.raises(ValueError, match=f"resume: {newest} .*{words}.*--output_dir") as caught:
        trainer.restore()
    assert "\n" not in str(caught.value)


# -- signals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "numbers", "status"),
    [
        (6, [signal.SIGTERM], 143),
        (9, [signal.SIGINT, signal.SIGINT], 130),  # the second is the launcher's copy
    ],
)
def test_a_signal_ends_the_run_after_its_step(runs, whole, tmp_path, step, numbers, status):
    """After step 9 the signal stops the run at step 10; its evaluation is made on resuming."""
    folder = tmp_path / "run"
    assert runs.run("spd", folder, step=step, signals=numbers) == status
    (line,) = [x for x in said(folder).splitlines() if "stopped" in x]
    name = signal.Signals(numbers[0]).name
    assert f"stopped at step {step + 1} of {STEPS}: {name}" in line
    assert checkpoint.step_folders(folder)[-1].name == f"step-{step + 1:07d}"
    assert logged(folder)[-1]["step"] == step + 1 and "lr" in logged(folder)[-1]
    finish(runs, "spd", folder, whole["spd"])


def test_a_later_second_signal_ends_the_run_at_once(monkeypatch):
    monkeypatch.setattr(launch, "REPEAT_S", 0.0)
    before = signal.getsignal(signal.SIGINT)
    requests = Stopping(max_minutes=None, started=time.monotonic())
    with pytest.raises(KeyboardInterrupt), requests.signals():
        signal.raise_signal(signal.SIGINT)
        assert requests.wishes()["stop_sigint"] == 1
        time.sleep(0.001)
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


# -- time and patience ----------------------------------------------------------------------


def test_a_run_cut_into_minutes_ends_where_the_whole_one_does(
    runs, whole, tmp_path, monkeypatch, capsys
):
    """Every launch is allowed no more than one step."""
    arguments = runs.world.arguments("spd", tmp_path / "r", **CHANGES["spd"], max_minutes=1e-6)
    for step in range(1, STEPS):
        train(arguments, monkeypatch)
        err = capsys.readouterr().err
        assert f"stopped at step {step} of 12: max_minutes 1e-06 are over" in err
    train(arguments, monkeypatch)
    assert "stopped" not in capsys.readouterr().err
    assert_ends_as(tmp_path / "r", whole["spd"])


@pytest.mark.parametrize(("minutes", "launches"), [(None, (1, 1)), (1e-6, (5, 2))])
def test_a_run_without_a_better_score_ends_and_stays_ended(
    runs, tmp_path, monkeypatch, capsys, minutes, launches
):
    """One step per launch works too: the number of steps without a better score is saved."""
    scores = {1: 0.1, 2: 0.5, 3: 0.4, 4: 0.5, 5: 0.3}

    def launch(patience: int) -> Any:
        changes = {"max_steps": 8, "max_minutes": minutes, "evaluation__every_steps": 1}
        changes["evaluation__patience"] = patience
        trainer = runs.world.trainer("eagle", tmp_path, **changes)
        monkeypatch.setattr(trainer, "evaluate", lambda: {"score": scores[trainer.progress.step]})
        trainer.restore()
        capsys.readouterr()
        trainer.run()
        return trainer

    for count, patience, step in (
        (launches[0], 2, 4),
        (1, 2, 4),  # once more
        (launches[1], 3, 5),  # with more of it the run goes on
    ):
        for _ in range(count):
            trainer = launch(patience)
        expected = (
            f"stopped at step {step} of 8: the expected L' turned: {scores[step]:.4f} now, at most "
            f"0.5000 in the last {patience} evaluations (evaluation.patience); best/ has step 2; "
        )
        assert expected in capsys.readouterr().err
        assert trainer.stop.status == 0 and trainer.progress.best_score == 0.5
        assert checkpoint.step_folders(tmp_path)[-1].name == f"step-{step:07d}"


def test_patience_without_validation_rows_is_refused(runs, tmp_path):
    changes = {"evaluation__patience": 1, "data__valid_fraction": 0.0}
    with pytest.raises(ValueError, match="evaluation.patience: 1, .*data.valid_fraction"):
        runs.world.trainer("eagle", tmp_path, **changes)


# -- losses and gradients that are not finite -----------------------------------------------


def load_bad_batches(path: Path) -> SimpleNamespace:
    with safe_open(path, "pt") as file:
        metadata: Mapping[str, str] = file.metadata()
        indices = {int(key.partition(".")[0]) for key in file.keys()}  # noqa: SIM118 (no mapping)
        batches = {
            index: Batch(
                ids_BT=file.get_tensor(f"{index}.input_ids"),
                mask_BT=file.get_tensor(f"{index}.loss_mask"),
                lengths=file.get_tensor(f"{index}.lengths").tolist(),
                rows=file.get_tensor(f"{index}.rows").tolist(),
            )
            for index in sorted(indices)
        }
    losses = {int(index): float(loss) for index, loss in json.loads(metadata["losses"]).items()}
    step, rank = int(metadata["step"]), int(metadata["rank"])
    return SimpleNamespace(step=step, rank=rank, losses=losses, batches=batches)


def poison(trainer: Any) -> int:
    """Make the rarest token turn the target's states into NaN; return the token."""
    counts = Counter(token for ids in trainer.data.train["input_ids"] for token in set(ids))
    token = min(counts, key=lambda token: (counts[token], token))
    with torch.no_grad():
        trainer.objective.target.get_input_embeddings().weight[token] = math.nan
    return token


def test_the_batch_of_a_loss_that_is_not_finite_is_kept_and_fails_again(runs, tmp_path):
    changes = {"accumulation": 3, "max_steps": 50}
    trainer = runs.world.trainer("spd", tmp_path / "a", **changes)
    token = poison(trainer)
    with pytest.raises(FloatingPointError, match="lower optim.lr") as caught:
        trainer.run()
    (path,) = (tmp_path / "a").glob("*bad_batch*")
    assert str(path) in str(caught.value)
    bad = load_bad_batches(path)
    assert (bad.step, bad.rank) == (trainer.progress.step, 0)
    assert 0 < len(bad.batches) < 3
    for batch in bad.batches.values():
        assert (batch.ids_BT == token).any()
    index, batch = next(iter(bad.batches.items()))
    assert math.isnan(bad.losses[index])

    again = runs.world.trainer("spd", tmp_path / "b", **changes)
    forward = lambda: again.module(batch, again.generator(bad.step, index)).loss  # noqa: E731
    assert forward().isfinite()
    poison(again)
    assert forward().isnan()
    again.progress.step = bad.step
    with pytest.raises(FloatingPointError, match=f"at step {bad.step}"):
        again.optimize([batch])


def test_a_gradient_that_alone_is_not_finite_keeps_the_whole_window(runs, tmp_path):
    trainer = runs.world.trainer("spd", tmp_path, accumulation=2)
    trainer.objective.draft.lm_head.weight.register_hook(lambda gradient: gradient * math.inf)
    window = next(trainer.windows())
    with pytest.raises(FloatingPointError):
        trainer.optimize(window)
    bad = load_bad_batches(next(tmp_path.glob("bad_batch-step-0000000-rank-0.safetensors")))
    assert all(map(math.isfinite, bad.losses.values()))
    for kept, batch in zip(bad.batches.values(), window, strict=True):
        assert torch.equal(kept.ids_BT, batch.ids_BT) and torch.equal(kept.mask_BT, batch.mask_BT)
        assert (kept.lengths, kept.rows) == (batch.lengths, batch.rows)


def test_an_infinite_loss_with_a_finite_gradient_ends_the_run_too(runs, tmp_path):
    trainer = runs.world.trainer("spd", tmp_path)
    module = trainer.module

    def infinite(batch, generator):
        output = module(batch, generator)
        return LossOutput(output.loss + math.inf, output.counted, output.sums)

    trainer.module = SimpleModule(infinite, module)
    with pytest.raises(FloatingPointError, match="loss inf at step 0"):
        trainer.optimize(next(trainer.windows()))


class SimpleModule:
    """A module with a replaced forward."""

    def __init__(self, forward: Any, module: Any) -> None:
        self.forward, self.parameters = forward, module.parameters

    def __call__(self, *arguments: Any) -> Any:
        return self.forward(*arguments)


def test_a_process_whose_losses_are_finite_blames_another(runs, tmp_path):
    trainer = runs.world.trainer("spd", tmp_path)
    window = next(trainer.windows())
    trainer.accelerator = as_rank(trainer, 1, 2)
    trainer.accelerator.reduce = lambda tensor, how: tensor + 1  # the other one's bad batch
    with pytest.raises(FloatingPointError, match="that of another process"):
        trainer._refuse(window, [torch.tensor(2.0)], math.nan, math.nan)
    assert not list(tmp_path.glob("bad_batch*"))
