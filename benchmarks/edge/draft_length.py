"""Compare draft-length policies on simulated links by their throughput relative to an oracle.

    python benchmarks/edge/draft_length.py
    python benchmarks/edge/draft_length.py --protocols dssd --processes bursty --json

No model runs. Acceptance comes from a random process or from a small draft's recording, named by
temperature and rule (t0_match, t1_rejection). Messages with the protocol's sizes travel over the
virtual link, and a policy sees only what it would see at run time. Acceptance at each place is
sampled once, so all policies with one seed decode the same sequence. picospec_published keeps one
batch in flight, and picospec keeps enough batches in flight to hide the link. Both draft meanwhile,
and have no bonus token. Early passes and batches cut by time are left out.

"oracle" knows each round's true survival (for a recording, the mean over the whole sequence) and
the link's true state at the round's start. It takes the length with the highest mean rate, but
foresees neither tokens nor the link. For comparison, "oracle, est. link" uses the same link
estimate as the policies, and "plain" is autoregressive decoding in the cloud, streamed. Energy is
the edge's, with constants from ``eval.edge.methods``.
"""

import argparse
import json
import math
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for the scripts in the folder above
from measurement import make_parser

from pipedraft.eval.edge.methods import TIMES, radio_energy, radio_of
from pipedraft.inference.edge.channel import (
    PRESETS,
    Channel,
    EnergyModel,
    Link,
    LinkEstimate,
    LinkState,
    read_trace,
)
from pipedraft.inference.edge.draft_length import (
    DraftLengthPolicy,
    RoundCost,
    RoundShape,
    parse_policy,
)

# T places in the sequence, K draft lengths or positions in a round
MAX_LENGTH = 8
HEADER = Link.header_bytes
MESSAGE = HEADER + 12  # session, round and length of the prefix

FLEXSPEC = RoundShape(
    draft_s=0.0085,
    verify_s=0.166,
    up_bytes=MESSAGE,
    up_bytes_per_token=4,
    down_bytes=MESSAGE,
)
PICOSPEC = RoundShape(
    draft_s=0.097 / 4,
    verify_s=0.087,
    up_bytes=MESSAGE,
    up_bytes_per_token=8,
    down_bytes=MESSAGE,
    reject_bytes=10 * 8,
)


@dataclass(frozen=True)
class Protocol:
    shape: RoundShape
    cost: Callable[[RoundShape, LinkState, int], RoundCost] = RoundCost.stop_and_wait
    """Cost per round. With any other than the default the edge keeps drafting while batches are in
    flight."""
    window: int | None = 1
    """Batches in flight; None: enough to hide the link, ceil((RTT + T_v) / T_d)."""


PROTOCOLS = {
    "flexspec": Protocol(FLEXSPEC),
    "dssd": Protocol(replace(PICOSPEC, reject_bytes=32_000 * 4)),
    "picospec_serial": Protocol(PICOSPEC),
    "picospec_published": Protocol(PICOSPEC, RoundCost.asynchronous),
    "picospec": Protocol(PICOSPEC, RoundCost.pipelined, None),
}
"""Payload up and down, and batches in flight. flexspec sends ids up and one id down. dssd sends ids
and q up, and the whole fp32 distribution down. The three picospec protocols send ids and q up, and
ten pairs down. The edge waits for every result, except that picospec_published has one batch in
flight and picospec several. Draft times: FlexSpec's Jetson AGX, and PicoSpec's Qwen3-0.6B (97 ms
for 4 tokens). Cloud times: PicoSpec's 70B target for flexspec, its 32B for the others."""


def iid(random: np.random.Generator, length: int) -> np.ndarray:
    """Return one acceptance rate for all places, sampled per seed."""
    return np.full((length, MAX_LENGTH), random.uniform(0.4, 0.95))


def falling(random: np.random.Generator, length: int) -> np.ndarray:
    """Return rates falling within a round, because the draft drifts as in EAGLE."""
    return np.tile([0.92, 0.86, 0.80, 0.72, 0.62, 0.5, 0.4, 0.3], (length, 1))


