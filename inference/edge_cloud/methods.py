"""Ways to decode across a link, behind one call; all of them on the virtual clock.

decoded = decode(METHODS["picospec"], scene, prompt_ids, prompt_index=0)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from pipedraft.inference.channel import Channel, EnergyModel, Link, LinkEstimate, LinkState
from pipedraft.inference.config import RuleName
from pipedraft.inference.draft_length import DraftLengthPolicy, parse_policy
from pipedraft.inference.edge_cloud.cloud import CloudSession, CloudTarget
from pipedraft.inference.edge_cloud.drafter import ChainDrafter
from pipedraft.inference.edge_cloud.edge import EdgeSession
from pipedraft.inference.edge_cloud.messages import Open, Settings, encode
from pipedraft.inference.edge_cloud.plan import Beliefs, Plan
from pipedraft.inference.edge_cloud.virtual import Carrier, SameMachine, Times, VirtualRun
from pipedraft.inference.result import DecodeResult
from pipedraft.inference.verify import KeyedRandom, draw, probabilities

Place = Literal["cloud", "both", "edge"]


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to decode."""

    summary: str
    drafts_in: Place | None = "both"
    """Where the draft runs: on the edge with the target across the link ("both"), beside the target
    ("cloud"), or alone ("edge"). None: there is no draft."""
    plan: Plan = field(default_factory=Plan)
    has_bonus: bool = True
    is_fast: bool = False
    rule: RuleName = "match"
    """Its own at temperatures above 0."""
    has_own_rule: bool = False
    """No other rule makes sense of it."""
    policy: Literal["given", "fixed", "ratio"] = "given"
    """Draft length: the scene's policy, its fixed length, or T_v / t_d tokens (PEARL's rule)."""
    caveat: str = ""
    """Why the text is not the target's; "": it is."""


PICOSPEC = Method(
    summary="drafts on while the cloud verifies, several batches away",
    plan=Plan(parallel=True, in_flight=None, truncates=True),
    has_bonus=False,
    is_fast=True,
    rule="tail_escape",
)
METHODS: dict[str, Method] = {
    "cloud": Method(summary="the cloud alone, streamed", drafts_in=None),
    "stop_and_wait": Method(summary="draft, send, wait; a fixed length", policy="fixed"),
    "colocated": Method(summary="draft and target in the cloud, streamed", drafts_in="cloud"),
    "edge_only": Method(
        summary="the draft alone", drafts_in="edge", caveat="not lossless: the draft's own text"
    ),
    "flexspec": Method(summary="draft, send, wait; the policy's length"),
    "dssd": Method(
        summary="draft, send, wait; the whole distribution comes down on a rejection",
        rule="rejection",
        has_own_rule=True,
        policy="fixed",
    ),
    "pearl": Method(
        summary="drafts on while the cloud verifies, one batch away, verdicts at barriers",
        plan=Plan(parallel=True, barrier=True, probes_first=True),
        has_bonus=False,
        is_fast=True,
        rule="tail_escape",
        policy="ratio",
    ),
    "picospec": PICOSPEC,
    "picospec_serial": replace(
        PICOSPEC, summary="picospec, waiting for each verdict", plan=Plan(), has_bonus=True
    ),
    "picospec_slow": replace(PICOSPEC, summary="picospec without early passes", is_fast=False),
    "picospec_full": replace(
        PICOSPEC,
        summary="picospec, the whole distribution down on a rejection",
        rule="rejection",
        has_own_rule=True,
    ),
}
"""The last three are picospec with one of its parts left out; picospec_full differs above
temperature 0 only, as a greedy correction is one token."""


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What is asked of a method, wherever it runs."""

    temperature: float = 0.0
    rule: RuleName | None = None
    """For the methods without a rule of their own kind; None: each method's."""
    policy: str = "survival"
    max_length: int = 8
    fixed_length: int = 4
    top_k: int = 10
    tail_samples: int = 4
    max_new_tokens: int = 128
    seed: int = 0

    def rule_for(self, method: Method) -> RuleName:
        """That decides at this temperature; at 0 all are the same."""
        if self.temperature == 0:
            return "match"
        return method.rule if method.has_own_rule or self.rule is None else self.rule

    def caveat(self, method: Method) -> str:
        """Why the text does not have the target's law; "": it has."""
        if method.drafts_in is None:
            return ""
        return method.caveat or self.settings(method, 0).verifier.caveat

    def settings(self, method: Method, prompt_index: int) -> Settings:
        return Settings(
            rule=self.rule_for(method),
            temperature=self.temperature,
            seed=self.seed,
            prompt=prompt_index,
            top_k=self.top_k,
            tail_samples=self.tail_samples,
            has_bonus=method.has_bonus,
            is_fast=method.is_fast,
            max_new_tokens=self.max_new_tokens,
        )

    def policy_for(self, method: Method, *, draft_s: float, verify_s: float) -> DraftLengthPolicy:
        """
        Args:
            draft_s: of one draft token.
            verify_s: of a pass over one row.
        """
        if method.policy == "given":
            return parse_policy(self.policy, max_length=self.max_length)
        length = self.fixed_length
        if method.policy == "ratio":
            ratio = verify_s / draft_s if draft_s else math.inf
            length = max(1, round(min(ratio, self.max_length)))
        return parse_policy(f"fixed:{length}", max_length=max(length, self.max_length))


