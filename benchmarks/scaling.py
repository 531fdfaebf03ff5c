"""Model the speed-up of pipelined speculation for stages, links and target sizes.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --acceptance 0.85 --json

The virtual clock decodes with a chain draft, with durations from sizes and bandwidths. Each draft
token is accepted independently, with one probability for every method and n. This is a
simplification, because heads that read deeper states have a higher acceptance. A stage streams its
weights from memory and runs its layers' small kernels. A link costs its latency plus the time to
send hidden states. Verification and drafting stream the LM head and the draft's layers. Each also
waits for the device, and launches kernels outside the graph as often as
tests/inference/test_device_decode.py allows. docs/lab/scaling.md gives the sources for the numbers.

For comparison, the tables show tensor parallelism on the fastest link, where every GPU streams its
part of every layer. The remaining cost per layer is one constant, from one measurement.

S compares with autoregressive decoding on the SAME pipeline. "Over one device" compares with
autoregressive decoding on one device with all layers, to show the pipeline's own cost. For the
larger targets, no such device may exist.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

from measurement import make_parser

from pipedraft.inference.cost_model import CostModel, VirtualClock
from pipedraft.models.transformer.boundaries import stage_boundaries


@dataclass(frozen=True)
class Target:
    name: str
    parameters: float
    num_layers: int
    hidden: int
    vocab: int


@dataclass(frozen=True)
class StageLink:
    name: str
    latency_s: float
    bytes_per_s: float


TARGETS = (
    Target("4B", 4.0e9, 36, 2560, 151_936),
    Target("8B", 8.2e9, 36, 4096, 151_936),
    Target("70B", 70.6e9, 80, 8192, 128_256),
    Target("405B", 405.9e9, 126, 16_384, 128_256),
)
LINKS = (
    StageLink("NVLink", 3e-6, 400e9),
    StageLink("InfiniBand", 6e-6, 40e9),
    StageLink("10 GbE", 40e-6, 1.1e9),
    StageLink("LAN, 1 Gbit/s", 200e-6, 0.11e9),
    StageLink("WAN, 20 ms", 20e-3, 0.1e9),
)
STAGES = (2, 4, 8, 16, 32, 64)
MEMORY_BYTES_PER_S = 3.35e12
BYTES = 2  # bf16
SMALL_KERNELS = 29
"""Small kernels among a Llama layer's 36 in a graph; the others stream its weights."""
KERNEL_S, LAUNCH_S, WAIT_S = 1.5e-6, 6e-6, 10e-6
"""Seconds for a small kernel in a graph, a launch outside one, the host's wait for the device."""
STAGE_LAUNCHES, DRAFT_LAUNCHES, VERIFY_LAUNCHES = 3, 3, 8
"""Launches per forward pass, the copy to the device and the graph included; the last two also wait
once."""
PARALLEL_LAYER_S = 75e-6
"""Seconds per layer besides streaming its weights, from SGLang with Llama-3.3-70B on 8 H100:
(1 / 88.61 s - 141.2 GB / 8 / MEMORY_BYTES_PER_S) / 80 layers."""
MOST_PARALLEL = 8


@dataclass(frozen=True)
class Durations:
    """Durations in seconds, computed from sizes."""

    target_pass: float
    head: float
    """Final norm and LM head."""
    hop: float
    layer: float

    @classmethod
    def of(cls, target: Target, link: StageLink, num_stages: int) -> "Durations":
        head_bytes = target.vocab * target.hidden * BYTES
        layers = (target.parameters * BYTES - head_bytes) / MEMORY_BYTES_PER_S
        layers += target.num_layers * SMALL_KERNELS * KERNEL_S
        return cls(
            target_pass=layers + num_stages * STAGE_LAUNCHES * LAUNCH_S,
            head=head_bytes / MEMORY_BYTES_PER_S,
            hop=link.latency_s + target.hidden * BYTES / link.bytes_per_s,
            layer=layers / target.num_layers,
        )

    def draft(self, target: Target, method: "PlannedMethod") -> float:
        head = self.head * (method.draft_vocab or target.vocab) / target.vocab
        return method.draft_layers * self.layer + head + DRAFT_LAUNCHES * LAUNCH_S + WAIT_S

    def clock(self, target: Target, num_stages: int, method: "PlannedMethod") -> VirtualClock:
        draft = self.draft(target, method) / self.target_pass
        cost = CostModel(
            link=self.hop / self.target_pass,
            verify=(self.head + VERIFY_LAUNCHES * LAUNCH_S + WAIT_S) / self.target_pass,
            draft_forward=draft,
            is_asynchronous=True,
        )
        return VirtualClock(cost, stage_boundaries(target.num_layers, num_stages), draft)


def layered(
    clock: VirtualClock, right: Random, acceptance: float, tokens: int, *, overlap: bool = True
) -> float:
    """Simulate SPD, where an accepted token takes one step, and a rejected token n steps.

    Drafting overlaps with the stages. Without ``overlap`` every step waits for it, as in PPSD.
    """
    busy = [1] * clock.num_stages
    for _ in range(tokens):
        steps = 1 if right.random() < acceptance else clock.num_stages
        for _ in range(steps):
            clock.step(busy, draft_forwards=1, overlap=overlap)
    return clock.time


