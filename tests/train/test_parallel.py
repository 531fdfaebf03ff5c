"""Two processes under every launcher configuration train the same run as one process."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from accelerate.commands import launch
from fork_server import forked, rank_environments, status_of
from tiny_models import REPOSITORY
from torch.distributed import TCPStore
from train_runs import (
    Runs,
    assert_same_run,
    launcher_environment,
    logged,
    said,
    start_runs,
    weights,
)

from pipedraft.train import checkpoint

COMMON = {"peak_tflops": 1.0, "evaluation__max_rows": 5, "save_every_steps": 2, "batch_group": 2}
CHANGES = {
    "spd": COMMON,
    "ppsd": COMMON | {"model__num_stages": 2, "model__num_layers": 1},
    "eagle": COMMON,
    "eagle3": COMMON | {"model__draft_vocab_size": 60},
    "mtp": COMMON,
    "dspark": COMMON | {"model__num_anchors": 4},
    "flexspec": COMMON | {"model__feature_source": "self"},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Iterator[Runs]:
    # DeepSpeed's engine imports torch's compiler by this module: seconds in every process.
    muon = "deepspeed.runtime.zero.muon.muon_optimizer"
    with start_runs(tmp_path_factory.mktemp("world"), CHANGES, muon) as found:
        yield found


@pytest.fixture(scope="module")
def alone(runs, tmp_path_factory) -> Callable[[str], Path]:
    """A run by method on one process, made when it is first requested."""

    @cache
    def run(method: str) -> Path:
        folder = tmp_path_factory.mktemp("alone") / method
        assert runs.run(method, folder, changes={"accumulation": 2}) == 0, said(folder)
        return folder

    return run


@pytest.fixture(scope="module")
def alone_bf16(runs, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "bf16"
    changes = {"precision": "bf16", "accumulation": 2}
    assert runs.run("ppsd", folder, changes=changes) == 0, said(folder)
    return folder


# Every method and every strategy has a pair; the spd runs are stopped and resumed, below.
PAIRS = [
    *(("ddp", "ppsd"), ("fsdp2", "eagle"), ("fsdp2", "dspark"), ("fsdp2", "flexspec")),
    *(("zero2", "eagle"), ("zero3", "eagle3"), ("zero3", "mtp")),
]


WAYS = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
OTHERS = {(name, method) for name in WAYS for method in CHANGES}
ALL = [pytest.param(*pair, marks=pytest.mark.all) for pair in sorted(OTHERS - {*PAIRS})]


@pytest.mark.parametrize(("name", "method"), [*PAIRS, *ALL])
def test_two_processes_train_the_run_of_one(runs, alone, tmp_path, name, method):
    folder = tmp_path / method
    statuses = runs.together(method, folder, launcher_environment(name))
    assert statuses == [0, 0], said(folder)
    assert_same_run(folder, alone(method))


@pytest.mark.parametrize("name", [pytest.param("ddp", marks=pytest.mark.all), "fsdp2", "zero3"])
def test_a_target_in_parts_is_the_same_target(runs, alone, tmp_path, name):
    folder = tmp_path / "spd"
    environment, changes = launcher_environment(name), {"shard_target": True}
    statuses = runs.together("spd", folder, environment, changes=changes)
    assert statuses == [0, 0], said(folder)
    assert_same_run(folder, alone("spd"))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.all] * (name[-1] in "p12")) for name in WAYS],
)
def test_two_processes_in_bfloat16_train_the_run_of_one(runs, alone_bf16, tmp_path, name):
    """DDP and FSDP compute in bfloat16 from float32 weights, like one process. DeepSpeed's weights
    are bfloat16 themselves. All add gradients up, and count, in float32."""
    folder, dtypes, is_half = tmp_path / "ppsd", tmp_path / "dtypes", name.startswith("zero")
    environment = launcher_environment(name) | {"ACCELERATE_MIXED_PRECISION": "bf16"}
    options = {"changes": {"precision": "bf16"}, "jobs": {0: {"dtypes": str(dtypes)}}}
    assert runs.together("ppsd", folder, environment, **options) == [0, 0], said(folder)
    losses = [[x["loss"] for x in logged(place) if "loss" in x] for place in (folder, alone_bf16)]
    assert len(losses[0]) == 4
    relative = {"ddp": 1e-3, "fsdp2": 5e-3}.get(name, 2e-2)
    assert losses[0] == pytest.approx(losses[1], rel=relative)
    found = json.loads(dtypes.read_text())
    exact = ["torch.float32"]
    assert found.pop("weights") == (["torch.bfloat16"] if is_half else exact)
    assert found == dict.fromkeys(("loss and metrics", "gradients", "optimizer"), exact)
    saved = {weight.dtype for weight in weights(folder / "best").values()}
    assert (torch.bfloat16 in saved) == is_half


class Touch:
    """Its pickle creates a file when opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.path}",)


