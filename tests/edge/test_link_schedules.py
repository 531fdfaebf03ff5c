"""Schedules across a virtual link: the target's own output, in the required time."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from decode_runs import PROMPTS, greedy_reference, plain_text
from link_runs import (
    ENERGY,
    LINK,
    NEW_TOKENS,
    SMALL,
    TIMES,
    BernoulliSource,
    TableSource,
    TableTarget,
    greedy_text,
    run_session,
    simulate,
)
from tiny_models import tiny_llama, tiny_mistral, tiny_qwen3

from pipedraft.eval.edge.methods import METHODS, Simulation, decode
from pipedraft.eval.edge.methods import TIMES as METHOD_TIMES
from pipedraft.eval.metrics import decode_seconds
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.edge.channel import Link, LinkEstimate
from pipedraft.inference.edge.engine import LinkEngine
from pipedraft.inference.edge.pipeline import Estimates, RemoteTarget
from pipedraft.inference.edge.schedules.picospec import PicoSpec
from pipedraft.inference.edge.schedules.stop_and_wait import StopAndWait
from pipedraft.inference.edge.simulated import SimulatedPipeline, Times
from pipedraft.inference.edge.target_session import SharedTarget
from pipedraft.inference.engine import Engine
from pipedraft.inference.result import DecodeResult
from pipedraft.inference.schedules.eagle import EagleSchedule
from pipedraft.models.heads.language_model import LanguageModelDraft

KEPT = {
    "test_greedy_text_equals_transformers_greedy": 2,
    "test_picospecs_time_equals_the_closed_form": 3,
    "test_text_stops_at_any_eos_token_and_counts_it": 4,
}

LOSSLESS = [name for name, method in METHODS.items() if not method.caveat]


def small_draft(target, seed=0):
    """Random model: accepted by chance."""
    vocab = target.config.vocab_size
    return LanguageModelDraft(tiny_llama(layers=1, vocab=vocab, seed=seed), target)


def right_draft(target):
    """The target itself: always accepted; its caches must follow every verdict."""
    return LanguageModelDraft(target, target)


# -- greedy text ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make_target, name",
    [
        *((tiny_llama, name) for name in LOSSLESS),
        *itertools.product((tiny_qwen3, tiny_mistral), ("flexspec", "pearl", "picospec")),
    ],
)
def test_greedy_text_equals_transformers_greedy(name, make_target):
    target = make_target(layers=3, vocab=16)
    for make_draft in (small_draft, right_draft):
        simulation = simulate(target, make_draft(target))
        for prompt in PROMPTS[:3]:
            decoded = decode(METHODS[name], simulation, prompt, prompt_index=0)
            assert decoded.result.token_ids == greedy_reference(target, prompt, NEW_TOKENS)
            assert sum(decoded.result.round_lengths) == decoded.result.num_tokens


@pytest.mark.parametrize("name", LOSSLESS)
def test_text_stops_at_any_eos_token_and_counts_it(name):
    plain = greedy_reference(tiny_llama(layers=3, vocab=16), [1, 2, 3], NEW_TOKENS)
    for stop in (plain[0], plain[4]):
        target = tiny_llama(layers=3, vocab=16)
        target.generation_config.eos_token_id = [15 if stop != 15 else 14, stop]
        for draft in (small_draft(target), right_draft(target)):
            result = decode(
                METHODS[name], simulate(target, draft), [1, 2, 3], prompt_index=0
            ).result
            assert result.token_ids == greedy_reference(target, [1, 2, 3], NEW_TOKENS)
            assert result.stop_reason == "eos"


@pytest.mark.parametrize("name", LOSSLESS)
def test_text_stops_at_the_last_position_of_the_target(name):
    target = tiny_llama(layers=2, vocab=16)
    limit = target.config.max_position_embeddings
    prompt = [index % 16 for index in range(limit - 5)]
    simulation = simulate(target, right_draft(target))
    result = decode(METHODS[name], simulation, prompt, prompt_index=0).result
    assert (len(result.token_ids), result.stop_reason) == (5, "max_length")


@pytest.mark.parametrize("max_new_tokens", [1, 2])
@pytest.mark.parametrize("name", METHODS)
def test_very_short_texts(name, max_new_tokens):
    target = tiny_llama(layers=2, vocab=16)
    simulation = simulate(target, right_draft(target), max_new_tokens=max_new_tokens)
    result = decode(METHODS[name], simulation, [3], prompt_index=0).result
    assert result.token_ids == greedy_reference(target, [3], max_new_tokens)


@pytest.mark.parametrize("rule", ["match", "gumbel"])
def test_sampled_text_is_plain_decodings_with_the_same_random_numbers(rule):
    """These rules draw the target's token without looking at the draft token."""
    target = tiny_llama(layers=3, vocab=16)
    simulation = simulate(target, small_draft(target), temperature=0.9, rule=rule, seed=4)
    names = [name for name in LOSSLESS if not METHODS[name].has_own_rule]
    texts = {
        tuple(decode(METHODS[name], simulation, [3, 1, 4], prompt_index=7).result.token_ids)
        for name in names
    }
    assert len(texts) == 1
    options = {"temperature": 0.9, "seed": 4, "max_new_tokens": NEW_TOKENS, "verifier": rule}
    assert texts == {tuple(plain_text(target, [3, 1, 4], prompt_index=7, **options))}


