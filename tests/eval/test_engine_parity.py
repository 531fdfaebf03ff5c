"""`eval parity --engine`: a faithful engine agrees, and every planted fault is named.

The engine is a process answering from a file. Its drafts are computed here, with a head from
changed files: an engine misreading the original files would draft the same tokens.
"""

import json
import sys
from os.path import commonprefix

import pytest
import torch
from command_runs import assert_one_line, call
from own_rounds import own_rounds
from safetensors.torch import load_file, save_file
from scripts import load_script
from tiny_drafts import make_head
from tiny_models import REPOSITORY, byte_tokenizer, tiny_llama, write_rows

from pipedraft.endings import run_command
from pipedraft.errors import UsageError
from pipedraft.eval.arguments import ParityOptions
from pipedraft.eval.openvino_process import rounds_of
from pipedraft.eval.parity_rows import Decoding
from pipedraft.models import load_draft
from pipedraft.models.exchange.export import export
from pipedraft.models.exchange.peers import import_head
from pipedraft.models.target import load_target, load_tokenizer
from pipedraft.pretrained import quieten

LAYERS, DEPTH, TOKENS = 8, 3, 24
LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"
FAKE = """#!{python}
import pathlib, sys
answer = pathlib.Path({answer!r})
request, out = map(pathlib.Path, sys.argv[3:])
pathlib.Path({asked!r}).write_text(request.read_text())
if not answer.exists():
    sys.exit("AssertionError: Tried to load weights of size (1, 2)")
out.write_text(answer.read_text())
"""
ROPE = {"rope_type": "default", "rope_theta": 50.0}
HEADS = {
    "eagle3": lambda target: make_head(target, feature_layers=(2, 4, 5), draft_vocab_size=200),
    "normed": lambda target: make_head(target, fc_norm=True),
    "eagle": lambda target: make_head(target, "eagle"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A target, heads whose draft tokens change under each fault, and a fake engine."""
    quieten()
    folder, tokenizer = tmp_path_factory.mktemp("engine"), byte_tokenizer()
    target = tiny_llama(layers=LAYERS, vocab=len(tokenizer), rope_parameters=ROPE)
    target.lm_head.weight.copy_(target.get_input_embeddings().weight)
    for layer in target.model.layers:  # the last token often comes again
        layer.self_attn.o_proj.weight.mul_(0.4)
        layer.mlp.down_proj.weight.mul_(0.4)
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    for name, make in HEADS.items():
        head = make(target)
        if name == "eagle":
            head.fc.bias.normal_(0, 3)
        elif name == "eagle3":
            head.fc.weight.add_(torch.randn_like(head.fc.weight) * 0.1)
            head.draft_ids.copy_(torch.arange(5, 205))
            head.lm_head.weight.copy_(target.lm_head.weight[5:205])
            head.midlayer.self_attn.o_proj.weight.mul_(4)
        else:
            for norm in head.fc_norm:
                norm.weight.normal_(1, 2)
        (folder / name).mkdir()
        head.save(folder / name)
    write_rows(folder / "own.jsonl", {"prompt": "1 plus 2?"}, {"prompt": "Which birds swim?"})
    fake = folder / "python"
    names = {"python": sys.executable, "answer": str(folder / "answer.json")}
    fake.write_text(FAKE.format(**names, asked=str(folder / "asked.json")))
    fake.chmod(0o755)
    return folder


def answer_of(place, files, *, dtype="float32", rendered=True, tokens=None):
    """Draft as an engine would, with the head described by these files."""
    name = str(place / "target")
    target, tokenizer = load_target(name, dtype=getattr(torch, dtype)), load_tokenizer(name)
    draft = load_draft(str(files), target).to(target.dtype)
    decoding = Decoding(target, tokenizer, draft, depth=DEPTH, max_new_tokens=TOKENS)
    runs, accepted, drafts = [], [0] * DEPTH, 0
    for _, ids, out, found in own_rounds(decoding, place / "own.jsonl"):
        rounds = [
            {"root": root, "drafted": [tokens(draft, x) for x in drafted] if tokens else drafted}
            for root, drafted in found.items()
        ]
        own = ids if rendered else [*ids[:3], *ids[4:]]
        runs.append({"token_ids": out, "rendered": own, "rounds": rounds})
        for at, count in enumerate(decoding.result.position_accepts):
            accepted[at] += count
        drafts += len(decoding.result.round_lengths)
    counts = {"num_drafts": drafts, "accepted": accepted, "runs": runs}
    answer = {"engine": "vLLM 0.0", "dtype": dtype, **counts}
    (place / "answer.json").write_text(json.dumps(answer))


@pytest.fixture
def parity(place, monkeypatch, capsys):
    def run(head, *words, target=True):
        fixed = ["--benchmarks", place / "own.jsonl", "--max-new-tokens", TOKENS]
        fixed += ["--depth", DEPTH, "--engine", "vllm", "--engine-python", place / "python"]
        fixed += ["--target", place / "target"] * target
        words = ["parity", "--checkpoint", head, *fixed, *words]
        status = call("eval", [str(word) for word in words], monkeypatch)
        out, err = capsys.readouterr()
        return status, out, err

    return run


def changed(place, head, layout, weights=None, config=None):
    """Make a checkpoint from an export with changed weights and settings."""
    files = place / f"{head}-changed"
    number = len(list(place.glob("*-changed*")))
    files = files.with_name(f"{files.name}{number}")
    export(place / head, layout, files, target=str(place / "target"))
    held = load_file(files / "model.safetensors")
    save_file(held | (weights or dict)(held), files / "model.safetensors", {"format": "pt"})
    settings = json.loads((files / "config.json").read_text()) | (config or {})
    (files / "config.json").write_text(json.dumps(settings))
    out = files.with_name(f"{files.name}-checkpoint")
    import_head(str(files), str(place / "target"), out)
    return out


def test_a_faithful_engine_agrees(parity, place):
    answer_of(place, place / "eagle3")
    status, out, err = parity(place / "eagle3")
    assert (status, err) == (0, ""), out
    assert "vLLM 0.0: equal at every one of " in out
    assert "2 of 2 outputs are the ones decoded here" in out
    asked = json.loads((place / "asked.json").read_text())
    config = asked["speculative_config"]
    assert config["method"] == "eagle3" and config["num_speculative_tokens"] == DEPTH
    assert asked["prompts"][0]["messages"] == [{"role": "user", "content": "1 plus 2?"}]
    longest = max(len(one["prompt_ids"]) for one in asked["prompts"]) + TOKENS
    assert asked["max_model_len"] >= longest + 2 * DEPTH  # or vLLM stops drafting before the end


def without_missed_drafts(place):
    """Let the answer name accepted draft tokens only, as OpenVINO's does."""
    answer = json.loads((place / "answer.json").read_text())
    for run in answer["runs"]:
        ids = [*run["rendered"], *run["token_ids"]]
        for one in run["rounds"]:
            own = ids[one["root"] + 1 :]
            accepted = [*commonprefix([one["drafted"], own])]
            is_whole = len(accepted) < min(DEPTH, len(own))
            one |= {"drafted": accepted, "missed": own[len(accepted)] if is_whole else None}
    (place / "answer.json").write_text(json.dumps(answer))


def test_an_engine_that_names_no_drafts_agrees(parity, place):
    answer_of(place, place / "eagle3")
    without_missed_drafts(place)
    status, out, err = parity(place / "eagle3", "--engine", "openvino")
    assert (status, err) == (0, ""), out
    assert "equal at every one of " in out


def test_a_layer_off_by_one_is_found_without_the_drafts(parity, place):
    """OpenVINO's default layers are one higher than the authors'."""
    answer_of(place, changed(place, "eagle3", "speculators", config={LAYERS_KEY: [3, 5, 6]}))
    without_missed_drafts(place)
    status, out, _ = parity(place / "eagle3", "--engine", "openvino")
    assert status == 1 and "layer off by one" in out, out


def test_starts_that_accept_fewer_are_counted(parity, place):
    answer_of(place, place / "eagle3")
    answer = json.loads((place / "answer.json").read_text())
    for starts, status in (([9, 9, 9], 0), ([9, 0, 9], 1)):
        (place / "answer.json").write_text(json.dumps(answer | {"starts": starts}))
        found, out, _ = parity(place / "eagle3", "--engine", "openvino", "--starts", 3)
        assert found == status and f"{min(starts)} to 9 draft tokens in each of 3 pipelines" in out
        assert json.loads((place / "asked.json").read_text())["starts"] == 3
    found, out, err = parity(place / "eagle3", "--starts", 3)
    assert_one_line(found, out, err, ["--starts: 3", "openvino", "vllm"])


@pytest.mark.parametrize("words", [("--starts", "3"), ("--engine-python", "bin/python")])
def test_an_engines_options_without_an_engine_are_refused(words):
    with pytest.raises(UsageError, match=f"{words[0]}: '{words[1]}' without --engine"):
        ParityOptions.read(["--checkpoint", "head", *words])


def test_openvinos_rounds_are_read_off_its_steps():
    # 4 draft tokens: the prompt's step, all accepted, one accepted, none, then the output's end.
    rounds = rounds_of([1, 2], [10, 11, 12, 13, 14, 15, 16, 17, 18, 19], [1, 5, 2, 1, 1], 4)
    assert [(one["root"], one["drafted"], one["missed"]) for one in rounds] == [
        (2, [11, 12, 13, 14], None),
        (7, [16], 17),
        (9, [], 18),
        (10, [], None),
    ]


def reordered(weights):
    parts = weights["fc.weight"].chunk(3, 1)
    return {"fc.weight": torch.cat([parts[1], parts[2], parts[0]], 1)}


FAULTS = {
    "layer off by one": ("eagle3", {"config": {"eagle_aux_hidden_state_layer_ids": [3, 5, 6]}}),
    "order of layers": ("eagle3", {"weights": reordered}),
    "norm": ("normed", {}),
    "bias": ("eagle", {"weights": lambda x: {"fc.bias": x["fc.bias"] * 0}}),
}


@pytest.mark.parametrize("what", FAULTS)
def test_faults_of_what_an_engine_reads_are_named(parity, place, what):
    head, change = FAULTS[what]
    layout = "sglang" if head == "eagle" else "speculators"
    if what == "norm":
        change = {"weights": lambda x: {n: w * 0 + 1 for n, w in x.items() if "fc_norm" in n}}
    answer_of(place, changed(place, head, layout, **change))
    status, out, _ = parity(place / head)
    _, _, difference = out.partition("vLLM 0.0: differ ")
    assert status == 1 and f" {what}: " in difference.splitlines()[0], out


def test_faults_of_positions_maps_dtype_and_prompts_are_named(parity, place, monkeypatch):
    def named(what):
        status, out, _ = parity(place / "eagle3")
        first = out.partition("vLLM 0.0: differ ")[2].partition("\n")[0]
        assert status == 1 and f"{what}: " in first, out

    usual = {"rope_type": "default", "rope_theta": 10000.0}
    layer = json.loads((place / "eagle3" / "config.json").read_text())
    other = place / "usual"
    other.mkdir()
    (other / "model.safetensors").write_bytes((place / "eagle3/model.safetensors").read_bytes())
    layer["layer"]["rope_parameters"] = usual
    (other / "config.json").write_text(json.dumps(layer))
    answer_of(place, other)
    named("position")
    ids = load_file(place / "eagle3" / "model.safetensors")["draft_ids"].tolist()
    answer_of(place, place / "eagle3", tokens=lambda draft, token: ids.index(token))
    named("vocabulary map")
    answer_of(place, place / "eagle3", rendered=False)
    named("template")
    answer_of(place, place / "eagle3", dtype="bfloat16")
    named("dtype")


def test_a_peers_files_are_run_as_they_are(parity, place):
    export(place / "eagle3", "speculators", place / "peer", target=str(place / "target"))
    answer_of(place, place / "eagle3")
    status, out, _ = parity(place / "peer")
    assert status == 0 and "vLLM 0.0: equal" in out
    asked = json.loads((place / "asked.json").read_text())
    assert asked["speculative_config"]["model"] == str(place / "peer")
    status, out, err = parity(place / "peer", target=False)
    assert_one_line(status, out, err, ["--target: missing", "no checkpoint of pipedraft"])


def test_an_engine_that_refuses_is_one_line(parity, place):
    (place / "answer.json").unlink(missing_ok=True)
    status, out, err = parity(place / "eagle3")
    assert (status, out) == (1, "")
    assert err == "error: vllm: AssertionError: Tried to load weights of size (1, 2)\n"
    status, out, err = parity(place / "eagle3", "--engine-python", place / "nowhere")
    assert_one_line(status, out, err, ["--engine-python", "nowhere", "make engines"])


def test_planted_faults_run_up_to_the_engine(tmp_path, monkeypatch, capsys):
    script = load_script("benchmarks/planted_faults.py")
    words = ["--only", "planted: layer", "--limit", "1", "--engine-python", "nowhere"]
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(sys, "argv", ["planted_faults.py", *words, "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        run_command(script.main)
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1 and "make engines makes" in said
