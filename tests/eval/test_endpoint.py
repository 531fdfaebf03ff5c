"""`eval --endpoint`: counts from a real server equal the engine's own, and vLLM's are read rightly.

The first tests ask `pipedraft serve` on 127.0.0.1. The others ask a server that repeats recorded
answers of vLLM 0.32.0 (endpoint_stub).
"""

import json
import os
import signal
import subprocess
import sys

import eval_runs
import pytest
from endpoint_stub import ANSWERS, PROMPTS, RECORDED, Stub, stub
from eval_runs import status
from http_runs import WAIT_S, serving
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import REPOSITORY

from pipedraft.data_recipes import chat_client
from pipedraft.data_recipes.answers import RowFailed
from pipedraft.eval.checkpoints import load_head
from pipedraft.eval.endpoint import client
from pipedraft.eval.endpoint.answers import (
    Counters,
    SpeculativeDecoding,
    read_counters,
    rounds_of,
)
from pipedraft.inference.config import DecodeConfig, make_schedule
from pipedraft.inference.engine import Engine
from pipedraft.models.target import load_target, load_tokenizer

TARGET, HEADS = REPOSITORY / "assets" / "target", REPOSITORY / "assets" / "heads"
COUNTED = ("tokens", "steps", "rounds", "turns", "position_tests", "position_accepts", "groups")
no_pictures = eval_runs.no_pictures
pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.fixture(autouse=True)
def direct(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(chat_client, "FIRST_WAIT_S", 0.01)


def asked(url, out, *more: str, prompts: str = PROMPTS) -> list[str]:
    words = ["--endpoint", url, "--tokenizer", str(TARGET), "--out", str(out)]
    return [*words, *prompts.split(), "--attempts", "1", *more]


def entries(out) -> list[dict]:
    found = json.loads((out / "results.json").read_text())
    return found["runs"] + found["overall"]


def drafted(out) -> dict[str, dict]:
    return {e["benchmark"]: e for e in entries(out) if e["schedule"] != "autoregressive"}


def rows(out) -> list[dict]:
    """Return each conversation's counts, benchmark by benchmark."""
    return [
        {name: row[name] for name in COUNTED}
        for entry in drafted(out).values()
        for row in entry["per_prompt"]
    ]


@pytest.fixture(scope="module")
def chain(tmp_path_factory, no_pictures):
    """Decode the recorded prompts here, with the head that vLLM served."""
    out = tmp_path_factory.mktemp("chain")
    words = f"--schedule eagle --tree chain:3 --stages 1 --no-lossless {PROMPTS}".split()
    assert status(["--checkpoint", str(HEADS / "eagle3"), "--out", str(out), *words]) == 0
    return out


def served(head: str, schedule: str, stages: int, **settings) -> Engine:
    model = load_target(str(TARGET))
    config = DecodeConfig.of(make_schedule(schedule, settings), num_stages=stages)
    return Engine(model, load_tokenizer(str(TARGET)), config, load_head(HEADS / head, model))


# -- pipedraft serve ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "schedule", "stages", "settings"),
    [
        ("eagle3", "eagle", 1, {"tree": "chain:3"}),
        pytest.param("spd_n4", "spd", 4, {"tree_width": 4}, marks=pytest.mark.all),
    ],
)
def test_counts_of_our_server_equal_our_engines(tmp_path, capsys, head, schedule, stages, settings):
    """Every prompt's counts and groups are equal, one after the other and three at once."""
    prompts = "--benchmarks mt_bench,humaneval --limit 2 --max-new-tokens 40"
    own = tmp_path / "own"
    words = ["--checkpoint", str(HEADS / head), "--schedule", schedule, "--stages", str(stages)]
    for name, value in settings.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    assert status([*words, *prompts.split(), "--no-lossless", "--out", str(own)]) == 0
    found = tmp_path / "found"
    with serving(served(head, schedule, stages, **settings)) as place:
        assert status(asked(place.url, found, prompts=prompts)) == 0
        together = asked(place.url, tmp_path / "together", "--concurrency", "3", prompts=prompts)
        assert status(together) == 0
    assert rows(found) == rows(own) == rows(tmp_path / "together")
    assert {name for row in rows(found) for name in row["groups"]} > {"segment/answer", "place/0"}
    for name, entry in drafted(own).items():
        other = drafted(found)[name]
        same = ("tokens", "steps", "stages", "acceptance_histogram", "acceptance_by_position")
        same += ("equivalent_acceptance_length", "acceptance_by_category", "acceptance_by_group")
        assert {field: other[field] for field in same} == {field: entry[field] for field in same}
        assert other["wallclock"]["tokens_per_s"] > 0 and other["wallclock"]["ttft_ms"] > 0
        assert drafted(tmp_path / "together")[name]["wallclock"] is None
    capsys.readouterr()
    assert status(["compare", str(own), str(found), "--groups", "--json", f"{own}.json"]) == 0
    lines = json.loads((tmp_path / "own.json").read_text())["comparisons"]
    ratios = {x["quantity"]: x["ratio"] for x in lines if x["quantity"] != "tokens_per_s"}
    assert set(ratios.values()) == {1.0} and "tokens per round, segment/answer" in ratios
    assert status(["report", str(own), str(found), "--out", str(tmp_path / "both.html")]) == 0
    assert "as served" in (tmp_path / "both.html").read_text()
    assert "Server `http://127.0.0.1" in (found / "report.md").read_text()