@dataclass(frozen=True, kw_only=True)
class Scene(Wishes):
    """Where a method is tried on the virtual clock: networks, link, constants."""

    target: CloudTarget
    draft: Callable[[], ChainDrafter] | None
    """Makes a drafter for each text; None: only ``cloud`` can decode."""
    link: Link
    times: Times
    energy: EnergyModel


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """One text and what it cost."""

    result: DecodeResult
    """``token_times_s`` are virtual, from the request on."""
    up_bytes: int
    """Payloads; the link's headers and what it sent twice are not in them."""
    down_bytes: int
    messages: int
    wire_bytes: int
    joules: dict[str, float]
    """Of the edge, by cause."""

    @property
    def decode_s(self) -> float:
        """From the first token to the last."""
        times_s = self.result.token_times_s
        return times_s[-1] - times_s[0]


def decode(method: Method, scene: Scene, prompt_ids: list[int], *, prompt_index: int) -> Decoded:
    """One text on a fresh virtual link."""
    channel = Channel(scene.link, seed=scene.seed * 1_000_003 + prompt_index)
    if method.drafts_in == "edge":
        result = _decode_on_edge(scene, prompt_ids, prompt_index)
        elapsed_s, num_drafted = result.token_times_s[-1], len(result.token_ids)
    else:
        result, elapsed_s = _decode_with_target(method, scene, prompt_ids, prompt_index, channel)
        num_drafted = result.num_drafted if method.drafts_in == "both" else 0
    up, down = channel.traffic("up"), channel.traffic("down")
    return Decoded(
        result=result,
        up_bytes=up.payload_bytes,
        down_bytes=down.payload_bytes,
        messages=up.messages + down.messages,
        wire_bytes=up.wire_bytes + down.wire_bytes,
        joules=scene.energy.joules(channel, num_drafted=num_drafted, elapsed_s=elapsed_s),
    )


def _decode_with_target(
    method: Method, scene: Scene, prompt_ids: list[int], prompt_index: int, channel: Channel
) -> tuple[DecodeResult, float]:
    is_remote = method.drafts_in != "cloud"
    drafter, policy, times = None, None, scene.times
    if method.drafts_in is not None:
        if scene.draft is None:
            raise ValueError("draft: none is given; give --checkpoint or --draft-model")
        policy = scene.policy_for(method, draft_s=times.draft_s, verify_s=times.verify_s)
        drafter = scene.draft()
    opening = Open(
        session=0,
        prompt_ids=prompt_ids,
        settings=scene.settings(method, prompt_index),
        streams=drafter is None,
    )
    state = scene.link.state(0.0)
    header_bytes, draft_s = scene.link.header_bytes, times.draft_s
    carrier: Carrier = channel
    start_s = 0.0
    if not is_remote:
        carrier, header_bytes, draft_s = SameMachine(), 0, times.cloud_draft_s
        state = LinkState(up_bytes_per_s=math.inf, down_bytes_per_s=math.inf, round_trip_s=0.0)
        start_s = channel.transmit(0.0, len(encode(opening)), "up")
    beliefs = Beliefs(
        draft_s=draft_s,
        verify_s=times.verify_s,
        verify_row_s=times.verify_row_s,
        link=LinkEstimate(state),
        header_bytes=header_bytes,
    )
    edge = EdgeSession(opening, drafter, method.plan, policy, beliefs)
    cloud = CloudSession(scene.target)
    run = VirtualRun(edge, cloud, carrier, times, draft_s=draft_s, start_s=start_s)
    elapsed_s = run.run()
    result = edge.text.result
    if not is_remote:
        elapsed_s = _stream_down(result, channel)
    return result, elapsed_s


def _stream_down(result: DecodeResult, channel: Channel) -> float:
    """Send the tokens of each round to the user when they are made; returns the last arrival."""
    times_s, arrivals_s = result.token_times_s, list[float]()
    while len(arrivals_s) < len(times_s):
        made_s = times_s[len(arrivals_s)]
        count = times_s.count(made_s)
        ids = result.token_ids[len(arrivals_s) : len(arrivals_s) + count]
        arrivals_s += [channel.transmit(made_s, len(encode(ids)), "down")] * count
    result.token_times_s[:] = arrivals_s
    return arrivals_s[-1]


@torch.inference_mode()
def _decode_on_edge(scene: Scene, prompt_ids: list[int], prompt_index: int) -> DecodeResult:
    """The draft's own text, a token every ``draft_s``."""
    if scene.draft is None:
        raise ValueError("draft: none is given; give --checkpoint or --draft-model")
    drafter, staged = scene.draft(), scene.target.staged()
    random = KeyedRandom(scene.seed, prompt_index)
    result = DecodeResult(list(prompt_ids), [], "", "", num_stages=1)
    text = list(prompt_ids)
    drafter.begin(text)
    while not result.stop_reason:
        logits_U = drafter.logits()
        index = int(logits_U.argmax())
        if scene.temperature:
            q_U = probabilities(logits_U, scene.temperature)
            index = draw(q_U, random.uniform(len(text), "draft"))
        token = int(drafter.draft_ids[index])
        text.append(token)
        drafter.settle(0, token)
        result.emit(
            token,
            (len(result.token_ids) + 1) * scene.times.draft_s,
            eos_token_ids=staged.eos_token_ids,
            max_new_tokens=scene.max_new_tokens,
            limit=staged.max_positions,
        )
    result.num_draft_forwards = drafter.source.num_forwards
    return result