def test_the_edge_alone_decodes_the_drafts_own_text():
    target, other = tiny_llama(layers=3, vocab=16), tiny_llama(layers=2, vocab=16, seed=5)
    simulation = simulate(target, LanguageModelDraft(other, target))
    decoded = decode(METHODS["edge_only"], simulation, [1, 2], prompt_index=0)
    assert decoded.result.token_ids == greedy_reference(other, [1, 2], NEW_TOKENS)
    assert decoded.messages == 0 and METHODS["edge_only"].caveat
    assert decode_seconds(decoded.result) == pytest.approx((NEW_TOKENS - 1) * TIMES.draft_s)


# -- time -----------------------------------------------------------------------------------

EXACT_LINK = Link.constant(up_mbps=1e15, rtt_ms=3750)  # sending takes no time
EXACT_TIMES = Times(draft_s=1.0, verify_s=1.5, cloud_draft_s=1.0)
AWAY_S = 5.25


def run_exactly(source, prompt=(1, 2, 3), **options) -> DecodeResult:
    """Decode with the plainest times on a link that sends in no time."""
    options = {"times": EXACT_TIMES, "link": EXACT_LINK, **options}
    return run_session(SharedTarget(SMALL), source, list(prompt), **options)[0]


def epochs(source, first: int, last: int) -> list[int]:
    """Consecutive accepted draft tokens, from each position after a token from the cloud."""
    runs, position = [], first
    while position < last:
        run = 0
        while position + run < last and source.is_right(position + run):
            run += 1
        runs.append(run)
        position += run + 1
    return runs


