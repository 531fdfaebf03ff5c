"""pipedraft doctor: a sound environment passes, and each broken part is named with its fix."""

import json
import shutil
import subprocess
import sys
from functools import partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import REPOSITORY
from doctor_failures import HANG_S, fails, leaves, waits
from fake_hub import FakeHub, Fault
from huggingface_hub import constants
from pretended_device import pretended_cuda

from pipedraft import doctor
from pipedraft.errors import run_command

ASSETS = REPOSITORY / "assets"


def only(findings) -> doctor.Finding:
    (finding,) = findings
    return finding


@pytest.fixture
def forks_ranks(monkeypatch):
    """A rank that fails need not import torch before."""
    processes = torch.multiprocessing
    start = partial(processes.start_processes, start_method="fork")
    monkeypatch.setattr(processes, "start_processes", start)


def called_here(monkeypatch, capfd) -> tuple[str, str]:
    monkeypatch.setattr(sys, "argv", ["doctor", "--json"])
    with pytest.raises(SystemExit, match="^0$"):
        doctor.main()
    return capfd.readouterr()


def as_a_command(*_) -> tuple[str, str]:
    command = [sys.executable, "-m", "pipedraft", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize("ask", [called_here, pytest.param(as_a_command, marks=pytest.mark.all)])
def test_a_sound_environment_has_no_failure(ask, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    out, err = ask(monkeypatch, capfd)
    assert err == ""
    found = {entry["check"]: entry for entry in json.loads(out)}
    names = ["python", "transformers", "accelerate", "torch", "gloo", "cores", "Hub"]
    names += [f"folder {tmp_path}", "embedded target"]
    assert set(names) <= found.keys()
    assert all(entry["status"] != "failure" for entry in found.values())
    assert "sums right" in found["embedded target"]["detail"]
    assert "decodes in float32 and bfloat16" in found["embedded target"]["detail"]
    assert found["gloo"]["status"] == found["torch"]["status"] == "ok"


@pytest.mark.usefixtures("forks_ranks")
def test_a_broken_environment_ends_with_status_one(tmp_path, monkeypatch, capfd):
    assets = Path(shutil.copytree(ASSETS / "target", tmp_path / "assets" / "target"))
    weights = assets / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    monkeypatch.chdir("/proc")
    monkeypatch.setenv("OMP_NUM_THREADS", "999")
    monkeypatch.setattr(doctor, "add_numbers", fails)
    monkeypatch.setattr(sys, "argv", ["doctor", "--assets", str(tmp_path / "assets")])
    with pytest.raises(SystemExit) as stop:
        doctor.main()
    assert stop.value.code == 1
    out, err = capfd.readouterr()
    *lines, last = out.splitlines()
    assert err == "" and last == f"{len(lines)} checks, 1 warnings, 3 failures"
    failures = [line for line in lines if not line.startswith("ok ")]
    assert len(failures) == 4 and all(";" in line for line in failures)
    for line, words in zip(
        failures,
        [
            ["warning  cores: ", "999", "more threads than cores; set OMP_NUM_THREADS="],
            ["FAILURE  gloo: ", "no way to the other one; set GLOO_SOCKET_IFNAME"],
            ["FAILURE  folder /proc: nothing can be written", "change to a folder"],
            ["FAILURE  embedded target: ", "model.safetensors differs", "copy it again"],
        ],
        strict=True,
    ):
        assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("name", "fault"), [("config.json", "is missing"), ("SHA256SUMS", "is missing")]
)
def test_a_missing_file_of_the_target_is_named(name, fault, tmp_path):
    folder = Path(shutil.copytree(ASSETS / "target", tmp_path / "target"))
    (folder / name).unlink()
    finding = only(doctor.check_target(folder))
    assert finding.status == "failure" and f"{name} {fault}" in finding.detail
    assert only(doctor.check_target(tmp_path / "nowhere")).status == "warning"


def test_the_sums_cover_every_file_that_is_loaded():
    named = {name for name, _ in doctor.read_sums(ASSETS / "target" / "SHA256SUMS")}
    files = {path.name for path in (ASSETS / "target").iterdir()}
    assert named == files - {"README.md", "SHA256SUMS"}


def test_versions_are_compared_with_bounds_and_with_the_tested_set(tmp_path, monkeypatch):
    sound = {f.check: f for f in doctor.check_versions(REPOSITORY / "constraints.txt")}
    assert sound["transformers"].status == "ok" and "bitsandbytes (optional)" in sound
    versions = {"transformers": "4.0.0", "peft": None, "accelerate": None, "datasets": "999.1"}

    def installed(name: str) -> str:
        if name in versions and versions[name] is None:
            raise metadata.PackageNotFoundError(name)
        return versions.get(name) or real(name)

    real = metadata.version
    monkeypatch.setattr(metadata, "version", installed)
    found = {f.check: f for f in doctor.check_versions(REPOSITORY / "constraints.txt")}
    assert found["transformers"].status == "failure"
    assert found["transformers"].fix.startswith("pip install 'transformers")
    assert found["accelerate"].status == "failure" and "not installed" in found["accelerate"].detail
    assert found["peft (optional)"].status == "ok"
    assert "pip install 'pipedraft[peft]'" in found["peft (optional)"].detail
    assert found["datasets"].status == "warning" and "tested with" in found["datasets"].detail
    without = {f.check: f for f in doctor.check_versions(tmp_path / "no_constraints.txt")}
    assert without["datasets"].status == "ok"


def test_a_gpu_is_tried_and_what_recurrent_layers_lack_is_named(monkeypatch):
    assert list(doctor.check_gpu()) == []  # without one
    with pretended_cuda():
        training, layers = doctor.check_gpu()
        assert training.status == "ok" and training.detail.endswith("runs in torch.bfloat16")
        assert layers.status == "warning" and "'pipedraft[linear-attention]'" in layers.fix
        monkeypatch.setattr(doctor, "find_spec", lambda name: name)
        monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: False)
        training, layers = doctor.check_gpu()
        assert "in torch.float16; bfloat16 is emulated" in training.detail
        assert layers.status == "ok"
        words = "FlashAttention only supports Ampere GPUs or newer."
        monkeypatch.setattr("pipedraft.models.banded_attention.ttt_attention", refuses(words))
        training, _ = doctor.check_gpu()
        assert training.status == "warning" and words in training.line()


