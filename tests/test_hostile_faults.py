"""A full disk or a kill at any moment in a save leaves the whole old state, or the new one."""

import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tiny_drafts import make_head
from tiny_models import tiny_llama
from train_runs import assert_ends_as, start_runs

from pipedraft import files
from pipedraft.errors import Failure, storage_error
from pipedraft.models.heads.draft import load_untied
from pipedraft.train import checkpoint

SIZE = 200_000


@contextmanager
def little_disk(size: int) -> Iterator[None]:
    """Limit file sizes: writing fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fill(folder: Path, version: int) -> None:
    """Write three files with their version inside."""
    (folder / "config.json").write_text(json.dumps({"version": version}))
    (folder / "part").write_bytes(bytes([version]) * SIZE)
    save_file({"x": torch.full((SIZE // 4,), float(version))}, folder / "model.safetensors")


def version_of(folder: Path) -> int:
    """Return the common version in all files."""
    version = json.loads((folder / "config.json").read_text())["version"]
    assert (folder / "part").read_bytes() == bytes([version]) * SIZE
    assert (load_file(folder / "model.safetensors")["x"] == version).all()
    return version


def write_file(place: Path, version: int) -> None:
    files.write_atomically(place / "file", bytes([version]) * SIZE)


def read_file(place: Path) -> int:
    content = (place / "file").read_bytes()
    assert content == content[:1] * SIZE
    return content[0]


def write_step(place: Path, version: int) -> None:
    checkpoint.replace_folder(
        checkpoint.step_folder(place, version), lambda folder: fill(folder, version)
    )
    checkpoint.rotate(place, 2)


def read_step(place: Path) -> int:
    """Read the step as a resuming run does."""
    checkpoint.tidy(place)
    folder, damaged = checkpoint.newest_sound(place)
    assert folder is not None and not damaged
    return version_of(folder)


def write_best(place: Path, version: int) -> None:
    checkpoint.replace_folder(place / "best", lambda folder: fill(folder, version))


def read_best(place: Path) -> int:
    checkpoint.tidy(place)
    assert checkpoint.damage(place / "best") is None
    return version_of(place / "best")


SAVES: dict[str, tuple[Callable[[Path, int], None], Callable[[Path], int]]] = {
    "file": (write_file, read_file),
    "checkpoint": (write_step, read_step),
    "best": (write_best, read_best),
}


def is_storage_error(error: BaseException) -> bool:
    """Return True for an error that ends a command with one line and status 1."""
    return storage_error(error) is not None or isinstance(error, SafetensorError | Failure)


by_every_save = pytest.mark.parametrize("write, read", SAVES.values(), ids=SAVES)


@by_every_save
def test_a_full_disk_leaves_what_was_there(write, read, tmp_path):
    write(tmp_path, 1)
    for size in (0, 5, 100, 4096, SIZE // 2, SIZE - 1):
        with pytest.raises((OSError, SafetensorError, Failure)) as failed, little_disk(size):
            write(tmp_path, 2)
        assert is_storage_error(failed.value)
        assert read(tmp_path) == 1, size
    write(tmp_path, 2)
    assert read(tmp_path) == 2
    left = [p.name for p in tmp_path.rglob("*") if ".partial" in p.name or ".replaced" in p.name]
    assert not left


@by_every_save
def test_a_full_disk_is_named_with_its_folder(write, read, tmp_path):
    for size in (0, SIZE - 1):
        with pytest.raises(Failure) as failed, little_disk(size):
            write(tmp_path, 2)
        assert re.fullmatch(
            rf"'{tmp_path}/\S+': File too large; make room, and run the same command again",
            str(failed.value),
        )
        assert ".partial" not in str(failed.value)


def test_a_draft_is_saved_whole_or_the_fault_is_named(tmp_path):
    draft = make_head(tiny_llama(layers=4, vocab=32))
    for size in (0, 100, 5000):
        with pytest.raises((OSError, SafetensorError)) as failed, little_disk(size):
            draft.save(tmp_path)
        assert is_storage_error(failed.value)
    draft.save(tmp_path)
    load_untied(tmp_path)


RUN = {"max_steps": 2, "save_every_steps": 1, "evaluation__every_steps": 1}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    world = tmp_path_factory.mktemp("world")
    with start_runs(world, {"spd": RUN}) as found:
        yield found


@pytest.mark.all
@pytest.mark.timeout(1800)
def test_a_disk_that_is_full_at_any_file_of_a_run_loses_nothing(runs, tmp_path):
    """The disk gets full at each file in turn, the data's cache included."""

    def run(name: str, full_at: int) -> bool:
        folder = tmp_path / name
        changes = {"data__cache_dir": folder / "cache", "max_steps": 3}
        return runs.run_on_disk("spd", folder, full_at=full_at, changes=changes)

    assert run("whole", 0)
    for num_files in itertools.count():
        is_untouched = run(f"{num_files}", num_files + 1)
        assert is_untouched or run(f"{num_files}", 0)
        assert_ends_as(tmp_path / f"{num_files}", tmp_path / "whole")
        if is_untouched:
            break
        shutil.rmtree(tmp_path / f"{num_files}")
    assert num_files > 30


@by_every_save
def test_a_kill_at_any_moment_leaves_the_old_or_the_new(write, read, tmp_path):
    """Save repeatedly in a child process, and kill it at random moments: fifty kills in all."""
    numbers = random.Random(0)
    write(tmp_path, 1)
    last = 1
    for _ in range(13):
        child = os.fork()
        if not child:  # saves until it is killed
            for version in range(last + 1, 255):
                write(tmp_path, version)
            os._exit(0)
        time.sleep(numbers.uniform(0.001, 0.04))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        version = read(tmp_path)
        assert last <= version
        last = min(version, 200)
