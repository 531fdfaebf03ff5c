"""``import pipedraft`` offers decoding, transformers' own entry point, training and evaluation."""

import copy
import json
import os
import re
import subprocess
import sys

import datasets
import pytest
import torch
from tiny_models import REPOSITORY
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.candidate_generator import AssistedCandidateGenerator

import pipedraft
from pipedraft.eval.arguments import EvalOptions
from pipedraft.eval.compare import Evaluated
from pipedraft.files import to_json
from pipedraft.inference.custom_generate import sampling_settings
from pipedraft.models.target import load_target

TARGET = str(REPOSITORY / "assets" / "target")
HEADS = REPOSITORY / "assets" / "heads"
QUESTION = "How many legs do 12 cats have?"


@pytest.fixture(scope="module")
def model():
    return pipedraft.load(TARGET, draft=HEADS / "eagle3")


@pytest.fixture(scope="module")
def plain(model) -> list[int]:
    """Answer from the target alone, by transformers."""
    ids = torch.tensor([model.encode(QUESTION)])
    return model.target.generate(ids, max_new_tokens=32, do_sample=False)[
        0, ids.shape[1] :
    ].tolist()


def test_the_names_are_there_before_torch_is():
    code = """if True:
        import sys, pipedraft
        names = {"load", "train_head", "evaluate", "custom_generate", "DecodeConfig"}
        assert names <= {*dir(pipedraft)}
        assert not {"torch", "transformers", "datasets", "yaml"} & {*sys.modules}"""
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        pipedraft.lod  # noqa: B018


# -- decoding -------------------------------------------------------------------------------


def test_an_answer_says_where_each_token_came_from(model, plain):
    pieces: list[str] = []
    out = model.generate(QUESTION, stages=4, max_new_tokens=32, stream=pieces.append)
    assert out.ids == plain == [token.id for token in out.tokens]
    assert "".join(pieces) == out.text == "".join(token.text for token in out.tokens)
    assert sum(token.drafted for token in out.tokens) == out.result.num_tested
    assert sum(token.accepted for token in out.tokens) == out.result.num_accepted > 4
    first, second = out.tokens[:2]
    assert (first.round, first.position, first.drafted) == (0, 0, False)
    assert (second.round, second.position) == (1, 1)
    assert out.tokens[-1].round == len(out.result.round_lengths)
    assert out.tau > 1 and 0 < out.alpha <= 1 and out.speedup > 1 and out.tokens_per_second > 0
    assert out.equivalent_acceptance_length == out.result.equivalent_acceptance_length
    assert len(repr(out)) < 200 and "alpha" in repr(out) and str(out) == out.text
    html = out._repr_html_()
    assert html.count('title="round') == len(out.tokens) and "accepted draft token" in html


def test_the_timeline_is_drawn_of_the_same_decode(model, plain, tmp_path):
    out = model.generate(QUESTION, stages=4, max_new_tokens=16)
    picture = out.timeline(num_steps=6)
    assert "stage 4" in picture and "in these 6 steps" in picture
    assert picture._repr_svg_().startswith("<svg")
    picture.save(tmp_path / "picture.svg")
    assert (tmp_path / "picture.svg").read_text() == picture


@pytest.mark.parametrize("draft", ["spd_n4", "ngram", "suffix", None, "object"])
def test_every_draft_gives_the_targets_own_answer(model, plain, draft):
    found = HEADS / draft if draft == "spd_n4" else model.draft if draft == "object" else draft
    other = pipedraft.load(model.target, draft=found)
    prompt = [{"role": "user", "content": QUESTION}]
    out = other.generate(prompt, max_new_tokens=32)
    assert out.ids == plain
    assert out.schedule == {"spd_n4": "spd", None: "autoregressive"}.get(draft, "eagle")


