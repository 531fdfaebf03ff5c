"""Uploads to a Hub on 127.0.0.1 and downloads from it: the requests, and each failure's end."""

import hashlib
import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_runs import call
from fake_hub import LFS_FROM, Fault
from hub_runs import NAMES, STRANGER, Place, make_place, one_line, point_at, push, signed_in
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from pipedraft.errors import Failure
from pipedraft.model_kinds import Refused
from pipedraft.model_names import check_checkpoint, check_exists
from pipedraft.models import load_draft, load_untied
from pipedraft.models.target import capture_hidden, load_target


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    return make_place(tmp_path_factory.mktemp("hub"))


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with signed_in(monkeypatch, tmp_path / "cache") as running:
        yield running


# -- what is uploaded -----------------------------------------------------------------------


def test_a_push_makes_a_public_repository_with_three_files(place, hub, monkeypatch, capfd):
    assert push(place, monkeypatch, "--commit-message", "First head") == 0
    repository = hub.repositories["user/name"]
    assert set(repository.files()) == NAMES and not repository.private
    weights = repository.files()["model.safetensors"]
    assert weights.is_lfs and weights.content == (place.draft / "model.safetensors").read_bytes()
    assert len(weights.content) > LFS_FROM
    sha = repository.branches["main"]
    assert repository.messages[sha] == "First head"
    out, err = capfd.readouterr()
    assert (out, err) == (f"{hub.url}/user/name/commit/{sha}\n", "")
    assert push(place, monkeypatch) == 0  # nothing has changed: no second commit
    assert repository.branches["main"] == sha and len(hub.sent("PUT")) == 1


def test_a_private_repository_is_seen_by_its_owner_only(place, hub, monkeypatch, capfd):
    assert push(place, monkeypatch, "--private") == 0
    assert hub.repositories["user/name"].private
    target = load_target(str(place.target))
    load_draft("user/name", target)
    for token, status in ((STRANGER, "404"), (None, "401")):
        if token is None:
            monkeypatch.delenv("HF_TOKEN")
        else:
            monkeypatch.setenv("HF_TOKEN", token)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(place.folder / f"no_{status}"))
        with pytest.raises(ValueError, match=f"'user/name'.*answered {status}.*check the name"):
            load_draft("user/name", target)


def test_an_upload_for_a_private_repository_never_goes_to_a_public_one(
    place, hub, monkeypatch, capfd
):
    hub.create("user/name")
    assert push(place, monkeypatch, "--private") == 2
    one_line(capfd, "--private", "'user/name'", "is public", "leave --private out")
    assert set(hub.repositories["user/name"].files()) == {".gitattributes"}


def test_a_branch_is_made_and_the_main_one_stays(place, hub, monkeypatch):
    assert push(place, monkeypatch) == 0
    main = hub.repositories["user/name"].texts()
    assert push(place, monkeypatch, "--revision", "n4", draft="spd4") == 0
    assert hub.repositories["user/name"].texts() == main
    branch = hub.repositories["user/name"].texts("n4")
    assert json.loads(branch["config.json"])["architecture"]["num_stages"] == 4
    count = len(hub.repositories["user/name"].commits)
    assert push(place, monkeypatch, "--revision", "n4", draft="spd4") == 0
    assert len(hub.repositories["user/name"].commits) == count
    target = load_target(str(place.target))
    assert load_draft("user/name", target).num_stages == 2
    assert load_draft("user/name", target, revision="n4").num_stages == 4


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"config__json": b'{"model_type": "llama"}'}, ["another model", "give another --repo"]),
        ({"model__safetensors": b"x"}, ["another model"]),
        ({"config__json": b"not JSON"}, ["another model"]),
        ("eagle3", ["'eagle3'", "which is not this one", "--revision"]),
        ("spd4", ["'spd' for 4 stages", "which is not this one"]),
        ("spd_other", ["'spd' for 2 stages, of the target ", "which is not this one"]),
    ],
)
def test_a_repository_with_other_content_is_not_written_to(
    files, words, place, hub, monkeypatch, capfd
):
    if isinstance(files, str):
        assert push(place, monkeypatch, draft=files) == 0
        capfd.readouterr()
    else:
        hub.create("user/name", **files)
    before = hub.repositories["user/name"].texts()
    assert push(place, monkeypatch) == 2
    one_line(capfd, "--repo", "'user/name'", *words)
    assert hub.repositories["user/name"].texts() == before


def test_a_repository_of_results_and_notes_takes_a_draft(place, hub, monkeypatch):
    hub.create("user/name", notes__txt=b"mine", results__json=b"{}")
    assert push(place, monkeypatch) == 0
    assert set(hub.repositories["user/name"].files()) == NAMES | {"notes.txt", "results.json"}


# -- uploads that break off -----------------------------------------------------------------


