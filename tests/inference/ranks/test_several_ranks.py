"""Several sequences in one pipeline of processes."""

import json
import random

import pytest
from command_processes import run_ranks
from decode_runs import PlainTokenizer, SimulatedSource, attentive_llama, friendly_module
from inline_ranks import RanksInTurns, connect_in_turns, connect_inline
from several_runs import (
    PLAIN,
    WAYS,
    OutsideVocabulary,
    check_as_alone,
    decode_several,
    requests,
    stages_of,
)
from staged_targets import tiny
from tiny_drafts import make_exit, make_head, noisy_copy

from pipedraft.inference.batch import BatchEngine
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.engine import Engine
from pipedraft.inference.pipelines.process import SequenceFailed
from pipedraft.inference.ranks.worker import StageWorker

DRAFTS = {
    "module": friendly_module,
    "head": make_head,
    "exit": make_exit,
    "language model": noisy_copy,
}


@pytest.mark.parametrize(
    ("kind", "make", "connect"),
    [
        pytest.param(*draft, connect, marks=[pytest.mark.all] * (other != index % 2))
        for index, draft in enumerate(DRAFTS.items())
        for other, connect in enumerate((connect_inline, connect_in_turns))
    ],
)
def test_ranks_make_the_steps_that_one_process_makes(kind, make, connect):
    target = attentive_llama(1.0)
    draft = make(target)
    asked = list(requests(random.Random(kind), WAYS[kind], stages_of(draft), 8))
    batches = [
        decode_several(target, draft, stages_of(draft), asked, rng=random.Random(1), **options)
        for options in ({}, {"connect": connect})
    ]
    assert check_as_alone(target, draft, batches[1][1]) == 0
    for ours, other in zip(*(handles for _, handles in batches), strict=True):
        assert ours.future.result(0).num_steps == other.future.result(0).num_steps
        assert ours.token_times == other.token_times


def test_recurrent_layers_and_bitwise_rows_decode_as_alone():
    for target, options in ((tiny("qwen3_5"), {}), (attentive_llama(1.0), {"bitwise": True})):
        config = DecodeConfig.of(**PLAIN, num_stages=2, max_new_tokens=9, **options)
        asked = [([index, *range(20)], config, 0) for index in range(4)]
        _, handles = decode_several(target, None, 2, asked, connect=connect_in_turns)
        assert check_as_alone(target, None, handles) == 0


class Ranks(RanksInTurns):
    """Remembers the most recently made instance."""

    last: RanksInTurns

    def __init__(self, target) -> None:
        super().__init__(target)
        Ranks.last = self

    def caches(self) -> int:
        """Number of sequences with caches in the stages after all messages are read."""
        while any(queue.has_arrived() for queue in self.queues):
            self.work()
        return sum(len(worker._of) for worker in self.workers)


@pytest.mark.parametrize("fault", ["first stage", "last stage", "cancelled"])
def test_a_sequence_that_fails_ends_alone(llama, fault, monkeypatch):
    """Its caches leave every stage, and the others' caches leave at their end."""
    config = DecodeConfig.of("spd", num_stages=4, max_new_tokens=16)
    plain = DecodeConfig.of(**PLAIN, num_stages=4, max_new_tokens=16)
    connect = lambda target: Ranks(target).pipeline  # noqa: E731
    batch = BatchEngine(llama, PlainTokenizer(), plain, connect=connect)
    kinds = [SimulatedSource] * 4
    if fault == "first stage":
        kinds[1] = OutsideVocabulary
    handles = [
        batch.submit([index], config, source=kind(llama, [index], 0.8, 20))
        for index, kind in enumerate(kinds)
    ]
    for _ in range(6):
        batch.step()
    assert Ranks.last.caches() == 16 or fault == "first stage"
    if fault == "last stage":
        slot = batch._live[1].pipeline._mailbox.slot
        finish = StageWorker.finish

        def failing(worker, step, output, *, alone=True):
            if worker.following is None and step.slot == slot:
                raise MemoryError("no room")
            finish(worker, step, output, alone=alone)

        monkeypatch.setattr(StageWorker, "finish", failing)
    if fault == "cancelled":
        batch.cancel(handles[1])
    while batch.step():
        pass
    error = handles[1].future.exception(0)
    assert (fault == "cancelled") != isinstance(error, SequenceFailed), error
    assert fault != "last stage" or str(error) == "MemoryError: no room"
    alone = Engine(llama, PlainTokenizer(), plain)
    for handle in (handles[0], *handles[2:]):
        assert handle.future.result(0).token_ids == alone.decode(handle.prompt_ids).token_ids
    assert Ranks.last.caches() == 0 and batch.num_live == 0
    assert len(Ranks.last.pipeline.answers._open) == 1


@pytest.mark.parametrize(
    ("kinds", "count"),
    [
        (("head",), 4),
        pytest.param(("module", "head"), 4, marks=pytest.mark.all),
        *(pytest.param((kind,), 125, marks=pytest.mark.all) for kind in WAYS),
    ],
)
def test_two_ranks_decode_what_each_sequence_decodes_alone(parent, tmp_path, kinds, count):
    words = [str(tmp_path), ",".join(kinds), str(count)]
    found = json.loads(
        run_ranks(parent, "tests/support/several_runs.py", words, 2).splitlines()[-1]
    )
    for kind in kinds:
        assert found["wrong"][f"{kind}, right"] == 0
        together, apart = found["steps"][kind]
        assert together < apart
        for mutant in ("swapped caches", "shared seed", "wrong mask"):
            assert found["wrong"][f"{kind}, {mutant}"] > 0, mutant