def test_sampling_takes_the_schedules_settings_and_ids(model):
    prompt = model.encode(QUESTION)
    settings = {"temperature": 0.8, "top_p": 0.9, "max_new_tokens": 8, "tree": "chain:3"}
    outs = [model.generate(prompt, seed=seed, **settings) for seed in (1, 1, 2)]
    assert outs[0].ids == outs[1].ids != outs[2].ids


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"prompt": " "}, "prompt: ' ' is empty"),
        ({"prompt": []}, "prompt: an empty list"),
        ({"prompt": [1.5]}, "prompt: a list of float; give text"),
        ({"schedule": "egle"}, "schedule: 'egle' is unknown; did you mean 'eagle'"),
        ({"tree_width": 2}, "tree_width: schedule 'eagle' has no such setting"),
        (
            {"temprature": 0.8},
            "settings: 'temprature' is unknown; did you mean 'temperature'",
        ),
        ({"tree": "bush"}, "tree: 'bush' is no tree"),
    ],
)
def test_bad_arguments_are_refused_by_name(model, arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        model.generate(**{"prompt": QUESTION} | arguments)


def test_a_loaded_target_has_its_device(model):
    with pytest.raises(ValueError, match="dtype: 'bfloat16', but the target is loaded"):
        pipedraft.load(model.target, dtype="bfloat16")
    for loaded in ("ngram", None, model.draft):
        with pytest.raises(ValueError, match="draft_dtype: 'int8', but no weights are loaded"):
            pipedraft.load(model.target, loaded, draft_dtype="int8")
    with pytest.raises(ValueError, match="dtype: 'int5' is no dtype here; give auto, float32"):
        pipedraft.load("assets/target", dtype="int5")


def test_a_schedule_may_be_named_in_a_configuration():
    config = pipedraft.DecodeConfig(schedule="eagle", num_stages=2)
    assert config == pipedraft.DecodeConfig.of("eagle", num_stages=2)
    assert pipedraft.DecodeConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ValueError, match="schedule: 'egle' is unknown"):
        pipedraft.DecodeConfig(schedule="egle")


# -- transformers' door ---------------------------------------------------------------------


def test_generate_of_transformers_gives_the_same_ids(model):
    tokenizer = copy.deepcopy(model.tokenizer)
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    inputs = tokenizer(["Once upon a time", "The cat"], return_tensors="pt", padding=True)
    inputs.pop("token_type_ids", None)
    loop = pipedraft.custom_generate(HEADS / "spd_n4")
    expected = model.target.generate(**inputs, max_new_tokens=20, do_sample=False)
    found = model.target.generate(
        **inputs, max_new_tokens=20, do_sample=False, custom_generate=loop
    )
    assert found.equal(expected)
    assert [result.num_stages for result in loop.results] == [4, 4]


def first_layers(target, num_layers: int):
    """Return a language model made from a target's first layers."""
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    assistant = type(target)(config)
    assistant.load_state_dict(target.state_dict(), strict=False)
    assistant.generation_config = copy.deepcopy(target.generation_config)
    return assistant.eval().requires_grad_(False)


def test_an_assistant_model_accepts_as_in_transformers(model, monkeypatch):
    """transformers drafts before it has its first token, so we append this token to its prompt."""
    assistant = first_layers(model.target, 14)
    settings = assistant.generation_config
    settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = 3, "constant"
    settings.assistant_confidence_threshold = 0.0
    accepted: list[int] = []
    update = AssistedCandidateGenerator.update_candidate_strategy

    def count(self, input_ids, scores, num_matches):
        accepted.append(int(num_matches))
        return update(self, input_ids, scores, num_matches)

    prompt = torch.tensor([model.encode(QUESTION)])
    loop = pipedraft.custom_generate(assistant, schedule="eagle", tree="chain:3")
    greedy = {"do_sample": False}
    found = model.target.generate(prompt, max_new_tokens=33, custom_generate=loop, **greedy)
    monkeypatch.setattr(AssistedCandidateGenerator, "update_candidate_strategy", count)
    known = found[:, : prompt.shape[1] + 1]
    expected = model.target.generate(known, max_new_tokens=32, assistant_model=assistant, **greedy)
    assert found.equal(expected)
    (result,) = loop.results
    ours = [
        length - (end != "a")
        for length, end in zip(result.round_lengths, result.round_ends, strict=True)
    ]
    assert ours[:-1] == accepted[: len(ours) - 1] and sum(ours) > 0
    assert len(accepted) - len(ours) in (0, 1)  # the length may cut the last one


def test_settings_of_generate_are_mapped(model):
    config = copy.deepcopy(model.target.generation_config)
    config.update(do_sample=True, temperature=0.7, top_k=20, top_p=0.9, min_p=None)
    torch.manual_seed(3)
    settings = sampling_settings(config)
    torch.manual_seed(3)
    assert sampling_settings(config) == settings
    settings.pop("seed")
    typical = {"typical_p": 1.0} if config.typical_p is not None else {}
    assert settings == {"temperature": 0.7, "top_k": 20, "top_p": 0.9} | typical


