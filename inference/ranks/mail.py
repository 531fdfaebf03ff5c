"""Connections between ranks over ZeroMQ, one socket for each kind of message.

    onward    rank k -> rank k + 1    segments and KeepRows
    answers   rank k -> rank 0        the stages' results
    cancels   rank 0 -> rank k        cancellations, which overtake segments
    control   rank 0 <-> rank k       beats and failures

The receiver of ``onward`` binds it, and rank 0 binds the others. Ranks on one machine use Unix
sockets, which accept this user's processes only. Between machines, TCP carries CURVE, whose keys
come from the launch's token. A stranger without the token cannot get a message in.
"""

import hashlib
import ipaddress
import os
import re
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from ..server_options import address_of
from .codec import CODEC, MAX_HEADER_BYTES, MAX_TENSOR_BYTES, AnyMessage

TO_FIRST = ("answers", "cancels", "control")
"""Kinds of messages that rank 0 binds."""
MAX_CONTROL_BYTES = 1 << 16
CONNECT_MS = 20_000
UNDER_WAY = zmq.EVENT_CONNECTED | zmq.EVENT_CONNECT_DELAYED
"""Events of a dialed connection before its handshake. All others open or end it."""
FLUSH_MS = 1000
"""Longest wait for messages that are not sent yet at the end."""


LITERAL = re.compile(r"[\d.]+|.*:.*")
"""IPv4 or IPv6 address, not a name."""


class Mail:
    """A rank's sockets. One thread uses ``control`` and a stage's ``cancels``, another the rest."""

    def __init__(
        self, rank: int, world_size: int, token: str, host: str, port: int, silence_s: float
    ) -> None:
        """
        Args:
            host: where other machines reach this rank; empty: every rank is on this machine.
            port: first of up to three ports to listen on; 0: any.
            silence_s: longest silence of a connection.
        """
        self.rank, self.world_size = rank, world_size
        self._host, self._port, self._silence_s = host, port, silence_s
        self._key = z85.encode(hashlib.sha256(f"pipedraft {token}".encode()).digest())
        # Control has its own context, so a failing rank can flush it while others are in use.
        self._data, self._control = zmq.Context(), zmq.Context()
        self.sockets: dict[str, zmq.Socket[bytes]] = {}
        self.dials: dict[zmq.Socket[bytes], tuple[str, int, str]] = {}
        """Kind, peer and endpoint of every outgoing connection, by its monitor."""
        self.pending: set[zmq.Socket[bytes]] = set()
        """Monitors of the connections that are not open yet."""

    def bind(self) -> dict[str, str]:
        """Bind this rank's sockets, and return their endpoints.

        Raises:
            ValueError: a port is in use.
        """
        kinds = ("inward",) if self.rank else TO_FIRST
        ports = range(self._port, self._port + 3) if self._port else (0, 0, 0)
        return {kind: self._bind(kind, port) for kind, port in zip(kinds, ports, strict=False)}

    def dial(self, endpoints: Sequence[dict[str, str]]) -> None:
        """Connect to the ranks that receive from this one, and to rank 0."""
        wanted = [(kind, kind, 0) for kind in TO_FIRST if self.rank]
        if self.rank + 1 < self.world_size:
            wanted.append(("onward", "inward", self.rank + 1))
        for kind, its_kind, peer in wanted:
            end = self._open(kind, zmq.DEALER)
            monitor = end.get_monitor_socket(zmq.EVENT_ALL & ~UNDER_WAY)
            self.dials[monitor] = kind, peer, endpoints[peer][its_kind]
            self.pending.add(monitor)
            end.connect(endpoints[peer][its_kind])

    def is_lost(self, monitor: "zmq.Socket[bytes]") -> bool:
        """Read a monitor's event, which opens or ends its connection."""
        is_open = recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if is_open:
            self.pending.discard(monitor)
        return not is_open

    def watched(self) -> list["zmq.Socket[bytes]"]:
        """Return the sockets that the watching thread reads."""
        kinds = ("control", "cancels") if self.rank else ("control",)
        return [self.sockets[kind] for kind in kinds] + list(self.dials)

    def send_control(self, message: AnyMessage) -> None:
        """Send to rank 0, or from rank 0 to all others. Never wait."""
        end, frame = self.sockets["control"], CODEC.to_bytes(message)
        for route in [[]] if self.rank else [[b"%d" % k] for k in range(1, self.world_size)]:
            with suppress(zmq.Again):
                end.send_multipart([*route, frame], zmq.NOBLOCK)

    def flush_control(self) -> None:
        self._control.destroy(linger=FLUSH_MS)

    def close(self) -> None:
        self._data.destroy(linger=FLUSH_MS)
        self.flush_control()

    # -- sockets ------------------------------------------------------------------------------

    def _open(self, kind: str, type_: int) -> "zmq.Socket[bytes]":
        is_control, is_server = kind == "control", type_ == zmq.ROUTER
        end = (self._control if is_control else self._data).socket(type_)
        self.sockets[kind] = end
        end.maxmsgsize = MAX_CONTROL_BYTES if is_control else MAX_HEADER_BYTES + MAX_TENSOR_BYTES
        end.routing_id = b"%d" % self.rank
        if not self._host:
            if is_server:
                end.set(zmq.IPC_FILTER_UID, os.getuid())
            return end
        end.ipv6 = socket.has_dualstack_ipv6()
        # A control message misses first, and names the rank, so connections may be silent longer.
        limit_s = int(self._silence_s) + 1
        end.tcp_maxrt = 1000 * limit_s
        end.tcp_keepalive, end.tcp_keepalive_idle, end.tcp_keepalive_intvl = 1, 1, 1
        end.tcp_keepalive_cnt = limit_s
        public = zmq.curve_public(self._key)
        end.connect_timeout = CONNECT_MS
        end.curve_secretkey, end.curve_publickey = self._key, public
        if is_server:
            end.curve_server = True
        else:
            # Never sent in clear, so it also proves to the server that the client has the token.
            end.curve_serverkey = public
        return end

    def _bind(self, kind: str, port: int) -> str:
        end = self._open(kind, zmq.ROUTER)
        if not self._host:
            endpoint = f"ipc://@pipedraft-{secrets.token_hex(8)}"
            end.bind(endpoint)
            return endpoint
        # Behind a NAT, the address is another machine's. A name may stand for 127.0.0.1 here.
        for place in [self._host, "*"] if LITERAL.fullmatch(self._host) else ["*"]:
            with suppress(zmq.ZMQError):
                end.bind(f"tcp://{address_of(place, port)}")
                number = end.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
                return f"tcp://{address_of(self._host, int(number))}"
        raise ValueError(f"--rank-port: {port} cannot be listened on; give the first of free ports")


def own_address(master: str, port: int) -> str:
    """Return this machine's address on its way to ``master``, or ``master`` if that is here."""
    with socket.create_connection((master, port)) as probe:
        found = str(probe.getsockname()[0])
    return master if ipaddress.ip_address(found).is_loopback else found
