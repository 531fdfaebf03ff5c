"""Model cards as received by a Hub on 127.0.0.1, and exports with their cards."""

import importlib
import json
import re
import shlex
import shutil
from collections.abc import Collection
from pathlib import Path

import datasets
import eval_runs
import pytest
import torch
import yaml
from command_runs import call
from fake_hub import FakeHub, metadata_errors
from hub_runs import NAMES, Place, make_place, one_line, push, signed_in
from huggingface_hub import ModelCard, snapshot_download
from safetensors.torch import load_file, save_file
from tiny_models import REPOSITORY, byte_tokenizer, write_rows

from pipedraft.data_recipes.recipe import DataConfig, Source, load_data
from pipedraft.models.exchange.card import MADE, model_card

no_pictures = eval_runs.no_pictures
pytestmark = pytest.mark.usefixtures("no_pictures")
QUESTIONS = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(3)]


@pytest.fixture(scope="module")
def place(no_pictures, tmp_path_factory) -> Place:
    """Place with prompts, and measurements for two drafts on them."""
    folder = tmp_path_factory.mktemp("hub")
    place = make_place(folder)
    write_rows(folder / "gsm8k" / "test.jsonl", *QUESTIONS)
    with pytest.MonkeyPatch.context() as patch:
        words = ["--checkpoint", str(folder / "spd"), "--checkpoint", str(folder / "eagle3")]
        words += ["--benchmarks", "gsm8k", "--data-dir", str(folder), "--max-new-tokens", "6"]
        words += ["--temperature", "0,1", "--tree", "chain:2", "--out", str(folder / "eval")]
        assert call("eval", words, patch) == 0
    return place


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with signed_in(monkeypatch, tmp_path / "cache") as running:
        yield running


def card_of(hub: FakeHub, repo: str = "user/name", revision: str = "main") -> ModelCard:
    return ModelCard(hub.repositories[repo].texts(revision)["README.md"].decode())


# -- cards ----------------------------------------------------------------------------------


def test_the_card_holds_the_measured_figures_as_the_hub_reads_them(
    place, hub, tmp_path, monkeypatch
):
    results = shutil.copytree(place.folder / "eval", tmp_path / "eval") / "results.json"
    runs = json.loads(results.read_text())["runs"]
    for run in runs:
        run["filters"] = {"top_p": 0.9} if run["temperature"] else {}
    results.write_text(json.dumps({"runs": runs}))
    assert push(place, monkeypatch, "--results", str(results)) == 0
    card = card_of(hub)
    assert "| 1, top-p 0.9 |" in card.text and "| 0 |" in card.text
    drafted = [run for run in runs if run["method"] == "spd"]
    assert len(drafted) == 2 and len(runs) == 6
    assert "| gsm8k | autoregressive |" in card.text and "eagle3 |" not in card.text
    found = {(r.metric_type, r.metric_args["temperature"]): r for r in card.data.eval_results}
    assert len(found) == len(card.data.eval_results) == 6
    for run in drafted:
        length = run["equivalent_acceptance_length"]
        result = found["equivalent_acceptance_length", run["temperature"]]
        assert result.metric_value == length["pooled"]
        assert result.metric_args["ci95"] == length["ci95"]
        assert result.metric_args["stages"] == 2 and result.dataset_type == "gsm8k"
        rate = found["draft_acceptance_rate", run["temperature"]]
        assert rate.metric_value == run["draft_acceptance_rate"]
        assert f"| {length['pooled']:.3f} | {length['ci95'][0]:.3f} to" in card.text
    assert card.data.model_name == "name" and card.data.library_name == "pipedraft"
    assert card.data.tags == ["speculative-decoding", "pipedraft", "spd"]
    assert card.data.datasets == ["openai/gsm8k"]
    assert str(place.folder / "eval") in card.text  # the measuring command
    assert "Rows by license: mit 5, unknown 2." in card.text
    assert yaml.safe_load(str(card).split("---\n")[1])["model-index"][0]["name"] == "name"


