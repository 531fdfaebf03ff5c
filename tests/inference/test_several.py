"""Several sequences in one pipeline: each output equals the one decoded alone."""

import gc
import random
import statistics
import threading
import weakref
from concurrent.futures import CancelledError

import pytest
import torch
from decode_runs import PlainTokenizer, SimulatedSource, attentive_llama, friendly_module
from several_runs import (
    PLAIN,
    WAYS,
    OutsideVocabulary,
    check_as_alone,
    decode_alone,
    decode_several,
    requests,
    see_everything,
    share_seed,
    stages_of,
    swap_rows,
)
from staged_targets import tiny
from tiny_drafts import make_exit, make_head, noisy_copy
from tiny_models import tiny_mistral

from pipedraft.inference.batch import BatchEngine, BatchLimits, QueueFull
from pipedraft.inference.batch_clock import BatchClock
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.cost_model import CostModel
from pipedraft.inference.engine import Engine
from pipedraft.inference.result import Observer
from pipedraft.models.speed.rounded import round_target
from pipedraft.models.target import StagedTarget


@pytest.fixture(scope="module")
def world():
    """A target and its drafts."""
    target = attentive_llama(1.0)
    drafts = {
        "module": friendly_module(target),
        "head": make_head(target),
        "exit": make_exit(target),
        "language model": noisy_copy(target),
    }
    return target, drafts


@pytest.mark.parametrize("kind", WAYS)
def test_sequences_that_come_and_go_decode_what_each_does_alone(world, kind):
    target, draft, rng = world[0], world[1][kind], random.Random(kind)
    asked = list(requests(rng, WAYS[kind], stages_of(draft), max(8, len(WAYS[kind]))))
    batch, handles = decode_several(target, draft, stages_of(draft), asked, rng=rng)
    assert check_as_alone(target, draft, handles) == 0
    assert batch.clock.num_tokens == sum(h.future.result().num_tokens for h in handles)
    assert batch.clock.num_steps < sum(h.future.result().num_steps for h in handles)
    assert all(len(h.token_times) == len(h.token_ids) for h in handles)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_sequences_on_a_rounded_target_decode_what_each_does_alone(dtype):
    target, rng = attentive_llama(1.0), random.Random(1)
    draft = make_head(target)
    round_target(target, dtype)
    asked = list(requests(rng, WAYS["head"], stages_of(draft), len(WAYS["head"])))
    _, handles = decode_several(target, draft, stages_of(draft), asked, rng=rng)
    assert check_as_alone(target, draft, handles) == 0


def test_a_sequence_takes_the_steps_that_it_takes_alone(world):
    """The budget is fixed: a sequence left out in one step pauses with all its rows."""
    target, drafts = world
    config = DecodeConfig.of("spd", num_stages=4, max_new_tokens=20)
    asked = [([index, 3], config, 0) for index in range(6)]
    _, handles = decode_several(target, drafts["module"], 4, asked, rows=2)
    for handle in handles:
        alone, found = decode_alone(target, drafts["module"], handle), handle.future.result()
        assert (found.num_steps, found.round_lengths) == (alone.num_steps, alone.round_lengths)


@pytest.mark.parametrize("name", ["sliding", "qwen3_5"])
def test_windows_and_recurrent_layers_decode_as_alone(name):
    target = tiny_mistral(sliding_window=8) if name == "sliding" else tiny(name)
    options = [{"bitwise": name == "sliding"}, {"temperature": 1.0}]
    configs = [DecodeConfig.of(**PLAIN, num_stages=2, max_new_tokens=12, **o) for o in options]
    asked = [([index, *range(20)], config, 0) for index, config in enumerate(configs * 2)]
    _, handles = decode_several(target, None, 2, asked)
    assert check_as_alone(target, None, handles) == 0


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_reads_the_lm_head_once_for_all(llama, fails, monkeypatch, caplog):
    """If there is no room for all logits at once, each sequence computes its own, and one line says
    so.
    """
    rows, right = [], StagedTarget.logits

    def counted(self, hidden_lH):
        rows.append(len(hidden_lH))
        if fails and len(hidden_lH) > 1:
            raise MemoryError("no room for four rows")
        return right(self, hidden_lH)

    config = DecodeConfig.of(**PLAIN, num_stages=1, max_new_tokens=6)
    with monkeypatch.context() as patched:
        patched.setattr(StagedTarget, "logits", counted)
        _, handles = decode_several(llama, None, 1, [([i], config, 0) for i in range(4)])
    assert rows == ([4, 1, 1, 1, 1] * 6 if fails else [4] * 6)
    said = (
        "logits of several sequences run alone, which is slower: MemoryError: no room for four rows"
    )
    assert caplog.messages == [said] * fails
    assert check_as_alone(llama, None, handles) == 0


