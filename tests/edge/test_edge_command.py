"""`python -m pipedraft.eval edge`: tables, files, refusals."""

import json
import math
from types import SimpleNamespace

import pytest
from tiny_models import write_rows

from pipedraft.errors import UsageError
from pipedraft.eval.__main__ import run
from pipedraft.eval.edge.methods import METHODS, TIMES, radio_of
from pipedraft.eval.edge.report import SAME_TEXT_RULES, LinkRun
from pipedraft.inference.rules import RULE_NAMES

SHORT = ["--max-new-tokens", "6"]


@pytest.fixture(scope="module")
def words(small_target, tmp_path_factory) -> list[str]:
    prompts = tmp_path_factory.mktemp("prompts") / "short.jsonl"
    prompts.write_text('{"prompt": "How many legs do 12 cats have?"}\n{"prompt": "Count to 9."}\n')
    where = ["--target", small_target, "--draft-model", small_target]
    return ["edge", *where, "--benchmarks", str(prompts), *SHORT]


@pytest.fixture(scope="module")
def out(words, tmp_path_factory):
    """Run all methods on one link; the target drafts for itself, so greedy drafts are accepted."""
    folder = tmp_path_factory.mktemp("edge") / "out"
    run([*words, "--links", "5g", "--temperature", "0,1", "--out", str(folder)])
    return folder


def rows_of(folder) -> dict:
    rows = json.loads((folder / "results.json").read_text())["latency"]
    return {(row["method"], row["temperature"]): row for row in rows}


def test_every_method_is_in_the_table_at_every_temperature(out):
    rows = rows_of(out)
    assert rows.keys() == {(name, degrees) for name in METHODS for degrees in (0.0, 1.0)}
    for (name, degrees), row in rows.items():
        assert row["prompts"] == 2
        assert row["tokens"] == 10 or (degrees and 2 <= row["tokens"] < 10)  # an EOS was drawn
        low, high = row["ci95"]
        assert low <= row["ms_per_token"] <= high
        assert row["tokens_per_s"] == pytest.approx(1e3 / row["ms_per_token"])
        assert sum(row["joules_by_cause"].values()) == pytest.approx(row["joules_per_token"])
        assert bool(row["caveat"]) == (name == "edge_only" or row["rule"] == "topk")
        same = row["rule"] in SAME_TEXT_RULES or METHODS[name].asks_with is not None
        sampled = degrees and not same
        # The cloud's own row compares its greedy outputs with those of transformers.
        checked = 0 if (sampled and name != "cloud") or name == "edge_only" else 2
        assert row["lossless"] == {"checked": checked, "mismatches": 0}


def test_figures_follow_from_the_constants(out):
    rows = rows_of(out)
    cloud, alone = rows["cloud", 0.0], rows["edge_only", 0.0]
    assert alone["ms_per_token"] == pytest.approx(24.25)
    assert cloud["ms_per_token"] == pytest.approx(1e3 / 13.89, abs=2) and cloud["speedup"] == 1
    asked, split = rows["cloud_round_trip", 0.0], rows["split", 0.0]
    assert asked["ms_per_token"] == pytest.approx(1e3 / 13.89 + 20, abs=3)
    # 3 of 4 layers on the edge; a token's states take 16 bits a number.
    edge_ms = 3 * 24.25 * 31.2 / 64 / 0.596
    assert split["ms_per_token"] == pytest.approx(edge_ms + 1 / 4 * 1e3 / 13.89 + 20, abs=3)
    assert split["up_bytes_per_token"] > asked["up_bytes_per_token"]
    assert cloud["ttft_ms"] == pytest.approx(87 + 20, abs=4)
    assert alone["up_bytes_per_token"] == 0 and alone["joules_by_cause"]["up"] == 0
    # 5 tokens after the first: a round with 4 draft tokens and a bonus.
    waits = rows["stop_and_wait", 0.0]
    assert waits["draft_acceptance_rate"] == 1
    assert waits["ms_per_token"] == pytest.approx((4 * 24.25 + 20 + 87) / 5, abs=2)


def test_the_report_names_constants_caveats_and_methods(out):
    text = (out / "report.md").read_text()
    for part in (
        "draft_s 0.02425 s",
        "link 5g:",
        "15 W while it drafts",
        "not lossless",
        "5g, T = 0",
    ):
        assert part in text
    assert all(f"- {name}: {method.summary}" in text for name, method in METHODS.items())
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["command"].startswith("python -m pipedraft.eval edge")
    run(["report", str(out)])
    assert "picospec" in (out / "report.html").read_text()


def test_an_approximate_rule_is_said(words, tmp_path):
    rule = ["--rule", "topk", "--payload-tokens", "1", "--temperature", "1", "--links", "wifi"]
    run([*words, "--methods", "cloud,picospec", *rule, "--out", str(tmp_path)])
    row = rows_of(tmp_path)["picospec", 1.0]
    assert row["rule"] == "topk" and "approximate" in row["caveat"]
    assert rows_of(tmp_path)["cloud", 1.0]["caveat"] == ""


