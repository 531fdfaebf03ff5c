"""The elements of a JSON array one by one: ShareGPT's file is an array of 670 MB."""

import io
import json
import re
from collections.abc import Iterator
from typing import IO, Any

CHUNK_CHARACTERS = 1 << 20
SPACE = re.compile(r"[ \t\n\r]*")


def read_array(file: IO[bytes], chunk: int = CHUNK_CHARACTERS) -> Iterator[Any]:
    """Parse UTF-8 text that begins with "[" and holds nothing after its "]".

    Memory is that of a few chunks, or of the largest element.

    Raises:
        ValueError: the text is no such array; elements before the fault have been yielded.
    """
    decoder = json.JSONDecoder()
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    buffer = text.read(chunk)
    while buffer.isspace():
        buffer = text.read(chunk)
    position, size = _skip(buffer, 0) + 1, chunk
    while True:
        position = _skip(buffer, position)
        fault = ValueError(f"the array is not closed, at {buffer[-30:]!r}")
        closes = buffer[position : position + 1] == "]"
        end, value = position, None
        if not closes:
            try:
                value, end = decoder.raw_decode(buffer, position)
                end = _skip(buffer, end)
            except json.JSONDecodeError as error:
                fault = ValueError(f"{error.msg}, at {buffer[error.pos : error.pos + 30]!r}")
        after = buffer[end : end + 1] if closes or end > position else ""
        if not closes and after and after in ",]":
            yield value
            position, size = end + (after == ","), chunk
            continue
        if closes:
            rest = (buffer[position + 1 :] + text.read()).strip()
            if rest:
                raise ValueError(f"text after the array: {rest[:30]!r}")
            return
        # The element may go on in the next chunk; twice as much each time, so that a long one is
        # not parsed again and again.
        more = text.read(size)
        if not more:
            raise fault
        buffer, position, size = buffer[position:] + more, 0, 2 * size


def _skip(buffer: str, position: int) -> int:
    """The next character that is no white space."""
    match = SPACE.match(buffer, position)
    assert match is not None
    return match.end()