def test_sampled_answers_of_our_server_are_counted_at_each_temperature(tmp_path):
    with serving(served("eagle3", "eagle", 1, tree="chain:3")) as place:
        words = asked(place.url, tmp_path, "--temperature", "1,0", "--limit", "1")
        assert status(words) == 0
    found = [e for e in entries(tmp_path) if e["benchmark"] == "overall"]
    assert [e["temperature"] for e in found] == [0, 1]
    assert found[0]["tokens"] != found[1]["tokens"] or found[0]["steps"] != found[1]["steps"]
    assert all(sum(e["position_accepts"]) > 0 for e in found)


def test_a_server_without_draft_accepts_nothing_and_says_so(tmp_path):
    with serving(served("eagle3", "autoregressive", 1)) as place:
        assert status(asked(place.url, tmp_path, "--limit", "1")) == 0
    (pooled,) = (e for e in entries(tmp_path) if e["benchmark"] == "overall")
    assert pooled["mean_acceptance_length"] == 1 and pooled["draft_acceptance_rate"] is None


# -- vLLM --------------------------------------------------------------------------------------


def test_vllms_detailed_answers_count_as_the_same_chains_do_here(tmp_path, chain, capsys):
    with stub() as server:
        assert status(asked(server.url, tmp_path)) == 0
    assert rows(tmp_path) == rows(chain)
    assert "answers do not tell" not in capsys.readouterr().out
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["target"]["served"]["root"] == "assets/target"
    seconds = [one["metrics"]["generation_time_ms"] / 1e3 for one in RECORDED["answers"]]
    (pooled,) = (e for e in entries(tmp_path) if e["benchmark"] == "overall")
    assert pooled["wallclock"]["tokens_per_s"] == pytest.approx(pooled["tokens"] / sum(seconds))


@pytest.mark.parametrize("tells", ["summary", "counters"])
def test_without_an_order_the_totals_are_the_same(tmp_path, chain, capsys, tells):
    """Only a last round that was cut may differ: vLLM's counts go on behind the answer's end."""
    with stub(tells=tells) as server:
        assert status(asked(server.url, tmp_path)) == 0
    assert "do not tell the order" in capsys.readouterr().out
    past_end = sum(
        sum(
            (j + 1) * n
            for j, n in enumerate(one["metrics"]["speculative_decoding"]["acceptance_histogram"])
        )
        - (len(one["choices"][0]["token_ids"]) - 1)
        for one in RECORDED["answers"]
    )
    assert past_end > 0
    for found, own in zip(rows(tmp_path), rows(chain), strict=True):
        assert all(found[name] == own[name] for name in ("tokens", "steps", "rounds", "turns"))
    (found,) = (e for e in entries(tmp_path) if e["benchmark"] == "overall")
    (own,) = (e for e in drafted(chain).values() if e["benchmark"] == "overall")
    assert found["mean_acceptance_length"] == own["mean_acceptance_length"]
    off = sum(own["position_accepts"]) - sum(found["position_accepts"])
    assert abs(off) <= past_end
    groups = {one["group"] for one in found["acceptance_by_group"]}
    assert {"context/0", "language/en"} <= groups


