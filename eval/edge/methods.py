"""Edge-cloud decoding methods, by their names in tables. All run on the virtual clock.

decoded = decode(METHODS["picospec"], simulation, prompt_ids, prompt_index=0)
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from transformers import PreTrainedTokenizerBase

from ...errors import UsageError
from ...files import Values, read_json
from ...inference.config import DecodeConfig
from ...inference.edge.channel import Channel, EnergyModel, Link, load_link
from ...inference.edge.draft_length import parse_policy
from ...inference.edge.engine import LinkEngine
from ...inference.edge.pipeline import RemoteTarget
from ...inference.edge.simulated import SimulatedPipeline, Times
from ...inference.edge.target_session import SharedTarget
from ...inference.engine import DraftNetwork
from ...inference.followers import LookupKind
from ...inference.result import DecodeResult
from ...inference.rules import RuleName
from ...inference.rules.filters import TokenFilters, sampling_label
from ...inference.rules.sampled import RULES, KeyedRandom, make_verifier
from ...inference.sources import make_source
from ...inference.sources.lookup import Lookup
from ...inference.tree import TokenTree
from ...models.target import KeepRows

# -- published and assumed constants for computing and energy, for the virtual clock ---------------


def published_times(
    draft_s: float, verify_s: float, alone_s: float, draft_weights: float, layer_weights: float
) -> Times:
    """Derive a method's times from a paper's few published numbers.

    Args:
        draft_weights, layer_weights: billions of weights in the draft and in one target layer. Edge
            layers are priced at the draft's time per weight.
    """
    return Times(
        draft_s=draft_s,
        verify_s=verify_s,
        cloud_draft_s=draft_s / 4,
        alone_s=alone_s,
        edge_layer_s=draft_s * layer_weights / draft_weights,
    )


FLEXSPEC_DRAFT_MS = (145.0, 12.0, 10.5)
"""Time per draft token on a Raspberry Pi 5, an iPhone 15 Pro Max and a Snapdragon 8 Gen 3."""
TIMES: dict[str, Times] = {
    "picospec": published_times(0.097 / 4, 0.087, 1 / 13.89, 0.596, 31.2 / 64),
    "picospec_llama": published_times(0.171 / 4, 0.166, 1 / 6.87, 1.236, 68.5 / 80),
    "flexspec": published_times(0.0085, 0.166, 1 / 6.87, 1.25, 68.5 / 80),
    **{
        f"flexspec_{ms:g}ms": published_times(ms / 1e3, 0.166, 1 / 6.87, 1.25, 68.5 / 80)
        for ms in FLEXSPEC_DRAFT_MS
    },
}
"""Edge: PicoSpec's Qwen3-0.6B (97 ms for 4 tokens) and Llama 1B (171 ms), FlexSpec's draft on a
Jetson AGX. Cloud: PicoSpec's 32B and 70B targets: verification takes 87 and 166 ms (tables 2 and
3), autoregressive decoding runs at 13.89 and 6.87 tokens/s (table 1). Assumptions: a draft in the
cloud takes a quarter of the edge's time; rows after the first in a pass are free (they read the
same weights); FlexSpec's cloud is PicoSpec's with a 70B target. PicoSpec's times per round minus
drafting and verification leave 5 to 10 ms for the round trip."""


def read_times(text: str) -> Times:
    """Read timing constants from a preset name or a JSON file."""
    if text in TIMES:
        return TIMES[text]
    path = Path(text)
    if not path.is_file():
        raise UsageError(f"--times: {text!r} is no file; give it or one of {', '.join(TIMES)}")
    try:
        return Times(**read_json(path, "--times", dict[str, float]))
    except TypeError as error:
        raise UsageError(
            f"--times: {text!r} holds no times ({error}); give an object of draft_s, verify_s, "
            "verify_row_s and cloud_draft_s, in seconds"
        ) from error


EDGE_W = 15.0
"""Power of the edge processor while it drafts; assumption: a Jetson AGX Orin's smallest mode."""
RADIOS: dict[str, Values] = {
    "cellular": {"uj_per_bit": (0.43839, 0.05197), "idle_w": 1.060, "tail_s": 11.576},
    "wifi": {"uj_per_bit": (0.28317, 0.13701), "idle_w": 0.119, "tail_s": 0.238},
}
"""Energy per bit sent up and received, measured on phones from 2012 (Huang et al., MobiSys 2012:
LTE and WiFi). Between messages the radio stays in its tail state, so idle power is the tail's."""


