"""Run a stage's layers, a draft, or the choice of tokens as a CUDA graph with fixed shapes.

A decoding step with a few rows launches hundreds of small kernels. On a GPU, launching them takes
longer than running them. The host packs all values varying between steps, and copies them into a
fixed buffer in one transfer. Rows already on the device are copied to another buffer.
Launches are captured once per key. On a CPU the same functions run without a graph.
"""

# P padded rows, H hidden, S columns, C cache rows

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

MAX_IDLE = 1
"""Maximum idle caches, with their graphs, retained by a network per key for later sequences."""
Borrowed = TypeVar("Borrowed")


class Transfers(Protocol):
    def is_sending(self) -> bool:
        """Return True while data waits for another process to receive it."""


UNDER_WAY: WeakSet[Transfers] = WeakSet()
"""Transfers in flight; while one is sending, no graph is captured. A capture waits for all work on
the device, transfers included, and meanwhile the process receives nothing. Two capturing ranks
would wait for each other."""


@dataclass
class CapturedGraph:
    packed: Tensor
    """int64: all values varying between steps, except rows on the device."""
    rows_PH: Tensor | None
    replay: Callable[[], None]
    out: Tensor
    """Output buffer; the next replay overwrites it."""


class Graphs:
    """CUDA graphs that compute from a packed tensor and rows, each captured once per key.

    A call is one copy to the device, one launch for the rows, and one graph.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._graphs: dict[Hashable, CapturedGraph] = {}
        self._pool: _POOL_HANDLE | None = None

    def clear(self) -> None:
        """Drop all graphs, because their buffers are gone."""
        self._graphs.clear()
        self._pool = None

    def run(
        self,
        key: Hashable,
        packed: Tensor,
        rows: Sequence[Tensor],
        compute: Callable[[Tensor, Tensor | None], Tensor],
        *,
        can_capture: bool = True,
    ) -> Tensor:
        """Return compute(packed, rows), run by the key's graph, which the first call captures.

        Args:
            key: everything the launches depend on. The sizes of ``packed`` and ``rows`` are
                added here.
            packed: int64 in host memory.
            rows: tensors [.., H]. ``compute`` gets one tensor [P, H], with spare rows in a graph.
            can_capture: False runs the launches one by one.

        Returns:
            A buffer overwritten by the next call with the same key.
        """
        num_rows = sum(map(len, rows))
        if self.device.type == "cuda":
            # Only copies from page-locked memory leave the host free to go on.
            packed = packed.pin_memory()
        if not can_capture:
            return compute(packed.to(self.device), torch.cat([*rows]) if rows else None)
        graph = self._graphs.get((key, len(packed), padded_rows(num_rows)))
        # Capturing would wait for a transfer whose receiver may be waiting in its own capture.
        if graph is None and any(transfers.is_sending() for transfers in UNDER_WAY):
            return compute(packed.to(self.device), self._buffer(rows))
        if graph is None:
            graph = self._make(packed, rows, compute)
            self._graphs[key, len(packed), padded_rows(num_rows)] = graph
        graph.packed.copy_(packed, non_blocking=True)
        self._fill(graph.rows_PH, rows)
        graph.replay()
        return graph.out

    @staticmethod
    def _fill(rows_PH: Tensor | None, rows: Sequence[Tensor]) -> None:
        if rows_PH is None:
            return
        filled_RH = rows_PH[: sum(map(len, rows))]
        if len(rows) == 1:
            filled_RH.copy_(rows[0])
        else:
            torch.cat([*rows], out=filled_RH)

    def _buffer(self, rows: Sequence[Tensor]) -> Tensor | None:
        """Return a tensor [P, H] that begins with the rows, or None without rows."""
        if not rows:
            return None
        shape = padded_rows(sum(map(len, rows))), rows[0].shape[1]
        rows_PH = torch.zeros(shape, dtype=rows[0].dtype, device=self.device)
        self._fill(rows_PH, rows)
        return rows_PH

    def _make(
        self,
        packed: Tensor,
        rows: Sequence[Tensor],
        compute: Callable[[Tensor, Tensor | None], Tensor],
    ) -> CapturedGraph:
        rows_PH = self._buffer(rows)
        buffer = packed.to(self.device, copy=True)  # a copy: the graph keeps reading this address
        # The first run creates missing buffers.
        made = CapturedGraph(buffer, rows_PH, lambda: None, compute(buffer, rows_PH))

        def again() -> None:
            made.out = compute(buffer, rows_PH)

        made.replay = again
        if self.device.type == "cuda":
            # One cache's graphs never run at once, so they may share memory between launches.
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            made.replay = _capture(again, self.device, self._pool)
        return made


@dataclass(frozen=True)
class TokenChoice:
    """How a CUDA graph chooses tokens, given their logits."""

    key: Hashable
    """All values that change the launches."""
    numbers: Tensor
    """Temperature and random numbers: float64 on the CPU, at most one more than rows."""
    choose: Callable[[Tensor, Tensor], Tensor]
    """(logits [R, V], numbers) -> tokens, on the device; must not refer to a sequence."""


def padded_rows(num_rows: int) -> int:
    """Round a row count up to a power of two, so few sizes need a graph."""
    return 1 << (num_rows - 1).bit_length() if num_rows else 0


class Packing:
    """Layout for several number lists, each with fixed room, in one int64 tensor."""

    def __init__(self, **sizes: int) -> None:
        self.sizes = sizes

    def pack(self, **values: Sequence[int] | Tensor) -> Tensor:
        """Return one tensor with all lists, zeros in unused room, and float64 bits as int64."""
        # Zeroed: shorter lists must not leave an earlier step's numbers in their room.
        packed = torch.zeros(sum(self.sizes.values()), dtype=torch.int64)
        for name, room in zip(self.sizes, packed.split([*self.sizes.values()]), strict=True):
            given = torch.as_tensor(values[name])
            given = given.view(torch.int64) if given.dtype == torch.float64 else given
            room[: given.numel()] = given.flatten()
        return packed

    def unpack(self, packed: Tensor) -> dict[str, Tensor]:
        parts = packed.split([*self.sizes.values()])
        return dict(zip(self.sizes, parts, strict=True))


def hidden_columns(num_visible_1: Tensor, visible_PS: Tensor, num_columns: int) -> Tensor:
    """Return bool [P, C], True where a buffer column is hidden from a row.

    Args:
        num_visible_1: number of columns at the buffer's start, visible to all rows.
        visible_PS: visibility of the next S columns. All later columns are hidden.
    """
    S = visible_PS.shape[1]
    column_C = torch.arange(num_columns, device=visible_PS.device) - num_visible_1
    # The clamp keeps the lookup legal; the lines below decide about columns outside.
    known_PC = visible_PS.index_select(1, column_C.clamp(0, S - 1)).bool()
    hidden_PC = torch.where(column_C < S, ~known_PC, True)
    return torch.where(column_C < 0, False, hidden_PC)


def borrow_for(
    owner: nn.Module, holder: object, key: Hashable, make: Callable[[], Borrowed]
) -> Borrowed:
    """Borrow the buffers and graphs left by an earlier holder of this key, or make new ones.

    When ``holder`` dies, ``owner`` gets the buffers and graphs back. So successive sequences share
    them, in any engine.

    Args:
        owner: network that stores idle buffers. After its weights move, new ones are made.
        make: creates buffers and graphs, and must not refer to ``holder``.
    """
    weight = next(owner.parameters())  # graphs read its address, so a moved weight needs new ones
    kept = vars(owner).setdefault("_idle_graphs", {})
    idle = kept.setdefault((key, weight.device, weight.dtype, weight.data_ptr()), [])
    borrowed = idle.pop() if idle else make()

    def give_back() -> None:
        if len(idle) < MAX_IDLE:
            idle.append(borrowed)

    weakref.finalize(holder, give_back).atexit = False  # at exit nobody borrows again
    return borrowed


def _capture(
    compute: Callable[[], None], device: torch.device, pool: "_POOL_HANDLE"
) -> Callable[[], None]:
    """Capture ``compute``'s launches, after warm-up runs in which libraries choose kernels."""
    with torch.cuda.device(device):
        side = torch.cuda.Stream()  # torch's rule: warm up on a side stream before capture
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                compute()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # thread_local: another thread may handle a link's transfers meanwhile.
        options = {"pool": pool, "capture_error_mode": "thread_local"}
        with torch.cuda.graph(graph, **options):  # type: ignore[arg-type]  # its own handle's type
            compute()
    return graph.replay
