"""Hostile clients at a server: each gets one clear line, and the other clients never notice."""

import asyncio
import random
import socket
import time
from contextlib import suppress

import msgspec
import pytest
from decode_runs import greedy_reference
from grpc_runs import (
    Raw,
    RawConnection,
    access_to,
    decode,
    drafted,
    in_loop,
    lm_draft,
    make_server,
    make_target,
    opening,
    raw_serving,
    serving,
)

from pipedraft.inference.edge.grpc_command import describe
from pipedraft.inference.edge.session_messages import (
    REPLIES,
    REQUESTS,
    Close,
    Preverify,
)

KEPT = {"test_what_is_wrong_ends_its_own_stream_alone": 4}


def tiny_temperature(value):
    """An ``Open`` that this version would not make."""
    data = REQUESTS.to_bytes(opening([1, 2], temperature=0.5))
    half, wanted = msgspec.msgpack.encode(0.5), msgspec.msgpack.encode(value)
    assert data.count(half) == 1
    return data.replace(half, wanted)


@pytest.mark.parametrize(
    "messages, code, text",
    [
        ([b"\xc1\x00"], "INVALID_ARGUMENT", "frame: 2 bytes"),
        ([b"nonsense"], "INVALID_ARGUMENT", "frame: 8 bytes"),
        ([b"n" * 20], "INVALID_ARGUMENT", "frame: starts with 0x6e6e6e6e; want a peer"),
        ([REQUESTS.to_bytes(opening([1])) + b"x"], "INVALID_ARGUMENT", "bytes, where"),
        ([Close(epoch=0, seq=0)], "INVALID_ARGUMENT", "send Open first"),
        ([opening([1] * 65)], "INVALID_ARGUMENT", "this server takes 64; shorten"),
        ([opening([1], max_new_tokens=65)], "INVALID_ARGUMENT", "this server gives 64"),
        ([tiny_temperature(5e-324)], "INVALID_ARGUMENT", "temperature: 5e-324 is"),
        ([tiny_temperature(1e-200)], "INVALID_ARGUMENT", "0.0001 to 1e+06"),
        ([tiny_temperature(float("nan"))], "INVALID_ARGUMENT", "temperature: nan is"),
        ([opening([1] * 9), b"\x00"], "INVALID_ARGUMENT", "frame: 1 bytes"),
        ([b"x" * 200_000], "RESOURCE_EXHAUSTED", "larger than max"),
    ],
)
@in_loop
async def test_what_is_wrong_ends_its_own_stream_alone(messages, code, text):
    """Another client decodes meanwhile and afterwards."""
    target = make_target()
    limits = {"max_prompt_tokens": 64, "max_new_tokens": 64, "max_message_kb": 64}
    async with raw_serving(target, **limits) as (server, connection):
        other = asyncio.create_task(decode(server.port, [1, 2], draft=lm_draft(target)))
        raw = Raw(connection)
        await raw.send(*messages)
        ended = await raw.end()
        after = await decode(server.port, [1, 2], draft=lm_draft(target))
        for outcome in (await other, after):
            assert outcome.result.token_ids == greedy_reference(target, [1, 2], 24)
        assert not server.table.held
    assert ended[0] == code and text in ended[1]


@in_loop
async def test_random_bytes_and_damaged_messages_leave_the_server_serving():
    target = make_target()
    known = [opening([1, 2], streams=False), drafted([1, 2, 3], [1])]
    random_numbers = random.Random(0)

    def damaged():
        data = bytearray(REQUESTS.to_bytes(random_numbers.choice(known)))
        for _ in range(random_numbers.randrange(4)):
            data[random_numbers.randrange(len(data))] = random_numbers.randrange(256)
        return bytes(data)

    async with raw_serving(target) as (server, connection):
        codes = set()
        for _ in range(150):
            raw = Raw(connection)
            good = random_numbers.randrange(3)
            try:
                await raw.send(*known[:good], *(damaged() for _ in range(3)))
                await raw.call.done_writing()
            except (asyncio.InvalidStateError, connection.grpc.aio.AioRpcError):
                pass  # it ended before everything was sent
            ended = await raw.end()
            if ended[:2] != ("INTERNAL", "Internal error from Core"):  # a write after the end
                codes.add(ended[0])
        outcome = await decode(server.port, [1, 2], draft=lm_draft(target))
        assert outcome.result.token_ids == greedy_reference(target, [1, 2], 24)
    ends = "OK INVALID_ARGUMENT DEADLINE_EXCEEDED"
    assert {"INVALID_ARGUMENT"} <= codes <= set(ends.split())


