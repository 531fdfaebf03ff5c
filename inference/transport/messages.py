"""What a controller and the stages of a target say to each other."""

# l rows of a segment, S mask columns, H hidden, R returned rows, V vocabulary

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Literal, Self, TypeAlias

import torch
from msgspec import Meta
from torch import Tensor

from pipedraft.inference.config import RuleName
from pipedraft.inference.transport.codec import Codec, Count, Message, check_tensor
from pipedraft.models.target import Keep, Segment

MAX_HEADER_BYTES = 1 << 25
"""A report with its trace is the longest."""
MAX_TENSOR_BYTES = 1 << 30
MAX_ROWS = 1 << 16
IDS = (torch.int64,)
HIDDEN = (torch.float32, torch.bfloat16, torch.float16)

Layer = Annotated[int, Meta(ge=0, le=10_000)]
Layers = Annotated[tuple[Layer, ...], Meta(max_length=1000)]
Rows = Annotated[tuple[Count, ...], Meta(max_length=MAX_ROWS)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class StageMessage(Message, kw_only=True):
    sequence: Annotated[int, Meta(ge=0, lt=2**62)] = 0
    """Number in the order of the controller's sending; an answer has that of its question."""


class Prefill(StageMessage, tag="prefill"):
    """Rows of a prompt, and how the tokens after it are to be drawn."""

    rows: Tensor
    """int64 [l] tokens for the first stage, [l, H] for the others."""
    first_position: Count
    """0: a new sequence, everything before it is forgotten."""
    is_last: bool
    taps: Layers
    temperature: Annotated[float, Meta(ge=0, le=1e6)]
    rule: RuleName
    seed: Int64
    prompt: Count

    def __post_init__(self) -> None:
        check_rows("rows", self.rows, 1 if self.rows.dtype == torch.int64 else 2)


class Step(StageMessage, tag="step"):
    """Keeps in the order of their making, then a segment."""

    kept: Annotated[tuple[tuple[Rows, Count], ...], Meta(max_length=MAX_ROWS)]
    """Of each Keep, the rows and how many of them are committed."""
    positions: Tensor
    """int64 [l]."""
    visible: Tensor
    """bool [l, S]."""
    rows: Tensor | None
    """int64 [l] tokens for the first stage, [l, H] for the others, None when cancelled."""
    is_cancelled: bool = False
    """No row of it is wanted any more: caches make room, nothing is computed."""

    @classmethod
    def of(cls, keeps: Sequence[Keep], segment: Segment, *, is_cancelled: bool = False) -> Self:
        return cls(
            kept=tuple((keep.rows, keep.num_committed) for keep in keeps),
            positions=segment.positions,
            visible=segment.visible,
            rows=segment.hidden if segment.ids is None else segment.ids,
            is_cancelled=is_cancelled,
        )

    def __post_init__(self) -> None:
        for rows, num_committed in self.kept:
            if num_committed > len(rows) or any(i >= j for i, j in pairwise(rows)):
                raise ValueError(f"kept: {num_committed} of {len(rows)} rows, or not ascending")
        num_rows = check_rows("positions", self.positions, 1)
        check_tensor("visible", self.visible, (torch.bool,), num_rows, None)
        if self.visible.shape[1] < num_rows:
            raise ValueError(f"visible: {self.visible.shape[1]} columns for {num_rows} rows")
        if self.rows is not None:
            axes = 1 if self.rows.dtype == torch.int64 else 2
            if check_rows("rows", self.rows, axes) != num_rows:
                raise ValueError(f"rows: {len(self.rows)} of them, {num_rows} positions")

    @property
    def keeps(self) -> list[Keep]:
        return [Keep(rows=rows, num_committed=count) for rows, count in self.kept]

    @property
    def segment(self) -> Segment:
        has_ids = self.rows is not None and self.rows.dtype == torch.int64
        return Segment(
            positions=self.positions,
            visible=self.visible,
            ids=self.rows if has_ids else None,
            hidden=None if has_ids else self.rows,
        )


class Result(StageMessage, tag="result"):
    """A stage's answer: hidden states that the draft reads; verdicts if it is the last stage."""

    taps: Annotated[dict[Layer, Tensor], Meta(max_length=1000)] = {}
    """Layer index -> [l, H]."""
    verdicts: Tensor | None = None
    """[R], or [R, V]."""

    def __post_init__(self) -> None:
        for layer, hidden_lH in self.taps.items():
            check_tensor(f"taps {layer}", hidden_lH, HIDDEN, None, None)
        if self.verdicts is not None and self.verdicts.ndim not in (1, 2):
            raise ValueError(f"verdicts: {list(self.verdicts.shape)}; want one or two axes")


class Cancel(StageMessage, tag="cancel"):
    """Segments up to this number need not be computed."""


class Measure(StageMessage, tag="measure"):
    """A question of the controller that travels down the stages."""

    action: Literal["report", "clear"]


class Report(StageMessage, tag="report"):
    """What a stage measured."""

    json: str


class Close(StageMessage, tag="close"):
    """The last message of a link."""


AnyMessage: TypeAlias = Prefill | Step | Result | Cancel | Measure | Report | Close
CODEC: Codec[AnyMessage] = Codec(
    AnyMessage, max_header_bytes=MAX_HEADER_BYTES, max_tensor_bytes=MAX_TENSOR_BYTES
)


def check_rows(name: str, tensor: Tensor, axes: int) -> int:
    """Tokens [l] or hidden states [l, H]; returns l."""
    check_tensor(name, tensor, IDS if axes == 1 else HIDDEN, None, *([None] * (axes - 1)))
    if not 0 < len(tensor) <= MAX_ROWS:
        raise ValueError(f"{name}: {len(tensor)}; want 1 to {MAX_ROWS}")
    return len(tensor)
