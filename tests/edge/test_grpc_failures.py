"""A failure in the server itself ends one session, and the others never notice."""

import asyncio
import time

import pytest
import torch
from decode_runs import greedy_reference
from grpc_runs import (
    Raw,
    decode,
    drafted,
    hold_passes,
    in_loop,
    lm_draft,
    logged,
    make_target,
    opening,
    raw_serving,
)

from pipedraft.inference.edge import grpc_server as server_module
from pipedraft.inference.edge import target_session
from pipedraft.inference.edge.session_messages import REPLIES, Close
from pipedraft.inference.edge.session_table import MessageRate
from pipedraft.inference.edge.target_session import TargetSession

KEPT = {"test_a_pass_that_one_session_breaks_is_made_again_without_it": 1}

POISON = 63
"""Token of a failing session."""
NUM_TOKENS = 60


def poisoned_pass(monkeypatch, when):
    """Make passes with the poisoned token fail, alone or with others, at a chosen moment."""
    together, alone = target_session.forward_together, TargetSession.run

    def check(segments):
        if any(POISON in segment.ids.tolist() for segment in segments):
            raise IndexError("index out of range\nin self")

    def forward(stages, segments):
        if when == "before":
            check(segments)
        rows = together(stages, segments)
        check(segments)
        return rows

    def run(session):
        if session._segment is not None:
            check([session._segment])
        alone(session)

    monkeypatch.setattr(target_session, "forward_together", forward)
    monkeypatch.setattr(TargetSession, "run", run)


@pytest.mark.parametrize("when", ["before", "after"])
@in_loop
async def test_a_pass_that_one_session_breaks_is_made_again_without_it(when, monkeypatch, caplog):
    """Three outputs are streamed while a fourth session's rows break every pass with them."""
    poisoned_pass(monkeypatch, when)
    target, prompts = make_target(vocab=64), ([1, 2], [3, 4], [5, 6, 7])
    batches = []

    def run_together(cores):
        time.sleep(0.01)  # so that the others stream until the failing message
        batches.append([POISON in core._draft_tokens for core in cores])
        target_session.run_together(cores)

    monkeypatch.setattr(server_module, "run_together", run_together)

    async def break_once(connection, port):
        raw = Raw(connection)
        await raw.send(opening([1, 2, 3], streams=False))
        (opened,) = await raw.read(1)
        text = [1, 2, 3, REPLIES.decode(opened).token]
        await raw.send(drafted(text, [POISON]))
        return await raw.end()

    async with raw_serving(target) as (server, connection):
        is_broken = asyncio.Event()  # the others stream while a session fails
        hold_passes(server, lambda: not is_broken.is_set())
        honest = [
            asyncio.create_task(
                decode(server.port, prompt, schedule="autoregressive", max_new_tokens=NUM_TOKENS)
            )
            for prompt in prompts
        ]
        while len(server.table.held) < len(honest):
            await asyncio.sleep(0.01)
        ends = []
        for _ in range(6):
            is_broken.set()
            ends.append(await break_once(connection, server.port))
            is_broken.clear()
        is_broken.set()
        server._due.set()
        outcomes = [await task for task in honest]
        assert not server.table.held
    texts = [outcome.result.token_ids for outcome in outcomes]
    assert {(code, text) for code, text, _ in ends} == {
        ("INTERNAL", "session: the server failed to compute it; its log says why")
    }
    assert texts == [greedy_reference(target, prompt, NUM_TOKENS) for prompt in prompts]
    assert not any(POISON in text for text in texts), "choose another token"
    assert any(len(batch) > 1 and any(batch) for batch in batches), "no pass was shared"
    lines = logged(caplog)
    assert len(lines) == 6
    said = "session ended: IndexError: index out of range in self"
    assert {line.partition(" (")[0] for line in lines} == {said}


@in_loop
async def test_a_session_whose_logits_are_no_numbers_ends_alone(caplog):
    """No pass fails here, but the session's logits allow no draw."""
    target, sound = make_target(vocab=64), make_target(vocab=64)
    with torch.no_grad():
        target.get_input_embeddings().weight[POISON] = float("nan")
    draft = lm_draft(sound, right=True)  # a random one may draft the token, too
    async with raw_serving(target) as (server, connection):
        other = asyncio.create_task(decode(server.port, [1, 2], draft=draft))
        raw = Raw(connection)
        await raw.send(opening([1, POISON], temperature=1.0))
        ended = await raw.end()
        after = await decode(server.port, [1, 2], draft=draft)
        texts = [(await other).result.token_ids, after.result.token_ids]
        assert not server.table.held
    assert ended[:2] == (
        "INTERNAL",
        "session: the server failed to compute it; its log says why",
    )
    assert texts == [greedy_reference(sound, [1, 2], 24)] * 2
    (line,) = logged(caplog)
    assert "NotFinite: probabilities: their sum is nan" in line


@in_loop
async def test_a_target_that_computes_nothing_any_more_ends_the_server(monkeypatch):
    """No session is to blame, so the process should be started again."""
    target = make_target(vocab=64)
    async with raw_serving(target) as (server, connection):

        def fail(*arguments, **options):
            raise RuntimeError("the device is lost")

        monkeypatch.setattr(target.get_decoder().layers[0], "forward", fail)
        raw = Raw(connection)
        await raw.send(opening([1, 2]))
        with pytest.raises(RuntimeError, match="the device is lost"):
            await server.wait(asyncio.Event())


@in_loop
async def test_an_unforeseen_failure_of_a_stream_ends_it(monkeypatch, caplog):
    """Otherwise the edge would wait until the session expires."""

    def fail(pace, now_s):
        raise KeyError("unforeseen")

    monkeypatch.setattr(MessageRate, "wait_s", fail)
    async with raw_serving(make_target()) as (server, connection):
        hold_passes(server, lambda: True)
        raw = Raw(connection)
        await raw.send(opening([1, 2], streams=False), Close(epoch=0, seq=1))
        ended = await raw.end()
    assert ended[0] == "INTERNAL" and ended[1] == "stream: the server failed; its log says why"
    (line,) = logged(caplog)
    assert line.startswith("stream ended: KeyError: 'unforeseen' (")
