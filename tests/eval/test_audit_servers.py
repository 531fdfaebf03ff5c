"""`pipedraft audit` over HTTP: faults behind a tie, and servers that do not do what is asked."""

import json

import pytest
from audit_stub import TIE_PLACE, Stub, serving
from command_runs import call
from tiny_models import REPOSITORY, write_rows

from pipedraft.chats import encode_chat
from pipedraft.eval import audit_tests
from pipedraft.eval.audit_answers import Answer, read_answer, spell
from pipedraft.eval.audit_forced import TargetJudge
from pipedraft.eval.lossless import generate_greedy
from pipedraft.eval.tasks import Prompt
from pipedraft.inference.serving.logprobs import token_text

WAYS = {
    "prompt_logprobs": "prompt_logprobs",
    "completions": "completions of one token",
    "continue": "continue_final_message",
}


@pytest.fixture
def audit(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(audit_tests, "NUM_SIMULATIONS", 10)  # only for the stated power

    def run(ours: Stub, theirs: Stub, samples: int = 6) -> tuple[int, str, dict]:
        prompts = write_rows(tmp_path / "own.jsonl", *({"prompt": "x" * n} for n in (1, 2, 3)))
        with serving(ours) as endpoint, serving(theirs) as baseline:
            words = ["--endpoint", endpoint, "--baseline", baseline, "--model", "m"]
            words += ["--benchmarks", prompts, "--samples", str(samples), "--max-new-tokens", "10"]
            words += ["--tie", "0.001", "--attempts", "1", "--out", str(tmp_path / "audit")]
            status = call("audit", words, monkeypatch)
        found = json.loads((tmp_path / "audit" / "audit.json").read_text())
        return status, capsys.readouterr().out, found

    return run


@pytest.mark.parametrize("offers", ["", "pretends", *WAYS])
def test_a_tie_hides_nothing_behind_it(audit, offers):
    """The endpoint takes the other token of a tie, in the second run also a wrong one later."""
    baseline = Stub(offers=offers)
    status, out, found = audit(Stub(picks_second=(TIE_PLACE,)), baseline)
    kinds = [one["kind"] for one in found["differences"]]
    assert status == 0 and kinds == ["tie"] * 3, out
    assert {one["place"] for one in found["differences"]} == {TIE_PLACE}
    assert all(one["is_exact"] and one["margin"] < 1e-4 for one in found["differences"])
    if offers in WAYS:
        assert out.startswith("no fault found\n") and f"were judged, by {WAYS[offers]}" in out
    else:
        assert out.startswith("no fault found in what could be judged\n")
        assert "tokens are behind a first difference and were not judged: the baseline can" in out
    status, out, found = audit(Stub(picks_second=(TIE_PLACE, 4)), baseline)
    if offers not in WAYS:
        assert status == 0 and out.startswith("no fault found in what could be judged\n")
        return
    assert status == 1 and "Greedy: 3 of 3 answers are not the model's" in out
    assert "own/1, token 4: " in out
    faults = [one for one in found["differences"] if one["kind"] == "fault"]
    assert {one["place"] for one in faults} == {4} and len(faults) == 3
    assert all(one["margin"] > 0.2 for one in faults)


@pytest.mark.parametrize("offers", ["", "prompt_logprobs"])
def test_words_are_judged_as_the_baselines_tokens(audit, offers):
    """An endpoint without log-probabilities still has a text that the baseline can tokenize."""
    for places, is_wrong in (((), False), ((TIE_PLACE,), False), ((TIE_PLACE, 4), True)):
        ours = Stub(logprobs="none", picks_second=places)
        status, out, found = audit(ours, Stub(offers=offers))
        assert found["compared"] == "words" and "words compared" in out
        assert "--endpoint: ignores logprobs: " in out and "--baseline: ignores" not in out
        # Without a way to judge, a difference in words is neither a tie nor surely a fault.
        assert status == (is_wrong if offers else bool(places)), out
        if places and not offers:
            assert "a tie cannot be told from a fault" in out


def test_an_endpoints_end_is_judged(audit):
    """The stub may end from place 6 on, where the end may be second best."""
    status, _, found = audit(Stub(picks_second=(6,)), Stub(offers="prompt_logprobs"))
    ends = [one for one in found["differences"] if one["baseline"] == "<|end|>"]
    assert status == 1 and ends and all(one["kind"] == "fault" for one in found["differences"])


@pytest.mark.parametrize(
    ("stub", "remark"),
    [
        (Stub(), ""),
        (Stub(logprobs="less"), "lists 1 tokens where top_logprobs 20 was asked for"),
        (Stub(logprobs="refuses"), "refuses top_logprobs 20; asked for 10 instead"),
        (Stub(logprobs="raw"), ""),
        (Stub(seeds="ignored"), "ignores seed: "),
        (Stub(seeds="fixed"), "all seeds give the same text at temperature 1: it does not sample"),
        (Stub(seeds="greedy"), "all seeds give the same text at temperature 1: it does not sample"),
    ],
)
def test_what_a_server_does_otherwise_is_said(audit, stub, remark):
    status, out, found = audit(stub, stub)
    remarks = [one for one in found["remarks"] if "lists 6 tokens" not in one]
    said = [f"--endpoint: {remark}", f"--baseline: {remark}"] if remark else []
    assert status == 0 and len(remarks) == len(said), remarks
    assert all(one.startswith(text) for one, text in zip(remarks, said, strict=True))
    assert all(one in out for one in remarks) and found["compared"] == "tokens"
    is_whole = stub.seeds not in ("fixed", "greedy")
    assert out.startswith("no fault found\n" if is_whole else "no fault found in what could be")


def test_a_biased_sampler_is_found_whatever_it_does_with_seeds(audit):
    biased = Stub(temperature=0.4, seeds="ignored")
    status, out, _ = audit(biased, Stub(), samples=60)
    assert status == 1 and "do not follow the model's distribution" in out
    assert "look at temperature, filters" in out and "--endpoint: ignores seed" in out


@pytest.mark.parametrize(
    ("names", "text", "tokens"),
    [
        (["a", " b"], "a b", ["a", " b"]),
        ([" a", " b"], "a b", [" a", " b"]),  # stripped by the server
        (["a", " b", "\n"], "a b", ["a", " b", "\n"]),
        (["a", "\ufffd", "\ufffd", " b"], "a\u00e9 b", ["a", "", "\u00e9", " b"]),  # ours
        (["a", "", "\u00e9", " b"], "a\u00e9 b", ["a", "", "\u00e9", " b"]),  # vLLM's
        (["a", "\ufffd"], "a", ["a", ""]),  # cut inside a character
        (["a", "<file_sep>", " b"], "a b", ["a", "<file_sep>", " b"]),  # not in the text
        (["\u0120a"], " a", None),
        (["a"], "a b", None),
        (["a", "x"], "a b", None),
    ],
)
def test_tokens_spell_the_text(names, text, tokens):
    assert spell(names, text) == tokens


def test_raw_names_are_read_as_text():
    def read(names, text):
        entries = [{"token": name, "logprob": -1.0, "top_logprobs": []} for name in names]
        choice = {"message": {"content": text}, "finish_reason": "length"}
        return read_answer({"choices": [choice | {"logprobs": {"content": entries}}]})

    assert read(["I", "\u0120am", "\u010a"], "I am\n").tokens == ["I", " am", "\n"]
    assert read(["\u2581I", "\u2581am"], "I am").tokens == [" I", " am"]
    assert read(["\u0120am"], " am").logprobs == [{" am": -1.0}]
    assert not read([" the", "x"], "the y").is_spelled  # no raw names either
    bad = read(["x", "y"], "I am")
    assert not bad.is_spelled and not bad.tokens and bad.parts(False) == ["I", " am"]


def test_a_target_judges_every_token_in_one_pass():
    judge = TargetJudge(str(REPOSITORY / "assets" / "target"))
    prompt = Prompt(task="own", id="1", category="own", turns=["What is 2 plus 3?"])
    made = generate_greedy(
        judge.model, encode_chat(judge.tokenizer, prompt.messages()), max_new_tokens=12
    )
    names = [token_text(judge.tokenizer, token) for token in made]
    right = Answer(text="".join(names), tokens=names, ended=False)
    places = judge.judge(prompt, right, 0)
    assert [one.token for one in places] == names
    assert all(one.is_exact and one.gap == 0 and one.best == one.token for one in places)
    wrong = Answer(text="".join(names[:5] + ["?"]), tokens=[*names[:5], "?"], ended=True)
    places = judge.judge(prompt, wrong, 2)
    assert [one.place for one in places] == [2, 3, 4, 5, 6]
    assert places[3].gap > 0.01 and places[4].token == "" and places[4].gap > 0.01
    assert all(one.gap == 0 for one in places[:3])
