"""A target behind gRPC gives the target's own output, whatever the link and the server do."""

import asyncio
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from decode_runs import PROMPTS, greedy_reference
from grpc_runs import TOKENIZER, decode, hold_passes, in_loop, lm_draft, make_target, serving
from link_runs import simulate
from msgspec.structs import replace
from network_link import EmulatedLink
from tiny_models import tiny_llama

from pipedraft.eval.edge import methods
from pipedraft.inference.__main__ import print_figures
from pipedraft.inference.edge import command, stream
from pipedraft.inference.edge.channel import Link, LinkEstimate, LinkState, Traffic
from pipedraft.inference.edge.draft_length import Estimates
from pipedraft.inference.edge.remote import TRIAL_TOKENS, RemotePipeline
from pipedraft.inference.edge.session_messages import Settings
from pipedraft.inference.result import DecodeResult
from pipedraft.models.heads.language_model import LanguageModelDraft
from pipedraft.models.transformer.fingerprint import vocabulary_hash

KEPT = {
    "test_greedy_text_is_plain_decodings": 2,
    "test_a_restarted_server_gets_the_text_so_far": 1,
    "test_every_rule_gives_the_text_of_the_virtual_clock": 2,
    "test_a_broken_connection_costs_a_prefill_and_changes_nothing": 1,
}

NEW_TOKENS = 24


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("schedule", ["autoregressive", "flexspec", "picospec", "pearl"])
@in_loop
async def test_greedy_text_is_plain_decodings(schedule, right, monkeypatch):
    monkeypatch.setattr(stream, "CLOSING_S", 60.0)  # the last message gives the pass count
    target = make_target()
    draft = None if schedule == "autoregressive" else lm_draft(target, right=right)
    async with serving(target) as server:
        outcomes = [
            await decode(server.port, prompt, schedule=schedule, draft=draft)
            for prompt in PROMPTS[:3]
        ]
    for prompt, outcome in zip(PROMPTS, outcomes, strict=False):
        assert outcome.result.token_ids == greedy_reference(target, prompt, NEW_TOKENS)
        assert sum(outcome.result.round_lengths) == outcome.result.num_tokens
        if schedule == "autoregressive":
            assert outcome.result.num_steps == NEW_TOKENS - 1  # one pass per later token


@pytest.mark.parametrize("rule", ["match", "gumbel", "rejection", "tail_escape", "topk"])
@in_loop
async def test_every_rule_gives_the_text_of_the_virtual_clock(rule):
    """Stop and wait with a fixed length: the messages do not depend on times."""
    target = make_target()
    network = tiny_llama(layers=1, vocab=16, seed=1)
    settings = {"temperature": 0.9, "seed": 2, "tail_samples": 1, "top_k": 5}
    async with serving(target) as server:
        outcome = await decode(
            server.port,
            [5, 6],
            schedule="stop_and_wait",
            draft=lm_draft(target),
            verifier=rule,
            payload_tokens=2,
            prompt_index=7,
            **settings,
        )
    simulation = simulate(
        target,
        LanguageModelDraft(network, target),
        max_new_tokens=NEW_TOKENS,
        rule=rule,
        payload_tokens=2,
        **settings,
    )
    virtual = methods.decode(methods.METHODS["stop_and_wait"], simulation, [5, 6], prompt_index=7)
    assert outcome.result.token_ids == virtual.result.token_ids


# -- broken links and servers ---------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["autoregressive", "flexspec", "picospec"])
@in_loop
async def test_a_broken_connection_costs_a_prefill_and_changes_nothing(schedule):
    target = make_target()
    draft = None if schedule == "autoregressive" else lm_draft(target, right=schedule == "picospec")
    async with (
        serving(target) as server,
        EmulatedLink(
            Link.constant(up_mbps=100, rtt_ms=10, jitter_ms=4), "127.0.0.1", server.port
        ) as link,
    ):
        seen, warnings = list[int](), list[str]()

        def drop_sometimes(token: int) -> None:
            seen.append(token)
            if len(seen) in (1, 3, 8, 15):
                link.drop()

        hold_passes(server, lambda: server.num_passes >= 2 and not seen)
        outcome = await decode(
            link.port,
            [1, 2],
            schedule=schedule,
            draft=draft,
            on_token=drop_sometimes,
            warnings=warnings,
        )
    assert outcome.result.token_ids == seen == greedy_reference(target, [1, 2], NEW_TOKENS)
    assert outcome.num_reopened >= 1 and server.table.num_opened >= 1 + outcome.num_reopened
    assert warnings and "the session broke" in warnings[0] and "a prefill of" in warnings[0]
    assert len(warnings) == outcome.num_reopened


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("schedule", ["flexspec", "picospec"])
@in_loop
async def test_a_restarted_server_gets_the_text_so_far(schedule, temperature):
    target = make_target()
    settings = {"temperature": temperature, "seed": 3}
    if temperature:
        settings["verifier"] = "match"
    async with serving(target) as server:
        port, restart, seen = server.port, asyncio.Event(), list[int]()
        unbroken = await decode(port, [4, 2], schedule=schedule, draft=lm_draft(target), **settings)

        def note(token: int) -> None:
            seen.append(token)
            if len(seen) == 9:
                restart.set()

        hold_passes(server, restart.is_set)
        text = asyncio.create_task(
            decode(
                port,
                [4, 2],
                schedule=schedule,
                draft=lm_draft(target),
                on_token=note,
                **settings,
            )
        )
        await restart.wait()
        await server.stop(0.0, asyncio.Event())
    async with serving(target, port) as second:
        outcome = await text
    assert outcome.result.token_ids == unbroken.result.token_ids
    assert (outcome.num_reopened, second.table.num_opened) == (1, 1)
    assert sum(outcome.result.round_lengths) == outcome.result.num_tokens
    assert outcome.result.num_steps == 0  # the first server's computation is unknown


