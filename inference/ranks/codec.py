"""Encode messages as a typed header followed by the raw bytes of their tensors.

A message set is a union of ``Message`` classes. Their fields declare types, sizes and ranges, and
may be tensors. A ``Codec`` turns one message into one frame:

    prefix   magic number, then two sizes in bytes: header, tensors
    header   msgpack: dtype and shape of every tensor, then the message
    tensors  each starts at a multiple of 8 bytes and ends at one; bool as packed bits

Nothing is pickled, and frames are checked before memory is allocated. Tensors on an accelerator may
travel separately, from device to device. The frame then has only their shapes.
"""

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import UnionType
from typing import Annotated, Generic, Literal, Self, TypeAlias, TypeVar, get_args

import msgspec
import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from ...models.target import KeepRows, Segment
from ..messages import Count, Message, check_tensor
from ..rules import RuleName
from ..rules.filters import TokenFilters

Buffer: TypeAlias = bytes | bytearray | memoryview
Fetch: TypeAlias = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Function that receives the next separately sent tensor, with this shape and dtype."""

PREFIX = struct.Struct("<IIQ")
MAGIC = 0x50444632
"""First four bytes of a frame."""
MAX_AXES = 3
MAX_TENSORS = 4096
MAX_REASON = 200
MAX_LINE, MAX_PATH = 4000, 4096
DtypeName: TypeAlias = Literal[
    "bool", "uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64"
]
DTYPES: dict[DtypeName, torch.dtype] = {name: getattr(torch, name) for name in get_args(DtypeName)}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TensorHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    dtype: DtypeName
    shape: Annotated[tuple[Count, ...], Meta(max_length=MAX_AXES)]
    is_apart: bool

    @property
    def num_bytes(self) -> int:
        num_bits = math.prod(self.shape)
        if self.dtype != "bool":
            num_bits *= 8 * DTYPES[self.dtype].itemsize
        return -(-num_bits // 8)


class Header(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    tensors: Annotated[list[TensorHeader], Meta(max_length=MAX_TENSORS)]
    message: msgspec.Raw


_headers = msgspec.msgpack.Decoder(Header)


@dataclass(frozen=True)
class Frame:
    """Message ready to be sent."""

    data: bytes
    apart: list[Tensor]
    """Tensors sent separately, in this order."""


M = TypeVar("M", bound=Message)
Decoded = TypeVar("Decoded")


class Codec(Generic[M]):
    """Encoder and decoder for one message set. Invalid input raises a one-line ``ValueError``."""

    def __init__(
        self, messages: UnionType | type[M], *, max_header_bytes: int, max_tensor_bytes: int
    ) -> None:
        """Set limits per message. ``max_tensor_bytes`` includes separately sent tensors."""
        self.messages = messages
        self.max_header_bytes, self.max_tensor_bytes = max_header_bytes, max_tensor_bytes

    def encode(self, message: M, device: torch.device | None = None) -> Frame:
        """Encode a message as a frame. The caller sends tensors on ``device`` separately."""
        tensors: list[Tensor] = []

        def place(value: Tensor) -> int:
            tensors.append(value.detach())
            return len(tensors) - 1

        body = msgspec.msgpack.encode(message, enc_hook=place)
        heads, raw, apart = [], [], []
        for tensor in tensors:
            # An empty tensor's shape says everything: there is nothing to transfer.
            is_apart = tensor.device == device and tensor.numel() > 0
            heads.append(TensorHeader(NAMES[tensor.dtype], tuple(tensor.shape), is_apart))
            if is_apart:
                apart.append(tensor)
            else:
                raw.append(_raw(tensor))
        header = msgspec.msgpack.encode(Header(heads, msgspec.Raw(body)))
        buffers = [piece for part in raw for piece in (part, bytes(-len(part) % 8))]
        sizes = len(header), sum(map(len, buffers))
        self._check(*sizes)
        gap = bytes(_header_room(*sizes) - len(header))
        return Frame(b"".join([PREFIX.pack(MAGIC, *sizes), header, gap, *buffers]), apart)

    def to_bytes(self, message: M) -> bytes:
        """Return the whole frame, for links carrying messages of any length."""
        return self.encode(message).data

    def frame_bytes(self, start: Buffer) -> int:
        """Return a frame's length from its first bytes."""
        magic, header_bytes, tensor_bytes = PREFIX.unpack_from(start)
        if magic != MAGIC:
            raise ValueError(f"frame: starts with {magic:#x}; want a peer of this version")
        self._check(header_bytes, tensor_bytes)
        return PREFIX.size + _header_room(header_bytes, tensor_bytes) + tensor_bytes

    def decode(self, frame: Buffer, fetch: Fetch | None = None) -> M:
        """Decode one whole frame. The message has copies of the frame's tensors."""
        view = memoryview(frame)
        total = self.frame_bytes(view) if len(view) >= PREFIX.size else PREFIX.size
        if len(view) != total:
            raise ValueError(f"frame: {len(view)} bytes, where {total} are claimed")
        _, header_bytes, tensor_bytes = PREFIX.unpack_from(view)
        header = self._judged(lambda: _headers.decode(view[PREFIX.size :][:header_bytes]))
        inside = sum(_padded(head.num_bytes) for head in header.tensors if not head.is_apart)
        apart = [head.num_bytes for head in header.tensors if head.is_apart]
        # Check the sizes against each other before the tensors' memory is allocated.
        if inside != tensor_bytes:
            raise ValueError(f"frame: claims {tensor_bytes} bytes of tensors, describes {inside}")
        if apart and fetch is None:
            raise ValueError(f"frame: {len(apart)} of its tensors are not in it")
        # Separate tensors count, too: their shapes alone would make this side allocate.
        self._check(header_bytes, inside + sum(apart))
        tensors, content, at = [], bytearray(view[total - tensor_bytes :]), 0
        for head in header.tensors:
            if head.is_apart:
                assert fetch is not None
                tensors.append(fetch(head.shape, DTYPES[head.dtype]))
            else:
                tensors.append(_tensor(head, content, at))
                at += _padded(head.num_bytes)
        waiting = iter(enumerate(tensors))

        def tensor_at(kind: type, place: object) -> Tensor:
            index, tensor = next(waiting, (None, None))
            # In order and once each: a header cannot make two fields share one tensor's memory.
            if tensor is None or type(place) is not int or place != index:
                raise ValueError(f"{place!r} is not the place of the next tensor"[:MAX_REASON])
            return tensor

        message: M = self._judged(
            lambda: msgspec.msgpack.decode(header.message, type=self.messages, dec_hook=tensor_at)
        )
        # Unused tensors would be a way to send data that no check has seen.
        if next(waiting, None) is not None:
            raise ValueError("frame: has more tensors than its message")
        return message

    def _check(self, header: int, tensors: int) -> None:
        if header > self.max_header_bytes or tensors > self.max_tensor_bytes:
            raise ValueError(
                f"frame: claims {header} bytes of header and {tensors} of tensors; this side "
                f"takes {self.max_header_bytes} and {self.max_tensor_bytes}"
            )

    def _judged(self, decode: Callable[[], Decoded]) -> Decoded:
        try:
            return decode()
        except (ValueError, RecursionError) as error:
            reason = " ".join(str(error).split())[:MAX_REASON]  # it may quote the input
            raise ValueError(
                f"message: not one of this protocol ({reason}); want a peer of this version"
            ) from error


