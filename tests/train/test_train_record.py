"""A checkpoint knows what it is of: run.json, its comparison on resuming, and files read back."""

import json
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from train_runs import Stop, assert_equal_weights, train, weights

from pipedraft.errors import Failure
from pipedraft.inference import __main__ as inference
from pipedraft.models.heads import draft
from pipedraft.train import checkpoint
from pipedraft.train.checkpoint import TrainingState, check_deepspeed, check_written, layout_of
from pipedraft.train.loop import Trainer
from pipedraft.train.record import RECORD, read_record

STEP = "step-0000002"


@pytest.fixture(scope="module")
def trained(world, tmp_path_factory) -> Path:
    """Folder of a run with two steps. Tests copy it."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    trainer = world.trainer("eagle3", folder, max_steps=2, model__num_steps=2)
    trainer.restore()
    trainer.run()
    return folder


@pytest.fixture
def folder(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def resume(world, folder) -> Any:
    def resumed(method: str = "eagle3", **changes: Any) -> Trainer:
        sizes = {"model__num_steps": 2} if method == "eagle3" else {}
        trainer = world.trainer(method, folder, **{"max_steps": 3, **sizes, **changes})
        trainer.restore()
        return trainer

    return resumed


def another_target(world: Any, folder: Path, part: str) -> Path:
    """Copy the target, with noise added to the weights whose names contain ``part``."""
    shutil.copytree(world.target, folder)
    state = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, value in state.items():
        if part in name:
            state[name] = value + 0.01 * torch.randn(value.shape, generator=generator)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def other_rows(world: Any, path: Path, number: int = 30) -> str:
    path.write_text("".join(world.data.read_text().splitlines(keepends=True)[:number]))
    return json.dumps([{"path": str(path)}])


@pytest.mark.parametrize("part", ["embed_tokens", "layers.1.mlp.up_proj", ""])
def test_another_target_of_the_same_shapes_is_refused_by_name(
    world, resume, folder, tmp_path, part
):
    """A tuned copy may differ in the layers only, which the head's fingerprint leaves out."""
    target = another_target(world, tmp_path / "tuned", part)
    sources = other_rows(world, tmp_path / "own.jsonl")
    with pytest.raises(ValueError, match=r"^target: .*target' then, .*tuned' now .*--output_dir"):
        resume(target=target)
    # Everything else that differs is named, too, and the target comes first.
    with pytest.raises(ValueError, match=r"^target: .*\(also data, optim.name, max_steps\)"):
        resume(target=target, data__sources=sources, optim__name="muon")


def test_a_target_with_other_shapes_is_named_before_any_tensor(world, resume, tmp_path):
    from tiny_models import tiny_llama

    target = shutil.copytree(world.target, tmp_path / "wide")
    vocabulary = json.loads((target / "config.json").read_text())["vocab_size"]
    tiny_llama(layers=6, hidden=64, vocab=vocabulary).save_pretrained(target)
    with pytest.raises(ValueError, match=r"^target: .*\(hidden_size 32 and 64\)"):
        resume(target=target)


def test_a_target_that_moved_is_the_same_target(world, resume, tmp_path, capfd):
    trainer = resume(target=shutil.copytree(world.target, tmp_path / "moved"))
    assert trainer.progress.step == 2
    assert "moved' now (the same weights)" in capfd.readouterr().err


def test_other_data_is_refused_by_name(world, resume, folder, tmp_path):
    sources = other_rows(world, tmp_path / "own.jsonl")
    init_from = f"--model.init_from {folder}/checkpoints/{STEP}"
    with pytest.raises(ValueError, match=rf"^data: 60 rows .* then, 30 rows .*{init_from}"):
        resume(data__sources=sources)
    with pytest.raises(ValueError, match=r"^data: .*data.max_length 64 then, 32 now"):
        resume(data__max_length=32)


def test_data_is_compared_by_content(world, resume, folder, tmp_path, monkeypatch):
    """Files may move and caches may go, but the text must be the same."""
    moved = shutil.copy(world.data, tmp_path / "moved.jsonl")
    cache = tmp_path / "cache"
    resume(data__sources=json.dumps([{"path": str(moved)}]), data__cache_dir=cache)
    lines = Path(moved).read_text().splitlines(keepends=True)
    Path(moved).write_text("".join([lines[1], lines[0], *lines[2:]]))
    with pytest.raises(ValueError, match=r"^data: 60 rows .* then, 60 rows .* now"):
        resume(data__sources=json.dumps([{"path": str(moved)}]), data__cache_dir=cache)


