"""Launches of fixed shapes, recorded as CUDA graphs: of a stage's layers, and of a draft.

A decoding step of a few rows launches hundreds of small kernels; on a GPU that takes longer than
their work. Everything that changes from step to step is packed on the host and copied into a fixed
buffer at once, rows on the device into another, and the launches are recorded once for each key.
On a CPU the same functions run without being recorded.
"""

# P padded rows, H hidden, S columns, C rows of a cache

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
"""Caches with their graphs that wait for the next text, for each network."""
Lent = TypeVar("Lent")


class Transfers(Protocol):
    def is_sending(self) -> bool:
        """Something waits until another process takes it."""


UNDER_WAY: WeakSet[Transfers] = WeakSet()
"""Recording waits for the whole device, so for these; a process that records, too, cannot take
what another one waits to be rid of."""


@dataclass
class Recorded:
    packed: Tensor
    """int64: all that changes from step to step, but rows that are on the device."""
    rows_PH: Tensor | None
    replay: Callable[[], None]
    out: Tensor
    """The next replay writes over it."""


class Recordings:
    """Functions of a packed tensor and of rows, each recorded once for its key.

    A call is one copy to the device, one launch for the rows, and one graph.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._recorded: dict[Hashable, Recorded] = {}
        self._pool: _POOL_HANDLE | None = None

    def clear(self) -> None:
        """Forget all graphs: the buffers that they read and write are gone."""
        self._recorded.clear()
        self._pool = None

    def run(
        self,
        key: Hashable,
        packed: Tensor,
        rows: Sequence[Tensor],
        compute: Callable[[Tensor, Tensor | None], Tensor],
        *,
        can_record: bool = True,
    ) -> Tensor:
        """compute(packed, rows), recorded unless it was under this key.

        Args:
            key: with the numbers of entries and of rows, which are added to it, all that the
                launches depend on.
            packed: int64, in the host's memory.
            rows: [.., H] each; ``compute`` sees them as one [P, H] with spare rows.
            can_record: else the launches are made one by one.

        Returns:
            A buffer that the next call of the same key writes over.
        """
        num_rows = sum(map(len, rows))
        if self.device.type == "cuda":
            packed = packed.pin_memory()
        if not can_record:
            return compute(packed.to(self.device), torch.cat([*rows]) if rows else None)
        recorded = self._recorded.get((key, len(packed), padded_rows(num_rows)))
        if recorded is None and any(transfers.is_sending() for transfers in UNDER_WAY):
            return compute(packed.to(self.device), self._buffer(rows))
        if recorded is None:
            recorded = self._record(packed, rows, compute)
            self._recorded[key, len(packed), padded_rows(num_rows)] = recorded
        recorded.packed.copy_(packed, non_blocking=True)
        self._fill(recorded.rows_PH, rows)
        recorded.replay()
        return recorded.out

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
        """[P, H], with the rows in front."""
        if not rows:
            return None
        shape = padded_rows(sum(map(len, rows))), rows[0].shape[1]
        rows_PH = torch.zeros(shape, dtype=rows[0].dtype, device=self.device)
        self._fill(rows_PH, rows)
        return rows_PH

    def _record(
        self,
        packed: Tensor,
        rows: Sequence[Tensor],
        compute: Callable[[Tensor, Tensor | None], Tensor],
    ) -> Recorded:
        rows_PH = self._buffer(rows)
        buffer = packed.to(self.device, copy=True)
        # The first run makes buffers that are not there yet.
        recorded = Recorded(buffer, rows_PH, lambda: None, compute(buffer, rows_PH))

        def again() -> None:
            recorded.out = compute(buffer, rows_PH)

        recorded.replay = again
        if self.device.type == "cuda":
            # Graphs of one cache never run at once, so they may share the memory between launches.
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            recorded.replay = _capture(again, self.device, self._pool)
        return recorded


def padded_rows(num_rows: int) -> int:
    """The next power of two: a graph for each of few sizes."""
    return 1 << (num_rows - 1).bit_length() if num_rows else 0


class Packing:
    """Lists of numbers in one int64 tensor, each with room for a fixed count."""

    def __init__(self, **sizes: int) -> None:
        self.sizes = sizes

    def pack(self, **values: Sequence[int] | Tensor) -> Tensor:
        """Lists may be shorter than their room; floats are float64 tensors, packed bit by bit."""
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
    """What rows may not see of a whole buffer, bool [P, C].

    Args:
        num_visible_1: the first rows of the buffer, which all may see.
        visible_PS: of the S rows behind them; those behind these are hidden.
    """
    S = visible_PS.shape[1]
    column_C = torch.arange(num_columns, device=visible_PS.device) - num_visible_1
    known_PC = visible_PS.index_select(1, column_C.clamp(0, S - 1)).bool()
    hidden_PC = torch.where(column_C < S, ~known_PC, True)
    return torch.where(column_C < 0, False, hidden_PC)


def lend(owner: nn.Module, holder: object, key: Hashable, make: Callable[[], Lent]) -> Lent:
    """Lend what an earlier holder of a key left behind, or a new one, until ``holder`` dies.

    So texts that follow each other, of one engine or of several, share buffers and graphs.

    Args:
        owner: keeps what is idle; a network whose weights have moved has nothing.
        make: the result must not refer to ``holder``.
    """
    weight = next(owner.parameters())
    kept = vars(owner).setdefault("_idle_recordings", {})
    idle = kept.setdefault((key, weight.device, weight.dtype, weight.data_ptr()), [])
    lent = idle.pop() if idle else make()

    def give_back() -> None:
        if len(idle) < MAX_IDLE:
            idle.append(lent)

    weakref.finalize(holder, give_back).atexit = False
    return lent


def _capture(
    compute: Callable[[], None], device: torch.device, pool: "_POOL_HANDLE"
) -> Callable[[], None]:
    """Record what ``compute`` launches; libraries choose their kernels in runs before."""
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                compute()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # thread_local: another thread may look after a link's transfers meanwhile.
        options = {"pool": pool, "capture_error_mode": "thread_local"}
        with torch.cuda.graph(graph, **options):  # type: ignore[arg-type]  # its own handle's type
            compute()
    return graph.replay