@in_loop
async def test_a_server_that_comes_back_with_another_target_is_refused():
    target, other = make_target(), make_target(seed=5)
    async with serving(target) as server:
        port, restart = server.port, asyncio.Event()
        hold_passes(server, restart.is_set)
        text = asyncio.create_task(
            decode(port, [4, 2], draft=lm_draft(target), on_token=lambda _: restart.set())
        )
        await restart.wait()
        await server.stop(0.0, asyncio.Event())
    async with serving(other, port):
        with pytest.raises(ValueError, match="came back with another target than tiny"):
            await text


@in_loop
async def test_a_server_that_hangs_is_left_and_tried_again():
    """The connection is up, and nothing arrives."""
    target = make_target()
    async with serving(target) as server:
        send, hanging = server._send, []

        def swallow(session, replies):
            hanging[:] = hanging or [session]
            if session not in hanging:
                send(session, replies)

        server._send = swallow
        outcome = await decode(
            server.port, [1, 2], schedule="autoregressive", access={"answer_s": 0.7}
        )
    assert outcome.result.token_ids == greedy_reference(target, [1, 2], NEW_TOKENS)
    assert server.table.num_opened >= 2


# -- drafts that do not belong, or do not pay -----------------------------------------------


@pytest.mark.parametrize("field", ["target", "anchor"])
@in_loop
async def test_another_targets_draft_warns_and_the_cloud_decodes_alone(field):
    target, warnings = make_target(), []
    async with serving(target) as server:
        about = {"target": server.target.fingerprint, "anchor": server.target.anchor}
        own = await decode(server.port, [1, 2], draft=lm_draft(target, **about))
        draft = lm_draft(target, **{**about, field: "0" * 64})
        outcome = await decode(server.port, [1, 2], draft=draft, warnings=warnings)
    assert own.fallback == "" and own.result.num_drafted > 0
    assert outcome.result.token_ids == greedy_reference(target, [1, 2], NEW_TOKENS)
    assert "trained with another" in outcome.fallback and outcome.result.num_drafted == 0
    assert len(warnings) == 1 and warnings[0].startswith(outcome.fallback)


@in_loop
async def test_a_draft_that_is_too_slow_is_given_up_in_the_middle_of_the_text():
    target = make_target()
    draft = lm_draft(target)
    logits = draft.network.logits

    def wait_first(hidden_QH):
        time.sleep(0.05)
        return logits(hidden_QH)

    draft.network.logits = wait_first
    async with serving(target) as server:
        server._about = replace(server._about, forward_s=0.002)  # on every machine
        options = {"draft": draft, "max_new_tokens": 36, "policy": "fixed:1"}
        given_up, kept = [
            await decode(server.port, [1, 2], keeps_drafting=keeps, **options)
            for keeps in (False, True)
        ]
    assert given_up.result.token_ids == greedy_reference(target, [1, 2], 36)
    assert "the target alone about" in given_up.fallback and kept.fallback == ""
    assert 0 < given_up.result.num_drafted < TRIAL_TOKENS / 2 < kept.result.num_drafted


class Clock(RemotePipeline):
    """Clock without a server: the test sets the time."""

    time_s = 0.0

    @classmethod
    def opened(cls, draft_s):
        """Open with 0.1 s passes."""
        pipeline = cls(SimpleNamespace())
        pipeline.open_link(Settings(), streams=False)
        link = LinkState(up_bytes_per_s=1e9, down_bytes_per_s=1e9, round_trip_s=0.01)
        pipeline.estimates = Estimates(
            draft_s=draft_s, verify_s=0.1, verify_row_s=0.0, link=LinkEstimate(link)
        )
        return pipeline

    def now(self):
        return self.time_s


