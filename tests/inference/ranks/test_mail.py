"""Test the ranks' connections: who gets a message in, its size, and where ranks listen."""

import socket
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import torch
import zmq
from zmq.utils.monitor import recv_monitor_message

from pipedraft.inference.ranks.codec import CODEC, Beat, Cause, StageResult
from pipedraft.inference.ranks.links import Receiver, Sender
from pipedraft.inference.ranks.mail import MAX_CONTROL_BYTES, TO_FIRST, UNDER_WAY, Mail, own_address
from pipedraft.inference.timeline import Timeline

WAIT_MS = 30_000
NEVER_MS = 300


@contextmanager
def two_ranks(host: str = "127.0.0.1", other_token: str = "a") -> Iterator[list[Mail]]:
    """Two ranks whose connections are dialed; an empty host stands for one machine."""
    ranks = [Mail(rank, 2, token, host, 0, 5) for rank, token in enumerate(["a", other_token])]
    endpoints = [rank.bind() for rank in ranks]
    for rank in ranks:
        rank.dial(endpoints)
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.close()


def wait_for_events(rank: Mail, is_lost: bool) -> None:
    """Wait for one event of every connection that this rank dialed."""
    for monitor in rank.dials:
        assert monitor.poll(WAIT_MS)
        assert rank.is_lost(monitor) == is_lost


@pytest.mark.parametrize("host", ["", "127.0.0.1", "::1", "localhost"])
def test_two_ranks_reach_each_other(host):
    """On one machine over Unix sockets, else over TCP by either protocol, or by name."""
    if host == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("this system has no IPv6")
    with two_ranks(host) as ranks:
        for rank in ranks:
            wait_for_events(rank, is_lost=False)
            assert not rank.pending and len(rank.dials) == (3 if rank.rank else 1)
        ranks[1].send_control(Beat(sequence=7))
        assert ranks[0].sockets["control"].poll(WAIT_MS)
        sender, frame = ranks[0].sockets["control"].recv_multipart()
        assert (sender, CODEC.decode(frame).sequence) == (b"1", 7)
        ranks[0].send_control(Cause(line="x"))
        assert ranks[1].sockets["control"].poll(WAIT_MS)
        assert CODEC.decode(ranks[1].sockets["control"].recv()).line == "x"


def test_messages_are_sent_before_the_receiver_asks_for_any():
    """So messages sent together cross a link together. These exceed what the system buffers."""
    with two_ranks() as ranks:
        for rank in ranks:
            wait_for_events(rank, is_lost=False)
        sender = Sender(ranks[0].sockets["onward"], 1, Timeline(""))
        ranks[0].sockets["onward"].sndtimeo = WAIT_MS
        for number in range(64):
            sender.send(StageResult(sequence=number, taps={1: torch.zeros(512, 256)}))
        receiver = Receiver(ranks[1].sockets["inward"], 0, defaultdict(deque))
        assert [receiver.receive().sequence for _ in range(64)] == [*range(64)]


def test_another_token_is_refused():
    with two_ranks(other_token="b") as ranks:
        for rank in ranks:
            wait_for_events(rank, is_lost=True)
            assert set(rank.pending) == set(rank.dials)
        ranks[1].send_control(Beat())
        assert not ranks[0].sockets["control"].poll(NEVER_MS)


@pytest.mark.parametrize("knows", ["nothing", "a key of its own"])
def test_a_stranger_gets_no_message_in(knows):
    with two_ranks() as ranks, zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        endpoint = ranks[1].dials[next(iter(ranks[1].dials))][2]
        stranger.linger = 0
        if knows != "nothing":
            stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
            stranger.curve_serverkey = zmq.curve_keypair()[0]
        monitor = stranger.get_monitor_socket(zmq.EVENT_ALL & ~UNDER_WAY)
        stranger.connect(endpoint)
        stranger.send(CODEC.to_bytes(Beat()))
        assert monitor.poll(WAIT_MS), "it was not refused"
        assert recv_monitor_message(monitor)["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED
        assert not ranks[0].sockets["answers"].poll(NEVER_MS)
        stranger.disable_monitor()


def test_raw_bytes_from_a_stranger_end_its_connection_only():
    with two_ranks() as ranks:
        for rank in ranks:
            wait_for_events(rank, is_lost=False)
        port = int(ranks[1].dials[next(iter(ranks[1].dials))][2].rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as stranger, suppress(OSError):
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
            while stranger.recv(1000):  # a greeting, and the end
                pass
        ranks[1].sockets["answers"].send(b"still here")
        assert ranks[0].sockets["answers"].recv_multipart() == [b"1", b"still here"]


def test_a_message_above_the_bound_is_never_read():
    with two_ranks() as ranks:
        wait_for_events(ranks[1], is_lost=False)
        ranks[1].sockets["control"].send(bytes(MAX_CONTROL_BYTES + 1))
        assert not ranks[0].sockets["control"].poll(NEVER_MS)
        monitor = next(key for key, (kind, _, _) in ranks[1].dials.items() if kind == "control")
        assert monitor.poll(WAIT_MS) and ranks[1].is_lost(monitor)


def test_a_rank_that_ends_is_seen_by_those_that_dialed_it():
    with two_ranks() as ranks:
        for rank in ranks:
            wait_for_events(rank, is_lost=False)
        ranks[0].close()
        started_s = time.monotonic()
        wait_for_events(ranks[1], is_lost=True)
        assert time.monotonic() - started_s < WAIT_MS / 1000


# -- addresses ---------------------------------------------------------------------------------


def test_an_address_behind_a_nat_is_announced_but_not_bound():
    """192.0.2.1 is for documentation, so it is no machine's."""
    rank = Mail(0, 2, "a", "192.0.2.1", 0, 5)
    endpoints = rank.bind()
    assert list(endpoints) == list(TO_FIRST)
    for endpoint in endpoints.values():
        assert endpoint.startswith("tcp://192.0.2.1:")
        with socket.create_connection(("127.0.0.1", int(endpoint.rpartition(":")[2]))):
            pass
    rank.close()


def test_ports_are_the_ones_that_were_given():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        rank = Mail(0, 2, "a", "127.0.0.1", port - 1, 5)
        with pytest.raises(ValueError, match=f"^--rank-port: ({port - 1}|{port}) cannot be"):
            rank.bind()
        rank.close()
    rank = Mail(0, 2, "a", "127.0.0.1", port, 5)
    with suppress(ValueError):  # another process has taken one of them since
        found = [int(endpoint.rpartition(":")[2]) for endpoint in rank.bind().values()]
        assert found == [port, port + 1, port + 2]
    rank.close()


def test_a_rank_announces_its_address_on_the_way_to_the_first():
    """A master that is this machine is known to the others by its own name."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert own_address("127.0.0.1", port) == "127.0.0.1"
        assert own_address("localhost", port) == "localhost"


def test_a_rank_announces_the_interface_that_it_uses():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no interface but the loopback")
        own = probe.getsockname()[0]
    with socket.create_server((own, 0)) as server:
        assert own_address(own, server.getsockname()[1]) == own