def rising(random: np.random.Generator, length: int) -> np.ndarray:
    """Return rates rising within a round, because accepted tokens indicate an easy passage."""
    return np.tile([0.6, 0.75, 0.85, 0.9, 0.93, 0.95, 0.95, 0.95], (length, 1))


def drifting(random: np.random.Generator, length: int) -> np.ndarray:
    """Return rates swinging between 0.48 and 0.92 with a period of 1500 tokens."""
    phase_T = np.arange(length) / 1500 + random.random()
    return np.repeat(0.7 + 0.22 * np.sin(2 * np.pi * phase_T)[:, None], MAX_LENGTH, axis=1)


def bursty(random: np.random.Generator, length: int) -> np.ndarray:
    """Return one rate for each stretch of text. A stretch has 150 tokens on average."""
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


RECORDED = ("t0_match", "t1_match", "t1_rejection")
RECORDING = Path(__file__).parents[2] / "assets" / "acceptance" / "tiny_draft.json"


@dataclass
class DraftedText:
    """Acceptance of a draft's tokens in one sequence."""

    num_tokens: int
    survival_TK: np.ndarray
    num_right: list[int]
    """Per place: number of consecutive accepted draft tokens in a batch that starts there."""
    place: int = field(default=0, init=False)


def simulated_text(process: str, num_tokens: int, seed: int) -> DraftedText:
    """Sample once which draft tokens are accepted, by place and position in a round."""
    random = np.random.default_rng([seed, 1, list(PROCESSES).index(process)])
    length = num_tokens + MAX_LENGTH + 1
    acceptance_TK = PROCESSES[process](random, length)
    uniform_T = np.random.default_rng([seed, 2]).random(length + MAX_LENGTH)
    is_right_TK = sliding_windows(uniform_T)[:length] < acceptance_TK
    return DraftedText(num_tokens, np.cumprod(acceptance_TK, axis=1), count_right(is_right_TK))


def recorded_text(name: str, num_tokens: int, seed: int) -> DraftedText:
    """Join recorded answers in an order sampled per seed.

    The oracle knows only the mean survival over the whole sequence, so a policy that notices local
    changes may win.
    """
    answers = recorded_answers(name)
    random = np.random.default_rng([seed, 1])
    length = num_tokens + MAX_LENGTH + 1
    order: list[np.ndarray] = []
    while sum(map(len, order)) < length + MAX_LENGTH:
        order += [answers[index] for index in random.permutation(len(answers))]
    num_right = count_right(sliding_windows(np.concatenate(order))[:length])
    survival_K = (np.array(num_right)[:, None] > np.arange(MAX_LENGTH)).mean(0)
    return DraftedText(num_tokens, np.tile(survival_K, (length, 1)), num_right)


@cache
def recorded_answers(name: str) -> list[np.ndarray]:
    held = json.loads(RECORDING.read_text(encoding="utf-8"))
    return [np.array(list(row)) == "1" for row in held[name]]


def sliding_windows(values_T: np.ndarray) -> np.ndarray:
    return np.lib.stride_tricks.sliding_window_view(values_T, MAX_LENGTH)


def count_right(is_right_TK: np.ndarray) -> list[int]:
    return np.cumprod(is_right_TK, axis=1).sum(1).tolist()


def make_text(process: str, num_tokens: int, seed: int) -> DraftedText:
    make = recorded_text if process in RECORDED else simulated_text
    return make(process, num_tokens, seed)


def energy_model(shape: RoundShape, radio: str) -> EnergyModel:
    return radio_energy(radio, draft_s=shape.draft_s)


