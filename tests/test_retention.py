"""The retention report: what it counts, which drafts it loads, and the whole command."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from conftest import tiny_llama
from tiny_drafts import make_draft
from train_runs import make_world

from pipedraft.eval import __main__ as command
from pipedraft.eval.retention import MEASURES, add_up, count, describe, divergence, sync_seconds
from pipedraft.eval.runner import check
from pipedraft.eval.spec import read_spec
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.engine import Engine
from pipedraft.inference.result import DecodeResult
from pipedraft.inference.shapes import TreeShape
from pipedraft.models.language_model import load_draft_model
from pipedraft.models.target import load_target, load_tokenizer
from pipedraft.train.__main__ import quieten

LAST = 3


# -- counting -----------------------------------------------------------------------------------


def record(prompt: int, *, tests: list[int], accepts: list[int], rounds: list[int]):
    result = DecodeResult(
        prompt_ids=[1],
        token_ids=[2],
        text="",
        stop_reason="eos",
        num_stages=1,
        round_lengths=rounds,
        position_tests=tests,
        position_accepts=accepts,
    )
    return SimpleNamespace(conversation=("task", prompt), result=result)


def test_turns_of_a_prompt_add_up_and_a_prompt_without_any_counts_nothing():
    records = [
        record(0, tests=[2, 1], accepts=[1, 1], rounds=[3, 1]),
        record(2, tests=[4], accepts=[0], rounds=[1, 1, 1, 1]),
        record(0, tests=[1], accepts=[1], rounds=[2]),
    ]
    counts_4P = add_up(records, 3, count)
    assert counts_4P.tolist() == [[3, 0, 0], [4, 0, 4], [6, 0, 4], [3, 0, 4]]


WHERE = {"seed": 0, "where": ("d", "t", "x"), "loads": True}


def test_rates_are_of_pooled_counts_and_the_share_is_paired():
    base_4P = np.array([[8, 5, 9, 6], [10, 10, 10, 10], [9, 6, 10, 7], [3, 5, 2, 4]], float)
    same = describe(base_4P, base_4P, **WHERE)
    assert same.alpha == 28 / 40 and same.tau == 32 / 14
    assert same.retained == 1 and same.retained_ci95 == (1, 1)
    assert same.alpha_ci95[0] < 28 / 40 < same.alpha_ci95[1]
    half_4P = base_4P * [[0.5], [1], [1], [1]]
    half = describe(half_4P, base_4P, **WHERE)
    # Every prompt lost the same share: resampled together, nothing varies.
    assert half.alpha == 14 / 40 and half.retained == 0.5
    assert half.retained_ci95 == pytest.approx([0.5, 0.5])
    uneven = describe(half_4P[:, ::-1], base_4P, **WHERE)
    assert uneven.retained == 0.5 and uneven.retained_ci95[0] < 0.45


def test_a_draft_is_sent_again_at_the_bandwidth_of_the_link():
    """FlexSpec's table I: 300, 50 and 10 Mbit/s."""
    assert sync_seconds(37_500_000) == pytest.approx({"5g": 1.0, "4g": 6.0, "wifi": 30.0})


def expected_divergence(base, evolved, result) -> float:
    """Token by token, each from its own prefix."""
    total, ids = 0.0, list(result.prompt_ids)
    for token in result.token_ids:
        with torch.no_grad():
            p_V, q_V = (
                m(input_ids=torch.tensor([ids])).logits[0, -1].double().softmax(-1)
                for m in (base, evolved)
            )
        total += float((p_V * (p_V / q_V).log()).sum())
        ids.append(token)
    return total


def test_the_drift_is_that_of_the_answers_rows():
    base, evolved = tiny_llama(vocab=16), tiny_llama(vocab=16, seed=1)
    result = record(0, tests=[], accepts=[], rounds=[]).result
    result = replace(result, prompt_ids=[1, 2, 3], token_ids=[4, 9, 4, 7])
    total, num_rows = divergence(base, evolved, result)
    expected = expected_divergence(base, evolved, result)
    assert num_rows == 4 and total == pytest.approx(expected, rel=1e-4)
    assert divergence(base, base, result) == (0.0, 4)
    # Neither the other direction nor other rows give that.
    assert divergence(evolved, base, result)[0] != pytest.approx(expected, rel=0.01)
    shifted = replace(result, prompt_ids=[1, 2, 3, 4], token_ids=[9, 4, 7, 1])
    assert divergence(base, evolved, shifted)[0] != pytest.approx(expected, rel=0.01)


