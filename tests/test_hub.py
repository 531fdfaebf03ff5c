"""Uploads to a Hub on 127.0.0.1 and downloads from it: what is sent, and how each failure ends."""

import hashlib
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
import yaml
from conftest import tiny_llama
from fake_hub import LFS_FROM, FakeHub, Fault, metadata_errors
from huggingface_hub import ModelCard, constants, snapshot_download
from huggingface_hub.utils import _http, disable_progress_bars, enable_progress_bars
from safetensors.torch import load_file
from test_cli import call
from test_eval_tasks import byte_tokenizer, write_rows

from pipedraft.data_recipes.recipe import DataConfig, Source, load_data
from pipedraft.errors import Failure
from pipedraft.models import hub_link, load_draft
from pipedraft.models.card import MADE
from pipedraft.models.draft import TargetReference
from pipedraft.models.eagle3 import Eagle3, Eagle3Config
from pipedraft.models.layers import LayerConfig
from pipedraft.models.spd import SPD, SPDConfig
from pipedraft.models.target import capture_hidden, load_target, target_fingerprint

TOKEN, STRANGER = "hf_of_user", "hf_of_stranger"
NAMES = {".gitattributes", "README.md", "config.json", "model.safetensors"}
DATA = {
    "rows_read": 9,
    "rows_kept": 7,
    "tokens": 90,
    "supervised_tokens": 40,
    "sources": {"chat.jsonl": {"rows_read": 9, "rows_kept": 7, "tokens": 90}},
    "licenses": {"mit": 5, "unknown": 2},
    "hub_datasets": ["openai/gsm8k"],
}


# -- a draft, its target, a Hub -------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    folder: Path

    @property
    def draft(self) -> Path:
        return self.folder / "spd"

    @property
    def target(self) -> Path:
        return self.folder / "target"


def save_draft(folder: Path, target, name: str, *, stages: int = 2, eagle: bool = False) -> Path:
    """A checkpoint with random weights and what a run leaves beside it."""
    reference = TargetReference(name=name, fingerprint=target_fingerprint(target))
    layer = LayerConfig.from_target(target.config)
    if eagle:
        draft = Eagle3(Eagle3Config().for_target(8), layer, reference)
    else:
        config = SPDConfig(num_target_layers=8, num_stages=stages, num_layers=1)
        draft = SPD(config, layer, reference)
    draft.initialise(target)
    generator = torch.Generator().manual_seed(5)
    for parameter in draft.parameters():
        noise = torch.randn(parameter.shape, generator=generator) * 0.3
        parameter.data.add_(noise / parameter.shape[-1] ** 0.5)
    folder.mkdir()
    draft.save(folder, training={"data": DATA, "metrics": {"score": 1.25}})
    (folder / "COMPLETE").write_text("a manifest")
    (folder / "training_state").mkdir()
    (folder / "training_state" / "optimizer.bin").write_text("large")
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    folder = tmp_path_factory.mktemp("hub")
    target = tiny_llama(layers=8, vocab=300)
    target.save_pretrained(folder / "target")
    byte_tokenizer().save_pretrained(folder / "target")
    other = tiny_llama(layers=8, vocab=300, seed=1)
    other.save_pretrained(folder / "other_target")
    save_draft(folder / "spd", target, str(folder / "target"))
    save_draft(folder / "spd4", target, str(folder / "target"), stages=4)
    save_draft(folder / "spd_other", other, str(folder / "other_target"))
    save_draft(folder / "eagle3", target, str(folder / "target"), eagle=True)
    write_rows(folder / "gsm8k" / "test.jsonl", *QUESTIONS)
    with pytest.MonkeyPatch.context() as patch:
        words = ["--checkpoint", str(folder / "spd"), "--checkpoint", str(folder / "eagle3")]
        words += ["--benchmarks", "gsm8k", "--data-dir", str(folder), "--max-new-tokens", "6"]
        words += ["--temperature", "0,1", "--tree", "chain:2", "--out", str(folder / "eval")]
        assert call("eval", words, patch) == 0
    return Place(folder)