def test_another_chat_template_or_loss_mask_is_other_data(world, resume, tmp_path):
    target = shutil.copytree(world.target, tmp_path / "target")
    template = target / "chat_template.jinja"
    found = template.read_text()
    template.write_text("{# the same text #}" + found)
    resume(target=target)
    template.write_text("{{ 'Hi. ' }}" + found)
    with pytest.raises(ValueError, match=r"^data: .*another chat template"):
        resume(target=target)
    rows = [json.loads(line) for line in world.data.read_text().splitlines()]
    rows[0]["messages"] += [
        {"role": "user", "content": "x"},
        rows[0]["messages"][1] | {"weight": 0},
    ]
    masked = tmp_path / "masked.jsonl"
    masked.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=r"^data: "):
        resume(data__sources=json.dumps([{"path": str(masked)}]))


def test_the_method_the_network_the_optimizer_and_the_seed_are_fixed(resume):
    with pytest.raises(ValueError, match=r"^method: eagle3 then, spd now"):
        resume("spd")
    with pytest.raises(ValueError, match=r"^model.num_steps: 2 then, 3 now"):
        resume(model__num_steps=3)
    with pytest.raises(ValueError, match=r"^model.loss: kl then, lk now; .*--model.init_from"):
        resume(model__loss="lk")
    scaling = json.dumps({"rope_type": "linear", "factor": 2.0})
    with pytest.raises(ValueError, match=r"^model.rope_scaling: none then, .*linear.* now"):
        resume(model__rope_scaling=scaling)
    with pytest.raises(ValueError, match=r"^optim.name: adamw then, muon now"):
        resume(optim__name="muon")
    with pytest.raises(ValueError, match=r"^seed: 0 then, 1 now"):
        resume(seed=1)


def test_other_changes_are_told_in_one_line(resume, capfd):
    trainer = resume(optim__lr=1e-5, max_steps=4, evaluation__every_steps=1, log_every_steps=7)
    (line,) = [x for x in capfd.readouterr().err.splitlines() if x.startswith("resumed")]
    assert line == (
        "resumed at step 2 of 4; optim.lr: 0.003 then, 1e-05 now; max_steps: 2 then, 4 now"
    )
    trainer.run()
    # The checkpoint has the settings with which its last steps were made.
    newest = trainer.config.output_dir / "checkpoints" / "step-0000004"
    assert read_record(newest).settings["optim.lr"] == 1e-5


def test_the_same_command_finds_nothing_changed(resume, capfd):
    resume(max_steps=2)
    line = "resumed at step 2 of 2; nothing is left to train: raise max_steps, or epochs"
    assert line in capfd.readouterr().err


def test_a_best_head_without_checkpoints_is_compared_too(world, resume, folder, tmp_path, capfd):
    """A run may end before its first checkpoint, or its user may remove the checkpoints."""
    shutil.rmtree(folder / "checkpoints")
    before = weights(folder / "best")
    with pytest.raises(ValueError, match=r"^data: .*/best is of another run"):
        resume(data__sources=other_rows(world, tmp_path / "own.jsonl"))
    assert_equal_weights(weights(folder / "best"), before)
    trainer = resume()
    assert "best is of this run, which ended before its first checkpoint" in capfd.readouterr().err
    assert trainer.progress.step == 0
    assert trainer.progress.best_score == float("-inf")


def test_a_best_head_of_another_run_is_no_part_of_this_one(world, resume, folder, tmp_path):
    other = world.trainer(
        "eagle3",
        tmp_path / "other",
        max_steps=1,
        model__num_steps=2,
        data__sources=other_rows(world, tmp_path / "own.jsonl"),
    )
    other.restore()
    other.run()
    shutil.rmtree(folder / "best")
    shutil.copytree(tmp_path / "other" / "best", folder / "best")
    with pytest.raises(ValueError, match=r"^data: .*/best is of another run"):
        resume()