def test_training_data_records_which_sources_are_on_the_hub(tmp_path, monkeypatch):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    local = write_rows(tmp_path / "chat.jsonl", {"messages": turns})
    rows = datasets.Dataset.from_list([{"messages": turns[:1] + [{**turns[1], "content": "Yes."}]}])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    sources = [Source(path="lab/chats"), Source(path=local), Source(path="lab/chats", subset="b")]
    config = DataConfig(sources=sources, valid_fraction=0.0, cache_dir=tmp_path / "cache")
    report = load_data(config, byte_tokenizer()).report
    assert report.to_dict()["hub_datasets"] == ["lab/chats"] and len(report.sources) == 3


def test_figures_of_other_weights_are_refused(place, hub, tmp_path, monkeypatch, capfd):
    shutil.copytree(place.folder / "eval", tmp_path / "eval")
    results = tmp_path / "eval" / "results.json"
    assert push(place, monkeypatch, "--results", str(results), draft="spd4") == 2
    one_line(capfd, "--results", "measured other weights", "evaluate this checkpoint")
    (tmp_path / "eval" / "manifest.json").unlink()
    assert push(place, monkeypatch, "--results", str(results)) == 2
    one_line(capfd, "--results", "manifest.json", "that eval wrote")
    assert not hub.repositories


@pytest.mark.parametrize(
    "change",
    [{"prompts": {}}, {"prompts": []}, {"checkpoints": None}, {"hardware": {}}, {"config": [1]}],
)
def test_a_manifest_in_another_form_is_refused(change, place, hub, tmp_path, monkeypatch, capfd):
    shutil.copytree(place.folder / "eval", tmp_path / "eval")
    manifest = tmp_path / "eval" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | change))
    assert push(place, monkeypatch, "--results", str(tmp_path / "eval" / "results.json")) == 2
    one_line(capfd, "--results", "manifest.json is not of pipedraft eval", *change)
    assert not hub.repositories


def test_a_card_written_by_hand_is_kept_and_a_bad_one_stops_the_upload(
    place, hub, tmp_path, monkeypatch, capfd
):
    folder = Path(shutil.copytree(place.draft, tmp_path / "draft"))
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    assert push(place, monkeypatch, draft=str(folder)) == 0
    assert hub.repositories["user/name"].texts()["README.md"] == b"---\nlicense: mit\n---\n# Mine\n"
    capfd.readouterr()
    results = ["--results", str(place.folder / "eval" / "results.json")]
    assert push(place, monkeypatch, *results, draft=str(folder)) == 2
    one_line(capfd, "--results", "written by hand", "leave --results out")
    (folder / "README.md").write_text("---\nbase_model: /home/me/target\n---\n# Mine\n")
    assert push(place, monkeypatch, draft=str(folder), repo="user/other") == 2
    one_line(capfd, "'user/other'", "400", '"base_model" with value "/home/me/target"')
    assert list(hub.repositories) == ["user/name"]


def test_a_card_that_pipedraft_wrote_is_written_anew(place, hub, tmp_path, monkeypatch):
    folder = Path(shutil.copytree(place.draft, tmp_path / "draft"))
    (folder / "README.md").write_text(f"# old\n\n{MADE}\n")
    assert push(place, monkeypatch, draft=str(folder)) == 0
    text = str(card_of(hub))
    assert "--checkpoint user/name" in text and text.count(MADE) == 1 and "# old" not in text


LICENSES = [
    ({}, {}, "Unknown: the card of the target"),
    ({"README.md": "no metadata"}, {}, "Unknown: the card of the target"),
    ({"README.md": "---\nlicense: [\n---\n"}, {}, "names none"),
    ({"README.md": "---\nlicense: apache-2.0\n---\n"}, {"license": "apache-2.0"}, ": apache-2.0."),
    (
        {"README.md": "---\nlicense: other\nlicense_name: acme\nlicense_link: LICENSE\n---\n"},
        {"license": "other", "license_name": "acme", "license_link": "LICENSE"},
        "other, acme, LICENSE",
    ),
]


