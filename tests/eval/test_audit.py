"""`pipedraft audit`: a lossless server passes, and five planted faults are found.

The server speculates with one draft token over a small known law, by the papers' rule or by a
faulty one.
"""

import json
import re
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from command_runs import assert_one_line, call
from tiny_models import write_rows

from pipedraft.data_recipes.answers import RowFailed
from pipedraft.data_recipes.chat_client import ChatServer, TryAgain
from pipedraft.eval.audit_answers import Answer, read_answer
from pipedraft.eval.audit_result import first_difference

WORDS = ["a", "b", "c", "d", "<end>"]
END = len(WORDS) - 1
LAWS = np.random.default_rng(3)
LOGITS = LAWS.normal(0, 1.2, (5, 5))
LOGITS[:, END] -= 1.5
DRAFT = LOGITS + LAWS.normal(0, 2.5, (5, 5))
URLS = ["--endpoint", "http://127.0.0.1:1", "--baseline", "http://127.0.0.1:2"]


def law(logits, temperature):
    weights = np.exp((logits - logits.max()) / temperature)
    return weights / weights.sum()


def decode(prompt, temperature, seed, size, fault):
    """Tokens of one answer; the last one is END if the answer has ended."""
    rng, out, rows = np.random.default_rng(seed), [], len(prompt) % 4
    while len(out) < size:
        back = 2 if fault == "stale row" and len(out) > 2 else 1
        row = ((out[-back] if out else rows) + len(out)) % 5
        if not temperature:
            token = int(LOGITS[row].argmax()) if len(out) < 6 else int(LOGITS[row, :END].argmax())
        else:
            spread = temperature * (0.5 if fault == "temperature" else 1)
            p, q = law(LOGITS[row], spread), law(DRAFT[row], spread)
            token = int(rng.choice(5, p=q))
            ratio = p[token] if fault == "q forgotten" else p[token] / q[token]
            if rng.random() >= ratio:
                rest = p if fault == "residual forgotten" else np.maximum(p - q, 0)
                token = int(rng.choice(5, p=rest / rest.sum()))
        if token == END and fault == "eos ignored":
            token = 0
        out.append(token)
        if token == END:
            break
    return out


def complete(body, fault):
    said = body["messages"][-1]["content"]
    size, temperature = body["max_tokens"], body["temperature"]
    out = decode(said, temperature, body.get("seed", 0), size, fault)
    ended = out[-1] == END
    content = []
    for place, token in enumerate(out):  # the end, too, as vLLM lists it
        row = ((out[place - 1] if place else len(said) % 4) + place) % 5
        known = np.log(law(LOGITS[row], 1))
        best = [{"token": word, "logprob": x} for word, x in zip(WORDS, known, strict=True)]
        content.append({"token": WORDS[token], "logprob": known[token], "top_logprobs": best})
    message = {"content": "".join(WORDS[token] for token in out if token != END)}
    choice = {"message": message, "finish_reason": "stop" if ended else "length"}
    return {"choices": [choice | {"logprobs": {"content": content}}]}


@pytest.fixture
def audit(tmp_path, monkeypatch, capsys):
    def run(fault, *words):
        async def answer(self, path, body):
            if path != "/chat/completions":
                raise RowFailed("HTTP 404")
            models.add(body["model"])
            seeds.update([body["seed"]] if "seed" in body else [])
            is_audited = self.address.endswith(":1")
            return complete(body, fault if is_audited else "")

        if fault is not None:
            monkeypatch.setattr(ChatServer, "post", answer)
        prompts = write_rows(tmp_path / "own.jsonl", *({"prompt": "x" * n} for n in range(1, 5)))
        fixed = ["--benchmarks", prompts, "--model", "m", "--samples", "100"]
        fixed += ["--max-new-tokens", "12", "--out", str(tmp_path / "audit")]
        fixed += [] if "--endpoint" in words else URLS
        status = call("audit", [*fixed, *words], monkeypatch)
        out, err = capsys.readouterr()
        return status, out, err, tmp_path / "audit"

    seeds, models = run.seeds, run.models = Counter(), set()
    return run