QUESTIONS = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(3)]


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub that this process is signed in to; nothing is retried with a wait."""
    with FakeHub({TOKEN: "user", STRANGER: "stranger"}).running() as running:
        point_at(running.url, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield running
        _http.close_session()
        enable_progress_bars()


def point_at(url: str, monkeypatch) -> None:
    """What HF_ENDPOINT and its like set when huggingface_hub is imported."""
    disable_progress_bars()
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(_http, "time", SimpleNamespace(sleep=lambda seconds: None))


def push(place: Place, monkeypatch, *words: str, draft: str = "spd", repo: str = "user/name"):
    arguments = ["push", "--checkpoint", str(place.folder / draft), "--repo", repo, *words]
    return call("models", arguments, monkeypatch)


def one_line(capfd, *words: str) -> str:
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("error: "), err
    for word in words:
        assert word in err, err
    return err


def card_of(hub: FakeHub, repo: str = "user/name", revision: str = "main") -> ModelCard:
    return ModelCard(hub.repositories[repo].texts(revision)["README.md"].decode())


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
        ("eagle3", ["'eagle3'", "not a draft of type 'spd' for 2 stages", "--revision"]),
        ("spd4", ["'spd' for 4 stages", "not a draft of type 'spd' for 2 stages"]),
        ("spd_other", ["for another target (", "not one of this target"]),
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


def test_a_connection_that_drops_once_is_tried_again(place, hub, monkeypatch):
    hub.faults = [Fault("PUT", "/lfs/", "drop"), Fault("POST", "/preupload/", 503, times=2)]
    assert push(place, monkeypatch) == 0
    puts = hub.sent("PUT")
    size = (place.draft / "model.safetensors").stat().st_size
    assert [put.num_bytes for put in puts] == [size // 2, size]
    assert set(hub.repositories["user/name"].files()) == NAMES


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


def test_a_commit_that_is_lost_costs_no_second_upload(place, hub, monkeypatch, capfd):
    hub.faults = [Fault("POST", "/commit/", "drop")]
    assert push(place, monkeypatch) == 1
    one_line(capfd, "'user/name'", "goes on where")
    assert len(hub.sent("PUT")) == 1
    assert push(place, monkeypatch) == 0
    assert len(hub.sent("PUT")) == 1 and set(hub.repositories["user/name"].files()) == NAMES


# -- failures -------------------------------------------------------------------------------

FAULTS: list[tuple[Fault, int, list[str]]] = [
    (Fault("POST", "/api/repos/create", 401), 2, ["401", "no valid token", "HF_TOKEN"]),
    (Fault("POST", "/api/repos/create", 403, 9), 2, ["403", "no right", "may write"]),
    (Fault("POST", "/api/repos/create", 500), 1, ["500", "made to fail"]),
    (Fault("POST", "/api/repos/create", "drop"), 1, ["cannot be used"]),
    (Fault("POST", "/api/repos/create", "stall"), 1, ["no answer", "ReadTimeout"]),
    (Fault("POST", "/api/validate-yaml", 400), 2, ["400", "made to fail"]),
    (Fault("GET", "/api/models", 404), 2, ["404", "check the name"]),
    (Fault("GET", "/api/models", "stall"), 1, ["no answer"]),
    (Fault("POST", "/preupload/", 500, 99), 1, ["500"]),
    (Fault("POST", "/preupload/", 403), 2, ["403"]),
    (Fault("POST", "/objects/batch", 429, 99), 1, ["429"]),
    (Fault("PUT", "/lfs/", 400), 2, ["400"]),
    (Fault("PUT", "/lfs/", "stall", 99), 1, ["no answer"]),
    (Fault("POST", "/commit/", 503), 1, ["503"]),
    (Fault("POST", "/commit/", 412), 1, ["412"]),
    (Fault("POST", "/commit/", "stall"), 1, ["no answer"]),
]


@pytest.mark.parametrize("case", FAULTS, ids=lambda c: f"{c[0].method}{c[0].path}-{c[0].action}")
def test_every_failure_is_one_line(case, place, hub, monkeypatch, capfd):
    fault, status, words = case
    monkeypatch.setattr(hub_link, "SILENCE_S", 0.15)
    hub.faults = [Fault(fault.method, fault.path, fault.action, fault.times)]
    assert push(place, monkeypatch) == status
    one_line(capfd, "--repo: 'user/name'", *words)
    if "user/name" in hub.repositories:
        assert set(hub.repositories["user/name"].files()) == {".gitattributes"}


def test_who_may_not_write_is_told_so(place, hub, monkeypatch, capfd):
    assert push(place, monkeypatch, repo="stranger/name") == 2
    one_line(capfd, "'stranger/name'", "403", "don't have the rights", "a repository of yours")
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


@pytest.mark.parametrize("repo", ["user/a b", "user/--", "user/x.git", "user/" + "n" * 97])
def test_a_name_that_the_hub_does_not_know_is_bad_input(repo, place, hub, monkeypatch, capfd):
    assert push(place, monkeypatch, repo=repo) == 2
    one_line(capfd, "--repo", repo[:9])
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
    monkeypatch.setattr(hub_link, "SILENCE_S", 0.15)
    for action, text in ((500, "answered 500"), ("stall", "no answer"), ("drop", "cannot be used")):
        hub.faults = [Fault("GET", "/api/models", action, times=99)]
        with pytest.raises(Failure, match=f"'user/name'.*{text}"):
            load_draft("user/name", target)
    hub.faults = [Fault("GET", "/cdn/", "drop")]
    load_draft("user/name", target)
    assert len(hub.sent("GET", "/cdn/")) == 2


THREE_COMMANDS = """
import json, runpy, sys
for module, words in json.loads(sys.argv[1]):
    sys.argv = [module, *words]
    try:
        runpy.run_module("pipedraft." + module, run_name="__main__")
    except SystemExit as stop:
        print("status", stop.code, flush=True)
