"""benchmarks/retention.py: its counts, and a whole report on tiny drafts."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import yaml
from scripts import load_script
from tiny_drafts import make_draft
from tiny_models import tiny_llama
from train_runs import make_world

from pipedraft.files import read_yaml
from pipedraft.inference.result import DecodeResult
from pipedraft.models.target import load_target, load_tokenizer
from pipedraft.pretrained import quieten

retention = load_script("benchmarks/retention.py")
LAST = 3


def test_rates_are_of_pooled_counts_and_the_share_is_paired():
    base_4P = np.array([[8, 5, 9, 6], [10, 10, 10, 10], [9, 6, 10, 7], [3, 5, 2, 4]], float)
    same = retention.describe(base_4P, base_4P)
    assert same["alpha"] == 28 / 40 and same["tau"] == 32 / 14
    assert same["retained"] == 1 and same["retained_ci95"] == (1, 1)
    half = retention.describe(base_4P * [[0.5], [1], [1], [1]], base_4P)
    # Every prompt lost the same share: resampled together, nothing varies.
    assert half["alpha"] == 14 / 40 and half["retained_ci95"] == pytest.approx((0.5, 0.5))


def test_a_draft_is_sent_again_at_the_bandwidth_of_the_link():
    """FlexSpec's table I: 300, 50 and 10 Mbit/s."""
    sent = retention.sync_seconds(37_500_000)
    assert sent == pytest.approx({"5g": 1.0, "4g": 6.0, "wifi": 30.0})


def test_the_drift_is_that_of_the_answers_rows():
    base, evolved = tiny_llama(vocab=16), tiny_llama(vocab=16, seed=1)
    result = DecodeResult([1, 2, 3], [4, 9, 4, 7], "", "eos", num_stages=1)
    expected, ids = 0.0, [1, 2, 3]
    for token in result.token_ids:  # token by token, each from its own prefix
        with torch.no_grad():
            p_V, q_V = (
                m(input_ids=torch.tensor([ids])).logits[0, -1].double().softmax(-1)
                for m in (base, evolved)
            )
        expected += float((p_V * (p_V / q_V).log()).sum())
        ids.append(token)
    assert retention.divergence(base, evolved, result) == (pytest.approx(expected, rel=1e-4), 4)
    shifted = replace(result, prompt_ids=[1, 2, 3, 4], token_ids=[9, 4, 7, 1])
    assert retention.divergence(base, evolved, shifted)[0] != pytest.approx(expected, rel=0.01)


def test_every_draft_meets_every_target(tmp_path, monkeypatch, capsys):
    quieten()
    base = make_world(tmp_path).target
    for name, layers in (("inner", (0, 1)), ("outer", (1, LAST))):
        tuned = load_target(str(base))
        generator = torch.Generator().manual_seed(7)
        for layer in layers:
            for weight in tuned.model.layers[layer].parameters():
                weight.add_(0.03 * torch.randn(weight.shape, generator=generator))
        tuned.save_pretrained(tmp_path / name)
    (tmp_path / "head").mkdir()
    make_draft(load_target(str(base))).save(tmp_path / "head")
    load_target(str(base)).save_pretrained(tmp_path / "twin")  # always right about itself
    load_tokenizer(str(base)).save_pretrained(tmp_path / "twin")
    rows = [{"prompt": f"What is {i} plus {i % 3}?"} for i in range(3)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    places = {name: str(tmp_path / name) for name in ("inner", "outer", "head", "twin")}
    spec = {
        "title": "Kept",
        "target": str(base),
        "drafts": {name: places[name] for name in ("head", "twin")},
        "domains": {
            "sums": {
                "benchmarks": [str(tmp_path / "sums.jsonl")],
                "targets": {name: places[name] for name in ("inner", "outer")},
            }
        },
        "tree": "chain:3",
        "max_new_tokens": 12,
    }
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    words = ["retention", str(tmp_path / "spec.yaml"), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", words)
    retention.main()
    targets = json.loads((tmp_path / "out" / "results.json").read_text())["targets"]
    assert [entry["target"] for entry in targets] == ["base", "inner", "outer"]
    assert all(entry["turns"] == entry["same_text"] == 3 for entry in targets)
    scopes = {entry["target"]: entry["out_of_scope"] for entry in targets}
    assert scopes["base"] == scopes["inner"] == [] and len(scopes["outer"]) == 9
    loads = {(e["target"], d): f["loads"] for e in targets for d, f in e["drafts"].items()}
    assert [pair for pair, fits in loads.items() if not fits] == [("outer", "head")]
    twin = {entry["target"]: entry["drafts"]["twin"] for entry in targets}
    assert twin["base"]["alpha"] == twin["base"]["retained"] == 1
    assert targets[0]["kl"] == 0
    for entry in targets[1:]:
        assert entry["kl"] > 0.01 and entry["drafts"]["twin"]["alpha"] < 1
    text = (tmp_path / "out" / "report.md").read_text()
    assert "| sums | base | 0.000 [0.00, 0.00] | in |" in text and " | out: 9 | " in text
    assert (tmp_path / "out" / "retention.png").read_bytes().startswith(b"\x89PNG")
    assert "outer" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["embedded", "embedded_far", "smollm2"])
def test_the_shipped_specifications_are_whole(repository, name):
    path: Path = repository / "configs" / "retention" / f"{name}.yaml"
    spec = msgspec.convert(read_yaml(path, name), retention.Spec)
    assert set(spec.domains) == {"code", "maths"}