# -- mutants --------------------------------------------------------------------------------


@pytest.mark.parametrize("mutate", [swap_rows, share_seed, see_everything])
def test_sequences_that_mix_are_noticed(world, mutate, monkeypatch):
    target, draft, rng = world[0], world[1]["head"], random.Random(2)
    asked = list(requests(rng, WAYS["head"], 3, 8))
    with monkeypatch.context() as patched:
        mutate(patched)
        _, handles = decode_several(target, draft, 3, asked)
    assert check_as_alone(target, draft, handles) > 1


# -- one alone ------------------------------------------------------------------------------


class FailingSource(SimulatedSource):
    def grow_layer(self, tree, features, **options):
        if self.num_forwards == 4:
            raise OSError("the draft is gone")
        return super().grow_layer(tree, features, **options)


def fail_at_third(handle):
    def on_token(token):
        if len(handle[0].token_ids) == 3:
            raise OSError("the reader is gone")

    return on_token


@pytest.mark.parametrize("fault", ["rows", "draft", "reader", "cancelled"])
def test_a_sequence_that_fails_ends_alone(llama, fault):
    config = DecodeConfig.of("spd", num_stages=4, max_new_tokens=16)
    batch = BatchEngine(llama, PlainTokenizer(), DecodeConfig.of(**PLAIN, num_stages=4))
    made = {"rows": OutsideVocabulary, "draft": FailingSource}.get(fault, SimulatedSource)
    own: list = []
    handles = []
    for index in range(4):
        kind = made if index == 1 else SimulatedSource
        on_token = fail_at_third(own) if (fault, index) == ("reader", 1) else None
        source = kind(llama, [index], 0.8, 20)
        handles.append(batch.submit([index], config, source=source, on_token=on_token))
        own += handles[1:2]
    for _ in range(6):
        batch.step()
    if fault == "cancelled":
        batch.cancel(handles[1])
    while batch.step():
        pass
    assert 1 <= len(handles[1].token_ids) < 16
    expected = {"rows": IndexError, "cancelled": CancelledError}.get(fault, OSError)
    with pytest.raises(expected):
        handles[1].future.result(0)
    for handle in (handles[0], *handles[2:]):
        engine = Engine(
            llama, PlainTokenizer(), DecodeConfig.of(**PLAIN, num_stages=4, max_new_tokens=16)
        )
        assert handle.future.result(0).token_ids == engine.decode(handle.prompt_ids).token_ids
    assert batch.num_live == 0 and not batch.clock.live


def test_a_reader_ends_its_text(llama):
    config = DecodeConfig.of(**PLAIN, num_stages=2, max_new_tokens=16)
    tokens: list[int] = []
    batch = BatchEngine(llama, PlainTokenizer(), config)

    class EndsAtFourth(Observer):
        def token(self, token, is_drafted):
            tokens.append(token)
            return len(tokens) == 4

    ended = batch.submit([5], observer=EndsAtFourth())
    other = batch.submit([6])
    while batch.step():
        pass
    result = ended.future.result(0)
    assert (result.stop_reason, result.token_ids) == ("stopped", tokens) and len(tokens) == 4
    assert result.token_ids == decode_alone(llama, None, ended).token_ids[:4]
    assert len(other.future.result(0).token_ids) == 16


# -- limits ---------------------------------------------------------------------------------


