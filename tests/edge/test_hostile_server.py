"""A server among greedy clients, and clients among lying servers."""

import asyncio
import random
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from decode_runs import greedy_reference
from grpc_runs import (
    Raw,
    RawConnection,
    access_to,
    decode,
    in_loop,
    lm_draft,
    make_server,
    make_target,
    opening,
    serving,
)

from pipedraft.errors import Failure
from pipedraft.inference.decode_options import DecodeOptions
from pipedraft.inference.edge import stream, wire
from pipedraft.inference.edge.command import read_access
from pipedraft.inference.edge.session_messages import (
    REPLIES,
    Close,
    More,
    Opened,
    Result,
    Stream,
    prefix_hash,
)
from pipedraft.inference.edge.session_table import MessageRate, SessionTable
from pipedraft.inference.edge.stream import Access
from pipedraft.inference.edge.target_session import MAX_MORE, SharedTarget
from pipedraft.inference.server_options import read_tokens

# -- many clients at once ---------------------------------------------------------------------

NEW_TOKENS = 6


async def honest(connection: RawConnection, token: str, prompt: list[int]) -> list[int]:
    """Tokens streamed to a polite client; it retries at growing intervals."""
    wait_s = 0.1
    while True:
        raw = Raw(connection, authorization=f"Bearer {token}")
        tokens: list[int] = []
        with suppress(asyncio.InvalidStateError, connection.grpc.aio.AioRpcError):
            await raw.send(opening(prompt, max_new_tokens=NEW_TOKENS, streams=True))
            while len(tokens) < NEW_TOKENS:
                data = await raw.call.read()
                if data is connection.grpc.aio.EOF:
                    break
                reply = REPLIES.decode(data)
                assert isinstance(reply, Opened | Result) and reply.token is not None
                tokens.append(reply.token)
        if len(tokens) == NEW_TOKENS:
            with suppress(asyncio.InvalidStateError, connection.grpc.aio.AioRpcError):
                await raw.send(Close(epoch=reply.epoch + 1, seq=1))
            return tokens
        code, text, _ = await raw.end()
        # The second: under load this side itself may take as long as the silent may.
        assert code in ("UNAVAILABLE", "DEADLINE_EXCEEDED") and not tokens, (code, text)
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, 2.0)


async def hostile(connection: RawConnection, number: int, over: asyncio.Event) -> None:
    """Take sessions, flood, send nonsense or leave, until all other clients have their output."""
    numbers = random.Random(number)
    while not over.is_set():
        raw = Raw(connection, authorization="Bearer evil")
        with suppress(asyncio.InvalidStateError, connection.grpc.aio.AioRpcError):
            prompt = [numbers.randrange(16)] * numbers.choice([1, 60])
            await raw.send(opening(prompt, streams=numbers.random() < 0.5))
            kind = number % 5
            if kind == 0:  # keeps its sessions in silence
                await asyncio.sleep(0.3)
            elif kind == 1:  # floods
                for _ in range(200):
                    await raw.send(More(epoch=0, seq=1, count=256))
            elif kind == 2:
                await raw.send(numbers.randbytes(200))
            elif kind == 3:
                raw.call.cancel()
            else:
                nothing = {"base": 2, "prefix_hash": prefix_hash([1, 2]), "certain": []}
                await raw.send(*(Stream(epoch=0, seq=seq, **nothing) for seq in range(1, 50)))
        await asyncio.sleep(0.01)
        raw.call.cancel()


