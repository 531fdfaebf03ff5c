"""Messages to a pipeline stage (``Segment``, ``KeepRows``), and the stage's cache.

A stage mirrors the controller's sequence, which is the committed prefix and then the speculative
rows S[0:m). A segment is data. ``KeepRows(I, a)`` is the only control message. It commits, prunes,
rolls back and flushes, and its arithmetic is defined only here.

Shape suffixes: l segment rows, S mask columns, H hidden, C rows in use, N key/value heads, D head
size, W channels and K inputs in the short convolution, T rows per call, B rows per call with
different parents.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

MIN_CAPACITY = 128  # rows; buffers double from here, so n appends cost O(n) copied rows


@dataclass(frozen=True)
class KeepRows:
    """Message to retain rows I in the ordered token tree S and to commit the first a of them.

    A cache or segment with rows S[lo:hi) keeps its rows [i - lo for i in I if lo <= i < hi] and the
    mask columns [i for i in I[a:] if i < hi]. Committed rows are visible to all rows and need no
    column. Positions never change. S itself becomes S[I[a:]].
    """

    rows: tuple[int, ...]
    """I: indices into S as it was before this message, strictly ascending."""
    num_committed: int
    """a: length of the accepted path, whose rows precede the others as parents precede children."""

    def __post_init__(self) -> None:
        ascending = all(i < j for i, j in zip(self.rows, self.rows[1:], strict=False))
        assert ascending and all(i >= 0 for i in self.rows[:1]), f"rows {self.rows} must ascend"
        assert 0 <= self.num_committed <= len(self.rows), f"{self} commits rows it does not keep"

    def cached(self, num_cached: int) -> tuple[int, ...]:
        """Return the retained rows among S[0:num_cached)."""
        return tuple(i for i in self.rows if i < num_cached)

    def segment_rows(self, lo: int, hi: int) -> tuple[int, ...]:
        """Return the retained rows in the segment S[lo:hi), counted from its first row."""
        return tuple(i - lo for i in self.rows if lo <= i < hi)

    def columns(self, hi: int) -> tuple[int, ...]:
        """Return the retained columns for a mask over S[0:hi)."""
        return tuple(i for i in self.rows[self.num_committed :] if i < hi)

    def check_committed(self, num_cached: int) -> None:
        """Refuse to commit rows before they are in the cache.

        Schedules commit a row only after it has left the last stage, hence after every stage has
        cached it. A row still waiting here would lose its own mask column.
        """
        committed = self.rows[: self.num_committed]
        assert not committed or committed[-1] < num_cached, (
            f"KeepRows commits row {committed[-1]}, but this stage holds only {num_cached} "
            f"speculative rows; commit a row after it has left the last stage"
        )


@dataclass
class Segment:
    """Rows S[lo:hi) from the controller's ordered token tree, in flight through the stages."""

    positions: Tensor
    """int64 [l]: absolute positions (committed length + depth in the tree)."""
    visible: Tensor
    """bool [l, hi]: ancestors-or-self among the speculative rows. Committed rows are always
    visible and have no column."""
    ids: Tensor | None = None
    """int64 [l]: token ids; only before stage 0."""
    hidden: Tensor | None = None
    """[l, H]: the previous stage's output; only after stage 0."""
    taps: dict[int, Tensor] = field(default_factory=dict)
    """Layer index -> [l, H]: hidden states collected so far, for the draft."""

    @property
    def num_rows(self) -> int:
        return self.positions.shape[0]

    @property
    def lo(self) -> int:
        return self.hi - self.num_rows

    @property
    def hi(self) -> int:
        return self.visible.shape[1]

    @property
    def parents(self) -> list[int]:
        """Each row's parent as an index into S, or -1 for the committed prefix."""
        # Rows come after all their ancestors, so the last one before a row is its parent.
        before_lS = self.visible.tril(self.lo - 1)
        rows_S = torch.arange(1, self.hi + 1, device=before_lS.device)
        return ((before_lS * rows_S).amax(1) - 1).tolist()

    def after(self, hidden_lH: Tensor, collected: Mapping[int, Tensor]) -> "Segment":
        """Return the segment after a stage, with the stage's output and tapped states."""
        return replace(self, ids=None, hidden=hidden_lH, taps={**self.taps, **collected})


