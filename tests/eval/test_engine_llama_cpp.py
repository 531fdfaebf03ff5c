"""`eval parity --engine llama.cpp`: a server's answers and its log are compared with ours.

The server is a program with llama-server's options, routes and log lines, which answers with the
tokens and draft tokens that a head drafts here.
"""

import json
import sys

import pytest
import torch
from command_runs import assert_one_line, call
from own_rounds import own_rounds
from scripts import load_script
from tiny_drafts import make_head
from tiny_models import tiny_llama, write_rows

pytest.importorskip("gguf")
from gguf_runs import write_gguf

from pipedraft.endings import run_command
from pipedraft.eval.llama_cpp_process import rounds_of
from pipedraft.eval.parity_rows import Decoding
from pipedraft.models import load_draft
from pipedraft.models.exchange.export import export
from pipedraft.models.target import load_target, load_tokenizer
from pipedraft.pretrained import quieten

DEPTH, TOKENS = 3, 24
SERVER = """#!{python}
import http.server, json, sys
words = dict(zip(sys.argv[1:], sys.argv[2:]))
held = json.load(open({answers!r}))
json.dump(sys.argv, open({asked!r}, "w"))
log = open(words["--log-file"], "w", buffering=1)
if held is None:
    log.write("0.01.234 E llama_model_load: error loading model: missing tensor 'fc.weight'\\n")
    sys.exit(1)

class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.say({{"/health": {{"status": "ok"}}, "/props": {{"build_info": "b1"}}}}[self.path])

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/apply-template":
            return self.say({{"prompt": body["messages"][0]["content"]}})
        if self.path == "/tokenize":
            return self.say({{"tokens": held["prompts"][body["content"]]}})
        run = held["runs"][json.dumps(body["prompt"])]
        for drafted, size in run["rounds"]:
            for place, token in enumerate(drafted):
                log.write(f"draft candidate   0, pos {{place:3d}}: {{token:6d}} (0.9) 'x'\\n")
                log.write(f"draft candidate   1, pos {{place:3d}}:      1 (0.1) 'y'\\n")
            counts = f"ids.size={{size}}, n_draft={{len(drafted)}}"
            log.write(f"add accepted tokens: sampled=7, {{counts}}\\n")
        timings = {{"draft_n": sum(len(drafted) for drafted, _ in run["rounds"])}}
        self.say({{"tokens": run["tokens"], "timings": timings}})

    def say(self, answer):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_):
        pass

http.server.HTTPServer(("127.0.0.1", int(words["--port"])), Answers).serve_forever()
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A target's GGUF file, a head for it, and the server."""
    quieten()
    folder = tmp_path_factory.mktemp("server")
    model = tiny_llama(layers=8, vocab=300)
    model.lm_head.weight.copy_(model.get_input_embeddings().weight)
    for layer in model.model.layers:  # the last token often comes again
        layer.self_attn.o_proj.weight.mul_(0.4)
        layer.mlp.down_proj.weight.mul_(0.4)
    write_gguf(folder / "target.gguf", model)
    (folder / "head").mkdir()
    head = make_head(load_target(str(folder / "target.gguf")), feature_layers=(2, 4, 5))
    head.fc.weight.add_(torch.randn_like(head.fc.weight) * 0.1)
    head.lm_head.weight.copy_(model.lm_head.weight)
    head.save(folder / "head")
    write_rows(folder / "own.jsonl", {"prompt": "1 plus 2?"}, {"prompt": "Which birds swim?"})
    names = {name: str(folder / f"{name}.json") for name in ("answers", "asked")}
    (folder / "llama-server").write_text(SERVER.format(python=sys.executable, **names))
    (folder / "llama-server").chmod(0o755)
    return folder


def answers_of(place, change=lambda token: token):
    """Return what the server has to answer to draft as the head does."""
    target = load_target(str(place / "target.gguf"), dtype=torch.float32)
    tokenizer = load_tokenizer(str(place / "target.gguf"))
    draft = load_draft(str(place / "head"), target)
    decoding = Decoding(target, tokenizer, draft, depth=DEPTH, max_new_tokens=TOKENS)
    prompts, runs = {}, {}
    for prompt, ids, out, rounds in own_rounds(decoding, place / "own.jsonl"):
        found = [[change(token) for token in tokens] for tokens in rounds.values()]
        sizes = decoding.result.round_lengths
        runs[json.dumps(ids)] = {"tokens": out, "rounds": [*zip(found, sizes, strict=True)]}
        prompts[prompt.messages()[0]["content"]] = ids
    return {"prompts": prompts, "runs": runs}