def radio_energy(radio: str, *, draft_s: float) -> EnergyModel:
    """Return the energy model for drafting and sending with this radio, in joules.

    Args:
        draft_s: time per draft token at ``EDGE_W``.
    """
    values = RADIOS[radio]
    up, down = (8e-6 * energy for energy in values["uj_per_bit"])
    return EnergyModel(
        joules_per_draft_token=EDGE_W * draft_s,
        joules_per_byte_up=up,
        joules_per_byte_down=down,
        idle_w=values["idle_w"],
        tail_j=values["idle_w"] * values["tail_s"],
    )


def radio_of(link: str) -> str:
    """Return "wifi" if the name of the link or of its file contains "wifi", else "cellular"."""
    return "wifi" if "wifi" in Path(link).stem else "cellular"


# -- methods --------------------------------------------------------------------------------------

Place = Literal["target", "both", "draft"]
STATE_BYTES = 2
"""Bytes per hidden-state element sent across a link: half precision."""


@dataclass(frozen=True, kw_only=True)
class EdgeMethod:
    """Decoding method, made of a schedule, its settings and the draft's location."""

    summary: str
    schedule: str
    settings: Values = field(default_factory=dict)
    drafts_in: Place | None = "both"
    """Draft location: on the edge with the target across the link ("both"), next to the target
    ("target"), or alone ("draft"). None: no draft."""
    length: Literal["policy", "fixed", "own"] = "policy"
    """Draft length: from the simulation's policy, its fixed length, or the schedule's own."""
    lookup: LookupKind | None = None
    """Lookup drafting, which takes no time, instead of the simulation's draft."""
    has_own_rule: bool = False
    asks_with: Literal["id", "state"] | None = None
    """Upload per token: the previous token's id, or its hidden state after the target's first
    layers, which the edge computes. None: nothing is uploaded, and the cloud streams the tokens."""
    caveat: str = ""
    """Reason why the output distribution differs from the target's; "": it is the same."""


