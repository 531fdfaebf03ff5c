"""A link's bandwidth, delay, jitter and loss on real connections: a TCP proxy on 127.0.0.1.

    async with EmulatedLink(PRESETS["4g"], "127.0.0.1", port) as link:
        ...  # connect to 127.0.0.1:link.port

Every piece of data arrives when ``Channel`` would deliver a message with its size. TCP loses
nothing: a lost packet becomes the time until its retransmission.
"""

import asyncio
import time
from typing import Any

from pipedraft.inference.edge.channel import Channel, Direction, Link


class EmulatedLink:
    def __init__(self, link: Link, host: str, port: int) -> None:
        """``host``, ``port``: server address behind the proxy."""
        self._channel = Channel(link, seed=0)
        self._address = host, port
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task] = set()
        self.carried: dict[Direction, bytearray] = {"up": bytearray(), "down": bytearray()}
        """All bytes of each direction."""

    async def __aenter__(self) -> "EmulatedLink":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exception: Any) -> None:
        self._server.close()
        self.drop()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def drop(self) -> None:
        """Reset all connections; data in flight is lost."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._address)
        except OSError:  # nobody listens there
            writer.transport.abort()
            return
        self._writers |= {writer, far_writer}
        ways: list[tuple[asyncio.StreamReader, asyncio.StreamWriter, Direction]] = [
            (reader, far_writer, "up"),
            (far_reader, writer, "down"),
        ]
        for source, sink, direction in ways:
            pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
            for work in (self._take(source, pieces, direction), self._deliver(pieces, sink)):
                task = asyncio.create_task(work)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _take(
        self,
        source: asyncio.StreamReader,
        pieces: asyncio.Queue[tuple[float, bytes]],
        direction: Direction,
    ) -> None:
        data = b"."
        while data:
            try:
                data = await source.read(2**16)
            except OSError:  # reset: for the other side it ends
                data = b""
            now_s = time.monotonic()
            self.carried[direction] += data
            pieces.put_nowait((self._channel.transmit(now_s, len(data), direction), data))

    async def _deliver(
        self, pieces: asyncio.Queue[tuple[float, bytes]], sink: asyncio.StreamWriter
    ) -> None:
        while True:
            arrival_s, data = await pieces.get()
            await asyncio.sleep(max(0.0, arrival_s - time.monotonic()))
            if not data or sink.is_closing():
                sink.close()
                return
            sink.write(data)
