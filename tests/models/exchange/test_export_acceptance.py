"""Measured acceptance in an export: the launch line's chain, and the engines' simulators."""

import json

import pytest
from command_runs import assert_one_line, call
from tiny_drafts import make_head
from tiny_models import tiny_llama

from pipedraft.files import file_sha256

COUNTS = {"gsm8k": ([100, 60, 30], [60, 30, 9]), "mt_bench": ([100, 40, 10], [40, 10, 1])}


def evaluated(tmp_path, tree="chain:3"):
    """A checkpoint, and the files of an evaluation with these counts."""
    target = tiny_llama(layers=8)
    target.save_pretrained(tmp_path / "target")
    head = make_head(target)
    object.__setattr__(head.reference, "name", str(tmp_path / "target"))
    (tmp_path / "head").mkdir()
    head.save(tmp_path / "head")
    run = {"method": "eagle3", "schedule": "eagle", "stages": 1, "temperature": 0, "tree_width": 1}
    run |= {"tree": tree, "checkpoint": "head", "mean_acceptance_length": 1.9}
    run |= {"draft_acceptance_rate": 0.5}
    run |= {"equivalent_acceptance_length": {"pooled": 1.9, "ci95": [1.8, 2.0]}}
    runs = [
        run | {"benchmark": name, "position_tests": tests, "position_accepts": accepts}
        for name, (tests, accepts) in COUNTS.items()
    ]
    digest = file_sha256(tmp_path / "head" / "model.safetensors")
    manifest = {
        "checkpoints": {"head": digest},
        "prompts": dict.fromkeys(COUNTS, {"count": 9, "sha256": "-"}),
        "config": {"data_dir": None},
        "hardware": {"processor": "-"},
        "dtype": "fp32",
        "command": "-",
    }
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "results.json").write_text(json.dumps({"runs": runs}))
    words = ["export", "--checkpoint", str(tmp_path / "head"), "--format", "speculators"]
    return [*words, "--results", str(tmp_path / "results.json"), "--out", str(tmp_path / "out")]


def test_measured_acceptance_is_written_as_the_simulators_read_it(tmp_path, monkeypatch, capfd):
    assert call("models", evaluated(tmp_path), monkeypatch) == 0
    # 1.5 tokens at a length of 1, 1.7 at 2, 1.75 at 3, and a draft token costs a fifth of a pass.
    assert '"num_speculative_tokens": 1}' in capfd.readouterr().out.splitlines()[-1]
    found = json.loads((tmp_path / "out" / "acceptance.json").read_text())["temperature 0"]
    assert found["all"]["vllm"] == {
        "num_speculative_tokens": 3,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [0.5, 0.2, 0.05],
    }
    assert found["all"]["sglang"] == {
        "SGLANG_SIMULATE_ACC_LEN": "1.7500",
        "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
    }
    assert found["gsm8k"]["vllm"]["synthetic_acceptance_rates"] == [0.6, 0.3, 0.09]
    assert found["gsm8k"]["acceptance_length"] == pytest.approx(1.99)


def test_results_without_a_chain_are_refused(tmp_path, monkeypatch, capfd):
    command = evaluated(tmp_path, tree="dynamic:7:10:59")
    capfd.readouterr()
    status = call("models", command, monkeypatch)
    assert_one_line(status, *capfd.readouterr(), ["--results", "no chain", "--tree chain:7"])