def eagle_chain(
    clock: VirtualClock, right: Random, acceptance: float, tokens: int, length: int = 7
) -> float:
    """Simulate EAGLE, where a round drafts a chain while the stages wait, then takes n steps."""
    emitted = 0
    while emitted < tokens:
        clock.serial_draft(length)
        for stage in range(clock.num_stages):
            rows = [0] * clock.num_stages
            rows[stage] = length + 1
            clock.step(rows, draft_forwards=0, overlap=False)
        emitted += chain_tokens(right, acceptance, length)
    return clock.time * tokens / emitted


def chain_tokens(right: Random, acceptance: float, length: int) -> int:
    """Draw a round's number of tokens, accepted draft tokens and one token from the target."""
    return 1 + next((i for i in range(length) if right.random() >= acceptance), length)


@dataclass(frozen=True)
class PlannedMethod:
    simulate: Callable[[VirtualClock, Random, float, int], float]
    draft_layers: int
    draft_vocab: int | None
    """Draft vocabulary; None: the target's vocabulary."""


EAGLE = PlannedMethod(eagle_chain, 1, 32_000)
METHODS = {
    "SPD, Ls = 4": PlannedMethod(layered, 4, None),
    "SPD, Ls = 1, 32 k": PlannedMethod(layered, 1, 32_000),
    "PPSD, 32 k": PlannedMethod(partial(layered, overlap=False), 1, 32_000),
    "EAGLE chain:7, 32 k": EAGLE,
}


PARALLEL = {"tensor parallel": 0, "tensor parallel, EAGLE chain:7": 7}
"""Draft tokens per round."""


def speedup(
    target: Target, link: StageLink, num_stages: int, method: str, *, acceptance: float, tokens: int
) -> tuple[float, float] | None:
    """Return the speed-up over the same pipeline, and over one device.

    Return None for tensor parallelism on slower links or on more than ``MOST_PARALLEL`` devices.
    """
    durations, one = (Durations.of(target, link, n) for n in (num_stages, 1))
    clock = durations.clock(target, num_stages, METHODS.get(method, EAGLE))
    if method in METHODS:
        time = METHODS[method].simulate(clock, Random(0), acceptance, tokens)
    elif link is LINKS[0] and num_stages <= MOST_PARALLEL:
        seconds = parallel(target, durations, num_stages, acceptance, PARALLEL[method])
        time = tokens * seconds / durations.target_pass
    else:
        return None
    one_device = tokens * (one.target_pass + one.head) / durations.target_pass
    return clock.autoregressive_time(tokens) / time, one_device / time


def parallel(
    target: Target, durations: Durations, num_devices: int, acceptance: float, length: int
) -> float:
    """Return tensor parallelism's seconds per token. One device also runs the draft."""
    stream = target.parameters * BYTES / num_devices / MEMORY_BYTES_PER_S
    seconds = stream + target.num_layers * PARALLEL_LAYER_S
    if not length:
        return seconds
    seconds += length * durations.draft(target, EAGLE)
    return seconds * (1 - acceptance) / (1 - acceptance ** (length + 1))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--acceptance", type=float, default=0.75)
    parser.add_argument("--tokens", type=int, default=1000, help="of the simulated text")
    parser.add_argument("--json", action="store_true", help="one line of JSON, no tables")
    args = parser.parse_args()
    rows = []
    for target in TARGETS:
        for link in LINKS:
            for num_stages in STAGES:
                if num_stages > target.num_layers:
                    continue
                row = {"target": target.name, "link": link.name, "n": num_stages}
                for method in (*METHODS, *PARALLEL):
                    row[method], row[f"{method} over one device"] = speedup(
                        target,
                        link,
                        num_stages,
                        method,
                        acceptance=args.acceptance,
                        tokens=args.tokens,
                    ) or (None, None)
                rows.append(row)
    if not args.json:
        print_tables(rows)
    print(json.dumps(rows if args.json else {"acceptance": args.acceptance, "rows": len(rows)}))


def print_tables(rows: list[dict]) -> None:
    for target in TARGETS:
        print(f"### {target.name}\n")
        print("| link | method | " + " | ".join(f"n = {n}" for n in STAGES) + " |")
        print("|---" * (2 + len(STAGES)) + "|")
        for link in LINKS:
            for method in (*METHODS, *(PARALLEL if link is LINKS[0] else ())):
                cells = []
                for n in STAGES:
                    found = [
                        row
                        for row in rows
                        if (row["target"], row["link"], row["n"]) == (target.name, link.name, n)
                    ]
                    one_device = f"{method} over one device"
                    found = [row for row in found if row[method] is not None]
                    cells += [f"{r[method]:.2f} ({r[one_device]:.2f})" for r in found] or ["-"]
                print(f"| {link.name} | {method} | " + " | ".join(cells) + " |")
        print()


if __name__ == "__main__":
    main()