@pytest.mark.parametrize(
    "num_clients, num_hostile", [(30, 5), pytest.param(200, 20, marks=pytest.mark.all)]
)
@in_loop
async def test_honest_clients_get_their_own_sequences_among_hostile_ones(num_clients, num_hostile):
    target = make_target()
    numbers = random.Random(1)
    prompts = [
        [numbers.randrange(16) for _ in range(numbers.randrange(1, 30))]
        for _ in range(num_clients - num_hostile)
    ]
    tokens = ("evil", *(f"honest{i}" for i in range(len(prompts))))
    limits = {"max_sequences": num_hostile + 8, "idle_s": 0.5}
    async with serving(target, tokens=tokens, **limits) as server:
        over = asyncio.Event()
        connections = [RawConnection(access_to(server.port)) for _ in range(num_clients)]
        for connection in connections:
            await connection.__aenter__()
        enemies = [
            asyncio.create_task(hostile(connection, number, over))
            for number, connection in enumerate(connections[:num_hostile])
        ]
        found = await asyncio.gather(
            *(
                honest(connection, token, prompt)
                for connection, token, prompt in zip(
                    connections[num_hostile:], tokens[1:], prompts, strict=True
                )
            )
        )
        over.set()
        await asyncio.gather(*enemies)
        for connection in connections:
            await connection.__aexit__()
        while server.table.held:
            await asyncio.sleep(0.05)
        assert server.table.cache_bytes == 0
    for prompt, tokens_of_it in zip(prompts, found, strict=True):
        assert tokens_of_it == greedy_reference(target, prompt, NEW_TOKENS)


# -- limits, one by one -----------------------------------------------------------------------


def make_table(**limits: Any) -> SessionTable:
    server = make_server(make_target(), **limits)
    return SessionTable(SharedTarget(server.target.model), server.limits, row_bytes=1)


def test_a_client_tries_again_more_and_more_seldom_and_not_beyond_its_patience(monkeypatch):
    clock, waits = SimpleNamespace(s=0.0), []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        clock.s += seconds

    monkeypatch.setattr(stream, "time", SimpleNamespace(monotonic=lambda: clock.s, sleep=sleep))
    patience = stream.Patience(Access(server="127.0.0.1:1", give_up_s=9.0))
    with pytest.raises(Failure, match="could not be used for 9 s .full."):
        while True:
            patience.wait(stream.SessionLost("full"))
            sleep(0.01)
    assert 0.05 <= waits[0] <= 0.1 and 9.0 < sum(waits) < 9.1 and max(waits) <= 2.0


@pytest.mark.parametrize("text", ["", "x", "-5", "1e9", "9" * 5000, "\u0661"])
def test_metadata_that_is_no_number_is_none(text):
    answer = SimpleNamespace(
        code=lambda: SimpleNamespace(name="OK"),
        details=lambda: "",
        trailing_metadata=lambda: [(wire.NUM_PASSES, text)],
    )
    assert stream.Break.of(answer) == stream.Break("OK", "")


def test_waiting_for_a_turn_is_not_silence_and_owing_a_message_is():
    table = make_table(idle_s=1.0)
    waiting, silent = (table.open(opening([1, 2]), 0.0) for _ in range(2))
    silent.core._tokens, silent.core._streams_for = [1, 2, 3], None  # has its prompt
    assert waiting.core.owes and not silent.core.owes
    for now_s in (0.9, 1.8, 2.7):
        table.expire(now_s)
    assert list(table.held.values()) == [waiting]


def test_a_stream_is_read_at_its_pace():
    pace = MessageRate(10.0)
    assert [pace.wait_s(0.0) for _ in range(10)] == [0.0] * 10
    assert [round(pace.wait_s(0.0), 6) for _ in range(3)] == [0.1, 0.2, 0.3]
    assert pace.wait_s(99.0) == 0.0


def test_a_correction_is_asked_for_a_bounded_number_of_times():
    class Rule:
        name, needs_q = "tail_escape", True

        def more(self, *_):
            return SimpleNamespace()

    core = make_table().open(opening([1, 2]), 0.0).core
    core._rejected, core._rule = object(), Rule()
    core._numbered = lambda kind, seq, **fields: kind
    for _ in range(MAX_MORE):
        core._more(More(epoch=0, seq=1, count=1))
    with pytest.raises(ValueError, match="asked more than 16 times"):
        core._more(More(epoch=0, seq=1, count=1))


# -- tokens -----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", " ", "abc\n", "\u00fc", "a b", "a\x00", "x" * 5000])
def test_what_is_no_token_is_refused_from_file_and_environment(text, tmp_path, monkeypatch):
    monkeypatch.delenv("PIPEDRAFT_TOKEN", raising=False)
    assert read_tokens(None) == ()
    file = tmp_path / "token"
    file.write_text(text)
    if text != "abc\n":  # files end in a line break
        with pytest.raises(ValueError, match="--token-file"):
            read_tokens(file)
    if "\x00" not in text:
        monkeypatch.setenv("PIPEDRAFT_TOKEN", text)
        with pytest.raises(ValueError, match=r"\$PIPEDRAFT_TOKEN holds no printable ASCII"):
            read_tokens(None)


