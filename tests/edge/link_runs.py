"""Decode across links in tests: tables replace networks, and one call runs a session.

A table is a Markov chain: an output's probability is exactly the product of its entries.
"""

# V vocabulary, R rows

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import torch
from decode_runs import PlainTokenizer, SimulatedSource, StatelessSource, greedy_reference
from tiny_models import tiny_llama

from pipedraft.eval.edge.methods import Simulation
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.edge.channel import EnergyModel, Link
from pipedraft.inference.edge.engine import LinkEngine
from pipedraft.inference.edge.pipeline import RemoteTarget
from pipedraft.inference.edge.schedules.pearl import PEARL
from pipedraft.inference.edge.schedules.picospec import PicoSpec
from pipedraft.inference.edge.schedules.stop_and_wait import StopAndWait
from pipedraft.inference.edge.simulated import SimulatedPipeline, Times
from pipedraft.inference.edge.target_session import SharedTarget
from pipedraft.inference.result import DecodeResult
from pipedraft.inference.schedules.autoregressive import Autoregressive
from pipedraft.inference.sources.base import add_layer, deepest_rows
from pipedraft.models.target import Segment

TIMES = Times(draft_s=0.02, verify_s=0.09, verify_row_s=0.001, cloud_draft_s=0.005)
LINK = Link.constant(up_mbps=50, rtt_ms=60)
NEW_TOKENS = 20
ENERGY = EnergyModel(joules_per_draft_token=0.1, joules_per_byte_up=1e-6, joules_per_byte_down=0)
PLANS = {
    "stop_and_wait": StopAndWait(),
    "pearl": PEARL(),
    "picospec": PicoSpec(),
    "picospec_serial": PicoSpec(serial=True),
    "picospec_slow": PicoSpec(slow=True, truncate=False),
    "one_away": PicoSpec(slow=True, truncate=False, window=1),
}


SMALL = tiny_llama(layers=1, hidden=16, vocab=16, heads=2, kv_heads=1)


@cache
def greedy_text(target, prompt: tuple[int, ...], length: int) -> list[int]:
    """Greedy new tokens from transformers, computed once for all tests."""
    return greedy_reference(target, list(prompt), length)


class ChainSource(StatelessSource):
    """Draft source with logits from a table."""

    grows = ("layers",)

    @property
    def target_vocab_size(self):
        return self.vocab

    def grow_layer(self, tree, features, *, width, sampling):
        logits_QU = self.leaf_logits(tree, deepest_rows(tree), features)
        return add_layer(tree, logits_QU, self, width=width, sampling=sampling)


class BernoulliSource(ChainSource, SimulatedSource):
    """Drafts accepted with a given probability, decided once per position."""

    def __init__(self, prompt, acceptance, *, target=SMALL, length=200, seed=0) -> None:
        text = [*prompt, *greedy_text(target, tuple(prompt), length)]
        super().__init__(target, prompt, acceptance, seed=seed, text=text)


class TableStage:
    """Stage for a chain: counts the rows, and returns the newest tokens as its output."""

    num_speculative = 0

    def forward(self, segment: Segment) -> Segment:
        assert segment.lo == self.num_speculative
        self.num_speculative += segment.num_rows
        return Segment(segment.positions, segment.visible, hidden=segment.ids)

    def keep(self, keep) -> None:
        assert keep.rows == tuple(range(len(keep.rows))) and len(keep.rows) <= self.num_speculative
        self.num_speculative = len(keep.rows) - keep.num_committed


class TableTarget:
    """Stand-in for a ``SharedTarget`` and its ``StagedTarget``."""

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
            recompute_length=None,
            vocab_size=self.vocab_size,
        )


class TableSource(ChainSource):
    def __init__(self, logits_VV: torch.Tensor) -> None:
        self.logits_VV, self.vocab = logits_VV, len(logits_VV)

    def leaf_logits(self, tree, rows, features):
        return self.logits_VV[[tree.tokens[row] for row in rows]]


def config_for(
    source, *, plan="stop_and_wait", policy="fixed:3", rule=None, **settings
) -> DecodeConfig:
    """``source`` None: the target decodes alone; ``plan``: a name in ``PLANS``, or a schedule."""
    schedule = Autoregressive()
    if source is not None:
        schedule = replace(PLANS[plan] if isinstance(plan, str) else plan, policy=policy)
    if settings.get("temperature"):
        settings["verifier"] = rule or "match"
    return DecodeConfig(schedule=schedule, num_stages=1, **settings)


def run_session(
    target, source, prompt, *, times=TIMES, link=LINK, token_bytes=0, **options
) -> tuple[DecodeResult, SimulatedPipeline]:
    """Decode a whole output on a virtual link.

    Args:
        target: a ``SharedTarget``.
    """
    pipeline = SimulatedPipeline(RemoteTarget(), target, link, times, token_bytes=token_bytes)
    config = config_for(source, **options)
    engine = LinkEngine(pipeline, PlainTokenizer(), config, source=source)
    return engine.decode(prompt), pipeline


def simulate(target, draft, **options) -> Simulation:
    return Simulation(
        target=SharedTarget(target),
        draft=draft,
        tokenizer=PlainTokenizer(),
        link=LINK,
        times=TIMES,
        energy=ENERGY,
        **{"max_new_tokens": NEW_TOKENS, **options},
    )
