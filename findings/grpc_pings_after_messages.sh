#!/usr/bin/env bash
# What one would guess: on a gRPC stream with one short message in each direction per round, as in a session of edge and
# cloud, each message is one packet.
# What happens: a side that receives data also sends a PING, to measure the link's bandwidth, and the other side answers
# it. These are packets of their own. TCP delivers in order, so where one is lost, the next message waits for it.
# Versions: grpcio 1.85.1.
# What pipedraft does: inference/edge/wire.py turns the pings off (grpc.http2.bdp_probe) and sets the window that they
# would have grown. docs/lab/links.md has what that saves on a link that loses packets.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check grpcio==1.85.1
cd "$folder"
cat >try.py <<'PYTHON'
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import grpc

ROUNDS, SERVICE = 20, "try.Session"
DATA, PING = 0, 6
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def answer(requests, context):
    for request in requests:
        yield request


class Handler(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.stream_stream_rpc_method_handler(answer)


def count_frames(data):
    """Count the HTTP/2 frames of a direction by type."""
    counts, start = Counter(), len(PREFACE) * data.startswith(PREFACE)
    while start < len(data):
        counts[data[start + 3]] += 1
        start += 9 + int.from_bytes(data[start : start + 3], "big")
    return counts


def carry(source, sink, carried):
    with suppress(OSError):  # the other direction has ended first
        while data := source.recv(65536):
            carried += data
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


def relay(listener, port, up, down):
    client, _ = listener.accept()
    server = socket.create_connection(("127.0.0.1", port))
    for way in ((client, server, up), (server, client, down)):
        threading.Thread(target=carry, args=way, daemon=True).start()


def pings(options):
    """Return the numbers of PING and of DATA frames for all rounds."""
    server = grpc.server(ThreadPoolExecutor(2), [Handler()], options=options)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    listener = socket.create_server(("127.0.0.1", 0))
    up, down = bytearray(), bytearray()
    threading.Thread(target=relay, args=(listener, port, up, down), daemon=True).start()
    turn = threading.Semaphore(0)

    def messages():
        for _ in range(ROUNDS):
            time.sleep(0.1)
            yield bytes(100)
            assert turn.acquire(timeout=20)

    address = "127.0.0.1:%d" % listener.getsockname()[1]
    with grpc.insecure_channel(address, options=options) as channel:
        for found in channel.stream_stream(f"/{SERVICE}/Run")(messages()):
            turn.release()
    server.stop(None).wait()
    counts = count_frames(up) + count_frames(down)
    return counts[PING], counts[DATA]


print("grpcio", grpc.__version__)
default, data = pings([])
print(f"default: {default} PING frames beside {data} DATA frames in {ROUNDS} rounds")
without, data = pings([("grpc.http2.bdp_probe", 0)])
print(f"bdp_probe = 0: {without} PING frames beside {data} DATA frames")
is_as_stated = default >= 4 and default > 4 * without
print("as stated:", is_as_stated)
raise SystemExit(not is_as_stated)
PYTHON
"$folder/venv/bin/python" try.py