@pytest.fixture
def parity(place, monkeypatch, capsys):
    def run(answers, *words):
        (place / "answers.json").write_text(json.dumps(answers))
        fixed = ["--target", place / "target.gguf", "--benchmarks", place / "own.jsonl"]
        fixed += ["--max-new-tokens", TOKENS, "--depth", DEPTH, "--engine", "llama.cpp"]
        fixed += ["--engine-python", place / "llama-server", *words]
        words = ["parity", "--checkpoint", place / "head", *fixed]
        status = call("eval", [str(word) for word in words], monkeypatch)
        return status, *capsys.readouterr()

    return run


def test_a_server_with_the_same_draft_tokens_agrees(parity, place):
    status, out, err = parity(answers_of(place))
    assert status == 0, out + err
    assert "llama.cpp b1: equal at every one of " in out
    assert "2 of 2 outputs are the ones decoded here" in out
    words = json.loads((place / "asked.json").read_text())
    assert words[words.index("--spec-type") + 1] == "draft-eagle3"
    assert words[words.index("-m") + 1] == str(place / "target.gguf")
    assert {"-ctk", "-ctv", "-ctkd", "-ctvd"} <= {*words}  # the default caches are float16


def test_exported_files_of_another_format_are_refused(parity, place, tmp_path):
    export(place / "head", "sglang", tmp_path / "files", target=str(place / "target.gguf"))
    status, out, err = parity(None, "--exported", tmp_path / "files")
    assert_one_line(status, "", err, ["--exported", "files'", "--engine llama.cpp", "GGUF"])


def test_other_draft_tokens_and_prompts_are_named(parity, place):
    status, out, _ = parity(answers_of(place, lambda token: (token + 1) % 300))
    assert status == 1 and "unexplained" in out, out
    answers = answers_of(place)
    answers["prompts"] = {text: ids[1:] for text, ids in answers["prompts"].items()}
    status, out, _ = parity(answers)
    assert status == 1 and "template" in out, out


def test_a_server_that_ends_is_one_line(parity, place):
    status, out, err = parity(None)
    assert (status, out) == (1, "")
    assert err == (
        "error: llama.cpp: llama_model_load: error loading model: missing tensor 'fc.weight'\n"
    )
    status, out, err = parity(None, "--engine-python", place / "nowhere")
    assert_one_line(status, out, err, ["--engine-python", "nowhere", "the server of llama.cpp"])


def test_a_head_that_the_format_cannot_hold_is_refused_by_name(parity, place):
    target = load_target(str(place / "target.gguf"))
    (place / "normed").mkdir()
    make_head(target, fc_norm=True).save(place / "normed")
    status, out, err = parity(None, "--checkpoint", place / "normed")
    assert_one_line(status, out, err, ["--engine: llama.cpp", "model.fc_norm True"])
    assert "--format" not in err


def test_the_speed_is_measured_in_turn(place, monkeypatch, capsys):
    (place / "answers.json").write_text(json.dumps(answers_of(place)))
    program = place / "out/engines/llama_cpp/bin"
    program.mkdir(parents=True)
    (program / "llama-server").symlink_to(place / "llama-server")
    words = ["--target", "target.gguf", "--head", "head", "--benchmarks", "own.jsonl"]
    words += ["--max-new-tokens", str(TOKENS), "--repeats", "2", "--engines", "vllm,llama.cpp"]
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["engines_speed.py", *words])
    script = load_script("benchmarks/engines_speed.py")
    pinned = []
    monkeypatch.setattr(script.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(script.os, "sched_setaffinity", lambda _, cores: pinned.append(cores))
    run_command(script.main)
    out, err = capsys.readouterr()
    assert "vllm is skipped: no out/engines/vllm/bin/python" in err
    *table, last = out.splitlines()
    assert [line.split()[0] for line in table[2:]] == ["pipedraft", "llama.cpp"]
    assert all(line.endswith("4/4") for line in table[2:])  # two repeats, without and with
    assert json.loads(last)["llama.cpp"].keys() == {"tokens_s", "tokens_s_draft"}
    assert pinned == [{0}]
    sys.argv.extend(["--core", "2"])
    with pytest.raises(SystemExit):
        run_command(script.main)
    assert "--core: 2 may not be used; choose from 0, 1" in capsys.readouterr().err


def test_rounds_are_read_off_the_log():
    """Two prompts: the first round accepts one of three, a cut draft ends the second output."""

    def candidates(*tokens):
        name = "draft candidate   {}, pos   {}: {:6d} (0.500) 'x'".format
        return [name(rank, i, token) for i, token in enumerate(tokens) for rank in (0, 1)]

    size = "add accepted tokens: sampled=9, ids.size=2, n_draft={}".format
    lines = [*candidates(5, 6, 7), size(3), *candidates(8, 9, 4), size(1)]
    assert rounds_of("\n".join(lines), [10, 20], [3, 1]) == [
        ([{"root": 10, "drafted": [5, 6, 7]}], [1]),
        ([{"root": 20, "drafted": [8]}], [1]),
    ]
