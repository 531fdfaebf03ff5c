"""Pipelines with unequal stages: their costs, and where to cut the target."""

import itertools
import json
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tiny_models import REPOSITORY

from pipedraft.errors import UsageError
from pipedraft.eval.record import ProcessRecord
from pipedraft.eval.replay import fit_cost
from pipedraft.inference.command import resolve_cut
from pipedraft.inference.config import DecodeConfig, read_cost
from pipedraft.inference.cost_model import CostModel, StageCost, VirtualClock
from pipedraft.inference.cut import AUTO, cut_layers, read_boundary

CUT = (0, 3, 8)


def a_cluster(rng: random.Random, num_layers: int, num_stages: int) -> CostModel:
    stages = [
        StageCost(
            speed=rng.choice([0.25, 0.5, 1, 1.5, 3]),
            row=rng.choice([None, 0.2]),
            memory_gb=rng.choice([None, 3.0, 5.0, 8.0]),
            replicas=rng.choice([1, 1, 2]),
        )
        for _ in range(num_stages)
    ]
    return CostModel(
        row=0.05,
        draft_forward=rng.choice([None, 0.1, 0.4]),
        draft_on_first_stage=rng.random() < 0.5,
        layer_times=rng.choice([(), tuple(rng.choice([1.0, 2.5]) for _ in range(num_layers))]),
        stages=tuple(stages),
        layer_gb=rng.choice([0.5, 1.0]),
        first_gb=rng.choice([0.0, 1.0]),
        last_gb=0.5,
        draft_gb=rng.choice([0.0, 1.5]),
    )


def price(cost: CostModel, cut: tuple[int, ...], rows: int) -> tuple[float, float]:
    """Longest stage and sum of all, by the clock itself; infinite where memory is too small."""
    last = len(cut) - 2
    for stage, (start, end) in enumerate(itertools.pairwise(cut)):
        size = cost.layer_gb * (end - start) + cost.last_gb * (stage == last)
        size += (cost.first_gb + cost.draft_gb * cost.draft_on_first_stage) * (stage == 0)
        memory = cost.stages[stage].memory_gb
        if memory is not None and size > memory:
            return math.inf, math.inf
    times = VirtualClock(cost, cut, 0.0).busy([rows] * (last + 1))
    times[0] += (cost.draft_forward or 0.0) * cost.draft_on_first_stage
    return max(times), sum(times)


@pytest.mark.parametrize("seed", range(60))
def test_the_cut_is_the_best_of_all_cuts(seed):
    rng = random.Random(seed)
    num_stages, rows = rng.randint(1, 4), rng.choice([1, 5])
    num_layers = rng.randint(num_stages, 10)
    cost = a_cluster(rng, num_layers, num_stages)
    inner = itertools.combinations(range(1, num_layers), num_stages - 1)
    best = min(price(cost, (0, *middle, num_layers), rows) for middle in inner)
    if best[0] == math.inf:
        with pytest.raises(ValueError, match="fits the stages' memory"):
            cut_layers(cost, num_layers, num_stages, rows=rows)
    else:
        cut = cut_layers(cost, num_layers, num_stages, rows=rows)
        assert price(cost, cut, rows) == pytest.approx(best)


@pytest.mark.parametrize(
    ("is_asynchronous", "shares"), [(False, False), (True, False), (True, True)]
)
def test_equal_stages_described_one_by_one_cost_what_a_uniform_pipeline_does(
    is_asynchronous, shares
):
    uniform = CostModel(
        row=0.1,
        link=0.1,
        link_row=0.01,
        verify=0.2,
        is_asynchronous=is_asynchronous,
        draft_on_first_stage=shares,
    )
    told = replace(uniform, stages=(StageCost(),) * 2)
    clocks = [VirtualClock(cost, CUT, 0.3) for cost in (uniform, told)]
    for rows in ([1, 0], [4, 1], [2, 7]):
        times = [clock.duration(rows, draft_forwards=1, overlap=True) for clock in clocks]
        assert times[1] == pytest.approx(times[0])
    assert clocks[1].autoregressive_time(5) == pytest.approx(clocks[0].autoregressive_time(5))
    assert clocks[1].row_price == pytest.approx(clocks[0].row_price)