@pytest.mark.parametrize(
    ("tells", "words"),
    [
        ("nothing", "tells no acceptance; start vLLM with --per-request-spec-decode-metrics"),
        ("plain", "is a vLLM without draft; start it with --speculative-config"),
    ],
)
def test_the_missing_flag_is_named_before_the_benchmark_runs(tmp_path, capsys, tells, words):
    with stub(tells=tells) as server:
        eval_runs.assert_refused(capsys, asked(server.url, tmp_path), ["--endpoint: ", words])
        assert not server.asked


def test_what_a_server_cannot_do_is_refused_in_one_line(tmp_path, capsys):
    def refused(server: Stub, words: list[str], *more: str) -> None:
        eval_runs.assert_refused(capsys, asked(server.url, tmp_path, *more), words)
        assert not server.asked

    with stub(gives_ids=False) as server:
        refused(server, ["--endpoint: ", "no token ids"])
    with stub(tells="counters") as server:
        refused(server, ["--concurrency: 2, but "], "--concurrency", "2")
        refused(server, ["--model: 'x' is not served", "it has m"], "--model", "x")
        refused(server, ["--key-variable: 'NO_KEY' is not set"], "--key-variable", "NO_KEY")
        unknown = ["--tokenizer: ", "nowhere"]
        refused(server, unknown, "--tokenizer", str(tmp_path / "nowhere"))
        gone = Stub(url=server.url)
        refused(Stub(url="127.0.0.1:1"), ["--endpoint: '127.0.0.1:1' is no address"])
    assert status(asked(gone.url, tmp_path)) == 1
    assert "no connection" in capsys.readouterr().err
    eval_runs.assert_refused(
        capsys, asked("http://x", tmp_path, "--checkpoint", "y"), ["checkpoint"]
    )


def test_other_clients_requests_in_the_counters_are_a_failure(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(client, "COUNTER_WAIT_S", 0.0)
    for busy in (5, -1):  # other requests ran, or the counters lag behind for good
        with stub(tells="counters", busy=busy) as server:
            assert status(asked(server.url, tmp_path)) == 1
        assert "its counters do not fit an answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes",
    [
        {"per_step_accepted": [3] * 40, "per_step_drafted": [3] * 40},
        {"per_step_accepted": [3], "per_step_drafted": [3]},
        {"acceptance_histogram": [2**52, 0, 0, 0]},
        {"acceptance_histogram": "many"},
        {"acceptance_histogram": [-1]},
    ],
)
def test_counts_that_cannot_be_are_a_failure(tmp_path, capsys, changes):
    with stub() as server:
        server.changes = changes
        assert status(asked(server.url, tmp_path)) in (1, 2)
    err = capsys.readouterr().err
    assert err.startswith("error: --endpoint: ") and err.count("\n") == 1
    assert "do not fit an answer" in err or "answer is not a completion" in err


def test_a_prompt_beyond_the_servers_context_is_left_out(tmp_path, capsys):
    with stub(refuses=2) as server:
        assert status(asked(server.url, tmp_path)) == 0
    out = capsys.readouterr().out
    assert "turns left out, their prompt is longer" in out
    (pooled,) = (e for e in entries(tmp_path) if e["benchmark"] == "overall")
    assert pooled["skipped_turns"] == len(ANSWERS) - pooled["turns"] > 0


def test_a_busy_server_is_asked_again(tmp_path):
    with stub() as server:
        server.faults = [503, 429]
        assert status(asked(server.url, tmp_path, "--attempts", "3", "--limit", "1")) == 0


# -- resuming ----------------------------------------------------------------------------------