class Nothing(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


class AfterThree(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full(input_ids.shape[:1], input_ids.shape[1] >= self.length)


def test_what_generate_asks_is_done_or_refused(model):
    prompt = torch.tensor([model.encode(QUESTION)])
    loop = pipedraft.custom_generate("ngram")

    def generate(**settings):
        return model.target.generate(prompt, max_new_tokens=12, custom_generate=loop, **settings)

    stop = AfterThree(prompt.shape[1] + 3)
    found = generate(stopping_criteria=[stop], return_dict_in_generate=True)
    assert found.sequences.shape[1] == prompt.shape[1] + 3
    with pytest.raises(ValueError, match="logits_processor: RepetitionPenaltyLogitsProcessor"):
        generate(repetition_penalty=1.2)
    with pytest.raises(ValueError, match="logits_processor: Nothing"):
        generate(logits_processor=[Nothing()])
    with pytest.raises(ValueError, match="num_beams: 2 is not supported"):
        generate(num_beams=2)
    with pytest.raises(ValueError, match="output_scores: True is not supported"):
        generate(return_dict_in_generate=True, output_scores=True)


# -- training and evaluation ----------------------------------------------------------------

CHAT = [
    [
        {"role": "user", "content": f"What is {i} plus 1?"},
        {"role": "assistant", "content": f"{i} plus 1 is {i + 1}."},
    ]
    for i in range(12)
]


@pytest.fixture
def in_fp32(monkeypatch, tmp_path):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


def test_a_head_is_trained_on_what_is_in_memory(in_fp32, model, tmp_path):
    settings = {"max_steps": 1, "batch_tokens": 256, "optim": {"lr": 1e-3}}
    dataset = datasets.Dataset.from_list([{"messages": chat} for chat in CHAT])
    metrics = []
    for name, rows in (("list", CHAT), ("dataset", dataset)):
        head = pipedraft.train_head(
            "eagle3", target=model, dataset=rows, output_dir=tmp_path / name, **settings
        )
        assert head.folder == tmp_path / name / "best"
        metrics.append(head.metrics["loss"])
    assert metrics[0] == metrics[1]
    names = [path.name for path in head.export("speculators", tmp_path / "exported")]
    assert "config.json" in names
    out = pipedraft.load(model.target, draft=head).generate(QUESTION, max_new_tokens=4)
    assert len(out.tokens) == 4
    with pytest.raises(ValueError, match="format: 'onnx' is unknown"):
        head.export("onnx", tmp_path / "other")
    with pytest.raises(ValueError, match="batch_token"):
        pipedraft.train_head(
            "eagle3", target=model, dataset=CHAT, output_dir=tmp_path, batch_token=1
        )


@pytest.mark.all
def test_every_process_of_a_launch_makes_the_call(tmp_path):
    """Run the script in docs/python.md with the launcher itself."""
    page = (REPOSITORY / "docs" / "python.md").read_text()
    script = re.search(r'^```python title="train.py"\n(.*?)^```$', page, re.M | re.S)
    (tmp_path / "train.py").write_text(script[1])
    (tmp_path / "assets").symlink_to(REPOSITORY / "assets")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2"]
    command += ["--config_file", str(REPOSITORY / "configs/accelerate/ddp.yaml")]
    command += ["--main_process_port", "0", "train.py"]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "HF_DATASETS_CACHE": str(tmp_path)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    # The processes share one pipe, and print words in turn.
    assert done.stdout.count("out/launched/best") == 2
    first, second = re.findall(r"\{'loss': [^}]*\}", done.stdout)
    assert first == second
    assert "'decoded_acceptance_length': " in first
    assert done.stderr.count("on cpu x 2") == done.stderr.count("best: step ") == 1


def test_an_object_stands_for_its_folder_only_while_it_is_the_same(tmp_path):
    target = load_target(TARGET)
    target.get_decoder().norm.weight.data.mul_(2)
    with pytest.raises(ValueError, match="this object is no longer what .* holds"):
        pipedraft.train_head("eagle3", target=target, dataset=CHAT, output_dir=tmp_path / "out")


def test_an_evaluation_is_compared_with_another(model, tmp_path, capsys):
    (tmp_path / "own.jsonl").write_text(json.dumps({"prompt": QUESTION}) + "\n")
    settings = {"benchmarks": [tmp_path / "own.jsonl"], "max_new_tokens": 8, "limit": 1}
    report = pipedraft.evaluate(model, out=tmp_path / "a", stages=4, **settings)
    other = pipedraft.evaluate(model, out=tmp_path / "b", schedule=["naive_pp"], **settings)
    assert capsys.readouterr().out == ""
    assert to_json(report.entries) == to_json(Evaluated.read(report.folder).entries)
    manifest = json.loads((report.folder / "manifest.json").read_text())
    assert manifest["command"].startswith("python -m pipedraft.eval --target ")
    assert report.entries[0].method == "autoregressive" and "eagle3" in repr(report)
    assert (tmp_path / "a" / "report.html").is_file()
    assert f"{tmp_path}/a compared with {tmp_path}/b" in report.compare(other)
    with pytest.raises(ValueError, match="model: its draft has no name"):
        pipedraft.evaluate(pipedraft.load(model.target), benchmarks=["gsm8k"])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"limt": 1}, "limt: unknown; did you mean limit?"),
        ({"limit": 0}, "--limit: 0; give at least 1"),
        ({"limit": "two"}, "--limit: 'two' is not a whole number"),
        ({"temperature": [0, -1]}, "--temperature: -1 is not a temperature; give 0"),
        ({"bitwise": "no"}, "--bitwise: 'no'; give True or False"),
        ({"tree": ["chain:3", "bush"]}, "tree: 'bush' is no tree"),
        ({"draft": "ngram"}, "--draft: not allowed with --checkpoint"),
        ({"backend": "process"}, "backend: 'process' starts processes"),
    ],
)
def test_options_of_an_evaluation_are_checked_like_words(options, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        pipedraft.evaluate("head", benchmarks=["gsm8k"], out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_values_and_words_make_the_same_options():
    line = "--checkpoint a --benchmarks b,c --out d --temperature 0,1 --tree-width 1,4 --bitwise"
    given = {"checkpoint": "a", "benchmarks": ("b", "c"), "out": "d", "limit": None}
    given |= {"temperature": [0, 1], "tree_width": [1, 4], "bitwise": True, "score": False}
    assert EvalOptions.of(given) == EvalOptions.read(line.split())


@pytest.mark.parametrize(
    "method, fields, message",
    [
        ("eagel3", {}, "method: 'eagel3' is unknown; did you mean 'eagle3'?"),
        ("eagle3", {"optim": {"lr": -1}}, "optim.lr: -1.0; give above 0"),
        ("eagle3", {"optim": {"rate": 1}}, "optim.rate: unknown"),
        ("eagle3", {"optim": 3}, "optim: 3 does not fit; give a mapping"),
        ("eagle3", {"seed": None}, "seed: null; give a value"),
        ("eagle3", {"model": {"num_step": 3}}, "did you mean model.num_steps?"),
    ],
)
def test_fields_of_a_run_are_checked_like_words(method, fields, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        pipedraft.train_head(
            method, target=TARGET, dataset="a.jsonl", output_dir=tmp_path, **fields
        )


@pytest.mark.parametrize("method, fields", [("eagle3", {"num_steps": 2}), ("spd", {})])
def test_a_head_is_trained_in_a_loop_of_ones_own(method, fields, in_fp32, tmp_path):
    rows = [
        [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "Yes."}]
        for i in range(9)
    ]
    new = pipedraft.new_head(
        method, target=TARGET, dataset=rows, data={"valid_fraction": 0.2}, **fields
    )
    optimizer = torch.optim.AdamW(new.objective.parameters(), lr=3e-3)
    losses = []
    for epoch in range(3):
        (batch,) = new.batches(512, epoch=epoch)
        assert batch.ids_BT.shape[0] == len(new.data.train) and len(new.data.valid)
        losses.append(new.loss(batch))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    (packed,), (valid,) = new.batches(512, packing=True), new.batches(512, valid=True)
    # SPD draws how far the pipeline is filled: other numbers in each call.
    assert torch.equal(new.loss(batch), new.loss(batch)) == (method != "spd")
    same = [new.loss(x, torch.Generator().manual_seed(1)) for x in (batch, packed)]
    torch.testing.assert_close(*same, rtol=1e-3, atol=0)
    assert losses[2] < losses[0] and valid.ids_BT.shape[0] == len(new.data.valid)
    decoded = pipedraft.load(TARGET, draft=new.save(tmp_path / "head")).generate(
        "3?", max_new_tokens=8
    )
    assert decoded.text == pipedraft.load(TARGET).generate("3?", max_new_tokens=8).text


def test_fields_of_a_new_head_are_checked(tmp_path):
    with pytest.raises(ValueError, match="did you mean model.num_steps"):
        pipedraft.new_head("eagle3", target=TARGET, dataset="a.jsonl", num_step=3)


# -- documentation --------------------------------------------------------------------------


def cells_of(name: str) -> list[str]:
    """Code cells of a page or notebook."""
    text = (REPOSITORY / "docs" / name).read_text()
    if name.endswith(".md"):
        return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    cells = json.loads(text)["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.parametrize("name", ["python.md", "python.ipynb"])
def test_the_documented_code_runs(name, in_fp32, monkeypatch, tmp_path):
    (tmp_path / "assets").symlink_to(REPOSITORY / "assets")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "chdir", lambda folder: None)
    cells, names = cells_of(name), {"__name__": "notebook"}
    assert len(cells) > 2
    for cell in cells:
        exec(compile(cell, name, "exec"), names)
    assert names["out"].tokens and names["head"].metrics
