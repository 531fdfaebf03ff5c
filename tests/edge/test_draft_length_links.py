"""The geometric policy on virtual links, against the oracle in benchmarks/edge/draft_length.py."""

import importlib.util
import sys
from functools import cache
from types import ModuleType

import numpy as np
import pytest
from tiny_models import REPOSITORY

from pipedraft.inference.edge.channel import PRESETS, load_link
from pipedraft.inference.edge.draft_length import Geometric
from pipedraft.inference.edge.schedules.stop_and_wait import FlexSpecSchedule, StopAndWait

KEPT = {
    "test_geometric_keeps_97_percent_of_the_oracle_on_links_of_constants": 0,
    "test_the_default_keeps_95_percent_of_the_oracle_where_batches_are_away": 1,
    "test_geometric_keeps_97_percent_of_the_oracle_on_the_shipped_traces": 1,
}

TOKENS = 1000


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    path = REPOSITORY / "benchmarks" / "edge" / "draft_length.py"
    spec = importlib.util.spec_from_file_location("draft_length_benchmark", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class Uncensored(Geometric):
    """Known-bad: a fully accepted round counts as one with a rejection after its last token."""

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        super().observe(min(num_drafted + 1, self.max_length), num_accepted)


@cache
def rates(benchmark: ModuleType, name: str, process: str, link_name: str, way: str) -> list[float]:
    """Return a policy's throughput for each output.

    "bursty" varies most and comes nearest to the test's bound: 0.970 to 0.975 with 40 texts.
    """
    protocol = benchmark.PROTOCOLS[way]
    energy = benchmark.energy_model(protocol.shape, "wifi")
    link = PRESETS.get(link_name) or load_link(link_name)
    uncensored = benchmark.Contestant(lambda _: Uncensored(benchmark.MAX_LENGTH))
    contestant, found = benchmark.CONTESTANTS.get(name, uncensored), []
    for seed in range(10 if process == "bursty" else 4):
        world = benchmark.World(benchmark.make_text(process, TOKENS, seed), link, protocol, 0.0)
        found.append(benchmark.decode(world, contestant, seed, energy).tokens_per_s)
    return found


def ratio(benchmark: ModuleType, name: str, *place: str, way: str = "picospec_serial") -> float:
    """Return a policy's throughput over the oracle's, mean over outputs."""
    own, oracle = (rates(benchmark, policy, *place, way) for policy in (name, "oracle"))
    return float(np.mean(np.divide(own, oracle)))


@pytest.mark.parametrize("link", PRESETS)
def test_geometric_keeps_97_percent_of_the_oracle_on_links_of_constants(
    benchmark: ModuleType, link: str
) -> None:
    texts = [*benchmark.RECORDED, *benchmark.PROCESSES]
    found = {text: ratio(benchmark, "geometric", text, link) for text in texts}
    # One rate for all positions falls short where the rate depends on the position, or jumps.
    short = {name: found.pop(name) for name in ("rising", "bursty")}
    assert min(found.values()) > 0.97 and min(short.values()) > 0.95, (found, short)
    for known_bad in ("eq11", "alg2"):
        assert ratio(benchmark, known_bad, "t0_match", link) < 0.97, known_bad
    assert ratio(benchmark, "uncensored", "t0_match", link) < found["t0_match"] - 0.02


@pytest.mark.parametrize("trace", ["wifi_good", "wifi_busy", "wifi_bad", "drive"])
def test_geometric_keeps_97_percent_of_the_oracle_on_the_shipped_traces(
    benchmark: ModuleType, trace: str
) -> None:
    link = f"wifi:{REPOSITORY}/assets/net_traces/{trace}.csv"
    for text in ("t0_match", "t1_rejection"):
        assert ratio(benchmark, "geometric", text, link) > 0.97, text


@pytest.mark.parametrize("name", ["picospec_published", "picospec"])
def test_the_default_keeps_95_percent_of_the_oracle_where_batches_are_away(
    benchmark: ModuleType, name: str
) -> None:
    texts = ("t0_match", "t1_rejection")
    found = [ratio(benchmark, "geometric", text, "5g", way=name) for text in texts]
    assert min(found) > 0.95, found
    assert StopAndWait.policy == "fixed:4" and FlexSpecSchedule.policy == "geometric"
    assert ratio(benchmark, "eq11", "t1_rejection", "5g", way=name) < 0.95
