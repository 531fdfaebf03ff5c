"""Test the cost model: costs in an asynchronous pipeline, recovered from measured times."""

import json
import math
from types import SimpleNamespace

import pytest
from eval_runs import status
from tiny_models import REPOSITORY

from pipedraft.errors import UsageError
from pipedraft.eval.record import ProcessRecord, WallClockRecord
from pipedraft.eval.replay import fit_cost
from pipedraft.inference.config import COST_PRESETS, read_cost
from pipedraft.inference.cost_model import CostModel, StageCost, VirtualClock

CUT = (0, 3, 8)


@pytest.mark.parametrize(
    ("is_asynchronous", "shares", "fixed"),
    [
        (False, False, 0.1 + 0.2),
        (False, True, 0.1 + 0.2),
        (True, False, (3 * 0.1 + 0.2) / 2),
        (True, True, (2 * 0.1 + 0.2) / 2),
    ],
)
def test_only_a_lock_step_pipeline_pays_hops_and_verification_at_every_step(
    is_asynchronous, shares, fixed
):
    cost = CostModel(
        link=0.1, verify=0.2, is_asynchronous=is_asynchronous, draft_on_first_stage=shares
    )
    clock = VirtualClock(cost, CUT, 0.0)
    clock.step([1, 0], draft_forwards=0, overlap=False)
    clock.step([0, 1], draft_forwards=0, overlap=False)
    assert clock.time == pytest.approx(1 + 2 * fixed)
    assert clock.autoregressive_time(1) == pytest.approx(clock.time)


@pytest.mark.parametrize(("shares", "expected_ms"), [(True, 310.4), (False, 385.4)])
def test_a_pass_crosses_one_link_per_stage_and_one_more_if_the_draft_is_apart(shares, expected_ms):
    """Four stages, 10.4 ms for their pass and 75 ms per link: 4 x 75 + 10.4, or 5 x 75 + 10.4."""
    for stages in ((), (StageCost(),) * 4):
        cost = CostModel(
            link=75 / 10.4, is_asynchronous=True, draft_on_first_stage=shares, stages=stages
        )
        clock = VirtualClock(cost, (0, 4, 8, 12, 16), 0.0)
        assert clock.autoregressive_time(1) * 10.4 == pytest.approx(expected_ms)


@pytest.mark.parametrize(("shares", "expected"), [(False, 0.625), (True, 0.675)])
def test_a_draft_beside_the_first_stage_takes_its_time(shares, expected):
    clock = VirtualClock(CostModel(draft_on_first_stage=shares), CUT, 0.3)
    clock.step([1, 1], draft_forwards=1, overlap=True)
    assert clock.time == pytest.approx(expected)


def test_further_rows_make_the_busiest_stage_longer():
    clock = VirtualClock(CostModel(row=0.5), CUT, 0.0)
    clock.step([4, 1], draft_forwards=0, overlap=True)
    assert clock.time == pytest.approx(0.375 * 2.5)


def run(schedule, processes, *, tokens=100, forwards=0, seconds_per_token=0.0):
    wallclock = WallClockRecord(tokens_per_s=1 / seconds_per_token) if seconds_per_token else None
    return SimpleNamespace(
        schedule=schedule,
        benchmark="overall",
        stages=2,
        tokens=tokens,
        draft_forwards=forwards,
        wallclock=wallclock,
        processes=processes,
    )


def process(name, *, calls, rows, first, more, verify=0.0, draft=0.0):
    """Make a stage whose first row takes ``first`` and every further one ``more`` seconds."""
    stage = calls * first + (rows - calls) * more
    return ProcessRecord(
        name=name,
        seconds={"stage": stage, "verify": verify, "draft": draft},
        counts={"stage": calls},
        rows={"stage": rows},
    )


@pytest.mark.parametrize("is_apart", [False, True])
def test_a_known_cost_model_is_recovered(is_apart):
    """Two stages have two links, and a third if the controller and the draft have a rank."""
    plain = run(
        "autoregressive",
        [
            *[ProcessRecord(name="controller", seconds={})] * is_apart,
            process("first stage", calls=100, rows=100, first=0.01, more=0.001),
            process("second stage", calls=100, rows=100, first=0.01, more=0.001, verify=0.2),
        ],
        seconds_per_token=0.02 + 0.002 + (2 + is_apart) * 0.0005,
    )
    beside = 0.0 if is_apart else 1.2
    drafted = run(
        "eagle",
        [
            *[ProcessRecord(name="controller", seconds={"draft": 1.2})] * is_apart,
            process("first stage", calls=40, rows=640, first=0.01, more=0.001, draft=beside),
            process("second stage", calls=40, rows=640, first=0.01, more=0.001),
        ],
        forwards=240,
    )
    cost = fit_cost([plain, drafted])
    assert (cost.row, cost.link) == (pytest.approx(0.1), pytest.approx(0.025))
    assert (cost.verify, cost.draft_forward) == (pytest.approx(0.1), pytest.approx(0.25))
    assert cost.is_asynchronous and cost.draft_on_first_stage == (not is_apart)