def test_a_lossless_server_passes_and_the_power_is_stated(audit):
    status, out, _, folder = audit("", "--baseline-model", "base")
    assert audit.models == {"m", "base"}
    assert status == 0 and out.startswith("no fault found\n")
    assert "4 greedy answers: 4 equal, 0 differ" in out
    found = json.loads((folder / "audit.json").read_text())
    tests = {test["name"]: test for test in found["tests"]}
    assert tests["first tokens"]["num_answers"] == 400
    assert tests["first tokens"]["detectable_share"] <= 0.3
    assert "p = " in out and "finds with 90% a server that replaces" in out
    for name in ("lengths", "stop reasons"):
        assert 0 < tests[name]["detectable_share"] <= 0.5
        assert re.search(f"{name}: .* of its answers by one without an end", out)
    # One answer of each prompt is requested twice more, to see whether the seed repeats it.
    assert Counter(audit.seeds.values()) == {1: 2 * 396, 3: 2 * 4}
    page = (folder / "audit.html").read_text()
    assert "no fault found" in page and "http://127.0.0.1:1" in page


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("q forgotten", ["first tokens do not follow the model's distribution"]),
        ("residual forgotten", ["tokens do not follow the model", "residual distribution"]),
        ("stale row", ["Greedy: ", "look for wrong cached rows"]),
        ("temperature", ["first tokens do not follow", "look at temperature"]),
        ("eos ignored", ["stop reasons do not follow", "0% of the answers end by themselves"]),
    ],
)
def test_planted_faults_are_found(audit, fault, words):
    status, out, _, folder = audit(fault)
    assert status == 1 and out.startswith("FAULT: ")
    for word in words:
        assert word in out, out
    assert json.loads((folder / "audit.json").read_text())["faults"]


def test_a_server_is_asked_over_http(audit):
    """A server without log-probabilities is audited without them."""
    asked = Counter()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked[body.get("logprobs", False)] += 1
            answer = complete(body, "")
            del answer["choices"][0]["logprobs"]
            refused = body.get("logprobs", False)
            data = json.dumps(answer).encode()
            self.send_response(400 if refused else 200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        words = ["--endpoint", address, "--baseline", address, "--samples", "2"]
        status, out, _, _ = audit(None, *words)
        server.shutdown()
    assert (
        status == 0 and "--baseline: refuses log-probabilities" in out and "words compared" in out
    )
    assert asked[False] == 2 * (4 * 3 + 4 * 2) and asked[True] >= 2 * 4  # 20, 10, 5, then 1


def test_a_difference_is_a_tie_only_within_the_stated_margin():
    known = [{"a": -0.5}, {"b": -0.7, "c": -0.9, "<end>": -1.0}]
    theirs = Answer(text="ab", tokens=["a", "b"], ended=True, logprobs=known)
    unknown = Answer(text="ab", tokens=["a", "b"], ended=True)

    def compared(tokens, other=theirs, tie=0.25):
        answer = Answer(text="".join(tokens), tokens=tokens, ended=True)
        return first_difference("own/1", answer, other, tie)

    assert compared(["a", "b"]) is None
    assert compared(["a", "c"]).kind == "tie" and compared(["a", "c"]).place == 1
    assert compared(["a", "c"], tie=0.15).kind == "fault"
    assert compared(["a"]).kind == "fault" and compared(["a"], tie=0.35).kind == "tie"
    assert compared(["a", "b", "c"]).kind == "unknown"
    assert compared(["a", "c"], unknown).margin is None
    assert compared(["a", "c"], unknown).kind == "unknown"


def test_a_lower_bound_is_never_a_tie():
    """A token below all listed ones may be far below them."""
    known = [{"a": -0.7, "b": -0.8}]
    theirs = Answer(text="a", tokens=["a"], ended=True, logprobs=known)
    ours = Answer(text="z", tokens=["z"], ended=True)
    found = first_difference("own/1", ours, theirs, 0.25)
    assert found.kind == "unknown" and not found.is_exact
    assert found.margin == pytest.approx(0.1) and found.said == "at least 0.100"
    assert first_difference("own/1", ours, theirs, 0.05).kind == "fault"
    alone = Answer(text="a", tokens=["a"], ended=True, logprobs=[{"a": -0.01}])
    assert first_difference("own/1", ours, alone, 0.25).kind == "unknown"
    # The other token is likelier than the baseline's own: its logits are not those it decodes from.
    odd = Answer(text="a", tokens=["a"], ended=True, logprobs=[{"a": -3.0, "z": -0.1}])
    assert first_difference("own/1", ours, odd, 0.25).kind == "fault"


def test_an_answer_has_its_thinking_and_may_be_empty_but_not_cut_off():
    def payload(reason="stop", **message):
        return {"choices": [{"message": message, "finish_reason": reason}]}

    assert read_answer(payload(content="b c", reasoning="a ")).parts(False) == ["a", " b", " c"]
    assert read_answer(payload(content="")).ended
    assert not read_answer(payload("length", content="a")).ended
    for bad in (payload("abort", content="a"), {"choices": []}):
        with pytest.raises(TryAgain):
            read_answer(bad)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--temperature", "0"], ["--temperature: 0", "above 0"]),
        (["--target", "x"], ["--target", "--baseline"]),
        (["--samples", "1"], ["--samples: 1", "at least 2"]),
    ],
)
def test_bad_input_is_one_line(audit, words, expected):
    status, out, err, _ = audit("", *words)
    assert_one_line(status, out, err, expected)