def test_a_best_head_that_is_gone_or_chosen_by_another_score_is_written_anew(resume, folder, capfd):
    shutil.rmtree(folder / "best")
    trainer = resume()
    assert "best is gone: the next evaluation writes it anew" in capfd.readouterr().err
    trainer.run()
    assert weights(folder / "best")
    again = resume(evaluation__best_by="decoded", evaluation__decode_prompts=1, max_steps=4)
    assert "best was chosen by another score" in capfd.readouterr().err
    assert again.progress.best_score == float("-inf")


def test_a_checkpoint_of_an_earlier_version_is_refused_in_one_line(resume, folder):
    step = folder / "checkpoints" / STEP
    for name in (RECORD, checkpoint.COMPLETE):
        (step / name).unlink()
    checkpoint.write_manifest(step)
    with pytest.raises(ValueError, match=rf"^resume: .*{STEP} has no run.json.*--model.init_from"):
        resume()
    (step / RECORD).write_text("{}")
    (step / checkpoint.COMPLETE).unlink()
    checkpoint.write_manifest(step)
    with pytest.raises(ValueError, match=r"^resume: .*run.json.*does not hold what it should"):
        resume()


def test_a_head_starts_another_run_in_another_folder(world, resume, folder, tmp_path):
    """The fix that the messages name."""
    start = folder / "checkpoints" / STEP
    arguments = {"max_steps": 1, "model__num_steps": 2, "model__init_from": start}
    trainer = world.trainer("eagle3", tmp_path / "next", seed=1, **arguments)
    trainer.restore()
    trainer.run()
    assert read_record(tmp_path / "next" / "best").settings["model.init_from"] == str(start)
    # Once it has a checkpoint, its start has no effect any more.
    again = world.trainer("eagle3", tmp_path / "next", seed=1, **arguments | {"max_steps": 2})
    shutil.rmtree(tmp_path / "next" / "best")
    again.restore()
    assert again.progress.step == 1


# -- a run's folder as a checkpoint -----------------------------------------------------------


def test_a_runs_folder_is_its_best_head_or_else_its_newest(folder, monkeypatch, capfd):
    monkeypatch.setattr(draft, "_tell_head", cache(draft._tell_head.__wrapped__))
    assert draft.resolve_folder(str(folder)) == folder / "best"
    assert capfd.readouterr().err == f"note: {folder / 'best'} is used, the run's best head\n"
    shutil.rmtree(folder / "best")
    newest = folder / "checkpoints" / "step-0000012"
    shutil.copytree(folder / "checkpoints" / STEP, newest)
    shutil.copytree(newest, newest.with_name(".step-0000013.partial"))  # being written
    for _ in range(2):  # every command asks several times
        assert draft.resolve_folder(str(folder)) == newest
    line = f"note: {newest} is used, the run's newest head, as it has no best/ yet\n"
    assert capfd.readouterr().err == line
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(ValueError, match="checkpoint: the run in .* has saved no head yet"):
        draft.resolve_folder(str(folder))


def test_a_stopped_run_decodes_under_its_own_name(world, folder, monkeypatch, capfd):
    shutil.rmtree(folder / "best")
    arguments = ["--checkpoint", str(folder), "--prompt", "Hi", "--max-new-tokens", "4"]
    monkeypatch.setattr(sys, "argv", ["inference", *arguments])
    inference.main()
    assert STEP in capfd.readouterr().err


# -- the place in the data --------------------------------------------------------------------


def trained_rows(trainer: Trainer) -> list[int]:
    """Run to the end, and return the training rows in their order."""
    rows: list[int] = []
    load = trainer.load

    def noting(dataset: Any, chosen: list[int]) -> Any:
        if dataset is trainer.data.train:
            rows.extend(chosen)
        return load(dataset, chosen)

    trainer.load = noting
    trainer.run()
    return rows


CHANGES = [
    {"batch_tokens": 128},
    {"packing": True},
    {"accumulation": 2, "batch_tokens": 100},
    {"batch_group": 2},
    {"accumulation": 3},
]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_a_changed_batch_size_skips_and_repeats_no_row(world, tmp_path, changes):
    """A place counts batches, so other batches would put it at another row."""
    first = {"model__num_steps": 2, "max_steps": None, "epochs": 2}
    stopped = world.trainer("eagle3", tmp_path, **first | {"max_steps": 3})
    stopped.restore()
    rows = trained_rows(stopped)
    assert 0 < len(rows) < len(stopped.data.train)
    again = world.trainer("eagle3", tmp_path, **first | changes | {"max_minutes": 1e-9})
    again.restore()
    planned = again.num_steps
    rows += trained_rows(again)  # one step
    last = world.trainer("eagle3", tmp_path, **first | changes)
    last.restore()
    assert last.num_steps == planned
    rows += trained_rows(last)
    every = list(range(len(last.data.train)))
    assert sorted(rows[: len(every)]) == every
    assert sorted(rows[len(every) :]) == every
    assert last.progress.step == planned