# -- the command --------------------------------------------------------------------------------


def noisy(source: Path, folder: Path, *layers: int) -> None:
    target = load_target(str(source))
    generator = torch.Generator().manual_seed(7)
    for layer in layers:
        for weight in target.model.layers[layer].parameters():
            weight.add_(0.03 * torch.randn(weight.shape, generator=generator))
    target.save_pretrained(folder)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A base, two targets that came of it, three drafts, a configuration."""
    quieten()
    folder = tmp_path_factory.mktemp("retention")
    base = make_world(folder).target
    noisy(base, folder / "inner", 0, 1)
    noisy(base, folder / "run" / "best", 1, LAST)
    make_draft(load_target(str(base))).save(made(folder / "flexspec"))
    target = load_target(str(base))  # as a draft it is always right about itself
    target.save_pretrained(folder / "twin")
    load_tokenizer(str(base)).save_pretrained(folder / "twin")
    prompts = [{"prompt": f"What is {i} plus {i % 3}?"} for i in range(3)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    targets = {"inner": str(folder / "inner"), "outer": str(folder / "run")}
    config = {
        "title": "Kept",
        "kind": "retention",
        "target": str(base),
        "drafts": {"head": str(folder / "flexspec"), "twin": str(folder / "twin")},
        "domains": {"sums": {"benchmarks": [str(folder / "sums.jsonl")], "targets": targets}},
        "run": {"tree": "chain:3"},
        "max_new_tokens": 12,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def evaluate(place: Path, out: Path, *words: str, **changes) -> dict:
    """
    Args:
        changes: of the specification.
    """
    spec = place / "config.yaml"
    if changes:
        out.mkdir(exist_ok=True)
        (out / "changed.yaml").write_text(
            yaml.safe_dump(yaml.safe_load(spec.read_text()) | changes)
        )
        spec = out / "changed.yaml"
    command.run(["table", str(spec), "--checkpoints", str(place), "--out", str(out), *words])
    return json.loads((out / "results.json").read_text())


@pytest.fixture(scope="module")
def results(place) -> dict:
    return evaluate(place, place / "out")


def test_every_draft_meets_every_target(results):
    targets = ["base", "inner", "outer"]
    assert [entry["target"] for entry in results["targets"]] == targets
    pairs = [(entry["target"], entry["draft"]) for entry in results["drafts"]]
    assert pairs == [(target, draft) for target in targets for draft in ("head", "twin")]
    for entry in results["targets"]:
        assert entry["turns"] == entry["same_text"] == 3


def test_the_scope_and_the_fingerprint_tell_the_targets_apart(results):
    scopes = {entry["target"]: entry["out_of_scope"] for entry in results["targets"]}
    assert scopes["base"] == scopes["inner"] == []
    assert len(scopes["outer"]) == 9 and f"model.layers.{LAST}.mlp.up_proj" in scopes["outer"]
    loads = {(e["target"], e["draft"]): e["loads"] for e in results["drafts"]}
    assert [pair for pair, fits in loads.items() if not fits] == [("outer", "head")]


def test_a_draft_that_is_the_base_is_right_there_and_less_so_elsewhere(results):
    twin = {e["target"]: e for e in results["drafts"] if e["draft"] == "twin"}
    assert twin["base"]["alpha"] == twin["base"]["retained"] == 1
    assert twin["base"]["accepted"] == twin["base"]["tested"] > 20
    assert twin["base"]["tau"] > 3
    drift = {entry["target"]: entry["kl"] for entry in results["targets"]}
    assert drift["base"] == 0
    for target in ("inner", "outer"):
        assert drift[target] > 0.01 and twin[target]["alpha"] < 1
        assert twin[target]["retained"] == twin[target]["alpha"]


def test_counts_are_those_of_the_engine(place, results):
    base = load_target(str(place / "target"))
    model, tokenizer = load_target(str(place / "inner")), load_tokenizer(str(place / "target"))
    config = DecodeConfig.of(
        schedule="eagle", num_stages=1, tree=TreeShape.parse("chain:3"), max_new_tokens=12
    )
    twin = load_draft_model(str(place / "twin"), model, tokenizer)
    engines = [Engine(target, tokenizer, config, twin) for target in (model, base)]
    accepted, drift, rows = [], 0.0, 0
    for row in (place / "sums.jsonl").read_text().splitlines():
        messages = [{"role": "user", "content": json.loads(row)["prompt"]}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer.encode(text, add_special_tokens=False)
        accepted.append(engines[0].decode(ids).num_accepted)
        answer = engines[1].decode(ids)
        drift, rows = drift + expected_divergence(base, model, answer), rows + len(answer.token_ids)
    (entry,) = (e for e in results["drafts"] if (e["target"], e["draft"]) == ("inner", "twin"))
    assert entry["per_prompt"]["accepted"] == accepted
    (target,) = (e for e in results["targets"] if e["target"] == "inner")
    assert target["kl"] == pytest.approx(drift / rows, rel=1e-3)


def test_the_report_has_a_table_for_each_measure_and_a_plot(place, results):
    text = (place / "out" / "report.md").read_text()
    assert "| sums | base | 0.000 [0.00, 0.00] | in |" in text
    assert "| sums | outer | " in text and " | out: 9 | " in text and " * | " in text
    assert all(f"## {title}" in text for title in MEASURES.values())
    assert (place / "out" / "retention.png").read_bytes().startswith(b"\x89PNG")
    manifest = json.loads((place / "out" / "manifest.json").read_text())
    assert (
        manifest["config"]["run"]["tree"] == "chain:3" and manifest["prompts"]["sums"]["count"] == 3
    )


def test_what_was_decoded_is_not_decoded_again(place, results, monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("decoded")

    monkeypatch.setattr(Engine, "decode", refuse)
    assert evaluate(place, place / "out") == results
    with pytest.raises(AssertionError, match="decoded"):
        evaluate(place, place / "out", "--max-new-tokens", "11")


def test_missing_checkpoints_are_named_in_one_line(place, monkeypatch, capsys, tmp_path):
    text = (place / "config.yaml").read_text()
    text = text.replace(str(place / "inner"), "out/absent").replace(str(place / "flexspec"), "gone")
    (tmp_path / "config.yaml").write_text(text)
    words = ["table", str(tmp_path / "config.yaml"), "--out", str(tmp_path / "out")]
    words += ["--checkpoints", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["eval", *words])
    with pytest.raises(SystemExit) as stop:
        command.main()
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1
    assert "gone (head), out/absent (domains.sums.targets.inner); train them" in said


def test_a_draft_of_another_target_is_refused_on_the_base(place, tmp_path):
    stranger = make_draft(load_target(str(place / "run" / "best")))
    stranger.save(made(tmp_path / "stranger"))
    with pytest.raises(ValueError, match="target: does not match this draft, .* anchor: "):
        evaluate(place, tmp_path / "out", drafts={"head": str(tmp_path / "stranger")})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"run": {"tree": "bush"}}, "tree: 'bush'"),
        ({"run": {"tree": "chain:3", "width": 2}}, "'width' is no setting"),
        ({"max_new_tokens": "many"}, "max_new_tokens"),
        ({"drafts": {}}, "name one, or the drafts and domains"),
        ({"domains": {}}, "name one, or the drafts and domains"),
        ({"domains": {"sums": {"benchmarks": [], "targets": {"base": "x"}}}}, "'base' is the base"),
        ({"domain": {}}, "did you mean domains"),
        ({"max_new_tokens": 500}, "500 leaves no room for any prompt of sums, base"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(place, tmp_path, changes, expected):
    with pytest.raises(ValueError, match=expected) as caught:
        evaluate(place, tmp_path, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["retention", "retention_far"])
def test_the_shipped_specifications_are_whole(repository, name):
    spec = read_spec(str(repository / "configs" / "eval" / f"{name}.yaml"))
    check(name, spec)
    assert spec.kind == "retention" and set(spec.domains) == {"code", "maths"}
