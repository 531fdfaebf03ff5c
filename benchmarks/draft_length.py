"""Draft-length policies on simulated links: throughput over that of an oracle.

    python benchmarks/draft_length.py
    python benchmarks/draft_length.py --protocols dssd --processes bursty --traces data/net_traces --json

No model: draft tokens are accepted by a random process, messages of the protocol's sizes travel
over the virtual link, and a policy is told what a runtime would know. All policies of one seed
decode the same text: whether the token at a place of the text is accepted is drawn once.

The denominator, "oracle", knows each round's true survival and the link's true state when the round
begins, and takes the length of the highest mean rate; it foresees neither tokens nor the link.
Beside it: "oracle, est. link" has the policies' own estimate of the link, so that what it lacks is
the link's share of what a policy lacks; "foresight" also knows the delays that the coming messages
will meet, which no policy can; "plain" is the cloud decoding without drafts, streamed.

Traces: every CSV file below the --traces folders, those of RTTs alone with the bandwidth of FlexSpec's weak
WiFi if their name has "wifi" in it, else of its 5G. Each seed starts somewhere in the trace.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipedraft.inference.channel import PRESETS, Channel, Link, LinkEstimate
from pipedraft.inference.draft_length import (
    DraftLengthPolicy,
    Oracle,
    RoundCost,
    RoundShape,
    Survival,
    parse_policy,
)
from pipedraft.inference.link_files import read_trace

# T places of the text, K draft lengths or positions of a draft token in its round
MAX_LENGTH = 8
HEADER = Link.constant(up_mbps=1, rtt_ms=0).header_bytes
MESSAGE = HEADER + 12  # session, round and length of the prefix

PROTOCOLS = {
    "flexspec": RoundShape(
        draft_s=0.0085,
        verify_s=0.166,
        up_bytes=MESSAGE,
        up_bytes_per_token=4,
        down_bytes=MESSAGE,
    ),
    "picospec": RoundShape(
        draft_s=0.097 / 4,
        verify_s=0.087,
        up_bytes=MESSAGE,
        up_bytes_per_token=8,
        down_bytes=MESSAGE,
        reject_bytes=10 * 8,
    ),
    "dssd": RoundShape(
        draft_s=0.097 / 4,
        verify_s=0.087,
        up_bytes=MESSAGE,
        up_bytes_per_token=8,
        down_bytes=MESSAGE,
        reject_bytes=32_000 * 4,
    ),
}
"""Ids alone and one id back; ids and q, ten pairs back; ids and q, the whole fp32 distribution
back. Draft times: FlexSpec's Jetson AGX, and PicoSpec's Qwen3-0.6B (97 ms for 4 tokens); cloud
times: PicoSpec's of 70B and of 32B."""


def iid(random: np.random.Generator, length: int) -> np.ndarray:
    """One rate for all, drawn per seed."""
    return np.full((length, MAX_LENGTH), random.uniform(0.4, 0.95))


def falling(random: np.random.Generator, length: int) -> np.ndarray:
    """By position in the round: a draft that drifts off, as EAGLE's."""
    return np.tile([0.92, 0.86, 0.80, 0.72, 0.62, 0.5, 0.4, 0.3], (length, 1))


def rising(random: np.random.Generator, length: int) -> np.ndarray:
    """By position in the round: who passes the first tests is in an easy passage."""
    return np.tile([0.6, 0.75, 0.85, 0.9, 0.93, 0.95, 0.95, 0.95], (length, 1))


def drifting(random: np.random.Generator, length: int) -> np.ndarray:
    """Between 0.48 and 0.92 and back within 1500 tokens."""
    phase_T = np.arange(length) / 1500 + random.random()
    return np.repeat(0.7 + 0.22 * np.sin(2 * np.pi * phase_T)[:, None], MAX_LENGTH, axis=1)


def bursty(random: np.random.Generator, length: int) -> np.ndarray:
    """Prompts of 150 tokens on average, each with a rate of its own."""
    rate_T = np.empty(length)
    start = 0
    while start < length:
        end = start + random.geometric(1 / 150)
        rate_T[start:end] = random.choice([0.35, 0.65, 0.85, 0.95])
        start = end
    return np.repeat(rate_T[:, None], MAX_LENGTH, axis=1)


PROCESSES: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    process.__name__: process for process in (iid, falling, rising, drifting, bursty)
}