def test_after_a_broken_upload_the_same_command_sends_only_what_is_missing(
    place, hub, monkeypatch, capfd
):
    monkeypatch.setattr("fake_hub.LFS_FROM", 100)  # so that each of the three is stored by itself
    weights = (place.draft / "model.safetensors").read_bytes()
    digest = hashlib.sha256(weights).hexdigest()
    hub.faults = [Fault("PUT", digest, "drop", times=99)]
    assert push(place, monkeypatch) == 1
    one_line(capfd, "--repo: 'user/name'", hub.url, "goes on where this one ended")
    assert len(hub.objects) == 2 and set(hub.repositories["user/name"].files()) == {
        ".gitattributes"
    }
    hub.faults, hub.requests = [], []
    assert push(place, monkeypatch) == 0
    assert [put.num_bytes for put in hub.sent("PUT")] == [len(weights)]
    assert set(hub.repositories["user/name"].files()) == NAMES


# -- failures -------------------------------------------------------------------------------

FAULTS: list[tuple[Fault, int, list[str]]] = [
    (Fault("POST", "/api/repos/create", 401), 2, ["401", "no valid token", "HF_TOKEN"]),
    (Fault("POST", "/api/repos/create", "drop"), 1, ["cannot be used"]),
    (Fault("POST", "/api/repos/create", "stall"), 1, ["no answer", "ReadTimeout"]),
    (Fault("POST", "/api/validate-yaml", 400), 2, ["400", "made to fail"]),
    (Fault("GET", "/api/models", 404), 2, ["404", "check the name"]),
    (Fault("POST", "/preupload/", 500, 99), 1, ["500"]),
    (Fault("POST", "/objects/batch", 429, 99), 1, ["429"]),
    (Fault("PUT", "/lfs/", "stall", 99), 1, ["no answer"]),
    (Fault("POST", "/commit/", 412), 1, ["412"]),
]


@pytest.mark.parametrize("case", FAULTS, ids=lambda c: f"{c[0].method}{c[0].path}-{c[0].action}")
def test_every_failure_is_one_line(case, place, hub, monkeypatch, capfd):
    fault, status, words = case
    hub.faults = [Fault(fault.method, fault.path, fault.action, fault.times)]
    assert push(place, monkeypatch) == status
    one_line(capfd, "--repo: 'user/name'", *words)
    if "user/name" in hub.repositories:
        assert set(hub.repositories["user/name"].files()) == {".gitattributes"}


def test_who_may_not_write_is_told_so(place, hub, monkeypatch, capfd):
    assert push(place, monkeypatch, repo="stranger/name") == 2
    one_line(capfd, "'stranger/name'", "403", "don't have the rights", "your own repository")
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    assert push(place, monkeypatch) == 2
    one_line(capfd, "'user/name'", "401", "Invalid credentials", "HF_TOKEN")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(place.folder / "no_token"))
    assert push(place, monkeypatch) == 2
    one_line(capfd, "HF_TOKEN: missing", "hf auth login")
    assert not hub.repositories


def test_a_hub_that_is_not_there_is_a_failure_and_offline_mode_is_bad_input(
    place, hub, monkeypatch, capfd
):
    point_at("http://127.0.0.1:9", monkeypatch)
    assert push(place, monkeypatch) == 1
    one_line(capfd, "http://127.0.0.1:9 cannot be used")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert push(place, monkeypatch) == 2
    one_line(capfd, "'user/name'", "HF_HUB_OFFLINE is set")


def test_a_model_elsewhere_is_refused_at_once_if_the_hub_is_not_there(tmp_path, monkeypatch, capfd):
    point_at("http://127.0.0.1:9", monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "user" / "names").mkdir(parents=True)
    with pytest.raises(Refused) as refused:
        check_exists("user/name")
    said = str(refused.value)
    assert "no folder 'user/name' here, did you mean user/names?" in said
    assert "http://127.0.0.1:9 cannot be reached" in said
    with pytest.raises(ValueError, match="checkpoint: .* cannot be reached"):
        check_checkpoint("user/name")


NO_NAMES = ["../..", "/name", "user/", "user/..", "name", "", "user/a b", "user/b\n", "user/a/b"]


@pytest.mark.parametrize("words", [[], ["--dry-run"]], ids=["push", "dry_run"])
@pytest.mark.parametrize("repo", [*NO_NAMES, "user/" + "n" * 97])
def test_what_names_no_repository_is_bad_input_and_no_path(
    repo, words, place, hub, tmp_path, monkeypatch, capfd
):
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    before = contents(tmp_path)
    assert push(place, monkeypatch, *words, repo=repo) == 2
    line = one_line(capfd, f"--repo: {repo!r}", "give user/name")
    assert line[:-1].isprintable()
    assert not hub.repositories and contents(tmp_path) == before


# -- the folder of a dry run ----------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.fixture
def draft(place, tmp_path) -> Path:
    return Path(shutil.copytree(place.draft, tmp_path / "run" / "best"))


def dry_run(folder: Path, out: Path, monkeypatch) -> int:
    words = ["push", "--checkpoint", str(folder), "--repo", "user/name", "--dry-run"]
    return call("models", [*words, "--out", str(out)], monkeypatch)


