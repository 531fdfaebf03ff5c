"""Every message and dtype survives its frame; other bytes are refused and cost no memory."""

import math
import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Meta
from torch import Tensor

from pipedraft.inference.messages import Message, check_tensor
from pipedraft.inference.ranks.codec import (
    CODEC,
    DTYPES,
    MAGIC,
    PREFIX,
    AnyMessage,
    Beat,
    Cancel,
    Cause,
    CloseRanks,
    Codec,
    Failed,
    Header,
    Job,
    Leave,
    MeasureRequest,
    Prefill,
    StageReport,
    StageResult,
    Step,
    TensorHeader,
    Together,
)
from pipedraft.inference.rules import RULE_NAMES
from pipedraft.inference.rules.filters import TokenFilters
from pipedraft.models.target import KeepRows, Segment

ALL_DTYPES = tuple(DTYPES.values())
SMALL_BYTES = 1 << 20
"""Memory bound, above any refusal below."""


class Parcel(Message, tag="parcel"):
    tensors: Annotated[dict[str, Tensor], Meta(max_length=8)]
    number: Annotated[float, Meta(ge=0, le=9)] = 0.0


class Empty(Message, tag="empty"):
    pass


PARCELS: Codec[Parcel | Empty] = Codec(
    Parcel | Empty, max_header_bytes=10_000, max_tensor_bytes=100_000
)


def same(a: object, b: object) -> bool:
    """Compare bit for bit, NaN included."""
    if isinstance(a, Tensor):
        if not isinstance(b, Tensor) or (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        return a.numel() == 0 or torch.equal(*(x.flatten().view(torch.uint8) for x in (a, b)))
    if isinstance(a, Message):
        return same_message(a, b)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return a == b


def same_message(a: Message, b: object) -> bool:
    names = a.__struct_fields__
    return type(a) is type(b) and all(same(getattr(a, n), getattr(b, n)) for n in names)


# -- what survives ----------------------------------------------------------------------------


@st.composite
def tensors(draw, dtypes=ALL_DTYPES, shapes=None) -> Tensor:
    """Draw any bits in any dtype, NaN and infinities included."""
    dtype = draw(st.sampled_from(dtypes))
    shape = draw(shapes if shapes is not None else st.lists(st.integers(0, 4), max_size=3))
    size = math.prod(shape)
    if dtype == torch.bool:
        return torch.tensor(draw(st.lists(st.booleans(), min_size=size, max_size=size))).view(shape)
    data = draw(st.binary(min_size=size * dtype.itemsize, max_size=size * dtype.itemsize))
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)


def rows(num_rows: int, width: int = 4) -> st.SearchStrategy[Tensor]:
    ids = st.just(torch.arange(num_rows))
    floats = (torch.float32, torch.bfloat16, torch.float16)
    return ids | tensors(floats, st.just([num_rows, width]))


@st.composite
def keeps(draw) -> KeepRows:
    found = sorted(draw(st.sets(st.integers(0, 70_000), max_size=5)))
    return KeepRows(tuple(found), draw(st.integers(0, len(found))))


@st.composite
def steps(draw) -> Step:
    num_rows, before = draw(st.integers(1, 5)), draw(st.integers(0, 9))
    visible = draw(tensors((torch.bool,), st.just([num_rows, num_rows + before])))
    payload = draw(rows(num_rows))
    segment = Segment(positions=torch.arange(num_rows) + 70_000, visible=visible)
    if payload.ndim == 1:
        segment.ids = payload
    else:
        segment.hidden = payload
    found = draw(st.lists(keeps(), max_size=3))
    step = Step.of(found, segment, is_cancelled=draw(st.booleans()))
    assert step.keeps == found and same(vars(step.segment), vars(segment))
    return msgspec.structs.replace(step, rows=None) if draw(st.booleans()) else step


prefills = st.builds(
    Prefill,
    rows=st.integers(1, 3).flatmap(rows),
    first_position=st.integers(0, 2**31 - 1),
    is_last=st.booleans(),
    taps=st.lists(st.integers(0, 200), max_size=3).map(tuple),
    temperature=st.floats(0, 10),
    filters=st.builds(TokenFilters, top_k=st.integers(0, 9), top_p=st.floats(0.1, 1)),
    rule=st.sampled_from(RULE_NAMES),
    seed=st.integers(-(2**63), 2**63 - 1),
    prompt=st.integers(0, 2**31 - 1),
)
hidden = tensors((torch.float32, torch.bfloat16), st.just([2, 3]))
results = st.builds(
    StageResult,
    taps=st.dictionaries(st.integers(0, 99), hidden, max_size=3),
    verdicts=st.none() | tensors((torch.int64,), st.just([3])) | hidden,
)
ends = st.builds(Failed, reason=st.text(max_size=50), slot=st.integers(0, 9)) | st.builds(Leave)
together = st.builds(Together, parts=st.lists(prefills | steps() | results | ends, max_size=4))
controls = st.one_of(
    st.builds(Cancel),
    st.builds(MeasureRequest, action=st.sampled_from(["report", "clear"])),
    st.builds(StageReport, json=st.text(max_size=50)),
    st.builds(CloseRanks),
    st.builds(Beat),
    st.builds(Cause, line=st.text(max_size=50)),
    st.builds(
        Job,
        target=st.text(max_size=50),
        revision=st.none() | st.text(max_size=50),
        boundaries=st.lists(st.integers(0, 99), max_size=5).map(tuple),
        dtype=st.sampled_from(sorted(DTYPES)),
        traces=st.booleans(),
    ),
)


