"""MFU in the log, and trackers."""

import json
import time

import pytest
from train_runs import train

from pipedraft.train import launch, loop
from pipedraft.train.log import StepPace, flop_counter

# -- throughput -----------------------------------------------------------------------------


def test_pace_is_flops_over_time_and_the_peak_of_all_processes():
    pace = StepPace()
    pace.waited_s, pace.total_s, pace.flops = 1.0, 4.0, 6e12
    report = pace.report(peak_tflops=3.0, num_processes=2)
    assert report == {"data_share": 0.25, "mfu": 0.25}
    assert pace.report(peak_tflops=None, num_processes=2) == {"data_share": 0.0}


def test_the_log_has_mfu_if_the_peak_is_known(world, tmp_path, monkeypatch):
    counters = []
    note = lambda: counters.append(flop_counter()) or counters[-1]  # noqa: E731
    monkeypatch.setattr(loop, "flop_counter", note)
    for name, peak in (("with", 1e-9), ("without", None)):
        trainer = world.trainer("spd", tmp_path / name, max_steps=2, peak_tflops=peak)
        trainer.run()
        records = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        steps = [record for record in map(json.loads, records) if "lr" in record]
        assert all(0 < record["data_share"] < 1 for record in steps)
        assert [record.get("mfu", 0) > 1e3 for record in steps] == [peak is not None] * 2
    (counter,) = counters  # the first step stands for the second
    assert counter.get_total_flops() > 0


# -- trackers -------------------------------------------------------------------------------


def test_a_tracker_that_is_not_installed_is_refused(world, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "get_available_trackers", lambda: ["tensorboard"])
    with pytest.raises(ValueError, match=r"trackers: 'wandb' is not installed; pip install"):
        world.trainer("spd", tmp_path, trackers='["wandb"]')


def test_wandb_keeps_a_run_offline(world, tmp_path, monkeypatch):
    """Both of its launches share one id."""
    pytest.importorskip("wandb", reason="needs pip install 'pipedraft[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for limit in ("WANDB_INIT_TIMEOUT", "WANDB__SERVICE_WAIT"):  # for a machine that may be busy
        monkeypatch.setenv(limit, "300")
    changes = {"trackers": '["wandb"]', "max_steps": 2}
    train(world.arguments("spd", tmp_path, **changes, max_minutes=1e-6), monkeypatch)
    train(world.arguments("spd", tmp_path, **changes), monkeypatch)
    files = sorted((tmp_path / "logs" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2 and len({path.name for path in files}) == 1, files
    words, deadline = (b"tokens_per_s", b"valid/loss", b"optim.lr"), time.monotonic() + 300
    while not all(word in files[1].read_bytes() for word in words):
        assert time.monotonic() < deadline, files[1].read_bytes()  # its own process writes it
        time.sleep(0.1)