@pytest.mark.parametrize("draft_s, num_drafted", [(0.21, 20), (1.1, 4), (0.1, 0)])
def test_a_slow_draft_is_given_up_while_it_drafts(draft_s, num_drafted):
    """Passes take 0.1 s: four seconds of drafting cost more than 32 tokens are worth."""
    pipeline = Clock.opened(draft_s)
    pipeline.begin_batch(64, 3)
    given_up_after = []
    for count in range(1, 33):
        pipeline.time_s += draft_s
        pipeline.drafted(1, pipeline.time_s - draft_s)
        if pipeline.fallback:
            given_up_after.append(count)
    assert sum(given_up_after[:1]) == num_drafted
    assert not given_up_after or "the target alone about 100.0" in pipeline.fallback


@pytest.mark.parametrize(
    "waits_s, num_tokens",
    [
        (32 * [0.3], 5),  # 0.2 s are lost with each token, and 0.8 s may be
        (32 * [0.12], 0),
        (8 * [0.09] + [5.0] + 8 * [0.09], 0),  # another client's prompt
        (16 * [0.0, 0.15], 0),  # every second draft token is right
        (16 * [0.0, 0.3], 18),  # too slow even so
    ],
)
def test_a_draft_that_is_wrong_is_given_up_early(waits_s, num_tokens):
    pipeline, given_up_after = Clock.opened(0.01), []
    pipeline._times_s = [0.0]
    for count, wait_s in enumerate(waits_s, 1):
        pipeline.time_s += wait_s
        pipeline._times_s += [pipeline.time_s]
        pipeline._compare(num_pending=0)
        if pipeline.fallback:
            given_up_after.append(count)
    assert sum(given_up_after[:1]) == num_tokens


@in_loop
async def test_the_measured_round_trip_reaches_the_policy():
    outcome, _ = await decode_over(Link.constant(up_mbps=1000, rtt_ms=120), num_tokens=8)
    assert outcome.round_trip_s > 0.1  # a busy machine adds to the link's


@in_loop
async def test_no_ping_follows_a_message():
    # Where a link loses packets, the next message would wait for the ping before it.
    outcome, link = await decode_over(Link.constant(up_mbps=1000, rtt_ms=2), num_tokens=NEW_TOKENS)
    up, down = (count_frames(bytes(data)) for data in link.carried.values())
    assert up["DATA"] > len(outcome.result.round_lengths) > 4 and down["DATA"] > 4
    assert up["PING"] <= 1 and down["PING"] <= 1
    # A setting of RFC 9113, section 6.5.2. With the default window a long message needs a further
    # round trip.
    window = b"\0\x04" + (2**20).to_bytes(4)  # SETTINGS_INITIAL_WINDOW_SIZE
    assert all(window in data for data in link.carried.values())


async def decode_over(link: Link, *, num_tokens: int) -> tuple[Any, EmulatedLink]:
    """Decode over a link. Return the outcome, whose output was compared, and the link."""
    target = make_target()
    async with (
        serving(target) as server,
        EmulatedLink(link, "127.0.0.1", server.port) as relay,
    ):
        draft = lm_draft(target)
        outcome = await decode(relay.port, [1, 2], draft=draft, max_new_tokens=num_tokens)
    assert outcome.result.token_ids == greedy_reference(target, [1, 2], num_tokens)
    return outcome, relay


def count_frames(data: bytes) -> Counter[str]:
    """Count one direction's HTTP/2 frames by type (RFC 9113, section 4.1)."""
    counts, start = Counter[str](), 24 if data.startswith(b"PRI * HTTP/2.0") else 0
    while start < len(data):
        counts[{0: "DATA", 6: "PING"}.get(data[start + 3], "other")] += 1
        start += 9 + int.from_bytes(data[start : start + 3], "big")
    return counts


def test_figures_of_nothing_are_dashes(capsys):
    result = DecodeResult([1], [2], "", "eos", 1, token_times_s=[0.0])
    state = SimpleNamespace(state=SimpleNamespace(round_trip_s=0.0))
    pipeline = SimpleNamespace(
        connection=SimpleNamespace(up=Traffic(), down=Traffic()),
        estimates=SimpleNamespace(link=state),
        num_reopened=0,
    )
    command.print_figures("autoregressive", result, pipeline)
    print_figures("spd", result, "one process")
    remote, local = capsys.readouterr().err.splitlines()
    assert "L' -, tokens per round tau -, acceptance -;" in remote
    assert "acceptance length -, acceptance rate -;" in local
    assert all(line.endswith("; the model ended its answer") for line in (remote, local))


@in_loop
async def test_another_tokenizer_is_refused():
    swapped = {**TOKENIZER.get_vocab(), "63": 62, "62": 63}
    other = SimpleNamespace(get_vocab=lambda: swapped)
    async with serving(make_target()) as server:
        with pytest.raises(ValueError, match="another tokenizer"):
            await decode(
                server.port,
                [1],
                schedule="autoregressive",
                tokenizer=vocabulary_hash(other),
            )
