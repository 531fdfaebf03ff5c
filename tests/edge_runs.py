"""Edge-cloud sessions for tests: tables in place of networks, settings, and one call to run them.

A table is a Markov chain: the law of its texts is a product of its entries, exactly.
"""

# V vocabulary, R rows

from functools import cache
from types import SimpleNamespace

import torch
from conftest import tiny_llama
from decode_runs import SimulatedSource, StatelessSource, greedy_reference

from pipedraft.inference.channel import Channel, EnergyModel, Link, LinkEstimate
from pipedraft.inference.draft_length import parse_policy
from pipedraft.inference.edge_cloud.cloud import CloudSession, CloudTarget
from pipedraft.inference.edge_cloud.drafter import ChainDrafter
from pipedraft.inference.edge_cloud.edge import EdgeSession
from pipedraft.inference.edge_cloud.messages import Open, Settings
from pipedraft.inference.edge_cloud.methods import Scene
from pipedraft.inference.edge_cloud.plan import Beliefs, Plan
from pipedraft.inference.edge_cloud.virtual import Times, VirtualRun
from pipedraft.models.target import Segment

TIMES = Times(draft_s=0.02, verify_s=0.09, verify_row_s=0.001, cloud_draft_s=0.005)
LINK = Link.constant(up_mbps=50, rtt_ms=60)
NEW_TOKENS = 20
ENERGY = EnergyModel(joules_per_draft_token=0.1, joules_per_byte_up=1e-6, joules_per_byte_down=0)
PLANS = {
    "stop_and_wait": (Plan(), True, False),
    "pearl": (Plan(parallel=True, barrier=True, probes_first=True), False, True),
    "picospec": (Plan(parallel=True, in_flight=None, truncates=True), False, True),
    "picospec_slow": (Plan(parallel=True, in_flight=None), False, False),
    "one_away": (Plan(parallel=True), False, False),
}
"""Plan, bonus, early passes."""


SMALL = tiny_llama(layers=1, hidden=16, vocab=16, heads=2, kv_heads=1)


@cache
def greedy_text(target, prompt: tuple[int, ...], length: int) -> list[int]:
    """New tokens of transformers; computed once for all tests."""
    return greedy_reference(target, list(prompt), length)


class BernoulliSource(SimulatedSource):
    """Guesses right with a given probability, decided once for each position."""

    def __init__(self, prompt, acceptance, *, target=SMALL, length=200, seed=0) -> None:
        text = [*prompt, *greedy_text(target, tuple(prompt), length)]
        super().__init__(target, prompt, acceptance, seed=seed, text=text)


class TableStage:
    """Rows of a chain: what a stage counts, and the newest tokens as its output."""

    num_speculative = 0

    def forward(self, segment: Segment) -> Segment:
        assert segment.lo == self.num_speculative
        self.num_speculative += segment.num_rows
        return Segment(segment.positions, segment.visible, hidden=segment.ids)

    def keep(self, keep) -> None:
        assert keep.rows == tuple(range(len(keep.rows))) and len(keep.rows) <= self.num_speculative
        self.num_speculative = len(keep.rows) - keep.num_committed


class TableTarget:
    """Stands where a ``CloudTarget`` and its ``StagedTarget`` stand."""

    fingerprint = anchor = "table"
    eos_token_ids: tuple[int, ...] = ()
    max_positions = 1000

    def __init__(self, logits_VV: torch.Tensor) -> None:
        self.logits_VV, self.vocab_size = logits_VV, len(logits_VV)

    def staged(self):
        return SimpleNamespace(
            stages=[TableStage()],
            prefill=lambda ids: (self.logits_VV[ids[-1]], {}),
            logits=lambda ids_R: self.logits_VV[ids_R],
            eos_token_ids=self.eos_token_ids,
            max_positions=self.max_positions,
            vocab_size=self.vocab_size,
        )


class TableSource(StatelessSource):
    grows = ("micro_batches",)

    def __init__(self, logits_VV: torch.Tensor) -> None:
        self.logits_VV, self.vocab = logits_VV, len(logits_VV)

    def leaf_logits(self, tree, rows, features):
        return self.logits_VV[[tree.tokens[row] for row in rows]]


def make_edge(
    source,
    prompt,
    *,
    plan="stop_and_wait",
    policy="fixed:3",
    times=TIMES,
    link=LINK,
    **settings,
) -> EdgeSession:
    """``source`` None: the cloud decodes alone; ``plan``: a name in ``PLANS``, or its entry."""
    how, has_bonus, is_fast = PLANS[plan] if isinstance(plan, str) else plan
    opening = Open(
        session=1,
        prompt_ids=prompt,
        settings=Settings(has_bonus=has_bonus, is_fast=is_fast, **settings),
        streams=source is None,
    )
    beliefs = Beliefs(
        draft_s=times.draft_s,
        verify_s=times.verify_s,
        verify_row_s=times.verify_row_s,
        link=LinkEstimate(link.state(0.0)),
    )
    drafter = None if source is None else ChainDrafter(source)
    lengths = None if source is None else parse_policy(policy)
    return EdgeSession(opening, drafter, how, lengths, beliefs)


def run_session(target, source, prompt, *, times=TIMES, link=LINK, seed=0, **options):
    """The edge after a whole text, and the channel that it went over."""
    edge = make_edge(source, prompt, times=times, link=link, seed=seed, **options)
    channel = Channel(link, seed=seed)
    run = VirtualRun(edge, CloudSession(target), channel, times, draft_s=times.draft_s)
    run.run()
    return edge, channel


def make_scene(target, draft, **options) -> Scene:
    return Scene(
        target=CloudTarget(target),
        draft=lambda: ChainDrafter.of(draft),
        link=LINK,
        times=TIMES,
        energy=ENERGY,
        **{"max_new_tokens": NEW_TOKENS, **options},
    )
