"""Train, decode, evaluate, upload: the commands one after another, as a user runs them.

Decoding and evaluation are separate processes, forked from one with all imports done; the others
run in this one.
"""

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from command_processes import Process
from command_runs import call
from fork_server import ForkServer
from train_runs import World, make_world
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPT = "What is 12 plus 5?"
NEW_TOKENS = 20
NUM_STAGES = 2


@dataclass(frozen=True)
class Run:
    world: World
    folder: Path
    """Output folder of the training."""


def run(parent: ForkServer, folder: Path, module: str, *words: str | Path) -> tuple[str, str]:
    """Run a command that must succeed; return its stdout and stderr."""
    process = Process.start(parent, folder, *map(str, words), module=module)
    status, out, err = process.finish()
    assert status == 0, err
    return out, err


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Run:
    root = tmp_path_factory.mktemp("end_to_end")
    world = make_world(root)
    arguments = world.arguments("spd", root / "run", max_steps=10, optim__lr=1e-2)
    with pytest.MonkeyPatch.context() as patch:
        assert call("train", arguments, patch) == 0
    return Run(world, root / "run")


@cache
def greedy_text(run: Run) -> str:
    """Greedy output from transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(run.world.target)
    target = AutoModelForCausalLM.from_pretrained(run.world.target, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = target.generate(
        **prompt, do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=tokenizer.pad_token_id
    )
    return tokenizer.decode(output[0, prompt.input_ids.shape[1] :], skip_special_tokens=True)


def test_training_writes_what_the_other_commands_need(trained):
    names = {str(p.relative_to(trained.folder)) for p in trained.folder.rglob("*") if p.is_file()}
    assert {"config.yaml", "metrics.jsonl", "best/config.json", "best/model.safetensors"} <= names
    assert "checkpoints/step-0000010/training_state/optimizer.safetensors" in names
    description = json.loads((trained.folder / "best/config.json").read_text())
    assert description["draft_type"] == "spd"
    assert description["target"]["name"] == str(trained.world.target)
    entries = [json.loads(line) for line in (trained.folder / "metrics.jsonl").open()]
    losses = [entry["loss"] for entry in entries if "loss" in entry]
    assert len(losses) == 10 and losses[-1] < losses[0]
    assert "valid/equivalent_acceptance_length_T0" in entries[-1]


def test_the_decoded_text_is_the_targets_greedy_text(trained, parent, tmp_path):
    arguments = ["--checkpoint", trained.folder, "--prompt", PROMPT]
    arguments += ["--max-new-tokens", str(NEW_TOKENS)]
    out, err = run(parent, tmp_path, "pipedraft.inference", *arguments)
    assert out == greedy_text(trained) + "\n"
    note, line, *more = err.splitlines()
    assert note.startswith("note: ") and note.endswith("best is used, the run's best head")
    assert line.startswith(f"[spd, n = {NUM_STAGES}] {NEW_TOKENS - 1} tokens after the first")
    assert "equivalent acceptance length" in line and "tokens/s" in line
    (advice,) = more
    assert advice.startswith("note: spd drafts for a pipeline: one process runs")


# DESIGN.md, section 4.
RUN_KEYS = {
    "method", "schedule", "benchmark", "stages", "temperature", "tree_width", "prompts", "tokens",
    "steps", "equivalent_acceptance_length", "mean_acceptance_length", "draft_acceptance_rate",
    "theoretical_speedup", "wallclock", "lossless",
}  # fmt: skip
WALLCLOCK_KEYS = {"tokens_per_s", "ttft_ms", "itl_ms_p50", "itl_ms_p99", "speedup"}


@pytest.fixture(scope="module")
def evaluated(trained, parent, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("evaluated")
    prompts = root / "questions.jsonl"
    rows = [{"prompt": f"What is {i} plus {i + 1}?"} for i in range(3)]
    rows.append({"turns": ["Say yes.", "And again?"]})
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--checkpoint", trained.folder, "--benchmarks", f"gsm8k,{prompts}", "--limit", "4"]
    words += ["--max-new-tokens", "12", "--temperature", "0,1", "--tree-width", "1,2"]
    run(parent, root, "pipedraft.eval", *words, "--out", root / "out")
    return root / "out"


def results_of(folder: Path) -> list[dict[str, Any]]:
    """Results for every benchmark, then pooled."""
    results = json.loads((folder / "results.json").read_text())
    assert {run["benchmark"] for run in results["runs"]} == {"pipedraft-math", "questions"}
    return [*results["runs"], *results["overall"]]


def test_results_have_the_keys_of_the_contract_and_obey_its_definitions(evaluated):
    runs = results_of(evaluated)
    kinds = {(r["schedule"], r["benchmark"], r["temperature"], r["tree_width"]) for r in runs}
    benchmarks = ("pipedraft-math", "questions", "overall")
    assert kinds == {
        (schedule, benchmark, temperature, width)
        for schedule, widths in (("autoregressive", (1,)), ("spd", (1, 2)))
        for benchmark in benchmarks
        for temperature in (0.0, 1.0)
        for width in widths
    }
    for run in runs:
        assert run.keys() >= RUN_KEYS
        assert run["wallclock"].keys() >= WALLCLOCK_KEYS
        length = run["equivalent_acceptance_length"]
        pooled = run["stages"] * run["tokens"] / run["steps"]
        assert length["pooled"] == pytest.approx(pooled)
        assert length["ci95"][0] <= length["pooled"] <= length["ci95"][1]
        if run["schedule"] == "autoregressive":
            assert length["pooled"] == length["mean"] == 1.0
            assert run["theoretical_speedup"] == pytest.approx(1.0)
            assert run["wallclock"]["speedup"] == pytest.approx(1.0)
        else:
            assert run["stages"] == NUM_STAGES
            assert run["mean_acceptance_length"] >= 1
            assert 0 <= run["draft_acceptance_rate"] <= 1
            assert 1.0 <= length["pooled"] <= NUM_STAGES


def test_every_greedy_text_was_compared_with_transformers_and_none_differs(evaluated):
    runs = results_of(evaluated)
    greedy = [run for run in runs if run["temperature"] == 0]
    assert len(greedy) == 9
    for run in greedy:
        assert run["lossless"]["mismatches"] == 0
        turns = {"pipedraft-math": 4, "questions": 5, "overall": 9}[run["benchmark"]]
        assert run["lossless"]["checked"] == turns
    for run in runs:
        if run["temperature"] == 1:  # trees share the baseline's noise, a chain does not
            # Plain decoding is compared with transformers' greedy text, on a few prompts.
            is_compared = run["verifier"] == "gumbel"
            assert (run["lossless"]["checked"] > 0) == is_compared
            assert run["lossless"]["mismatches"] == 0


def test_the_report_has_a_table_two_plots_and_a_manifest(evaluated, trained):
    assert {path.name for path in evaluated.iterdir()} == {
        "results.json", "report.md", "report.html", "manifest.json", "traces",
        "outputs.html", "charts",
    }  # fmt: skip
    page = (evaluated / "outputs.html").read_text()
    assert "accepted draft token" in page and page.count('class="prompt"') > 3
    charts = {path.name for path in (evaluated / "charts").iterdir()}
    assert {f"length_by_benchmark.{kind}" for kind in ("png", "svg", "csv")} <= charts
    for plot in (evaluated / "charts").glob("*.png"):
        assert plot.read_bytes().startswith(b"\x89PNG") and plot.stat().st_size > 5000
    report = (evaluated / "report.md").read_text()
    assert "autoregressive" in report and "| spd" in report and "gsm8k" in report
    manifest = json.loads((evaluated / "manifest.json").read_text())
    assert manifest["dtype"] == "float32" and manifest["seed"] == 0
    assert manifest["target"]["name"] == str(trained.world.target)
    assert {"config", "versions", "git", "prompts", "tokenizer"} <= manifest.keys()


def test_the_upload_holds_the_network_and_its_card_and_no_training_state(
    trained, tmp_path, monkeypatch, capfd
):
    out = tmp_path / "upload"
    arguments = ["push", "--checkpoint", str(trained.folder), "--repo", "user/name"]
    assert call("models", [*arguments, "--dry-run", "--out", str(out)], monkeypatch) == 0
    names = ["README.md", "config.json", "model.safetensors"]
    assert sorted(path.name for path in out.iterdir()) == names
    assert capfd.readouterr().out.splitlines() == [str(out / name) for name in names]
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: pipedraft\n")
    # A local folder exists here only, so the card gives its name alone.
    assert "base_model" not in card and str(trained.world.target) not in card
    assert f".../{Path(trained.world.target).name}" in card
    assert "equivalent_acceptance_length_T0" in card
    entries = [json.loads(line) for line in (trained.folder / "metrics.jsonl").open()]
    best = max(entry.get("valid/score", -math.inf) for entry in entries)
    assert f"| equivalent_acceptance_length_T0 | {best:.4f} |" in card
    # The uploaded files decode like the trained ones.
    arguments = ["--checkpoint", str(out), "--prompt", PROMPT, "--quiet"]
    arguments += ["--max-new-tokens", str(NEW_TOKENS)]
    assert call("inference", arguments, monkeypatch) == 0
    assert capfd.readouterr() == (greedy_text(trained) + "\n", "")


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "dflash", "dspark"])
def test_an_eagle_head_is_trained_and_decoded(method, trained, tmp_path, monkeypatch, capfd):
    world, folder = trained.world, tmp_path / "run"
    arguments = world.arguments(method, folder, max_steps=6, optim__lr=1e-2)
    assert call("train", arguments, monkeypatch) == 0
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    assert entries[-1]["valid/score"] == entries[-1]["valid/acceptance_length_T0"] >= 1
    capfd.readouterr()
    decode = ["--checkpoint", str(folder), "--prompt", PROMPT, "--quiet"]
    decode += ["--max-new-tokens", str(NEW_TOKENS)]
    for way in (
        [],
        ["--schedule", "flowspec", "--stages", "3", "--tree", "dynamic:3:3:8"],
        ["--schedule", "flowspec_continued", "--stages", "3"],
        ["--schedule", "pipedec", "--stages", "2", "--tree-width", "3"],
    ):
        assert call("inference", [*decode, *way], monkeypatch) == 0
        assert capfd.readouterr().out == greedy_text(trained) + "\n", way