PICKLES = ["custom_checkpoint_0.pkl", "random_states_0.pkl", "random_states_1.pkl", "model.pt"]
PICKLES += ["optimizer.bin", "scheduler.bin", "scaler.pt", "pytorch_model.bin"]
PICKLES += [f"{folder}/.metadata" for folder in ("pytorch_model_fsdp_0", "optimizer_0")]
PICKLES += ["pytorch_model/mp_rank_00_model_states.pt"]
"""Pickle names in training states from accelerate, torch or DeepSpeed."""


def make_hostile(paths: list[Path], mark: Path) -> None:
    """Write pickles that create the file ``mark`` when opened."""
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(pickle.dumps(Touch(mark)))
        if path.name != ".metadata":
            torch.save({"module": Touch(mark)}, path)
    with pytest.raises(Exception, match="os|posix"):
        torch.load(paths[-1], weights_only=True)
    torch.load(paths[-1], weights_only=False)
    assert mark.exists()  # whoever opens it runs it
    mark.unlink()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.all] * (name[-1] in "12")) for name in WAYS]
)
def test_sharded_runs_resume_where_they_were_stopped(runs, alone, tmp_path, name):
    """One process gets the signal. Pickles under a launcher's usual names are never opened, and
    DeepSpeed's own pickles run no code."""
    folder, environment, mark = tmp_path / "spd", launcher_environment(name), tmp_path / "mark"
    signalled = {1: {"step": 2, "signals": [signal.SIGTERM]}}
    assert runs.together("spd", folder, environment, jobs=signalled) == [143, 143], said(folder)
    assert logged(folder)[-1]["step"] == 3
    state = checkpoint.step_folders(folder)[-1] / "training_state"
    own = [p for p in state.rglob("*") if p.name.endswith((".pkl", ".bin", ".pt", ".metadata"))]
    assert bool(own) == name.startswith("zero")
    assert said(folder).count("stopped at step 3 of 4: SIGTERM") == 1
    make_hostile([state / other for other in PICKLES if state / other not in own], mark)
    if own:
        hostile = tmp_path / "hostile"
        shutil.copytree(folder, hostile)
        step = checkpoint.step_folders(hostile)[-1]
        make_hostile([step / path.relative_to(state.parent) for path in own], mark)
        (step / checkpoint.COMPLETE).unlink()
        checkpoint.write_manifest(step)
        assert runs.together("spd", hostile, environment) == [2, 2], said(hostile)
        assert "states.pt is no file of tensors and plain values" in said(hostile)
    assert runs.together("spd", folder, environment) == [0, 0], said(folder)
    assert not mark.exists()
    assert "resumed at step 3 of 4" in said(folder)
    assert_same_run(folder, alone("spd"))