def _raw(tensor: Tensor) -> Buffer:
    if tensor.dtype == torch.bool:
        return np.packbits(tensor.numpy(force=True)).tobytes()
    # Through uint8, as NumPy has no bfloat16.
    flat = tensor.to("cpu").contiguous().flatten()
    return flat.view(torch.uint8).numpy().data if len(flat) else b""


def _tensor(head: TensorHeader, data: bytearray, at: int) -> Tensor:
    """Return a view that keeps ``data`` alive, or an unpacked copy if the dtype is bool."""
    num_items = math.prod(head.shape)
    # frombuffer refuses an empty buffer.
    if num_items == 0:
        return torch.empty(head.shape, dtype=DTYPES[head.dtype])
    if head.dtype == "bool":
        packed = np.frombuffer(data, np.uint8, head.num_bytes, at)
        bits = np.unpackbits(packed, count=num_items).view(np.bool_)
        return torch.from_numpy(bits).view(head.shape)
    flat = torch.frombuffer(data, dtype=DTYPES[head.dtype], count=num_items, offset=at)
    return flat.view(head.shape)


def _header_room(header_bytes: int, tensor_bytes: int) -> int:
    """Return the header's size, padded if tensors follow."""
    return _padded(header_bytes) if tensor_bytes else header_bytes