# -- files read back --------------------------------------------------------------------------


def renamed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"_orig_mod.{name}": value for name, value in state.items()}


def halved(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: x.half() if "norm" in name else x for name, x in state.items()}


def shorter(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As if a process had gathered its own part only."""
    return {name: x[:1] if x.ndim > 1 else x for name, x in state.items()}


@pytest.mark.parametrize("change", [renamed, halved, shorter])
def test_a_head_that_is_not_whole_never_becomes_the_best(resume, folder, monkeypatch, change):
    before = weights(folder / "best")
    trainer = resume(evaluation__every_steps=1)
    gather = trainer.accelerator.get_state_dict
    monkeypatch.setattr(trainer.accelerator, "get_state_dict", lambda m: change(gather(m)))
    trainer.progress.best_score = float("-inf")
    with pytest.raises(Failure, match=r"checkpoint: .*model.safetensors, read back, is not what"):
        trainer.run()
    assert_equal_weights(weights(folder / "best"), before)
    trainer.accelerator.get_state_dict = gather
    assert [path.name for path in checkpoint.step_folders(folder)] == [STEP]
    assert resume().progress.step == 2


def test_reading_back_names_the_tensor(tmp_path):
    path, tensors = tmp_path / "x.safetensors", {"a": torch.zeros(2, 3), "b": torch.zeros(1)}
    save_file(tensors, path)
    check_written(path, layout_of(tensors))
    with pytest.raises(Failure, match=r"2 tensors instead of 3; c: none instead of I64 \[4\]"):
        check_written(path, layout_of(tensors | {"c": torch.zeros(4, dtype=torch.int64)}))
    with pytest.raises(Failure, match=r"a: F32 \[2, 3\] instead of BF16 \[2, 3\]"):
        check_written(path, layout_of(tensors | {"a": tensors["a"].bfloat16()}))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Failure, match="read back"):
        check_written(path, layout_of(tensors))


def test_deepspeeds_files_are_counted_and_whole(tmp_path):
    folder = tmp_path / "deepspeed"
    folder.mkdir()
    names = [
        "mp_rank_00_model",
        "zero_pp_rank_0_mp_rank_00_optim",
        "zero_pp_rank_1_mp_rank_00_optim",
    ]
    for name in names:
        torch.save({"a": torch.zeros(9)}, folder / f"{name}_states.pt")
    check_deepspeed(tmp_path, 2)
    with pytest.raises(Failure, match="2 optimizer states"):
        check_deepspeed(tmp_path, 3)
    last = folder / f"{names[2]}_states.pt"
    last.write_bytes(last.read_bytes()[:-40])
    with pytest.raises(Failure, match="zero_pp_rank_1.*cut short"):
        check_deepspeed(tmp_path, 2)


def test_a_run_stopped_in_its_first_save_starts_again(world, tmp_path, monkeypatch):
    arguments = {"max_steps": 1, "model__num_steps": 2}
    trainer = world.trainer("eagle3", tmp_path, **arguments)
    trainer.restore()

    def stopped(*_: object) -> None:
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(TrainingState, "save", stopped)
        with pytest.raises(Stop):
            trainer.run()
    again = world.trainer("eagle3", tmp_path, **arguments)
    again.restore()
    assert again.progress.step == 0
    again.run()
    assert [path.name for path in checkpoint.step_folders(tmp_path)] == ["step-0000001"]


def test_the_command_refuses_before_it_changes_the_folder(world, folder, tmp_path, monkeypatch):
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    target = another_target(world, tmp_path / "tuned", "")
    changes = {"max_steps": 3, "model__num_steps": 2, "target": target}
    with pytest.raises(ValueError, match="^target: "):
        train(world.arguments("eagle3", folder, **changes), monkeypatch)
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