def test_a_slow_stage_with_a_far_link_is_what_a_step_waits_for():
    slow = StageCost(speed=0.5, row=0.5, link=2.0, link_row=0.25)
    clock = VirtualClock(CostModel(link=0.1, stages=(StageCost(), slow)), (0, 4, 8), 0.0)
    assert clock.busy([1, 3]) == [0.5, 1 * 2.0]
    assert clock.duration([1, 3], draft_forwards=0, overlap=True) == 2.0 + 2.0 + 2 * 0.25
    assert clock.duration([1, 0], draft_forwards=0, overlap=True) == 0.5 + 0.1
    assert clock.autoregressive_time(1) == pytest.approx((0.5 + 0.1) + (1.0 + 2.0))
    twice = VirtualClock(CostModel(stages=(StageCost(), StageCost(replicas=2))), (0, 4, 8), 0.0)
    assert twice.shares == [0.5, 0.25]
    kinds = VirtualClock(CostModel(layer_times=(3.0, 1.0, 1.0, 1.0)), (0, 1, 4), 0.0)
    assert kinds.shares == [0.5, 0.5]


def test_a_cluster_is_read_from_a_file_and_refused_in_one_line(tmp_path):
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"link": 0.1, "stages": [{"speed": 0.5, "memory_gb": 8}, {}]}))
    cost = read_cost(str(path))
    assert cost.stages == (StageCost(speed=0.5, memory_gb=8.0), StageCost())
    config = DecodeConfig(cost=cost, num_stages=2)
    assert DecodeConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(ValueError, match="2 devices for 4 stages; give"):
        DecodeConfig(cost=cost, num_stages=4)
    for content, expected in (
        ({"stages": [{"sped": 1}]}, "did you mean 'speed'"),
        ({"stages": [{"speed": 0}]}, "cost.stages.speed: 0"),
        ({"stages": [{"memory_gb": -1}]}, "cost.stages.memory_gb: -1"),
        ({"layer_times": [0, 0]}, "cost.layer_times"),
    ):
        path.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=expected) as caught:
            read_cost(str(path))
        assert "\n" not in str(caught.value)


def test_boundaries_auto_are_those_of_the_cost_model():
    target = str(REPOSITORY / "assets" / "target")
    stages = (StageCost(speed=3.0), StageCost(memory_gb=2.0))
    cost = CostModel(stages=stages, layer_gb=1.0)
    assert read_boundary("auto") == AUTO and read_boundary("12") == 12
    assert resolve_cut((AUTO,), cost, target, None, 2) == (0, 14, 16)
    assert resolve_cut((AUTO,), CostModel(), target, None, 4) == (0, 4, 8, 12, 16)
    assert resolve_cut((0, 3, 16), cost, target, None, 2) == (0, 3, 16)
    for boundaries, stages, expected in (
        ((0, AUTO), 2, "auto stands alone"),
        ((AUTO,), 3, "2 devices for 3 stages"),
        ((AUTO,), 17, "16 layers do not make 17 stages"),
    ):
        model = CostModel() if stages == 17 else cost
        with pytest.raises(UsageError, match=f"--boundaries: .*{expected}"):
            resolve_cut(boundaries, model, target, None, stages)
    with pytest.raises(ValueError, match="'x' is no layer"):
        read_boundary("x")


@pytest.mark.parametrize(("slower", "expected"), [(1.05, ()), (2.0, (1.5, 0.75))])
def test_ranks_that_differ_get_a_speed_each(slower, expected):
    """Two stages with four layers each: the second takes ``slower`` times as long."""
    processes = [
        ProcessRecord(name=name, seconds={"stage": s}, counts={"stage": 10}, rows={"stage": 10})
        for name, s in (("rank 0", 1.0), ("rank 1", slower))
    ]
    plain = SimpleNamespace(
        schedule="autoregressive",
        benchmark="overall",
        stages=2,
        tokens=10,
        draft_forwards=0,
        wallclock=SimpleNamespace(tokens_per_s=1.0),
        processes=processes,
    )
    cost = fit_cost([plain], (0, 4, 8))
    assert [stage.speed for stage in cost.stages] == pytest.approx(list(expected))
    assert sum(VirtualClock(cost, (0, 4, 8), 0.0).shares) == pytest.approx(1)