@pytest.mark.parametrize(
    ("rows", "forwards", "expected"),
    [([1, 1], 0, 2), ([1, 1], 1, 2), ([1, 0], 1, 1), ([0, 1], 1, 2)],
)
def test_processes_that_share_cores_slow_each_other(rows, forwards, expected):
    clock = VirtualClock(CostModel(sharing=0.5, draft_on_first_stage=True), (0, 4, 8), 0.1)
    clock.step(rows, draft_forwards=forwards, overlap=True)
    slower = 1 + 0.5 * (expected - 1)
    # The draft's time was measured beside busy stages.
    busiest = max(0.5 * rows[0] * slower + 0.1 * forwards, 0.5 * rows[1] * slower)
    assert clock.time == pytest.approx(busiest)


def test_a_slow_link_hides_the_busiest_process_and_a_fast_one_does_not():
    """A step is the round of a segment over n, or the busiest process's own time."""
    for link, expected in ((0.05, 0.7), (3.0, 0.5 + 3.0)):
        cost = CostModel(link=link, is_asynchronous=True, draft_on_first_stage=True)
        clock = VirtualClock(cost, (0, 3, 8), 0.325)
        step = clock.duration([1, 1], draft_forwards=1, overlap=True)
        assert step == pytest.approx(expected)  # 3 / 8 + 0.325 = 0.7; the mean stage takes 0.5
        assert clock.duration([1, 1], draft_forwards=1, overlap=False) == pytest.approx(
            0.5 + link + 0.325
        )
        assert clock.autoregressive_time(1) == pytest.approx(1 + 2 * link)


def test_processes_that_wait_for_links_do_not_slow_each_other():
    def step(link: float) -> float:
        cost = CostModel(link=link, sharing=1.0, is_asynchronous=True, draft_on_first_stage=True)
        clock = VirtualClock(cost, (0, 4, 8), 0.0)
        return clock.duration([1, 1], draft_forwards=0, overlap=True) - link

    assert step(0.0) == pytest.approx(0.5 * 2)
    assert step(1000.0) == pytest.approx(0.5, rel=1e-3)
    # Busy for b of b + 1: b = 0.5 (1 + b / (b + 1)) has the solution b = 0.5 ** 0.5.
    assert step(1.0) == pytest.approx(0.5**0.5)


def test_the_slowness_of_shared_cores_is_recovered():
    """Keep both processes busy, with a different busy share per method."""
    methods = []
    for schedule, rows, others in (
        ("autoregressive", 100, 0.0),
        ("naive_pp", 300, 0.6),
        ("flowspec", 800, 0.9),
    ):
        slower = 1 + 0.4 * others
        parts = [
            process(name, calls=100, rows=rows, first=0.01 * slower, more=0.002)
            for name in ("rank 0", "rank 1")
        ]
        busy = sum(part.seconds["stage"] for part in parts)
        methods.append(run(schedule, parts, seconds_per_token=busy / (1 + others) / 100))
    cost = fit_cost(methods)
    assert (cost.row, cost.sharing) == (pytest.approx(0.2), pytest.approx(0.4))


def test_one_process_has_no_links():
    alone = [process("one process", calls=200, rows=200, first=0.01, more=0.001)]
    cost = fit_cost([run("autoregressive", alone, seconds_per_token=0.5)])
    assert (cost.link, cost.row, cost.draft_forward) == (0.0, 0.0, None)
    assert not cost.is_asynchronous and not cost.draft_on_first_stage


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, 1e7])
def test_a_cost_that_is_no_duration_is_refused(value):
    with pytest.raises(ValueError, match=rf"cost.link_row: {value}; give at least 0"):
        CostModel(link_row=value)


