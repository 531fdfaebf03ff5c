"""pipedraft doctor: a sound environment passes, and each broken part is named with its fix."""

import json
import shutil
import sys
from importlib import metadata
from pathlib import Path

import pytest
from fake_hub import FakeHub, Fault
from huggingface_hub import constants
from pretended_device import pretended_cuda
from tiny_models import REPOSITORY

from pipedraft import doctor
from pipedraft.models.speed import kernels

ASSETS = REPOSITORY / "assets"


def only(findings) -> doctor.Finding:
    (finding,) = findings
    return finding


def test_a_sound_environment_has_no_failure(monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["doctor", "--json"])
    with pytest.raises(SystemExit, match="^0$"):
        doctor.main()
    out, err = capfd.readouterr()
    assert err == ""
    found = {entry["check"]: entry for entry in json.loads(out)}
    names = {"python", "transformers", "accelerate", "torch", "device", "Hub", "embedded target"}
    assert names <= found.keys()
    assert all(entry["status"] != "failure" for entry in found.values())
    detail = found["embedded target"]["detail"]
    assert "sums right" in detail and detail.endswith("decodes")


def test_a_machine_without_compiler_is_named(monkeypatch):
    monkeypatch.setattr(kernels, "library", lambda: None)
    finding = only(doctor.check_kernels())
    assert (finding.status, finding.fix) == ("warning", "install g++")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "SHA256SUMS"])
def test_a_target_that_is_not_the_one_that_was_shipped_ends_with_status_one(
    name, tmp_path, monkeypatch, capfd
):
    folder = Path(shutil.copytree(ASSETS / "target", tmp_path / "assets" / "target"))
    if name == "model.safetensors":
        content = bytearray((folder / name).read_bytes())
        content[-1] ^= 1
        (folder / name).write_bytes(content)
    else:
        (folder / name).unlink()
    monkeypatch.setattr(sys, "argv", ["doctor"])
    monkeypatch.setattr(doctor, "check_kernels", lambda: iter(()))
    monkeypatch.setattr(doctor, "TARGET", folder)
    with pytest.raises(SystemExit, match="^1$"):
        doctor.main()
    *lines, last = capfd.readouterr().out.splitlines()
    assert last == f"checks: {len(lines)}, warnings: 0, failures: 1"
    (line,) = [line for line in lines if not line.startswith("ok ")]
    fault = "differs" if name == "model.safetensors" else "is missing"
    assert line.startswith("FAILURE  embedded target: ") and f"{name} {fault}" in line
    assert "copy it again" in line
    assert only(doctor.check_target(tmp_path / "nowhere")).status == "warning"


def test_the_sums_cover_every_file_that_is_loaded():
    lines = (ASSETS / "target" / "SHA256SUMS").read_text().splitlines()
    paths = [path for path in (ASSETS / "target").iterdir() if path.is_file()]
    files = {path.name for path in paths if path.suffix != ".py"} - {"README.md", "SHA256SUMS"}
    assert {line.split()[1].lstrip("*") for line in lines} == files


def test_versions_are_compared_with_what_the_package_requires(monkeypatch):
    versions = {"transformers": "4.0.0", "peft": None, "accelerate": None}

    def installed(name: str) -> str:
        if name in versions and versions[name] is None:
            raise metadata.PackageNotFoundError(name)
        return versions.get(name) or real(name)

    real = metadata.version
    monkeypatch.setattr(metadata, "version", installed)
    found = {f.check: f for f in doctor.check_versions()}
    assert found["transformers"].status == "failure"
    assert found["transformers"].fix.startswith("pip install 'transformers")
    assert found["accelerate"].status == "failure" and "not installed" in found["accelerate"].detail
    assert "peft" not in found and found["datasets"].status == "ok"


def test_a_gpu_is_tried_and_what_recurrent_layers_lack_is_named(monkeypatch):
    assert [finding.detail for finding in doctor.check_gpu()][0] == "cpu"
    with pretended_cuda():
        device, training, layers = doctor.check_gpu()
        assert device.status == "ok"
        assert training.status == "ok" and training.detail.endswith("runs in torch.bfloat16")
        assert layers.status == "warning" and "[linear-attention]'" in layers.fix
        monkeypatch.setattr(doctor, "find_spec", lambda name: name)
        monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: False)
        _, training = doctor.check_gpu()
        assert "in torch.float16; bfloat16 is emulated" in training.detail
        words = "FlashAttention only supports Ampere GPUs or newer."
        monkeypatch.setattr("pipedraft.models.heads.banded_attention.ttt_attention", refuses(words))
        _, training = doctor.check_gpu()
        assert training.status == "warning" and words in training.line()


def refuses(words: str):
    def refuse(*_: object) -> None:
        raise RuntimeError(words)

    return refuse


@pytest.fixture
def endpoint(monkeypatch):
    with FakeHub({"hf_good": "user"}).running() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(doctor, "HUB_TIMEOUT_S", 30)
        yield hub


def test_the_hub_is_asked_with_the_token_and_its_absence_is_no_failure(endpoint, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    assert only(doctor.check_hub()).detail == f"{endpoint.url} answers, signed in as user"
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    finding = only(doctor.check_hub())
    assert finding.status == "warning" and "refuses the token (401)" in finding.detail
    endpoint.faults = [Fault("HEAD", "", "stall")]
    with monkeypatch.context() as patch:
        patch.setattr(doctor, "HUB_TIMEOUT_S", 0.3)
        finding = only(doctor.check_hub())
    assert finding.status == "warning" and "HF_HUB_OFFLINE=1" in finding.fix
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "http://127.0.0.1:9 cannot be reached" in only(doctor.check_hub()).detail
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    finding = only(doctor.check_hub())
    assert finding.status == "ok" and "offline by HF_HUB_OFFLINE" in finding.detail