@pytest.mark.parametrize(("files", "metadata", "text"), LICENSES)
def test_the_license_is_the_targets_own_or_unknown(
    files, metadata, text, place, hub, tmp_path, monkeypatch
):
    target = Path(shutil.copytree(place.target, tmp_path / "target"))
    if "README.md" in files:
        (target / "README.md").write_text(files["README.md"])
    folder = Path(shutil.copytree(place.draft, tmp_path / "draft"))
    description = json.loads((folder / "config.json").read_text())
    description["target"]["name"] = str(target)
    (folder / "config.json").write_text(json.dumps(description))
    assert push(place, monkeypatch, draft=str(folder)) == 0
    card = card_of(hub)
    found = {key: value for key, value in card.data.to_dict().items() if key.startswith("license")}
    assert found == metadata
    assert text in card.text


def test_a_card_begins_with_use_and_acceptance_and_leaves_out_what_is_not_set():
    folder = REPOSITORY / "assets" / "heads" / "eagle3"
    description = json.loads((folder / "config.json").read_text())
    description["target"]["name"] = "lab/tiny"
    description["training"]["metrics"]["decoded_acceptance_length"] = 2.5
    card = model_card(description)
    titles = re.findall(r"^## (.*)$", card, re.MULTILINE)
    assert titles == ["Usage", "Acceptance", "Training data", "License", "Architecture"]
    assert "2.500 tokens per verification round" in card
    assert 'model = pd.load("lab/tiny", draft="THIS_FOLDER")' in card
    assert "gguf (llama.cpp; " in card and "Rows by license: apache-2.0 4700." in card
    assert not re.search(r"\| (score|agreement_1|fc_norm|sliding_window) \|", card)
    description["training"]["data"]["licenses"] = {"unknown": 4700}
    assert "No row and no source names a license." in model_card(description)


def publish_target(place: Place, hub: FakeHub, name: str, folder: str = "target") -> None:
    files = {f.name: f.read_bytes() for f in (place.folder / folder).iterdir()}
    hub.create(name, **files, **{"README.md": b"---\nlicense: apache-2.0\n---\n# A target\n"})


def test_the_target_gets_its_name_on_the_hub_if_it_is_that_target(place, hub, monkeypatch, capfd):
    publish_target(place, hub, "lab/tiny")
    publish_target(place, hub, "lab/other", folder="other_target")
    assert push(place, monkeypatch, "--target", "lab/other") == 2
    one_line(capfd, "target: does not match", "hash")
    assert push(place, monkeypatch, "--target", "lab/tiny") == 0
    card = card_of(hub)
    assert (card.data.base_model, card.data.license) == ("lab/tiny", "apache-2.0")
    description = json.loads(hub.repositories["user/name"].texts()["config.json"])
    assert description["target"]["name"] == "lab/tiny"
    assert not metadata_errors(str(card)) and "TARGET_FOLDER" not in card.text


def commands_of(card: ModelCard) -> list[str]:
    return re.findall(r"^    (python -m pipedraft\..*|hf .*)$", card.text, re.MULTILINE)


def run_commands(card: ModelCard, monkeypatch, parsed: Collection[str] = ()) -> list[str]:
    """Run a card's commands in this process; return the programs in order.

    Args:
        parsed: programs whose arguments are only read.
    """
    programs = []
    for command in commands_of(card):
        program, *arguments = shlex.split(command)
        if program == "hf":
            keywords = dict(zip(arguments[2::2], arguments[3::2], strict=True))
            assert keywords.keys() == {"--revision", "--local-dir"} and arguments[0] == "download"
            folder = keywords["--local-dir"]
            snapshot_download(arguments[1], revision=keywords["--revision"], local_dir=folder)
        else:
            module, *arguments = arguments[1:]
            program = module.removeprefix("pipedraft.")
            limits = ["--max-new-tokens", "4"] + ["--limit", "1"] * (program == "eval")
            if program in parsed:
                importlib.import_module(f"{module}.__main__").build_parser().parse_args(arguments)
            else:
                assert call(program, [*arguments, *limits], monkeypatch) == 0
        programs.append(program)
    lines = [line[4:] for line in card.text.splitlines() if line.startswith("    ")]
    code = lines[lines.index("import pipedraft as pd") :]
    names: dict = {}
    exec("\n".join(code[: code.index('print(model.generate("Hello!").text)') + 1]), names)
    assert names["model"].draft.num_stages == 2
    return programs