@pytest.mark.parametrize("acceptance", [0.3, 0.8, 0.95])
@pytest.mark.parametrize("in_flight, away_s, hit_s", [(None, 6.0, 2.0), (1, 5.25, 5.25)])
def test_picospecs_time_equals_the_closed_form(in_flight, away_s, hit_s, acceptance):
    """K = 2, T_d = 2, RTT + T_v = 5.25: costs of hits and misses.

    A hit costs T_d with B = 3 batches in flight, and max(T_d, RTT + T_v) with one. A miss costs
    T_d + RTT + T_v. With three in flight the edge always drafts, and reads a verdict only when the
    current token is done: after 6 instead of 5.25. The first draft token after a hit is tested with
    logits already computed, so its rejection saves T_v.
    """
    prompt = [1, 2, 3]
    source = BernoulliSource(prompt, acceptance, seed=1)
    plan = PicoSpec(slow=True, truncate=False, window=in_flight)
    result = run_exactly(source, plan=plan, policy="fixed:2", max_new_tokens=170)
    start_s, expected = result.token_times_s[0], []
    # Towards the end of the text the edge has nothing left to draft and reads at once.
    runs = epochs(source, len(prompt) + 1, len(prompt) + 140)
    for run in runs[:-1]:
        verdicts_s = [start_s + 2 + away_s + hit_s * batch for batch in range(run // 2 + 1)]
        if run and run % 2 == 0:
            verdicts_s[-1] -= 2 if in_flight is None else 1.5
        expected += [verdicts_s[place // 2] for place in range(run + 1)]
        start_s = verdicts_s[-1]
    assert len(expected) > 60
    assert result.token_times_s[1 : len(expected) + 1] == pytest.approx(expected)


def test_stop_and_waits_time_equals_the_closed_form():
    source = BernoulliSource([1, 2, 3], 0.7, seed=1)
    result = run_exactly(source, policy="fixed:4", max_new_tokens=120)
    *full, _ = result.round_lengths
    ends = [sum(full[: index + 1]) for index in range(len(full))]
    times_s = [result.token_times_s[end] - result.token_times_s[0] for end in ends]
    assert times_s == pytest.approx([(index + 1) * (4 + AWAY_S) for index in range(len(full))])


@pytest.mark.parametrize("alone_s", [None, 1.25])
def test_plain_decoding_streams_a_token_per_pass(alone_s):
    """The prompt's pass, and then one pass of its own length for each token."""
    target, times = tiny_llama(layers=2, vocab=16), replace(EXACT_TIMES, alone_s=alone_s)
    result, _ = run_session(
        SharedTarget(target), None, [1, 2], times=times, link=EXACT_LINK, max_new_tokens=9
    )
    times_s = result.token_times_s
    assert times_s == pytest.approx([AWAY_S + (alone_s or 1.5) * index for index in range(9)])


def test_one_batch_is_away_as_published():
    """As published, one batch is in flight; picospec keeps enough in flight to hide the link."""
    most = {}
    for name in ("picospec", "picospec_published"):
        config = simulate(tiny_llama(), None, temperature=1.0).config(METHODS[name])
        assert isinstance(config.schedule, PicoSpec)
        most[name] = config.schedule.max_window
    assert most == {"picospec": None, "picospec_published": 1} and config.rule == "topk"


def test_bytes_of_draft_tokens_take_their_time():
    """50 kB a token at 10 Mbit/s: 40 ms each, so a policy shortens its drafts."""
    link, sizes = Link.constant(up_mbps=10, rtt_ms=20), {}
    for token_bytes in (0, 50_000):
        result, pipeline = run_session(
            SharedTarget(SMALL),
            BernoulliSource([1], 0.8),
            [1],
            policy="geometric",
            link=link,
            token_bytes=token_bytes,
            max_new_tokens=60,
        )
        up = pipeline.channel.traffic("up").payload_bytes
        assert up // 50_000 == result.num_drafted * bool(token_bytes)
        sizes[token_bytes] = result.num_drafted / len(result.round_lengths)
    assert sizes[50_000] < sizes[0] / 1.5


@pytest.mark.parametrize(
    "name, layers, round_trip_s, published",
    [("picospec", 64, 0.008, 7.51), ("picospec_llama", 80, 0.005, 4.33)],
)
def test_split_inference_takes_what_picospecs_table_1_says(name, layers, round_trip_s, published):
    """No constant was fitted to the table: three layers run at the draft's speed per weight."""
    times = METHOD_TIMES[name]
    alone_s = times.forward_s(1, alone=True) * (1 - 3 / layers)
    token_s = 3 * times.edge_layer_s + round_trip_s + alone_s
    assert 1 / token_s == pytest.approx(published, rel=0.03)


@pytest.mark.parametrize("size, round_s", [(4, 4.75), (8, 8.0)])
def test_pearls_rounds_end_at_barriers(size, round_s):
    """Every draft token is rejected. The first one's result is back after T_d + RTT, but the edge
    reads it only after drafting the other size - 1 tokens."""
    source = BernoulliSource([1, 2, 3], 0.0)
    result = run_exactly(source, plan="pearl", policy=f"fixed:{size}", max_new_tokens=20)
    times_s = result.token_times_s
    assert [b - a for a, b in itertools.pairwise(times_s)][1:11] == pytest.approx([round_s] * 10)


def test_an_early_pass_answers_a_wrong_first_draft_token_without_another_one():
    """The cloud computes the row for its own correction while the edge drafts."""

    def total_s(is_fast: bool) -> float:
        plan = PicoSpec(serial=True, slow=not is_fast)
        source = BernoulliSource([1, 2, 3], 0.0)
        result = run_exactly(source, plan=plan, policy="fixed:3", max_new_tokens=11)
        assert result.token_ids == greedy_text(SMALL, (1, 2, 3), 200)[:11]
        return result.token_times_s[-1] - result.token_times_s[0]

    slow_s, fast_s = total_s(False), total_s(True)
    # Rounds of 3 + 3.75 + 1.5 s; all but the first and the short last ones save the pass of 1.5 s.
    assert slow_s - fast_s >= 1.5 * 7


def right_times_s(plan, **options) -> list[float]:
    """Arrival time for each token with an always accepted draft."""
    return run_exactly(BernoulliSource([1, 2], 1.0), (1, 2), plan=plan, **options).token_times_s


def test_early_passes_never_delay_a_full_batch():
    for policy in ("fixed:2", "fixed:4", "fixed:8"):
        ends_s = []
        for is_fast in (False, True):
            plan = PicoSpec(serial=True, slow=not is_fast)
            ends_s.append(right_times_s(plan, policy=policy, max_new_tokens=60)[-1])
        assert ends_s[1] <= ends_s[0] + 1e-9


def test_a_batch_ends_when_it_has_taken_as_long_as_a_verdict():
    longest = []
    for truncates in (False, True):
        plan = PicoSpec(slow=True, truncate=truncates, window=1)
        times = Times(draft_s=2.0, verify_s=1.5, cloud_draft_s=1.0)
        times_s = right_times_s(plan, policy="fixed:8", times=times, max_new_tokens=40)
        longest.append(max(times_s.count(time_s) for time_s in times_s))
    assert longest == [8, 3]  # the third draft token of 2 s ends after the 5.25 s of RTT and T_v


@pytest.mark.parametrize("acceptance", [0.4, 0.9])
def test_a_fast_draft_sends_few_messages_per_pass(acceptance):
    """t_d 5, T_v 120, RTT 20 ms. Without the bound a seldom accepted draft sends 14 per token."""
    times = Times(draft_s=0.005, verify_s=0.12, cloud_draft_s=0.001)
    source = BernoulliSource([1, 2, 3], acceptance, seed=1)
    result, pipeline = run_session(
        SharedTarget(SMALL),
        source,
        [1, 2, 3],
        times=times,
        link=Link.constant(up_mbps=10, rtt_ms=20),
        plan="picospec",
        policy="geometric",
        max_new_tokens=60,
    )
    assert result.token_ids == greedy_text(SMALL, (1, 2, 3), 200)[:60]
    sent = pipeline.channel.traffic("up").messages
    # At most 6 per pass, one when the target is free, the opening and the closing message.
    assert sent <= 6 * pipeline.now() / times.verify_s + len(result.round_lengths) + 2
    assert sent <= {0.4: 3.5, 0.9: 1}[acceptance] * result.num_tokens


def test_round_costs_are_those_of_the_schedule():
    """t_d 1, T_v 1.5, RTT 3.75; messages without bytes."""
    link = LinkEstimate(EXACT_LINK.state(0.0))
    estimates = Estimates(draft_s=1.0, verify_s=1.5, verify_row_s=0.0, link=link)
    sizes = {"up_bytes": 0, "up_bytes_per_token": 0, "down_bytes": 0, "reject_bytes": 0}

    def cost(*, drafts_on=False, window=1, early=False):
        options = {"drafts_on": drafts_on, "window": window, "early": early, "needs_q": True}
        return estimates.round_cost(sizes, 3, **options)

    waits, away = cost(), cost(drafts_on=True, window=None)
    assert waits.has_bonus and list(waits.hit_s_K) == list(waits.miss_s_K) == [6.25, 7.25, 8.25]
    # A batch of 1 is drafted in less than a pass: the target is busy when it comes.
    assert not away.has_bonus and list(away.hit_s_K) == [1, 2, 3]
    assert list(away.miss_s_K) == [7.0, 7.25, 8.25]
    early = cost(drafts_on=True, window=None, early=True)
    survival_K = np.array([0.5, 0.25, 0.125])
    saved_K = away.expected_s(survival_K) - early.expected_s(survival_K)
    assert list(saved_K) == [0, 0.75, 0.75]
    assert [estimates.window(size) for size in (1, 2, 3, 8)] == [6, 3, 2, 1]


def test_the_edge_drafts_once_it_has_read_the_prompt():
    """Prompt of 3 tokens: the first token arrives after RTT + T_v = 5.25 s, drafting may begin 9 s
    after the request."""
    for prompt_row_s, wait_s in ((0.0, 0.0), (1.0, 0.0), (3.0, 9 - AWAY_S)):
        times = replace(EXACT_TIMES, prompt_row_s=prompt_row_s)
        source = BernoulliSource([1, 2, 3], 1.0)
        result = run_exactly(source, policy="fixed:4", times=times, max_new_tokens=11)
        first_s, second_s = result.token_times_s[:2]
        assert first_s == AWAY_S and second_s - first_s == pytest.approx(wait_s + 4 + AWAY_S)


def test_computing_times_vary_and_texts_do_not():
    spans, texts = [], set()
    for jitter, seed in ((0.0, 0), (0.5, 0), (0.5, 0), (0.5, 1)):
        times, source = replace(EXACT_TIMES, jitter=jitter), BernoulliSource([1, 2], 0.8)
        result = run_exactly(
            source, (1, 2), plan="picospec", times=times, seed=seed, max_new_tokens=80
        )
        spans.append(result.token_times_s[-1])
        texts.add(tuple(result.token_ids))
    assert len(texts) == 1 and spans[1] == spans[2] and len(set(spans)) == 3
    assert spans[1] == pytest.approx(spans[0], rel=0.25)


# -- bytes and energy -----------------------------------------------------------------------


def test_bytes_are_those_of_the_messages_and_energy_follows():
    target = tiny_llama(layers=2, vocab=16)
    simulation = simulate(target, small_draft(target), temperature=1.0)
    decoded = {
        name: decode(METHODS[name], simulation, [1, 2, 3], prompt_index=0)
        for name in ("stop_and_wait", "dssd", "cloud")
    }
    dssd, waits, cloud = (decoded[name] for name in ("dssd", "stop_and_wait", "cloud"))
    rejections = len(dssd.result.round_lengths) - 1
    assert dssd.down_bytes > waits.down_bytes + 4 * 16 * (rejections // 2)
    assert cloud.joules["draft"] == 0 and waits.joules["draft"] == pytest.approx(
        0.1 * waits.result.num_drafted
    )
    header = LINK.header_bytes
    assert waits.wire_bytes == waits.up_bytes + waits.down_bytes + header * waits.messages


# -- passes ---------------------------------------------------------------------------------


def test_steps_are_the_passes_over_the_target():
    """Accepted draft tokens in batches of three with a bonus: four tokens a pass."""
    source = BernoulliSource([1, 2], 1.0)
    result, _ = run_session(SharedTarget(SMALL), source, [1, 2], max_new_tokens=25)
    assert (result.num_tokens, result.num_steps) == (24, 6)
    assert result.equivalent_acceptance_length == 4
    alone, _ = run_session(SharedTarget(SMALL), None, [1, 2], max_new_tokens=25)
    assert (alone.num_tokens, alone.num_steps) == (24, 24)


# -- refusals -------------------------------------------------------------------------------


def link_engine(config, source):
    pipeline = SimulatedPipeline(RemoteTarget(), TableTarget(torch.zeros(4, 4)), LINK, TIMES)
    return LinkEngine(pipeline, None, config, source=source)


def test_a_draft_that_reads_the_target_is_refused():
    class Reads(TableSource):
        taps = (2,)

    config = DecodeConfig(schedule=StopAndWait(), num_stages=1)
    with pytest.raises(ValueError, match="give a FlexSpec draft or a language model"):
        link_engine(config, Reads(torch.zeros(4, 4)))


def test_a_draft_with_tokens_that_the_target_does_not_know_is_refused():
    config = DecodeConfig(schedule=StopAndWait(), num_stages=1)
    with pytest.raises(ValueError, match="draft: it knows token 5, the target 4"):
        link_engine(config, TableSource(torch.zeros(6, 6))).decode([1])


def test_schedules_and_pipelines_that_do_not_fit_are_refused():
    source = TableSource(torch.zeros(4, 4))
    with pytest.raises(ValueError, match="'eagle' does not decode across a link; choose one of"):
        link_engine(DecodeConfig(schedule=EagleSchedule(), num_stages=1), source)
    config = DecodeConfig(schedule=PicoSpec(), num_stages=1)
    with pytest.raises(ValueError, match="'picospec' decodes across a link; give --server"):
        Engine(tiny_llama(layers=2), None, config, source=source)


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match=r"times\.verify_s: nan"):
        Times(draft_s=1, verify_s=math.nan, cloud_draft_s=1)
    with pytest.raises(ValueError, match="policy: 'fixed:9' is unknown"):
        StopAndWait(policy="fixed:9")
    simulation = Simulation(
        target=TableTarget(torch.zeros(4, 4)),
        draft=None,
        tokenizer=None,
        link=LINK,
        times=TIMES,
        energy=ENERGY,
    )
    for name in ("picospec", "edge_only"):
        with pytest.raises(ValueError, match="give --checkpoint"):
            decode(METHODS[name], simulation, [1], prompt_index=0)


def test_messages_are_delivered_when_a_later_one_lets_them_arrive(monkeypatch):
    """Some arrive earlier than it was expected when they were sent, and none overtakes another."""
    expected, delivered = {}, []
    transmit = SimulatedPipeline._transmit

    def recorded(self, num_bytes, direction, deliver):
        flying = self._flying[direction]

        def noted():
            delivered.append((place, self._now_s))
            assert self._now_s == sent.arrival_s
            deliver()

        transmit(self, num_bytes, direction, noted)
        place, sent = (direction, len(expected)), flying[-1].sent
        expected[place] = sent.arrival_s

    monkeypatch.setattr(SimulatedPipeline, "_transmit", recorded)
    link = Link.constant(up_mbps=10, rtt_ms=150, loss=0.2)
    prompt, length = PROMPTS[0], 60
    source = BernoulliSource(prompt, 0.9)
    options = {"plan": "picospec", "link": link, "max_new_tokens": length}
    result, _ = run_session(SharedTarget(SMALL), source, prompt, **options)
    assert result.token_ids == greedy_text(SMALL, tuple(prompt), length)
    for direction in ("up", "down"):
        order = [place for place, _ in delivered if place[0] == direction]
        assert order == sorted(order)
    assert all(time_s <= expected[place] for place, time_s in delivered)
    assert any(time_s < expected[place] - 0.01 for place, time_s in delivered)