class World:
    """True state of the simulation at a round's start. Runtime policies cannot see it."""

    def __init__(self, text: DraftedText, link: Link, protocol: Protocol, start_s: float) -> None:
        self.text, self.link, self.protocol, self.now_s = text, link, protocol, start_s
        self.shape = protocol.shape
        self.state = LinkState(  # bandwidths: from the first moment with any
            up_bytes_per_s=link.up_bytes_per_s.at(link.up_bytes_per_s.reach(start_s, 1)),
            down_bytes_per_s=link.down_bytes_per_s.at(link.down_bytes_per_s.reach(start_s, 1)),
            round_trip_s=2 * link.delay_s.at(start_s),
        )

    def look(self) -> None:
        """Update the link state, but keep the last bandwidths during an outage."""
        state, before = self.link.state(self.now_s), self.state
        self.state = LinkState(
            up_bytes_per_s=state.up_bytes_per_s or before.up_bytes_per_s,
            down_bytes_per_s=state.down_bytes_per_s or before.down_bytes_per_s,
            round_trip_s=state.round_trip_s,
        )

    def survival(self) -> np.ndarray:
        return self.text.survival_TK[self.text.place]


@dataclass(frozen=True)
class Contestant:
    make: Callable[[World], DraftLengthPolicy]
    knows_link: bool = False
    """True: use the true link state; False: the edge's estimate."""


class Informed(DraftLengthPolicy):
    """Policy that takes the best length for the true survival, known only in a simulation."""

    def __init__(self, world: World) -> None:
        super().__init__(MAX_LENGTH)
        self.world = world

    def choose(self, cost: RoundCost) -> int:
        return cost.best_length(self.world.survival())


def named(name: str) -> Contestant:
    return Contestant(lambda _: parse_policy(name, max_length=MAX_LENGTH))


CONTESTANTS = {
    **{name: named(name) for name in ("fixed:2", "fixed:4", "eq11", "alg2", "geometric")},
    "oracle, est. link": Contestant(Informed),
    "oracle": Contestant(Informed, knows_link=True),
}


