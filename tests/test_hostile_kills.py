"""SIGKILL at random moments in an upload and a server: nothing is lost, and both resume.

test_hostile_faults.py tests kills in saves, test_long_runs.py in training.
"""

import os
import random
import shutil
import signal
from concurrent.futures import Future

import pytest
from fork_server import forked, status_of
from hub_runs import make_place, push, signed_in
from safetensors.torch import load_file, save_file

from pipedraft.files import file_sha256

MANY = pytest.param(13, marks=pytest.mark.all)


@pytest.mark.parametrize("num_kills", [3, MANY])
def test_an_upload_that_is_killed_leaves_one_of_the_two_heads_whole(
    num_kills, tmp_path, monkeypatch
):
    place, numbers = make_place(tmp_path), random.Random(num_kills)
    heads = ["spd", "again"]
    shutil.copytree(place.draft, place.folder / "again")
    tensors = load_file(place.draft / "model.safetensors")
    more = {name: value + 0.1 * value.is_floating_point() for name, value in tensors.items()}
    save_file(more, place.folder / "again" / "model.safetensors")
    paths = {name: place.folder / name / "model.safetensors" for name in heads}
    digests = {name: file_sha256(path) for name, path in paths.items()}
    with signed_in(monkeypatch, tmp_path / "cache") as hub:
        for name in 2 * heads:  # what the kills below may leave; then as they find it
            before = hub.num_moments
            assert push(place, monkeypatch, draft=name) == 0
        moments = hub.num_moments - before
        commits = {}
        for sha, files in hub.repositories["user/name"].commits.items():
            commits[sha] = {path: blob.content for path, blob in files.items()}
        whole = list(commits.values())[-2:]
        num_killed = 0
        for index in range(num_kills):
            draft = heads[index % 2]
            pid, kill_at = Future[int](), hub.num_moments + numbers.randrange(1, moments)

            def kill(number: int, pid: Future = pid, kill_at: int = kill_at) -> None:
                if number == kill_at:
                    os.kill(pid.result(), signal.SIGKILL)

            hub.at_moment = kill
            pid.set_result(forked(lambda: os._exit(push(place, monkeypatch, draft=draft))))  # noqa: B023
            num_killed += status_of(pid.result()) == -signal.SIGKILL
            hub.at_moment = lambda number: None
            assert hub.repositories["user/name"].texts() in whole
        assert num_killed > num_kills / 2
        assert push(place, monkeypatch, draft="spd") == 0
        assert hub.repositories["user/name"].texts() == whole[0]
    assert {name: file_sha256(path) for name, path in paths.items()} == digests