@pytest.mark.parametrize("where", ["..", "below/it", "link"])
def test_a_dry_run_onto_its_own_checkpoint_changes_no_byte(
    where, draft, tmp_path, monkeypatch, capfd
):
    out = draft / where
    if where == "link":
        out = tmp_path / "link"
        out.symlink_to(draft)
    before = contents(tmp_path)
    assert dry_run(draft, out, monkeypatch) == 2
    one_line(capfd, f"--out: {str(out)!r}", "which is read", "give another folder")
    assert contents(tmp_path) == before


def test_a_dry_run_replaces_its_own_files_alone(place, draft, tmp_path, monkeypatch, capfd):
    (tmp_path / "file").write_text("mine")
    out = tmp_path / "upload"
    out.mkdir()
    assert dry_run(draft, out, monkeypatch) == 0  # an empty folder
    assert load_untied(out).num_stages == 2
    assert dry_run(place.folder / "spd4", out, monkeypatch) == 0
    assert load_untied(out).num_stages == 4
    (out / "notes.txt").write_text("mine")
    capfd.readouterr()
    before = contents(tmp_path)
    for name, why in (("upload", "did not write"), ("file", "is no folder")):
        assert dry_run(place.folder / "spd4", tmp_path / name, monkeypatch) == 2
        one_line(capfd, f"--out: {str(tmp_path / name)!r}", why, "give another")
        assert contents(tmp_path) == before


def test_a_full_disk_leaves_nothing_half_written(draft, tmp_path, monkeypatch, capfd):
    """A limit on file size stands for the disk: the weights do not fit."""
    before = contents(tmp_path)
    size = (draft / "model.safetensors").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, hard))
    try:
        assert dry_run(draft, tmp_path / "upload", monkeypatch) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    one_line(capfd, f"--out: {str(tmp_path / 'upload')!r} cannot be written", "make room")
    assert contents(tmp_path) == before


# -- checkpoints that nobody could load -----------------------------------------------------


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("draft_type", "nope", ["draft_type 'nope'", "unknown"]),
        ("weights", lambda w: w.popitem(), ["is missing, by config.json"]),
        ("weights", lambda w: w["norm.weight"].fill_(torch.nan), ["norm.weight", "infinite"]),
    ],
)
def test_what_nobody_could_load_is_not_uploaded(
    part, value, words, draft, place, hub, monkeypatch, capfd
):
    """Loading refuses the same; test_hostile_checkpoints.py has its other refusals."""
    if part == "weights":
        rewrite(draft, value)
    else:
        description = json.loads((draft / "config.json").read_text())
        (draft / "config.json").write_text(json.dumps(description | {part: value}))
    assert push(place, monkeypatch, draft=str(draft)) == 2
    one_line(capfd, "checkpoint: ", *words)
    assert not hub.repositories


# -- downloads ------------------------------------------------------------------------------


def logits_of(draft, target) -> torch.Tensor:
    ids_BT = torch.arange(40, 60)[None]
    with torch.no_grad():
        return draft.logits(draft(capture_hidden(target, ids_BT, draft.taps), [2]))


def test_a_downloaded_draft_gives_the_same_logits(place, hub, monkeypatch):
    assert push(place, monkeypatch) == 0
    target = load_target(str(place.target))
    there, here = load_draft("user/name", target), load_draft(str(place.draft), target)
    assert torch.equal(logits_of(there, target), logits_of(here, target))
    hub.requests = []
    load_draft("user/name", target)
    assert not hub.sent("GET", "/cdn/")  # the second time from the cache
    hub.faults = [Fault("GET", "/", 500, times=99)]
    load_draft("user/name", target)  # also of a Hub that is down


def test_another_target_is_refused_by_name(place, hub, monkeypatch):
    assert push(place, monkeypatch) == 0
    words = rf"target: does not match .* trained for {place.target}: hash: \w+ != \w+; give that"
    with pytest.raises(ValueError, match=words):
        load_draft("user/name", load_target(str(place.folder / "other_target")))


def test_a_download_that_breaks_off_goes_on_and_bad_names_are_refused(place, hub, monkeypatch):
    assert push(place, monkeypatch) == 0
    target = load_target(str(place.target))
    with pytest.raises(ValueError, match="'user/nam'.*answered 404.*check the name"):
        load_draft("user/nam", target)
    with pytest.raises(ValueError, match="'user/name'.*answered 404.*the revision"):
        load_draft("user/name", target, revision="v2")
    for action, text in ((500, "answered 500"), ("stall", "no answer"), ("drop", "cannot be used")):
        hub.faults = [Fault("GET", "/api/models", action, times=99)]
        with pytest.raises(Failure, match=f"'user/name'.*{text}"):
            load_draft("user/name", target)
    hub.faults = [Fault("GET", "/cdn/", "drop")]
    load_draft("user/name", target)
    assert len(hub.sent("GET", "/cdn/")) == 2