def test_filtered_samples_are_compared_too(words, tmp_path):
    asked = [
        "--temperature",
        "1",
        "--top-p",
        "0.9",
        "--links",
        "wifi",
        "--methods",
        "cloud,flexspec",
    ]
    run([*words, *asked, "--out", str(tmp_path)])
    for row in rows_of(tmp_path).values():
        assert row["lossless"]["checked"] > 0 and row["lossless"]["mismatches"] == 0


def test_times_come_from_a_file(words, tmp_path):
    times = {"draft_s": 0.01, "verify_s": 0.5, "cloud_draft_s": 0.01}
    (tmp_path / "times.json").write_text(json.dumps(times))
    more = ["--methods", "cloud", "--times", str(tmp_path / "times.json"), "--no-lossless"]
    run([*words, *more, "--links", "5g", "--out", str(tmp_path / "out")])
    row = rows_of(tmp_path / "out")["cloud", 0.0]
    assert math.isclose(row["ms_per_token"], 500, abs_tol=2) and row["lossless"]["checked"] == 0


def test_own_links_are_rows_beside_named_ones(words, tmp_path):
    own = ["rtt=40,up=2,loss=0.01,jitter=8", "rtt=400,up=2,down=9"]
    more = ["--methods", "cloud_round_trip", "--no-lossless", "--links", f"{own[0]},5g,{own[1]}"]
    run([*words, *more, "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "results.json").read_text())["latency"]
    assert [row["network"] for row in rows] == [own[0], "5g", own[1]]
    # A token waits for the link's round trip and the cloud's pass.
    assert rows[2]["ms_per_token"] == pytest.approx(1e3 / 13.89 + 400, abs=3)
    text = (tmp_path / "report.md").read_text()
    assert f"link {own[0]}: at its beginning 2 Mbit/s up, 2 down, round trip 40 ms +- 8" in text
    assert (
        "loss 0.01, 62 bytes" in text and f"link {own[1]}: at its beginning 2 Mbit/s up, 9" in text
    )


def test_the_report_says_that_a_trace_replaces_loss_and_jitter(words, tmp_path, capsys):
    (tmp_path / "my.csv").write_text("t_ms,rtt_ms\n0,20\n1000,20\n")
    link = f"wifi:{tmp_path}/my.csv"
    run([*words, "--methods", "cloud", "--no-lossless", "--links", link, "--out", str(tmp_path)])
    line = "loss 0, 62 bytes of headers; loss and jitter_ms are 0: its round trips contain them"
    assert line in capsys.readouterr().out and line in (tmp_path / "report.md").read_text()


def test_the_cloud_alone_that_a_row_is_compared_with_has_the_same_times():
    places = {
        LinkRun("cloud", "5g", SimpleNamespace(sampling="0", times=times)).place
        for times in TIMES.values()
    }
    assert len(places) == len(set(TIMES.values())) > 1


@pytest.mark.parametrize(
    "more, message",
    [
        (["--methods", "picospek"], "--methods: 'picospek' is unknown; give one of cloud,"),
        (
            ["--rule", "best"],
            f"--rule: 'best' is unknown; give one of {', '.join(RULE_NAMES)}",
        ),
        (["--links", "6g"], "--links: '6g' is unknown"),
        (["--links", "5g,rtt=9,upp=2"], "--links: 'rtt=9,upp=2': 'upp' is unknown; did you mean"),
        (["--links", "rtt=9,up=2,rtt=9,up=2"], "names rtt=9,up=2 twice; leave one out"),
        (["--policy", "fixed:99"], "policy: 'fixed:99' is unknown; give fixed:1 to"),
        (["--times", "nowhere.json"], "--times: 'nowhere.json' is no file; give it or one of"),
        (["--temperature", "-1"], "'-1' is not a temperature"),
        (["--draft-length", "0"], "--draft-length: 0; give at least 1"),
        (["--seed", "-1"], "--seed: -1; give at least 0"),
    ],
)
def test_bad_words_are_refused_in_one_line(more, message, words, tmp_path):
    with pytest.raises(ValueError, match=None) as caught:
        run([*words, "--out", str(tmp_path), *more])
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_prompts_that_are_all_too_long_are_refused_before_decoding(words, tmp_path, monkeypatch):
    monkeypatch.setattr("pipedraft.eval.edge.report.decode", None)  # would fail
    name = write_rows(tmp_path / "long.jsonl", {"prompt": "word " * 2000})
    with pytest.raises(
        ValueError, match="--benchmarks: the shortest prompt of long has .* long out"
    ):
        run([*words, "--benchmarks", name, "--out", str(tmp_path)])


def test_a_target_must_be_named(small_target, tmp_path):
    with pytest.raises(UsageError, match="--target: missing; --draft-model"):
        run(["edge", "--draft-model", small_target, "--benchmarks", "x", "--out", str(tmp_path)])


def test_the_radio_is_that_of_the_traces_own_name():
    named = {"wifi": "wifi", "traces/wifi_bad.csv": "wifi", "lte": "cellular"}
    assert {name: radio_of(name) for name in named} == named
    assert radio_of("my_wifi_traces/drive.csv") == "cellular"
