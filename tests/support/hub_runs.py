"""Checkpoints, and a Hub on 127.0.0.1 to receive them, for upload tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from command_runs import call
from fake_hub import FakeHub
from huggingface_hub import constants
from huggingface_hub.utils import _http, disable_progress_bars, enable_progress_bars
from tiny_drafts import add_noise, seeded
from tiny_models import byte_tokenizer, tiny_llama

from pipedraft import hub_link
from pipedraft.models.heads.configs import Eagle3Config, SPDConfig
from pipedraft.models.heads.draft import TargetReference
from pipedraft.models.heads.eagle3 import Eagle3
from pipedraft.models.heads.spd import SPD
from pipedraft.models.target import target_fingerprint
from pipedraft.models.transformer.layers import LayerConfig

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
    """Save a checkpoint with random weights and the other files of a training run."""
    reference = TargetReference(name=name, fingerprint=target_fingerprint(target))
    layer = LayerConfig.from_target(target.config)
    if eagle:
        draft = Eagle3(Eagle3Config().for_target(8), layer, reference)
    else:
        config = SPDConfig(num_target_layers=8, num_stages=stages, num_layers=1)
        draft = SPD(config, layer, reference)
    draft.initialize(target)
    add_noise(draft, generator=seeded(5))
    folder.mkdir()
    draft.save(folder, training={"data": DATA, "metrics": {"score": 1.25}})
    (folder / "COMPLETE").write_text("a manifest")
    (folder / "training_state").mkdir()
    (folder / "training_state" / "optimizer.bin").write_text("large")
    return folder


def make_place(folder: Path) -> Place:
    """Make two targets: one with drafts by two methods and two cuts, the other with one draft."""
    target = tiny_llama(layers=8, vocab=300)
    target.save_pretrained(folder / "target")
    byte_tokenizer().save_pretrained(folder / "target")
    other = tiny_llama(layers=8, vocab=300, seed=1)
    other.save_pretrained(folder / "other_target")
    save_draft(folder / "spd", target, str(folder / "target"))
    save_draft(folder / "spd4", target, str(folder / "target"), stages=4)
    save_draft(folder / "spd_other", other, str(folder / "other_target"))
    save_draft(folder / "eagle3", target, str(folder / "target"), eagle=True)
    return Place(folder)


@contextmanager
def signed_in(monkeypatch, cache: Path) -> Iterator[FakeHub]:
    """Sign in to a Hub in this process; retries do not wait."""
    with FakeHub({TOKEN: "user", STRANGER: "stranger"}).running() as running:
        point_at(running.url, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        shorten_stalls(running, monkeypatch)
        yield running
        _http.close_session()
        enable_progress_bars()


def point_at(url: str, monkeypatch) -> None:
    """Point huggingface_hub at a server; it has read HF_ENDPOINT and the like at import."""
    disable_progress_bars()
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(_http, "time", SimpleNamespace(sleep=lambda seconds: None))


def shorten_stalls(hub: FakeHub, monkeypatch) -> None:
    """Shorten the wait for stalled requests only: a busy machine may delay the others."""
    end_waits, patience_s = hub_link._end_waits, hub_link.SILENCE_S

    def limited(request: Any) -> None:
        stalls = hub.will_stall(request.method, request.url.path)
        monkeypatch.setattr(hub_link, "SILENCE_S", 0.15 if stalls else patience_s)
        end_waits(request)

    monkeypatch.setattr(hub_link, "_end_waits", limited)


def push(place: Place, monkeypatch, *words: str, draft: str = "spd", repo: str = "user/name"):
    arguments = ["push", "--checkpoint", str(place.folder / draft), "--repo", repo, *words]
    return call("models", arguments, monkeypatch)


def one_line(capfd, *words: str) -> str:
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("error: "), err
    for word in words:
        assert word in err, err
    return err