@pytest.mark.all
def test_an_interrupted_run_keeps_its_answers(tmp_path, capsys):
    """Ctrl-C ends with 130. The same command asks for the rest alone, --fresh for all of it."""
    with stub(holds_from=4) as server:
        words = [sys.executable, "-m", "pipedraft", "eval", *asked(server.url, tmp_path)]
        process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=os.environ)
        assert server.held.wait(WAIT_S), process.stderr
        process.send_signal(signal.SIGINT)
        assert "error: interrupted" in process.communicate(timeout=WAIT_S)[1]
        assert process.returncode == 130
        assert not (tmp_path / "results.json").exists()
        server.holds_from, server.asked = None, []
        assert status(asked(server.url, tmp_path)) == 0
        assert len(server.asked) == len(ANSWERS) - 4
        assert f"4 of {len(ANSWERS)} answers were asked before" in capsys.readouterr().out
        whole = rows(tmp_path)
        server.asked = []
        assert status(asked(server.url, tmp_path)) == 0 and not server.asked
        assert status(asked(server.url, tmp_path, "--fresh")) == 0
        assert len(server.asked) == len(ANSWERS) and rows(tmp_path) == whole
        capsys.readouterr()
        other = asked(server.url, tmp_path, "--seed", "1")
        eval_runs.assert_refused(capsys, other, ["--seed was 0"])


def test_a_folder_of_another_command_is_not_replaced(tmp_path, chain, capsys):
    with stub() as server:
        words = asked(server.url, chain)
        eval_runs.assert_refused(capsys, words, ["--out: ", "--endpoint was None"])


# -- rounds ------------------------------------------------------------------------------------

CHAINS = st.lists(
    st.integers(0, 4).flatmap(lambda d: st.tuples(st.integers(0, d), st.just(d))), max_size=30
)


@given(chains=CHAINS, past_end=st.integers(0, 4))
def test_rounds_add_up_to_the_answer(chains, past_end):
    """A server that cuts its answer in the last round gives rounds that fit it exactly."""
    accepted, drafted = [a for a, _ in chains], [d for _, d in chains]
    cut = min(past_end, accepted[-1]) if accepted else 0
    num_tokens = sum(a + 1 for a in accepted) - cut
    histogram = [accepted.count(j) for j in range(5)]
    found = SpeculativeDecoding(histogram, accepted, drafted)
    rounds, is_ordered = rounds_of(found, num_tokens)
    assert is_ordered and sum(one.length for one in rounds) == num_tokens
    assert len(rounds) == len(chains)
    for one, (a, d) in list(zip(rounds, chains, strict=True))[: -1 if cut else None]:
        assert (one.accepted, one.tested, one.length) == (a, min(a + 1, d), a + 1)
        assert one.end == ("r" if d > a else "u")
    if cut:
        assert rounds[-1].end == "a" and rounds[-1].accepted == accepted[-1] + 1 - cut
    unordered, _ = rounds_of(SpeculativeDecoding(histogram), num_tokens)
    assert sum(one.length for one in unordered) == num_tokens
    assert len(unordered) == len(chains)


def test_rounds_without_a_draft_are_added_in_no_order():
    """vLLM's n-gram lookup: two rounds with drafts, three without."""
    rounds, is_ordered = rounds_of(SpeculativeDecoding([0, 1, 1], [1, 2], [2, 2]), 8)
    assert not is_ordered and [one.length for one in rounds] == [2, 3, 1, 1, 1]
    rounds, is_ordered = rounds_of(SpeculativeDecoding([0, 0, 0]), 3)
    assert is_ordered and [one.end for one in rounds] == ["u"] * 3
    with pytest.raises(RowFailed):
        rounds_of(SpeculativeDecoding([0, 0, 2], [2, 2], [2, 2]), 2)


def test_counters_are_read_from_one_page_of_several_engines():
    text = "\n".join(RECORDED["metrics"])
    one = read_counters(text)
    assert one == Counters(570, 198, (146, 117, 103))
    assert one.histogram == [52, 29, 14, 103]
    other = text.replace('engine="0"', 'engine="1"')
    assert read_counters(f"{text}\n{other}") == Counters(1140, 396, (292, 234, 206))
    both = text + "\n" + text.replace("vllm:", "pipedraft:")
    assert read_counters(both) == one
    assert (read_counters(both) - one).histogram == [0, 0, 0, 0]
    assert read_counters(text.replace("per_pos", "x")) is None
    assert read_counters("") is None
