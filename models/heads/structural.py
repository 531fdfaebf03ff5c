"""Structural attention, in which queries see each past position in one of its n + 1 versions.

B batch, S query sequences, N query heads, J key heads, T positions, D head size, R key blocks,
W diagonals in the band (tokens ahead of the query still in flight)

A token in flight has a hidden state at every depth it has passed. A finished token has the deepest
one. The key a query at position t uses for position T' thus depends only on t - T'. The nearest W
positions appear at increasing depth (a band with W diagonals, one key each). All earlier positions
appear at depth n, which is ordinary causal attention over one block.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from torch import Tensor

from .banded_attention import EVERY, Band, Place, banded_attention


@dataclass(frozen=True)
class Fill:
    """Tokens in flight for each example, along the first axis, or along T in a packed row."""

    occupancy: Sequence[int]
    lengths: Sequence[int] | None
    max_in_flight: int

    @property
    def axis(self) -> int:
        return 0 if self.lengths is None else 1

    def count(self, depth: int) -> int:
        """Return entries along the axis up to the last example with rows at this depth."""
        count = len(self.occupancy)
        if 0 < depth < self.max_in_flight:  # depths 0 and n have rows of every example
            count = max((b + 1 for b, a in enumerate(self.occupancy) if a > depth), default=0)
        return count if self.lengths is None else sum(self.lengths[:count])

    def first(self, taps: Mapping[int, Tensor], count: int) -> dict[int, Tensor]:
        return {index: x_BTH.narrow(self.axis, 0, count) for index, x_BTH in taps.items()}


def structural_attention(
    query_SNTD: Tensor,
    keys: Tensor | Sequence[Tensor],
    values: Tensor | Sequence[Tensor],
    *,
    occupancy: Sequence[int],
    depth: int | Sequence[int] = 0,
    block_of_depth: Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
) -> Tensor:
    """Attend from depth-d rows to the versions visible with `a` tokens in flight.

    k(t, T') = d + t - T'  if d + t - T' < a  else n            SPD (arXiv:2605.30852), Eqs. 2 and 3
    out_t    = softmax over T' <= t of q_t . K[block_of_depth[k], T'] / sqrt(D), times V
             = causal attention over block n with T' <= t - W, plus W = a - d diagonals

    For d = n this is plain causal attention over block n. Deviating from the paper, the fill rule
    also covers d > 0, by the distance to the newest token as in decoding.

    For memory order and dtypes see `banded_attention`. Adjacent examples with equal occupancy share
    one kernel call, so sort a batch by occupancy.

    Args:
        query_SNTD: query head h uses key head h // (N // J).
        keys: R blocks, each with keys at one depth, or at several (see `block_of_depth`). Give one
            tensor [R, B, J, T, D], or R tensors [B_r, J, T, D] with the first B_r examples if no
            later example sees block r.
        values: like keys.
        occupancy: B integers a in 1..n, tokens in flight per example.
        depth: d in 0..n for all rows, one sequence of rows per example. Or several depths, with
            sequences that follow one another. Depth d has one sequence for each example in block
            block_of_depth[d].
        block_of_depth: block for depths 0..n; default 0..R-1. Depths may share a block.
        lengths: document lengths in a packed row. The documents are then the examples, along the
            positions instead of the first axis (1 entry). This also applies to "first B_r" and
            "follow one another" above.

    Returns:
        out_SNTD. Examples with a <= d < n have no row at depth d and get zeros without gradient.
    """
    keys, values = ([x] if isinstance(x, Tensor) else list(x) for x in (keys, values))
    # Examples are batch rows, or documents along one packed row.
    axis = -4 if lengths is None else -2
    sizes = [size for x in keys for size in [x.shape[axis]] * (len(x) if x.ndim == 5 else 1)]
    blocks = tuple(range(len(sizes)) if block_of_depth is None else block_of_depth)
    _check(sizes, occupancy, depth, blocks, lengths)
    examples = _Examples(list(accumulate(lengths or [1] * len(occupancy), initial=0)), lengths)
    # One band per run of equal occupancy; several depths' sequences follow one another.
    if isinstance(depth, int):
        bands = _bands(occupancy, depth, blocks, examples)
    else:
        bands, first = [], 0
        for d in depth:
            # A block may hold only the first examples; the depth has rows for no others.
            size = sizes[blocks[d]]
            bands += _bands(occupancy[: examples.ends.index(size)], d, blocks, examples, first)
            first += size
    # A block may lack the last examples, so no band may use their keys.
    for band in bands:
        used = [r for r, _ in (*band.diagonals, band.causal)]
        stop = band.blocks[lengths is not None].stop
        assert all(sizes[r] >= stop for r in used), "block too short"
    return banded_attention(bands, query_SNTD, keys, values)


@dataclass(frozen=True)
class _Examples:
    """Places of the examples along their axis, with example b at ends[b] .. ends[b + 1]."""

    ends: list[int]
    lengths: Sequence[int] | None

    def place(self, start: int, stop: int, first: int = 0) -> Place:
        along = slice(first + self.ends[start], first + self.ends[stop])
        return Place(along) if self.lengths is None else Place(EVERY, along)

    def lengths_of(self, start: int, stop: int) -> tuple[int, ...] | None:
        return None if self.lengths is None else tuple(self.lengths[start:stop])


def _bands(
    occupancy: Sequence[int],
    depth: int,
    blocks: tuple[int, ...],
    examples: _Examples,
    first: int = 0,
) -> list[Band]:
    """Return bands for rows at one depth, located at ``first`` in the query."""
    n = len(blocks) - 1
    bands, start = [], 0
    for width, run in groupby(a - depth if depth < n else 0 for a in occupancy):
        stop = start + len(list(run))
        if width > 0 or depth == n:  # else no token of these examples has this depth
            bands.append(
                Band(
                    examples.place(start, stop, first),
                    examples.place(start, stop),
                    diagonals=tuple((blocks[depth + i], i) for i in range(width)),  # k = d + t - T'
                    causal=(blocks[n], width),  # older positions have left the pipeline: depth n
                    lengths=examples.lengths_of(start, stop),
                )
            )
        start = stop
    return bands


def _check(
    sizes: list[int],
    occupancy: Sequence[int],
    depth: int | Sequence[int],
    blocks: tuple[int, ...],
    lengths: Sequence[int] | None,
) -> None:
    n, R = len(blocks) - 1, len(sizes)
    B, depths = len(occupancy), [depth] if isinstance(depth, int) else depth
    assert lengths is None or sum(lengths) == max(sizes), f"lengths {lengths} of {max(sizes)} rows"
    assert (max(sizes) if lengths is None else len(lengths)) == B, (
        f"occupancy {occupancy}: not one per example"
    )
    assert all(1 <= a <= n for a in occupancy), f"occupancy {occupancy} outside 1..{n}"
    assert all(0 <= d <= n for d in depths), f"depth {depth} outside 0..{n}"
    assert all(0 <= r < R for r in blocks), f"block_of_depth {blocks} outside 0..{R - 1}"