"""


def test_a_process_of_its_own_goes_by_hf_endpoint_and_xet_sends_chunks_once(
    place, hub, tmp_path, monkeypatch, capfd
):
    """As users have it: the large file goes by hf_xet; the first commit is lost."""
    weights = (place.draft / "model.safetensors").read_bytes()
    hub.promised = {hashlib.sha256(weights).hexdigest(): weights}
    hub.faults = [Fault("POST", "/commit/", 400)]
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path / "home"),
        "HF_TOKEN": TOKEN,
    }
    where = ["push", "--checkpoint", str(place.draft), "--repo", "user/name"]
    decode = ["--prompt", "hi", "--max-new-tokens", "5", "--quiet", "--checkpoint"]
    words = [("models", where), ("models", where), ("inference", [*decode, "user/name"])]
    command = [sys.executable, "-c", THREE_COMMANDS, json.dumps(words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    refused, address, text = done.stdout.split("\n", 2)
    assert refused == "status 2" and address.startswith(f"{hub.url}/user/name/commit/")
    assert done.stderr.startswith("error: --repo: 'user/name': 127.0.0.1 answered 400")
    assert done.stderr.count("\n") == 1
    paths = [request.path for request in hub.requests]
    again = [i for i, path in enumerate(paths) if path == "/api/repos/create"][1]
    chunks = [i for i, path in enumerate(paths) if path.startswith("/xet/v1/xorbs/")]
    assert chunks and max(chunks) < again and not hub.sent("PUT")
    assert len(hub.sent("POST", "/commit/")) == 2
    capfd.readouterr()
    assert call("inference", [*decode, str(place.draft)], monkeypatch) == 0
    assert capfd.readouterr().out == text


# -- cards ----------------------------------------------------------------------------------


def test_the_card_holds_the_measured_figures_as_the_hub_reads_them(place, hub, monkeypatch, capfd):
    results = place.folder / "eval" / "results.json"
    assert push(place, monkeypatch, "--results", str(results)) == 0
    card = card_of(hub)
    runs = json.loads(results.read_text())["runs"]
    drafted = [run for run in runs if run["method"] == "spd"]
    assert len(drafted) == 2 and len(runs) == 6
    assert "| gsm8k | autoregressive |" in card.text and "eagle3 |" not in card.text
    found = {(r.metric_type, r.metric_args["temperature"]): r for r in card.data.eval_results}
    assert len(found) == len(card.data.eval_results) == 6
    for run in drafted:
        length = run["equivalent_acceptance_length"]
        result = found["equivalent_acceptance_length", run["temperature"]]
        assert result.metric_value == length["pooled"]
        assert result.metric_args["ci95"] == length["ci95"]
        assert result.metric_args["stages"] == 2 and result.dataset_type == "gsm8k"
        rate = found["draft_acceptance_rate", run["temperature"]]
        assert rate.metric_value == run["draft_acceptance_rate"]
        assert f"| {length['pooled']:.3f} | {length['ci95'][0]:.3f} to" in card.text
    assert card.data.model_name == "name" and card.data.library_name == "pipedraft"
    assert card.data.tags == ["speculative-decoding", "pipedraft", "spd"]
    assert card.data.datasets == ["openai/gsm8k"]
    assert str(results.parent) in card.text  # the command that measured
    assert "Rows by licence: mit 5, unknown 2." in card.text
    assert yaml.safe_load(str(card).split("---\n")[1])["model-index"][0]["name"] == "name"


def test_training_data_records_which_sources_are_on_the_hub(tmp_path, monkeypatch):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    local = write_rows(tmp_path / "chat.jsonl", {"messages": turns})
    rows = datasets.Dataset.from_list([{"messages": turns[:1] + [{**turns[1], "content": "Yes."}]}])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    sources = [Source(path="lab/chats"), Source(path=local), Source(path="lab/chats", subset="b")]
    config = DataConfig(sources=sources, valid_fraction=0.0, cache_dir=tmp_path / "cache")
    report = load_data(config, byte_tokenizer()).report
    assert report.to_dict()["hub_datasets"] == ["lab/chats"] and len(report.sources) == 3


def test_figures_of_other_weights_are_refused(place, hub, tmp_path, monkeypatch, capfd):
    shutil.copytree(place.folder / "eval", tmp_path / "eval")
    results = tmp_path / "eval" / "results.json"
    assert push(place, monkeypatch, "--results", str(results), draft="spd4") == 2
    one_line(capfd, "--results", "measured other weights", "evaluate this checkpoint")
    (tmp_path / "eval" / "manifest.json").unlink()
    assert push(place, monkeypatch, "--results", str(results)) == 2
    one_line(capfd, "--results", "manifest.json", "that eval wrote")
    assert not hub.repositories


def test_a_card_written_by_hand_is_kept_and_a_bad_one_stops_the_upload(
    place, hub, tmp_path, monkeypatch, capfd
):
    folder = Path(shutil.copytree(place.draft, tmp_path / "draft"))
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    assert push(place, monkeypatch, draft=str(folder)) == 0
    assert hub.repositories["user/name"].texts()["README.md"] == b"---\nlicense: mit\n---\n# Mine\n"
    capfd.readouterr()
    results = ["--results", str(place.folder / "eval" / "results.json")]
    assert push(place, monkeypatch, *results, draft=str(folder)) == 2
    one_line(capfd, "--results", "written by hand", "leave --results out")
    (folder / "README.md").write_text("---\nbase_model: /home/me/target\n---\n# Mine\n")
    assert push(place, monkeypatch, draft=str(folder), repo="user/other") == 2
    one_line(capfd, "'user/other'", "400", '"base_model" with value "/home/me/target"')
    assert list(hub.repositories) == ["user/name"]


def test_a_card_that_pipedraft_wrote_is_written_anew(place, hub, tmp_path, monkeypatch):
    folder = Path(shutil.copytree(place.draft, tmp_path / "draft"))
    (folder / "README.md").write_text(f"# old\n\n{MADE}\n")
    assert push(place, monkeypatch, draft=str(folder)) == 0
    text = str(card_of(hub))
    assert "--checkpoint user/name" in text and text.count(MADE) == 1 and "# old" not in text


LICENCES = [
    ({}, {}, "Unknown: the licence of the target"),
    ({"README.md": "no metadata"}, {}, "is not given in its folder's README.md"),
    ({"README.md": "---\nlicense: [\n---\n"}, {}, "is not given"),
    ({"README.md": "---\nlicense: apache-2.0\n---\n"}, {"license": "apache-2.0"}, "apache-2.0 (by"),
    ({"config": "mit"}, {"license": "mit"}, "mit (by its config.json)"),
    (
        {"README.md": "---\nlicense: other\nlicense_name: acme\nlicense_link: LICENSE\n---\n"},
        {"license": "other", "license_name": "acme", "license_link": "LICENSE"},
        "other, acme, LICENSE",
    ),
]


@pytest.mark.parametrize(("files", "metadata", "text"), LICENCES)
def test_the_licence_is_the_targets_own_or_unknown(
    files, metadata, text, place, hub, tmp_path, monkeypatch
):
    target = Path(shutil.copytree(place.target, tmp_path / "target"))
    if "README.md" in files:
        (target / "README.md").write_text(files["README.md"])
    if "config" in files:
        config = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps({**config, "license": files["config"]}))
    folder = Path(shutil.copytree(place.draft, tmp_path / "draft"))
    description = json.loads((folder / "config.json").read_text())
    description["target"]["name"] = str(target)
    (folder / "config.json").write_text(json.dumps(description))
    assert push(place, monkeypatch, draft=str(folder)) == 0
    card = card_of(hub)
    found = {key: value for key, value in card.data.to_dict().items() if key.startswith("license")}
    assert found == metadata
    assert text in card.text


def publish_target(place: Place, hub: FakeHub, name: str, folder: str = "target") -> None:
    files = {f.name: f.read_bytes() for f in (place.folder / folder).iterdir()}
    hub.create(name, **files, **{"README.md": b"---\nlicense: apache-2.0\n---\n# A target\n"})


def test_the_target_gets_its_name_on_the_hub_if_it_is_that_target(place, hub, monkeypatch, capfd):
    publish_target(place, hub, "lab/tiny")
    publish_target(place, hub, "lab/other", folder="other_target")
    assert push(place, monkeypatch, "--target", "lab/other") == 2
    one_line(capfd, "target: does not match", "hash")
    assert push(place, monkeypatch, "--target", "lab/tiny") == 0
    card = card_of(hub)
    assert (card.data.base_model, card.data.license) == ("lab/tiny", "apache-2.0")
    description = json.loads(hub.repositories["user/name"].texts()["config.json"])
    assert description["target"]["name"] == "lab/tiny"
    assert not metadata_errors(str(card)) and "TARGET_FOLDER" not in card.text


def commands_of(card: ModelCard) -> list[str]:
    return re.findall(r"^    (python -m pipedraft\..*|hf .*)$", card.text, re.MULTILINE)


def run_commands(card: ModelCard, monkeypatch, parsed: Collection[str] = ()) -> list[str]:
    """Run what a card says, in this process; the programs in order.

    Args:
        parsed: those of which only the arguments are read.
    """
    programs = []
    for command in commands_of(card):
        program, *arguments = shlex.split(command)
        if program == "hf":
            keywords = dict(zip(arguments[2::2], arguments[3::2], strict=True))
            assert keywords.keys() == {"--revision", "--local-dir"} and arguments[0] == "download"
            folder = keywords["--local-dir"]
            snapshot_download(arguments[1], revision=keywords["--revision"], local_dir=folder)
        else:
            module, *arguments = arguments[1:]
            program = module.removeprefix("pipedraft.")
            limits = ["--max-new-tokens", "4"] + ["--limit", "1"] * (program == "eval")
            if program in parsed:
                importlib.import_module(f"{module}.__main__").build_parser().parse_args(arguments)
            else:
                assert call(program, [*arguments, *limits], monkeypatch) == 0
        programs.append(program)
    lines = [line[4:] for line in card.text.splitlines() if line.startswith("    ")]
    names: dict = {}
    exec("\n".join(lines[lines.index("from pipedraft.models import load_draft") :]), names)
    assert names["draft"].num_stages == 2
    return programs


def test_the_commands_of_a_card_work_as_printed(place, hub, tmp_path, monkeypatch):
    publish_target(place, hub, "lab/tiny")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(place.folder / "gsm8k", tmp_path / "gsm8k")
    assert push(place, monkeypatch, "--target", "lab/tiny") == 0
    assert run_commands(card_of(hub), monkeypatch) == ["inference", "eval"]
    assert (tmp_path / "out" / "eval" / "results.json").is_file()
    hub.create("user/name")
    assert push(place, monkeypatch, "--target", "lab/tiny", "--revision", "two") == 0
    card = card_of(hub, revision="two")
    assert run_commands(card, monkeypatch, parsed={"eval"}) == ["hf", "inference", "eval"]


def test_a_local_target_is_no_base_model_and_the_commands_ask_for_it(place, hub, monkeypatch):
    assert push(place, monkeypatch) == 0
    card = card_of(hub)
    assert card.data.base_model is None and card.data.license is None
    command = commands_of(card)[0].replace("TARGET_FOLDER", str(place.target))
    module, *arguments = shlex.split(command)[2:]
    assert call("inference", [*arguments, "--max-new-tokens", "4"], monkeypatch) == 0


# -- exports --------------------------------------------------------------------------------


def export(place: Place, layout: str, out: Path, monkeypatch, *words: str) -> None:
    arguments = ["export", "--checkpoint", str(place.folder / "eagle3"), "--format", layout]
    assert call("models", [*arguments, "--out", str(out), *words], monkeypatch) == 0


@pytest.mark.parametrize("layout", ["sglang", "speculators"])
def test_an_export_is_pushed_with_the_line_that_launches_it(
    layout, place, hub, tmp_path, monkeypatch, capfd
):
    publish_target(place, hub, "lab/tiny")
    out = tmp_path / "export"
    export(place, layout, out, monkeypatch, "--target", "lab/tiny")
    printed = capfd.readouterr().out.splitlines()[-1]
    assert f"    {printed.replace(str(out), 'THIS_FOLDER')}\n" in (out / "README.md").read_text()
    results = ["--results", str(place.folder / "eval" / "results.json")]
    assert push(place, monkeypatch, *results, draft=str(out)) == 0
    card = card_of(hub)
    assert f"    {printed.replace(str(out), 'user/name')}\n" in card.text
    engine = {"sglang": "sglang", "speculators": "vllm"}[layout]
    assert card.data.tags == ["speculative-decoding", "pipedraft", "eagle3", engine]
    assert (card.data.base_model, card.data.library_name) == ("lab/tiny", layout)
    assert card.data.license == "apache-2.0" and len(card.data.eval_results) == 6
    repository = hub.repositories["user/name"]
    assert set(repository.files()) == NAMES | {"pipedraft.json"}
    config = json.loads(repository.texts()["config.json"])
    assert config["architectures"][0] in ("LlamaForCausalLMEagle3", "Eagle3DraftModel")
    assert load_file(out / "model.safetensors").keys()
    other = {"sglang": "speculators", "speculators": "sglang"}[layout]
    export(place, other, tmp_path / "second", monkeypatch)
    capfd.readouterr()
    assert push(place, monkeypatch, draft=str(tmp_path / "second")) == 2
    one_line(capfd, f"'eagle3' for {layout}", f"not a draft of type 'eagle3' for {other}")
    assert push(place, monkeypatch, "--target", "lab/tiny", draft=str(out)) == 2
    one_line(capfd, "--target", "export", "pipedraft models export")


# -- the Hub that the tests talk to ---------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "refused"),
    [
        ("base_model: Qwen/Qwen3-8B", False),
        ("base_model: /home/me/target", True),
        ("tags: [a, {b: c}]", True),
        ("license: [mit, x]", True),
        ("model-index: [{name: a, results: [{task: {}, dataset: {}, metrics: []}]}]", True),
        ("a: [", True),
    ],
)
def test_the_fake_hub_refuses_bad_metadata(metadata, refused):
    assert bool(metadata_errors(f"---\n{metadata}\n---\n# Card\n")) == refused
