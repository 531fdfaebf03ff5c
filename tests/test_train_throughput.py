"""Model FLOPs against the products that torch counts, MFU in the log, and trackers."""

import json
import time

import pytest
import torch
from train_runs import train

from pipedraft.models import cpu
from pipedraft.train import eagle, eagle3, flexspec, launch, ppsd, spd, throughput
from pipedraft.train.throughput import Pace

# -- throughput -----------------------------------------------------------------------------

WAYS = [
    ("language_model", {"model__attention": "eager"}),
    ("spd", {}),
    ("spd", {"model__num_layers": 2, "model__draft_vocab_size": 40}),
    ("spd", {"model__query": "all", "model__num_layers": 2}),
    ("ppsd", {"model__num_stages": 2}),
    ("eagle", {}),
    ("eagle3", {"model__num_steps": 3, "model__draft_vocab_size": 50}),
    ("flexspec", {"model__preset": "paper"}),
    ("flexspec", {"model__feature_weight": 0}),
    ("flexspec", {"model__feature_source": "self", "model__stem_layers": 1}),
]


@pytest.mark.parametrize(("method", "changes"), WAYS, ids=str)
def test_flops_of_products_are_those_that_torch_counts(
    world, tmp_path, monkeypatch, method, changes
):
    """EAGLE-3 also projects a few embeddings after the end of the text: within 1 %."""
    from torch.utils.flop_counter import FlopCounterMode

    monkeypatch.setattr(cpu, "_is_for_onednn", lambda x: False)  # an operator it does not know
    monkeypatch.setattr(cpu, "ROW_MULTIPLE", 1)
    for module in (eagle, eagle3, flexspec, ppsd, spd, throughput):
        monkeypatch.setattr(module, "attention", lambda *arguments: 0.0)
    full = {"model__full_probability": 1.0} if method == "spd" else {}
    trainer = world.trainer(method, tmp_path, **changes, **full)
    longest = max(trainer.lengths)
    rows = [row for row, length in enumerate(trainer.lengths) if length == longest][:2]
    batch = trainer.load(trainer.data.train, rows)
    with FlopCounterMode(display=False) as counter:
        trainer.module(batch, torch.Generator()).loss.backward()
    counts = {str(key): count for key, count in counter.get_flop_counts()["Global"].items()}
    counted = counts["aten.mm"] + counts.get("aten.addmm", 0)
    tolerance = 0.01 if method == "eagle3" else 1e-9
    assert trainer.objective.flops(batch) == pytest.approx(counted, rel=tolerance)
    if method == "language_model":  # its eager attention computes all pairs, as matrix products
        width = throughput.DecoderCost.of(trainer.objective.model.model).width
        monkeypatch.undo()
        assert throughput.attention(width, len(rows) * longest**2, 3) == counts["aten.bmm"]


def test_causal_pairs_are_those_of_a_causal_mask():
    assert throughput.causal_pairs([1, 3, 40]) == sum(
        int(torch.ones(n, n).tril().sum()) for n in (1, 3, 40)
    )


def test_pace_is_flops_over_time_and_the_peak_of_all_processes():
    pace = Pace()
    pace.waited_s, pace.total_s, pace.flops = 1.0, 4.0, 6e12
    report = pace.report(peak_tflops=3.0, num_processes=2)
    assert report == {"data_share": 0.25, "mfu": 0.25}
    assert pace.report(peak_tflops=None, num_processes=2) == {"data_share": 0.0}


def test_the_log_has_mfu_if_the_peak_is_known(world, tmp_path, monkeypatch):
    counted = []
    for name, peak in (("with", 0.01), ("without", None)):
        trainer = world.trainer("spd", tmp_path / name, max_steps=2, peak_tflops=peak)
        flops = trainer.objective.flops
        monkeypatch.setattr(
            trainer.objective, "flops", lambda batch, f=flops: counted.append(f(batch)) or 1e30
        )
        trainer.run()
        records = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        steps = [record for record in map(json.loads, records) if "lr" in record]
        assert all(0 < record["data_share"] < 1 for record in steps)
        assert [record.get("mfu", 0) > 1e15 for record in steps] == [peak is not None] * 2
    assert len(counted) == 2


# -- trackers -------------------------------------------------------------------------------


def test_a_tracker_that_is_not_installed_is_refused(world, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "get_available_trackers", lambda: ["tensorboard"])
    with pytest.raises(ValueError, match=r"trackers: 'wandb' is not installed; pip install"):
        world.trainer("language_model", tmp_path, trackers='["wandb"]')


def test_wandb_keeps_a_run_offline(world, tmp_path, monkeypatch):
    """Both launches of it under one id."""
    pytest.importorskip("wandb", reason="needs pip install 'pipedraft[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    changes = {"trackers": '["wandb"]', "max_steps": 2}
    train(world.arguments("spd", tmp_path, **changes, max_minutes=1e-6), monkeypatch)
    train(world.arguments("spd", tmp_path, **changes), monkeypatch)
    files = sorted((tmp_path / "logs" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2 and len({path.name for path in files}) == 1, files
    words, deadline = (b"tokens_per_s", b"valid/loss", b"optim.lr"), time.monotonic() + 60
    while not all(word in files[1].read_bytes() for word in words):
        assert time.monotonic() < deadline, files[1].read_bytes()  # its own process writes it
        time.sleep(0.1)
