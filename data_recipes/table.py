"""Read rows in memory-mapped Arrow files by column, by row or by piece.

``datasets.Dataset`` can do this, too, but takes 70 MB and a second to import, mostly for pandas.

N is the row count, M the count of chosen rows.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow

from ..files import flush

PIECE = 10_000


class Rows:
    """Rows of Arrow batches with one schema. Rows can be left out, reordered and repeated."""

    def __init__(
        self, batches: Iterable[pyarrow.RecordBatch], chosen_N: np.ndarray | None = None
    ) -> None:
        """
        Args:
            chosen_N: row numbers, counted through all batches, or None for each row once.
        """
        self.batches = list(batches)
        self.starts = np.cumsum([0, *(batch.num_rows for batch in self.batches)])
        self.chosen_N = np.arange(self.starts[-1]) if chosen_N is None else chosen_N

    def __len__(self) -> int:
        return len(self.chosen_N)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[row] for row in range(len(self)))

    def __getitem__(self, key: Any) -> Any:
        """Return a column by name, a row by index, or all columns for some indices."""
        if isinstance(key, str):
            values = [value for batch in self.batches for value in batch[key].to_pylist()]
            return [values[row] for row in self.chosen_N.tolist()]
        if isinstance(key, int):
            (row,) = self.table([range(len(self))[key]]).to_pylist()
            return row
        return self.table(key).to_pydict()

    def select(self, index_M: np.ndarray) -> "Rows":
        return Rows(self.batches, self.chosen_N[index_M])

    def select_columns(self, names: Sequence[str]) -> "Rows":
        return Rows([batch.select(names) for batch in self.batches], self.chosen_N)

    @property
    def whole(self) -> pyarrow.Table:
        """Return all rows in the batches, chosen or not."""
        return pyarrow.Table.from_batches(self.batches)

    def table(self, index: Sequence[int] | np.ndarray | slice) -> pyarrow.Table:
        """Return rows as Arrow columns, without copying them."""
        index = index if isinstance(index, slice) else np.asarray(index, dtype=np.int64)
        rows_M = self.chosen_N[index]
        batch_M = np.searchsorted(self.starts, rows_M, side="right") - 1
        places = zip(batch_M.tolist(), (rows_M - self.starts[batch_M]).tolist(), strict=True)
        found = [self.batches[batch].slice(place, 1) for batch, place in places]
        return pyarrow.Table.from_batches(found, self.batches[0].schema)

    def pieces(self, name: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield a list column's lengths and joined values, for ``PIECE`` rows at a time."""
        column = self.select_columns([name])
        for start in range(0, len(self), PIECE):
            lists = column.table(slice(start, start + PIECE))[name].combine_chunks()
            yield np.diff(lists.offsets.to_numpy()), lists.flatten().to_numpy()


def row_lengths(rows: Rows) -> list[int]:
    return [length for lengths, _ in rows.pieces("input_ids") for length in lengths.tolist()]


def cached_rows(
    path: Path, schema: pyarrow.Schema, make: Callable[[], Iterator[pyarrow.RecordBatch]]
) -> Rows:
    """Return the rows in a file. If the file is missing, write it first with rows from ``make``."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another process may be making the same file.
        with TemporaryDirectory(dir=path.parent) as folder:
            place = Path(folder, path.name)
            with pyarrow.ipc.new_file(str(place), schema) as file:
                for batch in make():
                    file.write_batch(batch)
            flush(place)
            os.replace(place, path)
    reader = pyarrow.ipc.open_file(pyarrow.memory_map(str(path)))
    return Rows(reader.get_batch(index) for index in range(reader.num_record_batches))
