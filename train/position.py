"""Cut an epoch into batches, and keep the place in it if settings change between launches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from ..data_recipes.batch import length_bucketed_batches, packed_batches
from .reuse import repeat_windows


@dataclass(frozen=True)
class Cut:
    """Settings that decide how rows become batches."""

    batch_tokens: Annotated[int, Meta(ge=0)] = 0
    packing: bool = False
    group: Annotated[int, Meta(ge=1)] = 1
    reuse: Annotated[int, Meta(ge=1)] = 1


@dataclass(frozen=True)
class DonePart:
    """First batches of an epoch, or of the rows that earlier parts of it left."""

    cut: Cut
    num_batches: Annotated[int, Meta(ge=0)]


def batches_left(
    lengths: Sequence[int], seed: int, epoch: int, cut: Cut, done: Sequence[DonePart]
) -> list[list[int]]:
    """Return an epoch's batches of row indices without the rows in its parts ``done``."""
    # The seed, the epoch and the cuts decide the order, so a checkpoint needs only a place in it.
    rows = list(range(len(lengths)))
    for part in done:
        batches = _batches(lengths, rows, seed, epoch, part.cut)
        used = {row for batch in batches[: part.num_batches] for row in batch}
        rows = [row for row in rows if row not in used]
    return _batches(lengths, rows, seed, epoch, cut)


def _batches(
    lengths: Sequence[int], rows: list[int], seed: int, epoch: int, cut: Cut
) -> list[list[int]]:
    if not rows and lengths:
        return []
    make = packed_batches if cut.packing else length_bucketed_batches
    sizes = lengths if len(rows) == len(lengths) else [lengths[row] for row in rows]
    found = make(sizes, cut.batch_tokens, seed, epoch, cut.group)
    batches = [[rows[place] for place in batch] for batch in found]
    return repeat_windows(batches, cut.reuse, cut.group, seed, epoch)