@settings(max_examples=150, deadline=None)
@given(
    message=st.one_of(prefills, steps(), results, ends, together, controls),
    sequence=st.integers(0, 2**62 - 1),
    is_apart=st.booleans(),
    more=st.binary(max_size=20),
)
def test_every_message_of_the_stages_survives(message: AnyMessage, sequence, is_apart, more):
    """Messages survive with separate tensors too; a buffer longer than the frame is cut first."""
    message.sequence = sequence
    frame = CODEC.encode(message, torch.device("cpu") if is_apart else None)
    data = frame.data
    assert CODEC.frame_bytes(data) == len(data)
    waiting = [tensor.clone() for tensor in frame.apart]

    def fetch(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = waiting.pop(0)
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
        return tensor

    buffer = bytearray(data + more)
    assert CODEC.frame_bytes(buffer) == len(data)
    back = CODEC.decode(memoryview(buffer)[: len(data)], fetch)
    buffer[:] = bytes(len(buffer))  # the message owns its tensors
    assert same_message(back, message) and not waiting and (is_apart or not frame.apart)


@settings(max_examples=150, deadline=None)
@given(found=st.dictionaries(st.text(max_size=5), tensors(), max_size=8), number=st.floats(0, 9))
def test_tensors_of_every_dtype_survive(found, number):
    parcel = Parcel(tensors=found, number=number)
    assert same_message(PARCELS.decode(PARCELS.to_bytes(parcel)), parcel)


@contextmanager
def at_most(num_bytes: int) -> Iterator[None]:
    """Assert a memory bound for the code inside."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < num_bytes


# -- what is refused --------------------------------------------------------------------------


def header_of(*heads: tuple[object, object, object], message: bytes | None = None) -> bytes:
    body = message if message is not None else msgspec.msgpack.encode(("parcel", {}, 0.0))
    return msgspec.msgpack.encode([list(heads), msgspec.Raw(body)])


def frame_of(header: bytes, tensor_bytes: int = 0, content: bytes = b"") -> bytes:
    padding = bytes(-len(header) % 8 if tensor_bytes else 0)
    return PREFIX.pack(MAGIC, len(header), tensor_bytes) + header + padding + content


def named(*places: object) -> bytes:
    return msgspec.msgpack.encode(("parcel", {str(i): p for i, p in enumerate(places)}, 0.0))


MAP_OF_4_BILLION = b"\x93\xa6parcel" + b"\xdf\xff\xff\xff\xff"
LIES = {
    "no magic": (b"GET / HTTP/1.1\r\n\r\n", "frame: starts with 0x20544547"),
    "short": (b"\x31FD", "frame: 3 bytes, where 16 are claimed"),
    "long header": (PREFIX.pack(MAGIC, 10_001, 0), "claims 10001 bytes of header"),
    "long tensors": (PREFIX.pack(MAGIC, 8, 1 << 60), "claims 8 bytes of header and 1152921504606"),
    "cut header": (frame_of(header_of())[:-9], "are claimed"),
    "cut tensors": (
        frame_of(header_of(("uint8", [90_000], False)), 90_000, bytes(9)),
        "are claimed",
    ),
    "shape beyond its bytes": (
        frame_of(header_of(("float32", [1 << 30], False)), 8, bytes(8)),
        "claims 8 bytes of tensors, describes 4294967296",
    ),
    "shape short of its bytes": (
        frame_of(header_of(("uint8", [1], False)), 64, bytes(64)),
        "claims 64 bytes of tensors, describes 8",
    ),
    "apart where nothing comes": (frame_of(header_of(("uint8", [0], True))), "1 of its tensors"),
    "negative size": (frame_of(header_of(("uint8", [-1], False))), "`int` >= 0"),
    "size of 1 << 31": (frame_of(header_of(("uint8", [1 << 31, 0], False))), "`int` <= 2147483647"),
    "NaN size": (frame_of(header_of(("uint8", [math.nan], False))), "Expected `int`"),
    "four axes": (frame_of(header_of(("uint8", [1] * 4, False))), "length <= 3"),
    "unknown dtype": (frame_of(header_of(("complex64", [1], False))), "Invalid enum value"),
    "pickled dtype": (frame_of(header_of((b"\x80\x04.", [1], False))), "Expected `str`"),
    "field too many": (frame_of(header_of(("uint8", [1], False, 1))), "at most length 3|length 4"),
    "unknown message": (frame_of(header_of(message=b"\x91\xa3foo")), "Invalid value 'foo'"),
    "no message": (frame_of(header_of(message=b"\x01")), "Expected `array`, got `int`"),
    "field of a message too many": (
        frame_of(header_of(message=msgspec.msgpack.encode(("empty", 1)))),
        "length",
    ),
    "number out of range": (
        frame_of(header_of(message=msgspec.msgpack.encode(("parcel", {}, 9.5)))),
        "`float` <= 9.0",
    ),
    "infinity": (
        frame_of(header_of(message=msgspec.msgpack.encode(("parcel", {}, math.inf)))),
        "`float` <= 9.0",
    ),
    "a tensor that is not there": (frame_of(header_of(message=named(0))), "0 is not the place"),
    "a tensor twice": (
        frame_of(header_of(("uint8", [0], False), message=named(0, 0))),
        "0 is not the place",
    ),
    "a tensor that is text": (
        frame_of(header_of(("uint8", [0], False), message=named("x" * 5000))),
        "'x+.*is not the place|not one of",
    ),
    "True as a place": (
        frame_of(header_of(*[("uint8", [0], False)] * 2, message=named(0, True))),
        "True is not the place",
    ),
    "a tensor too many": (
        frame_of(header_of(("uint8", [0], False), message=named())),
        "more tensors than its message",
    ),
    "a map of 4 billion": (frame_of(header_of(message=MAP_OF_4_BILLION)), "not one of this"),
    "9,000 brackets": (frame_of(header_of(message=b"\x91" * 9000)), "not one of this protocol"),
    "brackets for a tensor": (
        frame_of(header_of(message=b"\x93\xa6parcel\x81\xa1a" + b"\x91" * 9000)),
        "not one of this protocol",
    ),
    "bytes that are no text": (frame_of(header_of(message=b"\x91\xa2\xff\xfe")), "not one of"),
    "two messages": (frame_of(header_of() + header_of()), "trailing"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_frame_that_lies_is_refused_in_one_line_without_memory(lie):
    data, reason = LIES[lie]
    with at_most(SMALL_BYTES), pytest.raises(ValueError, match=reason) as caught:
        PARCELS.decode(data)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_tensor_apart_is_not_fetched_beyond_the_limit():
    data = frame_of(header_of(("float32", [1 << 30], True)))
    with pytest.raises(ValueError, match="4294967296 of tensors; this side takes 10000 and 100000"):
        PARCELS.decode(data, lambda shape, dtype: pytest.fail("fetched"))


def test_what_is_too_large_is_not_sent():
    with pytest.raises(ValueError, match="this side takes 10000 and 100000"):
        PARCELS.encode(Parcel(tensors={"a": torch.zeros(30_000)}))
    with pytest.raises(RuntimeError, match="allocate"):
        PARCELS.encode(Parcel(tensors={"a": torch.zeros(1).expand(1 << 46)}))


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (["step", [[[2, 1], 0]], 0, 1, 2, False, 0], "kept: 0 of 2 rows, or not ascending"),
        (["step", [[[1], 2]], 0, 1, 2, False, 0], "kept: 2 of 1 rows"),
        (["step", [], 0, 2, 1, False, 0], "visible: "),
        (["step", [], 1, 0, 2, False, 0], "place"),
    ],
)
def test_a_step_whose_parts_do_not_agree_is_refused(message, reason):
    shapes = {"positions": ("int64", [2]), "visible": ("bool", [2, 3]), "rows": ("int64", [2])}
    heads = [TensorHeader(dtype, tuple(shape), False) for dtype, shape in shapes.values()]
    if reason.startswith("visible"):
        heads[1] = TensorHeader("bool", (2, 1), False)
        message[3], message[4] = 1, 2
    body = msgspec.msgpack.encode(message)
    header = msgspec.msgpack.encode(Header(heads, msgspec.Raw(body)))
    sizes = [-(-head.num_bytes // 8) * 8 for head in heads]
    with pytest.raises(ValueError, match=reason):
        CODEC.decode(frame_of(header, sum(sizes), bytes(sum(sizes))))


def test_rules_between_fields_are_checked():
    segment = Segment(torch.arange(2), torch.ones(2, 3, dtype=torch.bool), ids=torch.arange(3))
    with pytest.raises(ValueError, match="rows: 3 of them, 2 positions"):
        Step.of([], segment)
    with pytest.raises(ValueError, match=r"verdicts: \[1, 2, 3\]; want one or two axes"):
        StageResult(verdicts=torch.zeros(1, 2, 3))
    with pytest.raises(ValueError, match=r"taps 3: torch.int64 \[2\]; want float32 or bfloat16"):
        StageResult(taps={3: torch.arange(2)})
    with pytest.raises(ValueError, match="x: torch.float32 .3.; want int64 of shape .4."):
        check_tensor("x", torch.zeros(3), (torch.int64,), 4)


def test_the_prefix_is_sixteen_bytes():
    """Peers with other versions find the magic and the sizes in the same place."""
    assert PREFIX.size == 16 and struct.pack("<I", MAGIC)[0] != 0