def _padded(size: int) -> int:
    return -(-size // 8) * 8


MAX_HEADER_BYTES = 1 << 25
"""Enough for the longest message, a report with its trace."""
MAX_TENSOR_BYTES = 1 << 30
MAX_ROWS = 1 << 16
MAX_PARTS = 1 << 12
IDS = (torch.int64,)
HIDDEN = (torch.float32, torch.bfloat16, torch.float16)

Layer = Annotated[int, Meta(ge=0, le=10_000)]
Layers = Annotated[tuple[Layer, ...], Meta(max_length=1000)]
Rows = Annotated[tuple[Count, ...], Meta(max_length=MAX_ROWS)]
Number = Annotated[int, Meta(ge=0, lt=2**62)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class StageMessage(Message, kw_only=True):
    sequence: Number = 0
    """Number in the controller's sending order; an answer repeats its question's number."""
    slot: Number = 0
    """Cache slot: sequences in one pipeline have one slot each; a single sequence uses 0."""


class Prefill(StageMessage, tag="prefill"):
    """Prompt rows, and sampling settings for the tokens after them."""

    rows: Tensor
    """int64 [l] tokens for the first stage, [l, H] for the others."""
    first_position: Count
    """Position of the first row. 0 begins a new sequence and drops everything before."""
    is_last: bool
    taps: Layers
    temperature: Annotated[float, Meta(ge=0, le=1e6)]
    filters: TokenFilters
    rule: RuleName
    seed: Int64
    prompt: Count
    is_bitwise: bool = False
    """Compute rows as in autoregressive decoding."""
    length: Count = 0
    """Length of the whole prompt, as in ``Stage.prefill``; 0: it ends with these rows."""
    reserved_rows: Count = 0
    """Cache rows to allocate at once."""

    def __post_init__(self) -> None:
        check_rows("rows", self.rows, 1 if self.rows.dtype == torch.int64 else 2)


class Step(StageMessage, tag="step"):
    """Segment, and the KeepRows to apply before the segment, in creation order."""

    kept: Annotated[tuple[tuple[Rows, Count], ...], Meta(max_length=MAX_ROWS)]
    """For each KeepRows, its rows and the number of committed ones."""
    positions: Tensor
    """int64 [l]."""
    visible: Tensor
    """bool [l, S]."""
    rows: Tensor | None
    """int64 [l] tokens for the first stage, [l, H] for the others, None if cancelled."""
    is_cancelled: bool = False
    """True if no row is needed any more: stages make room in their caches and compute nothing."""

    @classmethod
    def of(cls, keeps: Sequence[KeepRows], segment: Segment, *, is_cancelled: bool = False) -> Self:
        return cls(
            kept=tuple((keep.rows, keep.num_committed) for keep in keeps),
            positions=segment.positions,
            visible=segment.visible,
            rows=segment.hidden if segment.ids is None else segment.ids,
            is_cancelled=is_cancelled,
        )

    def __post_init__(self) -> None:
        for rows, num_committed in self.kept:
            # The committed rows come first, so the list must be in cache order.
            if num_committed > len(rows) or any(i >= j for i, j in pairwise(rows)):
                raise ValueError(f"kept: {num_committed} of {len(rows)} rows, or not ascending")
        num_rows = check_rows("positions", self.positions, 1)
        check_tensor("visible", self.visible, (torch.bool,), num_rows, None)
        # The last columns are the segment's own rows; earlier ones are rows already in the cache.
        if self.visible.shape[1] < num_rows:
            raise ValueError(f"visible: {self.visible.shape[1]} columns for {num_rows} rows")
        if self.rows is not None:
            axes = 1 if self.rows.dtype == torch.int64 else 2
            if check_rows("rows", self.rows, axes) != num_rows:
                raise ValueError(f"rows: {len(self.rows)} of them, {num_rows} positions")

    @property
    def keeps(self) -> list[KeepRows]:
        return [KeepRows(rows=rows, num_committed=count) for rows, count in self.kept]

    @property
    def segment(self) -> Segment:
        has_ids = self.rows is not None and self.rows.dtype == torch.int64
        return Segment(
            positions=self.positions,
            visible=self.visible,
            ids=self.rows if has_ids else None,
            hidden=None if has_ids else self.rows,
        )


class StageResult(StageMessage, tag="result"):
    """Answer of a stage with hidden states for the draft. The last stage adds its results."""

    taps: Annotated[dict[Layer, Tensor], Meta(max_length=1000)] = {}
    """Layer index -> [l, H]."""
    verdicts: Tensor | None = None
    """[R], or [R, V]."""

    def __post_init__(self) -> None:
        for layer, hidden_lH in self.taps.items():
            check_tensor(f"taps {layer}", hidden_lH, HIDDEN, None, None)
        if self.verdicts is not None and self.verdicts.ndim not in (1, 2):
            raise ValueError(f"verdicts: {list(self.verdicts.shape)}; want one or two axes")


class Failed(StageMessage, tag="failed"):
    """Notice that a stage failed on a sequence's message. Only this sequence ends."""

    reason: Annotated[str, Meta(max_length=MAX_REASON)]


class Leave(StageMessage, tag="leave"):
    """Notice that a sequence has ended, so its caches can be freed."""


Part: TypeAlias = Prefill | Step | StageResult | Failed | Leave


class Together(StageMessage, tag="together"):
    """One step's messages for several sequences, or a stage's answers to these messages."""

    parts: Annotated[list[Part], Meta(max_length=MAX_PARTS)]


class Cancel(StageMessage, tag="cancel"):
    """Notice that a slot's segments up to this ``sequence`` number need not be computed."""


class MeasureRequest(StageMessage, tag="measure"):
    """Controller's request to report or clear measurements, or to find numbers that are NaN or
    infinite, passed from stage to stage."""

    action: Literal["report", "clear", "find"]


class StageReport(StageMessage, tag="report"):
    """A stage's measured times and counts."""

    json: str


class Job(StageMessage, tag="job"):
    """What rank 0 decodes with. Each rank loads its part of the target."""

    target: Annotated[str, Meta(max_length=MAX_PATH)]
    revision: Annotated[str, Meta(max_length=MAX_REASON)] | None
    boundaries: Layers
    dtype: Annotated[str, Meta(max_length=MAX_REASON)]
    traces: bool

    @property
    def num_stages(self) -> int:
        return len(self.boundaries) - 1


class CloseRanks(StageMessage, tag="close"):
    """Last message on a link."""


class Beat(StageMessage, tag="beat"):
    """Sign of life from a rank with all its connections; from rank 0, all ranks have theirs."""


class Cause(StageMessage, tag="cause"):
    """Reason why a rank ends all ranks."""

    line: Annotated[str, Meta(max_length=MAX_LINE)] = ""
    """Empty if a rank refuses its input: only that rank's command says why."""


AnyMessage: TypeAlias = (
    Part | Together | Cancel | MeasureRequest | StageReport | Job | CloseRanks | Beat | Cause
)
CODEC: Codec[AnyMessage] = Codec(
    AnyMessage, max_header_bytes=MAX_HEADER_BYTES, max_tensor_bytes=MAX_TENSOR_BYTES
)


def check_rows(name: str, tensor: Tensor, axes: int) -> int:
    """Check tokens [l] if ``axes`` is 1, else hidden states [l, H]. Return l."""
    check_tensor(name, tensor, IDS if axes == 1 else HIDDEN, None, *([None] * (axes - 1)))
    if not 0 < len(tensor) <= MAX_ROWS:
        raise ValueError(f"{name}: {len(tensor)}; want 1 to {MAX_ROWS}")
    return len(tensor)