def test_the_commands_of_a_card_work_as_printed(place, hub, tmp_path, monkeypatch):
    publish_target(place, hub, "lab/tiny")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(place.folder / "gsm8k", tmp_path / "gsm8k")
    assert push(place, monkeypatch, "--target", "lab/tiny") == 0
    assert run_commands(card_of(hub), monkeypatch) == ["inference", "eval"]
    assert (tmp_path / "out" / "eval" / "results.json").is_file()
    hub.create("user/name")
    assert push(place, monkeypatch, "--target", "lab/tiny", "--revision", "two") == 0
    card = card_of(hub, revision="two")
    assert run_commands(card, monkeypatch, parsed={"eval"}) == ["hf", "inference", "eval"]


def test_a_local_target_is_no_base_model_and_the_commands_ask_for_it(place, hub, monkeypatch):
    assert push(place, monkeypatch) == 0
    card = card_of(hub)
    assert card.data.base_model is None and card.data.license is None
    command = commands_of(card)[0].replace("TARGET_FOLDER", str(place.target))
    module, *arguments = shlex.split(command)[2:]
    assert call("inference", [*arguments, "--max-new-tokens", "4"], monkeypatch) == 0


# -- exports --------------------------------------------------------------------------------


def export(place: Place, layout: str, out: Path, monkeypatch, *words: str) -> None:
    arguments = ["export", "--checkpoint", str(place.folder / "eagle3"), "--format", layout]
    assert call("models", [*arguments, "--out", str(out), *words], monkeypatch) == 0


@pytest.mark.parametrize("layout", ["sglang", "speculators"])
def test_an_export_is_pushed_with_the_line_that_launches_it(
    layout, place, hub, tmp_path, monkeypatch, capfd
):
    publish_target(place, hub, "lab/tiny")
    out = tmp_path / "export"
    export(place, layout, out, monkeypatch, "--target", "lab/tiny")
    printed = capfd.readouterr().out.splitlines()[-1]
    assert f"    {printed.replace(str(out), 'THIS_FOLDER')}\n" in (out / "README.md").read_text()
    results = ["--results", str(place.folder / "eval" / "results.json")]
    assert push(place, monkeypatch, *results, draft=str(out)) == 0
    card = card_of(hub)
    assert f"    {printed.replace(str(out), 'user/name')}\n" in card.text
    engine = {"sglang": "sglang", "speculators": "vllm"}[layout]
    assert card.data.tags == ["speculative-decoding", "pipedraft", "eagle3", engine]
    assert (card.data.base_model, card.data.library_name) == ("lab/tiny", layout)
    assert card.data.license == "apache-2.0" and len(card.data.eval_results) == 6
    repository = hub.repositories["user/name"]
    assert set(repository.files()) == NAMES | {"pipedraft.json"}
    config = json.loads(repository.texts()["config.json"])
    assert config["architectures"][0] in ("LlamaForCausalLMEagle3", "Eagle3DraftModel")
    assert load_file(out / "model.safetensors").keys()
    other = {"sglang": "speculators", "speculators": "sglang"}[layout]
    export(place, other, tmp_path / "second", monkeypatch)
    capfd.readouterr()
    assert push(place, monkeypatch, draft=str(tmp_path / "second")) == 2
    one_line(capfd, f"'eagle3' for {layout}", "which is not this one")
    assert push(place, monkeypatch, "--target", "lab/tiny", draft=str(out)) == 2
    one_line(capfd, "--target", "export", "pipedraft models export")


def test_damaged_weights_of_an_export_are_not_uploaded(place, hub, tmp_path, monkeypatch, capfd):
    out = tmp_path / "export"
    export(place, "sglang", out, monkeypatch)
    weights = load_file(out / "model.safetensors")
    weights["norm.weight"][0] = torch.nan
    save_file(weights, out / "model.safetensors")
    capfd.readouterr()
    assert push(place, monkeypatch, draft=str(out)) == 2
    one_line(capfd, "checkpoint: norm.weight in", "is not finite")
    (out / "model.safetensors").write_bytes(b"garbage")
    assert push(place, monkeypatch, draft=str(out)) == 2
    one_line(capfd, "model.safetensors is damaged")
    (out / "model.safetensors").unlink()
    assert push(place, monkeypatch, draft=str(out)) == 2
    one_line(capfd, "model.safetensors is damaged", "No such file")
    assert not hub.repositories