def test_a_calibrating_run_measures_every_turn_and_leaves_them_to_replay(tmp_path, capsys):
    out, cost = str(tmp_path / "out"), str(tmp_path / "cost.json")
    words = ["--target", str(REPOSITORY / "assets" / "target"), "--draft", "ngram"]
    words += ["--schedule", "pipeinfer", "--draft-tokens", "1", "--stages", "2", "--no-lossless"]
    words += ["--benchmarks", "gsm8k", "--limit", "1", "--max-new-tokens", "6"]
    tables = []
    for more in ([], ["--calibrate", cost], ["--calibrate", cost]):
        assert status([*words, "--out", out, *more]) == 0
        capsys.readouterr()
        assert status(["replay", out]) == 0
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1] == tables[2] and "pipeinfer" in tables[0]
    assert read_cost(cost).verify > 0
    assert status(["replay", out, "--cost", cost, "--link", "0,0.5"]) == 0
    # Two lines above the table's rows, which are of two methods under two links.
    assert capsys.readouterr().out.splitlines().index("") == 2 + 2 * 2
    # Another evaluation is not replaced.
    assert status([*words, "--out", out, "--calibrate", cost, "--seed", "1"]) == 2
    assert "--seed was 0, is 1" in capsys.readouterr().err


# -- cost per row -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("is_asynchronous", "shares", "links"),
    # In lock step the longest segment on a link counts.
    [
        (False, False, 6 * 0.1),
        (True, True, (6 + 4) * 0.1 / 2),
        (True, False, (6 + 4 + 6) * 0.1 / 2),
    ],
)
def test_hops_head_and_decision_are_paid_for_each_row(is_asynchronous, shares, links):
    """Rows cross a link to enter a stage or to return; returning rows are verified."""
    cost = CostModel(
        link_row=0.1,
        head_row=0.2,
        verify_row=0.3,
        is_asynchronous=is_asynchronous,
        draft_on_first_stage=shares,
    )
    clock = VirtualClock(cost, CUT, 0.0)
    expected = links + 4 * (0.2 + 0.3) / (2 if is_asynchronous else 1)
    # The stages take 0.375 and 0.625: the longer one in lock step, else the mean.
    stage = 0.5 if is_asynchronous else 0.625
    assert clock.duration([7, 5], draft_forwards=0, overlap=True) == pytest.approx(stage + expected)
    assert clock.duration([7, 0], draft_forwards=0, overlap=True) < 0.375 + expected
    assert clock.autoregressive_time(3) == pytest.approx(3)
    even = VirtualClock(cost, (0, 4, 8), 0.0)
    one, five = (even.duration([rows] * 2, draft_forwards=0, overlap=True) for rows in (1, 5))
    assert even.row_price == pytest.approx((five - one) / 4)


def test_rows_that_slow_a_step_make_no_room_for_more_forwards():
    for row in (0.0, 0.5):
        assert VirtualClock(CostModel(row=row), (0, 4, 8), 1 / 8).hidden_forwards() == 4


@pytest.mark.parametrize("name", COST_PRESETS)
def test_presets_are_what_their_sources_say(name):
    """For 7B in 16 bits, the devices compute 100 to 300 rows while they read the weights."""
    cost = read_cost(name)
    if name == "this_cpu":
        assert cost.row == 0.035 and cost.is_asynchronous
        return
    assert 100 < 1 / cost.row < 300
    assert cost.head_row == pytest.approx(cost.row * cost.verify)
    assert cost.verify == pytest.approx(0.0202, abs=1e-4)
    # 8 KiB per row: 66 us on Gigabit Ethernet, in a 190 ms pass; a millionth as long on NVLink.
    assert cost.link_row < 4e-4 and (cost.link_row > 3e-4) == (name == "jetson_orin")


def test_files_of_before_rows_had_prices_are_read(tmp_path):
    older = {"row": 0.02, "link": 0.1, "verify": 0.3, "draft_forward": None, "sharing": 0.1}
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(older))
    assert read_cost(str(path)) == CostModel(**older)
    path.write_text(json.dumps(vars(COST_PRESETS["a100"])))
    assert read_cost(str(path)) == COST_PRESETS["a100"]


@pytest.mark.parametrize(
    "text", ['{"row": "0.1"}', '{"row": -1}', "[1]", "{", '{"row": 1e999}', '{"raw": 1}']
)
def test_files_that_are_no_cost_model_are_refused_in_one_line(text, tmp_path):
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"--cost: .*cost\.json' is no cost model .*h100, a100"):
        read_cost(str(path))


def test_a_cost_that_is_neither_a_preset_nor_a_file_is_refused_in_one_line():
    with pytest.raises(UsageError, match=r"^--cost: 'h10' is no file; give one, or h100, a100"):
        read_cost("h10")