def refuses(words: str):
    def refuse(*_: object) -> None:
        raise RuntimeError(words)

    return refuse


@pytest.mark.usefixtures("forks_ranks")
@pytest.mark.parametrize(
    ("work", "reason", "timeout_s"),
    [(leaves, "terminated with exit code 3", HANG_S), (waits, "no result in 0.2 s", -9.8)],
)
def test_processes_that_do_not_come_together_are_a_failure_within_the_limit(
    work, reason, timeout_s, monkeypatch
):
    monkeypatch.setattr(doctor, "add_numbers", work)
    monkeypatch.setattr(doctor, "GLOO_TIMEOUT_S", timeout_s)
    monkeypatch.setattr("torch.distributed.TCPStore", lambda *_, **__: SimpleNamespace(port=0))
    finding = only(doctor.check_gloo())
    assert finding.status == "failure" and reason in finding.detail


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


def test_a_full_disk_is_a_failure_and_a_nearly_full_one_a_warning(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    for free, status in ((2**20, "failure"), (2**31, "warning"), (2**40, "ok")):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        assert only(doctor.check_folder(tmp_path)).status == status


@pytest.mark.parametrize(("word", "status"), [("--help", 0), ("--jsn", 2)])
def test_help_has_an_example_and_a_bad_option_is_one_line(word, status, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["doctor", word])
    with pytest.raises(SystemExit) as stop:
        run_command(doctor.main)
    out, err = capfd.readouterr()
    assert stop.value.code == status
    if status:
        assert out == "" and err.count("\n") == 1 and err.startswith("error: ")
    else:
        assert "  pipedraft doctor" in out and err == ""
