"""Draft tokens started before the verification result they depend on, and dropped if it goes
against them: same outputs, same K."""

import copy

import pytest
import torch
from decode_runs import PROMPTS, SimulatedSource, prompts_of
from inline_ranks import RanksInTurns, connect_in_turns, decode_both
from needs import NEEDS_KERNELS
from staged_targets import FAMILIES, NUM_LAYERS, random_ids, tiny
from tiny_models import tiny_llama

from pipedraft.inference.pipelines.process import ProcessPipeline
from pipedraft.models.speed.rounded import round_target
from pipedraft.models.target import KeepRows, StagedTarget
from pipedraft.models.transformer.stage_cache import Abandoned, Segment


class Ranks:
    """Pipelines with the first stage at the controller; counts how early segments end."""

    def __init__(self, haste: float) -> None:
        self.haste = haste
        self.seed = 0

    def connect(self, target):
        self.seed += 1
        self.ranks = RanksInTurns(target, self.haste, self.seed)
        return self.ranks.pipeline

    def count(self, kind: str) -> int:
        return self.ranks.workers[0].timeline.counts[kind]


@pytest.fixture
def sent_ahead(monkeypatch):
    """Count segments sent before their step, and how many were injected."""
    counts = {"sent": 0, "injected": 0}
    start, inject = ProcessPipeline._start_ahead, ProcessPipeline.inject

    def watched_start(pipeline, ahead):
        start(pipeline, ahead)
        counts["sent"] += pipeline._ahead is not None

    def watched_inject(pipeline, segment):
        counts["injected"] += pipeline._ahead is not None
        inject(pipeline, segment)

    monkeypatch.setattr(ProcessPipeline, "_start_ahead", watched_start)
    monkeypatch.setattr(ProcessPipeline, "inject", watched_inject)
    return counts


def make_source_of(target, acceptance):
    return lambda prompt: SimulatedSource(target, prompt, acceptance, length=40)


@pytest.mark.parametrize(
    ("num_stages", "haste"), [(1, 0.4), (2, 0.0), (2, 0.4), (2, 1.0), (4, 0.4)]
)
def test_the_first_stage_runs_ahead_with_the_same_text_and_steps(haste, num_stages, sent_ahead):
    target = tiny_llama(layers=6, vocab=16)
    unfinished = 0
    for number, acceptance in enumerate((0.0, 0.7)):
        ranks = Ranks(haste)
        decode_both(
            target,
            prompts_of(number),
            make_source=make_source_of(target, acceptance),
            connect_ranks=ranks.connect,
            num_stages=num_stages,
        )
        unfinished += ranks.count("unfinished")
    assert sent_ahead["injected"] > 20 or num_stages == 1
    if num_stages > 1 and haste < 1:
        assert sent_ahead["sent"] > sent_ahead["injected"]
    assert (unfinished > 0) == (num_stages > 1 and haste == 0.4)


def test_without_running_ahead_nothing_is_sent_early(sent_ahead):
    def connect(target):
        pipeline = connect_in_turns(target)
        pipeline.runs_ahead = False
        return pipeline

    target = tiny_llama(layers=4, vocab=16)
    source = make_source_of(target, 0.8)
    decode_both(target, PROMPTS, make_source=source, connect_ranks=connect, num_stages=2)
    assert sent_ahead["sent"] == 0


def test_a_verdict_that_is_misread_is_noticed(monkeypatch):
    """Mutants: take every early segment for a kept one, or for a dropped one."""
    target = tiny_llama(layers=4, vocab=16)
    for always in (True, False):
        monkeypatch.setattr(ProcessPipeline, "_keeps_ahead", lambda *_, always=always: always)
        with pytest.raises(AssertionError):
            decode_both(
                target,
                PROMPTS,
                make_source=make_source_of(target, 0.6),
                connect_ranks=connect_in_turns,
                num_stages=2,
            )


@pytest.mark.parametrize("name", [*FAMILIES, pytest.param("int8", marks=NEEDS_KERNELS)])
def test_a_segment_that_is_abandoned_at_any_layer_leaves_no_trace(name):
    model = tiny("llama" if name == "int8" else name)
    if name == "int8":
        model = copy.deepcopy(model)
        round_target(model, torch.int8)
    target = StagedTarget(model, 1)
    stage = target.stages[0]
    ids = random_ids(9)

    def segment(tokens, first):
        count = len(tokens)
        visible = torch.ones(count, first + count, dtype=torch.bool).tril(first)
        return Segment(torch.arange(count) + len(ids) + first, visible, ids=tokens)

    def decode(last_layer):
        """Run two segments, with one between them that ends before a layer."""
        target.prefill(ids)
        asked = 0

        def is_wanted():
            nonlocal asked
            asked += 1
            return asked <= last_layer

        first = stage.forward(segment(torch.tensor([7, 3]), 0)).hidden
        if last_layer is not None:
            with pytest.raises(Abandoned):
                stage.forward(segment(torch.tensor([11]), 2), (), is_wanted)
            assert stage.num_speculative == 2
            stage.skip(segment(torch.tensor([11]), 2))
            stage.keep(KeepRows((0, 1), 1))
            stage.keep(KeepRows((0,), 0))
        else:
            stage.keep(KeepRows((0, 1), 1))
        assert (stage.num_committed, stage.num_speculative) == (len(ids) + 1, 1)
        visible = torch.ones(1, 2, dtype=torch.bool)
        after = Segment(torch.tensor([len(ids) + 2]), visible, ids=torch.tensor([5]))
        return first, stage.forward(after, (), lambda: True).hidden

    expected = decode(None)
    for last_layer in range(NUM_LAYERS):
        found = decode(last_layer)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