def test_a_file_may_hold_the_tokens_of_several_clients_and_an_edge_has_one(tmp_path):
    file = tmp_path / "tokens"
    file.write_text("one\ntwo\n")
    assert read_tokens(file) == ("one", "two")
    with pytest.raises(ValueError, match="an edge has one token"):
        read_access(DecodeOptions(server="127.0.0.1:1", status=True, token_file=file))
    with pytest.raises(ValueError, match="is no regular file"):
        read_tokens(tmp_path)


@pytest.mark.parametrize(
    "server, more, warns",
    [
        ("127.0.0.1:1", {}, False),
        ("[::1]:1", {}, False),
        ("cloud.example:1", {}, True),
        ("10.0.0.1:1", {}, True),
        ("cloud.example:1", {"tls": True}, False),
    ],
)
def test_a_token_crosses_no_network_in_plain_text_without_a_word(
    server, more, warns, monkeypatch, capsys
):
    monkeypatch.setenv("PIPEDRAFT_TOKEN", "secret")
    access = read_access(DecodeOptions(server=server, status=True, **more))
    assert access.token == "secret"
    said = capsys.readouterr().err
    assert ("in plain text; give --tls" in said) is warns and "secret" not in said


@pytest.mark.parametrize(
    "server", ["http://host:5", "user@host:5", "host", ":5", "host:0", "host:99999", "a b:5", "::1"]
)
def test_a_server_is_host_and_port(server):
    with pytest.raises(ValueError, match="give host:port"):
        Access(server=server)


# -- servers that lie -------------------------------------------------------------------------


def opened(number: int = 0, **fields: Any) -> Opened:
    known = {"token": 3, "vocab_size": 16, "max_positions": 64, "eos_token_ids": [], "anchor": ""}
    return Opened(number=number, seq=0, epoch=0, **{**known, **fields})


def verdict(number: int, **fields: Any) -> Result:
    known = {"epoch": 0, "seq": 0, "length": 3, "token": 1, "held_s": 0.0, "forward_s": 0.0}
    return Result(number=number, **{**known, **fields})


LIES: dict[str, tuple[list[Any], str]] = {
    "nothing": ([], "could not be used"),
    "another number": ([opened(7)], "reply 7 where 0 is due"),
    "one number for ever": ([opened(), *[verdict(0)] * 400], "reply 0 where 1 is due"),
    "a token it has not": ([opened(token=99)], "token 99 is outside"),
    "a token the draft has not": ([opened(token=99, vocab_size=2**20)], "token 99 is outside"),
}


@pytest.mark.parametrize("replies, text", LIES.values(), ids=LIES)
@in_loop
async def test_a_server_that_lies_ends_the_output_in_time_and_in_words(replies, text, request):
    target = make_target()
    about = make_server(target)._about
    grpc = wire.import_grpc()

    async def describe(request, context):
        return msgspec.msgpack.encode(about)

    async def session(requests, context):
        for reply in replies:
            yield REPLIES.to_bytes(reply)
            await asyncio.sleep(0.01)
        await asyncio.sleep(60)

    server = grpc.aio.server()
    methods = {
        "Describe": grpc.unary_unary_rpc_method_handler(describe),
        "Session": grpc.stream_stream_rpc_method_handler(session),
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(wire.SERVICE, methods)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    started = time.monotonic()
    with pytest.raises((ValueError, Failure)) as ended:
        # Short where nothing else can end it; under load a message may come late.
        times = {"answer_s": 0.3 if "could not" in text else 60.0}
        times |= {"give_up_s": 1.0, "connect_s": 60.0}
        way = {"schedule": "autoregressive"}
        if "the draft has not" in request.node.callspec.id:
            way = {"schedule": "flexspec", "draft": lm_draft(target)}
        await decode(port, [1, 2], access=times, **way)
    await server.stop(0)
    assert text in str(ended.value) and time.monotonic() - started < 60
