"""The GPU report, on a pretended one."""

import json
import runpy
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from pretended_device import pretended_cuda
from scripts import load_script
from tiny_models import REPOSITORY

SMALL = "--hidden=64 --intermediate=96 --target-layers=4 --heads=2 --key-heads=1 --vocabulary=96"
SHORT = "--length=32 --prompt=8 --tokens=4 --repeats=1"
SCRIPT = REPOSITORY / "benchmarks" / "gpu_check.py"
gpu_check = load_script("benchmarks/gpu_check.py")


def check(folder, monkeypatch) -> tuple[int, dict]:
    """Exit status and report."""
    monkeypatch.setattr(
        sys, "argv", ["gpu_check", f"--out={folder}", *SMALL.split(), *SHORT.split()]
    )
    with pretended_cuda(num_devices=1) as log:

        def counted(work) -> dict[str, int]:
            log.clear()
            work()
            return {"launches": log.launches.total(), "waits": log.syncs.total()}

        def planned(*arguments) -> float:
            """Run in a thread, where the pretended GPU is invisible."""
            with ThreadPoolExecutor(1) as thread:
                return thread.submit(plan, *arguments).result()

        plan = gpu_check.planned_bytes
        monkeypatch.setattr(gpu_check, "counted", counted)
        monkeypatch.setattr(gpu_check, "planned_bytes", planned)
        with pytest.raises(SystemExit) as end:
            gpu_check.main()
    return end.value.code, json.loads((folder / "report.json").read_text())


@pytest.mark.parametrize(
    ("names", "own"),
    [
        (["eagle3"], {"tree": "dynamic:3:4:8"}),
        pytest.param([*gpu_check.DRAFTS], {}, marks=pytest.mark.all),
    ],
)
def test_every_section_runs_and_every_output_is_right(tmp_path, monkeypatch, names, own):
    given = gpu_check.DRAFTS
    drafts = {name: (*given[name][:2], given[name][2] | own) for name in names}
    monkeypatch.setattr(gpu_check, "DRAFTS", drafts)
    status, report = check(tmp_path, monkeypatch)
    assert not [found for found in report.values() if "failed" in found]
    assert status == 0
    outputs = report["schedules"]
    assert outputs.keys() == gpu_check.DRAFTS.keys() | {"autoregressive"}
    for name in gpu_check.DRAFTS:
        assert [outputs[name][label] for label in gpu_check.EXACT] == [1, 1]
        assert outputs[name]["launches a step"] > 0 and outputs[name]["waits a step"] > 0
    assert all(row["beside others"] == row["again"] == 0 for row in report["rows"].values())
    assert report["graphs"]["is recorded"]
    assert report["graphs"]["largest relative difference"] < 1e-5
    assert max(report["kernels"].values()) < 0.05
    for found in report["training"].values():
        assert found["tokens a second"] > 0 and found["planned GiB"] > 1e-4
    text = (tmp_path / "report.md").read_text()
    assert all(f"## {name}" in text for name in report) and "| eagle3 |" in text


def test_a_wrong_output_and_a_failure_are_told(tmp_path, monkeypatch):
    def broken(args):
        raise RuntimeError("no kernel image\nis available")

    def wrong(args):
        return {"eagle3": {gpu_check.EXACT[0]: 0.9}}

    wrong.__name__ = "schedules"
    monkeypatch.setattr(gpu_check, "SECTIONS", (gpu_check.devices, broken, wrong))
    status, report = check(tmp_path, monkeypatch)
    assert status == 1
    assert report["broken"]["failed"] == "RuntimeError: no kernel image"
    assert not gpu_check.is_right({"schedules": report["schedules"]})


def test_without_a_gpu_it_says_so_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check", f"--out={tmp_path}"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert end.value.code == 2
    assert (
        capsys.readouterr().err
        == "gpu_check: no GPU that torch can use; run it where there is one\n"
    )