def test_rows_sequences_and_bytes_stay_within_their_limits(world):
    target, draft = world[0], world[1]["head"]
    config = DecodeConfig.of("flowspec_continued", num_stages=3, max_new_tokens=10)
    one = 2 * 4 * 2 * 8 * 4 * 128  # keys and values, layers, heads, their size, float32, rows
    limits = BatchLimits(sequences=5, rows=12, prompt_rows=4, kv_bytes=3 * one + one // 2)
    batch = BatchEngine(target, PlainTokenizer(), config, draft, limits=limits)
    handles = [batch.submit([index] * 9) for index in range(8)]
    most = 0
    while batch.step():
        totals = [sum(rows) for rows in zip(*batch.last_rows, strict=True)]
        assert max(totals) <= 12 or len(batch.last_rows) == 1
        caches = [s.cache for one in batch._live for s in one.pipeline.target.stages]
        assert sum(cache.num_bytes for cache in caches) <= limits.kv_bytes
        most = max(most, batch.num_live)
    assert most == 3
    firsts = [handle.token_times[0] for handle in handles]
    assert firsts == sorted(firsts)
    with pytest.raises(ValueError, match="max_new_tokens"):
        batch.submit([1], DecodeConfig.of(**PLAIN, num_stages=3, max_new_tokens=400))


def test_requests_beyond_the_queue_and_for_other_stages_are_refused(llama):
    config = DecodeConfig.of(**PLAIN, num_stages=2, max_new_tokens=3)
    limits = BatchLimits(sequences=1, waiting=2)
    batch = BatchEngine(llama, PlainTokenizer(), config, limits=limits)
    handles = [batch.submit([index]) for index in range(2)]
    with pytest.raises(QueueFull):
        batch.submit([3])
    batch.cancel(handles[1])
    assert handles[1].future.cancelled()
    with pytest.raises(ValueError, match="num_stages"):
        batch.submit([3], DecodeConfig.of(**PLAIN, num_stages=4))
    with pytest.raises(ValueError, match="draft"):
        batch.submit([3], DecodeConfig.of("spd", num_stages=2))
    with pytest.raises(ValueError, match="empty"):
        batch.submit([])
    while batch.step():
        pass
    assert len(handles[0].future.result(0).token_ids) == 3


def test_others_decode_while_a_prompt_enters(llama):
    config = DecodeConfig.of(**PLAIN, num_stages=2, max_new_tokens=12)
    batch = BatchEngine(llama, PlainTokenizer(), config, limits=BatchLimits(prompt_rows=5))
    first = batch.submit([1])
    for _ in range(4):
        batch.step()
    before = len(first.token_ids)
    second = batch.submit(list(range(40)))
    most = 0
    while not second.token_ids:
        batch.step()
        most = max(most, *(max(rows) for rows in batch.last_rows))
    assert most == 5 and len(first.token_ids) >= before + 3
    while batch.step():
        pass
    assert check_as_alone(llama, None, [first, second]) == 0


def test_what_has_ended_keeps_no_caches(llama):
    """Not even until a garbage collection: a sequence's caches may be large."""
    config = DecodeConfig.of("spd", num_stages=2, max_new_tokens=6, tree_width="auto")
    batch = BatchEngine(llama, PlainTokenizer(), DecodeConfig.of(**PLAIN, num_stages=2))
    for index in range(3):
        batch.submit([index], config, source=SimulatedSource(llama, [index], 0.8, 8))
    batch.step()
    caches = [weakref.ref(s.cache) for one in batch._live for s in one.pipeline.target.stages]
    gc.disable()
    try:
        while batch.step():
            pass
        assert len(caches) == 6 and not any(cache() for cache in caches)
    finally:
        gc.enable()


# -- the clock ------------------------------------------------------------------------------


def simulated_batch(target, acceptance, *, count, temperature=0.0, **cost):
    """Sequences with simulated draft tokens at this acceptance, and automatic budgets."""
    config = DecodeConfig.of(
        "spd", num_stages=4, max_new_tokens=60, tree_width="auto", cost=CostModel(**cost)
    )
    plain = DecodeConfig.of(**PLAIN, num_stages=4, cost=config.cost)
    batch = BatchEngine(target, PlainTokenizer(), plain)
    for index in range(count):
        source = SimulatedSource(target, [index], acceptance, 60)
        source.add_children = lambda tree, leaf, width, source=source: SimulatedSource.add_children(
            source, tree, leaf, 1
        )
        batch.submit([index], config, source=source)
    return batch


@pytest.mark.parametrize(
    ("acceptance", "cost", "most"),
    [
        (0.9, {"row": 0.01, "draft_forward": 0.01}, 8),
        (0.0, {"row": 0.05, "draft_forward": 0.01}, 0),  # never accepted
        (0.9, {"row": 0.01, "draft_forward": 4.0}, 0),  # slower than the whole target
        (0.9, {"row": 0.01, "draft_forward": 0.125}, 2),  # two forwards overlap with a step
    ],
)
def test_as_many_sequences_draft_as_pay(llama, acceptance, cost, most):
    batch = simulated_batch(llama, acceptance, count=8, **cost)
    drafting = []
    while batch.step():
        drafting.append(len(batch.clock.drafting) if batch.num_live == 8 else None)
    known = [count for count in drafting if count is not None][-10:]
    assert statistics.median(known) == most


def test_plain_sequences_are_spread_over_the_stages(llama):
    """Then no stage has more than one row, and four sequences take as long as one."""
    cost = CostModel(row=0.5, link=0.25)
    config = DecodeConfig.of(**PLAIN, num_stages=4, max_new_tokens=20, cost=cost)
    batch = BatchEngine(llama, PlainTokenizer(), config)
    handles = [batch.submit([index]) for index in range(4)]
    rows = []
    while batch.step():
        rows.append([sum(column) for column in zip(*batch.last_rows, strict=True)])
    assert max(map(max, rows[8:])) == 1
    for handle in handles:
        *_, before, last = handle.token_times
        assert last - before == pytest.approx(4 * (0.25 + 0.25))
        assert handle.times_alone[-1] == pytest.approx(19 * 4 * 0.5)


@pytest.mark.parametrize(("together", "time"), [(False, 3 * 0.4), (True, 0.4 * (1 + 2 * 0.5))])
def test_drafts_of_several_sequences_share_a_device(together, time):
    cost = CostModel(row=0.5)
    clock = BatchClock(cost, (0, 2, 4), 0.4, drafts_together=together)
    clock.begin_step([])
    for _ in range(3):
        clock.drafted(1, beside=True)
    clock.settle()
    assert clock.time == pytest.approx(time)


@pytest.mark.parametrize("power", [1.0, 1.5, 3.0])
def test_the_clock_learns_how_much_a_draft_understates_its_best_tokens(power):
    """Acceptance follows the draft's probabilities raised to a power, unknown to the clock."""
    rng, clock = random.Random(0), BatchClock(CostModel(), (0, 2, 4), 0.1, drafts_together=True)

    def shares(sharpness):
        raised = [p**sharpness for p in draft]
        return [p / sum(raised) for p in raised]

    learned = []
    for index in range(600):
        first = rng.uniform(0.3, 0.8)
        draft = [first, *((1 - first) / 4 for _ in range(4))]
        clock.tested(shares(clock.sharpness)[0], rng.random() < shares(power)[0])
        if index >= 200:
            learned.append(clock.sharpness)
    assert statistics.mean(learned) == pytest.approx(power, rel=0.2)


# -- threads --------------------------------------------------------------------------------


def test_requests_come_from_any_thread_and_closing_ends_the_rest(llama):
    before = threading.active_count()
    config = DecodeConfig.of(**PLAIN, num_stages=2, max_new_tokens=12)
    batch = BatchEngine(llama, PlainTokenizer(), config, limits=BatchLimits(sequences=2))
    handles: list = []
    with batch.running():
        threads = [
            threading.Thread(target=lambda i=i: handles.append(batch.submit([i]))) for i in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        for handle in list(handles):
            handle.future.result(30)
        endless = [
            batch.submit([7], DecodeConfig.of(**PLAIN, num_stages=2, max_new_tokens=500))
            for _ in range(3)
        ]
        while not endless[0].token_ids:
            pass
    assert check_as_alone(llama, None, handles) == 0
    for handle in endless:
        with pytest.raises(CancelledError):
            handle.future.result(0)
    with pytest.raises(RuntimeError, match="closed"):
        batch.submit([1])
    assert threading.active_count() == before


def test_a_failing_step_is_told_to_everybody(llama, monkeypatch):
    config = DecodeConfig.of(**PLAIN, num_stages=2, max_new_tokens=12)
    batch = BatchEngine(llama, PlainTokenizer(), config)

    def fail(pipelines):
        raise OSError("no memory")

    monkeypatch.setattr("pipedraft.inference.batch.step_together", fail)
    with batch.running():
        handle = batch.submit([1])
        with pytest.raises(OSError, match="no memory"):
            handle.future.result(30)