@in_loop
async def test_a_token_is_wanted_by_every_call():
    target = make_target()
    async with serving(target, tokens=("correct horse",)) as server:
        for token in ("", "wrong", "correct hors", "correct horse "):
            with pytest.raises(ValueError, match="token: missing or wrong"):
                await decode(server.port, [1], schedule="autoregressive", access={"token": token})
        async with RawConnection(access_to(server.port)) as connection:
            # Refused before its first message; a write may fail first, with another code.
            raw = Raw(connection, authorization="Bearer wrong")
            assert (await raw.end())[0] == "UNAUTHENTICATED"
            raw = Raw(connection, authorization="Bearer wrong")
            with suppress(asyncio.InvalidStateError, connection.grpc.aio.AioRpcError):
                await raw.send(opening([1]))
            assert (await raw.end())[0] != "OK" and not server.table.num_opened
        access = {"token": "correct horse"}
        outcome = await decode(server.port, [1], schedule="autoregressive", access=access)
        assert outcome.result.token_ids == greedy_reference(target, [1], 24)


# -- room -----------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", ["max_sequences", "max_cache_mb"])
@in_loop
async def test_a_full_server_asks_to_come_again_and_the_edge_does(limit):
    target = make_target()
    # Layers, keys and values, heads, head size, float32; buffers may double from 512 positions.
    reserved = 3 * 2 * 2 * 8 * 4 * 2 * 512
    assert 2 * reserved <= 2**20 < 3 * reserved
    limits = {limit: 2 if limit == "max_sequences" else 1}
    async with raw_serving(target, **limits) as (server, connection):
        holders = [Raw(connection) for _ in range(2)]
        for raw in holders:
            await raw.send(opening([1, 2], streams=False))
            await raw.read(1)
        assert 0 < server.table.cache_bytes <= server.table.reserved_bytes
        late = Raw(connection)
        await late.send(opening([1, 2]))
        code, text, _ = await late.end()
        assert code == "UNAVAILABLE" and text.endswith("; try again")
        waiting = asyncio.create_task(decode(server.port, [1, 2], schedule="autoregressive"))
        await asyncio.sleep(0.3)
        assert not waiting.done() and len(server.table.held) == 2
        await holders[0].send(Close(epoch=0, seq=1))
        assert (await waiting).result.token_ids == greedy_reference(target, [1, 2], 24)


@in_loop
async def test_a_text_that_could_never_fit_is_refused_for_good():
    target = make_target()
    target.config.max_position_embeddings = 4096
    async with raw_serving(target, max_cache_mb=1) as (server, connection):
        raw = Raw(connection)
        await raw.send(opening([1] * 900))
        code, text, _ = await raw.end()
    assert code == "INVALID_ARGUMENT" and "ask for a shorter output" in text


@in_loop
async def test_draft_tokens_without_a_verdict_are_bounded():
    target = make_target()
    target.config.max_position_embeddings = 4096
    async with raw_serving(target) as (server, connection):
        raw = Raw(connection)
        await raw.send(opening([1, 2], streams=False))
        text = [1, 2, REPLIES.decode((await raw.read(1))[0]).token]
        for seq in range(1, 4):
            await raw.send(drafted(text, [1] * 256, Preverify, seq=seq, next_s=1e-9))
            text += [1] * 256
        assert "more than 512 draft tokens" in (await raw.end())[1]


@in_loop
async def test_a_port_in_use_is_refused():
    target = make_target()
    async with serving(target) as server:
        with pytest.raises(ValueError, match=f"127.0.0.1:{server.port} cannot be listened on"):
            await make_server(target).start("127.0.0.1", server.port)


@pytest.mark.parametrize("host", ["::1", "[::1]"])
@in_loop
async def test_an_ipv6_address_may_have_brackets(host):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    server = make_server(make_target())
    port = await server.start(host, 0)
    await server.stop(0.0, asyncio.Event())
    assert f"serving tiny on [::1]:{port} " in describe(server, host, port)


@in_loop
async def test_silent_sessions_expire_and_sessions_without_a_stream_end():
    target = make_target()
    async with raw_serving(target, idle_s=0.6) as (server, connection):
        silent, gone = Raw(connection), Raw(connection)
        for raw in (silent, gone):
            await raw.send(opening([1, 2], streams=False))
            await raw.read(1)
        gone.call.cancel()
        never = Raw(connection)
        assert (await silent.end())[:2] == (
            "DEADLINE_EXCEEDED",
            "session: silent for 0.6 s; open a new one with the output so far",
        )
        assert (await never.end())[0] == "DEADLINE_EXCEEDED"
        while server.table.held:
            await asyncio.sleep(0.05)
        assert (server.table.num_expired, server.table.cache_bytes) == (1, 0)


@in_loop
async def test_a_session_ends_after_its_time_and_the_edge_opens_another():
    """The output continues: the limit bounds the memory of one session."""
    target = make_target()
    draft = lm_draft(target)
    logits = draft.network.logits
    draft.network.logits = lambda hidden_QH: time.sleep(0.04) or logits(hidden_QH)
    async with serving(target, request_s=1.0) as server:
        outcome = await decode(
            server.port, [1, 2], draft=draft, policy="fixed:2", max_new_tokens=30
        )
    assert outcome.result.token_ids == greedy_reference(target, [1, 2], 30)
    assert server.table.num_opened == outcome.num_reopened + 1 >= 2
