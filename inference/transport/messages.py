"""What travels between the ranks, and how a message becomes one frame of bytes.

A frame is a fixed header, the shapes of its arrays, and the arrays. Nothing is pickled, and sizes
are checked before anything is allocated. Arrays on an accelerator may travel apart from their
frame, from device to device; the frame then has their shapes only.
"""

# l rows of a segment, S mask columns, H hidden, R returned rows, V vocabulary

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pipedraft.inference.config import RULE_NAMES, RuleName
from pipedraft.models.target import Keep, Segment

MAGIC = 0x50445246
MAX_FRAME_BYTES = 1 << 30
HEADER = struct.Struct("<IHHQ4iqdd")
"""Magic, kind, arrays, bytes in all, four integers, sequence, a float, time of sending."""
ARRAY = struct.Struct("<BB3i")
"""Data type, axes, sizes (1 where there is no axis)."""
APART = 0x80
"""Added to the data type of an array that is not in the frame."""
DTYPES = (torch.uint8, torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(kw_only=True)
class Message:
    sequence: int = 0
    """Number in the order of the controller's sending; an answer has that of its question."""
    sent_at: float = 0.0
    """time.monotonic() of the sender: one clock for all processes of a machine."""


@dataclass(kw_only=True)
class Prefill(Message):
    """Rows of a prompt, and how the text after it is to be drawn."""

    rows: Tensor
    """int64 [l] tokens for the first stage, [l, H] for the others."""
    first_position: int
    """0: a new text, everything before it is forgotten."""
    is_last: bool
    taps: tuple[int, ...]
    temperature: float
    rule: RuleName
    seed: int
    prompt: int


@dataclass(kw_only=True)
class Step(Message):
    """Keeps in the order of their making, then a segment."""

    keeps: list[Keep]
    segment: Segment
    is_cancelled: bool = False
    """No row of it is wanted any more: caches make room, nothing is computed."""


@dataclass(kw_only=True)
class Result(Message):
    """A stage's answer: states that the draft reads, and verdicts if it is the last stage."""

    taps: dict[int, Tensor] = field(default_factory=dict)
    verdicts: Tensor | None = None


@dataclass(kw_only=True)
class Cancel(Message):
    """Segments up to this number need not be computed."""


@dataclass(kw_only=True)
class Text(Message):
    """JSON: a question of the controller travelling down, or an answer to it."""

    text: str


@dataclass(kw_only=True)
class Close(Message):
    """The last message of a link."""


KINDS: tuple[type[Message], ...] = (Prefill, Step, Result, Cancel, Text, Close)
Content = tuple[tuple[int, ...], float, list[Tensor]]


def _int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _content(message: Message) -> Content:
    """Up to four integers, a float, and arrays: all there is in a message."""
    match message:
        case Prefill():
            random = torch.tensor([message.seed, message.prompt])
            numbers = (message.first_position, message.is_last, RULE_NAMES.index(message.rule))
            return numbers, message.temperature, [message.rows, _int32(message.taps), random]
        case Step():
            segment = message.segment
            plan = [n for k in message.keeps for n in (len(k.rows), k.num_committed, *k.rows)]
            visible = np.packbits(segment.visible.numpy(force=True), axis=1)
            arrays = [_int32(plan), segment.positions, torch.from_numpy(visible)]
            payload = segment.hidden if segment.ids is None else segment.ids
            numbers = (segment.hi, segment.ids is not None, message.is_cancelled)
            return numbers, 0.0, arrays if payload is None else [*arrays, payload]
        case Result():
            arrays = [_int32(list(message.taps)), *message.taps.values()]
            if message.verdicts is not None:
                arrays.append(message.verdicts)
            return (message.verdicts is not None,), 0.0, arrays
        case Text():
            text = bytearray(message.text.encode())
            return (), 0.0, [torch.frombuffer(text, dtype=torch.uint8)]
    return (), 0.0, []


def _message(kind: int, numbers: tuple[int, ...], number: float, arrays: list[Tensor]) -> Message:
    """The inverse of ``_content``."""
    name = KINDS[kind]
    if name is Prefill:
        rows, taps, random = arrays
        return Prefill(
            rows=rows,
            first_position=numbers[0],
            is_last=bool(numbers[1]),
            rule=RULE_NAMES[numbers[2]],
            taps=tuple(taps.tolist()),
            temperature=number,
            seed=int(random[0]),
            prompt=int(random[1]),
        )
    if name is Step:
        plan, positions, packed, *payload = arrays
        unpacked = np.unpackbits(packed.numpy(), axis=1, count=numbers[0]).view(bool)
        segment = Segment(positions=positions, visible=torch.from_numpy(unpacked))
        if payload and numbers[1]:
            segment.ids = payload[0]
        elif payload:
            segment.hidden = payload[0]
        return Step(keeps=_keeps(plan.tolist()), segment=segment, is_cancelled=bool(numbers[2]))
    if name is Result:
        layers = arrays[0].tolist()
        tapped = dict(zip(layers, arrays[1:], strict=False))
        return Result(taps=tapped, verdicts=arrays[-1] if numbers[0] else None)
    if name is Text:
        return Text(text=arrays[0].numpy().tobytes().decode())
    return name()


def _keeps(plan: list[int]) -> list[Keep]:
    keeps, at = [], 0
    while at < len(plan):
        count, num_committed = plan[at : at + 2]
        at += 2 + count
        keeps.append(Keep(rows=tuple(plan[at - count : at]), num_committed=num_committed))
    return keeps


def encode(
    message: Message, sent_at: float, device: torch.device | None = None
) -> tuple[Tensor, list[Tensor]]:
    """One frame, uint8 [bytes], and the arrays on ``device``, which are to be sent apart."""
    numbers, number, arrays = _content(message)
    apart = [array.device == device and array.numel() > 0 for array in arrays]
    parts = [
        array.detach() if is_apart else array.detach().to("cpu").contiguous()
        for array, is_apart in zip(arrays, apart, strict=True)
    ]
    sizes = [
        0 if is_apart else part.numel() * part.element_size()
        for part, is_apart in zip(parts, apart, strict=True)
    ]
    start = _padded(HEADER.size + ARRAY.size * len(parts))
    total = start + sum(map(_padded, sizes))
    frame = torch.empty(total, dtype=torch.uint8)
    view = frame.numpy().data
    four = (*map(int, numbers), 0, 0, 0, 0)[:4]
    kind = KINDS.index(type(message))
    HEADER.pack_into(
        view, 0, MAGIC, kind, len(parts), total, *four, message.sequence, number, sent_at
    )
    for index, part in enumerate(parts):
        shape = (*part.shape, 1, 1, 1)[:3]
        code = DTYPES.index(part.dtype) | (APART if apart[index] else 0)
        ARRAY.pack_into(view, HEADER.size + index * ARRAY.size, code, part.ndim, *shape)
    at = start
    for part, size in zip(parts, sizes, strict=True):
        if size:
            frame[at : at + size] = part.flatten().view(torch.uint8)
        at += _padded(size)
    return frame, [part for part, is_apart in zip(parts, apart, strict=True) if is_apart]


def _padded(size: int) -> int:
    """Arrays start at multiples of 8 bytes."""
    return (size + 7) // 8 * 8


def frame_bytes(start: Tensor) -> int:
    """Length of a frame of which at least the header is there.

    Raises:
        ConnectionError: these bytes are no frame of ours.
    """
    magic, _, _, total = struct.unpack_from("<IHHQ", start.numpy().data)
    if magic != MAGIC or not HEADER.size <= total <= MAX_FRAME_BYTES:
        raise ConnectionError(f"a frame starts with {magic:#x} and claims {total} bytes")
    return total


def decode(
    frame: Tensor, receive: Callable[[tuple[int, ...], torch.dtype], Tensor] | None = None
) -> Message:
    """A message whose tensors are copies, so that the buffer is free again.

    Args:
        receive: fetches the next array that travels apart, of this shape and type.

    Raises:
        ConnectionError: the frame contradicts itself.
    """
    total = frame_bytes(frame)
    data = frame[:total].clone()
    view = data.numpy().data
    _, kind, count, _, *four, sequence, number, sent_at = HEADER.unpack_from(view)
    at = _padded(HEADER.size + ARRAY.size * count)
    arrays = []
    for index in range(count):
        code, axes, *sizes = ARRAY.unpack_from(view, HEADER.size + index * ARRAY.size)
        dtype = DTYPES[code & ~APART]
        num_items = sizes[0] * sizes[1] * sizes[2]
        size = num_items * dtype.itemsize
        limit = MAX_FRAME_BYTES if code & APART else total - at
        if min(sizes) < 0 or size > limit:
            raise ConnectionError(f"array {index} of a frame claims {sizes}, which is too long")
        if code & APART:
            if receive is None:
                raise ConnectionError(f"array {index} of a frame is not in it")
            arrays.append(receive(tuple(sizes[:axes]), dtype))
            continue
        arrays.append(data[at : at + size].view(dtype).view(sizes[:axes]))
        at += _padded(size)
    message = _message(kind, tuple(four), number, arrays)
    message.sequence, message.sent_at = sequence, sent_at
    return message