def test_a_run_goes_on_with_another_number_of_processes(runs, alone, tmp_path):
    """Run two processes, then one with both batches per step, then two again."""
    folder, environment = tmp_path / "spd", launcher_environment("ddp")
    for step, processes in enumerate((2, 1, 2)):
        changes = {"accumulation": 2 // processes, "batch_group": None}
        stop = {0: {"step": step, "signals": [signal.SIGTERM]}}
        if processes == 1:
            status = runs.run("spd", folder, changes=changes, **stop[0])
            assert status == 143, said(folder)
        else:
            runs.together("spd", folder, environment, changes=changes, jobs=stop)
        assert logged(folder)[-1]["step"] == step + 1
    assert runs.run("spd", folder, changes={"accumulation": 2, "batch_group": None}) == 0
    assert "cut into new" not in said(folder)
    assert_same_run(folder, alone("spd"))


def test_a_group_that_the_processes_cannot_share_goes_on_and_says_so(runs, tmp_path):
    folder, changes = tmp_path / "spd", {"batch_group": None}
    stop = {"step": 0, "signals": [signal.SIGTERM]}
    assert runs.run("spd", folder, changes=changes, **stop) == 143, said(folder)
    two = runs.together("spd", folder, launcher_environment("ddp"), changes=changes)
    assert two == [0, 0], said(folder)
    assert "cut into new groups of 2 batches" in said(folder) and logged(folder)[-1]["step"] == 4


SHOW = """
import json, os, pathlib, sys
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps(dict(os.environ)))
"""


@pytest.mark.parametrize("name", WAYS)
def test_a_real_launch_sets_what_the_other_runs_are_given(tmp_path, monkeypatch, name):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    (tmp_path / "show.py").write_text(SHOW)
    file = str(REPOSITORY / "configs" / "accelerate" / f"{name}.yaml")
    words = ["--config_file", file, "--num_processes", "2", "--mixed_precision", "no"]
    words += ["--main_process_port", "0", str(tmp_path / "show.py"), str(tmp_path)]
    arguments = launch.launch_command_parser().parse_args(words)
    assert status_of(forked(lambda: launch.launch_command(arguments))) == 0
    given = launcher_environment(name)
    for rank, own in enumerate(rank_environments(2, 0)):
        found = json.loads((tmp_path / str(rank)).read_text())
        assert given.items() <= found.items()
        assert {key: found[key] for key in own} == own | {"MASTER_PORT": found["MASTER_PORT"]}
        kinds = ("ACCELERATE_", "FSDP_", "PARALLELISM_")
        assert {key for key in found if key.startswith(kinds)} <= given.keys() | os.environ.keys()


@pytest.mark.all
def test_a_real_launch_trains_the_same_run(runs, alone, tmp_path):
    """Start the launcher itself, with all its settings."""
    folder = tmp_path / "spd"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2"]
    command += ["--config_file", str(REPOSITORY / "configs/accelerate/ddp.yaml")]
    command += ["--main_process_port", "0", "-m", "pipedraft.train"]
    command += runs.world.arguments("spd", folder, **CHANGES["spd"])
    environment = os.environ | {"ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=500)
    assert done.returncode == 0, done.stderr.decode()
    assert_same_run(folder, alone("spd"))


def test_batch_groups_and_optimizers_that_do_not_fit_are_refused(runs, tmp_path):
    for name, method, changes, words in (
        ("ddp", "spd", {"batch_group": 3}, ["batch_group: 3 with 2 processes", "multiple"]),
        ("fsdp2", "spd", {"optim__name": "muon"}, ["optim.name: 'muon'", "FSDP", "adamw"]),
        ("zero2", "spd", {"optim__name": "muon"}, ["optim.name: 'muon'", "DeepSpeed", "adamw"]),
        ("zero3", "spd", {"accumulation": 2}, ["accumulation: 2", "DeepSpeed", "--batch_tokens"]),
    ):
        folder = tmp_path / name
        environment = launcher_environment(name)
        assert runs.together(method, folder, environment, changes=changes) == [2, 2], said(folder)
        assert all(word in said(folder) for word in words), said(folder)


def test_resuming_runs_no_code_of_a_checkpoint(runs, tmp_path):
    """One process opens no pickle under a launcher's usual names."""
    folder, mark = tmp_path / "spd", tmp_path / "mark"
    assert runs.run("spd", folder, step=2, signals=[signal.SIGTERM]) == 143, said(folder)
    step = checkpoint.step_folders(folder)[-1]
    make_hostile([step / "training_state" / other for other in PICKLES], mark)
    (step / checkpoint.COMPLETE).unlink()
    checkpoint.write_manifest(step)
    assert runs.run("spd", folder) == 0, said(folder)
    assert not mark.exists()


SHORT = {"max_steps": 1, "accumulation": 1, "batch_group": None}


SLOW = [("ddp", "load_fitting"), ("fsdp2", "load_frozen_target"), ("zero3", "load_tokenizer_of")]


@pytest.mark.parametrize(
    ("name", "part"), [SLOW[1], *(pytest.param(*x, marks=pytest.mark.all) for x in SLOW[::2])]
)
def test_processes_wait_for_one_that_is_longer_than_the_usual_timeout(runs, tmp_path, name, part):
    """The first process downloads, loads and tokenizes for hours while the others wait."""
    folder, environment = tmp_path / "spd", launcher_environment(name)
    jobs = {0: {"usual_timeout_s": 1, "sleeps": {part: 2.5}}, 1: {"usual_timeout_s": 1}}
    statuses = runs.together("spd", folder, environment, changes=SHORT, jobs=jobs)
    assert statuses == [0, 0], said(folder)


def test_processes_on_two_disks_are_refused_at_once(runs, tmp_path):
    environment, folders = launcher_environment("ddp"), [tmp_path / "one", tmp_path / "other"]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = rank_environments(2, store.port)
    pids = [
        runs.start("spd", folder, environment=rank | environment)
        for folder, rank in zip(folders, ranks, strict=True)
    ]
    assert [runs.parent.wait(pid) for pid in pids] == [2, 2]
    for folder in folders:
        assert f"output_dir: {str(folder)!r} is another folder for 1 of 2 processes" in said(folder)
        assert not (folder / "checkpoints").exists()


def test_a_process_that_never_comes_ends_the_others_with_a_line(runs, tmp_path):
    folder, environment = tmp_path / "spd", launcher_environment("ddp")
    jobs = {0: {"wait_s": 2}, 1: {"wait_s": 2, "sleeps": {"load_frozen_target": 600}}}
    with runs.begun("spd", folder, environment, 2, SHORT, jobs) as (first, second):
        status = runs.parent.wait(first)
        os.kill(second, signal.SIGKILL)
        runs.parent.wait(second)
    lines = [line for line in said(folder).splitlines() if line and "moments" not in line]
    assert status == 1 and len(lines) == 1, said(folder)
    assert lines[0].startswith("error: processes: another one has ended, or did not come within")