class Text:
    """What a draft would get right: acceptance by place and position, drawn once."""

    def __init__(self, process: str, num_tokens: int, seed: int) -> None:
        name = list(PROCESSES).index(process)
        random = np.random.default_rng([seed, 1, name])
        length = num_tokens + MAX_LENGTH + 1
        acceptance_TK = PROCESSES[process](random, length)
        self.num_tokens = num_tokens
        self.survival_TK = np.cumprod(acceptance_TK, axis=1)
        uniform_T = np.random.default_rng([seed, 2]).random(length + MAX_LENGTH)
        windows_TK = np.lib.stride_tricks.sliding_window_view(uniform_T, MAX_LENGTH)[:length]
        is_right_TK = windows_TK < acceptance_TK
        self.num_right = np.cumprod(is_right_TK, axis=1).sum(1).tolist()
        """By place: how many draft tokens in a row would be accepted, if as many were drafted."""
        self.place = 0


@dataclass
class World:
    """What only the simulation knows at the beginning of a round."""

    text: Text
    link: Link
    shape: RoundShape
    now_s: float

    def survival(self) -> np.ndarray:
        return self.text.survival_TK[self.text.place]

    def present_cost(self) -> RoundCost:
        state = self.link.state(self.now_s)
        return RoundCost.stop_and_wait(self.shape, state, MAX_LENGTH)

    def future_cost(self) -> RoundCost:
        """With the delays and bandwidths that each length's messages will meet."""
        seconds_2K = np.array(
            [
                [self._seconds(length, extra) for length in range(1, MAX_LENGTH + 1)]
                for extra in (0, self.shape.reject_bytes)
            ]
        )
        return RoundCost(*seconds_2K)

    def _seconds(self, length: int, extra_bytes: int) -> float:
        link, shape = self.link, self.shape
        time_s = self.now_s + length * shape.draft_s
        up_bytes = shape.up_bytes + length * shape.up_bytes_per_token
        time_s = link.up_bytes_per_s.reach(time_s, up_bytes)
        time_s += link.delay_s.at(time_s) + shape.verify_s + length * shape.verify_row_s
        time_s = link.down_bytes_per_s.reach(time_s, shape.down_bytes + extra_bytes)
        return time_s + link.delay_s.at(time_s) - self.now_s


@dataclass(frozen=True)
class Contestant:
    make: Callable[[World], DraftLengthPolicy]
    cost: Callable[[World], RoundCost] | None = None
    """None: from the edge's estimate of the link."""


def informed(cost: Callable[[World], RoundCost] | None) -> Contestant:
    return Contestant(lambda world: Oracle(MAX_LENGTH, survival=world.survival), cost)


def named(name: str) -> Contestant:
    return Contestant(lambda _: parse_policy(name, max_length=MAX_LENGTH))


ORACLE = "oracle"
CONTESTANTS = {
    **{name: named(name) for name in ("fixed:2", "fixed:4", "eq11", "alg2", "geometric")},
    "survival, one memory": Contestant(lambda _: Survival(MAX_LENGTH, memories=[32])),
    "survival": named("survival"),
    "oracle, est. link": informed(None),
    ORACLE: informed(World.present_cost),
    "foresight": informed(World.future_cost),
}


def decode(world: World, contestant: Contestant, seed: int) -> float:
    """Tokens per second of one policy over one text, stop-and-wait."""
    text, shape, start_s = world.text, world.shape, world.now_s
    channel = Channel(world.link, seed=seed)
    estimate = LinkEstimate(world.link.state(start_s))
    policy = contestant.make(world)
    while text.place < text.num_tokens:
        if contestant.cost:
            cost = contestant.cost(world)
        else:
            state = world.link.state(world.now_s)
            estimate.set_bandwidth(
                up_bytes_per_s=state.up_bytes_per_s, down_bytes_per_s=state.down_bytes_per_s
            )
            cost = RoundCost.stop_and_wait(shape, estimate.state, MAX_LENGTH)
        drafted = policy.choose(cost)
        accepted = min(drafted, text.num_right[text.place])
        up_bytes = shape.up_bytes + drafted * shape.up_bytes_per_token
        down_bytes = shape.down_bytes + (accepted < drafted) * shape.reject_bytes
        sent_s = world.now_s + drafted * shape.draft_s
        verify_s = shape.verify_s + drafted * shape.verify_row_s
        arrived_s = channel.transmit(sent_s, up_bytes - HEADER, "up")
        world.now_s = channel.transmit(arrived_s + verify_s, down_bytes - HEADER, "down")
        network_s = world.now_s - sent_s - verify_s
        estimate.observe(network_s, up_bytes=up_bytes, down_bytes=down_bytes)
        policy.observe(drafted, accepted)
        text.place += accepted + 1
    return text.place / (world.now_s - start_s)