def prune_segment(segment: Segment, keep: KeepRows, num_cached: int) -> Segment | None:
    """Apply a KeepRows to a segment waiting at a stage's input.

    Args:
        num_cached: speculative rows ahead of the segment before pruning. The stage has cached them,
            or they wait in earlier segments.

    Returns:
        The surviving rows, or None when none survive.
    """
    assert num_cached == segment.lo, f"{num_cached} rows precede S[{segment.lo}:{segment.hi})"
    keep.check_committed(num_cached)
    kept = keep.segment_rows(segment.lo, segment.hi)
    if not kept:
        return None
    rows = torch.tensor(kept, device=segment.positions.device)
    columns = torch.tensor(keep.columns(segment.hi), device=segment.visible.device)
    return Segment(
        positions=segment.positions[rows],
        visible=segment.visible[rows.to(columns.device)][:, columns],
        ids=None if segment.ids is None else segment.ids[rows.to(segment.ids.device)],
        hidden=None if segment.hidden is None else segment.hidden[rows.to(segment.hidden.device)],
        taps={i: rows_lH[rows.to(rows_lH.device)] for i, rows_lH in segment.taps.items()},
    )


def additive_mask(
    visible_lS: Tensor,
    positions_C: Tensor,
    window: int | None,
    dtype: torch.dtype,
    groups: int = 1,
) -> Tensor:
    """Return an attention mask [1, 1, l, C], 0 for visible keys and the dtype's minimum elsewhere.

    The S columns in ``visible_lS`` are the last of the C rows. All earlier rows are visible. A
    sliding window also hides keys at positions <= own position - window (Mistral's rule).

    Even a single row with everything visible gets a mask. Without a mask, the kernel and the row
    count decide between "causal" and "everything". Only an additive float mask means the same to
    sdpa and eager, because eager *adds* a boolean mask.

    Args:
        groups: repeat the l rows this many times.
    """
    num_rows, num_columns = visible_lS.shape
    hidden_lC = torch.zeros(
        num_rows, positions_C.shape[0], dtype=torch.bool, device=positions_C.device
    )
    # Committed rows precede the mask's columns and are visible to every row.
    hidden_lC[:, positions_C.shape[0] - num_columns :] = ~visible_lS
    if window is not None:
        hidden_lC |= positions_C <= positions_C[-num_rows:, None] - window
    mask_lC = torch.zeros(hidden_lC.shape, dtype=dtype, device=positions_C.device)
    # The minimum, not -inf: softmax would turn a fully hidden row into NaN.
    mask_lC.masked_fill_(hidden_lC, torch.finfo(dtype).min)
    return (mask_lC if groups == 1 else mask_lC.repeat(groups, 1))[None, None]


class Abandoned(Exception):
    """Raised when a segment becomes useless before its last layer. The cache stays unchanged."""


@dataclass
class RowState:
    """Recurrent layers' state after a row and its ancestors, by layer and state index."""

    conv: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """[1, W, K]: the short convolution's last inputs."""
    recurrent: dict[tuple[int, int], Tensor] = field(default_factory=dict)