METHODS: dict[str, EdgeMethod] = {
    "cloud": EdgeMethod(
        summary="the target alone, streamed", schedule="autoregressive", drafts_in=None
    ),
    "cloud_round_trip": EdgeMethod(
        summary="the target alone, asked for each token",
        schedule="autoregressive",
        drafts_in=None,
        asks_with="id",
    ),
    "split": EdgeMethod(
        summary="the target's first layers on the edge, the others in the cloud",
        schedule="autoregressive",
        drafts_in=None,
        asks_with="state",
    ),
    "stop_and_wait": EdgeMethod(
        summary="draft, send, wait; a fixed length", schedule="stop_and_wait", length="fixed"
    ),
    "colocated": EdgeMethod(
        summary="draft and target in one place, streamed", schedule="flexspec", drafts_in="target"
    ),
    "edge_only": EdgeMethod(
        summary="the draft alone",
        schedule="autoregressive",
        drafts_in="draft",
        caveat="not lossless: the draft's own output",
    ),
    "flexspec": EdgeMethod(summary="draft, send, wait; the policy's length", schedule="flexspec"),
    "prompt_lookup": EdgeMethod(
        summary="flexspec with draft tokens looked up in the text by n-grams, as its paper's"
        " baseline",
        schedule="flexspec",
        lookup="ngram",
    ),
    "dssd": EdgeMethod(
        summary="draft, send, wait; the whole distribution comes down on a rejection",
        schedule="dssd",
        length="fixed",
        has_own_rule=True,
    ),
    "pearl": EdgeMethod(
        summary="drafts on while the target verifies, one batch away, verdicts at barriers",
        schedule="pearl",
        length="own",
    ),
    "picospec": EdgeMethod(
        summary="drafts on while the target verifies, several batches away", schedule="picospec"
    ),
    "picospec_published": EdgeMethod(
        summary="picospec as published: one batch away, top-K of the distribution down",
        schedule="picospec",
        settings={"window": 1, "verifier": "topk"},
        has_own_rule=True,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Simulation(TokenFilters):
    """Networks, link, constants and settings with which methods run on the virtual clock."""

    target: SharedTarget
    draft: DraftNetwork | None
    """Draft; without one (None) only ``cloud`` can decode."""
    tokenizer: PreTrainedTokenizerBase
    link: Link
    times: Times
    energy: EnergyModel
    temperature: float = 0.0
    edge_layers: int = 3
    """Target layers on the edge, for ``split``; PicoSpec's baseline has three."""
    token_bytes: int = 0
    """Extra bytes sent up with each draft token besides its id."""
    window: int | None = None
    """Batches that picospec may have in flight; None: each method's own."""
    serial: bool = False
    slow: bool = False
    rule: RuleName | None = None
    """Acceptance rule for methods that do not require their own; None: each method's own."""
    policy: str = "geometric"
    max_length: int = 8
    fixed_length: int = 4
    payload_tokens: int = 10
    tail_samples: int = 4
    max_new_tokens: int = 128
    seed: int = 0

    @classmethod
    def on(cls, network: str, times: Times, **settings: Any) -> "Simulation":
        """Make a simulation on a link from its name or file. Check both before any model loads."""
        energy = radio_energy(radio_of(network), draft_s=times.draft_s)
        found = cls(link=load_link(network), times=times, energy=energy, **settings)
        parse_policy(found.policy, max_length=found.max_length)
        return found

    @property
    def sampling(self) -> str:
        return sampling_label(self.temperature, self.active)

    def config(self, method: EdgeMethod) -> DecodeConfig:
        """Return a method's decoding configuration in this simulation."""
        settings = dict(method.settings)
        if self.temperature == 0:
            settings.pop("verifier", None)
        elif method.drafts_in in (None, "draft"):
            settings["verifier"] = self.rule or "match"
        elif self.rule is not None and not method.has_own_rule:
            settings["verifier"] = self.rule
        if method.length == "policy" and method.schedule != "autoregressive":
            settings |= {"policy": self.policy, "max_length": self.max_length}
        elif method.length == "fixed":
            longest = max(self.fixed_length, self.max_length)
            settings |= {"policy": f"fixed:{self.fixed_length}", "max_length": longest}
        elif method.length == "own":
            settings["max_length"] = self.max_length
        if method.schedule == "picospec":
            settings |= {"serial": self.serial, "slow": self.slow}
            settings |= {} if self.window is None else {"window": self.window}
        return DecodeConfig.of(
            method.schedule,
            num_stages=1,
            temperature=self.temperature,
            **self.active,
            payload_tokens=self.payload_tokens,
            tail_samples=self.tail_samples,
            max_new_tokens=self.max_new_tokens,
            seed=self.seed,
            **settings,
        )

    def draft_of(self, method: EdgeMethod) -> DraftNetwork | None:
        if method.lookup is None:
            return self.draft
        return Lookup(method.lookup, self.target.staged().vocab_size)

    def caveat(self, method: EdgeMethod) -> str:
        """Return why the output distribution differs from the target's, or "" if it does not."""
        if method.drafts_in is None:
            return ""
        return method.caveat or RULES[self.config(method).rule].caveat


@dataclass(frozen=True, kw_only=True)
class EdgeOutput:
    """One output with its costs."""

    result: DecodeResult
    """``token_times_s`` are virtual, measured from the request."""
    up_bytes: int
    """Payload bytes, without link headers and retransmissions."""
    down_bytes: int
    messages: int
    wire_bytes: int
    joules: dict[str, float]

    @property
    def total_joules(self) -> float:
        return sum(self.joules.values())


def decode(
    method: EdgeMethod, simulation: Simulation, prompt_ids: list[int], *, prompt_index: int
) -> EdgeOutput:
    """Decode one output on a fresh virtual link.

    Raises:
        ValueError: the method needs a draft, and there is none.
    """
    if method.drafts_in == "draft":
        channel = Channel(simulation.link)
        result = _decode_alone(simulation, prompt_ids, prompt_index)
        elapsed_s, num_drafted = result.token_times_s[-1], len(result.token_ids)
    else:
        is_colocated = method.drafts_in == "target" or method.asks_with is not None
        times = simulation.times
        if method.lookup is not None:
            times = replace(times, draft_s=0.0)
        pipeline = SimulatedPipeline(
            RemoteTarget(),
            simulation.target,
            simulation.link,
            times,
            is_colocated=is_colocated,
            token_bytes=simulation.token_bytes,
        )
        engine = LinkEngine(
            pipeline, simulation.tokenizer, simulation.config(method), simulation.draft_of(method)
        )
        result = engine.decode(prompt_ids, prompt_index=prompt_index)
        channel, elapsed_s = pipeline.channel, pipeline.now()
        if method.asks_with is not None:
            channel = Channel(simulation.link, seed=simulation.seed * 1_000_003 + prompt_index)
            elapsed_s = _ask_for_each(result, channel, simulation, method.asks_with)
        elif is_colocated:
            elapsed_s = _stream_down(result, channel)
        num_drafted = result.num_drafted if method.drafts_in == "both" else 0
    up, down = channel.traffic("up"), channel.traffic("down")
    return EdgeOutput(
        result=result,
        up_bytes=up.payload_bytes,
        down_bytes=down.payload_bytes,
        messages=up.messages + down.messages,
        wire_bytes=up.wire_bytes + down.wire_bytes,
        joules=simulation.energy.joules(channel, num_drafted=num_drafted, elapsed_s=elapsed_s),
    )


def _stream_down(result: DecodeResult, channel: Channel) -> float:
    """Send each round's tokens to the user as soon as they exist. Return the last arrival time."""
    times_s, arrivals_s = result.token_times_s, list[float]()
    while len(arrivals_s) < len(times_s):
        made_s = times_s[len(arrivals_s)]
        count = times_s.count(made_s)
        ids = result.token_ids[len(arrivals_s) : len(arrivals_s) + count]
        num_bytes = len(msgspec.msgpack.encode(ids))
        arrivals_s += [channel.transmit(made_s, num_bytes, "down")] * count
    result.token_times_s[:] = arrivals_s
    return arrivals_s[-1]


def _ask_for_each(
    result: DecodeResult, channel: Channel, simulation: Simulation, sends: Literal["id", "state"]
) -> float:
    """Hold each token until the previous one has crossed the link. Return the last arrival time.

    The tokens are the target's own, whether its first layers run on the edge or in the cloud. Each
    token takes one pass over all layers.
    """
    config, times = simulation.target.model.config.get_text_config(), simulation.times
    edge_layers = min(simulation.edge_layers, config.num_hidden_layers) if sends == "state" else 0
    share = 1 - edge_layers / config.num_hidden_layers
    asked, time_s, arrivals_s = result.prompt_ids, 0.0, list[float]()
    for token in result.token_ids:
        num_bytes = len(msgspec.msgpack.encode(asked))
        if sends == "state":
            num_bytes = STATE_BYTES * config.hidden_size * len(asked)
        time_s = channel.transmit(time_s + edge_layers * times.edge_layer_s, num_bytes, "up")
        time_s += share * times.forward_s(1, alone=bool(arrivals_s))
        asked = [token]
        time_s = channel.transmit(time_s, len(msgspec.msgpack.encode(asked)), "down")
        arrivals_s.append(time_s)
    result.token_times_s[:] = arrivals_s
    return time_s


@torch.inference_mode()
def _decode_alone(simulation: Simulation, prompt_ids: list[int], prompt_index: int) -> DecodeResult:
    """Decode with the draft alone, one token every ``draft_s``."""
    if simulation.draft is None:
        raise ValueError("draft: none is given; give --checkpoint or --draft-model")
    source, staged = make_source(simulation.draft), simulation.target.staged()
    name: RuleName = "rejection" if simulation.temperature else "match"
    random = KeyedRandom(simulation.seed, prompt_index)
    rule = make_verifier(
        name,
        simulation.temperature,
        random,
        filters=simulation.filters,
        payload_tokens=1,
        tail_samples=1,
    )
    result = DecodeResult(list(prompt_ids), [], "", "", num_stages=1)
    source.begin({}, list(prompt_ids))
    position = len(prompt_ids)
    root = prompt_ids[-1]
    while not result.stop_reason:
        (logits_U,) = source.leaf_logits(TokenTree(root, position - 1), [0], {})
        root = rule.propose(logits_U, source.draft_ids, position, attempt=0).token
        position += 1
        source.keep(KeepRows((0,), 1))
        source.observe({}, [root])
        result.emit(
            root,
            (len(result.token_ids) + 1) * simulation.times.draft_s,
            eos_token_ids=staged.eos_token_ids,
            max_new_tokens=simulation.max_new_tokens,
            limit=staged.max_positions,
        )
    result.num_draft_forwards = source.num_forwards
    output = simulation.tokenizer.decode(result.token_ids, skip_special_tokens=True)
    assert isinstance(output, str)  # a list only for a batch
    result.text = output
    return result