@dataclass(frozen=True)
class PolicyOutcome:
    tokens_per_s: float
    joules_per_token: float


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Verification result for a batch, with the times and message sizes observed by the edge."""

    drafted: int
    accepted: int
    read_s: float
    network_s: float
    sizes: dict[str, int]


class PolicyRun:
    """One policy over one sequence."""

    def __init__(self, world: World, contestant: Contestant, seed: int) -> None:
        self.world, self.contestant = world, contestant
        self.channel = Channel(world.link, seed=seed)
        self.estimate = LinkEstimate(world.state)
        self.policy = contestant.make(world)
        self.num_drafted, self.pass_s = 0, (-1.0, -1.0)
        """Draft tokens so far; start and end of the cloud's latest pass."""

    def choose(self) -> int:
        world = self.world
        world.look()
        self.estimate.set_bandwidth(
            up_bytes_per_s=world.state.up_bytes_per_s,
            down_bytes_per_s=world.state.down_bytes_per_s,
        )
        state = world.state if self.contestant.knows_link else self.estimate.state
        return self.policy.choose(world.protocol.cost(world.shape, state, MAX_LENGTH))

    def send(self, drafted: int, accepted: int, sent_s: float, *, is_stale: bool) -> Verdict:
        """Send a batch, verify it with all batches that have arrived, and return its result.

        Args:
            is_stale: the batch follows a rejected one and is dropped on arrival.
        """
        shape = self.world.shape
        self.num_drafted += drafted
        up_bytes = shape.up_bytes + drafted * shape.up_bytes_per_token
        down_bytes = shape.down_bytes + (accepted < drafted) * shape.reject_bytes
        arrived_s = self.channel.transmit(sent_s, up_bytes - HEADER, "up")
        read_s = math.inf
        begins_s, ends_s = self.pass_s
        if not is_stale:
            if arrived_s > begins_s:
                begins_s = max(arrived_s, ends_s)
                ends_s = begins_s + shape.verify_s + drafted * shape.verify_row_s
                self.pass_s = begins_s, ends_s
            read_s = self.channel.transmit(ends_s, down_bytes - HEADER, "down")
        return Verdict(
            drafted=drafted,
            accepted=accepted,
            read_s=read_s,
            network_s=read_s - sent_s - (ends_s - arrived_s),
            sizes={"up_bytes": up_bytes, "down_bytes": down_bytes},
        )

    def hear(self, verdict: Verdict) -> None:
        self.estimate.observe(verdict.network_s, **verdict.sizes)
        self.policy.observe(verdict.drafted, verdict.accepted)

    def round(self) -> None:
        """Run one round of a protocol without overlap, which drafts, sends and waits."""
        world, text = self.world, self.world.text
        drafted = self.choose()
        accepted = min(drafted, text.num_right[text.place])
        sent_s = world.now_s + drafted * world.shape.draft_s
        verdict = self.send(drafted, accepted, sent_s, is_stale=False)
        self.hear(verdict)
        world.now_s = verdict.read_s
        text.place += accepted + 1

    def epoch(self) -> None:
        """Keep drafting until a rejection is read.

        Results are read between two draft tokens and while a batch waits. A batch waits until fewer
        than ``window`` batches are in flight. Tokens drafted after the rejected one are dropped.
        """
        world, text, draft_s = self.world, self.world.text, self.world.shape.draft_s
        flights: deque[Verdict] = deque()
        missed: Verdict | None = None
        while True:
            while flights and flights[0].read_s <= world.now_s:
                self.hear(flights.popleft())
            drafted, window = self.choose(), world.protocol.window
            if window is None:
                away_s = self.estimate.state.round_trip_s + world.shape.verify_s
                window = math.ceil(away_s / (drafted * draft_s) - 1e-9)
            sent_s = world.now_s + drafted * draft_s
            if len(flights) >= window:
                sent_s = max(sent_s, flights[-window].read_s)
            if missed and sent_s >= missed.read_s:
                break
            accepted = 0 if missed else min(drafted, text.num_right[text.place])
            flights.append(self.send(drafted, accepted, sent_s, is_stale=missed is not None))
            world.now_s = sent_s
            if not missed:
                text.place += accepted
                if accepted < drafted or text.place >= text.num_tokens:
                    missed = flights[-1]
        under_way = min(drafted, math.ceil((missed.read_s - world.now_s) / draft_s - 1e-9))
        self.num_drafted += under_way
        world.now_s = max(missed.read_s, world.now_s + under_way * draft_s)
        while flights[0] is not missed:
            self.hear(flights.popleft())
        self.hear(missed)
        text.place += 1


def decode(world: World, contestant: Contestant, seed: int, energy: EnergyModel) -> PolicyOutcome:
    """Run one policy over one sequence."""
    text, start_s, run = world.text, world.now_s, PolicyRun(world, contestant, seed)
    waits = world.protocol.cost == RoundCost.stop_and_wait
    while text.place < text.num_tokens:
        run.round() if waits else run.epoch()
    elapsed_s = world.now_s - start_s
    joules = energy.joules(run.channel, num_drafted=run.num_drafted, elapsed_s=elapsed_s)
    return PolicyOutcome(text.place / elapsed_s, sum(joules.values()) / text.place)


def find_links(folders: list[Path]) -> Iterator[tuple[str, str, Link]]:
    """Yield each link's kind and name, and the link."""
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
    name: str, link: Link, protocol: Protocol, process: str, sizes: argparse.Namespace
) -> dict[str, Any]:
    """Return each contestant's throughput relative to the oracle's, and its joules per token."""
    energy = energy_model(protocol.shape, radio_of(name))
    period_s = link.delay_s.period_s
    outcomes: dict[str, list[PolicyOutcome]] = {name: [] for name in CONTESTANTS}
    for seed in range(sizes.seeds):
        start = np.random.default_rng([seed, 3]).random()
        start_s = 0.0 if math.isinf(period_s) else start * period_s
        for name, contestant in CONTESTANTS.items():
            world = World(make_text(process, sizes.tokens, seed), link, protocol, start_s)
            outcomes[name].append(decode(world, contestant, seed, energy))
    rates = {name: np.array([o.tokens_per_s for o in found]) for name, found in outcomes.items()}
    ratios = {name: values / rates["oracle"] for name, values in rates.items()}
    times = TIMES["flexspec" if protocol.shape == FLEXSPEC else "picospec"]
    ratios["plain"] = 1 / times.forward_s(1, alone=True) / rates["oracle"]
    return {
        "oracle_tokens_per_s": float(rates["oracle"].mean()),
        "over_oracle": {
            name: {"mean": float(values.mean()), "sd": float(values.std(ddof=1))}
            for name, values in ratios.items()
        },
        "joules_per_token": {
            name: float(np.mean([o.joules_per_token for o in found]))
            for name, found in outcomes.items()
        },
    }