class StageCache:
    """Keys, values and recurrent states for one stage's layers and one sequence.

    Hugging Face layers receive it as ``past_key_values``. The attention and recurrent modules in
    transformers 5.23 call ``update``, ``is_recording_past`` and the four ``*_state`` methods.
    ``begin`` announces rows and fixes the places for the layers' writes, and ``advance`` counts the
    rows. If a forward fails in between, the cache stays unchanged.

    Recurrent layers cannot drop rows from their state. So the cache stores the state after every
    speculative row. Each row starts from its parent's state, and ``keep`` drops rows with their
    states.
    """

    def __init__(self, recurrent_layers: Collection[int]):
        self.num_committed = 0
        self.num_speculative = 0
        self.recurrent_layers = frozenset(recurrent_layers)
        self.capacity = 0
        """Row capacity; the buffers double when it is exceeded."""
        self.spare_rows = 0
        """Further rows in the buffers, for padding in calls with fixed shapes."""
        self._slots: Tensor | None = None
        self._num_new = 0
        self._positions_C = torch.empty(0, dtype=torch.long)
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        # State tensors are never written again once a row has them, so rows share them freely.
        self._states = [RowState()]
        """States after the committed rows, then after each speculative row."""
        self._new_states: list[RowState] = []
        self._parents: Sequence[int] | None = None
        self._before: list[RowState] = []
        self._after: list[RowState] = []

    @property
    def num_rows(self) -> int:
        return self.num_committed + self.num_speculative

    @property
    def num_bytes(self) -> int:
        """Bytes in all buffers, counting a recurrent state shared by several rows once."""
        tensors = [*self._keys.values(), *self._values.values()]
        for state in self._states:
            tensors += [*state.conv.values(), *state.recurrent.values()]
        return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values())

    def rows_by_layer(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the keys, then the values, of all rows in layer order."""
        for layer in sorted(self._keys):
            for buffers in (self._keys, self._values):
                yield layer, buffers[layer][:, :, : self.num_rows]

    def reset(self) -> None:
        """Forget every row, but keep the buffers allocated."""
        self.num_committed = self.num_speculative = 0
        self._states = [RowState()]

    def begin(self, positions_l: Tensor, parents: Sequence[int] | None = None) -> Tensor:
        """Make room for rows at these positions, and return all rows' positions.

        Args:
            parents: as ``Segment.parents``, for recurrent layers. If None, each row continues the
                row before it, and only the state after the last row is stored.
        """
        end = self.reserve(positions_l.shape[0], positions_l.device)
        self._positions_C[self.num_rows : end] = positions_l
        self._parents = parents
        self._new_states = [RowState() for _ in parents or [-1]]
        return self._positions_C[:end]

    def recurrent_calls(self) -> Iterator[list[int] | None]:
        """Yield the new rows for a recurrent layer in batches, parents before children.

        Yields:
            Rows for one batch, with known parent states, or None for all rows, one after the other.
            Until the next batch, the ``*_state`` methods refer to these rows.
        """
        known = [*self._states, *self._new_states]
        if self._parents is None:
            self._before, self._after = self._states[-1:], self._new_states
            yield None
            return
        waiting = list(range(len(self._parents)))
        while waiting:
            unknown = {self.num_speculative + row for row in waiting}
            rows = [row for row in waiting if self._parents[row] not in unknown]
            self._before = [known[self._parents[row] + 1] for row in rows]
            self._after = [self._new_states[row] for row in rows]
            yield rows
            waiting = [row for row in waiting if row not in rows]

    def reserve(self, num_rows: int, device: torch.device) -> int:
        """Make room for rows, and return the cache's row count after adding them."""
        self._num_new = num_rows
        end = self.num_rows + num_rows
        if end > self.capacity:
            self._grow(max(end, 2 * self.capacity, MIN_CAPACITY), device)
        return end

    def write_positions(self, slots_P: Tensor, positions_P: Tensor) -> Tensor:
        """Write positions in a CUDA graph, as ``begin`` does, and return the whole buffer."""
        return self._positions_C.index_copy_(0, slots_P, positions_P)

    def advance(self, *, committed: bool) -> None:
        """Count the rows written by the layers since ``begin``."""
        if committed:
            assert self.num_speculative == 0, "committed rows must precede all speculative rows"
            self.num_committed += self._num_new
            self._states = self._new_states  # only the last state: nothing can be dropped before it
            return
        self.num_speculative += self._num_new
        if self.recurrent_layers:
            self._states += self._new_states

    def skip(self, positions_l: Tensor) -> None:
        """Count speculative rows without computing them. Write zeros there, as 0 * NaN is NaN."""
        end = self.begin(positions_l).shape[0]
        for buffer_1NCD in (*self._keys.values(), *self._values.values()):
            buffer_1NCD[:, :, self.num_rows : end] = 0
        self._new_states = self._states[-1:] * self._num_new
        self.advance(committed=False)

    def keep(self, keep: KeepRows, move: Callable[[list[int], int], None] | None = None) -> None:
        """Gather the retained rows in place, without copying a prefix that does not move.

        Args:
            move: replacement for this class's ``move``.
        """
        keep.check_committed(self.num_speculative)
        rows = keep.cached(self.num_speculative)
        # Rows ascend, so every row before the first gap is in place already.
        first_moved = next((j for j, i in enumerate(rows) if i != j), len(rows))
        if first_moved < len(rows):
            source = [self.num_committed + row for row in rows[first_moved:]]
            (move or self.move)(source, self.num_committed + first_moved)
        if self.recurrent_layers:
            # Entry 0 is the committed state; the last committed row's state takes its place.
            self._states = [self._states[row + 1] for row in (-1, *rows)][keep.num_committed :]
        self.num_committed += keep.num_committed
        self.num_speculative = len(rows) - keep.num_committed

    def move(self, rows: list[int], first: int) -> None:
        """Copy rows to adjacent places, from ``first`` on."""
        source = torch.tensor(rows, device=self._positions_C.device)
        self.copy_rows(source, torch.arange(first, first + len(rows), device=source.device))

    def copy_rows(self, source_R: Tensor, to_R: Tensor) -> None:
        self._positions_C.index_copy_(0, to_R, self._positions_C.index_select(0, source_R))
        for buffer_1NCD in (*self._keys.values(), *self._values.values()):
            buffer_1NCD.index_copy_(2, to_R, buffer_1NCD.index_select(2, source_R))

    def _grow(self, capacity: int, device: torch.device) -> None:
        used = self.num_rows
        positions_C = torch.zeros(capacity + self.spare_rows, dtype=torch.long, device=device)
        positions_C[:used] = self._positions_C[:used]
        self._positions_C = positions_C
        for buffers in (self._keys, self._values):
            for layer_idx, small_1NCD in buffers.items():
                _, num_heads, _, head_size = small_1NCD.shape
                rows = capacity + self.spare_rows
                large_1NCD = small_1NCD.new_zeros(1, num_heads, rows, head_size)
                large_1NCD[:, :, :used] = small_1NCD[:, :, :used]
                buffers[layer_idx] = large_1NCD
        self.capacity = capacity

    @contextmanager
    def writing_to(self, slots_P: Tensor) -> Iterator[None]:
        """Context in which ``update`` writes to these places and returns the whole buffers."""
        self._slots = slots_P
        try:
            yield
        finally:
            self._slots = None

    # Called by the attention modules.

    def update(
        self, keys_1NlD: Tensor, values_1NlD: Tensor, layer_idx: int
    ) -> tuple[Tensor, Tensor]:
        """Append the rows announced by ``begin`` and return all the layer's rows.

        Inside ``writing_to``, write to its slots and return the whole buffers.
        """
        if layer_idx not in self._keys:
            for buffers, rows in ((self._keys, keys_1NlD), (self._values, values_1NlD)):
                _, num_heads, _, head_size = rows.shape
                num_rows = self.capacity + self.spare_rows
                # Zeros: unwritten rows are masked, but 0 * NaN would still spread.
                buffers[layer_idx] = rows.new_zeros(1, num_heads, num_rows, head_size)
        keys_1NCD, values_1NCD = self._keys[layer_idx], self._values[layer_idx]
        if self._slots is not None:
            keys_1NCD.index_copy_(2, self._slots, keys_1NlD)
            values_1NCD.index_copy_(2, self._slots, values_1NlD)
            return keys_1NCD, values_1NCD
        start, end = self.num_rows, self.num_rows + self._num_new
        keys_1NCD[:, :, start:end] = keys_1NlD
        values_1NCD[:, :, start:end] = values_1NlD
        return keys_1NCD[:, :, :end], values_1NCD[:, :, :end]

    # Called by recurrent modules. Some change the state that they were given in place, others
    # return the next one through ``update_*``. So a state handed out is a copy, and it is at once
    # the state after the rows.

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False, so that the modules keep a convolution state with a fixed size."""
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return a copy [B, W, K]. The one-row kernel overwrites it with the next state."""
        return self._hand_out("conv", (layer_idx, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return a copy. Mamba's one-row form overwrites it with the next state."""
        return self._hand_out("recurrent", (layer_idx, state_idx))

    def update_conv_state(
        self,
        inputs_BWT: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        *,
        conv_kernel_size: int | None = None,
    ) -> Tensor:
        """Return old state and inputs joined, and store their last ``conv_kernel_size`` entries."""
        before_BWK = self.get_conv_state(layer_idx, state_idx)
        size = conv_kernel_size
        if size is None:  # as many as in the first call
            size = (inputs_BWT if before_BWK is None else before_BWK).shape[-1]
        if before_BWK is not None:
            inputs_BWT = torch.cat([before_BWK, inputs_BWT], dim=-1)
        else:
            padding = max(size - inputs_BWT.shape[-1], 0)
            inputs_BWT = torch.nn.functional.pad(inputs_BWT, (padding, 0))
        self._remember("conv", (layer_idx, state_idx), inputs_BWT[..., -size:].clone())
        return inputs_BWT

    def update_recurrent_state(self, state: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        self._remember("recurrent", (layer_idx, state_idx), state)
        return state

    def _hand_out(self, name: str, place: tuple[int, int]) -> Tensor | None:
        known = [getattr(state, name) for state in self._before]
        if any(place not in states for states in known):
            return None
        copy = torch.cat([states[place] for states in known])
        self._remember(name, place, copy)
        return copy

    def _remember(self, name: str, place: tuple[int, int], states: Tensor) -> None:
        for after, state in zip(self._after, states.split(1), strict=True):
            getattr(after, name)[place] = state