def find_links(folders: list[Path]) -> Iterator[tuple[str, str, Link]]:
    """Kind, name, link."""
    for name, link in PRESETS.items():
        yield "constant", name, link
    for folder in folders:
        for path in sorted(folder.rglob("*.csv")):
            with path.open(encoding="utf-8") as file:
                if not file.readline().startswith("t_ms,"):
                    continue
            base = PRESETS["wifi" if "wifi" in path.stem else "5g"]
            yield "trace", path.stem, read_trace(path, base=base)


def measure_cell(
    link: Link, shape: RoundShape, process: str, num_tokens: int, num_seeds: int
) -> dict[str, Any]:
    """Throughputs of all contestants, and their ratios to the oracle's, over seeds."""
    period_s = link.delay_s.period_s
    rates: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for seed in range(num_seeds):
        start = np.random.default_rng([seed, 3]).random()
        start_s = 0.0 if math.isinf(period_s) else start * period_s
        for name, contestant in CONTESTANTS.items():
            world = World(Text(process, num_tokens, seed), link, shape, start_s)
            rates[name].append(decode(world, contestant, seed))
    oracle = np.array(rates[ORACLE])
    ratios = {name: np.array(values) / oracle for name, values in rates.items()}
    ratios["plain"] = 1 / shape.verify_s / oracle
    return {
        "oracle_tokens_per_s": float(oracle.mean()),
        "over_oracle": {
            name: {
                "mean": float(values.mean()),
                "sd": float(values.std(ddof=1)),
                "min": float(values.min()),
            }
            for name, values in ratios.items()
        },
    }


def summarize(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """By kind of link: mean over cells of each policy's mean ratio, and its worst cell."""
    summary: dict[str, Any] = {}
    for kind in sorted({cell["kind"] for cell in cells}):
        chosen = [cell for cell in cells if cell["kind"] == kind]
        summary[kind] = {}
        for name in chosen[0]["over_oracle"]:
            means = [cell["over_oracle"][name]["mean"] for cell in chosen]
            worst = chosen[int(np.argmin(means))]
            summary[kind][name] = {
                "mean": float(np.mean(means)),
                "worst": float(min(means)),
                "worst_cell": f"{worst['protocol']}, {worst['process']}, {worst['link']}",
            }
    return summary


def print_tables(cells: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    names = [name for name in cells[0]["over_oracle"] if name != ORACLE]
    header = "| link | oracle, tokens/s | " + " | ".join(names) + " |"
    for protocol, process in dict.fromkeys((c["protocol"], c["process"]) for c in cells):
        print(f"### {protocol}, {process}: over the oracle, mean (standard deviation over texts)\n")
        print(header + "\n" + "|---" * (len(names) + 2) + "|")
        for cell in cells:
            if (cell["protocol"], cell["process"]) != (protocol, process):
                continue
            found = [cell["over_oracle"][name] for name in names]
            values = " | ".join(f"{v['mean']:.3f} ({v['sd']:.3f})" for v in found)
            print(f"| {cell['link']} | {cell['oracle_tokens_per_s']:.2f} | {values} |")
        print()
    print("### All\n\n| links | policy | mean over cells | worst cell's mean | worst cell |")
    print("|---" * 5 + "|")
    for kind, policies in summary.items():
        for name, v in policies.items():
            print(f"| {kind} | {name} | {v['mean']:.3f} | {v['worst']:.3f} | {v['worst_cell']} |")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--protocols", nargs="+", choices=PROTOCOLS, default=["picospec", "dssd"])
    add("--processes", nargs="+", choices=PROCESSES, default=list(PROCESSES))
    add(
        "--traces",
        nargs="+",
        type=Path,
        default=[Path("assets/net_traces"), Path("data/net_traces")],
        help="folders; what is not there is left out (default: %(default)s)",
    )
    add("--tokens", type=int, default=2000, help="of each text")
    add("--seeds", type=int, default=20, help="texts for each cell; at least 2")
    add("--json", action="store_true", help="nothing but a line of JSON")
    args = parser.parse_args()
    links = list(find_links(args.traces))
    cells = [
        {"protocol": protocol, "process": process, "kind": kind, "link": name}
        | measure_cell(link, PROTOCOLS[protocol], process, args.tokens, args.seeds)
        for protocol in args.protocols
        for process in args.processes
        for kind, name, link in links
    ]
    summary = summarize(cells)
    if not args.json:
        print_tables(cells, summary)
    outcome = {"seeds": args.seeds, "tokens": args.tokens, "over_oracle": summary}
    print(json.dumps({**outcome, "cells": cells} if args.json else outcome))


if __name__ == "__main__":
    main()