def summarize(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """For each kind of link, return every policy's mean ratio over cells and its worst cell."""
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


def energies(cells: list[dict[str, Any]], protocol: str, process: str) -> str:
    """Return as text each policy's edge energy (J/token), averaged over the links.

    A policy's energies on different links differ by a few percent.
    """
    chosen = [c for c in cells if (c["protocol"], c["process"]) == (protocol, process)]
    means = {name: np.mean([c["joules_per_token"][name] for c in chosen]) for name in CONTESTANTS}
    return ", ".join(f"{name} {mean:.3f}" for name, mean in means.items())


def print_tables(cells: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    names = [name for name in (*CONTESTANTS, "plain") if name != "oracle"]
    header = "| link | oracle, tokens/s | " + " | ".join(names) + " |"
    for protocol, process in dict.fromkeys((c["protocol"], c["process"]) for c in cells):
        print(f"### {protocol}, {process}: over the oracle, mean (standard deviation over texts)\n")
        print(header + "\n" + "|---" * (len(names) + 2) + "|")
        for cell in (c for c in cells if (c["protocol"], c["process"]) == (protocol, process)):
            found = [cell["over_oracle"][name] for name in names]
            values = " | ".join(f"{v['mean']:.3f} ({v['sd']:.3f})" for v in found)
            print(f"| {cell['link']} | {cell['oracle_tokens_per_s']:.2f} | {values} |")
        print(f"\nJ/token: {energies(cells, protocol, process)}\n")
    print("### All\n\n| links | policy | mean over cells | worst cell's mean | worst cell |")
    print("|---" * 5 + "|")
    for kind, policies in summary.items():
        for name, v in policies.items():
            print(f"| {kind} | {name} | {v['mean']:.3f} | {v['worst']:.3f} | {v['worst_cell']} |")
    print()


def main() -> None:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--protocols", nargs="+", choices=PROTOCOLS, default=["picospec"])
    add("--processes", nargs="+", choices=[*RECORDED, *PROCESSES], default=list(RECORDED))
    add(
        "--traces",
        nargs="+",
        type=Path,
        default=[Path("assets/net_traces"), Path("data/net_traces")],
        help="folders of CSV files; without bandwidths: FlexSpec's, of WiFi if that is in the name",
    )
    add("--tokens", type=int, default=1000, help="of each text")
    add("--seeds", type=int, default=10, help="texts for each cell; at least 2")
    add("--json", action="store_true", help="nothing but a line of JSON")
    args = parser.parse_args()
    if args.seeds < 2:
        parser.error(f"--seeds: {args.seeds} texts have no spread; give at least 2")
    if args.tokens < 1:
        parser.error(f"--tokens: {args.tokens} is below 1; give at least 1")
    cells = [
        {"protocol": protocol, "process": process, "kind": kind, "link": name}
        | measure_cell(name, link, PROTOCOLS[protocol], process, args)
        for protocol in args.protocols
        for process in args.processes
        for kind, name, link in find_links(args.traces)
    ]
    summary = summarize(cells)
    if not args.json:
        print_tables(cells, summary)
    more = {"cells": cells} if args.json else {}
    print(json.dumps({"seeds": args.seeds, "tokens": args.tokens, "over_oracle": summary, **more}))


if __name__ == "__main__":
    main()
